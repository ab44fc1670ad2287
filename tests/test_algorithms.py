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
}


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> tuple:
    """The algorithm, its config, one jitted step that counts its traces, and a first state."""
    build, config, swept = CASES[request.param]
    algorithm = build()
    traces = []

    def step(state, config):
        traces.append(1)
        return algorithm.step(state, config)

    state = jax.jit(algorithm.init)(jax.random.key(0), config)
    return algorithm, config, swept, jax.jit(step), traces, state


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
    algorithm, config, _, _, _, state = case
    after, info = jax.eval_shape(algorithm.step, state, config)
    before = jax.eval_shape(lambda: jax.tree.map(lambda x: x, state))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)
        assert not x.weak_type
    assert set(INFO_FIELDS) <= set(info)
    for name, x in info.items():
        assert x.shape == () and x.dtype == jnp.float32, name


def test_neither_a_second_call_nor_a_changed_number_retraces(case):
    _, config, swept, step, traces, state = case
    state, info = step(state, config)
    count = len(traces)
    state, _ = step(state, config)
    changed = config.replace(learning_rate=0.5 * config.learning_rate)
    changed = changed.replace(**{swept: 0.5 * getattr(config, swept)})
    state, _ = step(state, changed)
    assert len(traces) == count
    assert all(np.isfinite(x) for x in info.values())
    assert float(info["env_steps"]) == config.num_envs * config.num_steps


def test_vmap_over_seeds_and_over_a_setting_equals_separate_runs(case):
    algorithm, config, swept, step, _, _ = case
    keys = jax.random.split(jax.random.key(5), 2)
    value = float(getattr(config, swept))
    configs, axes = jaxpg.sweep(
        config,
        learning_rate=[1e-3, 1e-2],
        **({} if swept == "learning_rate" else {swept: [value, 0.7 * value]}),
    )

    @jax.jit
    def both(keys, configs):
        def one(key, config):
            return jaxpg.train(algorithm, key, config, 2)

        return jax.vmap(one, (0, axes))(keys, configs)

    states, infos = both(keys, configs)
    for i in range(2):
        one_config = jax.tree.map(lambda x, i=i: x[i] if jnp.ndim(x) else x, configs)
        state = algorithm.init(keys[i], one_config)
        for update in range(2):
            state, info = step(state, one_config)
            for name, x in info.items():
                np.testing.assert_allclose(
                    x, infos[name][i, update], rtol=2e-4, atol=1e-5, err_msg=name
                )
        params = jax.tree.map(lambda x, i=i: x[i], states.params)
        assert_equal(state.params, params, rtol=1e-5, atol=1e-6)


def test_resume_is_continuation_and_keys_decide(case):
    algorithm, config, _, _, _, state = case
    train = jax.jit(jaxpg.train, static_argnums=(0, 3))
    # two updates at once, and one then one, are the same to the bit
    whole, _ = train(algorithm, jax.random.key(0), config, 2)
    again, _ = train(algorithm, jax.random.key(0), config, 2)
    assert_equal(whole, again)
    half, _ = train(algorithm, jax.random.key(0), config, 1)
    resumed, _ = jaxpg.train(algorithm, None, config, 1, state=half)
    assert_equal(whole, resumed)
    other = algorithm.init(jax.random.key(1), config)
    differs = [
        not np.array_equal(x, y)
        for x, y in zip(jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True)
    ]
    assert any(differs)


def test_the_state_can_be_donated_and_the_key_survives(case):
    algorithm, config, _, _, _, _ = case
    key = jax.random.key(11)
    state = algorithm.init(key, config)
    pointers = [
        x.unsafe_buffer_pointer()
        for x in jax.tree.leaves(state._replace(key=jax.random.key_data(state.key)))
        if x.size
    ]
    assert len(pointers) == len(set(pointers))
    donating = jax.jit(lambda state: jax.tree.map(lambda x: x, state), donate_argnums=0)
    donating(state)
    jax.random.normal(key)  # still there
    legacy = algorithm.init(jax.random.PRNGKey(11), config)
    assert_equal(legacy, algorithm.init(key, config))


def test_evaluation_acts_greedily_or_by_sampling(case):
    algorithm, _, _, _, _, state = case
    evaluate = jax.jit(
        jaxpg.evaluate, static_argnums=0, static_argnames=("num_episodes", "deterministic")
    )
    greedy = evaluate(algorithm, state, jax.random.key(0), num_episodes=3)
    sampled = evaluate(algorithm, state, jax.random.key(0), num_episodes=3, deterministic=False)
    assert greedy.shape == (3,) and bool(jnp.all(jnp.isfinite(greedy) & jnp.isfinite(sampled)))


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
