"""``python -m benchmarks.variance``: what baselines do to the variance of REINFORCE's gradient.

First part: a policy is trained for a while and then held fixed. Every baseline estimates the same
gradient from many independent batches of episodes; reported is the total variance (the trace of
the covariance over batches) beside the squared length of the mean gradient. Second part: whole-
episode against sequential REINFORCE, learning on the same budget of environment steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax import Array
from jax.flatten_util import ravel_pytree

import jaxpg
from benchmarks import RESULTS
from jaxpg.plotting import learning_curve, plot_curve
from jaxpg.timing import machine, markdown_table, write_json
from jaxpg.types import TrainState

ESTIMATORS = {
    "whole return, none": {"returns": "total", "baseline": "none"},
    "to go, none": {"baseline": "none"},
    "to go, batch mean": {"baseline": "mean"},
    "to go, moving average": {"baseline": "ema"},
    "to go, value function": {"baseline": "value"},
}
FORMS = ("episode", "sequential")


def sgd(config: Any) -> optax.GradientTransformation:
    """Unclipped, so that at a learning rate of 1 the change of parameters is minus the gradient."""
    return optax.sgd(config.learning_rate)


def critic_alone(config: Any) -> optax.GradientTransformation:
    """Adam on the critic, while the actor stands still."""
    parts = {"actor": optax.set_to_zero(), "critic": optax.adam(config.learning_rate)}
    return optax.multi_transform(parts, {"actor": "actor", "critic": "critic"})


def train_parts(
    env: jaxpg.Env, policy: jaxpg.Policy, num_updates: int, num_fits: int, num_envs: int
) -> TrainState:
    """A policy on its way, then a critic fitted to it while it waits."""
    config = jaxpg.ReinforceConfig(
        num_envs=num_envs,
        episodes="first",
        baseline="value",
        learning_rate=3e-3,
        normalize_advantages=True,
        max_grad_norm=None,
    )
    run = jax.jit(jaxpg.train, static_argnums=(0, 3))
    state, _ = run(jaxpg.reinforce(env, policy), jax.random.key(0), config, num_updates)
    fitting = jaxpg.reinforce(env, policy, critic_alone)
    fresh = fitting.init(jax.random.key(5), config)._replace(params=state.params)
    return run(fitting, None, config, num_fits, state=fresh)[0]


def gradient_function(
    env: jaxpg.Env, policy: jaxpg.Policy, settings: dict[str, Any], num_envs: int, num_batches: int
) -> Callable[[Any], Array]:
    """``params -> [num_batches, parameters of the actor]``: the gradient from each batch."""
    algorithm = jaxpg.reinforce(env, policy, sgd)
    # first episodes alone: an episode that is counted only if it is short would bias the gradient
    config = jaxpg.ReinforceConfig(num_envs=num_envs, episodes="first", **settings)
    still, moving = (config.replace(learning_rate=rate) for rate in (0.0, 1.0))

    @jax.jit
    def estimate(params: Any) -> Array:
        state = algorithm.init(jax.random.key(1), still)._replace(params=params)
        if config.baseline == "ema":
            # a moving average needs a past; at a learning rate of 0 it is this policy's
            state, _ = jaxpg.train(algorithm, None, still, 20, state=state)
        before = ravel_pytree(params["actor"])[0]

        def one(key: Array) -> Array:
            after, _ = algorithm.step(state._replace(key=key), moving)
            return before - ravel_pytree(after.params["actor"])[0]

        return jax.lax.map(one, jax.random.split(jax.random.key(2), num_batches), batch_size=16)

    return estimate


def describe(name: str, grads: Array, best: Array) -> dict[str, Any]:
    """Variance of one estimator, and how far its mean points where `best`'s does."""
    grads, best = np.asarray(grads, np.float64), np.asarray(best, np.float64).mean(0)
    mean = grads.mean(0)
    variance = float(grads.var(0, ddof=1).sum())
    # the squared length of a mean of n gradients is too large by their variance over n
    signal = max(float(mean @ mean) - variance / len(grads), 0.0)
    cosine = float(mean @ best / (np.linalg.norm(mean) * np.linalg.norm(best)))
    return {"estimator": name, "variance": variance, "signal": signal, "cosine": cosine}


def measure_variance(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every estimator at every phase of learning."""
    env = jaxpg.from_gymnax(args.environment)
    policy = jaxpg.mlp_policy(env)
    estimators = {
        name: gradient_function(env, policy, settings, args.envs, args.batches)
        for name, settings in ESTIMATORS.items()
    }
    rows = []
    for num_updates in args.phases:
        state = train_parts(env, policy, num_updates, args.fits, args.envs)
        returns = jaxpg.evaluate(
            jaxpg.reinforce(env, policy),
            state,
            jax.random.key(3),
            num_episodes=64,
            deterministic=False,
        )
        found = {name: estimate(state.params) for name, estimate in estimators.items()}
        phase = {"updates before": num_updates, "return": float(returns.mean())}
        best = found["to go, value function"]
        described = [describe(name, grads, best) for name, grads in found.items()]
        reference = next(x for x in described if x["estimator"] == "to go, none")["variance"]
        for row in described:
            rows.append(phase | row | {"relative": row["variance"] / reference})
            print(markdown_table([show(rows[-1])]).splitlines()[-1], flush=True)
    return rows


def show(row: dict[str, Any]) -> dict[str, Any]:
    """One row for people."""
    return {
        "return": f"{row['return']:.0f}",
        "estimator": row["estimator"],
        "variance": f"{row['variance']:.3g}",
        "against no baseline": f"{row['relative']:.3f}",
        "squared length of the mean": f"{row['signal']:.3g}",
        "cosine to the value baseline's": f"{row['cosine']:.2f}",
    }


def measure_forms(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Learning curves of both forms, ``[points]`` steps and ``[points, seeds]`` returns."""
    env = jaxpg.from_gymnax(args.environment)
    algorithm = jaxpg.reinforce(env, jaxpg.mlp_policy(env))
    rows = []
    for form in FORMS:
        for rate in getattr(args, f"{form}_rates"):
            config = jaxpg.ReinforceConfig(
                num_envs=4,
                form=form,
                baseline="value",
                normalize_advantages=True,
                learning_rate=rate,
            )
            per_update = 4 * (env.time_limit or 0)
            num_updates = args.steps // per_update
            keys = jax.random.split(jax.random.key(4), args.seeds)

            @jax.jit
            def run(keys: Array, config: Any = config, num_updates: int = num_updates) -> Any:
                train = lambda key: jaxpg.train(algorithm, key, config, num_updates)  # noqa: E731
                return jax.vmap(train)(keys)[1]

            infos = jax.tree.map(np.asarray, run(keys))
            returns = infos["episode_return_sum"] / np.maximum(infos["episode_count"], 1)
            returns = np.where(infos["episode_count"] > 0, returns, np.nan).T
            rows.append(
                {
                    "form": form,
                    "learning_rate": rate,
                    "steps": [(i + 1) * per_update for i in range(num_updates)],
                    "returns": np.where(np.isnan(returns), None, returns.round(2)).tolist(),
                }
            )
            last = float(np.nanmean(returns[-max(num_updates // 10, 1) :]))
            print(f"{form}, learning rate {rate:g}: {last:.0f} over the last tenth", flush=True)
    return rows


def show_forms(rows: list[dict[str, Any]]) -> str:
    """The second part for people: return at a quarter, half and the end of the budget."""
    table = []
    for row in rows:
        returns = np.array(row["returns"], float)
        points = len(returns)
        windows = {"a quarter": points // 4, "half": points // 2, "all": points}
        cells = {
            f"return at {name}": f"{np.nanmean(returns[end - points // 10 : end]):.0f}"
            for name, end in windows.items()
        }
        table.append({"form": row["form"], "learning rate": f"{row['learning_rate']:g}"} | cells)
    return markdown_table(table)


def save_figure(path: Path, variances: list[dict[str, Any]], forms: list[dict[str, Any]]) -> None:
    """Both parts, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    phases = list(dict.fromkeys(row["updates before"] for row in variances))
    names = list(ESTIMATORS)
    for i, phase in enumerate(phases):
        rows = [row for row in variances if row["updates before"] == phase]
        offsets = np.arange(len(names)) + (i - (len(phases) - 1) / 2) * 0.8 / len(phases)
        label = f"policy with return {rows[0]['return']:.0f}"
        left.bar(offsets, [r["relative"] for r in rows], 0.8 / len(phases), label=label)
    left.set_yscale("log")
    left.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=8)
    left.set_ylabel("variance of the gradient, none = 1")
    left.set_title("Baselines")
    left.legend(fontsize=8)
    for row in forms:
        curve = learning_curve(row["steps"], np.array(row["returns"], float), num_resamples=200)
        plot_curve(right, curve, label=f"{row['form']}, learning rate {row['learning_rate']:g}")
    right.set_xlabel("environment steps per seed")
    right.set_ylabel("return of training episodes")
    right.set_title("One step an update, or one a time step")
    right.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    """Measures both and writes ``results/variance/ENVIRONMENT.{json,md,png}``."""
    parser = argparse.ArgumentParser(prog="benchmarks.variance", description=__doc__)
    parser.add_argument("--environment", default="CartPole-v1")
    parser.add_argument("--phases", nargs="+", type=int, default=[10, 60], help="updates before")
    parser.add_argument("--fits", type=int, default=500, help="updates of the critic alone")
    parser.add_argument("--envs", type=int, default=8, help="episodes in a batch")
    parser.add_argument("--batches", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200_000, help="of each seed, second part")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--episode-rates", nargs="+", type=float, default=[1e-3, 3e-3])
    parser.add_argument("--sequential-rates", nargs="+", type=float, default=[1e-5, 3e-5])
    parser.add_argument("--output", type=Path, default=RESULTS / "variance")
    args = parser.parse_args(argv)
    variances, forms = measure_variance(args), measure_forms(args)
    about, base = machine(), args.output / args.environment
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    content = {"machine": about, "settings": settings, "variance": variances, "forms": forms}
    write_json(base.with_suffix(".json"), content)
    save_figure(base.with_suffix(".png"), variances, forms)
    table = markdown_table([show(row) for row in variances])
    text = (
        f"Gradient of the actor from batches of {args.envs} episodes of {args.environment}, over "
        f"{args.batches} batches: total variance.\n\n{table}\n"
        f"Returns of training episodes, {args.seeds} seeds, {args.steps:,} steps each; the mean "
        f"over a tenth of the budget.\n\n{show_forms(forms)}\n{about}\n"
    )
    base.with_suffix(".md").write_text(text)
    print(f"\n{text}written to {base}.*")


if __name__ == "__main__":
    main()
