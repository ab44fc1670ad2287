"""``python -m benchmarks.tokens``: GRPO and its relatives on token tasks, from scratch, on a CPU.

Three parts. ``targets``: the five tasks of `jaxpg.tokens` with `grpo` and its presets, a level to
reach for each, and a control whose rewards are shuffled across the batch, which must stay where it
starts. ``compare``: all algorithms on the same seeds and settings. ``generation``: tokens a second
with and without a key-value cache. Results go to ``benchmarks/results/tokens``; runs that are there
already, with the same settings, are not done again (``--fresh`` does them).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxpg
from benchmarks import RESULTS
from benchmarks.tokens_report import write_report
from jaxpg import tokens
from jaxpg.timing import machine, time_compiled, write_json
from jaxpg.tokens.presets import (
    ModelOptions,
    TokenPreset,
    WarmUpOptions,
    build_algorithm,
    build_model,
    token_preset,
)

EVAL_PROMPTS = 500  # all 100 for add-mod-10
ALGORITHMS = ("grpo", "dapo", "dr_grpo", "rloo", "gspo", "cispo", "reinforce_pp")
COMPARED = ("add-mod-10", "say-n")


class Target(NamedTuple):
    """A level that the mean over seeds has to reach."""

    letter: str
    task: str
    text: str
    reached: Callable[[dict[str, np.ndarray]], bool]
    """``final and start metrics, [seeds] each -> whether``; start ones are called ``start_…``"""


def _mean(name: str, low: float) -> Callable[[dict[str, np.ndarray]], bool]:
    return lambda x: float(np.mean(x[name])) >= low


TARGETS = (
    Target("A", "add-mod-10", "greedy accuracy ≥ 0.95 on all 100 prompts", _mean("exact", 0.95)),
    Target(
        "B",
        "copy",
        "score ≥ 0.9, exact ≥ 0.5",
        lambda x: _mean("score", 0.9)(x) and _mean("exact", 0.5)(x),
    ),
    Target("C", "sort", "score ≥ 0.9", _mean("score", 0.9)),
    Target(
        "D",
        "addition",
        "exact ≥ warm-up + 0.4 on held-out pairs",
        lambda x: float(np.mean(x["exact"] - x["start_exact"])) >= 0.4,
    ),
    Target(
        "E",
        "say-n",
        "EOS rate ≥ 0.95, mean length within 0.2 of the target",
        lambda x: (
            _mean("eos_rate", 0.95)(x)
            and abs(float(np.mean(x["mean_length"] - x["target_length"]))) <= 0.2
        ),
    ),
)


def shuffled(algorithm: tokens.TokenAlgorithm) -> tokens.TokenAlgorithm:
    """GRPO whose rewards are permuted across the batch: what it then learns is no signal."""

    def advantages(groups: tokens.Groups, config: Any) -> Array:
        # the sampled log-probs differ in every update, and so does this permutation
        noise = jax.lax.bitcast_convert_type(jnp.sum(groups.old_log_probs), jnp.uint32)
        flat = jax.random.permutation(jax.random.key(noise), groups.rewards.ravel())
        return jaxpg.group_advantages(flat.reshape(groups.rewards.shape))

    changed = tokens.grpo(algorithm.task, algorithm.model, advantages=advantages)
    return changed._replace(init=algorithm.init)


def learn(
    algorithm: tokens.TokenAlgorithm, preset: TokenPreset, eval_every: int
) -> Callable[[Array], dict[str, Array]]:
    """``key -> `` metrics along one run: evaluations (greedy) and means of the infos between them.

    Evaluations have one point more, the start.
    """
    task, model = algorithm.task, algorithm.model
    everything = {"add-mod-10": 100}.get(task.name, EVAL_PROMPTS)

    def evaluation(params: Any) -> dict[str, Array]:
        # the same prompts for every seed and algorithm
        out = tokens.evaluate(task, model, params, jax.random.key(99), num_prompts=everything)
        return out._asdict()

    def run(key: Array) -> dict[str, Array]:
        state = algorithm.init(key, preset.config)

        def piece(state: Any, _: None) -> tuple[Any, Any]:
            state, infos = jaxpg.train(algorithm, None, preset.config, eval_every, state=state)
            return state, (evaluation(state.params), jax.tree.map(jnp.mean, infos))

        start = evaluation(state.params)
        _, (along, infos) = jax.lax.scan(piece, state, length=preset.num_updates // eval_every)
        curves = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), start, along)
        return {**curves, **{f"train_{name}": x for name, x in infos.items()}}

    return run


def run_seeds(name: str, preset: TokenPreset, algorithm: Any, args: argparse.Namespace) -> dict:
    """All seeds of one run, two at a time: a run this small does not fill two cores by itself."""
    eval_every = args.eval_every
    keys = jax.random.split(jax.random.key(0), args.seeds)
    began = time.perf_counter()
    compiled = jax.jit(learn(algorithm, preset, eval_every)).lower(keys[0]).compile()
    compiled_at = time.perf_counter()
    with ThreadPoolExecutor(args.threads) as pool:
        results = list(pool.map(lambda key: jax.tree.map(np.asarray, compiled(key)), keys))
    seconds = time.perf_counter() - compiled_at
    metrics = {n: np.stack([r[n] for r in results]) for n in results[0]}
    print(
        f"{name}: exact {metrics['exact'][:, -1].mean():.3f} "
        f"(worst seed {metrics['exact'][:, -1].min():.3f}), score "
        f"{metrics['score'][:, -1].mean():.3f}, {seconds:.0f} s",
        flush=True,
    )
    return {
        "settings": settings_of(preset, args),
        "eval_every": eval_every,
        "compile_seconds": round(compiled_at - began, 1),
        "run_seconds": round(seconds, 1),
        # [seeds][points], rounded: the file is read by people, too
        "metrics": {n: np.round(x.astype(float), 4).tolist() for n, x in metrics.items()},
    }


def settings_of(preset: TokenPreset, args: argparse.Namespace) -> dict[str, Any]:
    """What a run follows from, as JSON."""
    return {
        "config": {"type": type(preset.config).__name__, **dataclasses.asdict(preset.config)},
        "model": dataclasses.asdict(preset.model),
        "warm_up": dataclasses.asdict(preset.warm_up),
        "num_updates": preset.num_updates,
        "num_seeds": args.seeds,
    }


def time_generation(repeats: int, new: int = 64, batch: int = 256) -> dict[str, Any]:
    """Tokens a second of `generate`, with a cache and without, at the size of the tasks."""
    model = build_model(tokens.say_n_task(5, new))
    params = model.init(jax.random.key(0))
    prompts = jnp.ones((batch, 2), jnp.int32)
    result: dict[str, Any] = {"new_tokens": new, "batch": batch, "prompt_tokens": 2}
    for label, use_cache in (("cache", True), ("no_cache", False)):

        def write(key: Array, params: Any, use_cache: bool = use_cache) -> Any:
            return tokens.generate(
                key, model, params, prompts, prompts > 0, max_new_tokens=new, eos_id=None,
                pad_id=13, use_cache=use_cache,
            )  # fmt: skip

        timing = time_compiled(write, jax.random.key(1), params, repeats=repeats)
        result[label] = {
            "seconds": round(timing.median, 4),
            "tokens_per_second": round(batch * new / timing.median),
            "spread": round(timing.spread, 3),
            "compile_seconds": round(timing.compile, 2),
        }
        print(f"generation, {label}: {result[label]['tokens_per_second']} tokens/s", flush=True)
    result["speedup"] = round(result["no_cache"]["seconds"] / result["cache"]["seconds"], 2)
    return result


def quick_preset(preset: TokenPreset) -> TokenPreset:
    """The same, small: to see that everything runs."""
    warm_up = WarmUpOptions(num_steps=min(preset.warm_up.num_steps, 20))
    model = ModelOptions(d_model=16, num_layers=1, num_heads=2)
    config = preset.config.replace(num_prompts=8, group_size=4)
    return TokenPreset(config, 4, model, warm_up)


def runs_of(args: argparse.Namespace) -> list[tuple[str, str, str, bool]]:
    """``(name, algorithm, task, whether rewards are shuffled)`` of what is to be done."""
    runs = []
    if "targets" in args.parts:
        runs += [(f"{t.task}/grpo", "grpo", t.task, False) for t in TARGETS]
        runs.append(("add-mod-10/shuffled", "grpo", "add-mod-10", True))
    if "compare" in args.parts:
        tasks = [task for task in COMPARED if task in args.compared]
        runs += [(f"{task}/{name}", name, task, False) for task in tasks for name in ALGORITHMS]
    return list(dict.fromkeys(runs))


def main() -> None:
    """Runs what is asked for and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=["targets", "compare", "generation"])
    parser.add_argument("--compared", nargs="+", choices=COMPARED, default=list(COMPARED))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2, help="seeds run at the same time")
    parser.add_argument("--eval-every", type=int, default=25, help="updates between evaluations")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--fresh", action="store_true", help="do runs again that are in the file")
    parser.add_argument("--quick", action="store_true", help="small: does everything run?")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.eval_every = 2, 2
    out = args.out or (RESULTS / ("tokens-quick" if args.quick else "tokens"))
    path = out / "results.json"
    results: dict[str, Any] = {"runs": {}}
    if path.exists() and not args.fresh:
        results = json.loads(path.read_text())
    results["machine"] = machine()
    for name, algorithm, task, is_shuffled in runs_of(args):
        preset = token_preset(algorithm, task)
        preset = quick_preset(preset) if args.quick else preset
        settings = json.loads(json.dumps(settings_of(preset, args)))
        if results["runs"].get(name, {}).get("settings") == settings:
            continue
        built = build_algorithm(algorithm, task, model=preset.model, warm_up=preset.warm_up)
        built = shuffled(built) if is_shuffled else built
        results["runs"][name] = run_seeds(name, preset, built, args)
        write_json(path, results)
    if "generation" in args.parts:
        results["generation"] = time_generation(2, batch=16) if args.quick else time_generation(7)
    write_json(path, results)
    write_report(out, results, TARGETS, COMPARED, ALGORITHMS)
    print(f"report in {out}")


if __name__ == "__main__":
    main()
