"""Floor 6: a run from its first update to its table, at a terminal, with its folder."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from jaxpg.aggregates import summarize
from jaxpg.loggers import CSVLogger
from jaxpg.registry import domain_of
from jaxpg.run_folders import CHECKPOINT, METRICS, save_states, write_curve, write_results
from jaxpg.runs import Point, RunSpec, Trained, evaluate_run, seed_keys, train_run
from jaxpg.terminal import RunDisplay, make_console, scores_table
from jaxpg.types import TrainState

CHECKPOINT_SECONDS = 300.0
"""A running run writes its checkpoint this often, and at the end."""


def run_to_end(
    spec: RunSpec,
    algorithm: Any,
    folder: Path,
    run: Any,
    *,
    states: TrainState | None = None,
    notes: Sequence[str] = (),
    mesh: Mesh | None = None,
) -> int:
    """Trains, evaluates, prints and writes everything; the exit code."""
    console = make_console()
    domain = domain_of(spec.environment)
    per_update = domain.steps_per_update(algorithm, spec.config)
    total = spec.num_updates * per_update
    done = 0 if states is None else int(np.asarray(states.update)[0]) * per_update

    def say(text: str) -> None:
        if not run.quiet:
            console.print(text, highlight=False, soft_wrap=True, markup=False)

    say(
        f"{spec.algorithm} on {spec.environment}: {spec.num_seeds} seeds × {total:,} "
        f"{domain.step_label} ({spec.num_updates:,} updates of {per_update:,})"
        + ("" if mesh is None else f", on {mesh.size} devices")
    )
    for note in [*notes, f"run folder: {folder}"]:
        say(note)
    display = RunDisplay(
        console,
        total_steps=total,
        done=done,
        num_seeds=spec.num_seeds,
        score=domain.score,
        label=domain.score_label,
        unit=domain.unit,
        digits=domain.digits,
        quiet=run.quiet,
    )
    samples = None
    if domain.samples is not None and not run.quiet:
        # evaluations at the end fold in 0 and 1
        key = jax.random.fold_in(seed_keys(spec)[1], 2)
        samples = domain.samples(algorithm, spec.config, key)
    saved_at = time.monotonic()

    def on_point(point: Point, states: TrainState) -> None:
        nonlocal saved_at
        due = display.show(point)
        if due and samples is not None:
            for line in samples(states):
                say(f"      {line}")
        watch.update(point)
        if time.monotonic() - saved_at > CHECKPOINT_SECONDS:
            save_states(folder, states)
            saved_at = time.monotonic()

    watch = Watch()
    with display, interruptible() as interrupted:
        trained = train_run(
            spec,
            algorithm,
            states=states,
            mesh=mesh,
            chunk_size=run.chunk_size,
            loggers=[CSVLogger(folder / METRICS, append=True)],
            on_compiled=lambda seconds: say(f"compiled in {seconds:.1f} s"),
            on_point=on_point,
            stop=interrupted,
        )
    save_states(folder, trained.states)
    write_curve(folder, spec, trained)
    if trained.update < spec.num_updates and interrupted():
        say(
            f"stopped at {trained.steps:,} {domain.unit}; go on with: jaxpg train --resume {folder}"
        )
        return 130
    print_results(console, spec, algorithm, folder, trained, run.eval_episodes)
    return warn(watch, trained, spec)


def print_results(
    console: Console,
    spec: RunSpec,
    algorithm: Any,
    folder: Path,
    trained: Trained,
    num_episodes: int,
) -> None:
    """Evaluates both ways, writes ``results.json`` and prints the table."""
    domain = domain_of(spec.environment)
    scores = {
        name: evaluate_run(
            spec, algorithm, trained.states, num_episodes=num_episodes, deterministic=greedy
        )
        for name, greedy in (("greedy", True), ("sampled", False))
    }
    summaries = {name: summarize(x) for name, x in scores.items()}
    write_results(folder, trained, scores, summaries)
    console.print(
        scores_table(
            summaries,
            title=f"{spec.algorithm} on {spec.environment} after {trained.steps:,} "
            f"{domain.unit} a seed",
            label=domain.score_label,
            num_episodes=num_episodes,
            episode_label=domain.episode_label,
            digits=domain.digits,
        )
    )
    speed = trained.steps_run / trained.run_seconds
    console.print(
        f"{speed:,.0f} {domain.unit} a second over all seeds: "
        f"{trained.steps_run:,} {domain.unit} in "
        f"{trained.run_seconds:.1f} s, after {trained.compile_seconds:.1f} s of compilation\n"
        f"results, metrics, learning curve and {CHECKPOINT}: {folder}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


class Watch:
    """Sums up what a run's info says went wrong."""

    def __init__(self) -> None:
        self.nonfinite = 0.0
        self.unbootstrapped = 0.0

    def update(self, point: Point) -> None:
        """Takes the next point."""
        zero = np.zeros(1)
        self.nonfinite = max(self.nonfinite, point.metrics.get("nonfinite", zero).max())
        self.unbootstrapped += point.metrics.get("unbootstrapped", zero).sum()


def warn(watch: Watch, trained: Trained, spec: RunSpec) -> int:
    """Says on stderr what the table cannot: the exit code, 1 when seeds diverged."""
    failed = int(trained.diverged.sum())
    if failed:
        print(
            f"jaxpg: {failed} of {spec.num_seeds} seeds diverged: their parameters hold NaN or "
            f"inf, first seen at {trained.diverged_at:,} {domain_of(spec.environment).unit}",
            file=sys.stderr,
        )
    elif watch.nonfinite > 0:
        print(
            f"jaxpg: gradients held NaN or inf in up to {watch.nonfinite:.0%} of the optimizer "
            f"steps between two points (column nonfinite of {METRICS})",
            file=sys.stderr,
        )
    if watch.unbootstrapped > 0:
        print(
            f"jaxpg: {watch.unbootstrapped:,.0f} truncations came sooner than the environment's "
            "time limit promises: they were bootstrapped from the state before",
            file=sys.stderr,
        )
    return 1 if failed else 0


@contextlib.contextmanager
def interruptible() -> Iterator[Any]:
    """Ctrl-C asks for an orderly end; a second one ends at once. Yields whether it was asked."""
    pressed = False

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        print("\nstopping at the next point (again: at once)", file=sys.stderr)

    try:
        before = signal.signal(signal.SIGINT, on_interrupt)
    except ValueError:  # not the main thread: nobody presses keys here
        yield lambda: False
        return
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
