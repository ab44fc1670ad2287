"""Shardings change where numbers are computed, not which. `conftest` gives two CPU devices."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpg
from jaxpg.sharding import (
    data_parallel,
    device_mesh,
    map_in_chunks,
    shard_environments,
    shard_leading_axis,
)

COLLECTIVES = (
    r"\b(?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


@pytest.fixture(scope="module")
def setting():
    env = jaxpg.from_gymnax("CartPole-v1", max_steps_in_episode=6)
    algorithm = jaxpg.ppo(env, jaxpg.mlp_policy(env, hidden_sizes=(8,)))
    return algorithm, jaxpg.PPOConfig(num_envs=4, num_steps=8, num_epochs=1, num_minibatches=2)


def test_seeds_spread_over_devices_without_communication(setting):
    algorithm, config = setting
    mesh = device_mesh()
    assert mesh.size == 2
    keys = jax.random.split(jax.random.key(0), 4)

    def run(key):
        return jaxpg.train(algorithm, key, config, 2)[0].params

    whole = jax.jit(jax.vmap(run))(keys)
    spread_keys = shard_leading_axis(keys, mesh)
    compiled = jax.jit(jax.vmap(run)).lower(spread_keys).compile()
    assert not re.findall(COLLECTIVES, compiled.as_text())
    spread = compiled(spread_keys)
    assert all(len(x.sharding.device_set) == 2 for x in jax.tree.leaves(spread))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), whole, spread)


def test_data_parallel_step_equals_one_device(setting):
    algorithm, config = setting
    state = algorithm.init(jax.random.key(0), config)
    spread = shard_environments(state, device_mesh())
    assert len(spread.runner.obs.sharding.device_set) == 2
    assert spread.runner.obs.addressable_shards[0].data.shape == (2, 4)
    step = jax.jit(algorithm.step)
    for _ in range(2):
        state, info = step(state, config)
        spread, spread_info = step(spread, config)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6),
        (state.params, info),
        (spread.params, spread_info),
    )


@pytest.fixture
def mesh():
    return device_mesh()


@pytest.fixture(scope="module")
def descent():
    """One step of plain gradient descent by 1 an update: a policy, PPO and its config."""
    env = jaxpg.from_gymnax("CartPole-v1", max_steps_in_episode=6)
    policy = jaxpg.mlp_policy(env, hidden_sizes=(8,))
    config = jaxpg.PPOConfig(
        num_envs=4, num_steps=8, num_epochs=1, num_minibatches=1, normalize_advantages=None
    )
    return policy, jaxpg.ppo(env, policy, optimizer=lambda config: optax.sgd(1.0)), config


def replicas_apart(algorithm, state, config):
    """The step that each of two devices would make alone, with its rows and its randomness."""
    next_key, key = jax.random.split(state.key)
    size = config.num_envs // 2
    local = config.replace(num_envs=size)
    steps = []
    for d in range(2):
        runner = jax.tree.map(lambda x, d=d: x[d * size : (d + 1) * size], state.runner)
        own = state._replace(key=jax.random.fold_in(key, d), runner=runner)
        steps.append(jax.jit(algorithm.step)(own, local))
    return next_key, steps


def test_data_parallel_steps_along_the_mean_gradient(descent, mesh):
    """Plain gradient descent by 1: parameters apart are θ − g_d, and together θ − (g_1 + g_2)/2."""
    _, algorithm, config = descent
    state = algorithm.init(jax.random.key(3), config)
    parallel = data_parallel(algorithm, mesh)
    after, info = jax.jit(parallel.step)(shard_environments(state, mesh), config)
    next_key, ((one, info_one), (two, info_two)) = replicas_apart(algorithm, state, config)
    moved = jax.tree.map(lambda x, y: x - y, after.params, state.params)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(moved)) > 1e-3
    jax.tree.map(
        lambda x, a, b: np.testing.assert_allclose(x, (a + b) / 2, rtol=1e-5, atol=1e-6),
        after.params,
        one.params,
        two.params,
    )
    jax.tree.map(
        lambda x, a, b: np.testing.assert_array_equal(x, jnp.concatenate([a, b])),
        after.runner.obs,
        one.runner.obs,
        two.runner.obs,
    )
    np.testing.assert_array_equal(*map(jax.random.key_data, (after.key, next_key)))
    for name in ("episode_return_sum", "episode_count", "env_steps", "live_steps"):
        np.testing.assert_allclose(info[name], info_one[name] + info_two[name], rtol=1e-6)
    for name in ("value_loss", "entropy"):
        np.testing.assert_allclose(info[name], (info_one[name] + info_two[name]) / 2, rtol=1e-5)
    assert float(info["env_steps"]) == 32


def test_the_gradient_is_that_of_all_rows_at_once(descent, mesh):
    """Two devices with 16 rows each descend as one with 32, not N times as far."""
    policy, algorithm, config = descent
    env = algorithm.env
    parallel = data_parallel(algorithm, mesh)
    state = parallel.init(jax.random.key(3), config)
    after, info = jax.jit(parallel.step)(state, config)

    # the rollouts of both devices, made into the loss of PPO by hand
    _, key = jax.random.split(state.key)
    batches = []
    for d in range(2):
        names = jax.random.split(jax.random.fold_in(key, d), 3)
        runner = jax.tree.map(lambda x, d=d: x[2 * d : 2 * d + 2], state.runner)
        batches.append(jaxpg.rollout(names[1], env, policy, state.params, runner, num_steps=8)[1:3])
    rows, next_values = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), *batches)
    advantages = jaxpg.gae(
        rows.reward,
        rows.value,
        next_values,
        rows.terminated,
        rows.truncated,
        gamma=config.gamma,
        lambda_=config.gae_lambda,
    )

    def loss(params):
        logits, values = jaxpg.replay(policy, params, rows.obs, reset=rows.reset)
        return jaxpg.ppo_clip_loss(
            policy.distribution.log_prob(logits, rows.action),
            rows.log_prob,
            advantages,
            values,
            advantages + rows.value,
            entropies=policy.distribution.entropy(logits),
        )[0]

    gradient = jax.grad(loss)(state.params)
    jax.tree.map(
        lambda x, new, g: np.testing.assert_allclose(x - new, g, rtol=1e-4, atol=1e-6),
        state.params,
        after.params,
        gradient,
    )
    np.testing.assert_allclose(info["grad_norm"], optax.tree.norm(gradient), rtol=1e-5)
    residual = np.var(np.asarray(advantages))
    explained = 1 - residual / np.var(np.asarray(advantages + rows.value))
    # 1 − ratio: float32 knows it to the rounding of 1
    np.testing.assert_allclose(info["explained_variance"], explained, atol=1e-6)


def replicated_cases():
    env = jaxpg.from_gymnax("CartPole-v1", max_steps_in_episode=6)
    mlp = jaxpg.mlp_policy(env, hidden_sizes=(8,))
    sizes = {"num_envs": 8, "num_steps": 8}
    normal = {"normalize_obs": True, "normalize_rewards": True}
    ppo = jaxpg.PPOConfig(num_epochs=2, num_minibatches=2, **sizes)
    return {
        "ppo": (jaxpg.ppo(env, mlp), ppo),
        "ppo, early stop": (jaxpg.ppo(env, mlp), ppo.replace(target_kl=1e-5, learning_rate=0.01)),
        "ppo, adaptive KL": (jaxpg.ppo(env, mlp), ppo.replace(kl_coef=0.5, kl_target=1e-5)),
        "ppo, normalised": (jaxpg.ppo(env, mlp), ppo.replace(**normal)),
        "ppo, recurrent": (jaxpg.ppo(env, jaxpg.gru_policy(env, hidden_size=8)), ppo),
        "actor_critic": (
            jaxpg.actor_critic(env, mlp),
            jaxpg.ActorCriticConfig(**sizes, **normal),
        ),
        "grpo": (  # on episodes long enough to differ in return
            jaxpg.grpo(jaxpg.from_gymnax("CartPole-v1", max_steps_in_episode=40), mlp),
            jaxpg.GRPOConfig(num_envs=8, group_size=2, num_minibatches=2, kl_coef=0.1),
        ),
    }


@pytest.mark.parametrize("name", replicated_cases())
def test_replicas_stay_the_same(name, mesh):
    """What is on every device is the same there; the state comes back where it was put."""
    algorithm, config = replicated_cases()[name]
    parallel = data_parallel(algorithm, mesh)
    state = parallel.init(jax.random.key(1), config)
    # a compiled program refuses a state that lies elsewhere
    step = jax.jit(parallel.step, donate_argnums=0).lower(state, config).compile()
    before = [np.array(x) for x in jax.tree.leaves(state.params)]
    for _ in range(3):
        state, info = step(state, config)
    assert state.runner.obs.addressable_shards[0].data.shape == (4, 4)
    shared = (state.params, state.opt_state, state.extra, state.update)
    if config.normalize_obs:
        returns = state.statistics.returns
        assert returns.discounted.addressable_shards[0].data.shape == (4,)
        shared += (state.statistics.obs, returns._replace(discounted=()))
    for leaf in jax.tree.leaves(shared):
        one, two = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        np.testing.assert_array_equal(one, two)
    after = [np.asarray(x) for x in jax.tree.leaves(state.params)]
    assert any((x != y).any() for x, y in zip(before, after, strict=True))
    assert all(np.isfinite(x) for x in info.values())
    assert float(info["env_steps"]) == (320 if name == "grpo" else 64)
    if name == "ppo, early stop":
        assert 0 < float(info["minibatches_applied"]) < 1


def test_data_parallel_trains_many_settings_and_evaluates(mesh):
    """`train`, `vmap` over configs and `evaluate` treat it as any algorithm."""
    algorithm, config = replicated_cases()["ppo"]
    parallel = data_parallel(algorithm, mesh)
    configs, axes = jaxpg.sweep(config, learning_rate=[1e-3, 1e-2])
    key = jax.random.key(0)

    def run(config):
        return jaxpg.train(parallel, key, config, 2)

    states, infos = jax.jit(jax.vmap(run, in_axes=(axes,)))(configs)
    state, info = jax.jit(run)(config.replace(learning_rate=1e-2))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x[1], y, rtol=1e-4, atol=1e-6),
        (states.params, infos),
        (state.params, info),
    )
    returns = jaxpg.evaluate(parallel, state, key, num_episodes=4)
    assert returns.shape == (4,) and bool((returns >= 1).all())


def test_what_data_parallel_refuses(mesh):
    env = jaxpg.from_gymnax("CartPole-v1")
    policy = jaxpg.mlp_policy(env, hidden_sizes=(8,))
    for algorithm in (jaxpg.reinforce(env, policy), jaxpg.off_policy(env, policy)):
        with pytest.raises(TypeError, match="pmean"):
            data_parallel(algorithm, mesh)
    key = jax.random.key(0)
    ppo = data_parallel(jaxpg.ppo(env, policy), mesh)
    with pytest.raises(ValueError, match="number of devices=2 does not divide num_envs=3"):
        ppo.init(key, jaxpg.PPOConfig(num_envs=3))
    with pytest.raises(ValueError, match=r"num_minibatches=4 does not divide .*=2"):
        ppo.init(key, jaxpg.PPOConfig(num_envs=4, num_steps=1))
    grpo = data_parallel(jaxpg.grpo(env, policy), mesh)
    with pytest.raises(ValueError, match="group_size=4 does not divide num_envs=2"):
        grpo.init(key, jaxpg.GRPOConfig(num_envs=4, group_size=4))


def test_chunks_are_vmap_in_pieces():
    entries = {"x": jnp.arange(8.0), "y": jnp.arange(16.0).reshape(8, 2)}

    def fn(entry):
        return entry["x"] * entry["y"], entry["x"] + 1

    expected = jax.vmap(fn)(entries)
    for mesh in (None, device_mesh()):
        mapped = jax.jit(map_in_chunks(fn, chunk_size=4, mesh=mesh))
        jax.tree.map(np.testing.assert_array_equal, mapped(entries), expected)
    spread = shard_leading_axis(entries, device_mesh())
    compiled = jax.jit(map_in_chunks(fn, chunk_size=4, mesh=device_mesh())).lower(spread).compile()
    assert not re.findall(COLLECTIVES, compiled.as_text())


def test_sizes_that_do_not_divide():
    mesh = device_mesh()
    with pytest.raises(ValueError, match="number of devices=2 does not divide leading axis=3"):
        shard_leading_axis(jnp.ones(3), mesh)
    with pytest.raises(ValueError, match="chunk_size=4 does not divide leading axis=6"):
        map_in_chunks(jnp.sin, chunk_size=4)(jnp.ones(6))
    with pytest.raises(ValueError, match="number of devices=2 does not divide chunk_size=3"):
        map_in_chunks(jnp.sin, chunk_size=3, mesh=mesh)
    with pytest.raises(ValueError, match="num_envs"):
        env = jaxpg.from_gymnax("CartPole-v1")
        algorithm = jaxpg.ppo(env, jaxpg.mlp_policy(env, hidden_sizes=(8,)))
        config = jaxpg.PPOConfig(num_envs=3, num_steps=4)
        shard_environments(algorithm.init(jax.random.key(0), config), mesh)
