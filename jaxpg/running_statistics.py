"""Floor 2: running mean and variance of observations, and the scale of rewards.

Both are `NamedTuple`s of arrays that a train state carries, and pure functions on them. A batch is
merged as a whole (Chan's formula), centred before anything is squared, so a mean of 1e4 beside a
standard deviation of 1 keeps its digits in float32. Nothing here reduces over an axis that it was
not given: under ``vmap`` over seeds every seed has its own statistics.

What normalises a rollout must stay the same for the rollout, its update and its evaluation: update
once, after all three, and never in evaluation.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxpg import _checks
from jaxpg.types import Pmean, PyTree, one_replica


class RunningStatistics(NamedTuple):
    """Mean and variance of everything seen so far; `mean` and `var` are trees like the data."""

    count: Array  # [] rows seen
    mean: PyTree  # of one row
    var: PyTree  # of one row, dividing by the count


class ReturnStatistics(NamedTuple):
    """The running discounted return of every environment, and statistics of all of them."""

    discounted: Array  # [B] return so far of the running episode, discounted backwards
    count: Array  # [] returns seen
    mean: Array  # []
    var: Array  # []


def init_statistics(like: PyTree) -> RunningStatistics:
    """Statistics before any data: mean 0, variance 1, so that normalising changes nothing.

    Args:
        like: one row (one observation), any pytree; only shapes and dtypes are read.

    Returns:
        The statistics, in float32 at least.

    Example:
        >>> import jax.numpy as jnp
        >>> stats = init_statistics({"position": jnp.zeros(2)})
        >>> print(normalize_with(stats, {"position": jnp.array([[3.0, -4.0]])})["position"])
        [[ 3. -4.]]
    """

    def filled(value: float) -> PyTree:
        return jax.tree.map(lambda x: jnp.full(jnp.shape(x), value, _float_dtype(x)), like)

    return RunningStatistics(jnp.zeros((), jnp.float32), filled(0.0), filled(1.0))


def update_statistics(
    stats: RunningStatistics,
    batch: PyTree,
    mask: ArrayLike | None = None,
    *,
    pmean: Pmean = one_replica,
) -> RunningStatistics:
    """Merges a batch of rows into the statistics.

    With n rows of mean m and variance v, and w = n / (count + n):
    mean ← mean + w (m − mean);  var ← (1 − w) var + w v + w (1 − w) (m − mean)²

    Args:
        stats: from `init_statistics` or an earlier update.
        batch: a tree like the rows, every leaf with the same leading axes (``[N, …]``,
            ``[T, B, …]``), as many as it has more than the statistics.
        mask: bool or 0/1 of the shape of those axes, 1 = counts; other rows may hold NaN.
        pmean: where several replicas see rows of their own: all get the statistics of all rows,
            with a `count` of rows of an average replica.

    Returns:
        The statistics with the same structure, shapes and dtypes.

    Raises:
        ValueError: the leaves differ in structure or leading axes, or do not end in a row's shape.

    Example:
        >>> import jax.numpy as jnp
        >>> stats = update_statistics(init_statistics(jnp.zeros(())), jnp.array([1.0, 3.0]))
        >>> stats = update_statistics(stats, jnp.array([5.0, 7.0]))
        >>> print(stats.count, stats.mean, stats.var)
        4.0 4.0 5.0

    References:
        Chan, Golub & LeVeque, "Algorithms for Computing the Sample Variance", 1983, equations 2.1.
        Deviation: the variance is kept instead of the sum of squares, which in float32 stops
        growing after about 10⁷ rows.
    """
    rows, leaves, mean, var, tree = _aligned(stats, batch)
    weight = jnp.ones(rows, bool) if mask is None else _checks.as_mask("mask", mask, rows)
    n = pmean(jnp.sum(weight, dtype=jnp.float32))
    total = stats.count + n
    w = n / jnp.maximum(total, 1.0)
    # not 1 - w: with no rows at all both weights must leave the variance alone
    kept = jnp.where(total > 0, stats.count / jnp.maximum(total, 1.0), 1.0)
    merged = [
        _merge(m, v, x, None if mask is None else weight, len(rows), n, w, kept, pmean)
        for m, v, x in zip(mean, var, leaves, strict=True)
    ]
    return RunningStatistics(
        total, tree.unflatten([m for m, _ in merged]), tree.unflatten([v for _, v in merged])
    )


def normalize_with(stats: RunningStatistics, x: PyTree, *, clip: float | None = 10.0) -> PyTree:
    """Rows in units of the running statistics.

    (x − mean) / std, clipped to ±clip

    A component that never varied (std below 1e-8, or below what float32 resolves beside its mean)
    is centred only. Before any data nothing changes but the clipping. Bool leaves are flags (an
    action mask): they pass unchanged.

    Args:
        stats: of such rows.
        x: a tree like the rows, with any number of leading axes.
        clip: bound in standard deviations; None turns it off.

    Returns:
        The tree in the dtype of the statistics: float32 for integer or uint8 rows.

    Raises:
        ValueError: `x` does not match the statistics, or `clip` is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> stats = RunningStatistics(jnp.ones(()), mean=jnp.array(100.0), var=jnp.array(25.0))
        >>> print(normalize_with(stats, jnp.array([110, 1000])))
        [ 2. 10.]
    """
    _checks.in_range("clip", clip, 0.0, open_low=True)
    _, leaves, mean, var, tree = _aligned(stats, x)

    def normalized(x: Array, m: Array, v: Array) -> Array:
        if x.dtype == jnp.bool_:
            return x
        z = (x.astype(m.dtype) - m) / _std(m, v)
        return z if clip is None else jnp.clip(z, -clip, clip)

    return tree.unflatten([normalized(x, m, v) for x, m, v in zip(leaves, mean, var, strict=True)])


def init_return_statistics(num_envs: int | tuple[int, ...]) -> ReturnStatistics:
    """Return statistics before any reward: scaling changes nothing.

    Args:
        num_envs: ``B``, or the shape of one time step of rewards.

    Returns:
        The statistics, float32.

    Example:
        >>> print(init_return_statistics(3).discounted)
        [0. 0. 0.]
    """
    shape = (
        num_envs if isinstance(num_envs, tuple) else (_checks.positive_int("num_envs", num_envs),)
    )
    return ReturnStatistics(
        discounted=jnp.zeros(shape, jnp.float32),
        count=jnp.zeros((), jnp.float32),
        mean=jnp.zeros((), jnp.float32),
        var=jnp.ones((), jnp.float32),
    )


def update_return_statistics(
    stats: ReturnStatistics,
    rewards: ArrayLike,
    terminated: ArrayLike,
    truncated: ArrayLike,
    *,
    gamma: ArrayLike,
    pmean: Pmean = one_replica,
) -> ReturnStatistics:
    """Carries the running discounted returns through a rollout and merges them all.

    y(t) = R(t+1) + γ y(t−1), with y = 0 before the first reward of an episode

    A return that is not finite (an environment that gave NaN) is left out of the statistics, and
    its episode's end clears it.

    Args:
        stats: before the rollout.
        rewards: ``[T, B]``, R(t+1); any trailing shape.
        terminated: ``[T, B]`` flags of that step.
        truncated: ``[T, B]`` flags of that step.
        gamma: discount in [0, 1], a scalar.
        pmean: as for `update_statistics`; the running returns stay those of a replica's own
            environments.

    Returns:
        The statistics after the rollout.

    Raises:
        ValueError: shapes differ, or `gamma` is outside [0, 1].
        TypeError: a flag is a float array.

    Example:
        >>> import jax.numpy as jnp
        >>> ends = jnp.array([[False], [True], [False]])
        >>> stats = init_return_statistics(1)
        >>> stats = update_return_statistics(stats, jnp.ones((3, 1)), ends, ends & False, gamma=0.5)
        >>> print(stats.discounted, stats.count)  # 1, 1.5 | 1
        [1.] 3.0

    References:
        Engstrom et al., "Implementation Matters in Deep Policy Gradients", arXiv:2005.12729,
        section 3 ("reward scaling").
    """
    rewards = _checks.as_float("rewards", rewards)
    terminated = _checks.as_flag("terminated", terminated)
    truncated = _checks.as_flag("truncated", truncated)
    _checks.same_shape(rewards=rewards, terminated=terminated, truncated=truncated)
    _checks.has_time_axis("rewards", rewards)
    if rewards.shape[1:] != stats.discounted.shape:
        raise ValueError(
            f"rewards {rewards.shape} do not fit statistics of environments "
            f"{stats.discounted.shape}"
        )
    _checks.in_range("gamma", gamma, 0.0, 1.0)
    gamma = _checks.scalar("gamma", gamma, jnp.float32)

    def step(before: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        reward, done = row
        discounted = reward + gamma * before
        # where, not times (1 - done): NaN times 0 stays NaN for ever
        return jnp.where(done, 0.0, discounted), discounted

    after, returns = jax.lax.scan(
        step, stats.discounted, (rewards.astype(jnp.float32), terminated | truncated)
    )
    merged = update_statistics(
        RunningStatistics(stats.count, stats.mean, stats.var),
        returns,
        jnp.isfinite(returns),
        pmean=pmean,
    )
    return ReturnStatistics(after, *merged)


def scale_rewards(
    stats: ReturnStatistics, rewards: ArrayLike, *, clip: float | None = 10.0
) -> Array:
    """Rewards in units of the standard deviation of the discounted return, not centred.

    R / std(y), clipped to ±clip. Centring would change which behaviour is best: it pays or charges
    for every step that an episode lasts.

    Args:
        stats: of the same environments.
        rewards: any shape.
        clip: bound on the result; None turns it off.

    Returns:
        The scaled rewards; unchanged but for clipping before any data, and while the return has
        never varied.

    Raises:
        ValueError: `clip` is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> stats = init_return_statistics(1)._replace(mean=jnp.array(7.0), var=jnp.array(4.0))
        >>> print(scale_rewards(stats, jnp.array([1, -6, 100])))
        [ 0.5 -3.  10. ]

    References:
        Engstrom et al., "Implementation Matters in Deep Policy Gradients", arXiv:2005.12729,
        section 3.
    """
    _checks.in_range("clip", clip, 0.0, open_low=True)
    scaled = _checks.as_float("rewards", rewards) / _std(stats.mean, stats.var)
    return scaled if clip is None else jnp.clip(scaled, -clip, clip)


def _float_dtype(x: ArrayLike) -> jnp.dtype:
    return jnp.promote_types(jnp.float32, jnp.result_type(x))


def _aligned(stats: RunningStatistics, batch: PyTree) -> tuple:
    """``(leading shape, leaves, means, variances, structure)``, once they fit each other."""
    leaves, tree = jax.tree.flatten(batch)
    mean, expected = jax.tree.flatten(stats.mean)
    if tree != expected:
        raise ValueError(f"the statistics are of rows like {expected}, got {tree}")
    leaves = [_checks.as_array("observation", x) for x in leaves]
    leads = [x.shape[: x.ndim - m.ndim] for x, m in zip(leaves, mean, strict=True)]
    for x, m in zip(leaves, mean, strict=True):
        if x.shape != (*leads[0], *m.shape):
            raise ValueError(
                f"the statistics are of rows of shapes {[m.shape for m in mean]}, "
                f"got {[x.shape for x in leaves]}"
            )
    return leads[0] if leads else (), leaves, mean, jax.tree.leaves(stats.var), tree


def _merge(
    mean: Array,
    var: Array,
    x: Array,
    mask: Array | None,
    num_axes: int,
    n: Array,
    w: Array,
    kept: Array,
    pmean: Pmean,
) -> tuple[Array, Array]:
    """Mean and variance of old rows (weight `kept`) and the `n` new ones (weight `w`) together."""
    axes = tuple(range(num_axes))
    where = None if mask is None else mask.reshape(mask.shape + (1,) * mean.ndim)

    def average(x: Array) -> Array:
        total = pmean(jnp.sum(x, axis=axes, where=where))
        return total / jnp.maximum(n, 1.0).astype(mean.dtype)

    x = x.astype(mean.dtype)
    batch_mean = average(x)
    centred = x - batch_mean
    # summing large numbers in float32 leaves the mean a little off: centre once more
    error = average(centred)
    batch_mean, centred = batch_mean + error, centred - error
    w, kept = w.astype(mean.dtype), kept.astype(mean.dtype)
    delta = batch_mean - mean
    return mean + w * delta, kept * var + w * average(centred * centred) + w * kept * delta * delta


def _std(mean: Array, var: Array) -> Array:
    """The standard deviation, or 1 where it is not above the rounding of the mean."""
    resolution = 1e-8 + 4.0 * jnp.finfo(mean.dtype).eps * jnp.abs(mean)
    return jnp.sqrt(jnp.where(var > resolution * resolution, var, 1.0))
