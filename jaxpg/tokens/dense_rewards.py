"""Rewards per token, from an outcome and a KL penalty: what reward-to-go methods start from."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxpg._checks import as_float, as_floats, as_mask, normalize_axis


def last_token_rewards(
    rewards: ArrayLike,
    mask: ArrayLike,
    kl: ArrayLike | None = None,
    *,
    kl_coef: ArrayLike = 0.0,
    axis: int = -1,
) -> Array:
    """Outcome rewards on the last token of each answer, minus a KL penalty on every token.

    Formula::

        rₜ = −kl_coef · klₜ + [t is the last valid token] · reward

    Args:
        rewards: ``[...]`` one reward per answer.
        mask: ``[..., M]`` bool or 0/1, the valid tokens; may have holes.
        kl: ``[..., M]`` estimates of KL(π‖π_ref) per token, nats (`jaxpg.kl_k1`: as a constant in
            the reward, only that one has the right gradient). None is no penalty.
        kl_coef: weight of the penalty.
        axis: the axis of time.

    Returns:
        ``[..., M]`` token rewards, 0 under the mask. An answer without a valid token gets none:
        its reward goes nowhere, and certainly not to another token.

    Raises:
        ValueError: shapes that do not match.

    Example:
        >>> print(last_token_rewards(jnp.array([1.0, 5.0]), jnp.array([[1, 1, 0], [0, 0, 0]])))
        [[0. 1. 0.]
         [0. 0. 0.]]
    """
    outcome = as_float("rewards", rewards)
    shape = jnp.shape(mask)
    axis = normalize_axis("axis", axis, len(shape))
    if outcome.shape != shape[:axis] + shape[axis + 1 :]:
        raise ValueError(f"rewards {outcome.shape} must have the shape of mask {shape} but time")
    flags = as_mask("mask", mask, shape)
    later = jnp.flip(jnp.cumsum(jnp.flip(flags, axis), axis=axis), axis)  # valid from here on
    dense = jnp.where(flags & (later == 1), jnp.expand_dims(outcome, axis), 0.0)
    if kl is None:
        return dense
    dense, penalty = as_floats(rewards=dense, kl=kl)
    return dense - jnp.where(flags, kl_coef * jnp.where(flags, penalty, 0.0), 0.0)
