"""Floor 5: ``jaxpg bench``, environment steps a second, in three stages.

``environment``: random actions, no network. ``rollout``: the policy in the loop, with the values of
all successors. ``training``: everything. Steps are summed over seeds and environments; compile time
is apart; every figure is the median of repeats after a warm-up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpg._checks import positive_int
from jaxpg.registry import (
    ALGORITHMS,
    NetworkOptions,
    algorithm_name,
    make_environment,
    make_policy,
)
from jaxpg.rollouts import init_runner, rollout
from jaxpg.sharding import (
    check_chunks,
    map_in_chunks,
    num_devices,
    seeds_at_a_time,
    shard_leading_axis,
)
from jaxpg.timing import (
    machine,
    markdown_table,
    peak_device_memory,
    peak_host_memory,
    time_compiled,
    write_json,
)
from jaxpg.training import train
from jaxpg.types import Discrete, Env

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


def random_steps(env: Env, row: Row) -> Callable:
    """Steps environments with uniformly random actions; returns something of every step."""
    steps = row.num_steps * row.num_updates

    def actions(key: jax.Array) -> jax.Array:
        space = env.action_space
        if isinstance(space, Discrete):
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
    env = make_environment(row.environment)
    if stage == "environment":
        return random_steps(env, row)
    policy = make_policy(env, NetworkOptions(network=row.network, compute_dtype=compute_dtype))
    if stage == "rollout":

        def run(key: jax.Array) -> Any:
            init_key, reset_key, key = jax.random.split(key, 3)
            runner = init_runner(reset_key, env, policy, row.num_envs)
            params = policy.init(init_key, runner.obs)

            def body(runner: Any, key: jax.Array) -> tuple[Any, Any]:
                runner, rows, next_values, _ = rollout(
                    key, env, policy, params, runner, num_steps=row.num_steps
                )
                read = jax.tree.map(lambda x: jnp.sum(x.astype(jnp.float32)), rows)
                return runner, (read, jnp.sum(next_values))

            return jax.lax.scan(body, runner, jax.random.split(key, row.num_updates))

        return run
    entry = ALGORITHMS[row.algorithm]
    algorithm = entry.build(env, policy)
    config = entry.config(num_envs=row.num_envs, num_steps=row.num_steps)
    return lambda key: train(algorithm, key, config, row.num_updates)


def grid(
    algorithms: Sequence[str],
    environments: Sequence[str],
    num_seeds: Sequence[int],
    num_envs: Sequence[int],
    *,
    num_steps: int,
    num_updates: int,
    network: str = "mlp",
) -> list[Row]:
    """Every combination; algorithms on whole episodes take the time limit for `num_steps`."""
    rows = []
    for algorithm, environment in itertools.product(algorithms, environments):
        name = algorithm_name(algorithm, environment)
        whole = ALGORITHMS[name].config().num_steps is None
        steps = (make_environment(environment).time_limit or num_steps) if whole else num_steps
        for seeds, envs in itertools.product(num_seeds, num_envs):
            rows.append(Row(name, environment, seeds, envs, steps, num_updates, network))
    return rows


def check(row: Row, compute_dtype: str | None, chunk_size: int | None, devices: int) -> None:
    """`ValueError` for a row that cannot run; nothing is compiled."""
    for name in ("num_seeds", "num_envs", "num_steps", "num_updates"):
        positive_int(name, getattr(row, name))
    spread = devices if row.num_seeds > 1 else 1
    check_chunks(chunk_of(row, chunk_size, spread), row.num_seeds, spread)
    jax.eval_shape(stage_function("training", row, compute_dtype), jax.random.key(0))


def chunk_of(row: Row, chunk_size: int | None, devices: int) -> int:
    """Seeds of a row that are vmapped at a time; None as the command line trains them."""
    if chunk_size is None:
        return seeds_at_a_time(row.num_seeds, devices)
    return min(row.num_seeds, chunk_size)


def measure(
    row: Row,
    stages: Sequence[str] = STAGES,
    *,
    repeats: int = 5,
    compute_dtype: str | None = None,
    chunk_size: int | None = None,
    mesh: Mesh | None = None,
) -> dict[str, Any]:
    """Times the stages of one row; its seeds are spread over `mesh`."""
    keys = jax.random.split(jax.random.key(0), row.num_seeds)
    result: dict[str, Any] = {**row._asdict(), "stages": {}}
    steps = row.num_seeds * row.num_envs * row.num_steps * row.num_updates
    for stage in stages:
        fn = stage_function(stage, row, compute_dtype)
        if row.num_seeds == 1:
            timing = time_compiled(fn, keys[0], repeats=repeats)
        else:
            spread = keys if mesh is None else shard_leading_axis(keys, mesh)
            chunk = chunk_of(row, chunk_size, num_devices(mesh))
            mapped = map_in_chunks(fn, chunk_size=chunk, mesh=mesh)
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


def write(results: list[dict], folder: Path, name: str, settings: dict[str, Any]) -> list[Path]:
    """Writes ``NAME-DEVICE.json``, ``.md`` and ``.png``; gives their paths."""
    about = machine()
    device = about["devices"][0].lower().replace(" ", "-")
    base = folder / f"{name}-{device}"
    paths = [base.with_name(f"{base.name}{suffix}") for suffix in (".json", ".md", ".png")]
    write_json(paths[0], {"machine": about, **settings, "rows": results})
    said = ", ".join(f"{key} {value}" for key, value in settings.items())
    paths[1].write_text(f"{markdown_table(show(results))}\n{said}\n\n{about}\n")
    plot(results, paths[2])
    return paths
