"""Floor 6: one training run of many seeds, from a description to its scores. No files, no terminal.

`train_run` is what the command line and the benchmarks share: all seeds vmapped, compiled ahead of
time, in pieces between which the host sees the numbers. A piece is a loop of any length around one
compiled body, so that a run needs no rounding beyond whole updates, and a run that is cut and
continued computes exactly what the uncut one does.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxpg._checks import positive_int
from jaxpg.loggers import Logger
from jaxpg.presets import Preset
from jaxpg.registry import algorithm_name, domain_of, environment_name
from jaxpg.sharding import (
    check_chunks,
    data_parallel,
    map_in_chunks,
    num_devices,
    seeds_at_a_time,
    shard_environments,
    shard_leading_axis,
)
from jaxpg.types import Info, Key, TrainState


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """Everything that a run follows from. The same spec gives the same numbers."""

    algorithm: str
    environment: str
    config: Any
    network: Any
    environment_options: Any
    num_updates: int
    num_seeds: int = 1
    seed: int = 0


class Point(NamedTuple):
    """Where a run stands, between two pieces."""

    update: int
    steps: int  # of each seed
    seconds: float  # training alone, of this call
    metrics: dict[str, np.ndarray]  # [seeds] each, over the updates since the last point


class Trained(NamedTuple):
    """What a run leaves."""

    states: TrainState  # every leaf [seeds, …]
    update: int
    steps: int  # of each seed, since its start
    steps_run: int  # of all seeds, in this call
    compile_seconds: float
    run_seconds: float
    diverged: np.ndarray  # [seeds] bool: parameters hold NaN or inf
    diverged_at: int | None  # steps of a seed at the point that first showed it


def make_spec(
    algorithm: str,
    environment: str,
    settings: Preset,
    *,
    total_steps: int | None = None,
    num_seeds: int = 1,
    seed: int = 0,
) -> tuple[RunSpec, Any]:
    """A spec and its algorithm, checked before anything compiles.

    Args:
        algorithm: its name, dash or underscore.
        environment: its name.
        settings: a preset, possibly changed.
        total_steps: of each seed, rounded up to whole updates; None takes the preset's.
        num_seeds: independent runs, trained side by side.
        seed: seed ``i`` starts from ``jax.random.split(jax.random.key(seed), num_seeds)[i]``.

    Returns:
        ``(spec, algorithm)``; with ``settings.anneal`` and no ``anneal_updates`` of its own, the
        config anneals over the whole run.

    Raises:
        ValueError: names, sizes or numbers that cannot work, or that do not fit each other.
        TypeError: a number of another type.
    """
    name = algorithm_name(algorithm, environment_name(environment))
    positive_int("num_seeds", num_seeds)
    steps = settings.total_steps if total_steps is None else total_steps
    positive_int("total_steps", steps)
    spec = RunSpec(
        algorithm=name,
        environment=environment,
        config=settings.config,
        network=settings.network,
        environment_options=settings.environment,
        num_updates=1,
        num_seeds=num_seeds,
        seed=seed,
    )
    built = build(spec)
    per_update = domain_of(environment).steps_per_update(built, spec.config)
    num_updates = math.ceil(steps / per_update)
    config = spec.config
    if settings.anneal and config.anneal_updates is None:
        config = config.replace(anneal_updates=float(num_updates))
    return dataclasses.replace(spec, config=config, num_updates=num_updates), built


def build(spec: RunSpec) -> Any:
    """The algorithm of a spec, with every check of sizes and spaces that tracing can make.

    Args:
        spec: the description.

    Returns:
        The algorithm, bound to its environment and networks.

    Raises:
        ValueError: settings that do not fit; nothing has compiled by then.
    """
    domain = domain_of(spec.environment)
    entry = domain.algorithms[spec.algorithm]
    algorithm = domain.build(entry, spec.environment, spec.network, spec.environment_options)
    abstract_states(algorithm, spec)
    return algorithm


def abstract_states(algorithm: Any, spec: RunSpec) -> TrainState:
    """Shapes and dtypes of the states of a run, for `jaxpg.load_checkpoint`."""
    return jax.eval_shape(_initializer(algorithm, spec), seed_keys(spec)[0])


def seed_keys(spec: RunSpec) -> tuple[Key, Key]:
    """``(keys[num_seeds], key)``: to train with, and to evaluate with at the end."""
    keys = jax.random.split(jax.random.key(spec.seed), spec.num_seeds + 1)
    return keys[:-1], keys[-1]


def train_run(
    spec: RunSpec,
    algorithm: Any,
    *,
    states: TrainState | None = None,
    mesh: Mesh | None = None,
    chunk_size: int | None = None,
    num_points: int = 100,
    loggers: Iterable[Logger] = (),
    on_compiled: Callable[[float], None] = lambda seconds: None,
    on_point: Callable[[Point, TrainState], None] = lambda point, states: None,
    stop: Callable[[], bool] = lambda: False,
) -> Trained:
    """Trains every seed of a run up to ``spec.num_updates`` updates.

    Args:
        spec: the description.
        algorithm: what `build` made of it.
        states: goes on from here (and consumes them) instead of from ``algorithm.init``.
        mesh: spreads the seeds, or the environments of a single one, over these devices
            (`jaxpg.device_mesh`).
        chunk_size: seeds vmapped at a time; None takes `jaxpg.sharding.seeds_at_a_time`.
        num_points: pieces that the run is cut into, at most.
        loggers: each gets every point, and is closed at the end.
        on_compiled: called once with the seconds that compilation took.
        on_point: called after each piece; the states it gets are valid until it returns.
        stop: asked after each piece; True ends the run there.

    Returns:
        A `Trained`. The run also ends once every seed has diverged.

    Raises:
        ValueError: the states have no updates left to do, or `chunk_size` does not divide the
            seeds.
    """
    domain = domain_of(spec.environment)
    loggers = list(loggers)
    if chunk_size is None:
        chunk_size = seeds_at_a_time(spec.num_seeds, devices_of_seeds(spec, mesh))
    per_update = domain.steps_per_update(algorithm, spec.config)
    # arrays of a fixed dtype: a changed number is no other program
    config = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), spec.config)
    started = time.perf_counter()
    if states is None:
        states = jax.jit(_initializer(algorithm, spec))(seed_keys(spec)[0])
    update = int(np.asarray(states.update)[0])
    if update >= spec.num_updates:
        raise ValueError(
            f"the run has done {update} updates ({update * per_update} steps): there is nothing "
            f"left to do up to {spec.num_updates} ({spec.num_updates * per_update} steps)"
        )
    sharding = None
    if mesh is not None:
        states = _spread(states, mesh)
        sharding = jax.tree.map(lambda x: x.sharding, states)
    piece = jax.jit(
        piece_of(_on_devices(algorithm, spec, mesh), chunk_size, mesh),
        donate_argnums=0,
        out_shardings=(sharding, None, None),
    )
    compiled = piece.lower(states, config, jnp.int32(1)).compile()
    compile_seconds = time.perf_counter() - started
    on_compiled(compile_seconds)

    first, seconds, diverged_at = update, 0.0, None
    size = math.ceil((spec.num_updates - update) / num_points)
    diverged = np.zeros(spec.num_seeds, bool)
    try:
        while update < spec.num_updates:
            length = min(size, spec.num_updates - update)
            began = time.perf_counter()
            states, sums, bad = compiled(states, config, jnp.int32(length))
            sums, diverged = jax.device_get((sums, bad))
            seconds += time.perf_counter() - began
            update += length
            metrics = domain.metrics(sums, length) | {"diverged": diverged.astype(np.float32)}
            point = Point(update, update * per_update, seconds, metrics)
            if diverged_at is None and diverged.any():
                diverged_at = point.steps
            for logger in loggers:
                logger.log(*point)
            on_point(point, states)
            if stop() or diverged.all():
                break
    finally:
        for logger in loggers:
            logger.close()
    return Trained(
        states=states,
        update=update,
        steps=update * per_update,
        steps_run=(update - first) * per_update * spec.num_seeds,
        compile_seconds=compile_seconds,
        run_seconds=seconds,
        diverged=diverged,
        diverged_at=diverged_at,
    )


def check_devices(spec: RunSpec, algorithm: Any, mesh: Mesh | None, chunk_size: int | None) -> None:
    """`ValueError` for devices and chunks that do not fit a run: ask before training."""
    if chunk_size is not None:
        check_chunks(chunk_size, spec.num_seeds, devices_of_seeds(spec, mesh))
    spread = _on_devices(algorithm, spec, mesh)
    if spread is not algorithm:
        jax.eval_shape(lambda key: spread.init(key, spec.config), jax.random.key(0))


def devices_of_seeds(spec: RunSpec, mesh: Mesh | None) -> int:
    """Devices that the seeds of a run are spread over: those of a single seed share it instead."""
    return num_devices(mesh) if spec.num_seeds > 1 else 1


def _on_devices(algorithm: Any, spec: RunSpec, mesh: Mesh | None) -> Any:
    """`algorithm`, data-parallel if a single seed is trained on several devices."""
    if mesh is None or spec.num_seeds > 1:
        return algorithm
    try:
        return data_parallel(algorithm, mesh)
    except TypeError as error:
        raise ValueError(
            f"devices={mesh.size} does not divide num_seeds=1, and {spec.algorithm} on "
            f"{spec.environment} cannot spread a single seed: ppo, actor_critic and grpo can, on "
            "environments"
        ) from error


def _spread(states: TrainState, mesh: Mesh) -> TrainState:
    """The states ``[S, …]`` of all seeds over devices; those of one seed by its environments."""
    if states.update.shape[0] > 1:
        return shard_leading_axis(states, mesh)
    state = shard_environments(jax.tree.map(lambda x: x[0], states), mesh)
    return jax.tree.map(lambda x: x[None], state)


def evaluate_run(
    spec: RunSpec,
    algorithm: Any,
    states: TrainState,
    *,
    num_episodes: int,
    deterministic: bool,
    key: Key | None = None,
) -> np.ndarray:
    """Scores of complete episodes, for every seed.

    Args:
        spec: the description.
        algorithm: what `build` made of it.
        states: every leaf ``[seeds, …]``.
        num_episodes: of each seed.
        deterministic: greedy, else sampled.
        key: None takes the key that belongs to the spec's seed.

    Returns:
        ``[seeds, num_episodes]``; NaN for a seed whose parameters hold NaN or inf.

    Raises:
        ValueError: `num_episodes` below 1, or an environment without a time limit.
    """
    key = seed_keys(spec)[1] if key is None else key
    keys = jax.random.split(jax.random.fold_in(key, int(deterministic)), spec.num_seeds)
    evaluate = _evaluator(spec, algorithm, num_episodes, deterministic)
    scores, diverged = jax.device_get(jax.jit(evaluate)(states, keys))
    return np.where(diverged[:, None], np.nan, scores)


def check_evaluation(spec: RunSpec, algorithm: Any, num_episodes: int) -> None:
    """`ValueError`/`TypeError` for what `evaluate_run` would refuse: ask before training."""
    positive_int("num_episodes", num_episodes)
    evaluate = _evaluator(spec, algorithm, num_episodes, deterministic=True)
    jax.eval_shape(evaluate, abstract_states(algorithm, spec), seed_keys(spec)[0])


def _evaluator(
    spec: RunSpec, algorithm: Any, num_episodes: int, deterministic: bool
) -> Callable[[TrainState, Key], tuple[Array, Array]]:
    """``(states[S], keys[S]) -> (scores[S, num_episodes], diverged[S])``."""
    evaluate = domain_of(spec.environment).evaluate

    def one_seed(state: TrainState, key: Key) -> tuple[Array, Array]:
        scores = evaluate(algorithm, spec.config, state, key, num_episodes, deterministic)
        return scores, has_nonfinite(state.params)

    return jax.vmap(one_seed)


def has_nonfinite(tree: Any) -> Array:
    """Whether any float in a pytree is NaN or infinite, as a scalar."""
    bad = [
        ~jnp.isfinite(x).all()
        for x in jax.tree.leaves(tree)
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return jnp.any(jnp.stack(bad)) if bad else jnp.asarray(False)


def piece_of(
    algorithm: Any, chunk_size: int, mesh: Mesh | None = None
) -> Callable[[TrainState, Any, Array], tuple[TrainState, Info, Array]]:
    """``(states[S], config, n) -> (states, sums of the infos [S], diverged [S])``, `n` traced."""

    def piece(states: TrainState, config: Any, length: Array) -> tuple[TrainState, Info, Array]:
        def one_seed(state: TrainState) -> tuple[TrainState, Info, Array]:
            def body(_: Array, loop: tuple[TrainState, Info]) -> tuple[TrainState, Info]:
                state, sums = loop
                state, info = algorithm.step(state, config)
                return state, jax.tree.map(jnp.add, sums, info)

            infos = jax.eval_shape(algorithm.step, state, config)[1]
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), infos)
            state, sums = jax.lax.fori_loop(0, length, body, (state, zeros))
            return state, sums, has_nonfinite(state.params)

        num_seeds = states.update.shape[0]
        if chunk_size == num_seeds:
            return jax.vmap(one_seed)(states)
        return map_in_chunks(one_seed, chunk_size=chunk_size, mesh=mesh)(states)

    return piece


def _initializer(algorithm: Any, spec: RunSpec) -> Callable[[Key], TrainState]:
    """``keys[S] -> states[S]``; the config stays concrete, so that its numbers are checked."""
    return jax.vmap(lambda key: algorithm.init(key, spec.config))
