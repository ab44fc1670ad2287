"""Floor 5: token tasks as the command line and the presets see them, beside the environments.

`TOKENS` is to `jaxpg.tokens` what `jaxpg.registry.ENVIRONMENTS` is to environments. A step of a
budget is a completion: one update draws ``num_prompts × group_size`` of them, and ``oversample``
times as many with dynamic sampling, used or not.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array

from jaxpg._checks import in_range, one_of, positive_int
from jaxpg.presets import Preset
from jaxpg.registry import TOKENS_PREFIX, AlgorithmEntry, Domain
from jaxpg.tokens.algorithms import ALGORITHMS
from jaxpg.tokens.config import TokenConfig
from jaxpg.tokens.evaluation import answer_prompts, format_completions
from jaxpg.tokens.groups import draw_prompts
from jaxpg.tokens.presets import ModelOptions, build_model, token_preset
from jaxpg.tokens.records import Completions, Prompts, Task, TokenAlgorithm
from jaxpg.tokens.supervised import warmed_up
from jaxpg.tokens.tasks import TASKS, make_task
from jaxpg.types import Key, PyTree, TrainState, split_key

NUM_PROMPTS = 500
"""Prompts of an evaluation; each of the 100 of add-mod-10 as often as any other."""
NUM_SAMPLES = 3
"""Completions printed at a time while a run trains."""

SUMMARIES = {
    "grpo": "token ratios clipped; rewards in standard deviations of their group",
    "dapo": "clip-higher, dynamic sampling, the mean over all tokens",
    "dr_grpo": "no standard deviation, a constant length in the mean",
    "rloo": "baseline from the other samples, ratio of the sequence clipped",
    "gspo": "geometric-mean ratio of the sequence clipped",
    "cispo": "a capped ratio weighs every token, none loses its gradient",
    "reinforce_pp": "reward-to-go per token, whitened over the batch",
}
"""What the algorithms are, a line each, in the order in which they are listed."""

TASK_NOTES = {
    "add-mod-10": ("7 + 5 = → 2", "one token, learned from random weights"),
    "addition": ("4 7 + 8 5 = → 2 3 1 .", "units first; warm-up, tested on held-out pairs"),
    "copy": ("4 1 9 = → 4 1 9 .", "prompts of unequal length, part scores"),
    "reverse": ("4 1 9 = → 9 1 4 .", "the same backwards"),
    "say-n": ("4 = → 4 4 4 4 .", "when to stop: end token, truncation, overlong penalty"),
    "sort": ("4 1 9 = → 1 4 9 .", "every token depends on all of the prompt"),
}
"""Prompt and right answer of each task, and what it exercises."""


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """How the task is set up, and the supervised steps before the first update."""

    task_params: dict[str, int | float] = dataclasses.field(default_factory=dict)
    """Parameters of the task to change, as NAME VALUE pairs."""
    warm_up_steps: int = 0
    """Supervised optimizer steps on right answers; 0 starts from random weights."""
    warm_up_batch_size: int = 128
    """Prompts of each of them."""
    warm_up_learning_rate: float = 1e-3
    """Step size of their Adam."""


def task_names() -> list[str]:
    """Every token task, as the command line writes it: ``tokens/<key of TASKS>``."""
    return [TOKENS_PREFIX + name for name in TASKS]


def token_settings(algorithm: str, name: str) -> Preset:
    """`jaxpg.tokens.presets.token_preset` as a `Preset`; its updates become completions.

    Args:
        algorithm: a key of `jaxpg.tokens.ALGORITHMS`.
        name: ``tokens/<task>``.

    Returns:
        The `Preset`.

    Raises:
        ValueError: an unknown name.

    Example:
        >>> settings = token_settings("dapo", "tokens/add-mod-10")  # draws twice what it keeps
        >>> settings.total_steps == 300 * 2 * 32 * 8
        True
    """
    settings = token_preset(algorithm, name.removeprefix(TOKENS_PREFIX))
    warm_up = dataclasses.asdict(settings.warm_up)
    return Preset(
        config=settings.config,
        total_steps=settings.num_updates * completions_per_update(None, settings.config),
        network=settings.model,
        environment=TaskOptions(
            warm_up_steps=warm_up["num_steps"],
            warm_up_batch_size=warm_up["batch_size"],
            warm_up_learning_rate=warm_up["learning_rate"],
        ),
    )


def build_on_task(
    entry: AlgorithmEntry, name: str, network: ModelOptions, options: TaskOptions
) -> TokenAlgorithm:
    """The algorithm bound to its task and transformer; `init` does the warm-up.

    Args:
        entry: of `TOKENS.algorithms`.
        name: ``tokens/<task>``.
        network: sizes of the transformer.
        options: parameters of the task, and the warm-up.

    Returns:
        The `TokenAlgorithm`.

    Raises:
        ValueError: parameters that the task has not, or sizes that cannot work.
        TypeError: a parameter of another type.
    """
    short = name.removeprefix(TOKENS_PREFIX)
    known = inspect.signature(TASKS[short]).parameters
    for parameter in options.task_params:
        one_of(f"setting of {name}", parameter, known)
    task = make_task(short, **options.task_params)
    positive_int("num_heads", network.num_heads)
    positive_int("d_ff", 1 if network.d_ff is None else network.d_ff)
    positive_int("warm_up_steps", options.warm_up_steps, minimum=0)
    positive_int("warm_up_batch_size", options.warm_up_batch_size)
    in_range("warm_up_learning_rate", options.warm_up_learning_rate, 0.0)
    return warmed_up(
        entry.build(task, build_model(task, network)),
        num_steps=options.warm_up_steps,
        batch_size=options.warm_up_batch_size,
        learning_rate=options.warm_up_learning_rate,
    )


def completions_per_update(algorithm: Any, config: TokenConfig) -> int:
    """Completions drawn in one update, those that dynamic sampling leaves out included."""
    return config.num_prompts * config.group_size * (config.oversample or 1)


COUNTS = {
    "episode_count": "completions",
    "episode_length_sum": "tokens",  # of all completions drawn
    "live_steps": "trained_tokens",
}
"""Info fields that count something, by the name under which their sum is logged."""
LEFT_OUT = (
    "episode_return_sum",  # `score` is its mean
    "env_steps",
    "value_loss",
    "explained_variance",
    "unbootstrapped",
)
"""Info fields that mean nothing here: there is no critic, and nothing to bootstrap."""


def completion_metrics(sums: dict[str, np.ndarray], num_updates: int) -> dict[str, np.ndarray]:
    """What is logged of some updates: counts, and means of everything else.

    Args:
        sums: sums of the infos, ``[seeds]`` each.
        num_updates: how many infos.

    Returns:
        ``[seeds]`` each.
    """
    means = {n: x / num_updates for n, x in sums.items() if n not in COUNTS and n not in LEFT_OUT}
    return means | {logged: sums[name] for name, logged in COUNTS.items()}


def evaluation_prompts(task: Task, key: Key, num_prompts: int) -> Prompts:
    """Prompts of an evaluation.

    A task may list its prompts in order, so fewer than `NUM_PROMPTS` are drawn from so many:
    the first ones would be all alike.

    Args:
        task: the task.
        key: consumed.
        num_prompts: how many.

    Returns:
        The prompts.
    """
    keys = split_key(key, "prompts", "choice")
    drawn = draw_prompts(keys["prompts"], task, max(num_prompts, NUM_PROMPTS), evaluation=True)
    if num_prompts >= NUM_PROMPTS:
        return drawn
    index = jax.random.choice(keys["choice"], NUM_PROMPTS, (num_prompts,), replace=False)
    return jax.tree.map(lambda x: x[index], drawn)


def answers(
    algorithm: TokenAlgorithm,
    config: TokenConfig,
    params: PyTree,
    prompt_key: Key,
    token_key: Key,
    num_prompts: int,
    greedy: bool,
) -> tuple[Prompts, Completions, Array]:
    """One completion of each of some prompts with its score, sampled as in training."""
    return answer_prompts(
        algorithm.task,
        algorithm.model,
        params,
        token_key,
        prompts=evaluation_prompts(algorithm.task, prompt_key, num_prompts),
        greedy=greedy,
        temperature=config.temperature,
    )


def evaluate_on_task(
    algorithm: TokenAlgorithm,
    config: TokenConfig,
    state: TrainState,
    key: Key,
    num_prompts: int,
    deterministic: bool,
) -> Array:
    """Scores of completions.

    Args:
        algorithm: of `build_on_task`.
        config: for the temperature.
        state: of one seed.
        key: consumed.
        num_prompts: how many.
        deterministic: the likeliest tokens, else sampled ones.

    Returns:
        ``[num_prompts]``.
    """
    keys = split_key(key, "prompts", "tokens")
    *_, scores = answers(
        algorithm,
        config,
        state.params,
        keys["prompts"],
        keys["tokens"],
        num_prompts,
        deterministic,
    )
    return scores


def completion_samples(
    algorithm: TokenAlgorithm, config: TokenConfig, key: Key
) -> Callable[[TrainState], list[str]]:
    """Compiles once how the first seed answers a few prompts, always the same ones.

    Args:
        algorithm: of `build_on_task`.
        config: for the temperature.
        key: draws the prompts, and with the number of the update the tokens.

    Returns:
        ``states[S] -> lines`` of `jaxpg.tokens.format_completions`.
    """
    keys = split_key(key, "prompts", "tokens")

    @jax.jit
    def first_seed(params: PyTree, update: Array) -> tuple[Prompts, Completions, Array]:
        params = jax.tree.map(lambda x: x[0], params)
        token_key = jax.random.fold_in(keys["tokens"], update[0])
        return answers(
            algorithm, config, params, keys["prompts"], token_key, NUM_SAMPLES, greedy=False
        )

    def lines(states: TrainState) -> list[str]:
        return format_completions(algorithm.task, *first_seed(states.params, states.update))

    return lines


TOKENS = Domain(
    kind="token task",
    step_label="completions",
    unit="completions",
    episode_label="prompts",
    num_episodes=NUM_PROMPTS,
    score="score",
    score_label="score",
    digits=3,
    algorithms={
        name: AlgorithmEntry(*ALGORITHMS[name], summary, "tokens")
        for name, summary in SUMMARIES.items()
    },
    names=task_names,
    build=build_on_task,
    steps_per_update=completions_per_update,
    metrics=completion_metrics,
    evaluate=evaluate_on_task,
    samples=completion_samples,
)
"""Token tasks, ``tokens/<name>``."""
