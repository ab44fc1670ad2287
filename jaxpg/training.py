"""Floor 5: many updates of one run."""

from __future__ import annotations

from typing import Any

import jax

from jaxpg._checks import positive_int
from jaxpg.types import Algorithm, Info, Key, TrainState


def train(
    algorithm: Algorithm,
    key: Key | None,
    config: Any,
    num_updates: int,
    *,
    state: TrainState | None = None,
) -> tuple[TrainState, Info]:
    """Runs `num_updates` updates in one `lax.scan`: jit it, vmap it over keys or configs.

    Args:
        algorithm: for example ``jaxpg.ppo(env, policy)``.
        key: starts a new run; unused (None will do) when `state` is given.
        config: the algorithm's config.
        num_updates: updates to run, static, at least 1.
        state: continues this run instead: its key, optimizer and environments go on, so that
            ``2 N`` updates at once and ``N`` then ``N`` are the same.

    Returns:
        ``(state, infos)``, every leaf of `infos` ``[num_updates]``. Memory does not grow with
        anything but these scalars.

    Raises:
        ValueError: `num_updates` below 1, neither `key` nor `state`, or a bad config.

    Example:
        >>> import jax, jaxpg
        >>> env = jaxpg.from_gymnax("CartPole-v1")
        >>> algorithm = jaxpg.ppo(env, jaxpg.mlp_policy(env))
        >>> config = jaxpg.PPOConfig(num_envs=4, num_steps=16)
        >>> run = jax.jit(jax.vmap(lambda key: jaxpg.train(algorithm, key, config, 3)))
        >>> states, infos = run(jax.random.split(jax.random.key(0), 2))
        >>> infos["entropy"].shape
        (2, 3)
    """
    positive_int("num_updates", num_updates)
    if state is None:
        if key is None:
            raise ValueError("train needs a key to start a run, or a state to continue one")
        state = algorithm.init(key, config)
    return jax.lax.scan(lambda state, _: algorithm.step(state, config), state, length=num_updates)
