"""Floor 6: the command line. ``jaxpg --help`` says what there is.

Flags are the fields of the config, the network and the environment options, read by tyro. Whatever
is wrong with them is one line on stderr and exit code 2, before anything compiles.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jaxpg import throughput
from jaxpg._checks import one_of, positive_int
from jaxpg.aggregates import summarize
from jaxpg.environments import environment_notes
from jaxpg.flags import (
    BenchOptions,
    EvaluateOptions,
    ListOptions,
    ResumeOptions,
    RunOptions,
    UsageError,
    mesh_of,
    parse,
    parse_settings,
    refusing,
    request_devices,
    resumed_folder,
)
from jaxpg.live_runs import run_to_end
from jaxpg.loggers import drop_points_after
from jaxpg.optimization import num_cores
from jaxpg.presets import PRESETS, Preset, has_preset, preset
from jaxpg.registry import (
    ALGORITHMS,
    ENVIRONMENTS,
    TOKENS_PREFIX,
    Domain,
    algorithm_name,
    domain_of,
)
from jaxpg.run_folders import (
    METRICS,
    free_folder,
    load_states,
    read_config,
    start_folder,
    write_config,
)
from jaxpg.runs import (
    RunSpec,
    build,
    check_devices,
    check_evaluation,
    evaluate_run,
    make_spec,
)
from jaxpg.terminal import lines_table, make_console, scores_table
from jaxpg.token_domain import TASK_NOTES, TOKENS


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the words after ``jaxpg``; None takes those of the process.

    Returns:
        The exit code: 0, 1 when seeds diverged, 2 for a wrong command line, 130 when interrupted.
    """
    if argv is None:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words or words[0] in ("-h", "--help"):
            print(USAGE)
            return 0 if words else 2
        command, *rest = words
        with refusing():
            one_of("command", command, COMMANDS)
        return COMMANDS[command][0](rest)
    except UsageError as error:
        print(f"jaxpg: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jaxpg: interrupted", file=sys.stderr)
        return 130
    except SystemExit as end:  # tyro leaves this way after a --help
        return int(end.code or 0)


def train(words: list[str]) -> int:
    """``jaxpg train ALGORITHM ENV [flags]`` or ``jaxpg train --resume RUN [flags]``."""
    request_devices(words, default=num_cores())
    with refusing():
        folder = resumed_folder(words)
    if folder is not None:
        return resume(words, folder)
    if words in (["-h"], ["--help"]):
        print(TRAIN_USAGE)
        return 0
    names = [word for word in words[:2] if not word.startswith("-")]
    helping = "-h" in words or "--help" in words
    if len(names) < 2 and not (names and helping):
        raise UsageError(
            "train needs ALGORITHM and ENV before any flag, such as: jaxpg train ppo CartPole-v1"
        )
    with refusing():
        if len(names) == 2:
            settings, own = preset(*names), has_preset(*names)
            domain = domain_of(names[1])
        else:
            (domain, settings), own = general_settings(names[0]), False
        name = algorithm_name(names[0], domain.names()[0])
    run, settings = parse_settings(
        RunOptions(
            total_steps=settings.total_steps,
            anneal=settings.anneal,
            eval_episodes=domain.num_episodes,
        ),
        settings,
        ("config", "network", "environment"),
        words[len(names) :],
        prog=" ".join(["jaxpg train", *names, *["ENV"] * (2 - len(names))]),
        description=f"{name}: {domain.algorithms[name].summary}",
    )
    settings = dataclasses.replace(settings, anneal=run.anneal)
    with refusing():
        spec, algorithm = make_spec(
            *names, settings, total_steps=run.total_steps, num_seeds=run.num_seeds, seed=run.seed
        )
        positive_int("eval_episodes", run.eval_episodes)
        check_evaluation(spec, algorithm, run.eval_episodes)
        mesh = mesh_of(run.devices, spec.num_seeds, run.chunk_size)
        check_devices(spec, algorithm, mesh, run.chunk_size)
        folder = free_folder(run.run_dir, spec, overwrite=run.overwrite)
        start_folder(folder, spec)
    if own:
        note = f"settings: tuned for {spec.environment}, and your flags"
    else:
        note = (
            f"settings: no preset of {name} for {spec.environment}, so its general ones, "
            "and your flags"
        )
    return run_to_end(spec, algorithm, folder, run, notes=[note], mesh=mesh)


def general_settings(algorithm: str) -> tuple[Domain, Preset]:
    """What the help of an algorithm shows that is asked for without a name to learn on."""
    name = algorithm.replace("-", "_").lower()
    one_of("algorithm", name, ALGORITHMS | dict(TOKENS.algorithms))
    if name in ALGORITHMS:
        return ENVIRONMENTS, PRESETS[name, "*"]
    return TOKENS, preset(name, TOKENS.names()[0])


def resume(words: list[str], folder: Path) -> int:
    """``jaxpg train --resume RUN [flags]``: a run goes on exactly where it stands."""
    if not words[0].startswith("-"):
        raise UsageError("with --resume, ALGORITHM and ENV come from the run: leave them out")
    with refusing():
        saved = read_config(folder)
        domain = domain_of(saved.environment)
        per_update = domain.steps_per_update(build(saved), saved.config)
    run, settings = parse_settings(
        ResumeOptions(
            resume=folder,
            total_steps=saved.num_updates * per_update,
            eval_episodes=domain.num_episodes,
        ),
        Preset(config=saved.config, total_steps=0),
        ("config",),
        words,
        prog=f"jaxpg train --resume {folder}",
        description=f"goes on with {saved.algorithm} on {saved.environment}",
    )
    with refusing():
        spec, algorithm = make_spec(
            saved.algorithm,
            saved.environment,
            Preset(
                config=settings.config,
                total_steps=run.total_steps,
                network=saved.network,
                environment=saved.environment_options,
            ),
            num_seeds=saved.num_seeds,
            seed=saved.seed,
        )
        positive_int("eval_episodes", run.eval_episodes)
        check_evaluation(spec, algorithm, run.eval_episodes)
        mesh = mesh_of(run.devices, spec.num_seeds, run.chunk_size)
        check_devices(spec, algorithm, mesh, run.chunk_size)
        states = load_states(folder, spec, algorithm)
        update = int(np.asarray(states.update)[0])
        check_unfinished(spec, update, per_update)
    write_config(folder, spec)
    drop_points_after(folder / METRICS, update)
    notes = [f"goes on after {update * per_update:,} {domain.unit} of each seed"]
    return run_to_end(spec, algorithm, folder, run, states=states, notes=notes, mesh=mesh)


def check_unfinished(spec: RunSpec, update: int, per_update: int) -> None:
    """`ValueError` when nothing is left to do, or the learning rate has already fallen to 0."""
    if update >= spec.num_updates:
        raise ValueError(
            f"total_steps={spec.num_updates * per_update}, and the run has done "
            f"{update * per_update}: give more --total-steps"
        )
    anneal = spec.config.anneal_updates
    if anneal is not None and update >= anneal:
        raise ValueError(
            f"anneal_updates={anneal:g}, and the run has done {update} updates: what anneals is 0 "
            "from there on; give more --anneal-updates, or None"
        )


def evaluate(words: list[str]) -> int:
    """``jaxpg evaluate RUN``."""
    options = parse(
        EvaluateOptions, words, prog="jaxpg evaluate", description=EvaluateOptions.__doc__
    )
    with refusing():
        spec = read_config(options.run)
        algorithm = build(spec)
        domain = domain_of(spec.environment)
        episodes = max(100, domain.num_episodes) if options.episodes is None else options.episodes
        positive_int("episodes", episodes)
        check_evaluation(spec, algorithm, episodes)
        states = load_states(options.run, spec, algorithm)
        key = None if options.seed is None else jax.random.key(options.seed)
    scores = evaluate_run(
        spec,
        algorithm,
        states,
        num_episodes=episodes,
        deterministic=not options.sampled,
        key=key,
    )
    steps = int(np.asarray(states.update)[0]) * domain.steps_per_update(algorithm, spec.config)
    console = make_console()
    console.print(
        scores_table(
            {"sampled" if options.sampled else "greedy": summarize(scores)},
            title=f"{spec.algorithm} on {spec.environment} after {steps:,} {domain.unit} a seed",
            label=domain.score_label,
            num_episodes=episodes,
            episode_label=domain.episode_label,
            digits=domain.digits,
        ),
    )
    failed = int(np.isnan(scores).any(axis=1).sum())
    if failed:
        print(
            f"jaxpg: {failed} of {spec.num_seeds} seeds diverged: their parameters or returns "
            "hold NaN or inf",
            file=sys.stderr,
        )
    return 1 if failed else 0


def bench(words: list[str]) -> int:
    """``jaxpg bench``."""
    request_devices(words)
    options = parse(BenchOptions, words, prog="jaxpg bench", description=BenchOptions.__doc__)
    name = options.preset
    sizes = (options.algorithms, options.environments, options.num_seeds, options.num_envs)
    with refusing():
        rows = throughput.PRESETS[name]
        if any(sizes):
            name = "grid"
            rows = throughput.grid(
                options.algorithms or ("ppo",),
                options.environments or ("CartPole-v1",),
                options.num_seeds or (1,),
                options.num_envs or (64,),
                num_steps=options.num_steps,
                num_updates=options.num_updates,
                network=options.network,
            )
        positive_int("repeats", options.repeats)
        if not options.stages:
            raise ValueError("stages must name one at least")
        for row in rows:
            throughput.check(row, options.compute_dtype, options.chunk_size, options.devices)
        mesh = mesh_of(options.devices, options.devices)
    begin = time.perf_counter()
    results = []
    for row in rows:
        results.append(
            throughput.measure(
                row,
                options.stages,
                repeats=options.repeats,
                compute_dtype=options.compute_dtype,
                chunk_size=options.chunk_size,
                mesh=mesh,
            )
        )
        print(" | ".join(map(str, throughput.show(results[-1:])[0].values())), flush=True)
    settings = {
        "compute_dtype": options.compute_dtype or "float32",
        "chunk_size": options.chunk_size,
        "devices": options.devices,
        "seconds": round(time.perf_counter() - begin),
    }
    name = name if options.compute_dtype is None else f"{name}-{options.compute_dtype}"
    paths = throughput.write(results, options.output, name, settings)
    print(f"\n{paths[1].read_text()}written: {', '.join(map(str, paths))}")
    return 0


def list_all(words: list[str]) -> int:
    """``jaxpg list``."""
    parse(ListOptions, words, prog="jaxpg list", description=ListOptions.__doc__)
    console = make_console()
    rows = []
    for name, entry in ALGORITHMS.items():
        tuned = [environment for key, environment in PRESETS if key == name and environment != "*"]
        networks = "mlp, cnn, gru" if entry.recurrent else "mlp, cnn"
        rows.append([name, entry.summary, entry.actions, networks, ", ".join(tuned)])
    columns = ("algorithm", "what it is", "actions", "networks", "tuned for")
    console.print(lines_table(columns, rows, title="jaxpg train ALGORITHM ENV"))
    rows = []
    for name, note in environment_notes().items():
        shape = "?" if note.observation_shape is None else str(note.observation_shape)
        limit = "?" if note.time_limit is None else f"{note.time_limit:,}"
        rows.append([name, shape, note.actions or "?", limit, note.remark])
    columns = ("environment", "observations", "actions", "time limit", "")
    console.print(lines_table(columns, rows, title="environments"))
    rows = [[name, entry.summary] for name, entry in TOKENS.algorithms.items()]
    columns = ("algorithm", "what it is")
    console.print(lines_table(columns, rows, title=f"jaxpg train ALGORITHM {TOKENS_PREFIX}TASK"))
    rows = [[name, *TASK_NOTES[name.removeprefix(TOKENS_PREFIX)]] for name in TOKENS.names()]
    columns = ("token task", "prompt → answer", "")
    title = "token tasks, for a small transformer"
    console.print(lines_table(columns, rows, title=title))
    return 0


COMMANDS = {
    "train": (train, "train ALGORITHM ENV", "many seeds at once, evaluated, with a run folder"),
    "evaluate": (evaluate, "evaluate RUN", "play episodes with the policies of a run"),
    "bench": (bench, "bench", "environment steps a second on this machine"),
    "list": (list_all, "list", "algorithms, environments and token tasks"),
}
"""Every command: function, how it is called, what it does."""

USAGE = "\n".join(
    [
        "usage: jaxpg COMMAND ...",
        "",
        "Policy-gradient reinforcement learning in JAX.",
        "",
        *(f"  {call:<22}{text}" for _, call, text in COMMANDS.values()),
        "",
        "jaxpg COMMAND --help says more;",
        "jaxpg train ppo CartPole-v1 --help shows every setting with its value for that pair.",
    ]
)

TRAIN_USAGE = "\n".join(
    [
        "usage: jaxpg train ALGORITHM ENV [flags]",
        "       jaxpg train --resume RUN [flags]",
        "",
        "Trains many seeds at once, evaluates them and writes a run folder: description, metrics,",
        "learning curve, results and a checkpoint of everything, from which --resume goes on.",
        "",
        "ALGORITHM",
        *(f"  {name:<22}{entry.summary}" for name, entry in ALGORITHMS.items()),
        "",
        f"ALGORITHM for the token tasks, {TOKENS_PREFIX}...",
        *(f"  {name:<22}{entry.summary}" for name, entry in TOKENS.algorithms.items()),
        "",
        "ENV: see jaxpg list",
        "",
        "Every setting is a flag; jaxpg train ALGORITHM ENV --help lists them, with the values",
        "that this pair starts from.",
    ]
)
