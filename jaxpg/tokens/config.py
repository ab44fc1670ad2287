"""Settings of the token algorithms: one frozen pytree each, sizes static and numbers traced."""

from __future__ import annotations

import dataclasses

from flax import struct

from jaxpg._checks import divides, in_range, positive_int
from jaxpg.algorithms.common import static
from jaxpg.tokens.records import LanguageModel, Task


@struct.dataclass(kw_only=True)
class TokenConfig:
    """Settings that all token algorithms share. ``None`` is off.

    One update draws ``num_prompts × group_size`` completions and takes ``num_epochs ×
    num_minibatches`` optimizer steps on them, so the policy leaves the one that wrote them and
    clipping acts. Minibatches are dealt over prompts: a group stays together.
    """

    num_prompts: int = static(32)
    """Groups a batch (P)."""
    group_size: int = static(8)
    """Completions of each prompt (G), at least 2."""
    num_epochs: int = static(2)
    """Passes over the batch."""
    num_minibatches: int = static(2)
    """Optimizer steps a pass; divides `num_prompts`."""
    learning_rate: float = 1e-3
    """Step size of the optimizer."""
    adam_eps: float = 1e-8
    """Epsilon in Adam's denominator."""
    max_grad_norm: float | None = 1.0
    """Global gradient norm above which gradients are scaled down."""
    anneal_updates: float | None = None
    """Updates over which the `annealed` fields fall linearly to zero."""
    annealed: tuple[str, ...] = static(("learning_rate",))
    """Names of the fields that anneal."""
    target_kl: float | None = None
    """Stops an update's optimizer steps once the approximate KL exceeds it, nats."""
    temperature: float = 1.0
    """Of sampling and of every log-probability in the losses."""
    ent_coef: float | None = None
    """Weight of the mean entropy of the tokens, nats, as a bonus."""
    kl_coef: float | None = None
    """Weight of the KL divergence from the reference policy (the first parameters)."""
    ref_refresh: float | None = None
    """Every so many updates the reference becomes the current policy; None keeps the first."""
    overlong_cache: float | None = None
    """Soft overlong penalty: it sets in this many tokens below the task's `max_new`."""
    mask_truncated: bool = static(False)
    """Overlong filtering: completions without an end token train nothing (their rewards stay in
    the statistics of their group)."""
    oversample: int | None = static(None)
    """Dynamic sampling: draws so many times `num_prompts` groups and trains on the first
    `num_prompts` whose scores differ. 1 only leaves out the groups whose scores do not."""
    tis_cap: float | None = None
    """Truncated importance weights: cap on π(training forward pass) / π(sampler), for a sampler
    whose numbers differ from the training pass (bfloat16, another engine)."""


@struct.dataclass(kw_only=True)
class GRPOConfig(TokenConfig):
    """Settings of `grpo`, and of the presets that clip the ratio of every token."""

    clip_epsilon: float = 0.2
    """Ratios below ``1 − ε`` are clipped (and above ``1 + ε``, without the next)."""
    clip_epsilon_high: float | None = None
    """Ratios above ``1 + ε_high`` are clipped: clip-higher, when larger."""
    dual_clip: float | None = None
    """Caps the loss of a negative advantage at this many times ``−A``; above 1."""


@struct.dataclass(kw_only=True)
class DAPOConfig(GRPOConfig):
    """Settings of `dapo`: clip-higher and dynamic sampling are on."""

    clip_epsilon_high: float | None = 0.28
    oversample: int | None = static(2)


@struct.dataclass(kw_only=True)
class GSPOConfig(TokenConfig):
    """Settings of `gspo`: the ratio of a sequence is clipped, so ε is far smaller."""

    clip_epsilon: float = 3e-4
    clip_epsilon_high: float | None = 4e-4


@struct.dataclass(kw_only=True)
class CISPOConfig(TokenConfig):
    """Settings of `cispo`."""

    max_ratio: float = 5.0
    """Cap on the (detached) ratio itself, not an offset from 1."""


@struct.dataclass(kw_only=True)
class RLOOConfig(TokenConfig):
    """Settings of `rloo`; its KL goes into the reward."""

    clip_epsilon: float = 0.2
    clip_epsilon_high: float | None = None


@struct.dataclass(kw_only=True)
class ReinforcePPConfig(GRPOConfig):
    """Settings of `reinforce_pp`; its KL goes into the reward."""

    gamma: float = 1.0
    """Discount per token."""
    group_baseline: bool = static(False)
    """Subtracts the mean of the group from the scores first (REINFORCE++-baseline)."""


def check_config(config: TokenConfig, task: Task, model: LanguageModel) -> None:
    """`ValueError`/`TypeError` for sizes and concrete numbers that cannot work together.

    Args:
        config: of any token algorithm.
        task: its task.
        model: its model.

    Raises:
        ValueError: see the messages: every one names the numbers.
    """
    positive_int("num_prompts", config.num_prompts)
    positive_int("group_size", config.group_size, minimum=2)
    positive_int("num_epochs", config.num_epochs)
    positive_int("num_minibatches", config.num_minibatches)
    divides("num_prompts", config.num_prompts, "num_minibatches", config.num_minibatches)
    if config.oversample is not None:
        positive_int("oversample", config.oversample)
    in_range("learning_rate", config.learning_rate, 0.0)
    in_range("adam_eps", config.adam_eps, 0.0)
    for name in ("max_grad_norm", "anneal_updates", "target_kl", "temperature", "tis_cap"):
        in_range(name, getattr(config, name), 0.0, open_low=True)
    in_range("ent_coef", config.ent_coef)
    in_range("kl_coef", config.kl_coef, 0.0)
    in_range("ref_refresh", config.ref_refresh, 1.0)
    if config.ref_refresh is not None and config.kl_coef is None:
        raise ValueError(
            "ref_refresh renews a reference policy, but kl_coef is None: there is none"
        )
    # the upper end is the task's: a penalty from below length 0 would punish every answer
    in_range("overlong_cache", config.overlong_cache, 0.0, task.max_new, open_low=True)
    if task.eos_id is None and (config.mask_truncated or config.overlong_cache is not None):
        raise ValueError(
            f"task {task.name!r} has no end token, so nothing is ever truncated or overlong: "
            "mask_truncated and overlong_cache must be off"
        )
    in_range("clip_epsilon", getattr(config, "clip_epsilon", None), 0.0)
    in_range("clip_epsilon_high", getattr(config, "clip_epsilon_high", None), 0.0)
    in_range("dual_clip", getattr(config, "dual_clip", None), 1.0, open_low=True)
    in_range("max_ratio", getattr(config, "max_ratio", None), 0.0, open_low=True)
    in_range("gamma", getattr(config, "gamma", None), 0.0, 1.0)
    names = {field.name for field in dataclasses.fields(config)}
    for name in config.annealed:
        if name not in names:
            raise ValueError(f"annealed names {name!r}, which is no field of the config")
    check_task(task, model)


def check_task(task: Task, model: LanguageModel) -> None:
    """`ValueError` when a task does not fit a model: its length, its vocabulary, its ids."""
    if task.max_prompt + task.max_new > model.max_length:
        raise ValueError(
            f"task {task.name!r} needs {task.max_prompt} prompt and {task.max_new} new tokens, "
            f"more than the model's max_length={model.max_length}"
        )
    size = len(task.vocabulary)
    if size > model.vocab_size:
        raise ValueError(
            f"task {task.name!r} has {size} tokens, the model's vocab_size is {model.vocab_size}"
        )
    for name, token in (("eos_id", task.eos_id), ("pad_id", task.pad_id)):
        if token is not None and not 0 <= token < size:
            raise ValueError(f"{name}={token} is no token of a vocabulary of {size}")
