"""``python -m benchmarks.learning``: greedy and sampled returns after training, over ten seeds.

Every row trains its seeds side by side with the settings of `jaxpg.presets` (and the changes that
the row names), plays 32 episodes with each, and is compared with the return it should reach:
interquartile mean over seeds, 95 % bootstrap interval, the worst seed. ``--rows`` picks some.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxpg
from benchmarks import RESULTS
from jaxpg.presets import Preset, preset
from jaxpg.registry import ALGORITHMS, make_environment, make_policy
from jaxpg.timing import machine, markdown_table, write_json


class Row(NamedTuple):
    """One claim: an algorithm on an environment reaches `target` in `total_steps` of each seed."""

    name: str
    algorithm: str
    environment: str
    total_steps: int
    target: float | None = None  # None is reported only
    changes: dict[str, Any] = {}  # noqa: RUF012
    network: dict[str, Any] = {}  # noqa: RUF012
    env_params: dict[str, Any] = {}  # noqa: RUF012
    limit_ends: bool = False  # time limits taken for ends of episodes, which they are not
    num_seeds: int = 10


ADAPTIVE = {"kl_coef": 1.0, "kl_target": 0.01, "annealed": ("learning_rate",)}
NO_BASELINE = {
    "baseline": "none",
    "bootstrap": False,
    "normalize_advantages": False,  # which subtracts a mean
    "num_envs": 2,
    "learning_rate": 1e-3,
}

CHAIN = {"memory_length": 10}

ROWS = (
    Row("ppo clipped", "ppo", "CartPole-v1", 50_000, 490),
    Row("ppo clipped", "ppo", "Acrobot-v1", 500_000, -80),
    Row("ppo clipped", "ppo", "Pendulum-v1", 500_000, -180),
    Row("ppo adaptive KL", "ppo", "CartPole-v1", 200_000, 485, ADAPTIVE),
    Row("ppo adaptive KL", "ppo", "Acrobot-v1", 500_000, -85, ADAPTIVE),
    Row("ppo adaptive KL", "ppo", "Pendulum-v1", 500_000, -220, ADAPTIVE),
    Row("trpo", "trpo", "CartPole-v1", 100_000, 490),
    Row("trpo", "trpo", "Acrobot-v1", 300_000, -83),
    Row("trpo", "trpo", "Pendulum-v1", 500_000, -200),
    Row("actor_critic (A2C)", "actor_critic", "CartPole-v1", 500_000, 490),
    Row("actor_critic (A2C)", "actor_critic", "Acrobot-v1", 500_000, -85),
    Row("actor_critic (A2C)", "actor_critic", "Pendulum-v1", 1_000_000, -300),
    Row("reinforce, value baseline", "reinforce", "CartPole-v1", 500_000, 480),
    Row("reinforce, value baseline", "reinforce", "Acrobot-v1", 1_000_000, -100),
    Row("reinforce, value baseline", "reinforce", "Pendulum-v1", 1_000_000),
    Row("reinforce, no baseline", "reinforce", "CartPole-v1", 500_000, 400, NO_BASELINE),
    Row("reinforce, no baseline", "reinforce", "Acrobot-v1", 1_000_000, None, NO_BASELINE),
    Row("reinforce, no baseline", "reinforce", "Pendulum-v1", 1_000_000, None, NO_BASELINE),
    Row("grpo", "grpo", "CartPole-v1", 500_000, 480),
    Row("grpo", "grpo", "Acrobot-v1", 1_000_000, -100),
    Row("grpo", "grpo", "Pendulum-v1", 1_000_000),
    Row("ppo clipped, 1M", "ppo", "Pendulum-v1", 1_000_000, -250),
    Row("ppo clipped, 200k", "ppo", "CartPole-v1", 200_000, 475),
    Row("ppo clipped, limit as end", "ppo", "Pendulum-v1", 500_000, None, limit_ends=True),
    Row("ppo, gru", "ppo", "MemoryChain-bsuite", 500_000, 0.95, env_params=CHAIN),
    Row("ppo, mlp", "ppo", "MemoryChain-bsuite", 500_000, None, {}, {"network": "mlp"}, CHAIN),
    Row("ppo, cnn", "ppo", "Breakout-MinAtar", 2_000_000, 10, num_seeds=3),
)
LONG_ROWS = (  # for an accelerator; targets are the returns that gymnax publishes
    Row("ppo, cnn, 10M", "ppo", "Breakout-MinAtar", 10_000_000, 28),
    Row("ppo, cnn, 10M", "ppo", "Asterix-MinAtar", 10_000_000, 15),
    Row("ppo, cnn, 10M", "ppo", "Freeway-MinAtar", 10_000_000, 58),
    Row("ppo, cnn, 10M", "ppo", "SpaceInvaders-MinAtar", 10_000_000, 131),
)
TRUNCATION = ("ppo clipped", "ppo clipped, limit as end")  # Pendulum: have a picture of their own


def slug(row: Row) -> str:
    """A short name for ``--rows``."""
    words = f"{row.name} {row.environment.split('-')[0]}".lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")


def limit_as_end(env: jaxpg.Env) -> jaxpg.Env:
    """An environment that calls a time limit the end of the episode."""

    def step(*args: Any) -> Any:
        state, out = env.step(*args)
        over = out.terminated | out.truncated
        return state, out._replace(terminated=over, truncated=jnp.zeros_like(over))

    return env._replace(step=step, transition=None)


def settings(row: Row) -> tuple[Preset, jaxpg.Env, int]:
    """The row's preset with its changes, its environment, and its number of updates.

    Annealing is over that number of updates.
    """
    chosen = preset(row.algorithm, row.environment)
    params = {**chosen.environment.env_params, **row.env_params}
    options = dataclasses.replace(chosen.environment, env_params=params)
    env = make_environment(row.environment, options)
    config = chosen.config.replace(**row.changes)
    steps = config.num_envs * (config.num_steps or env.time_limit)
    num_updates = -(-row.total_steps // steps)
    if chosen.anneal:
        config = config.replace(anneal_updates=float(num_updates))
    network = dataclasses.replace(chosen.network, **row.network)
    chosen = dataclasses.replace(chosen, config=config, network=network, environment=options)
    return chosen, limit_as_end(env) if row.limit_ends else env, num_updates


def run(row: Row, num_seeds: int, num_episodes: int, seed: int) -> dict[str, Any]:
    """Trains and evaluates one row; the curve has at most 50 points."""
    chosen, env, num_updates = settings(row)
    algorithm = ALGORITHMS[row.algorithm].build(env, make_policy(env, chosen.network))

    def one(key: jax.Array) -> tuple[Any, ...]:
        train_key, greedy_key, sampled_key = jax.random.split(key, 3)
        state, infos = jaxpg.train(algorithm, train_key, chosen.config, num_updates)
        greedy = jaxpg.evaluate(algorithm, state, greedy_key, num_episodes=num_episodes)
        sampled = jaxpg.evaluate(
            algorithm, state, sampled_key, num_episodes=num_episodes, deterministic=False
        )
        names = ("episode_return_sum", "episode_count", "live_steps", "nonfinite")
        return greedy, sampled, {name: infos[name] for name in names}

    begin = time.perf_counter()
    keys = jax.random.split(jax.random.key(seed), num_seeds)
    greedy, sampled, infos = jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(keys))
    seconds = time.perf_counter() - begin
    summary = jaxpg.summarize(greedy)
    pieces = np.array_split(np.arange(num_updates), min(50, num_updates))
    sums = [infos["episode_return_sum"][:, piece].sum(1) for piece in pieces]
    counts = [infos["episode_count"][:, piece].sum(1) for piece in pieces]
    curve = np.where(np.asarray(counts) > 0, np.asarray(sums) / np.maximum(counts, 1), np.nan)
    for earlier, later in itertools.pairwise(curve):  # no episode ended: what was seen last
        np.copyto(later, earlier, where=np.isnan(later))
    steps = chosen.config.num_envs * (chosen.config.num_steps or env.time_limit)
    return {
        "name": row.name,
        "algorithm": row.algorithm,
        "environment": row.environment,
        "steps_per_seed": steps * num_updates,
        "live_steps_per_seed": float(infos["live_steps"].sum(1).mean()),
        "target": row.target,
        "reached": None if row.target is None else bool(summary.iqm >= row.target),
        "greedy": summary._asdict(),
        "sampled": jaxpg.summarize(sampled)._asdict(),
        "greedy_by_seed": greedy.mean(1).tolist(),
        "sampled_by_seed": sampled.mean(1).tolist(),
        "nonfinite": float(infos["nonfinite"].mean()),
        "curve_steps": [int(steps * (piece[-1] + 1)) for piece in pieces],
        "curve_iqm": jaxpg.interquartile_mean(curve, axis=1).tolist(),
        "seconds_with_compile": seconds,
        "config": {k: _plain(v) for k, v in dataclasses.asdict(chosen.config).items()},
        "network": dataclasses.asdict(chosen.network),
        "environment_options": dataclasses.asdict(chosen.environment),
    }


def _plain(x: Any) -> Any:
    return x if x is None or isinstance(x, bool | int | float | str | tuple) else float(x)


def show(result: dict[str, Any]) -> dict[str, str]:
    """A result as a row for people."""
    greedy, sampled = result["greedy"], result["sampled"]
    mark = {True: "yes", False: "**no**", None: ""}[result["reached"]]
    return {
        "algorithm": result["name"],
        "environment": result["environment"],
        "steps a seed": f"{result['steps_per_seed']:,}",
        "live steps": f"{result['live_steps_per_seed']:,.0f}",
        "target": "" if result["target"] is None else f"{result['target']:g}",
        "greedy IQM [95 %]": "{iqm:.1f} [{low:.1f}, {high:.1f}]".format(**greedy),
        "worst seed": f"{greedy['minimum']:.1f}",
        "sampled IQM [95 %]": "{iqm:.1f} [{low:.1f}, {high:.1f}]".format(**sampled),
        "reached": mark,
    }


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Training returns (sampled) of every row, one panel an environment."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = sorted({result["environment"] for result in results})
    figure, panels = plt.subplots(
        1, len(names), figsize=(5.5 * len(names), 4), layout="constrained", squeeze=False
    )
    for axes, name in zip(panels[0], names, strict=True):
        for result in results:
            if result["environment"] == name:
                axes.plot(result["curve_steps"], result["curve_iqm"], label=result["name"])
        axes.set_title(name)
        axes.ticklabel_format(axis="x", style="sci", scilimits=(3, 3))
        axes.set_xlabel("environment steps of each seed")
        axes.set_ylabel("return while training (IQM over seeds)")
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Runs the rows and writes ``results/learning/*.{json,md,png}``."""
    parser = argparse.ArgumentParser(prog="benchmarks.learning", description=__doc__)
    every = {slug(row): row for row in (*ROWS, *LONG_ROWS)}
    short = [slug(row) for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=every, default=short, metavar="ROW")
    parser.add_argument(
        "--minatar", action="store_true", help="the four MinAtar games at 10M steps instead"
    )
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--seeds", type=int, default=None, help="instead of each row's own number")
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "learning")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(every))
        return
    for name in [slug(row) for row in LONG_ROWS] if args.minatar else args.rows:
        row = every[name]
        result = run(row, args.seeds or row.num_seeds, args.episodes, args.seed)
        write_json(args.output / f"{name}.json", {"machine": machine(), **result})
        print(
            " | ".join(show(result).values()),
            f"({result['seconds_with_compile']:.0f} s)",
            flush=True,
        )
    summarise(args.output)


def summarise(folder: Path) -> None:
    """One table and one picture of all the results in a folder, in the order of `ROWS`."""
    paths = [folder / f"{slug(row)}.json" for row in (*ROWS, *LONG_ROWS)]
    results = [json.loads(path.read_text()) for path in paths if path.exists()]
    table = markdown_table([show(result) for result in results])
    about = "Returns of 32 episodes with each seed, made by `python -m benchmarks.learning`."
    plot(
        [result for result in results if "limit as end" not in result["name"]],
        folder / "curves.png",
    )
    text = f"{about}\n\n{table}\n![curves](curves.png)\n"
    pendulum = [result for result in results if result["environment"] == "Pendulum-v1"]
    truncation = [result for result in pendulum if result["name"] in TRUNCATION]
    if truncation:
        plot(truncation, folder / "truncation.png")
        text += (
            "\nPendulum-v1 only ever ends by its time limit. Exact bootstrapping at the limit, and "
            "the limit taken for an end:\n\n![truncation](truncation.png)\n"
        )
    (folder / "README.md").write_text(text)
    print(f"\n{table}\nwritten to {folder}")


if __name__ == "__main__":
    main()
