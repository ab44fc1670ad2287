"""Rollouts against hand-stepped environments whose every number is known."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.rollouts import init_runner, replay, rollout
from jaxpg.types import Box, Discrete, Distribution, Env, EnvStep, Policy

# An environment that counts: obs = [episode seed, time]; reward = time; each episode of length
# `length` ends by truncation, or by termination if its seed is odd.


def counting_env(length: int, *, time_limit: int | None = None, kind: str = "truncate") -> Env:
    def reset(key):
        seed = jax.random.randint(key, (), 0, 1000).astype(jnp.float32)
        return (seed, jnp.int32(0)), jnp.stack([seed, jnp.float32(0)])

    def step(key, state, action):
        seed, time = state
        time = time + 1
        end = time >= length
        final_obs = jnp.stack([seed, time.astype(jnp.float32)])
        (new_seed, zero), first_obs = reset(key)
        odd = seed % 2 == 1
        terminated = end & (odd if kind == "mixed" else kind == "terminate")
        truncated = end & ((~odd) if kind == "mixed" else kind in ("truncate", "both"))
        if kind == "both":
            terminated = truncated = end
        state = (jnp.where(end, new_seed, seed), jnp.where(end, zero, time))
        obs = jnp.where(end, first_obs, final_obs)
        reward = time.astype(jnp.float32)
        return state, EnvStep(obs, reward, terminated, truncated, final_obs)

    return Env(reset, step, Box(0, 1e9, (2,)), Discrete(2), time_limit or length)


def bernoulli() -> Distribution:
    return Distribution(
        sample=lambda key, p: jax.random.bernoulli(key, jax.nn.sigmoid(p)).astype(jnp.int32),
        mode=lambda p: (p > 0).astype(jnp.int32),
        action=lambda x: x,
        log_prob=lambda p, x: jnp.where(x == 1, jax.nn.log_sigmoid(p), jax.nn.log_sigmoid(-p)),
        entropy=lambda p: jnp.zeros_like(p),
        kl=lambda p, q: jnp.zeros_like(p),
    )


def value_of(obs):
    """A value that identifies the observation: 1000 · seed + time."""
    return 1000 * obs[..., 0] + obs[..., 1]


FEED_FORWARD = Policy(
    init=lambda key, obs: {},
    apply=lambda params, obs: (jnp.zeros(obs.shape[0]), value_of(obs)),
    distribution=bernoulli(),
)


def _recurrent_apply(params, carry, obs, reset):
    # the carry counts the steps since the episode began; the value shows it
    carry = jnp.where(reset, 0.0, carry) + 1.0
    return carry, (jnp.zeros(obs.shape[0]), value_of(obs) + carry / 100)


RECURRENT = Policy(
    init=lambda key, obs: {},
    apply=_recurrent_apply,
    distribution=bernoulli(),
    initial_carry=lambda num_envs: jnp.zeros(num_envs),
)


def run(env, policy, *, num_steps, num_envs=3, before=0, key=None):
    @jax.jit
    def go(key):
        runner = init_runner(key, env, policy, num_envs)
        if before:
            runner = rollout(key, env, policy, {}, runner, num_steps=before)[0]
        next_key = jax.random.fold_in(key, 1)
        return runner, *rollout(next_key, env, policy, {}, runner, num_steps=num_steps)

    return go(jax.random.key(3) if key is None else key)


@pytest.mark.parametrize("kind", ["truncate", "mixed"])
@pytest.mark.parametrize(
    ("length", "num_steps", "before"), [(5, 4, 0), (5, 5, 2), (3, 11, 1), (4, 12, 3), (1, 6, 0)]
)
def test_next_values_are_those_of_the_true_successor(kind, length, num_steps, before):
    env = counting_env(length, kind=kind)
    _, _, rows, next_values, episodes = run(env, FEED_FORWARD, num_steps=num_steps, before=before)
    # inside an episode the successor is one step on, at its end too: never the next episode
    expected = np.asarray(value_of(rows.obs)) + 1
    alive = ~np.asarray(rows.terminated)
    np.testing.assert_array_equal(np.asarray(next_values)[alive], expected[alive])
    assert float(episodes.unbootstrapped) == 0
    assert int(rows.truncated.sum()) > 0 or num_steps < length


@pytest.mark.parametrize("length", [3, 4])
def test_cheap_next_values_equal_the_full_pass(length):
    promised, unpromised = counting_env(length), counting_env(length)._replace(time_limit=None)
    cheap = run(promised, FEED_FORWARD, num_steps=10, before=1)[3]
    full = run(unpromised, FEED_FORWARD, num_steps=10, before=1)[3]
    np.testing.assert_array_equal(cheap, full)


@pytest.mark.parametrize("time_limit", [3, None])
def test_a_recurrent_critic_values_the_successor_with_the_carry_after_the_row(time_limit):
    env = counting_env(3)._replace(time_limit=time_limit)
    _, _, rows, next_values, _ = run(env, RECURRENT, num_steps=7, before=1)
    # the carry at time t of an episode is t + 1, at its successor t + 2, resets or not
    time = np.asarray(rows.obs[..., 1])
    expected = np.asarray(value_of(rows.obs)) + 1 + (time + 2) / 100
    np.testing.assert_allclose(next_values, expected, rtol=1e-6)


def test_both_flags_need_no_kept_observation():
    env = counting_env(2, kind="both")
    _, _, rows, next_values, episodes = run(env, FEED_FORWARD, num_steps=6)
    assert bool(jnp.all(rows.terminated == rows.truncated))
    assert float(episodes.unbootstrapped) == 0
    assert np.all(np.isfinite(next_values))


def test_a_broken_promise_is_counted():
    env = counting_env(2, time_limit=6)  # truncates every 2 steps, promised 6
    _, _, rows, next_values, episodes = run(env, FEED_FORWARD, num_steps=6, num_envs=2)
    assert float(episodes.unbootstrapped) == 2 * 2  # 3 truncations a column, 1 slot
    np.testing.assert_array_equal(next_values[1], value_of(rows.obs)[1] + 1)  # kept
    np.testing.assert_array_equal(next_values[3], value_of(rows.obs)[3])  # stands in


def test_episode_sums_and_runner():
    env = counting_env(3)
    runner, after, rows, _, episodes = run(env, FEED_FORWARD, num_steps=8, num_envs=4)
    assert bool(jnp.all(runner.reset)) and bool(jnp.all(rows.reset[0]))
    # two episodes of 1 + 2 + 3 a column ended; two steps of the third are under way
    assert float(episodes.count) == 8
    assert float(episodes.return_sum) == 8 * 6
    assert float(episodes.length_sum) == 8 * 3
    np.testing.assert_array_equal(after.episode_return, np.full(4, 1.0 + 2.0))
    np.testing.assert_array_equal(after.episode_length, np.full(4, 2))
    np.testing.assert_array_equal(rows.reset[:, 0], [1, 0, 0, 1, 0, 0, 1, 0])
    np.testing.assert_array_equal(rows.reward[:, 0], [1, 2, 3, 1, 2, 3, 1, 2])


def test_two_rollouts_are_one_long_one_in_state():
    env = counting_env(5)
    runner = init_runner(jax.random.key(0), env, FEED_FORWARD, 2)
    half = runner
    for i in range(2):
        half, rows, _, _ = rollout(jax.random.key(i), env, FEED_FORWARD, {}, half, num_steps=4)
        np.testing.assert_array_equal(rows.obs[0, :, 1], [0, 0] if i == 0 else [4, 4])
    np.testing.assert_array_equal(half.episode_length, [3, 3])


def test_jit_equals_eager_and_vmap_equals_separate_runs():
    env = counting_env(3, kind="mixed")

    def go(key):
        runner = init_runner(key, env, FEED_FORWARD, 2)
        return rollout(key, env, FEED_FORWARD, {}, runner, num_steps=5)

    keys = jax.random.split(jax.random.key(7), 3)
    separate = [jax.jit(go)(k) for k in keys]
    together = jax.jit(jax.vmap(go))(keys)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *separate)
    jax.tree.map(np.testing.assert_array_equal, together, stacked)
    assert not np.array_equal(separate[0][1].action, separate[1][1].action)


def test_groups_share_a_start_state():
    env = counting_env(50)
    runner = init_runner(jax.random.key(0), env, FEED_FORWARD, 6, group_size=3)
    seeds = np.asarray(runner.obs[:, 0])
    assert len(set(seeds[:3])) == len(set(seeds[3:])) == 1 and seeds[0] != seeds[3]
    with pytest.raises(ValueError, match="group_size=4 does not divide num_envs=6"):
        init_runner(jax.random.key(0), env, FEED_FORWARD, 6, group_size=4)


@pytest.mark.parametrize("policy", [FEED_FORWARD, RECURRENT], ids=["feed-forward", "recurrent"])
def test_replay_gives_the_values_of_the_rollout(policy):
    env = counting_env(3)
    before, _, rows, _, _ = run(env, policy, num_steps=7, before=2)
    _, values = replay(policy, {}, rows.obs, before.carry, rows.reset)
    np.testing.assert_array_equal(values, rows.value)


def test_replay_takes_a_flat_batch():
    env = counting_env(3)
    _, _, rows, _, _ = run(env, FEED_FORWARD, num_steps=4)
    flat = rows.obs.reshape(-1, 2)
    np.testing.assert_array_equal(replay(FEED_FORWARD, {}, flat)[1], rows.value.reshape(-1))


def test_kept_slots_are_as_few_as_promised():
    env = counting_env(5)
    shapes = jax.make_jaxpr(lambda key: run(env, FEED_FORWARD, num_steps=12, key=key)[3])(
        jax.random.key(0)
    )
    assert f"f32[{math.ceil(12 / 5)},3,2]" in str(shapes)  # kept observations
    assert "f32[12,3,2]" in str(shapes)  # the observations themselves, once
    with pytest.raises(ValueError, match="num_steps must be at least 1"):
        run(env, FEED_FORWARD, num_steps=0)
