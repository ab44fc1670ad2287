"""``python -m benchmarks.throughput``: environment steps a second, in three stages.

``environment``: random actions, no network. ``rollout``: the policy in the loop, with the values of
all successors. ``training``: everything. Steps are summed over seeds and environments; compile time
is apart; every figure is the median of repeats after a warm-up.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxpg
from benchmarks.timing import (
    RESULTS,
    machine,
    markdown_table,
    peak_device_memory,
    peak_host_memory,
    time_compiled,
    write_json,
)
from jaxpg.presets import NetworkOptions
from jaxpg.registry import ALGORITHMS, make_policy

STAGES = ("environment", "rollout", "training")


class Row(NamedTuple):
    """One cell of the grid."""

    algorithm: str
    environment: str
    num_seeds: int
    num_envs: int
    num_steps: int
    num_updates: int  # in one timed call
    network: str = "mlp"


def _cartpole(*cells: tuple[int, int, int, int]) -> list[Row]:
    return [Row("ppo", "CartPole-v1", *cell) for cell in cells]


PRESETS: dict[str, list[Row]] = {
    "quick": _cartpole((1, 4, 128, 20), (1, 64, 128, 8), (16, 4, 128, 4)),
    "cpu": [
        *_cartpole(
            (1, 4, 128, 60), (1, 64, 128, 20), (1, 2048, 32, 4), (16, 4, 128, 10), (128, 4, 128, 2)
        ),
        Row("ppo", "Pendulum-v1", 1, 64, 128, 20),
        Row("ppo", "Acrobot-v1", 1, 64, 128, 10),
        Row("ppo", "Breakout-MinAtar", 1, 64, 128, 4),
        Row("ppo", "Breakout-MinAtar", 1, 64, 128, 1, "cnn"),
        Row("reinforce", "CartPole-v1", 1, 16, 500, 4),
        Row("actor_critic", "CartPole-v1", 1, 64, 16, 60),
        Row("off_policy", "CartPole-v1", 1, 64, 128, 20),
        Row("trpo", "CartPole-v1", 1, 64, 128, 10),
        Row("grpo", "CartPole-v1", 1, 64, 500, 2),
    ],
    "gpu": [
        *_cartpole(*((1, envs, 128, 20) for envs in (64, 1024, 4096))),
        *_cartpole(*((seeds, 4, 128, 20) for seeds in (16, 128, 2048))),
        Row("ppo", "Breakout-MinAtar", 1, 4096, 128, 4),
        Row("ppo", "Breakout-MinAtar", 1, 4096, 128, 2, "cnn"),
        Row("actor_critic", "CartPole-v1", 1, 4096, 16, 100),
        Row("trpo", "CartPole-v1", 1, 4096, 128, 10),
        Row("grpo", "CartPole-v1", 1, 1024, 500, 4),
    ],
}


def random_steps(env: jaxpg.Env, row: Row) -> Callable:
    """Steps environments with uniformly random actions; returns something of every step."""
    steps = row.num_steps * row.num_updates

    def actions(key: jax.Array) -> jax.Array:
        space = env.action_space
        if isinstance(space, jaxpg.Discrete):
            return jax.random.randint(key, (steps, row.num_envs), 0, space.n)
        shape = (steps, row.num_envs, *space.shape)
        return jax.random.uniform(key, shape, minval=space.low, maxval=space.high)

    def run(key: jax.Array) -> jax.Array:
        reset_key, act_key, step_key = jax.random.split(key, 3)
        state, _ = jax.vmap(env.reset)(jax.random.split(reset_key, row.num_envs))

        def body(state: Any, xs: Any) -> tuple[Any, jax.Array]:
            keys, action = xs
            state, step = jax.vmap(env.step)(keys, state, action)
            seen = sum(jnp.sum(x) for x in jax.tree.leaves(step.obs))
            return state, seen + jnp.sum(step.reward)

        keys = jax.random.split(step_key, (steps, row.num_envs))
        return jax.lax.scan(body, state, (keys, actions(act_key)))[1]

    return run


def stage_function(stage: str, row: Row, compute_dtype: str | None) -> Callable:
    """A function of one key that does `stage` for one seed."""
    env = jaxpg.from_gymnax(row.environment)
    if stage == "environment":
        return random_steps(env, row)
    policy = make_policy(env, NetworkOptions(network=row.network, compute_dtype=compute_dtype))
    if stage == "rollout":

        def run(key: jax.Array) -> Any:
            init_key, reset_key, key = jax.random.split(key, 3)
            runner = jaxpg.init_runner(reset_key, env, policy, row.num_envs)
            params = policy.init(init_key, runner.obs)

            def body(runner: Any, key: jax.Array) -> tuple[Any, Any]:
                runner, rows, next_values, _ = jaxpg.rollout(
                    key, env, policy, params, runner, num_steps=row.num_steps
                )
                read = jax.tree.map(lambda x: jnp.sum(x.astype(jnp.float32)), rows)
                return runner, (read, jnp.sum(next_values))

            return jax.lax.scan(body, runner, jax.random.split(key, row.num_updates))

        return run
    entry = ALGORITHMS[row.algorithm]
    algorithm = entry.build(env, policy)
    config = entry.config(num_envs=row.num_envs, num_steps=row.num_steps)
    return lambda key: jaxpg.train(algorithm, key, config, row.num_updates)


def measure(row: Row, stages: tuple[str, ...], repeats: int, args: argparse.Namespace) -> dict:
    """Times the stages of one row."""
    keys = jax.random.split(jax.random.key(0), row.num_seeds)
    mesh = jaxpg.device_mesh() if len(jax.devices()) > 1 else None
    result: dict[str, Any] = {**row._asdict(), "stages": {}}
    steps = row.num_seeds * row.num_envs * row.num_steps * row.num_updates
    for stage in stages:
        fn = stage_function(stage, row, args.compute_dtype)
        if row.num_seeds == 1:
            timing = time_compiled(fn, keys[0], repeats=repeats)
        else:
            chunk = min(row.num_seeds, args.chunk_size or row.num_seeds)
            spread = keys if mesh is None else jaxpg.shard_leading_axis(keys, mesh)
            mapped = jaxpg.map_in_chunks(fn, chunk_size=chunk, mesh=mesh)
            timing = time_compiled(mapped, spread, repeats=repeats)
        result["stages"][stage] = {
            "steps_per_second": steps / timing.median,
            "spread": timing.spread,
            "trace_seconds": timing.trace,
            "compile_seconds": timing.compile,
            "run_seconds": timing.runs,
            "peak_host_bytes": peak_host_memory(),
            "peak_device_bytes": peak_device_memory(),
        }
    return result


def show(results: list[dict]) -> list[dict[str, Any]]:
    """The results as rows for people."""
    rows = []
    for result in results:
        row = {
            "algorithm": result["algorithm"],
            "environment": result["environment"],
            "network": result["network"],
            "seeds × envs × steps": "{num_seeds} × {num_envs} × {num_steps}".format(**result),
        }
        for stage, figures in result["stages"].items():
            speed, spread = figures["steps_per_second"], figures["spread"]
            row[f"{stage}, steps/s"] = f"{speed:,.0f} ± {100 * spread:.0f} %"
        last = result["stages"][list(result["stages"])[-1]]
        row["compile, s"] = f"{last['trace_seconds'] + last['compile_seconds']:.1f}"
        row["peak host, MiB"] = f"{last['peak_host_bytes'] / 2**20:.0f}"
        if last["peak_device_bytes"] is not None:
            row["peak device, MiB"] = f"{last['peak_device_bytes'] / 2**20:.0f}"
        rows.append(row)
    return rows


def plot(results: list[dict], path: Path) -> None:
    """Steps a second of every row and stage, as bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.5 * len(results)), layout="constrained")
    labels = [
        "{algorithm} {environment} {network}\n{num_seeds} × {num_envs} × {num_steps}".format(**r)
        for r in results
    ]
    height = 0.8 / len(STAGES)
    for i, stage in enumerate(STAGES):
        speeds = [r["stages"].get(stage, {}).get("steps_per_second", 0) for r in results]
        axes.barh([y + i * height for y in range(len(results))], speeds, height, label=stage)
    axes.set_yticks([y + height for y in range(len(results))], labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("environment steps a second, over seeds and environments")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Measures a preset and writes ``results/throughput-PRESET-DEVICE.{json,md,png}``."""
    parser = argparse.ArgumentParser(prog="benchmarks.throughput", description=__doc__)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="quick")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--chunk-size", type=int, default=None, help="seeds vmapped at a time")
    parser.add_argument("--compute-dtype", choices=["bfloat16"], default=None)
    parser.add_argument("--output", type=Path, default=RESULTS / "throughput")
    args = parser.parse_args(argv)
    begin = time.perf_counter()
    results = []
    for row in PRESETS[args.preset]:
        results.append(measure(row, tuple(args.stages), args.repeats, args))
        print(markdown_table(show(results[-1:])).splitlines()[-1], flush=True)
    about = machine()
    device = about["devices"][0].lower().replace(" ", "-")
    base = args.output / f"{args.preset}-{device}"
    if args.compute_dtype:
        base = base.with_name(f"{base.name}-{args.compute_dtype}")
    table = markdown_table(show(results))
    seconds = time.perf_counter() - begin
    write_json(base.with_suffix(".json"), {"machine": about, "seconds": seconds, "rows": results})
    base.with_suffix(".md").write_text(f"{table}\n{len(results)} rows, {seconds:.0f} s. {about}\n")
    plot(results, base.with_suffix(".png"))
    print(f"\n{table}\n{about}\nwritten to {base}.*")


if __name__ == "__main__":
    main()
