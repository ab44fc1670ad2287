"""Floor 6: flags of the command line, read by tyro from records and config fields.

Whatever is wrong with them becomes a `UsageError`, which is one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import jax
import tyro

from jaxpg.presets import Preset

T = TypeVar("T")

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


class UsageError(Exception):
    """What the user has to change, in one line."""


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How long, how often, and where to."""

    total_steps: int
    """Steps of each seed, rounded up to whole updates."""
    num_seeds: int = 4
    """Independent runs, trained side by side."""
    seed: int = 0
    """Where all random numbers start."""
    anneal: bool = False
    """Let the --annealed settings fall to 0 over the whole run."""
    eval_episodes: int = 32
    """Episodes of each seed at the end, greedy and again sampled."""
    run_dir: Path | None = None
    """Folder to write; None is runs/ALGORITHM-ENV-TIME."""
    overwrite: Switch = False
    """Replace the run that stands in --run-dir."""
    quiet: Switch = False
    """Print the results and nothing before."""


@dataclasses.dataclass(frozen=True)
class ResumeOptions:
    """How far to go on."""

    resume: Path
    """The run folder to go on in."""
    total_steps: int
    """Steps of each seed since the start of the run, rounded up to whole updates."""
    eval_episodes: int = 32
    """Episodes of each seed at the end, greedy and again sampled."""
    quiet: Switch = False
    """Print the results and nothing before."""


@dataclasses.dataclass(frozen=True)
class EvaluateOptions:
    """Play episodes with the policies of a run."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    episodes: int = 100
    """Episodes of each seed."""
    sampled: Switch = False
    """Sample actions, in place of taking the likeliest."""
    seed: int | None = None
    """Other episodes than those of the run's own evaluation."""


@dataclasses.dataclass(frozen=True)
class ListOptions:
    """Algorithms and environments, and what each supports."""


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
    """The first statement of one of tyro's boxes, and the flag that it suggests."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│| \t") for line in text.splitlines()]
    inside = [line for line in lines if line and not re.match(r"[╭╰+]", line)]
    sections: list[list[str]] = [[]]
    for line in inside:
        if re.fullmatch(r"[─-]+", line):
            sections.append([])
        else:
            sections[-1].append(line)
    message = " ".join(sections[0]).rstrip(".")
    meant = [
        part.split()[0]
        for section in sections[1:]
        for part in section
        if "meant" in section[0] and part.startswith("--")
    ]
    hint = f" (did you mean {' or '.join(meant[:2])}?)" if meant else ""
    return f"{message}{hint}; see {prog} --help"


def parse_resumed(words: Sequence[str]) -> Path:
    """The folder behind ``--resume``."""
    for i, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == "--resume":
            value = value or (words[i + 1] if i + 1 < len(words) else "")
            if value and not value.startswith("-"):
                return Path(value)
    raise ValueError("--resume needs the run folder to go on in")
