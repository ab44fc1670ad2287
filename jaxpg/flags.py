"""Floor 6: flags of the command line, read by tyro from records and config fields.

Whatever is wrong with them becomes a `UsageError`, which is one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import jax
import tyro
from jax.sharding import Mesh

from jaxpg._checks import divides, positive_int
from jaxpg.presets import Preset
from jaxpg.sharding import device_mesh
from jaxpg.throughput import STAGES

T = TypeVar("T")

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


class UsageError(Exception):
    """What the user has to change, in one line."""


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How long, how often, and where to."""

    total_steps: int
    """Steps of each seed (completions on token tasks), rounded up to whole updates."""
    num_seeds: int = 4
    """Independent runs, trained side by side."""
    seed: int = 0
    """Where all random numbers start."""
    anneal: bool = False
    """Let the --annealed settings fall to 0 over the whole run."""
    eval_episodes: int = 32
    """Episodes (prompts on token tasks) of each seed at the end, greedy and again sampled."""
    run_dir: Path | None = None
    """Folder to write; None is runs/ALGORITHM-ENV-TIME."""
    overwrite: Switch = False
    """Replace the run that stands in --run-dir."""
    devices: int | None = None
    """Devices that the seeds are spread over, or the environments of a single one; on CPU jax makes
    them of the cores. None is as many as divide the seeds, and one for a single seed."""
    chunk_size: int | None = None
    """Seeds trained at a time; None is up to 16 a device on a CPU (for its cache), else all."""
    quiet: Switch = False
    """Print the results and nothing before."""


@dataclasses.dataclass(frozen=True)
class ResumeOptions:
    """How far to go on."""

    resume: Path
    """The run folder to go on in."""
    total_steps: int
    """Steps (or completions) of each seed since the run's start, rounded up to whole updates."""
    eval_episodes: int = 32
    """Episodes (prompts on token tasks) of each seed at the end, greedy and again sampled."""
    devices: int | None = None
    """Devices that the seeds are spread over, or the environments of a single one; on CPU jax makes
    them of the cores. None is as many as divide the seeds, and one for a single seed."""
    chunk_size: int | None = None
    """Seeds trained at a time; None is up to 16 a device on a CPU (for its cache), else all."""
    quiet: Switch = False
    """Print the results and nothing before."""


@dataclasses.dataclass(frozen=True)
class EvaluateOptions:
    """Play episodes with the policies of a run."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    episodes: int | None = None
    """Episodes of each seed; None is 100, but 500 prompts on a token task."""
    sampled: Switch = False
    """Sample actions, in place of taking the likeliest."""
    seed: int | None = None
    """Other episodes than those of the run's own evaluation."""


@dataclasses.dataclass(frozen=True)
class ListOptions:
    """Algorithms and environments, and what each supports."""


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """Environment steps a second: the environment alone, the policy in the loop, training.

    A preset, or a grid of one's own as soon as one of its flags is given.
    """

    preset: Literal["quick", "cpu", "gpu"] = "quick"
    """quick takes under 2 minutes on two cores; cpu has every algorithm; gpu has large sizes."""
    algorithms: tuple[str, ...] = ()
    """Of a grid; ppo if none is named."""
    environments: tuple[str, ...] = ()
    """Of a grid; CartPole-v1 if none is named."""
    num_seeds: tuple[int, ...] = ()
    """Of a grid, trained side by side; 1 if none is given."""
    num_envs: tuple[int, ...] = ()
    """Of a grid, of each seed; 64 if none is given."""
    num_steps: int = 128
    """Of a grid, of each environment and update; whole episodes for reinforce and grpo."""
    num_updates: int = 4
    """Of a grid, in one timed call."""
    network: Literal["mlp", "cnn"] = "mlp"
    """Of a grid."""
    stages: tuple[Literal["environment", "rollout", "training"], ...] = STAGES
    """What is timed."""
    repeats: int = 5
    """Timed calls of each, after a warm-up; the median is shown."""
    chunk_size: int | None = None
    """Seeds vmapped at a time; None, as in training, is up to 16 a device on a CPU, else all."""
    compute_dtype: Literal["bfloat16"] | None = None
    """Precision of the products in hidden layers; None is float32."""
    devices: int = 1
    """Devices that the seeds are spread over. On CPU jax makes as many of the cores."""
    output: Path = Path("bench")
    """Folder for a JSON file, a table and a picture."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Turns what the checks of the library raise into one line; used before anything compiles."""
    try:
        yield
    except (ValueError, TypeError, FileExistsError, FileNotFoundError) as error:
        raise UsageError(" ".join(str(error).split())) from error


def parse_settings(
    run: Any,
    settings: Preset,
    parts: Sequence[str],
    words: Sequence[str],
    *,
    prog: str,
    description: str,
) -> tuple[Any, Preset]:
    """Reads flags over the defaults in `run` and in the named parts of `settings`."""
    values = {"run": run} | {part: getattr(settings, part) for part in parts}
    fields = [
        (name, Annotated[type(value), tyro.conf.OmitArgPrefixes], dataclasses.field(default=value))
        for name, value in values.items()
    ]
    flags = dataclasses.make_dataclass("Flags", fields, frozen=True)
    parsed = parse(flags, words, prog=prog, description=description)
    changed = {part: getattr(parsed, part) for part in parts}
    if "config" in changed:
        changed["config"] = jax.tree.map(float, changed["config"])
    return parsed.run, dataclasses.replace(settings, **changed)


def parse(kind: type[T], words: Sequence[str], *, prog: str, description: str | None) -> T:
    """tyro, with its complaints in one line."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, args=list(words), prog=prog, description=description)
    except SystemExit as end:
        if not end.code:
            raise
        raise UsageError(one_line(complaint.getvalue(), prog)) from None


def one_line(box: str, prog: str) -> str:
    """The first statement of one of tyro's boxes, and the flags that it suggests.

    A box has a title, then sections between rules: a frame around it where stdout takes one (the
    title then stands in the frame), plain lines elsewhere.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│| \t") for line in text.splitlines()]
    sections: list[list[str]] = [[]]
    for line in lines:
        if re.fullmatch(r"[─-]+", line) or line.startswith("╭"):
            sections.append([])
        elif line and not line.startswith("╰"):
            sections[-1].append(line)
    sections = [section for i, section in enumerate(sections) if section or i == 0]
    _, statement, *others = sections if len(sections) > 1 else [[], lines]
    message = " ".join(" ".join(statement).split()).rstrip(".")
    meant: list[str] = []
    for heading, *rest in others:
        flags = [line.split()[0] for line in rest if line.startswith("--")]
        if heading.startswith(("Perhaps", "Arguments similar")):
            meant += flags[: 3 if heading.startswith("Perhaps") else 1]
    hint = f" (did you mean {' or '.join(meant)}?)" if meant else ""
    return f"{message}{hint}; see {prog} --help"


def value_of(flag: str, words: Sequence[str]) -> str | None:
    """What stands behind a flag that must be known before the others are parsed."""
    for i, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == flag:
            return value or (words[i + 1] if i + 1 < len(words) else "")
    return None


def resumed_folder(words: Sequence[str]) -> Path | None:
    """The folder behind ``--resume``; None without that flag.

    Raises:
        ValueError: nothing stands behind it.
    """
    value = value_of("--resume", words)
    if value is None:
        return None
    if not value or value.startswith("-"):
        raise ValueError("--resume needs the run folder to go on in")
    return Path(value)


def request_devices(words: Sequence[str], *, default: int = 1) -> None:
    """Has jax make as many CPU devices as ``--devices`` says: only before it starts.

    Whether they are there in the end is checked by `mesh_of`: jax may have started, or found
    other devices.
    """
    value = value_of("--devices", words)
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    number = default if value in (None, "None") else int(value) if value.isdecimal() else 1
    if number > 1:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", number)


def mesh_of(devices: int | None, num_seeds: int, chunk_size: int | None = None) -> Mesh | None:
    """The devices that the seeds are spread over, or a single one's environments; None for one.

    Args:
        devices: how many; None is the largest number that divides the seeds trained at a time.
        num_seeds: of the run.
        chunk_size: seeds trained at a time, where it is given.

    Raises:
        ValueError: there are fewer, or they do not divide the seeds.
    """
    found = jax.devices()
    if devices is None:
        together = math.gcd(num_seeds, chunk_size or num_seeds)
        devices = max(n for n in range(1, len(found) + 1) if together % n == 0)
    positive_int("devices", devices)
    if num_seeds > 1:
        divides("num_seeds", num_seeds, "devices", devices)
    if devices > len(found):
        raise ValueError(f"devices={devices}, but jax has {len(found)} ({found[0].platform})")
    return device_mesh(found[:devices]) if devices > 1 else None
