"""Floor 1: from sampled completions to what is rewarded: lengths, end tokens, groups worth keeping.

Shaping (`soft_overlong_penalty`) is added to a reward *after* `mixed_group_mask` has looked at the
scores: a group whose answers are all correct teaches nothing, and a length penalty must not make it
look as though it did.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxpg._checks import as_array, as_float, in_range, is_concrete, normalize_axis, scalar


def soft_overlong_penalty(
    lengths: ArrayLike, *, max_length: ArrayLike, cache_length: ArrayLike
) -> Array:
    """A penalty that falls from 0 to −1 over the last part of the room for an answer.

    Formula::

        0                   n ≤ L − C
        (L − C − n) / C     L − C < n ≤ L
        −1                  n > L

    Args:
        lengths: ``[...]`` n, tokens in each completion, the end token included.
        max_length: scalar L > 0, tokens.
        cache_length: scalar C, 0 < C ≤ L, tokens: where the penalty begins, counted from L down.

    Returns:
        ``[...]`` in [−1, 0], to be added to the reward.

    Raises:
        ValueError: if a concrete L or C is not positive, or C > L (then even an empty answer would
            be punished).

    Example:
        >>> import jax.numpy as jnp
        >>> lengths = jnp.array([16, 17, 18, 20, 21])
        >>> print(soft_overlong_penalty(lengths, max_length=20, cache_length=4))
        [ 0.   -0.25 -0.5  -1.   -1.  ]

    References:
        Yu et al., DAPO, arXiv 2503.14476, eq. 13; the paper has L = 20480, C = 4096.
    """
    in_range("max_length", max_length, 0, open_low=True)
    in_range("cache_length", cache_length, 0, open_low=True)
    if is_concrete(max_length) and is_concrete(cache_length) and cache_length > max_length:
        raise ValueError(f"cache_length={cache_length} is larger than max_length={max_length}")
    n = as_float("lengths", lengths)
    limit = scalar("max_length", max_length, n.dtype)
    cache = scalar("cache_length", cache_length, n.dtype)
    return jnp.clip((limit - cache - n) / cache, -1, 0)


def mixed_group_mask(scores: ArrayLike, *, axis: int = -1) -> Array:
    """True for groups whose scores differ: the others have advantage 0 and teach nothing.

    Formula::

        max over the scored members ≠ min over them

    Args:
        scores: ``[P, G]`` (or any shape with the group along `axis`) scores of P prompts with G
            samples each, before any shaping. NaN is an unscored sample and is left out.
        axis: the axis of the samples of one group.

    Returns:
        bool, `scores` without `axis`. False for groups with fewer than two scored members. It says
        which *groups* to keep, never which rows of a group.

    Raises:
        ValueError: if `axis` does not exist.

    Example:
        >>> print(mixed_group_mask([[1, 1, 1], [0, 1, 0]]))
        [False  True]

    References:
        Yu et al., DAPO, arXiv 2503.14476, eq. 11 (dynamic sampling: 0 < number correct < G).
        Deviation: scores need not be 0 and 1.
    """
    x = as_float("scores", scores)
    axis = normalize_axis("axis", axis, x.ndim)
    unscored = jnp.isnan(x)
    highest = jnp.max(jnp.where(unscored, -jnp.inf, x), axis=axis, initial=-jnp.inf)
    lowest = jnp.min(jnp.where(unscored, jnp.inf, x), axis=axis, initial=jnp.inf)
    return highest > lowest


def completion_mask(
    token_ids: ArrayLike,
    *,
    eos_id: int | Sequence[int],
    lengths: ArrayLike | None = None,
    axis: int = -1,
) -> Array:
    """True for the tokens of an answer: up to its first end token, that one included.

    Formula::

        mask[t] = no end token before t   (and t < length)

    Args:
        token_ids: ``[..., T]`` integers, the sampled tokens without the prompt.
        eos_id: the id of the end token, or several ids. It is part of the answer, and trained; what
            comes after the first one is not, whatever it is (padding may have the same id).
        lengths: ``[...]`` without `axis`, how many tokens were generated. Without an end token in a
            row, nothing else tells padding from answer: give it unless every unfinished row fills
            all of T.
        axis: the axis of time.

    Returns:
        bool, the shape of `token_ids`.

    Raises:
        ValueError: if shapes do not fit or `axis` does not exist.
        TypeError: if `token_ids`, `eos_id` or `lengths` are not integers.

    Example:
        >>> print(completion_mask([[5, 6, 2, 0], [5, 2, 2, 7]], eos_id=2).astype(int))
        [[1 1 1 0]
         [1 1 0 0]]
        >>> print(completion_mask([[5, 6, 0, 0]], eos_id=2, lengths=[2]).astype(int))
        [[1 1 0 0]]
    """
    ids, ends = _integers("token_ids", token_ids), _integers("eos_id", eos_id)
    axis = normalize_axis("axis", axis, ids.ndim)
    is_end = jnp.isin(ids, ends)
    ended_before = jnp.cumsum(is_end, axis=axis) - is_end > 0
    if lengths is None:
        return ~ended_before
    count = _integers("lengths", lengths)
    expected = ids.shape[:axis] + ids.shape[axis + 1 :]
    if count.shape != expected:
        raise ValueError(
            f"lengths has shape {count.shape}, but token_ids {ids.shape} without axis {axis} "
            f"have {expected}"
        )
    position = jnp.expand_dims(
        jnp.arange(ids.shape[axis]), [i for i in range(ids.ndim) if i != axis]
    )
    return ~ended_before & (position < jnp.expand_dims(count, axis))


def _integers(name: str, x: ArrayLike | Sequence[int]) -> Array:
    array = as_array(name, x)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got dtype {array.dtype}")
    return array
