"""Floor 6: where the numbers of a run go while it trains.

A logger is anything with `Logger`'s two methods; hand it to `jaxpg.runs.train_run`.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np

AXES = ("update", "steps", "seconds")
"""What each point of a run is found by; everything else in a metrics file is per seed."""


class Logger(Protocol):
    """Receives the numbers of a run, a few dozen times over its length."""

    def log(
        self, update: int, steps: int, seconds: float, metrics: Mapping[str, np.ndarray]
    ) -> None:
        """Takes one point.

        Args:
            update: updates done.
            steps: environment steps of each seed so far.
            seconds: time spent training so far, compilation left out.
            metrics: ``[seeds]`` each, over the updates since the last point: sums for counts,
                means for the rest; NaN for returns where no episode ended.
        """
        ...

    def close(self) -> None:
        """Called once, after the last point."""
        ...


class CSVLogger:
    """One row per point and seed, in a file that any table reader takes.

    Args:
        path: the file; its folder exists.
        append: go on after the rows that are there; their columns must be the same.
    """

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        self.path = Path(path)
        self._columns: list[str] | None = None
        if append and self.path.exists():
            with self.path.open(newline="") as file:
                self._columns = next(csv.reader(file), None)
        self._file = self.path.open("a" if self._columns else "w", newline="")
        self._writer = csv.writer(self._file)

    def log(
        self, update: int, steps: int, seconds: float, metrics: Mapping[str, np.ndarray]
    ) -> None:
        """Writes one row per seed and flushes, so that a killed run keeps its points."""
        columns = [*AXES, "seed", *metrics]
        if self._columns is None:
            self._columns = columns
            self._writer.writerow(columns)
        if columns != self._columns:
            raise ValueError(f"{self.path} has columns {self._columns}, got {columns}")
        rows = zip(*(np.asarray(x).tolist() for x in metrics.values()), strict=True)
        for seed, row in enumerate(rows):
            numbers = [f"{x:.7g}" for x in row]
            self._writer.writerow([update, steps, f"{seconds:.3f}", seed, *numbers])
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: str | Path) -> dict[str, np.ndarray]:
    """Reads what `CSVLogger` wrote.

    Args:
        path: the file.

    Returns:
        ``update``, ``steps`` and ``seconds`` as ``[points]``, every metric as ``[points, seeds]``.

    Raises:
        ValueError: the file holds no points, or points of unequal numbers of seeds.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with CSVLogger(folder + "/metrics.csv") as logger:
        ...         logger.log(1, 100, 0.5, {"episode_return": np.array([20.0, 22.0])})
        ...         logger.log(2, 200, 0.9, {"episode_return": np.array([30.0, 35.0])})
        ...     metrics = read_metrics(folder + "/metrics.csv")
        >>> metrics["steps"].tolist(), metrics["episode_return"].shape
        ([100, 200], (2, 2))
    """
    with Path(path).open(newline="") as file:
        columns, *rows = list(csv.reader(file)) or [[]]
    if not rows:
        raise ValueError(f"{path} holds no points")
    table = np.array(rows, np.float64)
    at = {name: i for i, name in enumerate(columns)}
    num_seeds = int(table[:, at["seed"]].max()) + 1
    if len(table) % num_seeds or (table[:, at["seed"]] != np.arange(len(table)) % num_seeds).any():
        raise ValueError(f"{path} holds points of unequal numbers of seeds")
    by_point = table.reshape(-1, num_seeds, len(columns))
    metrics = {n: by_point[:, :, i] for n, i in at.items() if n not in (*AXES, "seed")}
    axes = {name: by_point[:, 0, at[name]] for name in AXES}
    axes |= {name: axes[name].astype(np.int64) for name in ("update", "steps")}
    return axes | metrics


def drop_points_after(path: str | Path, update: int) -> None:
    """Removes the points past `update`: a run that goes on from a checkpoint writes them anew."""
    path = Path(path)
    with path.open(newline="") as file:
        columns, *rows = list(csv.reader(file)) or [[]]
    kept = [row for row in rows if int(row[columns.index("update")]) <= update]
    if len(kept) < len(rows):
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([columns, *kept])
