"""Drawing prompts, writing a group of completions for each, scoring them, choosing the groups.

Arrays of a batch are ``[P, G, …]``: P prompts, G completions of each.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxpg._checks import positive_int
from jaxpg.losses import truncated_importance_weights
from jaxpg.reductions import masked_mean
from jaxpg.rewards import mixed_group_mask, soft_overlong_penalty
from jaxpg.tokens.config import TokenConfig
from jaxpg.tokens.records import LanguageModel, Prompts, Task
from jaxpg.tokens.sampling import completion_log_probs, generate
from jaxpg.types import Info, Key, PyTree, split_key


class Groups(NamedTuple):
    """P groups of G completions, as the advantages and the losses see them."""

    prompts: Array  # [P, L] int32
    prompt_mask: Array  # [P, L] bool
    completions: Array  # [P, G, M] int32
    mask: Array  # [P, G, M] bool: the tokens that train
    old_log_probs: Array  # [P, G, M] under the policy that wrote them
    ref_log_probs: Array | None  # [P, G, M], None without a reference
    weights: Array | None  # [P, G, M] truncated importance weights, None when off
    scores: Array  # [P, G] of the task
    rewards: Array  # [P, G] scores and penalties
    kept: Array  # [P] bool: false for slots that dynamic sampling could not fill


def split_groups(x: ArrayLike, group_size: int) -> Array:
    """Cuts samples that stand one after the other into groups.

    Formula::

        [P·G, …] → [P, G, …]

    Args:
        x: ``[N, …]``, the G samples of a prompt side by side.
        group_size: G, at least 2.

    Returns:
        ``[N / G, G, …]``.

    Raises:
        ValueError: a group size below 2, or one that does not divide N.

    Example:
        >>> print(split_groups(jnp.array([1, 0, 0, 1]), 2))
        [[1 0]
         [0 1]]
    """
    x = jnp.asarray(x)
    positive_int("group_size", group_size, minimum=2)
    if x.ndim < 1 or x.shape[0] % group_size:
        raise ValueError(
            f"{x.shape[0] if x.ndim else 'no'} samples are not divisible into groups of "
            f"group_size={group_size}"
        )
    return x.reshape(x.shape[0] // group_size, group_size, *x.shape[1:])


def select_mixed_groups(scores: ArrayLike, num_groups: int) -> tuple[Array, Array]:
    """The first groups that hold a learning signal: dynamic sampling with fixed shapes.

    Formula::

        mixedₚ = (max_g scoreₚ ≠ min_g scoreₚ)

    Groups keep their order, mixed ones first (a stable sort). Where fewer than `num_groups` are
    mixed, others fill the remaining slots and are flagged, to be given weight 0.

    Args:
        scores: ``[D, G]`` correctness of G samples each of D groups, before any shaping.
        num_groups: how many groups to choose, at most D.

    Returns:
        ``(index[num_groups] int32, kept[num_groups] bool)``: which groups, and whether they are
        mixed.

    Raises:
        ValueError: `num_groups` above D.

    Example:
        >>> scores = jnp.array([[1, 1], [1, 0], [0, 0], [0, 1]])
        >>> for x in select_mixed_groups(scores, 3): print(x)
        [1 3 0]
        [ True  True False]

    References:
        Yu et al., DAPO, arXiv 2503.14476, eq. 11 (0 < number right < G). Deviation: sampling
        does not go on until the batch is full; a fixed number of groups is drawn at once.
    """
    scores = jnp.asarray(scores)
    if positive_int("num_groups", num_groups) > scores.shape[0]:
        raise ValueError(f"num_groups={num_groups} exceeds the {scores.shape[0]} groups drawn")
    mixed = mixed_group_mask(scores)
    index = jnp.argsort(~mixed, stable=True)[:num_groups].astype(jnp.int32)
    return index, mixed[index]


def sample_groups(
    key: Key,
    task: Task,
    model: LanguageModel,
    params: PyTree,
    config: TokenConfig,
    *,
    ref_params: PyTree | None = None,
) -> tuple[Groups, Info]:
    """Draws prompts, writes and scores ``G`` completions of each, keeps the groups that count.

    Formula::

        rewardₚ𝑔 = scoreₚ𝑔 + soft overlong penalty(lengthₚ𝑔)

    Args:
        key: consumed.
        task: the task.
        model: the model.
        params: of the policy that writes.
        config: the current config (numbers may be traced).
        ref_params: of the reference policy; None without one.

    Returns:
        ``(groups, info)``, info over **all** completions drawn: ``score``, ``exact`` (share with
        score 1), ``reward``, ``mean_length``, ``eos_rate``, ``drawn_entropy`` (nats a token),
        ``mixed_share`` (of the groups drawn), ``kept_share`` (of the batch's groups, those that
        train), and counts and sums.

    Raises:
        ValueError: a task whose arrays do not have the shapes it promises.
    """
    keys = split_key(key, "prompts", "completions")
    drawn = config.num_prompts * (1 if config.oversample is None else config.oversample)
    prompts = draw_prompts(keys["prompts"], task, drawn)
    repeated = jax.tree.map(lambda x: jnp.repeat(x, config.group_size, axis=0), prompts)
    completions = generate(
        keys["completions"],
        model,
        params,
        repeated.tokens,
        repeated.mask,
        max_new_tokens=task.max_new,
        eos_id=task.eos_id,
        pad_id=task.pad_id,
        temperature=config.temperature,
        use_cache=model.init_cache is not None,
    )
    flat_scores = score_completions(task, repeated.info, completions.tokens, completions.mask)
    lengths = jnp.sum(completions.mask, axis=-1)
    flat_rewards = flat_scores
    if config.overlong_cache is not None:
        flat_rewards = flat_scores + soft_overlong_penalty(
            lengths, max_length=task.max_new, cache_length=config.overlong_cache
        )
    scores, rewards, tokens, mask, log_probs, finished = (
        split_groups(x, config.group_size)
        for x in (
            flat_scores,
            flat_rewards,
            completions.tokens,
            completions.mask,
            completions.log_probs,
            completions.finished,
        )
    )
    mixed = mixed_group_mask(scores)
    if config.oversample is None:
        index, kept = jnp.arange(drawn, dtype=jnp.int32), jnp.ones((drawn,), bool)
    else:
        index, kept = select_mixed_groups(scores, config.num_prompts)
    length, scored = lengths.astype(jnp.float32), ~jnp.isnan(flat_scores)
    info = {
        "score": masked_mean(flat_scores, scored),
        "score_sum": jnp.sum(jnp.where(scored, flat_scores, 0.0)),
        "exact": masked_mean((flat_scores >= 1.0).astype(jnp.float32), scored),
        "reward": masked_mean(flat_rewards, scored),
        "mean_length": jnp.mean(length),
        "length_sum": jnp.sum(length),
        # E[−log π] is the entropy; that of the loss sees only what dynamic sampling keeps
        "drawn_entropy": -masked_mean(completions.log_probs, completions.mask),
        "eos_rate": jnp.mean(completions.finished.astype(jnp.float32)),
        "mixed_share": jnp.mean(mixed.astype(jnp.float32)),
        "kept_share": jnp.mean(kept.astype(jnp.float32)),
        "completions": jnp.asarray(flat_scores.shape[0], jnp.float32),
    }

    trains = kept[:, None, None] & mask[index]
    if config.mask_truncated:
        trains = trains & finished[index][..., None]
    groups = Groups(
        prompts=prompts.tokens[index],
        prompt_mask=prompts.mask[index],
        completions=tokens[index],
        mask=trains,
        old_log_probs=log_probs[index],
        ref_log_probs=None,
        weights=None,
        scores=scores[index],
        rewards=rewards[index],
        kept=kept,
    )
    if config.tis_cap is not None:
        # The training pass says what the policy was; the sampler's numbers only weigh its tokens.
        old_log_probs, _ = group_log_probs(model, params, groups, temperature=config.temperature)
        weights = truncated_importance_weights(
            old_log_probs, groups.old_log_probs, trains, max_weight=config.tis_cap
        )
        groups = groups._replace(old_log_probs=old_log_probs, weights=weights)
    if ref_params is not None:
        ref_log_probs, _ = group_log_probs(
            model, ref_params, groups, temperature=config.temperature
        )
        groups = groups._replace(ref_log_probs=ref_log_probs)
    return groups, info


def group_log_probs(
    model: LanguageModel, params: PyTree, groups: Groups, *, temperature: ArrayLike
) -> tuple[Array, Array]:
    """Log-probs and entropies of the completions of a batch of groups, by the training pass.

    Args:
        model: the model.
        params: its parameters.
        groups: with leading axes ``[P, G]``; what `Groups.mask` leaves out gets 0.
        temperature: the one used for sampling.

    Returns:
        ``(log_probs[P, G, M], entropies[P, G, M])``, nats.
    """
    num_prompts, group_size = groups.completions.shape[:2]

    def flat(x: Array) -> Array:
        return x.reshape(num_prompts * group_size, *x.shape[2:])

    log_probs, entropies = completion_log_probs(
        model,
        params,
        jnp.repeat(groups.prompts, group_size, axis=0),
        jnp.repeat(groups.prompt_mask, group_size, axis=0),
        flat(groups.completions),
        flat(groups.mask),
        temperature=temperature,
    )
    return split_groups(log_probs, group_size), split_groups(entropies, group_size)


def draw_prompts(key: Key, task: Task, num_prompts: int, *, evaluation: bool = False) -> Prompts:
    """Prompts of a task as `Prompts`, their shapes checked.

    Args:
        key: consumed.
        task: the task.
        num_prompts: how many.
        evaluation: those of ``task.evaluation_prompts``, where the task has them.

    Returns:
        The prompts.

    Raises:
        ValueError: arrays that are not ``[num_prompts, task.max_prompt]``.
    """
    held_out = evaluation and task.evaluation_prompts is not None
    sample = task.evaluation_prompts if held_out else task.sample_prompts
    prompts = Prompts(*sample(key, num_prompts))
    expected = (num_prompts, task.max_prompt)
    for name, x in (("tokens", prompts.tokens), ("mask", prompts.mask)):
        if x.shape != expected:
            raise ValueError(
                f"task {task.name!r} promises prompt {name} of shape {expected}, got {x.shape}"
            )
    return prompts


def score_completions(task: Task, info: PyTree, completions: Array, mask: Array) -> Array:
    """``task.score`` as float32, its shape checked: one number per completion."""
    scores = jnp.asarray(task.score(info, completions, mask), jnp.float32)
    if scores.shape != completions.shape[:1]:
        raise ValueError(
            f"task {task.name!r} must give one score per completion, {completions.shape[:1]}, "
            f"got shape {scores.shape}"
        )
    return scores
