"""The notebooks run at toy size, and are committed with outputs of a full run."""

from __future__ import annotations

import ast
import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("0[1-6]_*.ipynb"))
SWITCH = "JAXPG_NOTEBOOK_SMALL"

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str = "code") -> list[dict[str, Any]]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def outputs(path: Path) -> list[dict[str, Any]]:
    return [output for cell in cells(path) for output in cell["outputs"]]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Toy sizes, and figures that are drawn but not shown."""
    backend = matplotlib.get_backend()
    monkeypatch.setenv(SWITCH, "1")
    plt.switch_backend("Agg")
    yield
    plt.close("all")
    plt.switch_backend(backend)


@every_notebook
def test_runs(path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def show() -> None:
        for number in plt.get_fignums():
            plt.figure(number).canvas.draw()  # what a reader's screen would trip over
            drawn.append(number)
        plt.close("all")

    monkeypatch.setattr(plt, "show", show)
    names: dict[str, Any] = {"__name__": path.stem}
    for number, cell in enumerate(cells(path)):
        with contextlib.redirect_stdout(io.StringIO()):
            name = f"{path.name}, code cell {number}"
            exec(compile(source(cell), name, "exec", dont_inherit=True), names)
    assert names["SMALL"] is True
    assert plt.get_fignums() == [], "a figure was drawn and not shown"
    assert len(drawn) == sum("image/png" in output.get("data", {}) for output in outputs(path))


@every_notebook
def test_is_committed_with_the_outputs_of_one_clean_run(path: Path) -> None:
    assert all(output["output_type"] != "error" for output in outputs(path))
    assert all(output.get("name") != "stderr" for output in outputs(path))
    assert any("image/png" in output.get("data", {}) for output in outputs(path))
    counts = [cell["execution_count"] for cell in cells(path)]
    assert counts == list(range(1, len(counts) + 1))
    for cell in cells(path):
        code = source(cell)
        if "plt.show()" in code or "\nprint(" in code:
            assert cell["outputs"], code
    assert path.stat().st_size < 400_000


@every_notebook
def test_can_be_read_on_its_own(path: Path) -> None:
    prose = "\n".join(source(cell) for cell in cells(path, "markdown"))
    assert prose.startswith("# ") and "*References.*" in prose
    assert prose.count("$$") >= 2 or "vmap" in prose
    first = source(cells(path)[0])
    assert "import jaxpg" in first and f'SMALL = bool(os.environ.get("{SWITCH}"))' in first


def test_there_are_notebooks() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]


def test_own_algorithm_takes_sixty_lines_at_most() -> None:
    (path,) = (path for path in NOTEBOOKS if path.name.startswith("05"))
    (cell,) = (cell for cell in cells(path) if "def vmpo(" in source(cell))
    lines = [line for line in source(cell).splitlines() if line.strip()]
    assert 20 < len(lines) <= 60


def test_numbers_of_the_first_notebook_support_its_text() -> None:
    """The committed measurement itself: only the batch mean is biased, the value is quietest."""
    printed = "".join("".join(x["text"]) for x in outputs(NOTEBOOKS[0]) if "text" in x)
    rows = {}
    for line in printed[printed.index("estimator ") :].splitlines()[1:7]:
        name, *numbers = line.rsplit(maxsplit=3)
        rows[name.strip()] = [ast.literal_eval(x) for x in numbers]
    variance, distance, chance = np.array(list(rows.values())).T
    biased = np.array(["batch mean" in name for name in rows])
    assert len(rows) == 6 and biased.sum() == 1
    assert (distance[~biased] < 3 * chance[~biased]).all()
    assert distance[biased] > 8 * chance[biased]
    assert list(rows)[int(variance.argmin())] == "to go − value"
    assert variance[0] > 20 * variance[-1]
