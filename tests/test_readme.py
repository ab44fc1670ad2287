"""What the README shows runs: its Python as it stands but for sizes, its commands word by word."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxpg
from jaxpg import cli, throughput

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

SMALLER = {
    "range(100)": "range(2)",
    "num_updates=100)": "num_updates=2)",
    "jax.random.key(0), 256)": "jax.random.key(0), 2)",
    "jax.random.key(1), 8)": "jax.random.key(1), 2)",
    "num_envs=8, num_steps=128": "num_envs=2, num_steps=16",
    "num_episodes=10": "num_episodes=2",
    'from_gymnax("CartPole-v1")': 'from_gymnax("CartPole-v1", max_steps_in_episode=20)',
    "num_updates=20)": "num_updates=2)",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_python_blocks_run_in_order() -> None:
    source = "\n".join(blocks("python"))
    for written, small in SMALLER.items():
        assert written in source, f"the README no longer has {written}"
        source = source.replace(written, small)
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "README.md", "exec"), names)
    # by hand: errors 1 + 0.9 · 6 − 5 = 1.4, 1 + 0.9 · 10 − 6 = 4 (cut behind it), 1.2
    np.testing.assert_allclose(names["advantages"], [1.4 + 0.9 * 4.0, 4.0, 1.2], rtol=1e-5)
    assert names["gradient"].shape == (3, 2)
    assert int(names["state"].update) == 2
    assert float(names["info"]["env_steps"]) == 2 * 16  # of the data-parallel agent
    assert names["returns"].shape == (2, 2)
    assert names["infos"]["entropy"].shape == (2,)
    assert "(3, 2, 2)" in printed.getvalue() and "Summary(iqm=" in printed.getvalue()


def commands() -> list[str]:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    return [part for line in lines for part in line.split(" && ") if "jaxpg " in part]


def test_commands_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed, checked and built; what `run_to_end` does with them is tested in `test_cli`."""
    specs = {}

    def run(spec: Any, algorithm: Any, folder: Path, options: Any, **rest: Any) -> int:
        specs[str(folder)] = spec
        return 0

    resumed, evaluated, measured = [], [], []

    def measure(row: throughput.Row, *stages: Any, **rest: Any) -> dict[str, Any]:
        measured.append(row)
        return {**row._asdict(), "stages": {}}

    monkeypatch.setattr(throughput, "measure", measure)
    monkeypatch.setattr(throughput, "write", lambda *args: [tmp_path / "a", Path(__file__)])
    monkeypatch.setattr(throughput, "show", lambda results: results)
    monkeypatch.setattr(cli, "run_to_end", run)
    monkeypatch.setattr(cli, "resume", lambda words, folder: resumed.append(folder) or 0)
    monkeypatch.setitem(
        cli.COMMANDS, "evaluate", (lambda words: evaluated.append(words) or 0, "", "")
    )
    monkeypatch.chdir(tmp_path)
    assert len(commands()) == 10
    for command in commands():
        program, *words = command.split()
        assert program in ("jaxpg", ".venv/bin/jaxpg")
        with contextlib.redirect_stdout(io.StringIO()):
            assert cli.main(words) == 0, command
    assert resumed == [Path("runs/first")] and len(evaluated) == 1
    assert measured == throughput.PRESETS["quick"]
    assert specs["runs/first"].num_seeds == 16
    first = next(iter(specs.values()))
    assert (first.algorithm, first.environment) == ("ppo", "CartPole-v1")
    assert first.num_updates * first.config.num_envs * first.config.num_steps >= 200_000


def test_every_name_in_the_tables_exists() -> None:
    rows = [line for line in README.splitlines() if line.startswith("| ")]
    of_functions = rows[: next(i for i, row in enumerate(rows) if row.startswith("| algorithm"))]
    names = [name for row in of_functions for name in re.findall(r"`(\w+)`", row)]
    assert len(names) > 50
    assert [name for name in names if name not in jaxpg.__all__] == []
    algorithms = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    assert set(cli.ALGORITHMS) <= set(algorithms)


def test_benchmarks_exist() -> None:
    modules = re.findall(r"`python -m (benchmarks\.\w+)`", README)
    assert len(modules) == 7
    assert [m for m in modules if not (ROOT / f"{m.replace('.', '/')}.py").exists()] == []


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_test_command_is_the_one_that_continuous_integration_runs() -> None:
    (command,) = [block for block in blocks("console") if "pytest" in block]
    assert command.count("\n") == 1
    assert "grep -m 1 -e '-m pytest' README.md" in (ROOT / ".ci" / "run").read_text()
