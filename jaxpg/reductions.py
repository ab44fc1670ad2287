"""Floor 1: means over tokens, sequences and groups, that masks and micro-batches cannot break.

The mean that a loss is made with decides how much a long answer weighs. Per-token losses of
``[1, 1, 1, 1]`` in one sequence and ``[5]`` in another give: `token_mean` 1.8 (each token weighs
the same; DAPO), `sequence_mean` 3.0 (each sequence does; GRPO), `constant_norm` with
``max_length=4`` 1.125 (each token, whatever the lengths in this batch; Dr. GRPO).

All divide by ``max(count, 1)``, so that nothing counted gives 0 and a zero gradient, or by the
`denominator` given from outside. Give the count of the *whole* batch (tokens or sequences, as each
docstring says), and the results of its parts, micro-batches or devices, **add up** to the result of
the whole, gradients too. A denominator of 0 is read as 1, for the same reason as ``max(count, 1)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxpg._checks import as_float, in_range, masked_floats, normalize_axis


def masked_mean(
    x: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    axis: int | Sequence[int] | None = None,
    denominator: ArrayLike | None = None,
) -> Array:
    """The mean of what the mask lets through.

    Formula::

        Σ m x / max(Σ m, 1)

    Args:
        x: ``[...]`` any shape.
        mask: the shape of `x`, bool or 0/1, 1 = counts; None is everything.
        axis: axis or axes that are reduced; None reduces all.
        denominator: takes the place of ``max(Σ m, 1)``: the number of elements that count in the
            whole batch. A scalar, or an array that broadcasts to the result.

    Returns:
        `x` without `axis`; 0 where nothing counts, whatever lies under the mask.

    Raises:
        ValueError: if mask and `x` differ in shape, `axis` does not exist, or a concrete
            `denominator` is negative or NaN.

    Example:
        >>> print(masked_mean([1.0, 2.0, float("nan")], [1, 1, 0]))
        1.5
        >>> print(masked_mean([1.0, 2.0], denominator=4))
        0.75
    """
    in_range("denominator", denominator, 0)
    (x,), mask = masked_floats(mask, x=x)
    axes = _axes("axis", axis, x.ndim)
    total = jnp.sum(x, axis=axes)
    if denominator is None:
        return total / jnp.maximum(_count(mask, x, axes), 1)
    number = as_float("denominator", denominator).astype(x.dtype)
    fits = zip(number.shape[::-1], total.shape[::-1], strict=False)
    if number.ndim > total.ndim or not all(n in (1, m) for n, m in fits):
        raise ValueError(
            f"denominator has shape {number.shape}, which does not broadcast to {total.shape}"
        )
    return total / jnp.where(number > 0, number, 1)


def token_mean(
    x: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    group_axis: int | Sequence[int] | None = None,
    denominator: ArrayLike | None = None,
) -> Array:
    """The mean over all valid tokens, or the mean over groups of each group's token mean.

    Formula::

        Σ m x / max(Σ m, 1)                                    without group_axis
        (1/P) Σ_p [ Σ_{i,t} m x / max(Σ_{i,t} m, 1) ]          with it, P groups with a valid token

    Args:
        x: ``[..., T]`` per-token values, for instance ``[P, G, T]``: P groups of G sequences.
        mask: the shape of `x`, bool or 0/1, 1 = counts; None is everything.
        group_axis: the axis or axes that count the groups (0 for ``[P, G, T]``): every index along
            it is one group, and all other axes are tokens of that group. None: one mean over all.
        denominator: the number of valid tokens in the whole batch; with `group_axis`, the number of
            groups in it.

    Returns:
        Scalar; 0 when nothing counts. Groups without a valid token do not count among P.

    Raises:
        ValueError: if mask and `x` differ in shape, `group_axis` does not exist, or a concrete
            `denominator` is negative or NaN.

    Example:
        >>> x = [[1.0, 1.0, 1.0, 1.0], [5.0, 0.0, 0.0, 0.0]]
        >>> mask = [[1, 1, 1, 1], [1, 0, 0, 0]]
        >>> print(token_mean(x, mask), token_mean(x, mask, group_axis=0))
        1.8 3.0

    References:
        Yu et al., DAPO, arXiv 2503.14476, eq. 8: the token count there is each group's own
        (``group_axis``), and the expectation averages groups. Common implementations count over the
        whole batch (the default here); the two agree when groups have equal token counts.
    """
    if group_axis is None:
        return masked_mean(x, mask, denominator=denominator)
    (x,), mask = masked_floats(mask, x=x)
    groups = _axes("group_axis", group_axis, x.ndim)
    rest = tuple(i for i in range(x.ndim) if i not in groups)
    counts = _count(mask, x, rest)
    means = jnp.sum(x, axis=rest) / jnp.maximum(counts, 1)
    return masked_mean(means, jnp.broadcast_to(counts > 0, means.shape), denominator=denominator)


def sequence_mean(
    x: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    axis: int = -1,
    count_empty: bool = False,
    token_sum: bool = False,
    denominator: ArrayLike | None = None,
) -> Array:
    """The mean over sequences of each sequence's token mean (or token sum).

    Formula::

        (1/B) Σ_i [ Σ_t m x / max(Σ_t m, 1) ]       B sequences with a valid token
        (1/B) Σ_i   Σ_t m x                         with token_sum

    Args:
        x: ``[..., T]`` per-token values.
        mask: the shape of `x`, bool or 0/1, 1 = counts; None is everything.
        axis: the axis of time.
        count_empty: whether sequences without a valid token count in B. TRL counts them; verl,
            OpenRLHF and tunix do not, which is the default here.
        token_sum: sums over the tokens of a sequence in place of averaging.
        denominator: takes the place of B: the number of sequences in the whole batch.

    Returns:
        Scalar; 0 when nothing counts.

    Raises:
        ValueError: if mask and `x` differ in shape, `axis` does not exist, or a concrete
            `denominator` is negative or NaN.

    Example:
        >>> x = [[1.0, 1.0, 1.0, 1.0], [5.0, 0.0, 0.0, 0.0]]
        >>> mask = [[1, 1, 1, 1], [1, 0, 0, 0]]
        >>> print(sequence_mean(x, mask), sequence_mean(x, mask, token_sum=True))
        3.0 4.5

    References:
        Shao et al., DeepSeekMath, arXiv 2402.03300, eq. 3 (mean of token means).
    """
    (x,), mask = masked_floats(mask, x=x)
    axes = _axes("axis", axis, x.ndim)
    counts = _count(mask, x, axes)
    rows = jnp.sum(x, axis=axes)
    if not token_sum:
        rows = rows / jnp.maximum(counts, 1)
    counted = None if count_empty else jnp.broadcast_to(counts > 0, rows.shape)
    return masked_mean(rows, counted, denominator=denominator)


def constant_norm(
    x: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    max_length: ArrayLike,
    axis: int = -1,
    denominator: ArrayLike | None = None,
) -> Array:
    """The sum over all valid tokens over the room for them: sequences times a constant length.

    Formula::

        Σ m x / (B · max_length)         B = all sequences, empty ones too

    Args:
        x: ``[..., T]`` per-token values.
        mask: the shape of `x`, bool or 0/1, 1 = counts; None is everything.
        max_length: scalar L > 0, tokens: the longest completion that can be generated. The same for
            every batch, so that no batch's own lengths enter; T or not.
        axis: the axis of time.
        denominator: takes the place of B: the number of sequences in the whole batch (1 gives
            Σ m x / max_length).

    Returns:
        Scalar; 0 when nothing counts.

    Raises:
        ValueError: if mask and `x` differ in shape, `axis` does not exist, a concrete `max_length`
            is not positive, or a concrete `denominator` is negative or NaN.

    Example:
        >>> x = [[1.0, 1.0, 1.0, 1.0], [5.0, 0.0, 0.0, 0.0]]
        >>> mask = [[1, 1, 1, 1], [1, 0, 0, 0]]
        >>> print(constant_norm(x, mask, max_length=4))
        1.125

    References:
        Liu et al., Understanding R1-Zero-Like Training (Dr. GRPO), arXiv 2503.20783, section 3.2.
    """
    in_range("max_length", max_length, 0, open_low=True)
    max_length = as_float("max_length", max_length)
    (x,), mask = masked_floats(mask, x=x)
    axes = _axes("axis", axis, x.ndim)
    rows = jnp.sum(x, axis=axes) / max_length.astype(x.dtype)
    return masked_mean(rows, denominator=denominator)


def _axes(name: str, axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(ndim))
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    return tuple(normalize_axis(name, a, ndim) for a in axes)


def _count(mask: Array | None, x: Array, axes: tuple[int, ...]) -> Array:
    """How many elements count along `axes`, in the dtype of `x`."""
    if mask is None:
        return jnp.asarray(math.prod(x.shape[a] for a in axes), x.dtype)
    return jnp.sum(mask, axis=axes, dtype=jnp.int32).astype(x.dtype)  # floats stop counting at 2²⁴
