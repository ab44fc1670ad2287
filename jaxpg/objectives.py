"""Floor 1: whole losses, ``(scalar, metrics)``, for ``jax.value_and_grad(..., has_aux=True)``.

Each is a per-element loss of `jaxpg.losses`, a mean of `jaxpg.reductions`, and optional further
terms: take those instead where none of these fits. Advantages come from `jaxpg.advantages`,
computed outside and constant; nothing here stops gradients but those of the metrics.

What other code calls the same (* its default; Σ over valid tokens, B sequences):

===================  ===========  =======================  ============  ========================
here                 TRL          verl                     OpenRLHF      tunix
===================  ===========  =======================  ============  ========================
`dapo_loss`:         dapo*        token-mean*              token level*  token-mean
Σ / tokens           (1)
`grpo_loss`: mean    grpo         seq-mean-token-mean      not token     sequence-mean-token-mean*
of token means                                             level
`sequence_mean`,                  seq-mean-token-sum                     seq-mean-token-sum
``token_sum``
`dr_grpo_loss`:      dr_grpo      seq-mean-token-sum-norm  (2)           sequence-mean-token-scale
Σ / (B max_length)
`gspo_loss`          sequence     gspo                     gspo          gspo-token
                     level
`rloo_loss`          RLOOTrainer
`cispo_loss`,        cispo        cispo
`token_mean`         (3)          (4)
``dual_clip``        delta (5)    clip_ratio_c, 3*         optional      epsilon_c
``kl_coef``, `kl_k3` beta, 0*     kl_loss_coef, off*       optional      beta, 0.04*, on k1 (6)
===================  ===========  =======================  ============  ========================

1. ``bnpo`` is the same mean within each micro-batch. 2. Its ``dr_grpo`` drops the std of the
advantages and keeps the token mean. 3. ``epsilon_high`` is the cap on the ratio, `max_ratio`.
4. Clips to 1 ∓ its two epsilons, so ``min_ratio = 1 − low, max_ratio = 1 + high``. 5. Caps the
ratio before the minimum: the same as `dual_clip` while delta > 1 + ε_high. 6. That is
``kl_estimator=kl_k1`` here; its gradient is 0 on average.

Sequences whose mask is empty count in TRL's ``grpo`` (``count_empty=True`` here), and do not in
verl, OpenRLHF and tunix (the default here); ``dr_grpo`` counts them everywhere.

Group advantages, (r − mean)/(s + eps): TRL ddof 1, eps 1e-4; verl and tunix ddof 1, eps 1e-6 (the
default of `jaxpg.group_advantages`); OpenRLHF ddof 1, eps 1e-9; MaxText ddof 0, eps 1e-8; Dr. GRPO
and RLOO do not divide by s. With G = 2 samples, ddof decides between ± 0.71 and ± 1.

Metrics have the same names everywhere; one that does not apply is absent:

======================  ==========================================================================
``policy_loss``         the policy term, by the loss's own mean, with its weights
``value_loss``          mean of ½ (v − G)², or of its clipped form; before ``vf_coef``
``entropy``             mean of `entropies`, nats; before ``ent_coef``
``approx_kl``           mean of e^d − 1 − d, d = log π − log π_old: KL(π_old‖π) by k3, nats
``kl_ref``              mean of the KL estimator against the reference, nats; before ``kl_coef``
``kl``                  mean of what `ppo_kl_loss` was given, nats; before ``kl_coef``
``clip_fraction_low``   share with A < 0 and ρ < 1 − ε: the clip has stopped their gradient
``clip_fraction_high``  share with A > 0 and ρ > 1 + ε_high: likewise
``clip_fraction``       the sum of these two; in `ppo_clip_loss` the share with ρ outside of the
                        bounds whatever A is, as PPO codes report it (never smaller)
``dual_clip_fraction``  share with A < 0 and ρ > c, where ``dual_clip=c`` is on
======================  ==========================================================================

They are plain means over valid elements (tokens), so `kl_ref` and `entropy` read as nats a token
whatever the loss's own mean is. In `gspo_loss` and `rloo_loss` ρ is the ratio of the sequence, and
clip fractions are of sequences.
"""

from __future__ import annotations

from jax import Array
from jax.typing import ArrayLike

from jaxpg._objective_terms import (
    KLEstimator,
    Metrics,
    clip_fractions,
    constant,
    entropy_bonus,
    masked_inputs,
    mean_over,
    sequence_objective,
    times,
    token_inputs,
    token_objective,
)
from jaxpg.kl import kl_k3, ratio_of
from jaxpg.losses import (
    clip_bounds,
    clip_surrogate,
    clipped_value_loss,
    importance_sampling_loss,
    policy_gradient_loss,
    squared_value_loss,
)
from jaxpg.reductions import constant_norm, sequence_mean, token_mean


def reinforce_loss(
    log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    entropies: ArrayLike | None = None,
    ent_coef: ArrayLike = 0.0,
    denominator: ArrayLike | None = None,
) -> tuple[Array, Metrics]:
    """REINFORCE, with or without a baseline in `advantages`, and an optional entropy bonus.

    Formula::

        mean(−A log π(a)) − ent_coef · mean(H)

    Args:
        log_probs: ``[...]`` log-probabilities (nats) of the actions that were taken.
        advantages: ``[...]`` A: returns, or returns minus a baseline.
        mask: ``[...]`` bool or 0/1, 1 = counts; None is everything.
        entropies: ``[...]`` H of the policy in each state, nats; None leaves the bonus out.
        ent_coef: scalar weight of the bonus.
        denominator: elements that count in the whole batch, if this is a part of it.

    Returns:
        ``(loss, metrics)``: scalar, and ``policy_loss``, ``entropy`` as described at the top of
        this module.

    Raises:
        ValueError: if the shapes differ, or `ent_coef` is a number other than 0 without
            `entropies`.

    Example:
        >>> loss, metrics = reinforce_loss([-1.0, -0.5], [2.0, -1.0])
        >>> print(loss)
        0.75

    References:
        Williams, Simple statistical gradient-following algorithms, Machine Learning 8, 1992.
    """
    x, valid = masked_inputs(mask, log_probs=log_probs, advantages=advantages, entropies=entropies)
    mean = mean_over(valid, denominator)
    policy_loss = mean(policy_gradient_loss(x["log_probs"], x["advantages"]))
    bonus, metrics = entropy_bonus(x, ent_coef, mean)
    return policy_loss - bonus, constant(metrics | {"policy_loss": policy_loss})


def actor_critic_loss(
    log_probs: ArrayLike,
    advantages: ArrayLike,
    values: ArrayLike,
    targets: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    entropies: ArrayLike | None = None,
    vf_coef: ArrayLike = 0.5,
    ent_coef: ArrayLike = 0.0,
    denominator: ArrayLike | None = None,
) -> tuple[Array, Metrics]:
    """Advantage actor-critic (A2C): policy gradient, value error and entropy bonus.

    Formula::

        mean(−A log π(a)) + vf_coef · mean(½ (v − G)²) − ent_coef · mean(H)

    Args:
        log_probs: ``[...]`` log-probabilities (nats) of the actions that were taken.
        advantages: ``[...]`` A. Stop their gradient if they were computed from `values`.
        values: ``[...]`` v, the critic's estimates.
        targets: ``[...]`` G, what they should match; constants likewise.
        mask: ``[...]`` bool or 0/1, 1 = counts; None is everything.
        entropies: ``[...]`` H of the policy in each state, nats; None leaves the bonus out.
        vf_coef: scalar weight of the value loss (which has the factor ½ already).
        ent_coef: scalar weight of the bonus.
        denominator: elements that count in the whole batch, if this is a part of it.

    Returns:
        ``(loss, metrics)``: scalar, and ``policy_loss``, ``value_loss``, ``entropy`` as described
        at the top of this module.

    Raises:
        ValueError: if the shapes differ, or `ent_coef` is a number other than 0 without
            `entropies`.

    Example:
        >>> loss, metrics = actor_critic_loss([-1.0], [2.0], [0.0], [2.0])
        >>> print(loss, metrics["policy_loss"], metrics["value_loss"])
        3.0 2.0 2.0

    References:
        Mnih et al., Asynchronous Methods for Deep RL, arXiv 1602.01783, section 4. Deviation: the
        factor ½ of the value loss.
    """
    x, valid = masked_inputs(
        mask,
        log_probs=log_probs,
        advantages=advantages,
        values=values,
        targets=targets,
        entropies=entropies,
    )
    mean = mean_over(valid, denominator)
    policy_loss = mean(policy_gradient_loss(x["log_probs"], x["advantages"]))
    value_loss = mean(squared_value_loss(x["values"], x["targets"]))
    bonus, metrics = entropy_bonus(x, ent_coef, mean)
    loss = policy_loss + times("vf_coef", vf_coef, value_loss) - bonus
    return loss, constant(metrics | {"policy_loss": policy_loss, "value_loss": value_loss})


def ppo_clip_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    values: ArrayLike,
    targets: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    entropies: ArrayLike | None = None,
    old_values: ArrayLike | None = None,
    clip_epsilon: ArrayLike = 0.2,
    clip_epsilon_high: ArrayLike | None = None,
    dual_clip: ArrayLike | None = None,
    value_clip_epsilon: ArrayLike | None = None,
    vf_coef: ArrayLike = 0.5,
    ent_coef: ArrayLike = 0.0,
    denominator: ArrayLike | None = None,
) -> tuple[Array, Metrics]:
    """PPO with a clipped ratio: surrogate, value error and entropy bonus.

    Formula::

        mean(−min(ρ A, clip(ρ, 1 − ε, 1 + ε_high) A)) + vf_coef · mean(½ (v − G)²)
            − ent_coef · mean(H)

    Args:
        log_probs: ``[...]`` log-probabilities (nats) under the policy being trained.
        old_log_probs: ``[...]`` of the same actions under the policy that took them.
        advantages: ``[...]`` A, normalised by the caller or not.
        values: ``[...]`` v, the critic's estimates.
        targets: ``[...]`` G, what they should match.
        mask: ``[...]`` bool or 0/1, 1 = counts; None is everything.
        entropies: ``[...]`` H of the policy in each state, nats; None leaves the bonus out.
        old_values: ``[...]`` v when the data was collected; only read with `value_clip_epsilon`.
        clip_epsilon: scalar ε ≥ 0, an offset from ratio 1.
        clip_epsilon_high: scalar ε_high ≥ 0, the upper offset; None takes ε.
        dual_clip: scalar c > 1, a cap on the ratio for negative advantages; None is off.
        value_clip_epsilon: scalar ≥ 0 in units of the value: see `clipped_value_loss` before using
            it. None is off, and the default: with returns much larger than ε it stops learning.
        vf_coef: scalar weight of the value loss (which has the factor ½ already).
        ent_coef: scalar weight of the bonus.
        denominator: elements that count in the whole batch, if this is a part of it.

    Returns:
        ``(loss, metrics)``: scalar, and ``policy_loss``, ``value_loss``, ``entropy``,
        ``approx_kl``, ``clip_fraction``, ``clip_fraction_low``, ``clip_fraction_high``,
        ``dual_clip_fraction`` as described at the top of this module.

    Raises:
        ValueError: if the shapes differ, an ε is negative, ``dual_clip <= 1``,
            `value_clip_epsilon` is given without `old_values`, or `ent_coef` is a number other than
            0 without `entropies`.

    Example:
        >>> import jax.numpy as jnp
        >>> log_probs, old_log_probs = jnp.log(jnp.array([[0.75, 0.5], [0.5, 0.5]]))
        >>> loss, metrics = ppo_clip_loss(
        ...     log_probs, old_log_probs, [1.0, -1.0], [0.0, 0.0], [0.0, 2.0], clip_epsilon=0.25
        ... )
        >>> print(jnp.round(loss, 4), metrics["value_loss"], metrics["clip_fraction"])
        0.375 1.0 0.5

    References:
        Schulman et al., Proximal Policy Optimization Algorithms, arXiv 1707.06347, eq. 7 and 9.
        Deviation: the factor ½ of the value loss.
    """
    if value_clip_epsilon is not None and old_values is None:
        raise ValueError(f"value_clip_epsilon={value_clip_epsilon} needs old_values")
    x, valid = masked_inputs(
        mask,
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        advantages=advantages,
        values=values,
        targets=targets,
        entropies=entropies,
        old_values=old_values if value_clip_epsilon is not None else None,
    )
    mean = mean_over(valid, denominator)
    ratios = ratio_of(x["log_probs"] - x["old_log_probs"])
    low, high = clip_bounds(clip_epsilon, clip_epsilon_high, ratios.dtype)
    policy_loss = mean(clip_surrogate(ratios, x["advantages"], low, high, dual_clip))
    if value_clip_epsilon is None:
        value_losses = squared_value_loss(x["values"], x["targets"])
    else:
        value_losses = clipped_value_loss(
            x["values"], x["old_values"], x["targets"], clip_epsilon=value_clip_epsilon
        )
    value_loss = mean(value_losses)
    bonus, metrics = entropy_bonus(x, ent_coef, mean)
    metrics |= clip_fractions(ratios, x["advantages"], low, high, dual_clip, mean)
    metrics |= {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "approx_kl": mean(kl_k3(x["old_log_probs"], x["log_probs"])),
        "clip_fraction": mean(((ratios < low) | (ratios > high)).astype(ratios.dtype)),
    }
    loss = policy_loss + times("vf_coef", vf_coef, value_loss) - bonus
    return loss, constant(metrics)


def ppo_kl_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    values: ArrayLike,
    targets: ArrayLike,
    kl: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    kl_coef: ArrayLike,
    entropies: ArrayLike | None = None,
    vf_coef: ArrayLike = 0.5,
    ent_coef: ArrayLike = 0.0,
    denominator: ArrayLike | None = None,
) -> tuple[Array, Metrics]:
    """PPO with a KL penalty in place of clipping.

    Formula::

        mean(−ρ A) + kl_coef · mean(KL) + vf_coef · mean(½ (v − G)²) − ent_coef · mean(H)

    Args:
        log_probs: ``[...]`` log-probabilities (nats) under the policy being trained.
        old_log_probs: ``[...]`` of the same actions under the policy that took them.
        advantages: ``[...]`` A, normalised by the caller or not.
        values: ``[...]`` v, the critic's estimates.
        targets: ``[...]`` G, what they should match.
        kl: ``[...]`` divergence in each state, nats, with its gradient: from
            `Distribution.kl(old, new)` for the paper's KL(π_old‖π), or the other direction.
        mask: ``[...]`` bool or 0/1, 1 = counts; None is everything.
        kl_coef: scalar β ≥ 0, for instance from `adaptive_kl_coef`.
        entropies: ``[...]`` H of the policy in each state, nats; None leaves the bonus out.
        vf_coef: scalar weight of the value loss (which has the factor ½ already).
        ent_coef: scalar weight of the bonus.
        denominator: elements that count in the whole batch, if this is a part of it.

    Returns:
        ``(loss, metrics)``: scalar, and ``policy_loss`` (without the penalty), ``value_loss``,
        ``entropy``, ``kl``, ``approx_kl`` as described at the top of this module.

    Raises:
        ValueError: if the shapes differ, or `ent_coef` is a number other than 0 without
            `entropies`.

    Example:
        >>> loss, metrics = ppo_kl_loss([-1.0], [-1.0], [2.0], [0.0], [0.0], [0.25], kl_coef=4.0)
        >>> print(loss, metrics["policy_loss"], metrics["kl"])
        -1.0 -2.0 0.25

    References:
        Schulman et al., Proximal Policy Optimization Algorithms, arXiv 1707.06347, eq. 8.
    """
    x, valid = masked_inputs(
        mask,
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        advantages=advantages,
        values=values,
        targets=targets,
        kl=kl,
        entropies=entropies,
    )
    mean = mean_over(valid, denominator)
    surrogate = importance_sampling_loss(x["log_probs"], x["old_log_probs"], x["advantages"])
    policy_loss, penalty = mean(surrogate), mean(x["kl"])
    value_loss = mean(squared_value_loss(x["values"], x["targets"]))
    bonus, metrics = entropy_bonus(x, ent_coef, mean)
    metrics |= {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "kl": penalty,
        "approx_kl": mean(kl_k3(x["old_log_probs"], x["log_probs"])),
    }
    loss = policy_loss + times("kl_coef", kl_coef, penalty)
    return loss + times("vf_coef", vf_coef, value_loss) - bonus, constant(metrics)


def grpo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    ref_log_probs: ArrayLike | None = None,
    kl_coef: ArrayLike = 0.0,
    kl_estimator: KLEstimator = kl_k3,
    weights: ArrayLike | None = None,
    denominator: ArrayLike | None = None,
    token_denominator: ArrayLike | None = None,
    axis: int = -1,
    clip_epsilon: ArrayLike = 0.2,
    clip_epsilon_high: ArrayLike | None = None,
    dual_clip: ArrayLike | None = None,
    entropies: ArrayLike | None = None,
    ent_coef: ArrayLike = 0.0,
    count_empty: bool = False,
) -> tuple[Array, Metrics]:
    """GRPO: clipped token ratios, averaged within each sequence and then over sequences.

    Formula::

        (1/B) Σ_i (1/n_i) Σ_t [−min(ρ A, clip(ρ, 1 − ε, 1 + ε_high) A) + kl_coef · k3]
            − ent_coef · mean over tokens of H

    with n_i valid tokens in sequence i and B sequences. The value says nothing about progress: at
    the first update (ρ = 1) it is 0 for centred advantages, while the gradient is not.

    Args:
        log_probs: ``[..., T]`` log-probabilities (nats) under the policy being trained.
        old_log_probs: ``[..., T]`` of the same tokens under the policy at the start of the update;
            ``stop_gradient(log_probs)`` only if there is one update per batch.
        advantages: ``[...]`` without `axis`, one per sequence, or ``[..., T]``, one per token.
        mask: ``[..., T]`` bool or 0/1, 1 = counts; None is everything.
        ref_log_probs: ``[..., T]`` under the reference policy; None leaves the KL term out.
        kl_coef: scalar β of the KL term; 0.04 in DeepSeekMath.
        kl_estimator: ``(log_probs, ref_log_probs, mask) -> [..., T]``; see `jaxpg.kl` for which
            gradients they have.
        weights: ``[...]`` or ``[..., T]``, ≥ 0, multiply the policy term only, before the KL term
            is added (`truncated_importance_weights`, `off_policy_sequence_mask`). A token with
            weight 0 stays in the denominator; what should leave it belongs into `mask`.
        denominator: sequences in the whole batch, if this is a part of it.
        token_denominator: valid tokens in the whole batch, likewise: divides the entropy bonus and
            the metrics.
        axis: the axis of time.
        clip_epsilon: scalar ε ≥ 0, an offset from ratio 1.
        clip_epsilon_high: scalar ε_high ≥ 0, the upper offset; None takes ε.
        dual_clip: scalar c > 1, a cap on the ratio for negative advantages; None is off.
        entropies: ``[..., T]`` H of the policy at each token, nats; None leaves the bonus out.
        ent_coef: scalar weight of the bonus.
        count_empty: whether sequences without a valid token count in B.

    Returns:
        ``(loss, metrics)``: scalar, and ``policy_loss``, ``approx_kl``, ``clip_fraction``,
        ``clip_fraction_low``, ``clip_fraction_high``, ``dual_clip_fraction``, ``kl_ref``,
        ``entropy`` as described at the top of this module.

    Raises:
        ValueError: if shapes do not fit, a setting is out of range, a coefficient is a number other
            than 0 while its array is missing, or `denominator` and `entropies` are given without
            `token_denominator` (the bonus of each part would count in full).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> log_probs = jnp.array([[-0.5, -1.0], [-2.0, -0.1]])
        >>> loss_fn = lambda x: grpo_loss(x, log_probs, jnp.array([1.0, -1.0]))
        >>> (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(log_probs)
        >>> print(loss)
        0.0
        >>> print(grads)
        [[-0.25 -0.25]
         [ 0.25  0.25]]

    References:
        Shao et al., DeepSeekMath, arXiv 2402.03300, eq. 3-4; as restated in Yu et al., DAPO,
        arXiv 2503.14476, eq. 5. Deviations: β defaults to 0, as TRL has it; log-ratios are clipped
        at ± 20.
    """
    tokens = token_inputs(log_probs, old_log_probs, advantages, mask, weights, axis)

    def reduce(x: Array) -> Array:
        return sequence_mean(
            x, tokens.mask, axis=tokens.axis, count_empty=count_empty, denominator=denominator
        )

    return token_objective(
        tokens,
        reduce,
        denominators=(denominator, token_denominator),
        ref=(ref_log_probs, kl_coef, kl_estimator),
        clip=(clip_epsilon, clip_epsilon_high, dual_clip),
        bonus=(entropies, ent_coef),
    )


def dapo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    ref_log_probs: ArrayLike | None = None,
    kl_coef: ArrayLike = 0.0,
    kl_estimator: KLEstimator = kl_k3,
    weights: ArrayLike | None = None,
    denominator: ArrayLike | None = None,
    token_denominator: ArrayLike | None = None,
    axis: int = -1,
    group_axis: int | None = None,
    clip_epsilon: ArrayLike = 0.2,
    clip_epsilon_high: ArrayLike | None = 0.28,
    dual_clip: ArrayLike | None = None,
    entropies: ArrayLike | None = None,
    ent_coef: ArrayLike = 0.0,
) -> tuple[Array, Metrics]:
    """DAPO: clipped token ratios with a higher upper bound, averaged over all tokens.

    Formula::

        (1/Σ_i n_i) Σ_i Σ_t [−min(ρ A, clip(ρ, 1 − ε, 1 + ε_high) A) + kl_coef · k3]
            − ent_coef · mean over tokens of H

    with n_i valid tokens in sequence i, over the whole batch, or over each group by itself and then
    over groups, with `group_axis`.

    Args:
        log_probs: ``[..., T]`` log-probabilities (nats) under the policy being trained.
        old_log_probs: ``[..., T]`` of the same tokens under the policy at the start of the update.
        advantages: ``[...]`` without `axis`, one per sequence, or ``[..., T]``, one per token.
        mask: ``[..., T]`` bool or 0/1, 1 = counts; None is everything.
        ref_log_probs: ``[..., T]`` under the reference policy; None leaves the KL term out.
        kl_coef: scalar weight of the KL term; the paper has none.
        kl_estimator: ``(log_probs, ref_log_probs, mask) -> [..., T]``.
        weights: ``[...]`` or ``[..., T]``, ≥ 0, multiply the policy term only. A token with weight
            0 stays in the denominator.
        denominator: valid tokens (with `group_axis`: groups) in the whole batch, if this is a part
            of it.
        token_denominator: valid tokens in the whole batch: divides the entropy bonus and the
            metrics. None takes `denominator`, unless there is a `group_axis`.
        axis: the axis of time.
        group_axis: the axis that counts the groups (0 for ``[P, G, T]``): every group's token mean
            weighs the same, as eq. 8 is written. None: one mean over all tokens, as TRL, verl,
            OpenRLHF and tunix have it.
        clip_epsilon: scalar ε ≥ 0, an offset from ratio 1.
        clip_epsilon_high: scalar ε_high ≥ 0, the upper offset; None takes ε.
        dual_clip: scalar c > 1, a cap on the ratio for negative advantages; None is off.
        entropies: ``[..., T]`` H of the policy at each token, nats; None leaves the bonus out.
        ent_coef: scalar weight of the bonus.

    Returns:
        ``(loss, metrics)``: scalar, and the metrics of `grpo_loss`.

    Raises:
        ValueError: if shapes do not fit, a setting is out of range, a coefficient is a number other
            than 0 while its array is missing, or `denominator`, `group_axis` and `entropies` are
            given without `token_denominator`.

    Example:
        >>> import jax.numpy as jnp
        >>> log_probs = jnp.array([[-0.5, -1.0], [-2.0, -0.1]])
        >>> loss, _ = dapo_loss(log_probs, log_probs, jnp.array([1.0, -1.0]), [[1, 1], [1, 0]])
        >>> print(jnp.round(loss, 4))  # not 0 with unequal lengths
        -0.3333

    References:
        Yu et al., DAPO, arXiv 2503.14476, eq. 8; ε_high: eq. 10.
    """
    tokens = token_inputs(log_probs, old_log_probs, advantages, mask, weights, axis)
    if group_axis is None and token_denominator is None:
        token_denominator = denominator
    return token_objective(
        tokens,
        lambda x: token_mean(x, tokens.mask, group_axis=group_axis, denominator=denominator),
        denominators=(denominator, token_denominator),
        ref=(ref_log_probs, kl_coef, kl_estimator),
        clip=(clip_epsilon, clip_epsilon_high, dual_clip),
        bonus=(entropies, ent_coef),
    )


def dr_grpo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    max_length: ArrayLike,
    ref_log_probs: ArrayLike | None = None,
    kl_coef: ArrayLike = 0.0,
    kl_estimator: KLEstimator = kl_k3,
    weights: ArrayLike | None = None,
    denominator: ArrayLike | None = None,
    token_denominator: ArrayLike | None = None,
    axis: int = -1,
    clip_epsilon: ArrayLike = 0.2,
    clip_epsilon_high: ArrayLike | None = None,
    dual_clip: ArrayLike | None = None,
    entropies: ArrayLike | None = None,
    ent_coef: ArrayLike = 0.0,
) -> tuple[Array, Metrics]:
    """Dr. GRPO: clipped token ratios, summed and divided by a constant length.

    Formula::

        (1/(B · max_length)) Σ_i Σ_t [−min(ρ A, clip(ρ, 1 − ε, 1 + ε_high) A) + kl_coef · k3]
            − ent_coef · mean over tokens of H

    over all B sequences, empty ones too. Its advantages are r − mean, without the std
    (``group_advantages(..., normalize_std=False)``).

    Args:
        log_probs: ``[..., T]`` log-probabilities (nats) under the policy being trained.
        old_log_probs: ``[..., T]`` of the same tokens under the policy at the start of the update.
        advantages: ``[...]`` without `axis`, one per sequence, or ``[..., T]``, one per token.
        mask: ``[..., T]`` bool or 0/1, 1 = counts; None is everything.
        max_length: scalar > 0, tokens: the longest completion that can be generated.
        ref_log_probs: ``[..., T]`` under the reference policy; None leaves the KL term out.
        kl_coef: scalar weight of the KL term; the paper has none.
        kl_estimator: ``(log_probs, ref_log_probs, mask) -> [..., T]``.
        weights: ``[...]`` or ``[..., T]``, ≥ 0, multiply the policy term only.
        denominator: sequences in the whole batch, if this is a part of it.
        token_denominator: valid tokens in the whole batch: divides the entropy bonus and the
            metrics.
        axis: the axis of time.
        clip_epsilon: scalar ε ≥ 0, an offset from ratio 1.
        clip_epsilon_high: scalar ε_high ≥ 0, the upper offset; None takes ε.
        dual_clip: scalar c > 1, a cap on the ratio for negative advantages; None is off.
        entropies: ``[..., T]`` H of the policy at each token, nats; None leaves the bonus out.
        ent_coef: scalar weight of the bonus.

    Returns:
        ``(loss, metrics)``: scalar, and the metrics of `grpo_loss`.

    Raises:
        ValueError: as `grpo_loss`, or if `max_length` is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> log_probs = jnp.array([[-0.5, -1.0], [-2.0, -0.1]])
        >>> advantages, mask = jnp.array([1.0, -1.0]), [[1, 1], [1, 0]]
        >>> loss, _ = dr_grpo_loss(log_probs, log_probs, advantages, mask, max_length=4)
        >>> print(loss)  # (-2 + 1) / (2 * 4)
        -0.125

    References:
        Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.2.
    """
    tokens = token_inputs(log_probs, old_log_probs, advantages, mask, weights, axis)

    def reduce(x: Array) -> Array:
        return constant_norm(
            x, tokens.mask, max_length=max_length, axis=tokens.axis, denominator=denominator
        )

    return token_objective(
        tokens,
        reduce,
        denominators=(denominator, token_denominator),
        ref=(ref_log_probs, kl_coef, kl_estimator),
        clip=(clip_epsilon, clip_epsilon_high, dual_clip),
        bonus=(entropies, ent_coef),
    )


def gspo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    ref_log_probs: ArrayLike | None = None,
    kl_coef: ArrayLike = 0.0,
    kl_estimator: KLEstimator = kl_k3,
    weights: ArrayLike | None = None,
    denominator: ArrayLike | None = None,
    token_denominator: ArrayLike | None = None,
    axis: int = -1,
    clip_epsilon: ArrayLike = 3e-4,
    clip_epsilon_high: ArrayLike | None = 4e-4,
    dual_clip: ArrayLike | None = None,
    entropies: ArrayLike | None = None,
    ent_coef: ArrayLike = 0.0,
    count_empty: bool = False,
) -> tuple[Array, Metrics]:
    """GSPO: one clipped ratio a sequence, the geometric mean of its token ratios.

    Formula::

        (1/B) Σ_i −min(s_i A_i, clip(s_i, 1 − ε, 1 + ε_high) A_i),   s_i = exp(mean_t log ρ_t)
            + kl_coef · (1/B) Σ_i (1/n_i) Σ_t k3 − ent_coef · mean over tokens of H

    With an advantage per token, its token form (GSPO-token): see `sequence_clipped_loss`.

    Args:
        log_probs: ``[..., T]`` log-probabilities (nats) under the policy being trained.
        old_log_probs: ``[..., T]`` of the same tokens under the policy at the start of the update.
        advantages: ``[...]`` without `axis`, one per sequence, or ``[..., T]``, one per token.
        mask: ``[..., T]`` bool or 0/1, 1 = counts; None is everything.
        ref_log_probs: ``[..., T]`` under the reference policy; None leaves the KL term out.
        kl_coef: scalar weight of the KL term; the paper has none.
        kl_estimator: ``(log_probs, ref_log_probs, mask) -> [..., T]``.
        weights: ``[...]`` or ``[..., T]``, ≥ 0, multiply the policy term only; per token, they ask
            for the token form.
        denominator: sequences in the whole batch, if this is a part of it.
        token_denominator: valid tokens in the whole batch: divides the entropy bonus and the
            metrics.
        axis: the axis of time.
        clip_epsilon: scalar ε ≥ 0, an offset from ratio 1. Much smaller than for token ratios.
        clip_epsilon_high: scalar ε_high ≥ 0, the upper offset; None takes ε. Change both together.
        dual_clip: scalar c > 1, a cap on the ratio for negative advantages; None is off.
        entropies: ``[..., T]`` H of the policy at each token, nats; None leaves the bonus out.
        ent_coef: scalar weight of the bonus.
        count_empty: whether sequences without a valid token count in B.

    Returns:
        ``(loss, metrics)``: scalar, and the metrics of `grpo_loss`; clip fractions are of
        sequences.

    Raises:
        ValueError: as `grpo_loss`.

    Example:
        >>> import jax.numpy as jnp
        >>> log_probs, old_log_probs = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.1, -1.3]])
        >>> loss, metrics = gspo_loss(log_probs, old_log_probs, jnp.array([1.0]))
        >>> print(loss, metrics["clip_fraction_high"])  # exp(0.2) is beyond 1.0004
        -1.0004 1.0

    References:
        Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071, eq. 5-7; token form
        eq. 13-14; ε from section 5.1.
    """
    return sequence_objective(
        token_inputs(log_probs, old_log_probs, advantages, mask, weights, axis),
        length_normalize=True,
        denominators=(denominator, token_denominator),
        ref=(ref_log_probs, kl_coef, kl_estimator),
        clip=(clip_epsilon, clip_epsilon_high, dual_clip),
        bonus=(entropies, ent_coef),
        count_empty=count_empty,
    )


def rloo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    ref_log_probs: ArrayLike | None = None,
    kl_coef: ArrayLike = 0.0,
    kl_estimator: KLEstimator = kl_k3,
    weights: ArrayLike | None = None,
    denominator: ArrayLike | None = None,
    token_denominator: ArrayLike | None = None,
    axis: int = -1,
    clip_epsilon: ArrayLike = 0.2,
    clip_epsilon_high: ArrayLike | None = None,
    dual_clip: ArrayLike | None = None,
    entropies: ArrayLike | None = None,
    ent_coef: ArrayLike = 0.0,
    count_empty: bool = False,
) -> tuple[Array, Metrics]:
    """RLOO for several updates a batch: one clipped ratio, that of the whole sequence.

    Formula::

        (1/B) Σ_i −min(s_i A_i, clip(s_i, 1 − ε, 1 + ε_high) A_i),   s_i = exp(Σ_t log ρ_t)
            + kl_coef · (1/B) Σ_i (1/n_i) Σ_t k3 − ent_coef · mean over tokens of H

    Its advantages are `leave_one_out_advantages`. The method itself has its KL inside the reward
    (r − β Σ_t k1, before the baseline) and no ``kl_coef`` here.

    Args:
        log_probs: ``[..., T]`` log-probabilities (nats) under the policy being trained.
        old_log_probs: ``[..., T]`` of the same tokens under the policy at the start of the update.
        advantages: ``[...]`` without `axis`, one per sequence, or ``[..., T]``, one per token.
        mask: ``[..., T]`` bool or 0/1, 1 = counts; None is everything.
        ref_log_probs: ``[..., T]`` under the reference policy; None leaves the KL term out.
        kl_coef: scalar weight of the KL term.
        kl_estimator: ``(log_probs, ref_log_probs, mask) -> [..., T]``.
        weights: ``[...]`` or ``[..., T]``, ≥ 0, multiply the policy term only.
        denominator: sequences in the whole batch, if this is a part of it.
        token_denominator: valid tokens in the whole batch: divides the entropy bonus and the
            metrics.
        axis: the axis of time.
        clip_epsilon: scalar ε ≥ 0, an offset from ratio 1.
        clip_epsilon_high: scalar ε_high ≥ 0, the upper offset; None takes ε.
        dual_clip: scalar c > 1, a cap on the ratio for negative advantages; None is off.
        entropies: ``[..., T]`` H of the policy at each token, nats; None leaves the bonus out.
        ent_coef: scalar weight of the bonus.
        count_empty: whether sequences without a valid token count in B.

    Returns:
        ``(loss, metrics)``: scalar, and the metrics of `grpo_loss`; clip fractions are of
        sequences.

    Raises:
        ValueError: as `grpo_loss`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.array([[-1.0, -1.0]])
        >>> print(jax.grad(lambda lp: rloo_loss(lp, x, jnp.array([2.0]))[0])(x))
        [[-2. -2.]]

    References:
        Ahmadian et al., Back to Basics, arXiv 2402.14740, section 2.2. Deviation: the paper has one
        update a batch, where ρ = 1; the clipped ratio is TRL's.
    """
    return sequence_objective(
        token_inputs(log_probs, old_log_probs, advantages, mask, weights, axis),
        length_normalize=False,
        denominators=(denominator, token_denominator),
        ref=(ref_log_probs, kl_coef, kl_estimator),
        clip=(clip_epsilon, clip_epsilon_high, dual_clip),
        bonus=(entropies, ent_coef),
        count_empty=count_empty,
    )
