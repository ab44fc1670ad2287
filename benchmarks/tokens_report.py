"""The report of `benchmarks.tokens`: one Markdown file and two figures from its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxpg.aggregates import summarize
from jaxpg.plotting import learning_curve, plot_curve
from jaxpg.timing import markdown_table

if TYPE_CHECKING:
    from benchmarks.tokens import Target

PANELS = (
    ("exact", "greedy, exact"),
    ("train_mixed_share", "groups with unequal scores"),
    ("train_kept_share", "slots of the batch that train"),
    ("train_drawn_entropy", "entropy of a token, nats"),
    ("train_clip_fraction_low", "clipped below"),
    ("train_clip_fraction_high", "clipped above"),
)


def metrics_of(run: dict[str, Any]) -> dict[str, np.ndarray]:
    """``[seeds, points]`` each."""
    return {name: np.asarray(x, float) for name, x in run["metrics"].items()}


def start_and_end(run: dict[str, Any]) -> dict[str, np.ndarray]:
    """``[seeds]`` each: the last point, and the first as ``start_…``."""
    metrics = metrics_of(run)
    return {n: x[:, -1] for n, x in metrics.items()} | {
        f"start_{n}": x[:, 0] for n, x in metrics.items()
    }


def updates_of(run: dict[str, Any], values: np.ndarray) -> np.ndarray:
    """The updates of a metric's points: evaluations also have the start."""
    num_updates, every = run["settings"]["num_updates"], run["eval_every"]
    start = 0 if values.shape[1] > num_updates // every else every
    return np.arange(start, num_updates + 1, every)


def _interval(values: np.ndarray) -> str:
    if np.isnan(values).any():
        return "–"
    summary = summarize(values)
    return f"{summary.mean:.3f} ({summary.minimum:.3f} … {summary.maximum:.3f})"


def target_rows(results: dict[str, Any], targets: Sequence[Target]) -> list[dict[str, str]]:
    """One row per task that was run: what was to be reached, and what was."""
    rows = []
    for target in targets:
        run = results["runs"].get(f"{target.task}/grpo")
        if run is None:
            continue
        x = start_and_end(run)
        config = run["settings"]["config"]
        size = f"{config['num_prompts']} × {config['group_size']}"
        if config["oversample"]:
            size += f" (of {config['num_prompts'] * config['oversample']} groups drawn)"
        rows.append(
            {
                "task": f"{target.letter} {target.task}",
                "updates of": f"{run['settings']['num_updates']} of {size}",
                "target": target.text,
                "score": _interval(x["score"]),
                "exact, start": _interval(x["start_exact"]),
                "exact, end": _interval(x["exact"]),
                "EOS rate": _interval(x["eos_rate"]),
                "length − target": f"{np.mean(x['mean_length'] - x['target_length']):+.3f}",
                "reached": "yes" if target.reached(x) else "**no**",
            }
        )
    return rows


def comparison_rows(
    results: dict[str, Any], task: str, algorithms: Sequence[str]
) -> list[dict[str, str]]:
    """One row per algorithm that was run on `task`; means over seeds."""
    rows = []
    for name in algorithms:
        run = results["runs"].get(f"{task}/{name}")
        if run is None:
            continue
        metrics, config = metrics_of(run), run["settings"]["config"]
        drawn = config["num_prompts"] * config["group_size"] * (config["oversample"] or 1)
        exact = metrics["exact"]
        updates = updates_of(run, exact)
        reached = np.where(
            (exact >= 0.9).any(axis=1), updates[(exact >= 0.9).argmax(axis=1)], np.inf
        )
        median = np.median(reached)
        rows.append(
            {
                "algorithm": name,
                "drawn an update": f"{drawn}",
                "exact, end": _interval(exact[:, -1]),
                "updates to 0.9 (median)": f"{median:.0f}" if np.isfinite(median) else "–",
                "mixed groups": f"{metrics['train_mixed_share'].mean():.2f}",
                "kept groups": f"{metrics['train_kept_share'].mean():.2f}",
                "entropy, end": f"{metrics['train_drawn_entropy'][:, -1].mean():.3f}",
                "clipped low": f"{metrics['train_clip_fraction_low'].mean():.4f}",
                "clipped high": f"{metrics['train_clip_fraction_high'].mean():.4f}",
            }
        )
    return rows


def targets_figure(path: Path, results: dict[str, Any], targets: Sequence[Target]) -> None:
    """Score and exact share of each task along training, and the shuffled control."""
    shown = [t for t in targets if f"{t.task}/grpo" in results["runs"]]
    figure = Figure(figsize=(3.2 * len(shown), 3.0), layout="constrained")
    FigureCanvasAgg(figure)
    for column, target in enumerate(shown):
        axes = figure.add_subplot(1, len(shown), column + 1)
        curves = [
            ("score", f"{target.task}/grpo", "score"),
            ("exact", f"{target.task}/grpo", "exact"),
        ]
        if f"{target.task}/shuffled" in results["runs"]:
            curves = [curves[1], ("exact", f"{target.task}/shuffled", "exact, rewards shuffled")]
        for metric, run_name, label in curves:
            run = results["runs"][run_name]
            values = metrics_of(run)[metric]
            plot_curve(axes, learning_curve(updates_of(run, values), values.T), label=label)
        axes.set(title=f"{target.letter}: {target.task}", xlabel="updates", ylim=(-0.03, 1.03))
        axes.legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


def comparison_figure(
    path: Path, results: dict[str, Any], tasks: Sequence[str], algorithms: Sequence[str]
) -> None:
    """All algorithms on the same seeds: a row per task, a column per quantity."""
    figure = Figure(figsize=(3.3 * len(PANELS), 3.0 * len(tasks)), layout="constrained")
    FigureCanvasAgg(figure)
    for row, task in enumerate(tasks):
        for column, (metric, label) in enumerate(PANELS):
            axes = figure.add_subplot(len(tasks), len(PANELS), row * len(PANELS) + column + 1)
            for name in algorithms:
                run = results["runs"].get(f"{task}/{name}")
                if run is None:
                    continue
                values = metrics_of(run)[metric]
                plot_curve(axes, learning_curve(updates_of(run, values), values.T), label=name)
            axes.set(title=f"{task}: {label}", xlabel="updates")
            axes.title.set_fontsize(9)
            axes.set_ylim(bottom=0)
    entries: dict[str, Any] = {}
    for axes in figure.axes:  # a task may have been run with some of the algorithms only
        for line, name in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, line)
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncol=7)
    figure.savefig(path, dpi=110)


def write_report(
    out: Path,
    results: dict[str, Any],
    targets: Sequence[Target],
    compared: Sequence[str],
    algorithms: Sequence[str],
) -> None:
    """Writes ``README.md``, ``targets.png`` and ``comparison.png`` into `out`."""
    lines = ["# Token tasks\n"]
    seeds = {run["settings"]["num_seeds"] for run in results["runs"].values()}
    lines.append(
        f"Written by `python -m benchmarks.tokens`; seeds: {', '.join(map(str, sorted(seeds)))}. "
        "Mean over seeds (worst … best seed) of greedy answers after the last update. "
        f"{results['machine']['processor']}, {results['machine']['cpu_cores']} cores, jax "
        f"{results['machine']['packages']['jax']}.\n"
    )
    rows = target_rows(results, targets)
    if rows:
        lines += ["## Targets\n", markdown_table(rows), "![targets](targets.png)\n"]
        targets_figure(out / "targets.png", results, targets)
    control = results["runs"].get("add-mod-10/shuffled")
    if control:
        x = start_and_end(control)
        lines.append(
            "Control, rewards shuffled across the batch: exact "
            f"{_interval(x['start_exact'])} at the start, {_interval(x['exact'])} at the end.\n"
        )
    tables = [(task, comparison_rows(results, task, algorithms)) for task in compared]
    tables = [(task, rows) for task, rows in tables if len(rows) > 1]
    tasks = [task for task, _ in tables]
    if tables:
        lines.append("## Algorithms, same seeds and settings\n")
        lines += [f"{task}\n\n{markdown_table(rows)}" for task, rows in tables]
        lines.append(
            "Mixed groups are those whose scores differ, of all drawn; kept groups those that "
            "train, of the slots of a batch. Clip fractions of `gspo` and `rloo` are of sequences, "
            "of the others of tokens; `cispo` counts capped ratios. Means over the run.\n"
        )
        lines.append("![comparison](comparison.png)\n")
        comparison_figure(out / "comparison.png", results, tasks, algorithms)
    generation = results.get("generation")
    if generation:
        lines.append(
            f"## Generation\n\n{generation['batch']} prompts, {generation['new_tokens']} new "
            f"tokens: {generation['cache']['tokens_per_second']:,} tokens/s with the cache, "
            f"{generation['no_cache']['tokens_per_second']:,} without: "
            f"{generation['speedup']} times as fast.\n"
        )
    (out / "README.md").write_text("\n".join(lines))
