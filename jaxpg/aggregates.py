"""Floor 5: what many seeds say together: interquartile mean and bootstrap interval.

Plain NumPy on the host: scores arrive after training, a few hundred numbers at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxpg._checks import in_range, positive_int

Statistic = Callable[..., np.ndarray]
"""``(scores, axis) -> `` the statistic over the tuple of axes `axis`, like `numpy.mean`."""


class Summary(NamedTuple):
    """What is reported of the returns of several seeds."""

    iqm: float
    low: float  # of the bootstrap interval; NaN for a single seed
    high: float
    mean: float
    minimum: float  # the worst seed
    maximum: float
    num_seeds: int


def interquartile_mean(scores: ArrayLike, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
    """The mean of the middle half of the scores.

    ``⌊n/4⌋`` scores are left out at either end: less moved by one lucky or unlucky seed than the
    mean, and less wasteful of the others than the median.

    Args:
        scores: numbers of any shape; NaN anywhere gives NaN.
        axis: the axes reduced together; None takes all.

    Returns:
        The means, with those axes removed.

    Example:
        >>> float(interquartile_mean([0, 10, 11, 12, 13, 14, 15, 900]))
        12.5

    References:
        Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice,
        arXiv 2108.13264, section 4.3.
    """
    from scipy.stats import trim_mean

    array = np.asarray(scores, np.float64)
    axes = tuple(range(array.ndim)) if axis is None else np.atleast_1d(axis)
    axes = tuple(int(a) % array.ndim for a in axes)
    kept = [a for a in range(array.ndim) if a not in axes]
    shape = [array.shape[a] for a in kept]
    size = math.prod(array.shape[a] for a in axes)
    rows = array.transpose(*kept, *axes).reshape(*shape, size)
    trimmed = np.asarray(trim_mean(rows, 0.25, axis=-1))
    # a sort puts NaN last, where trimming would drop it unseen
    return np.where(np.isnan(rows).any(axis=-1), np.nan, trimmed)


def bootstrap_interval(
    scores: ArrayLike,
    statistic: Statistic = interquartile_mean,
    *,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of a statistic over seeds, stratified by task.

    Seeds are drawn with replacement within each task, never across, and the statistic is taken
    over all tasks and seeds of a resample. The seed is the unit: average its episodes first, for
    episodes of one seed are no independent evidence about the algorithm.

    Args:
        scores: ``[seeds]``, or ``[tasks, seeds]`` (comparable scales are the caller's care).
        statistic: ``(scores, axis)``, for example `numpy.mean`.
        confidence: probability mass between the ends, in (0, 1).
        num_resamples: resamples drawn.
        seed: of the resampling: the same scores give the same interval.

    Returns:
        ``(low, high)``; NaN for both when a score is NaN.

    Raises:
        ValueError: fewer than two seeds, another rank, or a number out of range.

    Example:
        >>> low, high = bootstrap_interval([1.0, 2.0, 3.0, 4.0, 5.0])
        >>> 1.0 <= low < 3.0 < high <= 5.0
        True

    References:
        Agarwal et al., arXiv 2108.13264, section 4.1 (stratified bootstrap intervals).
    """
    array = np.asarray(scores, np.float64)
    if array.ndim not in (1, 2) or array.shape[-1] < 2:
        raise ValueError(
            f"scores must be [seeds] or [tasks, seeds] with 2 seeds or more, got {array.shape}"
        )
    in_range("confidence", confidence, 0, 1, open_low=True, open_high=True)
    positive_int("num_resamples", num_resamples)
    strata = np.atleast_2d(array)
    num_tasks, num_seeds = strata.shape
    generator = np.random.default_rng(seed)
    drawn = generator.integers(num_seeds, size=(num_resamples, num_tasks, num_seeds))
    resamples = strata[np.arange(num_tasks)[:, None], drawn]
    statistics = statistic(resamples, axis=(1, 2))
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(statistics, [tail, 1.0 - tail])
    return float(low), float(high)


def summarize(
    returns: ArrayLike, *, confidence: float = 0.95, num_resamples: int = 2000, seed: int = 0
) -> Summary:
    """Interquartile mean over seeds with its bootstrap interval, mean, and the worst seed.

    Args:
        returns: ``[seeds]``, or ``[seeds, episodes]``, averaged over the episodes of a seed.
        confidence: of the interval.
        num_resamples: of the bootstrap.
        seed: of the bootstrap.

    Returns:
        A `Summary` of Python numbers.

    Raises:
        ValueError: no returns, or another rank.

    Example:
        >>> summary = summarize([[499.0, 501.0], [480.0, 480.0], [500.0, 500.0], [500.0, 500.0]])
        >>> summary.iqm, summary.minimum
        (500.0, 480.0)
    """
    array = np.asarray(returns, np.float64)
    if array.ndim not in (1, 2) or array.size == 0:
        raise ValueError(f"returns must be [seeds] or [seeds, episodes], got shape {array.shape}")
    scores = array if array.ndim == 1 else array.mean(axis=1)
    low = high = float("nan")
    if scores.size > 1:
        low, high = bootstrap_interval(
            scores, confidence=confidence, num_resamples=num_resamples, seed=seed
        )
    return Summary(
        iqm=float(interquartile_mean(scores)),
        low=low,
        high=high,
        mean=float(scores.mean()),
        minimum=float(scores.min()),
        maximum=float(scores.max()),
        num_seeds=scores.size,
    )
