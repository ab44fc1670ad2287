"""``python -m benchmarks.estimators``: recurrences over time, by scan and associative scan.

GAE, V-trace and λ-returns over T × B, for several unroll factors of the scan and for the
associative scan, beside rlax (``pip install 'jaxpg[bench]'``; vmapped over B and jitted). rlax
knows terminations only, so that is what is compared; ``with time limits`` reads the second flag
too. Every candidate of a cell is timed in turn, repeatedly, and the minimum is compared: the ratio
of two minima in one process is steadier than either.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxpg
from benchmarks import RESULTS
from jaxpg.timing import machine, markdown_table, write_json

UNROLL = (1, 4, 8, 16)


def candidates(name: str) -> dict[str, Callable]:
    """Functions of ``(rewards, values, next_values, terminated, truncated)``, each ``[T, B]``."""

    def ours(flags: int = 1, **how: Any) -> Callable:
        def gae(
            rewards: Any, values: Any, next_values: Any, terminated: Any, truncated: Any
        ) -> Any:
            ends = (terminated, truncated)[:flags]
            if name == "gae":
                fn = partial(jaxpg.gae, gamma=0.99, lambda_=0.95, **how)
                return fn(rewards, values, next_values, *ends)
            if name == "lambda_returns":
                fn = partial(jaxpg.lambda_returns, gamma=0.99, lambda_=0.95, **how)
                return fn(rewards, next_values, *ends)
            fn = partial(jaxpg.vtrace, gamma=0.99, lambda_=0.95, **how)
            return fn(0.1 * values, rewards, values, next_values, *ends)

        return gae

    # `default` and `unroll 1` are one program: how far they differ is how far to trust a row
    result = {"default": ours(), "with time limits": ours(flags=2)}
    result |= {f"unroll {n}": ours(unroll=n) for n in UNROLL}
    result["associative"] = ours(associative=True)
    try:
        import rlax
    except ImportError:
        return result

    def peer(rewards: Any, values: Any, next_values: Any, terminated: Any, truncated: Any) -> Any:
        discounts = 0.99 * (1 - terminated)
        if name == "gae":
            bootstrapped = jnp.concatenate([values, next_values[-1:]])
            fn = jax.vmap(
                lambda r, d, v: rlax.truncated_generalized_advantage_estimation(r, d, 0.95, v),
                in_axes=1,
                out_axes=1,
            )
            return fn(rewards, discounts, bootstrapped)
        if name == "lambda_returns":
            fn = jax.vmap(lambda r, d, v: rlax.lambda_returns(r, d, v, 0.95), in_axes=1, out_axes=1)
            return fn(rewards, discounts, next_values)
        fn = jax.vmap(
            lambda v, nv, r, d, rho: rlax.vtrace_td_error_and_advantage(v, nv, r, d, rho, 0.95),
            in_axes=1,
            out_axes=1,
        )
        return fn(values, next_values, rewards, discounts, jnp.exp(0.1 * values))

    result["rlax"] = peer
    return result


def measure(name: str, num_steps: int, num_envs: int, seconds: float) -> dict[str, Any]:
    """The fastest call of each candidate on one size, in microseconds."""
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (num_steps, num_envs)
    rewards, values, last = (jax.random.normal(k, shape) for k in keys[:3])
    next_values = jnp.concatenate([values[1:], last[:1]])
    terminated = jax.random.bernoulli(keys[3], 0.01, shape)
    args = (rewards, values, next_values, terminated, jnp.zeros_like(terminated))
    compiled = {label: jax.jit(fn).lower(*args).compile() for label, fn in candidates(name).items()}
    best = dict.fromkeys(compiled, float("inf"))
    for fn in compiled.values():
        jax.block_until_ready(fn(*args))
    deadline = time.perf_counter() + seconds
    rounds = 0
    while rounds < 5 or time.perf_counter() < deadline:
        rounds += 1
        # in another order each time: a call pays for the cache that the one before it left
        for label, fn in random.sample(sorted(compiled.items()), len(compiled)):
            begin = time.perf_counter()
            jax.block_until_ready(fn(*args))
            best[label] = min(best[label], time.perf_counter() - begin)
    micros = {label: 1e6 * value for label, value in best.items()}
    row: dict[str, Any] = {"function": name, "T": num_steps, "B": num_envs, "rounds": rounds}
    row["microseconds"] = micros
    if "rlax" in micros:
        row["rlax / default"] = micros["rlax"] / micros["default"]
    return row


def show(row: dict[str, Any]) -> dict[str, Any]:
    """One row for people."""
    cells = {label: f"{value:,.0f}" for label, value in row["microseconds"].items()}
    ratio = {"rlax / default": f"{row['rlax / default']:.2f}"} if "rlax / default" in row else {}
    return {name: row[name] for name in ("function", "T", "B")} | cells | ratio


def main(argv: list[str] | None = None) -> None:
    """Measures the grid and writes ``results/estimators/DEVICE.{json,md}``."""
    parser = argparse.ArgumentParser(prog="benchmarks.estimators", description=__doc__)
    names = ["gae", "vtrace", "lambda_returns"]
    parser.add_argument("--functions", nargs="+", choices=names, default=names)
    parser.add_argument("--steps", nargs="+", type=int, default=[16, 128, 1024, 4096])
    parser.add_argument("--envs", nargs="+", type=int, default=[1, 16, 256, 4096])
    parser.add_argument("--seconds", type=float, default=0.5, help="time spent on each size")
    parser.add_argument("--output", type=Path, default=RESULTS / "estimators")
    args = parser.parse_args(argv)
    rows = []
    for name in args.functions:
        for num_steps in args.steps:
            for num_envs in args.envs:
                rows.append(measure(name, num_steps, num_envs, args.seconds))
                print(markdown_table([show(rows[-1])]).splitlines()[-1], flush=True)
    about = machine()
    base = args.output / about["devices"][0].lower().replace(" ", "-")
    write_json(base.with_suffix(".json"), {"machine": about, "rows": rows})
    table = markdown_table([show(row) for row in rows])
    base.with_suffix(".md").write_text(f"Microseconds, the fastest call.\n\n{table}\n{about}\n")
    print(f"\n{table}\n{about}\nwritten to {base}.*")


if __name__ == "__main__":
    main()
