"""The conformance table: what every algorithm, with every kind of option, must keep.

A new algorithm or option is one row in `CASES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpg
from jaxpg.algorithms.common import INFO_FIELDS


class Case(NamedTuple):
    build: Callable[[], jaxpg.Algorithm]
    config: Any
    swept: str = "learning_rate"


def cartpole(**policy: Any) -> tuple[jaxpg.Env, jaxpg.Policy]:
    env = jaxpg.from_gymnax("CartPole-v1", max_steps_in_episode=6)
    return env, jaxpg.mlp_policy(env, hidden_sizes=(8,), **policy)


def pendulum(**policy: Any) -> tuple[jaxpg.Env, jaxpg.Policy]:
    env = jaxpg.from_gymnax("Pendulum-v1", max_steps_in_episode=5)
    return env, jaxpg.mlp_policy(env, hidden_sizes=(8,), **policy)


def recurrent() -> tuple[jaxpg.Env, jaxpg.Policy]:
    env = jaxpg.from_gymnax("CartPole-v1", max_steps_in_episode=6)
    return env, jaxpg.gru_policy(env, hidden_size=8, embed_sizes=(8,))


SMALL = {"num_envs": 4, "num_steps": 8}
PPO = {**SMALL, "num_epochs": 2, "num_minibatches": 2}

CASES = {
    "ppo": Case(lambda: jaxpg.ppo(*cartpole()), jaxpg.PPOConfig(**PPO), "clip_epsilon"),
    "ppo-everything": Case(
        lambda: jaxpg.ppo(*pendulum()),
        jaxpg.PPOConfig(
            **PPO,
            normalize_obs=True,
            normalize_rewards=True,
            normalize_advantages="batch",
            anneal_updates=10.0,
            annealed=("learning_rate", "clip_epsilon"),
            value_clip_epsilon=0.2,
            dual_clip=3.0,
            target_kl=0.05,
            ent_coef=0.01,
        ),
        "ent_coef",
    ),
    "ppo-kl": Case(
        lambda: jaxpg.ppo(*cartpole()),
        jaxpg.PPOConfig(**PPO, kl_coef=0.5, kl_direction="new_old"),
        "kl_coef",
    ),
    "ppo-kl-adaptive": Case(
        lambda: jaxpg.ppo(*pendulum(shared=True)),
        jaxpg.PPOConfig(**PPO, kl_coef=1.0, kl_target=0.01),
        "kl_target",
    ),
    "ppo-recurrent": Case(lambda: jaxpg.ppo(*recurrent()), jaxpg.PPOConfig(**PPO), "gae_lambda"),
    "reinforce": Case(
        lambda: jaxpg.reinforce(*cartpole()),
        jaxpg.ReinforceConfig(num_envs=4, baseline="ema", discount_gradient=True),
        "ema_decay",
    ),
    "reinforce-sequential": Case(
        lambda: jaxpg.reinforce(*pendulum()),
        jaxpg.ReinforceConfig(**SMALL, form="sequential", baseline="value", normalize_obs=True),
        "vf_coef",
    ),
    "actor_critic": Case(
        lambda: jaxpg.actor_critic(*pendulum()),
        jaxpg.ActorCriticConfig(**SMALL, advantage="n_step", ent_coef=0.01),
        "ent_coef",
    ),
    "actor_critic-recurrent": Case(
        lambda: jaxpg.actor_critic(*recurrent()),
        jaxpg.ActorCriticConfig(**SMALL, normalize_rewards=True),
        "gae_lambda",
    ),
    "actor_critic-action-values": Case(
        lambda: jaxpg.actor_critic(*cartpole(action_values=True)),
        jaxpg.ActorCriticConfig(**SMALL, advantage="action_value"),
        "vf_coef",
    ),
    "off_policy": Case(
        lambda: jaxpg.off_policy(*cartpole()),
        jaxpg.OffPolicyConfig(**SMALL, lag=2),
        "rho_clip",
    ),
    "off_policy-per-decision": Case(
        lambda: jaxpg.off_policy(*pendulum()),
        jaxpg.OffPolicyConfig(**SMALL, correction="per_decision", ratio_clip=2.0),
        "ratio_clip",
    ),
    "trpo": Case(
        lambda: jaxpg.trpo(*pendulum()),
        jaxpg.TRPOConfig(**SMALL, critic_epochs=2, critic_minibatches=2, cg_iterations=3),
        "max_kl",
    ),
    "grpo": Case(
        lambda: jaxpg.grpo(*cartpole()),
        jaxpg.GRPOConfig(
            num_envs=8,
            group_size=4,
            num_epochs=2,
            num_minibatches=2,
            kl_coef=0.1,
            ref_refresh_updates=2.0,
        ),
        "kl_coef",
    ),
    "grpo-per-step": Case(
        lambda: jaxpg.grpo(*pendulum()),
        jaxpg.GRPOConfig(
            num_envs=8,
            num_steps=6,
            group_size=4,
            form="per_step",
            aggregation="sequence",
            minibatch_of="groups",
            num_epochs=1,
            num_minibatches=2,
        ),
        "clip_epsilon",
    ),
}


class Built(NamedTuple):
    algorithm: jaxpg.Algorithm
    config: Any
    swept: str
    init: Callable  # jitted
    step: Callable  # jitted, counts its traces
    traces: list
    state: jaxpg.TrainState


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Built:
    build, config, swept = CASES[request.param]
    algorithm = build()
    traces: list[int] = []

    def step(state, config):
        traces.append(1)
        return algorithm.step(state, config)

    init = jax.jit(algorithm.init)
    state = init(jax.random.key(0), config)
    return Built(algorithm, config, swept, init, jax.jit(step), traces, state)


def assert_equal(tree: Any, other: Any, **tolerance: float) -> None:
    def data(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    def compare(x, y):
        if tolerance:
            np.testing.assert_allclose(data(x), data(y), **tolerance)
        else:
            np.testing.assert_array_equal(data(x), data(y))

    jax.tree.map(compare, tree, other)


def test_step_returns_the_state_as_it_got_it(case):
    after, info = jax.eval_shape(case.algorithm.step, case.state, case.config)
    before = jax.eval_shape(lambda: jax.tree.map(lambda x: x, case.state))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)
        assert not x.weak_type
    assert set(INFO_FIELDS) <= set(info)
    for name, x in info.items():
        assert x.shape == () and x.dtype == jnp.float32, name


def test_neither_a_second_call_nor_a_changed_number_retraces(case):
    _, config, swept, _, step, traces, state = case
    state, info = step(state, config)
    count = len(traces)
    state, _ = step(state, config)
    changed = config.replace(learning_rate=0.5 * config.learning_rate)
    changed = changed.replace(**{swept: 0.5 * getattr(config, swept)})
    state, _ = step(state, changed)
    assert len(traces) == count
    assert all(np.isfinite(x) for x in info.values())
    assert float(info["env_steps"]) == state.runner.reset.shape[0] * case_steps(case)


def case_steps(case: Built) -> int:
    """Steps of one environment in a rollout of this case."""
    return case.config.num_steps or case.algorithm.env.time_limit


def test_vmap_over_seeds_and_over_settings_equals_separate_runs(case):
    algorithm, config, swept, init, step, _, _ = case
    keys = jax.random.split(jax.random.key(5), 2)
    value = float(getattr(config, swept))
    values = {"learning_rate": [1e-3, 1e-2], swept: [value, 0.7 * value]}
    configs, axes = jaxpg.sweep(config, **values)
    states = jax.jit(jax.vmap(algorithm.init, (0, axes)))(keys, configs)
    both = jax.jit(jax.vmap(algorithm.step, (0, axes)))
    # numbers of Python's, as in the case's own config: what is compiled already serves them
    ones = [config.replace(**{name: x[i] for name, x in values.items()}) for i in range(2)]
    alone = [(init(key, one), one) for key, one in zip(keys, ones, strict=True)]
    for _ in range(2):
        states, infos = both(states, configs)
        stepped = [step(state, one) for state, one in alone]
        alone = [(state, one) for (state, _), (_, one) in zip(stepped, alone, strict=True)]
        for i, (state, info) in enumerate(stepped):
            for name, x in info.items():
                np.testing.assert_allclose(x, infos[name][i], rtol=2e-4, atol=1e-5, err_msg=name)
            assert_equal(state.params, pick(states.params, i), rtol=1e-5, atol=1e-6)


def pick(tree: Any, i: int) -> Any:
    """Entry `i` of every leaf that has a leading axis."""
    return jax.tree.map(lambda x: x[i] if jnp.ndim(x) else x, tree)


def test_the_state_is_all_there_is_and_keys_decide(case):
    _, config, _, init, step, _, state = case
    once, _ = step(state, config)
    twice, _ = step(once, config)
    # by way of the host, as a checkpoint would: every bit of what follows is in the state
    words = once._replace(key=jax.random.key_data(once.key))
    restored = jax.tree.map(jnp.asarray, jax.tree.map(np.array, words))
    restored = restored._replace(key=jax.random.wrap_key_data(restored.key))
    assert_equal(step(restored, config)[0], twice)
    assert_equal(init(jax.random.key(0), config), state)
    other = step(init(jax.random.key(1), config), config)[0]
    pairs = zip(jax.tree.leaves(once.params), jax.tree.leaves(other.params), strict=True)
    assert any(not np.array_equal(x, y) for x, y in pairs)


def test_the_state_can_be_donated_and_the_key_survives(case):
    algorithm, config, *_ = case
    key = jax.random.key(11)
    state = algorithm.init(key, config)
    leaves = jax.tree.leaves(state._replace(key=jax.random.key_data(state.key)))
    pointers = [x.unsafe_buffer_pointer() for x in leaves if x.size]
    assert len(pointers) == len(set(pointers))
    jax.jit(lambda state: jax.tree.map(lambda x: x, state), donate_argnums=0)(state)
    jax.random.normal(key)  # still there
    legacy = algorithm.init(jax.random.PRNGKey(11), config)
    assert_equal(legacy, algorithm.init(key, config))


def test_evaluation_acts_greedily_or_by_sampling(case):
    algorithm, *_, state = case

    @jax.jit
    def both(state):
        key = jax.random.key(0)
        return [
            jaxpg.evaluate(algorithm, state, key, num_episodes=3, deterministic=greedy)
            for greedy in (True, False)
        ]

    for returns in both(state):
        assert returns.shape == (3,) and bool(jnp.all(jnp.isfinite(returns)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": 1.5}, r"gamma must lie in \[0, 1\], got 1.5"),
        ({"num_envs": 0}, "num_envs must be at least 1, got 0"),
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"annealed": ("nonsense",), "anneal_updates": 5.0}, "nonsense"),
    ],
)
def test_bad_settings_raise_in_init(case, changes, message):
    algorithm, config, *_ = case
    with pytest.raises(ValueError, match=message):
        algorithm.init(jax.random.key(0), config.replace(**changes))
