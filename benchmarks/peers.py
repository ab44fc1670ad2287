"""``python -m benchmarks.peers``: the same PPO work by jaxpg and by other libraries, side by side.

Every library runs in a process and a virtual environment of its own, which this command makes
(``--environments`` keeps them for the next time). The processes compile, warm up and then work in
turn, A B A B …, each waiting while the other runs: the ratio of a pair holds although the machine's
speed drifts. Same network (two separate 64-64 tanh networks), environments, steps, epochs,
minibatches, coefficients and jax version. What differs, by design of the libraries: jaxpg
bootstraps time limits exactly and clips the gradient's global norm; rejax treats a time limit as
the end and clips gradients element by element; the peers' gymnax resets on every step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import RESULTS
from jaxpg.timing import machine, markdown_table, write_json

WORKERS = Path(__file__).parent / "peer_workers"
SLOW_SHARE = 20


class Cell(NamedTuple):
    """One size of the comparison; `num_updates` are done in one timed call."""

    name: str
    num_seeds: int
    num_envs: int
    num_steps: int
    num_updates: int
    chunk_size: int  # seeds that jaxpg vmaps at a time


CELLS = (
    Cell("one agent, 4 × 128", 1, 4, 128, 200, 1),
    Cell("one agent, 64 × 128", 1, 64, 128, 30, 1),
    Cell("one agent, 2048 × 32", 1, 2048, 32, 5, 1),
    Cell("16 seeds × 4 × 128", 16, 4, 128, 40, 16),
    Cell("128 seeds × 4 × 128", 128, 4, 128, 8, 16),
)


class Contender(NamedTuple):
    """A library, or a way of running jaxpg."""

    name: str
    script: str
    requirements: tuple[str, ...]  # empty: this environment
    spec: dict[str, Any]
    devices: int = 1
    share: int = 1  # of a cell's updates it does one in so many: a slow one would take hours


def contenders(args: argparse.Namespace) -> list[Contender]:
    """Who takes part: jaxpg in its ways, rejax, and those asked for."""
    jax_version = f"jax=={metadata.version('jax')}"
    chosen = [Contender("jaxpg", "jaxpg_ppo.py", (), {})]
    if args.devices > 1:
        chosen.append(
            Contender(f"jaxpg, {args.devices} devices", "jaxpg_ppo.py", (), {}, args.devices)
        )
    if args.bfloat16:
        spec = {"compute_dtype": "bfloat16"}
        chosen.append(Contender("jaxpg, bfloat16", "jaxpg_ppo.py", (), spec))
        if args.devices > 1:
            name = f"jaxpg, bfloat16, {args.devices} devices"
            chosen.append(Contender(name, "jaxpg_ppo.py", (), spec, args.devices))
    chosen.append(Contender("rejax", "rejax_ppo.py", ("rejax==0.1.3", "gymnax<1", jax_version), {}))
    threads = {"torch_threads": os.cpu_count() or 1}
    if args.sb3:
        requirements = (args.torch, "stable-baselines3")
        spec = {"library": "stable-baselines3", **threads}
        chosen.append(
            Contender("stable-baselines3", "sb3_ppo.py", requirements, spec, share=SLOW_SHARE)
        )
    if args.sbx:
        requirements = (args.torch, "sbx-rl", jax_version)
        spec = {"library": "sbx", **threads}
        chosen.append(Contender("sbx", "sb3_ppo.py", requirements, spec, share=SLOW_SHARE))
    return chosen


def interpreter(contender: Contender, folder: Path) -> str:
    """The Python of a contender, its virtual environment made if it is not there."""
    if not contender.requirements:
        return sys.executable
    home = folder / contender.name
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    done = home / "requirements.txt"
    wanted = "\n".join(contender.requirements)
    if not done.exists() or done.read_text() != wanted:
        print(f"making an environment for {contender.name}: {', '.join(contender.requirements)}")
        venv.create(home, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", *contender.requirements]
        subprocess.run(pip, check=True)
        done.write_text(wanted)
    return str(python)


class Worker:
    """A process that does one contender's work on demand."""

    def __init__(self, contender: Contender, python: str, spec: dict[str, Any]) -> None:
        num_updates = max(1, spec["num_updates"] // contender.share)
        self.scale = spec["num_updates"] / num_updates  # of its seconds, to a whole cell's
        spec = {**spec, "num_updates": num_updates}
        flags = os.environ.get("XLA_FLAGS", "")
        if contender.devices > 1:
            flags += f" --xla_force_host_platform_device_count={contender.devices}"
        self.process = subprocess.Popen(
            [python, str(WORKERS / contender.script), json.dumps({**spec, **contender.spec})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XLA_FLAGS": flags.strip()},
        )
        self.ready = self.answer()

    def answer(self) -> dict[str, Any]:
        """The worker's next line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("WORKER "):
                return json.loads(line.removeprefix("WORKER "))
        raise RuntimeError(f"worker ended with code {self.process.wait()}: {self.process.args}")

    def ask(self, question: str) -> dict[str, Any]:
        """Sends a line and waits for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@contextlib.contextmanager
def workers(chosen: list[Contender], spec: dict, folder: Path) -> Iterator[dict[str, Worker]]:
    """All contenders' processes, started one after the other, ended together."""
    running: dict[str, Worker] = {}
    try:
        for contender in chosen:
            running[contender.name] = Worker(contender, interpreter(contender, folder), spec)
        yield running
    finally:
        for worker in running.values():
            worker.close()


def measure(cell: Cell, chosen: list[Contender], args: argparse.Namespace) -> dict[str, Any]:
    """Times one cell: rounds in which every contender works once, in turn."""
    spec = cell._asdict()
    steps = cell.num_seeds * cell.num_envs * cell.num_steps * cell.num_updates
    # the other libraries train one agent at a time
    able = [c for c in chosen if cell.num_seeds == 1 or c.script != "sb3_ppo.py"]
    with workers(able, spec, args.environments) as running:
        seconds: dict[str, list[float]] = {name: [] for name in running}
        for _ in range(args.rounds):
            for name, worker in running.items():
                seconds[name].append(worker.scale * worker.ask("run")["seconds"])
        peaks = {name: worker.ask("run")["peak_bytes"] for name, worker in running.items()}
        result: dict[str, Any] = {"cell": spec, "contenders": {}}
        for name, worker in running.items():
            pairs = [b / a for a, b in zip(seconds[name], seconds["rejax"], strict=True)]
            result["contenders"][name] = {
                "steps_per_second": steps / statistics.median(seconds[name]),
                "ratio_to_rejax": statistics.median(pairs),
                "ratio_range": [min(pairs), max(pairs)],
                "seconds": seconds[name],
                "compile_seconds": worker.ready["trace"] + worker.ready["compile"],
                "planned_bytes": worker.ready["planned_bytes"],
                "peak_bytes": peaks[name],
            }
    return result


def learn(chosen: list[Contender], args: argparse.Namespace) -> dict[str, list[float]]:
    """Greedy returns of the same settings after training: speed is not bought with learning."""
    cell = CELLS[0]._asdict()
    spec = {**cell, "learning_steps": args.learning_steps, "learning_seeds": args.learning_seeds}
    with workers(chosen, spec, args.environments) as running:
        return {name: worker.ask("learn")["returns"] for name, worker in running.items()}


def show(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One cell as rows for people."""
    reference = result["contenders"]["rejax"]
    rows = []
    for name, figures in result["contenders"].items():
        low, high = figures["ratio_range"]
        compile_ratio = figures["compile_seconds"] / reference["compile_seconds"]
        rows.append(
            {
                "size": result["cell"]["name"],
                "library": name,
                "steps/s": f"{figures['steps_per_second']:,.0f}",
                "× rejax": f"{figures['ratio_to_rejax']:.2f} ({low:.2f}-{high:.2f})",
                "compile, s": f"{figures['compile_seconds']:.1f} ({compile_ratio:.2f} ×)",
                "peak, MiB": f"{figures['peak_bytes'] / 2**20:.0f}",
            }
        )
    return rows


def main(argv: list[str] | None = None) -> None:
    """Measures all cells and writes ``results/peers/DEVICE.{json,md}``."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cells", nargs="+", type=int, default=list(range(len(CELLS))))
    parser.add_argument("--devices", type=int, default=1, help="host devices for jaxpg, as well")
    parser.add_argument("--bfloat16", action="store_true", help="jaxpg with bfloat16 products too")
    parser.add_argument("--sb3", action="store_true", help="Stable-Baselines3 too")
    parser.add_argument("--sbx", action="store_true", help="sbx too")
    parser.add_argument("--torch", default="torch", help="requirement for torch (a CPU build)")
    parser.add_argument("--learning-seeds", type=int, default=10, help="0 leaves learning out")
    parser.add_argument("--learning-steps", type=int, default=200_000)
    parser.add_argument("--environments", type=Path, default=Path(".peers"))
    parser.add_argument("--output", type=Path, default=RESULTS / "peers")
    args = parser.parse_args(argv)
    chosen = contenders(args)
    results = []
    for index in args.cells:
        results.append(measure(CELLS[index], chosen, args))
        for row in show(results[-1]):
            print(" | ".join(row.values()), flush=True)
    learned = learn(chosen, args) if args.learning_seeds else {}
    about = machine()
    base = args.output / about["devices"][0].lower().replace(" ", "-")
    content = {"machine": about, "cells": results, "learning": learned}
    write_json(base.with_suffix(".json"), content)
    text = markdown_table([row for result in results for row in show(result)])
    if learned:
        rows = [
            {
                "library": name,
                "mean": f"{statistics.mean(returns):.0f}",
                "minimum": f"{min(returns):.0f}",
                "greedy return of each seed": " ".join(f"{x:.0f}" for x in returns),
            }
            for name, returns in learned.items()
        ]
        text += f"\nCartPole-v1 at {args.learning_steps:,} steps, 4 × 128:\n\n"
        text += markdown_table(rows)
    base.with_suffix(".md").write_text(f"{text}\n{about}\n")
    print(f"\n{text}\n{about}\nwritten to {base}.*")


if __name__ == "__main__":
    main()
