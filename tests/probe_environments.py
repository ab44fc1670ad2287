"""Environments so small that the right value and the right action are known.

A learning test on one of them asks one question: does the critic see rewards at all, does it look
at the observation, does it discount, does the actor find the better action, does a time limit
bootstrap, does a recurrent policy remember, is a mask obeyed. The idea is Andy Jones's.

Each function returns an `Env`; its docstring says what must come out. ``v`` is the value of the
optimal policy, ``γ`` the discount.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxpg.environments import auto_reset
from jaxpg.types import Box, DictSpace, Discrete, Env, EnvStep, MultiDiscrete

TWO_ACTIONS = Discrete(2)


def _sign(key: Array) -> Array:
    """−1 or +1, evenly."""
    return jnp.where(jax.random.bernoulli(key), 1.0, -1.0)


def _correct(match: Array) -> Array:
    """Reward +1 for a match and −1 otherwise."""
    return jnp.where(match, 1.0, -1.0)


def constant_reward() -> Env:
    """One step, reward 1, observation always 0: ``v = 1``."""

    def step(key, state, action):
        return state, jnp.zeros(1), 1.0, True, False

    return auto_reset(
        lambda key: ((), jnp.zeros(1)),
        step,
        observation_space=Box(0.0, 0.0, (1,)),
        action_space=TWO_ACTIONS,
        time_limit=1,
        name="constant-reward",
    )


def observation_reward() -> Env:
    """One step, observation −1 or +1, which is also the reward: ``v(obs) = obs``."""

    def reset(key):
        sign = _sign(key)
        return sign, sign[None]

    def step(key, sign, action):
        return sign, sign[None], sign, True, False

    return auto_reset(
        reset,
        step,
        observation_space=Box(-1.0, 1.0, (1,)),
        action_space=TWO_ACTIONS,
        time_limit=1,
        name="observation-reward",
    )


def delayed_reward() -> Env:
    """Two steps, observations 0 then 1, reward 1 at the end: ``v(0) = γ``, ``v(1) = 1``."""

    def step(key, time, action):
        end = time == 1
        return time + 1, jnp.ones(1), end.astype(jnp.float32), end, False

    return auto_reset(
        lambda key: (0, jnp.zeros(1)),
        step,
        observation_space=Box(0.0, 1.0, (1,)),
        action_space=TWO_ACTIONS,
        time_limit=2,
        name="delayed-reward",
    )


def action_reward() -> Env:
    """One step, observation 0, reward +1 for action 1 and −1 for action 0: ``v = 1``."""

    def step(key, state, action):
        return state, jnp.zeros(1), _correct(action == 1), True, False

    return auto_reset(
        lambda key: ((), jnp.zeros(1)),
        step,
        observation_space=Box(0.0, 0.0, (1,)),
        action_space=TWO_ACTIONS,
        time_limit=1,
        name="action-reward",
    )


def observation_action_reward() -> Env:
    """One step; reward +1 if action is 1 exactly when the observation is +1, else −1: ``v = 1``.

    A policy that ignores the observation earns 0.
    """

    def reset(key):
        sign = _sign(key)
        return sign, sign[None]

    def step(key, sign, action):
        return sign, sign[None], _correct((action == 1) == (sign > 0)), True, False

    return auto_reset(
        reset,
        step,
        observation_space=Box(-1.0, 1.0, (1,)),
        action_space=TWO_ACTIONS,
        time_limit=1,
        name="observation-action-reward",
    )


def time_limit_only(limit: int = 5) -> Env:
    """Reward 1 for ever, observation 0, truncated every `limit` steps: ``v = 1 / (1 − γ)``.

    Truncation taken for termination gives about ``(1 − γ^(limit/2)) / (1 − γ)`` instead.
    """

    def step(key, time, action):
        time = time + 1
        return time, jnp.zeros(1), 1.0, False, time >= limit

    return auto_reset(
        lambda key: (0, jnp.zeros(1)),
        step,
        observation_space=Box(0.0, 0.0, (1,)),
        action_space=TWO_ACTIONS,
        time_limit=limit,
        name="time-limit-only",
    )


class CounterState(NamedTuple):
    kind: Array  # 0, 1 or 2, drawn once: where the environment stands in the pattern of endings
    episode: Array
    time: Array


def counter(limit: int = 4) -> Env:
    """Observation, reward and flags all say where the environment is, so rollouts can be checked.

    ``obs = [kind, episode, time]``, reward ``10 · episode + time`` (after the step), whatever the
    action. Endings follow ``(kind + episode) % 3``: 0 terminates after ``1 + episode % limit``
    steps, 1 truncates after `limit` steps, 2 does both at once after `limit` steps. The episode
    counts on through resets, so the observation after a reset differs from the final one of any
    episode. `counter_rows` tells what a rollout must hold.
    """

    def observe(state: CounterState) -> Array:
        return jnp.stack([x.astype(jnp.float32) for x in state])

    def reset(key):
        kind = jax.random.randint(key, (), 0, 3)
        state = CounterState(kind, jnp.zeros_like(kind), jnp.zeros_like(kind))
        return state, observe(state)

    def step(key, state, action):
        time = state.time + 1
        ending = (state.kind + state.episode) % 3
        end = time >= jnp.where(ending == 0, 1 + state.episode % limit, limit)
        stepped = state._replace(time=time)
        state = CounterState(state.kind, state.episode + end, jnp.where(end, 0, time))
        return state, EnvStep(
            obs=observe(state),
            reward=(10 * stepped.episode + time).astype(jnp.float32),
            terminated=end & (ending != 1),
            truncated=end & (ending != 0),
            final_obs=observe(stepped),
        )

    return Env(reset, step, Box(0.0, 1e6, (3,)), TWO_ACTIONS, limit, "counter")


class CounterRow(NamedTuple):
    obs: tuple[int, int, int]  # before the step
    reward: int
    terminated: bool
    truncated: bool
    final_obs: tuple[int, int, int]


def counter_rows(kind: int, num_steps: int, limit: int = 4) -> list[CounterRow]:
    """What `num_steps` steps of `counter` after a reset show, in plain Python."""
    rows: list[CounterRow] = []
    episode = 0
    while len(rows) < num_steps:
        ending = (kind + episode) % 3
        length = 1 + episode % limit if ending == 0 else limit
        for time in range(length):
            last = time + 1 == length
            rows.append(
                CounterRow(
                    (kind, episode, time),
                    10 * episode + time + 1,
                    last and ending in (0, 2),
                    last and ending in (1, 2),
                    (kind, episode, time + 1),
                )
            )
        episode += 1
    return rows[:num_steps]


def continuous_action(target: float = 0.5) -> Env:
    """One step, observation 0, reward ``−(a − target)²``: best action `target`, ``v = 0``."""

    def step(key, state, action):
        return state, jnp.zeros(1), -jnp.sum((action - target) ** 2), True, False

    return auto_reset(
        lambda key: ((), jnp.zeros(1)),
        step,
        observation_space=Box(0.0, 0.0, (1,)),
        action_space=Box(-1.0, 1.0, (1,)),
        time_limit=1,
        name="continuous-action",
    )


def memory(length: int = 3) -> Env:
    """A cue in the first observation, asked for in the last of `length` steps.

    ``obs = [cue at time 0 else 0, whether this is the last step]``, cue −1 or +1; the last step
    pays +1 if its action is 1 exactly when the cue was +1, else −1, and terminates. Optimal
    ``v = γ^(length − 1 − time)``; without memory no policy earns more than 0.
    """

    def observe(cue, time):
        return jnp.stack([jnp.where(time == 0, cue, 0.0), jnp.where(time == length - 1, 1.0, 0.0)])

    def reset(key):
        cue = _sign(key)
        return (cue, 0), observe(cue, 0)

    def step(key, state, action):
        cue, time = state
        end = time == length - 1
        reward = jnp.where(end, _correct((action == 1) == (cue > 0)), 0.0)
        return (cue, time + 1), observe(cue, time + 1), reward, end, False

    return auto_reset(
        reset,
        step,
        observation_space=Box(-1.0, 1.0, (2,)),
        action_space=TWO_ACTIONS,
        time_limit=length,
        name="memory",
    )


def multi_discrete() -> Env:
    """One step, observation −1 or +1, actions of 2 and 3 choices, half a point for each right one.

    Right are ``[1, 2]`` at +1 and ``[0, 2]`` at −1: ``v = 1``.
    """

    def reset(key):
        sign = _sign(key)
        return sign, sign[None]

    def step(key, sign, action):
        right = jnp.stack([jnp.where(sign > 0, 1, 0), 2])
        return sign, sign[None], jnp.sum(action == right) / 2, True, False

    return auto_reset(
        reset,
        step,
        observation_space=Box(-1.0, 1.0, (1,)),
        action_space=MultiDiscrete((2, 3)),
        time_limit=1,
        name="multi-discrete",
    )


def action_mask() -> Env:
    """One step, three actions that pay their index, one of them forbidden and paying −10.

    ``obs = {"observation": [1.0], "action_mask": [3] bool}``: only the mask tells which is
    forbidden. ``v = 2``, or 1 where action 2 is forbidden. A sample of −10 is a broken mask.
    """

    def observe(forbidden):
        return {"observation": jnp.ones(1), "action_mask": jnp.arange(3) != forbidden}

    def reset(key):
        forbidden = jax.random.randint(key, (), 0, 3)
        return forbidden, observe(forbidden)

    def step(key, forbidden, action):
        reward = jnp.where(action == forbidden, -10.0, action)
        return forbidden, observe(forbidden), reward, True, False

    return auto_reset(
        reset,
        step,
        observation_space=DictSpace(
            {"observation": Box(1.0, 1.0, (1,)), "action_mask": Box(0.0, 1.0, (3,))}
        ),
        action_space=Discrete(3),
        time_limit=1,
        name="action-mask",
    )
