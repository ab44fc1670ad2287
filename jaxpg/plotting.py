"""Floor 6: learning curves.

Figures are made without pyplot: nothing global, no window, any backend of the caller untouched.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxpg.aggregates import bootstrap_interval, interquartile_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Curve(NamedTuple):
    """A statistic along a run."""

    steps: np.ndarray  # [points]
    center: np.ndarray  # [points] interquartile mean over seeds
    low: np.ndarray  # [points] ends of the bootstrap interval; equal to center for one seed
    high: np.ndarray


def learning_curve(
    steps: ArrayLike, returns: ArrayLike, *, confidence: float = 0.95, num_resamples: int = 500
) -> Curve:
    """Interquartile mean and bootstrap interval over seeds, at each point.

    A seed for which no episode ended since the last point (NaN) keeps its last value; points
    before every seed has one are left out.

    Args:
        steps: ``[points]`` environment steps of each seed.
        returns: ``[points, seeds]`` mean returns of the episodes that ended since the last point.
        confidence: of the pointwise interval.
        num_resamples: of the bootstrap.

    Returns:
        A `Curve`, at most ``points`` long.

    Raises:
        ValueError: shapes that do not fit.

    Example:
        >>> curve = learning_curve([10, 20, 30], [[1.0, np.nan], [2.0, 4.0], [np.nan, 6.0]])
        >>> curve.steps.tolist(), curve.center.tolist()
        ([20, 30], [3.0, 4.0])
    """
    at, values = np.asarray(steps), np.array(returns, np.float64)
    if values.ndim != 2 or at.shape != values.shape[:1]:
        raise ValueError(
            f"steps must be [points] and returns [points, seeds], got {at.shape}, {values.shape}"
        )
    for point in range(1, len(values)):
        values[point] = np.where(np.isnan(values[point]), values[point - 1], values[point])
    known = ~np.isnan(values).any(axis=1)
    at, values = at[known], values[known]
    center = interquartile_mean(values, axis=1)
    if values.shape[1] < 2 or not len(values):
        return Curve(at, center, center, center)
    intervals = [
        bootstrap_interval(row, confidence=confidence, num_resamples=num_resamples)
        for row in values
    ]
    low, high = np.array(intervals).T
    return Curve(at, center, low, high)


def plot_curve(axes: Axes, curve: Curve, *, label: str | None = None) -> None:
    """Draws a curve as a line in its interval.

    Args:
        axes: matplotlib axes.
        curve: from `learning_curve`.
        label: for the legend.
    """
    (line,) = axes.plot(curve.steps, curve.center, label=label, linewidth=1.8)
    axes.fill_between(
        curve.steps, curve.low, curve.high, color=line.get_color(), alpha=0.2, linewidth=0
    )


def save_learning_curve(
    path: str | Path,
    steps: ArrayLike,
    returns: ArrayLike,
    *,
    title: str,
    xlabel: str = "environment steps per seed",
    ylabel: str = "return of training episodes",
    confidence: float = 0.95,
) -> None:
    """Writes the picture of one run: every seed thin, their interquartile mean in its interval.

    Args:
        path: the file; its ending chooses the format.
        steps: ``[points]`` environment steps of each seed.
        returns: ``[points, seeds]``, NaN where no episode ended.
        title: above the picture.
        xlabel: what `steps` counts.
        ylabel: what `returns` is.
        confidence: of the interval.

    Raises:
        ValueError: shapes that do not fit.
    """
    from matplotlib.figure import Figure

    curve = learning_curve(steps, returns, confidence=confidence)
    values = np.asarray(returns, np.float64)
    num_seeds = values.shape[1]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for seed in range(num_seeds):
        known = ~np.isnan(values[:, seed])
        axes.plot(
            np.asarray(steps)[known], values[known, seed], color="0.75", linewidth=0.6, zorder=1
        )
    label = f"interquartile mean of {num_seeds} seeds, {confidence:.0%} interval"
    plot_curve(axes, curve, label=label if num_seeds > 1 else "one seed")
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=120)
