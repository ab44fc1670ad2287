"""Settings that work, by algorithm and task: config, model, warm-up, number of updates.

What a task needs (how much entropy, how many updates, a warm-up) and what an algorithm needs
(where it clips) are two small tables; `token_preset` joins them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

from jaxpg._checks import one_of
from jaxpg.tokens.algorithms import ALGORITHMS
from jaxpg.tokens.config import TokenConfig
from jaxpg.tokens.records import LanguageModel, Task, TokenAlgorithm
from jaxpg.tokens.supervised import warmed_up
from jaxpg.tokens.tasks import TASKS, make_task
from jaxpg.tokens.transformer import transformer_model
from jaxpg.types import Optimizer


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Sizes of the transformer; see `transformer_model`."""

    d_model: int = 64
    """Width."""
    num_layers: int = 2
    """Blocks of attention and feed-forward."""
    num_heads: int = 4
    """Attention heads; divides d_model."""
    d_ff: int | None = None
    """Width of the feed-forward layer; None is 4 d_model."""
    position_encoding: Literal["rotary", "learned"] = "rotary"
    """How positions enter."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the computation; logits are float32."""


@dataclasses.dataclass(frozen=True)
class WarmUpOptions:
    """Supervised steps before the first update; see `warm_up`."""

    num_steps: int = 0
    """Optimizer steps; 0 starts from random weights."""
    batch_size: int = 128
    """Prompts a step."""
    learning_rate: float = 1e-3
    """Of Adam."""


class TokenPreset(NamedTuple):
    """Everything that a run needs but its seeds."""

    config: TokenConfig
    num_updates: int
    model: ModelOptions
    warm_up: WarmUpOptions


class _TaskSettings(NamedTuple):
    num_updates: int
    config: dict[str, Any]
    warm_up: WarmUpOptions = WarmUpOptions()


_BY_TASK: dict[str, _TaskSettings] = {
    "add-mod-10": _TaskSettings(300, {"ent_coef": 0.05}),
    # A right answer is all or nothing, and rare after a short warm-up: more prompts, drawn twice
    # over so that most groups that train are mixed, and smaller steps.
    "addition": _TaskSettings(
        300,
        {"num_prompts": 128, "num_minibatches": 4, "learning_rate": 5e-4, "oversample": 2},
        WarmUpOptions(num_steps=360),
    ),
    "copy": _TaskSettings(600, {"ent_coef": 0.02}),
    "reverse": _TaskSettings(600, {"ent_coef": 0.02}),
    "say-n": _TaskSettings(300, {"ent_coef": 0.02, "overlong_cache": 4.0}),
    "sort": _TaskSettings(600, {"ent_coef": 0.1}),
}
# Policies of this size move far in one update, ε of 3e-4 would stop nearly every sequence.
_BY_ALGORITHM: dict[str, dict[str, Any]] = {
    "gspo": {"clip_epsilon": 0.1, "clip_epsilon_high": 0.15},
}


def token_preset(algorithm: str, task: str) -> TokenPreset:
    """Settings of an algorithm on a task.

    Args:
        algorithm: a key of `ALGORITHMS`.
        task: a key of `TASKS`.

    Returns:
        A `TokenPreset`; its config is of the algorithm's type.

    Raises:
        ValueError: an unknown name; the message has the nearest ones.

    Example:
        >>> preset = token_preset("dapo", "add-mod-10")
        >>> preset.num_updates, preset.config.oversample, preset.config.ent_coef
        (300, 2, 0.05)
    """
    one_of("algorithm", algorithm, ALGORITHMS)
    one_of("task", task, TASKS)
    settings = _BY_TASK[task]
    config = ALGORITHMS[algorithm][1](**settings.config | _BY_ALGORITHM.get(algorithm, {}))
    return TokenPreset(config, settings.num_updates, ModelOptions(), settings.warm_up)


PRESETS: dict[tuple[str, str], TokenPreset] = {
    (algorithm, task): token_preset(algorithm, task) for algorithm in ALGORITHMS for task in TASKS
}
"""The table: ``(algorithm, task)`` to `TokenPreset`."""


def build_model(task: Task, options: ModelOptions | None = None) -> LanguageModel:
    """A transformer that fits a task: its vocabulary, its prompt and answer together.

    Args:
        task: the task.
        options: sizes.

    Returns:
        The `LanguageModel`.

    Example:
        >>> from jaxpg.tokens import say_n_task
        >>> build_model(say_n_task()).max_length
        12
    """
    settings = dataclasses.asdict(options or ModelOptions())
    dtype = settings.pop("compute_dtype")
    length = task.max_prompt + task.max_new
    return transformer_model(len(task.vocabulary), length, dtype=dtype, **settings)


def build_algorithm(
    algorithm: str,
    task: str | Task,
    *,
    model: ModelOptions | None = None,
    warm_up: WarmUpOptions | None = None,
    optimizer: Optimizer | None = None,
) -> TokenAlgorithm:
    """An algorithm bound to a task and a transformer, by name; `init` does the warm-up.

    Args:
        algorithm: a key of `ALGORITHMS`.
        task: a key of `TASKS`, or a task.
        model: sizes of the transformer; None takes the defaults.
        warm_up: None takes the preset's for a task by name, none for another.
        optimizer: None takes the algorithm's own.

    Returns:
        The `TokenAlgorithm`.

    Raises:
        ValueError: an unknown name; the message has the nearest ones.

    Example:
        >>> build_algorithm("dapo", "say-n").task.name
        'say-n'
    """
    one_of("algorithm", algorithm, ALGORITHMS)
    if warm_up is None:
        warm_up = (
            token_preset(algorithm, task).warm_up if isinstance(task, str) else WarmUpOptions()
        )
    built = make_task(task) if isinstance(task, str) else task
    settings = {} if optimizer is None else {"optimizer": optimizer}
    bound = ALGORITHMS[algorithm][0](built, build_model(built, model), **settings)
    return warmed_up(bound, **dataclasses.asdict(warm_up))
