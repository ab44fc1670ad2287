"""A tiny MDP and a policy that is a table: gradients of whole updates can be written in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.distributions import categorical
from jaxpg.environments import auto_reset
from jaxpg.types import Box, Discrete, Env, Policy

REWARDS = np.array([[0.0, 0.0, 1.0], [0.5, 2.0, 0.0], [-1.0, 1.0, 3.0], [0.0, 0.0, 0.0]])
TIME_LIMIT = 4


def ring(rewards: np.ndarray = REWARDS) -> Env:
    """Four states in a ring; action a moves a + 1 on; state 3 is terminal, 4 steps the limit."""
    table = jnp.asarray(rewards, jnp.float32)

    def observe(place):
        return jax.nn.one_hot(place, 4)

    def reset(key):
        place = jax.random.randint(key, (), 0, 3)
        return (place, jnp.zeros((), jnp.int32)), observe(place)

    def step(key, state, action):
        place, time = state
        after, time = (place + action + 1) % 4, time + 1
        # the last step of a long episode may be both
        return (after, time), observe(after), table[place, action], after == 3, time >= TIME_LIMIT

    return auto_reset(
        reset,
        step,
        observation_space=Box(0, 1, (4,)),
        action_space=Discrete(3),
        time_limit=TIME_LIMIT,
        name="ring",
    )


def table_policy(*, action_values: bool = False) -> Policy:
    """Logits ``[4, 3]``, and values ``[4]`` or ``[4, 3]``; a plain dict of arrays."""

    def init(key, obs):
        actor, critic = jax.random.split(key)
        shape = (4, 3) if action_values else (4,)
        return {
            "actor": 0.5 * jax.random.normal(actor, (4, 3)),
            "critic": jax.random.normal(critic, shape),
        }

    def apply(params, obs):
        return obs @ params["actor"], obs @ params["critic"]

    return Policy(init, apply, categorical)


def softmax(x: np.ndarray) -> np.ndarray:
    """Rows of probabilities."""
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
