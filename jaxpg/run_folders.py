"""Floor 6: the folder that a run leaves, and a run from its folder.

========================  =====================================================================
``config.json``           the description that the run follows from, and the versions it ran with
``metrics.csv``           one row per point and seed (`jaxpg.loggers.read_metrics`)
``learning_curve.png``    the score of every seed, their interquartile mean and interval
``results.json``          scores at the end, speed, time to compile, what diverged
``checkpoint``            the whole state of every seed (`jaxpg.load_checkpoint`)
========================  =====================================================================
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import math
import platform
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpg.aggregates import Summary
from jaxpg.checkpoints import load_checkpoint, save_checkpoint
from jaxpg.loggers import read_metrics
from jaxpg.plotting import save_learning_curve
from jaxpg.presets import preset
from jaxpg.registry import domain_of
from jaxpg.runs import RunSpec, Trained, abstract_states
from jaxpg.types import TrainState

CONFIG = "config.json"
METRICS = "metrics.csv"
CURVE = "learning_curve.png"
RESULTS = "results.json"
CHECKPOINT = "checkpoint"
FILES = (CONFIG, METRICS, CURVE, RESULTS, CHECKPOINT)


def free_folder(path: Path | None, spec: RunSpec, *, overwrite: bool) -> Path:
    """Where a run may write; nothing is created or removed yet.

    Args:
        path: the user's choice; None is ``runs/<algorithm>-<environment>-<time>``.
        spec: names the folder.
        overwrite: an older run may stand there.

    Returns:
        The path.

    Raises:
        FileExistsError: something else stands there, or a run and `overwrite` is not set.
    """
    if path is None:
        names = f"{spec.algorithm}-{spec.environment}".replace("/", "-")
        base = free = Path("runs") / f"{names}-{time.strftime('%Y%m%d-%H%M%S')}"
        others = itertools.count(2)
        while free.exists():
            free = base.with_name(f"{base.name}-{next(others)}")
        return free
    if not path.exists():
        return path
    if not overwrite:
        raise FileExistsError(f"run_dir {path} exists: choose another, or give --overwrite")
    if not path.is_dir() or (any(path.iterdir()) and not (path / CONFIG).exists()):
        raise FileExistsError(f"run_dir {path} is no run folder: it is not overwritten")
    return path


def start_folder(path: Path, spec: RunSpec) -> None:
    """Creates the folder with its description, without the files of an older run."""
    path.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        old = path / name
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink(missing_ok=True)
    write_config(path, spec)


def write_config(path: Path, spec: RunSpec) -> None:
    """Writes the description, readable and complete."""
    _write_json(path / CONFIG, {**dataclasses.asdict(spec), "versions": versions()})


def read_config(path: Path) -> RunSpec:
    """The description of a run.

    Raises:
        FileNotFoundError: `path` is no run folder.
        ValueError: the description is damaged, or of a version with other settings.
    """
    if not (path / CONFIG).is_file():
        raise FileNotFoundError(f"{path} is no run folder: it has no {CONFIG}")
    try:
        saved = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        saved.pop("versions")
        like = preset(saved["algorithm"], saved["environment"])
        return RunSpec(
            **saved
            | {
                "config": _filled(like.config, saved["config"]),
                "network": _filled(like.network, saved["network"]),
                "environment_options": _filled(like.environment, saved["environment_options"]),
            }
        )
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path / CONFIG} does not describe a run of this version: {error}"
        ) from error


def save_states(path: Path, states: TrainState) -> None:
    """Writes the whole state of every seed; an older checkpoint stays until this one is whole."""
    save_checkpoint(path / CHECKPOINT, states, overwrite=True)


def load_states(path: Path, spec: RunSpec, algorithm: Any) -> TrainState:
    """Reads the whole state of every seed.

    Raises:
        FileNotFoundError: the run was cut before its first checkpoint.
        ValueError: the states are not those of `spec`.
    """
    return load_checkpoint(path / CHECKPOINT, abstract_states(algorithm, spec))


def write_curve(path: Path, spec: RunSpec, trained: Trained) -> None:
    """Draws the learning curve from the metrics file, all of it."""
    domain = domain_of(spec.environment)
    metrics = read_metrics(path / METRICS)
    failed = int(trained.diverged.sum())
    title = f"{spec.algorithm} on {spec.environment}"
    if failed:
        title += f" ({failed} of {spec.num_seeds} seeds diverged)"
    save_learning_curve(
        path / CURVE,
        metrics["steps"],
        metrics[domain.score],
        title=title,
        xlabel=f"{domain.step_label} per seed",
        ylabel=f"{domain.score_label} while training",
    )


def write_results(
    path: Path, trained: Trained, scores: Mapping[str, np.ndarray], summaries: Mapping[str, Summary]
) -> None:
    """Writes what came out, the mean score of every seed included; NaN becomes null."""
    evaluation = {
        name: summary._asdict()
        | {"episodes": scores[name].shape[1], "seed_means": scores[name].mean(axis=1).tolist()}
        for name, summary in summaries.items()
    }
    results = {
        "update": trained.update,
        "steps_per_seed": trained.steps,
        "evaluation": evaluation,
        "steps_per_second": trained.steps_run / trained.run_seconds,
        "run_seconds": trained.run_seconds,
        "compile_seconds": trained.compile_seconds,
        "diverged_seeds": np.flatnonzero(trained.diverged).tolist(),
        "diverged_at_steps": trained.diverged_at,
        "device": device(),
        "versions": versions(),
    }
    _write_json(path / RESULTS, results)


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    import jaxpg

    names = ("jax", "jaxlib", "flax", "optax", "gymnax", "numpy")
    return {
        "jaxpg": jaxpg.__version__,
        **{name: importlib.metadata.version(name) for name in names},
        "python": platform.python_version(),
    }


def device() -> str:
    """What the run ran on, such as ``2 × cpu``."""
    devices = jax.devices()
    return f"{len(devices)} × {devices[0].device_kind}"


def _filled(like: Any, saved: Mapping[str, Any]) -> Any:
    """`like` with every field as it was saved; a missing or an unknown field is a `TypeError`."""
    names = {field.name for field in dataclasses.fields(like)}
    if names != set(saved):
        differing = ", ".join(sorted(names.symmetric_difference(saved)))
        raise TypeError(f"settings differ in {differing}")
    values = {n: tuple(x) if isinstance(x, list) else x for n, x in saved.items()}
    return dataclasses.replace(like, **values)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(_plain(content), indent=2, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _plain(x: Any) -> Any:
    """JSON has no NaN: null stands for a number that is none."""
    if isinstance(x, Mapping):
        return {name: _plain(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(value) for value in x]
    if isinstance(x, float) and not math.isfinite(x):
        return None
    return x
