"""Floor 5: returns of a trained state, one episode per environment."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxpg._checks import as_key, positive_int
from jaxpg.types import Algorithm, Key, PyTree, TrainState, split_key


def evaluate(
    algorithm: Algorithm,
    state: TrainState,
    key: Key,
    *,
    num_episodes: int,
    deterministic: bool = True,
    max_steps: int | None = None,
) -> Array:
    """Raw undiscounted returns of complete episodes, with normalisers frozen.

    Every environment plays exactly one episode from a fresh reset, so that short episodes are not
    counted more often than long ones. The loop ends when the last episode does.

    Args:
        algorithm: what trained the state.
        state: one state (``jax.vmap`` over a stack of them).
        key: for resets, environment noise and sampling.
        num_episodes: episodes, played side by side, static.
        deterministic: act by the distribution's mode (greedy), else by sampling.
        max_steps: bound on the length of an episode, for an environment without a time limit;
            an episode still running then counts as it stands.

    Returns:
        ``[num_episodes]`` float32.

    Raises:
        ValueError: `num_episodes` below 1, or the environment has no time limit and `max_steps`
            is not given.

    Example:
        >>> import jax, jaxpg
        >>> env = jaxpg.from_gymnax("CartPole-v1")
        >>> algorithm = jaxpg.ppo(env, jaxpg.mlp_policy(env))
        >>> state = algorithm.init(jax.random.key(0), jaxpg.PPOConfig())
        >>> returns = jaxpg.evaluate(algorithm, state, jax.random.key(1), num_episodes=5)
        >>> returns.shape
        (5,)
    """
    positive_int("num_episodes", num_episodes)
    env = algorithm.env
    limit = env.time_limit if max_steps is None else positive_int("max_steps", max_steps)
    if limit is None:
        raise ValueError(f"environment {env.name!r} has no time limit: give max_steps")
    names = split_key(as_key(key), "reset", "run")
    env_state, obs = jax.vmap(env.reset)(jax.random.split(names["reset"], num_episodes))
    start = (
        jnp.zeros((), jnp.int32),
        env_state,
        obs,
        algorithm.initial_carry(num_episodes),
        jnp.ones(num_episodes, bool),  # alive
        jnp.zeros(num_episodes, jnp.float32),
    )

    def going(loop: tuple) -> Array:
        time, _, _, _, alive, _ = loop
        return jnp.any(alive) & (time < limit)

    def body(loop: tuple) -> tuple:
        time, env_state, obs, carry, alive, returns = loop
        keys = split_key(jax.random.fold_in(names["run"], time), "act", "env")
        reset = jnp.full(num_episodes, time == 0)
        carry, action = algorithm.act(
            state, keys["act"], obs, carry, reset, deterministic=deterministic
        )
        env_state, step = jax.vmap(env.step)(
            jax.random.split(keys["env"], num_episodes), env_state, action
        )
        returns = returns + jnp.where(alive, step.reward, 0.0)
        alive = alive & ~(step.terminated | step.truncated)
        return time + 1, env_state, step.obs, carry, alive, returns

    result: tuple[PyTree, ...] = jax.lax.while_loop(going, body, start)
    return result[-1]
