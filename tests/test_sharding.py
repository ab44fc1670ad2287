"""Shardings change where numbers are computed, not which. `conftest` gives two CPU devices."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpg
from jaxpg.sharding import device_mesh, map_in_chunks, shard_environments, shard_leading_axis

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
