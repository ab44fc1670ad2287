"""Floor 3: environments stepped by a policy in one `lax.scan`, and policies replayed on its rows.

Row ``t`` of everything returned follows the index contract of `jaxpg.returns`. ``T`` time steps,
``B`` environments, ``K`` kept final observations a column.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxpg._checks import divides, positive_int
from jaxpg.types import (
    Env,
    EnvStep,
    Episodes,
    Key,
    Policy,
    PyTree,
    Runner,
    Transition,
    reset_where_done,
    split_key,
)


def apply_policy(
    policy: Policy, params: PyTree, carry: PyTree, obs: PyTree, reset: Array
) -> tuple[PyTree, PyTree, Array]:
    """One step of a feed-forward or recurrent policy: ``(carry, dist_params, value)``.

    Args:
        policy: the policy; a feed-forward one ignores `carry` and `reset`.
        params: its parameters.
        carry: ``[N, …]`` recurrent state, ``()`` for a feed-forward policy.
        obs: ``[N, …]`` observations.
        reset: ``[N]`` whether the observation starts an episode.

    Returns:
        The new carry, the distribution's parameters ``[N, …]`` and the values ``[N]``.
    """
    if policy.initial_carry is None:
        dist_params, value = policy.apply(params, obs)
    else:
        carry, (dist_params, value) = policy.apply(params, carry, obs, reset)
    return carry, dist_params, value


def replay(
    policy: Policy, params: PyTree, obs: PyTree, carry: PyTree = (), reset: Array | None = None
) -> tuple[PyTree, Array]:
    """The distribution's parameters and values of stored observations, differentiably.

    A feed-forward policy sees the rows in one batch; a recurrent one is scanned over time from
    the carry that it had when the rollout began, zeroed exactly where an episode starts.

    Args:
        policy: the policy.
        params: its parameters.
        obs: ``[N, …]``, or ``[T, B, …]`` (always for a recurrent policy).
        carry: ``[B, …]`` the recurrent state before row 0.
        reset: ``[T, B]`` whether a row starts an episode.

    Returns:
        ``(dist_params, values)`` with the leading axes of `obs`.
    """
    if policy.initial_carry is not None:

        def body(carry: PyTree, row: tuple[PyTree, Array]) -> tuple[PyTree, tuple[PyTree, Array]]:
            return policy.apply(params, carry, *row)

        return jax.lax.scan(body, carry, (obs, reset))[1]
    if reset is None or reset.ndim == 1:
        return policy.apply(params, obs)
    lead = reset.shape
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), policy.apply(params, flat))


def init_runner(
    key: Key, env: Env, policy: Policy, num_envs: int, *, group_size: int = 1
) -> Runner:
    """Freshly reset environments, ready for `rollout`.

    Args:
        key: consumed.
        env: the environment.
        policy: for the recurrent carry.
        num_envs: ``B``.
        group_size: that many consecutive environments share one start state (and differ in
            everything that is drawn later), as group-relative methods need.

    Returns:
        A `Runner` with every leaf ``[B, …]``.

    Raises:
        ValueError: `group_size` does not divide `num_envs`.
    """
    positive_int("num_envs", num_envs)
    divides("num_envs", num_envs, "group_size", positive_int("group_size", group_size))
    env_state, obs = jax.vmap(env.reset)(jax.random.split(key, num_envs // group_size))
    if group_size > 1:
        env_state, obs = jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), (env_state, obs))
    return Runner(
        env_state=env_state,
        obs=obs,
        carry=() if policy.initial_carry is None else policy.initial_carry(num_envs),
        reset=jnp.ones(num_envs, bool),
        episode_return=jnp.zeros(num_envs, jnp.float32),
        episode_length=jnp.zeros(num_envs, jnp.int32),
    )


def rollout(
    key: Key, env: Env, policy: Policy, params: PyTree, runner: Runner, *, num_steps: int
) -> tuple[Runner, Transition, Array, Episodes]:
    """Steps `B` environments for `num_steps` and values the true successor of every row.

    ``next_values[t]`` is ``v(S(t+1))`` before any reset. Where no episode was cut it is the next
    row's value; where a time limit cut one it is the value of that row's own final observation.
    Truncations of one environment lie at least ``env.time_limit`` steps apart, so at most
    ``K = ⌈T / time_limit⌉`` final observations a column have to be kept: ``K + 1`` extra critic
    rows a column instead of ``T``, and no second copy of the observations. A recurrent critic
    values a final observation with the carry after its row, without a reset.

    Args:
        key: consumed.
        env: the environment; stepped under ``vmap``.
        policy: acts by sampling from its distribution.
        params: the policy's parameters.
        runner: where the environments stand, every leaf ``[B, …]`` (`init_runner`).
        num_steps: ``T``, static.

    Returns:
        ``(runner, transitions[T, B], next_values[T, B], episodes)``. Entries of `next_values` at
        terminated rows carry no meaning (every estimator ignores them).

    Raises:
        ValueError: `num_steps` below 1.

    References:
        Pardo et al., Time Limits in Reinforcement Learning, arXiv 1712.00378, eq. 6.
    """
    positive_int("num_steps", num_steps)
    num_envs = runner.reset.shape[0]
    names = split_key(key, "act", "env", "reset")
    act = _actions(names["act"], policy, params, runner, num_steps)
    step = _steps(names["env"], names["reset"], env, runner, num_steps)

    num_kept = num_steps
    if env.time_limit is not None:
        num_kept = min(num_steps, math.ceil(num_steps / env.time_limit))
    keep_all = num_kept >= num_steps
    kept = () if keep_all else _empty_slots(num_kept, (runner.obs, runner.carry))
    # one pass of a feed-forward critic over all rows is cheaper than a small one at each step
    values_later = policy.initial_carry is None

    def body(state: tuple, draws: tuple[PyTree, PyTree]) -> tuple[tuple, tuple]:
        runner, kept, num_cut, sums = state
        act_draw, step_draw = draws
        carry, dist_params, value = apply_policy(
            policy, params, runner.carry, runner.obs, runner.reset
        )
        action = act.apply(act_draw, dist_params)
        env_state, out = step.apply(step_draw, runner.env_state, policy.distribution.action(action))
        row = Transition(
            obs=runner.obs,
            action=action,
            log_prob=(),
            value=() if values_later else value,
            dist_params=dist_params,
            reward=out.reward,
            terminated=out.terminated,
            truncated=out.truncated,
            reset=runner.reset,
        )
        cut = out.truncated & ~out.terminated
        if keep_all:
            successor = (out.final_obs, carry)
        else:
            kept = _keep(kept, (out.final_obs, carry), cut, num_cut)
            successor = ()
        runner, sums = _advance(runner, env_state, out, carry, sums)
        return (runner, kept, num_cut + cut, sums), (row, successor)

    zeros = jnp.zeros(num_envs, jnp.float32)
    state = (runner, kept, jnp.zeros(num_envs, jnp.int32), (zeros, zeros, zeros))
    (runner, kept, num_cut, sums), (rows, successors) = jax.lax.scan(
        body, state, (act.draws, step.draws)
    )
    rows = rows._replace(log_prob=policy.distribution.log_prob(rows.dist_params, rows.action))
    if values_later:
        rows = rows._replace(value=replay(policy, params, rows.obs, reset=rows.reset)[1])
    next_values = _next_values(policy, params, runner, rows, successors if keep_all else kept)
    return_sum, length_sum, count = (jnp.sum(x) for x in sums)
    unkept = jnp.sum(jnp.maximum(num_cut - num_kept, 0)).astype(jnp.float32)
    return runner, rows, next_values, Episodes(return_sum, length_sum, count, unkept)


class _Drawn(NamedTuple):
    """What is random in a step, drawn for all steps, and the step that takes its share."""

    draws: PyTree  # [T, …], scanned over
    apply: Callable


RESETS_AT_ONCE = 2**26
"""Bytes up to which a rollout draws the resets of all its steps at once."""


def _actions(key: Key, policy: Policy, params: PyTree, runner: Runner, num_steps: int) -> _Drawn:
    """``(draw, dist_params) -> x``, with the noise of all steps drawn at once where possible."""
    family = policy.distribution
    if family.noise is None or family.from_noise is None:
        return _Drawn(jax.random.split(key, num_steps), family.sample)
    seen = (policy, params, runner.carry, runner.obs, runner.reset)
    one_step = jax.eval_shape(lambda: apply_policy(*seen)[1])
    all_steps = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_steps, *x.shape), x.dtype), one_step
    )
    noise = family.noise(key, all_steps)
    return _Drawn(noise, lambda noise, dist_params: family.from_noise(dist_params, noise))


def _steps(key: Key, reset_key: Key, env: Env, runner: Runner, num_steps: int) -> _Drawn:
    """``(draw, env_state, action) -> (env_state, EnvStep)`` of all environments, with resets.

    Random numbers come in small pieces at a high price on a CPU: the resets of all steps are drawn
    at once, unless they would take too much memory.
    """
    shape = (num_steps, runner.reset.shape[0])
    keys = jax.random.split(key, shape)
    size = sum(x.nbytes for x in jax.tree.leaves((runner.env_state, runner.obs)))
    if env.transition is None or size * num_steps > RESETS_AT_ONCE:
        return _Drawn(keys, jax.vmap(env.step))
    fresh = jax.vmap(jax.vmap(env.reset))(jax.random.split(reset_key, shape))

    def apply(draw: tuple[Key, PyTree], state: PyTree, action: Array) -> tuple[PyTree, EnvStep]:
        keys, fresh = draw
        return reset_where_done(fresh, *jax.vmap(env.transition)(keys, state, action))

    return _Drawn((keys, fresh), apply)


def _advance(
    runner: Runner, env_state: PyTree, step: EnvStep, carry: PyTree, sums: tuple[Array, ...]
) -> tuple[Runner, tuple[Array, ...]]:
    """The runner after a step, and the sums over the episodes that have ended so far."""
    done = step.terminated | step.truncated
    episode_return = runner.episode_return + step.reward
    episode_length = runner.episode_length + 1
    ended = (episode_return, episode_length.astype(jnp.float32), jnp.ones_like(episode_return))
    sums = tuple(total + jnp.where(done, x, 0.0) for total, x in zip(sums, ended, strict=True))
    runner = Runner(
        env_state=env_state,
        obs=step.obs,
        carry=carry,
        reset=done,
        episode_return=jnp.where(done, 0.0, episode_return),
        episode_length=jnp.where(done, 0, episode_length),
    )
    return runner, sums


def _expand(flag: Array, like: Array) -> Array:
    """`flag` with trailing axes of length 1, to select whole rows of `like`."""
    return flag.reshape(flag.shape + (1,) * (like.ndim - flag.ndim))


def _empty_slots(num_kept: int, like: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros((num_kept, *x.shape), x.dtype), like)


def _keep(kept: PyTree, new: PyTree, cut: Array, num_cut: Array) -> PyTree:
    """Writes row `new` into the next free slot of the columns that a time limit just cut."""
    num_kept = jax.tree.leaves(kept)[0].shape[0]
    here = cut & (num_cut == jnp.arange(num_kept)[:, None])
    return jax.tree.map(lambda slots, x: jnp.where(_expand(here, slots), x, slots), kept, new)


def _next_values(
    policy: Policy, params: PyTree, runner: Runner, rows: Transition, kept: Any
) -> Array:
    """``v(S(t+1))``: the values shifted by a row, and those of the kept final observations."""
    last_value = apply_policy(policy, params, runner.carry, runner.obs, runner.reset)[2]
    shifted = jnp.concatenate([rows.value[1:], last_value[None]])
    final_obs, carries = kept
    num_kept = jax.tree.leaves(final_obs)[0].shape[0]
    flat_obs, flat_carries = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:]), (final_obs, carries)
    )
    never = jnp.zeros(num_kept * last_value.shape[0], bool)
    final_values = apply_policy(policy, params, flat_carries, flat_obs, never)[2]
    final_values = final_values.reshape(num_kept, -1)

    cut = rows.truncated & ~rows.terminated
    if num_kept == cut.shape[0]:
        return jnp.where(cut, final_values, shifted)
    slot = jnp.cumsum(cut, axis=0) - 1
    bootstrap = jnp.take_along_axis(final_values, jnp.clip(slot, 0, num_kept - 1), axis=0)
    # beyond what `Env.time_limit` promised: the state's own value stands in, and is counted
    bootstrap = jnp.where(slot < num_kept, bootstrap, rows.value)
    return jnp.where(cut, bootstrap, shifted)
