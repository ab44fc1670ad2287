"""Floor 1: the pieces that the whole losses of `jaxpg.objectives` are put together from.

In all of them `mean` is the mean over valid elements, `reduce` the loss's own mean, and
`denominators` the pair that the caller gave: of `reduce`, and of `mean`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxpg._checks import as_float, is_concrete, masked_floats, normalize_axis, scalar
from jaxpg.kl import kl_k3, ratio_of
from jaxpg.losses import (
    broadcast_per_token,
    clip_bounds,
    clip_surrogate,
    sequence_clipped_loss,
    sequence_log_ratios,
)
from jaxpg.reductions import masked_mean, sequence_mean

Metrics = dict[str, Array]
"""Scalars, without gradients."""

Mean = Callable[[Array], Array]

KLEstimator = Callable[[ArrayLike, ArrayLike, ArrayLike | None], Array]
"""``(log_probs, ref_log_probs, mask) -> per element``, for instance `kl_k3`."""


class Tokens(NamedTuple):
    """Cleaned inputs of a loss on sequences, all arrays of one shape."""

    log_probs: Array
    old_log_probs: Array
    advantages: Array  # repeated along time if they came per sequence
    weights: Array | None  # likewise
    mask: Array | None
    axis: int  # from the front


def token_inputs(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None,
    weights: ArrayLike | None,
    axis: int,
) -> Tokens:
    """Checks shapes, and repeats what came per sequence along time."""
    log_probs = as_float("log_probs", log_probs)
    shape, axis = log_probs.shape, normalize_axis("axis", axis, log_probs.ndim)
    advantages = broadcast_per_token("advantages", advantages, shape, axis)
    if weights is not None:
        weights = broadcast_per_token("weights", weights, shape, axis)
    x, valid = masked_inputs(
        mask,
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        advantages=advantages,
        weights=weights,
    )
    return Tokens(
        x["log_probs"], x["old_log_probs"], x["advantages"], x.get("weights"), valid, axis
    )


def token_objective(
    tokens: Tokens,
    reduce: Mean,
    *,
    denominators: tuple[ArrayLike | None, ArrayLike | None],
    ref: tuple[ArrayLike | None, ArrayLike, KLEstimator],
    clip: tuple[ArrayLike, ArrayLike | None, ArrayLike | None],
    bonus: tuple[ArrayLike | None, ArrayLike],
) -> tuple[Array, Metrics]:
    """A loss with one ratio a token."""
    epsilon, epsilon_high, dual_clip = clip
    ratios = ratio_of(tokens.log_probs - tokens.old_log_probs)
    low, high = clip_bounds(epsilon, epsilon_high, ratios.dtype)
    losses = clip_surrogate(ratios, tokens.advantages, low, high, dual_clip)
    if tokens.weights is not None:
        losses = losses * tokens.weights
    mean = mean_over(tokens.mask, denominators[1])
    metrics = clip_fractions(ratios, tokens.advantages, low, high, dual_clip, mean)
    return with_terms(reduce(losses), metrics, tokens, reduce, denominators, ref, bonus)


def sequence_objective(
    tokens: Tokens,
    *,
    length_normalize: bool,
    denominators: tuple[ArrayLike | None, ArrayLike | None],
    ref: tuple[ArrayLike | None, ArrayLike, KLEstimator],
    clip: tuple[ArrayLike, ArrayLike | None, ArrayLike | None],
    bonus: tuple[ArrayLike | None, ArrayLike],
    count_empty: bool,
) -> tuple[Array, Metrics]:
    """A loss with one ratio a sequence."""
    axis, mask = tokens.axis, tokens.mask
    epsilon, epsilon_high, dual_clip = clip

    def reduce(x: Array) -> Array:
        return sequence_mean(
            x, mask, axis=axis, count_empty=count_empty, denominator=denominators[0]
        )

    # The surrogate is linear in A but for its sign, so that weights ≥ 0 can go into A; and the
    # token form, which an A of full rank asks for, equals the other where A is constant.
    losses = sequence_clipped_loss(
        tokens.log_probs,
        tokens.old_log_probs,
        tokens.advantages if tokens.weights is None else tokens.advantages * tokens.weights,
        mask,
        axis=axis,
        length_normalize=length_normalize,
        clip_epsilon=epsilon,
        clip_epsilon_high=epsilon_high,
        dual_clip=dual_clip,
    )
    counted = None if mask is None or count_empty else jnp.any(mask, axis=axis)
    policy_loss = masked_mean(losses, counted, denominator=denominators[0])
    log_ratios = tokens.log_probs - tokens.old_log_probs
    log_s, _ = sequence_log_ratios(log_ratios, mask, axis, length_normalize)
    ratios = jnp.broadcast_to(jnp.expand_dims(ratio_of(log_s), axis), log_ratios.shape)
    low, high = clip_bounds(epsilon, epsilon_high, ratios.dtype)
    metrics = clip_fractions(ratios, tokens.advantages, low, high, dual_clip, reduce)
    return with_terms(policy_loss, metrics, tokens, reduce, denominators, ref, bonus)


def with_terms(
    policy_loss: Array,
    metrics: Metrics,
    tokens: Tokens,
    reduce: Mean,
    denominators: tuple[ArrayLike | None, ArrayLike | None],
    ref: tuple[ArrayLike | None, ArrayLike, KLEstimator],
    bonus: tuple[ArrayLike | None, ArrayLike],
) -> tuple[Array, Metrics]:
    """Adds the KL and entropy terms to a policy loss, and what is left of the metrics."""
    ref_log_probs, kl_coef, kl_estimator = ref
    entropies, ent_coef = bonus
    if entropies is not None and denominators[0] is not None and denominators[1] is None:
        raise ValueError(
            "entropies with a denominator need token_denominator as well: their mean over the "
            "tokens of this part alone would count in full in the loss of every part"
        )
    x, _ = masked_inputs(
        tokens.mask,
        log_probs=tokens.log_probs,
        ref_log_probs=ref_log_probs,
        entropies=entropies,
    )
    mean = mean_over(tokens.mask, denominators[1])
    metrics |= {
        "policy_loss": policy_loss,
        "approx_kl": mean(kl_k3(tokens.old_log_probs, tokens.log_probs)),
        "clip_fraction": metrics["clip_fraction_low"] + metrics["clip_fraction_high"],
    }
    loss = policy_loss
    if ref_log_probs is None:
        unused("kl_coef", kl_coef, "ref_log_probs")
    else:
        kl = kl_estimator(x["log_probs"], x["ref_log_probs"], tokens.mask)
        loss = loss + times("kl_coef", kl_coef, reduce(kl))
        metrics["kl_ref"] = mean(kl)
    entropy_term, entropy_metric = entropy_bonus(x, ent_coef, mean)
    return loss - entropy_term, constant(metrics | entropy_metric)


def masked_inputs(
    mask: ArrayLike | None, **arrays: ArrayLike | None
) -> tuple[dict[str, Array], Array | None]:
    """Those that are given, of one shape and dtype and with zeros under the mask."""
    given = {name: x for name, x in arrays.items() if x is not None}
    cleaned, valid = masked_floats(mask, **given)
    return dict(zip(given, cleaned, strict=True)), valid


def mean_over(mask: Array | None, denominator: ArrayLike | None) -> Mean:
    """The mean over valid elements, as a function."""
    return lambda x: masked_mean(x, mask, denominator=denominator)


def entropy_bonus(
    x: dict[str, Array], ent_coef: ArrayLike, mean: Mean
) -> tuple[ArrayLike, Metrics]:
    """What is subtracted from a loss, and its metric; 0 and none without entropies."""
    if "entropies" not in x:
        unused("ent_coef", ent_coef, "entropies")
        return 0.0, {}
    entropy = mean(x["entropies"])
    return times("ent_coef", ent_coef, entropy), {"entropy": entropy}


def clip_fractions(
    ratios: Array,
    advantages: Array,
    low: Array,
    high: Array,
    dual_clip: ArrayLike | None,
    mean: Mean,
) -> Metrics:
    """Shares of the elements whose gradient a bound has stopped."""
    counted = {
        "clip_fraction_low": (advantages < 0) & (ratios < low),
        "clip_fraction_high": (advantages > 0) & (ratios > high),
    }
    if dual_clip is not None:
        cap = scalar("dual_clip", dual_clip, ratios.dtype)
        counted["dual_clip_fraction"] = (advantages < 0) & (ratios > cap)
    return {name: mean(flags.astype(ratios.dtype)) for name, flags in counted.items()}


def times(name: str, coef: ArrayLike, x: Array) -> Array:
    """`coef` times `x`, in the dtype of `x` whatever that of `coef`."""
    return scalar(name, coef, x.dtype) * x


def unused(name: str, value: ArrayLike, needs: str) -> None:
    """A coefficient of a term whose array is missing does nothing: say so while it can be read."""
    if is_concrete(value) and np.any(np.asarray(value) != 0):
        raise ValueError(f"{name}={value} needs {needs}")


def constant(metrics: Metrics) -> Metrics:
    """`metrics` without gradients."""
    return jax.tree.map(jax.lax.stop_gradient, metrics)
