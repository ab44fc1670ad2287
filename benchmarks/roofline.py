"""``python -m benchmarks.roofline``: how much of what the arithmetic allows does a PPO step reach?

A step of CartPole through two separate 64-64 networks costs a known number of multiply-adds and of
tanh. The machine's rates for just these, at the same sizes and on all its cores, give a ceiling:
nothing is counted for the environment, Adam, shuffling, the losses or the dispatch of operations,
and products that give gradients of weights are counted as fast as others, which XLA's are not (the
rate of one such product over all rows is shown beside).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import RESULTS
from jaxpg.throughput import Row, measure
from jaxpg.timing import machine, markdown_table, time_compiled, write_json

WIDTH, OBSERVATION, HEADS = 64, 4, (2, 1)  # actor and critic
EPOCHS, MINIBATCHES = 4, 4
REPEATS = 200  # operations in one timed call


def work() -> dict[str, int]:
    """Floating-point operations and tanh of one environment step."""
    forward = sum(2 * WIDTH * (OBSERVATION + WIDTH + head) for head in HEADS)
    # the gradients of the inputs, which nobody needs, are left out
    inputs = sum(2 * WIDTH * (WIDTH + head) for head in HEADS)
    tanh = 2 * WIDTH * len(HEADS)
    return {
        "products": forward + EPOCHS * (forward + inputs),
        "weight gradients": EPOCHS * forward,
        "tanh": tanh * (1 + EPOCHS),
    }


def rates(rows: int, dtype: Any, repeats: int) -> dict[str, float]:
    """Operations a second at `rows` samples: two independent chains, as actor and critic are."""
    keys = jax.random.split(jax.random.key(0), 4)
    x, y = (jax.random.normal(k, (rows, WIDTH)) for k in keys[:2])
    v, w = (jax.random.orthogonal(k, WIDTH) for k in keys[2:])

    def chain(one: Any, unroll: int = 1) -> Any:
        def run(x: jax.Array, y: jax.Array) -> Any:
            step = lambda c, _: ((one(c[0], v), one(c[1], w)), None)  # noqa: E731
            return jax.lax.scan(step, (x, y), length=REPEATS, unroll=unroll)[0]

        return time_compiled(run, x, y, repeats=repeats).median / REPEATS

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        short = (x.astype(dtype), w.astype(dtype))
        return jax.lax.dot(*short, preferred_element_type=jnp.float32)

    def weight_gradient(x: jax.Array, w: jax.Array) -> jax.Array:
        total = jax.lax.dot_general(x, x, (((0,), (0,)), ((), ())))
        return x.at[:WIDTH].set(0.5 * x[:WIDTH] + 1e-6 * total)

    numbers = 2 * rows * WIDTH
    return {
        # unrolled, for the loop copies what it carries, and a product cannot write in place
        "products, GFLOP/s": 2 * WIDTH * numbers / chain(product, unroll=8) / 1e9,
        "tanh, 1e9/s": numbers / chain(lambda x, w: jnp.tanh(x)) / 1e9,
        "xᵀ δ in one product, GFLOP/s": 2 * WIDTH * numbers / chain(weight_gradient) / 1e9,
    }


def main(argv: list[str] | None = None) -> None:
    """Measures both and writes ``results/roofline/DEVICE.{json,md}``."""
    parser = argparse.ArgumentParser(prog="benchmarks.roofline", description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS / "roofline")
    args = parser.parse_args(argv)
    per_step, rows = work(), []
    for num_envs, num_steps, updates in ((64, 128, 20), (2048, 32, 4)):
        samples = num_envs * num_steps // MINIBATCHES
        for dtype in ("float32", "bfloat16"):
            found = rates(samples, jnp.dtype(dtype), args.repeats)
            in_products, in_tanh, _ = found.values()
            flops = per_step["products"] + per_step["weight gradients"]
            seconds = flops / (1e9 * in_products) + per_step["tanh"] / (1e9 * in_tanh)
            row = Row("ppo", "CartPole-v1", 1, num_envs, num_steps, updates)
            short = None if dtype == "float32" else dtype
            run = measure(row, ["training"], repeats=args.repeats, compute_dtype=short)
            speed = run["stages"]["training"]["steps_per_second"]
            cells = {name: f"{x:.1f}" for name, x in found.items()}
            rows.append(
                {"envs × steps": f"{num_envs} × {num_steps}", "products in": dtype}
                | cells
                | {"ceiling, steps/s": f"{1 / seconds:,.0f}", "training, steps/s": f"{speed:,.0f}"}
                | {"share": f"{100 * speed * seconds:.0f} %"}
            )
            print(" | ".join(rows[-1].values()), flush=True)
    about = machine()
    base = args.output / about["devices"][0].lower().replace(" ", "-")
    write_json(base.with_suffix(".json"), {"machine": about, "work": per_step, "rows": rows})
    text = report(per_step, rows, about)
    base.with_suffix(".md").write_text(text)
    print(f"\n{text}written to {base}.*")


def report(per_step: dict[str, int], rows: list[dict[str, str]], about: dict[str, Any]) -> str:
    """What was measured, for people."""
    counts = ", ".join(f"{count:,} {name}" for name, count in per_step.items())
    each = f"Operations of one environment step, rollout and update: {counts}."
    return f"{each}\n\n{markdown_table(rows)}\n{about}\n"


if __name__ == "__main__":
    main()
