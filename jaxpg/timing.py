"""Floor 5: how every speed is measured: compiled first, waited for, repeated, with the machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Timing(NamedTuple):
    """Seconds of one compiled function."""

    trace: float  # Python to StableHLO
    compile: float  # StableHLO to machine code
    runs: list[float]  # each repeat, after a warm-up

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def spread(self) -> float:
        """Half the range of the repeats over their median."""
        return (max(self.runs) - min(self.runs)) / 2 / self.median


def time_compiled(fn: Callable, *args: Any, repeats: int = 5) -> Timing:
    """Compiles ``fn(*args)`` ahead of time, warms it up once, and times `repeats` calls."""
    start = time.perf_counter()
    lowered = jax.jit(fn).lower(*args)
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    compiled_at = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    runs = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        runs.append(time.perf_counter() - begin)
    return Timing(lowered_at - start, compiled_at - lowered_at, runs)


def machine() -> dict[str, Any]:
    """Versions, device and flags: without them a speed means nothing."""
    packages = ("jax", "jaxlib", "flax", "optax", "gymnax", "numpy")
    return {
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in packages},
        "platform": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "cpu_cores": os.cpu_count(),
        "processor": _processor(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "x64": jax.config.jax_enable_x64,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def peak_host_memory() -> int:
    """Largest resident set of this process so far, in bytes."""
    import resource  # not on every system

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_device_memory() -> int | None:
    """Largest allocation on the first device so far, in bytes; None where it does not count."""
    stats = jax.devices()[0].memory_stats()
    return None if stats is None else stats.get("peak_bytes_in_use")


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows with the same keys, as a Markdown table."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write_json(path: Path, content: Any) -> None:
    """Writes `content`, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
