"""Floor 6: what a run shows at a terminal, or in a log file when there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from jaxpg.aggregates import Summary
from jaxpg.runs import Point

LINES = 10
"""Progress lines of a run whose output is no terminal."""


def make_console() -> Console:
    """Standard output; where that is no terminal, lines of 120 columns at least."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 120))


def grouped(x: float, digits: int = 1) -> str:
    """A number with thousands apart, ``nan`` for none: ``12,345.6``."""
    return f"{x:,.{digits}f}"


class RunDisplay:
    """Shows steps, steps a second and the score while a run trains.

    A live bar on a terminal; elsewhere (a pipe, a file, a notebook) a line every tenth of the
    run, without control characters.

    Args:
        console: where to write.
        total_steps: of each seed, at the end.
        done: steps of each seed that an earlier call did.
        num_seeds: seeds trained side by side; steps a second count all of them.
        score: name of the metric shown.
        label: what to call it.
        unit: what a step is called.
        digits: of the score, after the point.
        quiet: show nothing.
    """

    def __init__(
        self,
        console: Console,
        *,
        total_steps: int,
        done: int,
        num_seeds: int,
        score: str,
        label: str,
        unit: str = "steps",
        digits: int = 1,
        quiet: bool = False,
    ) -> None:
        self._unit, self._digits = unit, digits
        self._console, self._quiet = console, quiet
        self._total, self._done, self._num_seeds = total_steps, done, num_seeds
        self._score, self._label = score, label
        self._next_line = 0.0
        self._last = float("nan")
        self._live: Progress | None = None
        if console.is_terminal and not quiet:
            self._live = Progress(
                TextColumn(f"{{task.fields[steps]}} {unit} a seed"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[speed]}"),
                TextColumn("{task.fields[score]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._live.add_task(
                "train", total=total_steps, completed=done, steps=f"{done:,}", speed="", score=""
            )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def show(self, point: Point) -> bool:
        """Takes the next point of the run; whether it opens a new tenth of it, or is its end."""
        scores = point.metrics[self._score]
        if not np.isnan(scores).all():
            self._last = float(np.nanmean(scores))
        speed = (point.steps - self._done) * self._num_seeds / max(point.seconds, 1e-9)
        speed_text = f"{speed:,.0f} {self._unit}/s"
        score_text = f"{self._label} {grouped(self._last, self._digits)}"
        if diverged := int(point.metrics["diverged"].sum()):
            score_text += f" ({diverged} diverged)"
        if self._live:
            self._live.update(
                self._task,
                completed=point.steps,
                steps=f"{point.steps:,}",
                speed=speed_text,
                score=score_text,
            )
        due = point.steps >= self._total or point.steps >= self._next_line * self._total
        if due:
            self._next_line = int(point.steps / self._total * LINES + 1) / LINES
        if due and not self._live and not self._quiet:
            self._console.print(
                f"  {point.steps:>11,} / {self._total:,} {self._unit} a seed"
                f"  {score_text:>16}  {speed_text}",
                highlight=False,
            )
        return due


def scores_table(
    summaries: Mapping[str, Summary],
    *,
    title: str,
    label: str,
    num_episodes: int,
    episode_label: str = "episodes",
    digits: int = 1,
) -> Table:
    """A row for each way of acting: IQM over seeds, its interval, mean, worst and best seed.

    Args:
        summaries: by way of acting.
        title: above the table.
        label: what a score is.
        num_episodes: of each seed.
        episode_label: what they are.
        digits: of a score, after the point.

    Returns:
        The table.
    """
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(f"{label} of")
    for column in ("IQM", "95% interval", "mean", "min", "max", "seeds", episode_label):
        table.add_column(column, justify="right")
    for name, x in summaries.items():
        iqm, low, high, mean, minimum, maximum = (
            grouped(score, digits) for score in (x.iqm, x.low, x.high, x.mean, x.minimum, x.maximum)
        )
        interval = "one seed" if x.num_seeds == 1 else f"{low} … {high}"
        cells = (iqm, interval, mean, minimum, maximum)
        table.add_row(name, *cells, str(x.num_seeds), f"{x.num_seeds} × {num_episodes}")
    return table


def lines_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str) -> Table:
    """A plain table of text, for `jaxpg list`."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, no_wrap=i == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
