"""Floor 1: policy and value losses per element, to be minimised, without a mean.

Reduce them with `jaxpg.reductions`, or take a whole loss from `jaxpg.objectives`. Notation:
ρ = π(a)/π_old(a) = exp(log_probs − old_log_probs), A the advantage, sg stop_gradient.

Every loss takes ``mask=None`` (1 = counts) and is 0 under it. Inputs are cleaned under the mask
before any arithmetic, so NaN and inf there reach neither values nor gradients. Where the mask lets
a huge log-ratio through, it is clipped at ± `jaxpg.kl.MAX_LOG_RATIO` = 20 before exp: the value is
finite and the gradient 0, never NaN.

Gradients flow into every argument. Advantages, targets and old log-probabilities are constants to a
policy gradient: the caller stops their gradients, where a reader sees it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxpg._checks import (
    as_array,
    as_float,
    as_mask,
    in_range,
    is_concrete,
    masked_floats,
    normalize_axis,
    scalar,
)
from jaxpg.kl import ratio_of


def policy_gradient_loss(
    log_probs: ArrayLike, advantages: ArrayLike, mask: ArrayLike | None = None
) -> Array:
    """The loss whose gradient is the (negative) policy gradient.

    Formula::

        L = −A log π(a)

    Args:
        log_probs: ``[...]`` log-probabilities (nats) of the actions that were taken.
        advantages: ``[...]`` A, in units of return.
        mask: ``[...]`` bool or 0/1, 1 = counts; None is everything.

    Returns:
        ``[...]``, 0 under the mask. The value is no measure of progress, only its gradient matters.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if an argument is not an array of real numbers.

    Example:
        >>> print(policy_gradient_loss([-1.0, -0.5], [2.0, -1.0]))
        [ 2.  -0.5]

    References:
        Williams, Simple statistical gradient-following algorithms, Machine Learning 8, 1992;
        Sutton et al., Policy gradient methods for RL with function approximation, NIPS 1999, eq. 2.
    """
    (log_probs, advantages), _ = masked_floats(mask, log_probs=log_probs, advantages=advantages)
    return -advantages * log_probs


def importance_sampling_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
) -> Array:
    """The unclipped surrogate: the policy gradient on samples of another policy.

    Formula::

        L = −ρ A

    Args:
        log_probs: ``[...]`` log-probabilities (nats) under the policy being trained.
        old_log_probs: ``[...]`` of the same actions under the policy that took them.
        advantages: ``[...]`` A, in units of return.
        mask: ``[...]`` bool or 0/1, 1 = counts; None is everything.

    Returns:
        ``[...]``, 0 under the mask.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if an argument is not an array of real numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> print(jnp.round(importance_sampling_loss([-1.0], [-1.5], [2.0]), 4))
        [-3.2974]

    References:
        Schulman et al., Trust Region Policy Optimization, arXiv 1502.05477, eq. 14.
    """
    (log_probs, old_log_probs, advantages), _ = masked_floats(
        mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    return -ratio_of(log_probs - old_log_probs) * advantages


def clipped_surrogate_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    clip_epsilon: ArrayLike = 0.2,
    clip_epsilon_high: ArrayLike | None = None,
    dual_clip: ArrayLike | None = None,
) -> Array:
    """The clipped surrogate of PPO, GRPO and DAPO, with one or two bounds and an optional third.

    Formula::

        L = −min(ρ A, clip(ρ, 1 − ε, 1 + ε_high) A)
        L = min(L, −c A)   where A < 0, with dual_clip = c

    The gradient by log π is −ρ A where the first term is the minimum, else 0: it stops at
    ρ > 1 + ε_high for A > 0 and at ρ < 1 − ε for A < 0. At ρ = 1 it is the policy gradient's.
    Without `dual_clip`, A < 0 with a large ρ is unbounded.

    Args:
        log_probs: ``[...]`` log-probabilities (nats) under the policy being trained.
        old_log_probs: ``[...]`` of the same actions under the policy that took them.
        advantages: ``[...]`` A.
        mask: ``[...]`` bool or 0/1, 1 = counts; None is everything.
        clip_epsilon: scalar ε ≥ 0, an offset from ratio 1.
        clip_epsilon_high: scalar ε_high ≥ 0, the upper offset from 1; None takes ε.
        dual_clip: scalar c > 1, a cap on the ratio for negative advantages; None is off.

    Returns:
        ``[...]``, 0 under the mask.

    Raises:
        ValueError: if the shapes differ, an ε is negative, or ``dual_clip <= 1``.
        TypeError: if an argument is not an array of real numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> log_ratios = jnp.log(jnp.array([1.5, 1.125, 0.5]))
        >>> loss = clipped_surrogate_loss(log_ratios, jnp.zeros(3), jnp.ones(3), clip_epsilon=0.25)
        >>> print(jnp.round(loss, 3))
        [-1.25  -1.125 -0.5  ]

    References:
        Schulman et al., Proximal Policy Optimization Algorithms, arXiv 1707.06347, eq. 7; two
        bounds: Yu et al., DAPO, arXiv 2503.14476, eq. 10; dual clip: Ye et al., Mastering Complex
        Control in MOBA Games, arXiv 1912.09729, section "Dual-clip PPO".
    """
    (log_probs, old_log_probs, advantages), _ = masked_floats(
        mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    low, high = clip_bounds(clip_epsilon, clip_epsilon_high, log_probs.dtype)
    return clip_surrogate(ratio_of(log_probs - old_log_probs), advantages, low, high, dual_clip)


def cispo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    max_ratio: ArrayLike,
    min_ratio: ArrayLike = 0.0,
) -> Array:
    """The policy gradient with a clipped, constant importance weight (CISPO).

    Formula::

        L = −sg(clip(ρ, min_ratio, max_ratio)) A log π(a)

    Unlike the clipped surrogate, no token loses its gradient: the weight is capped, not the loss.

    Args:
        log_probs: ``[...]`` log-probabilities (nats) under the policy being trained.
        old_log_probs: ``[...]`` of the same actions under the policy that took them.
        advantages: ``[...]`` A.
        mask: ``[...]`` bool or 0/1, 1 = counts; None is everything.
        max_ratio: scalar > 0, a cap on the ratio itself (not an offset from 1): TRL's
            ``epsilon_high``, verl's and open-instruct's 1 + clip_high.
        min_ratio: scalar ≥ 0, the floor of the ratio; 0 is none, verl has 1 − clip_low.

    Returns:
        ``[...]``, 0 under the mask.

    Raises:
        ValueError: if the shapes differ, or not 0 ≤ min_ratio ≤ max_ratio.
        TypeError: if an argument is not an array of real numbers.

    Example:
        The whole loss of the paper is the token mean over the batch:

        >>> import jax.numpy as jnp
        >>> from jaxpg.reductions import token_mean
        >>> log_probs, advantages = jnp.array([[-2.0, -1.0]]), jnp.ones((1, 2))
        >>> old_log_probs = log_probs - jnp.log(6.0)  # a ratio of 6
        >>> per_token = cispo_loss(log_probs, old_log_probs, advantages, max_ratio=5.0)
        >>> print(per_token, token_mean(per_token))
        [[10.  5.]] 7.5

    References:
        MiniMax, MiniMax-M1, arXiv 2506.13585, eq. 4-5. The paper keeps no lower bound.
    """
    (log_probs, old_log_probs, advantages), _ = masked_floats(
        mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    low, high = _weight_bounds("min_ratio", min_ratio, "max_ratio", max_ratio, log_probs.dtype)
    weights = jax.lax.stop_gradient(jnp.clip(ratio_of(log_probs - old_log_probs), low, high))
    return -weights * advantages * log_probs


def soft_gated_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    temperature: ArrayLike = 1.0,
    temperature_negative: ArrayLike = 1.05,
) -> Array:
    """A sigmoid gate in place of the clip (SAPO): the gradient fades out, it is not cut off.

    Formula::

        L = −(4/τ) σ(τ (ρ − 1)) A,   τ = temperature where A > 0, else temperature_negative

    At ρ = 1 the gradient is the policy gradient's.

    Args:
        log_probs: ``[...]`` log-probabilities (nats) under the policy being trained.
        old_log_probs: ``[...]`` of the same actions under the policy that took them.
        advantages: ``[...]`` A.
        mask: ``[...]`` bool or 0/1, 1 = counts; None is everything.
        temperature: scalar τ > 0 for positive advantages; larger fades faster.
        temperature_negative: scalar τ > 0 for the others.

    Returns:
        ``[...]``, 0 under the mask. At ρ = 1 it is −2A/τ, not −A: only the gradient is scaled.

    Raises:
        ValueError: if the shapes differ, or a temperature is not positive.
        TypeError: if an argument is not an array of real numbers.

    Example:
        >>> import jax
        >>> print(jax.grad(soft_gated_loss)(-1.0, -1.0, 3.0))
        -3.0

    References:
        Gao et al., Soft Adaptive Policy Optimization, arXiv 2511.20347; the paper reduces it with
        `sequence_mean`.
    """
    in_range("temperature", temperature, 0, open_low=True)
    in_range("temperature_negative", temperature_negative, 0, open_low=True)
    (log_probs, old_log_probs, advantages), _ = masked_floats(
        mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    positive = scalar("temperature", temperature, log_probs.dtype)
    negative = scalar("temperature_negative", temperature_negative, log_probs.dtype)
    tau = jnp.where(advantages > 0, positive, negative)
    gate = jax.nn.sigmoid(tau * (ratio_of(log_probs - old_log_probs) - 1))
    return -4 / tau * gate * advantages


def sequence_clipped_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    axis: int = -1,
    length_normalize: bool = True,
    clip_epsilon: ArrayLike = 3e-4,
    clip_epsilon_high: ArrayLike | None = None,
    dual_clip: ArrayLike | None = None,
) -> Array:
    """The clipped surrogate with one ratio per sequence: GSPO's, or the whole sequence's.

    Formula::

        s = exp((1/n) Σ_t (log π − log π_old))     length_normalize: the geometric mean (GSPO)
        s = exp(Σ_t (log π − log π_old))           else: of the whole sequence's probability (RLOO)
        L = −min(s A, clip(s, 1 − ε, 1 + ε_high) A)

    over the n valid tokens. With an advantage per token, the token form, whose value is
    the mean over the tokens of −min(s A_t, clip(s) A_t), and whose gradient by each token's log π
    is that of the formula above with the token's own A_t. The two forms agree, in value and
    gradient, where A is the same along the sequence.

    Args:
        log_probs: ``[..., T]`` log-probabilities (nats) under the policy being trained.
        old_log_probs: ``[..., T]`` of the same tokens under the policy that drew them.
        advantages: ``[...]`` without `axis`, one per sequence; or ``[..., T]``, one per token.
        mask: ``[..., T]`` bool or 0/1, 1 = counts; None is everything.
        axis: the axis of time.
        length_normalize: the geometric mean of the token ratios rather than their product.
        clip_epsilon: scalar ε ≥ 0, an offset from ratio 1. The default suits the geometric mean,
            which moves far less than a token's ratio; take 0.2 with ``length_normalize=False``.
        clip_epsilon_high: scalar ε_high ≥ 0, the upper offset from 1; None takes ε.
        dual_clip: scalar c > 1, a cap on the ratio for negative advantages; None is off.

    Returns:
        ``[...]`` without `axis`; 0 for a sequence without a valid token.

    Raises:
        ValueError: if shapes do not fit, `axis` does not exist, an ε is negative, or
            ``dual_clip <= 1``.
        TypeError: if an argument is not an array of real numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> log_probs, old_log_probs = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.1, -1.3]])
        >>> loss = sequence_clipped_loss(log_probs, old_log_probs, [1.0], clip_epsilon=0.5)
        >>> print(jnp.round(loss, 4))  # -exp(0.2)
        [-1.2214]

    References:
        Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071, eq. 5-7 (GSPO), eq. 13
        (the token form); Ahmadian et al., Back to Basics, arXiv 2402.14740 (whole sequences; the
        clip is TRL's). Deviation: the logarithm of s is clipped at ± 20.
    """
    log_probs, old_log_probs, advantages, mask, axis, per_token = _sequence_inputs(
        log_probs, old_log_probs, advantages, mask, axis
    )
    low, high = clip_bounds(clip_epsilon, clip_epsilon_high, log_probs.dtype)
    log_s, length = sequence_log_ratios(log_probs - old_log_probs, mask, axis, length_normalize)
    if not per_token:
        return clip_surrogate(ratio_of(log_s), advantages, low, high, dual_clip)
    # Each token carries the gradient for itself: log s as a constant, plus a zero whose derivative
    # by log π_t is 1 (n for the product), so that the mean over tokens has that of s A_t.
    own = log_probs - jax.lax.stop_gradient(log_probs)
    if not length_normalize:
        own = own * jnp.expand_dims(length, axis)
    log_s = jnp.expand_dims(jax.lax.stop_gradient(log_s), axis) + own
    losses = clip_surrogate(ratio_of(log_s), advantages, low, high, dual_clip)
    return jnp.sum(losses, axis=axis) / length


def geometric_mean_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    axis: int = -1,
    max_log_ratio: ArrayLike = 0.4,
) -> Array:
    """The geometric mean of token ratios, each clipped on the side that would help (GMPO).

    Formula::

        L = −A exp((1/n) Σ_t l_t),   l_t = min(log ρ_t, c) if A > 0 else max(log ρ_t, −c)

    over the n valid tokens: `sequence_clipped_loss` with the clip inside the mean.

    Args:
        log_probs: ``[..., T]`` log-probabilities (nats) under the policy being trained.
        old_log_probs: ``[..., T]`` of the same tokens under the policy that drew them.
        advantages: ``[...]`` without `axis`, one per sequence; or ``[..., T]``: then each token is
            clipped by the sign of its own, and A is the mean over the valid ones.
        mask: ``[..., T]`` bool or 0/1, 1 = counts; None is everything.
        axis: the axis of time.
        max_log_ratio: scalar c ≥ 0, the bound on the *log*-ratio, nats.

    Returns:
        ``[...]`` without `axis`; 0 for a sequence without a valid token.

    Raises:
        ValueError: if shapes do not fit, `axis` does not exist, or `max_log_ratio` is negative.
        TypeError: if an argument is not an array of real numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> log_probs, old_log_probs = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.2, -2.0]])
        >>> print(jnp.round(geometric_mean_loss(log_probs, old_log_probs, [1.0]), 4))  # -exp(0.3)
        [-1.3499]

    References:
        Zhao et al., Geometric-Mean Policy Optimization, arXiv 2507.20673, section 3; c = 0.4 there.
        Deviation: the mean of l is clipped at ± 20 before exp.
    """
    in_range("max_log_ratio", max_log_ratio, 0)
    log_probs, old_log_probs, advantages, mask, axis, per_token = _sequence_inputs(
        log_probs, old_log_probs, advantages, mask, axis
    )
    bound = scalar("max_log_ratio", max_log_ratio, log_probs.dtype)
    log_ratios = log_probs - old_log_probs
    positive = (advantages if per_token else jnp.expand_dims(advantages, axis)) > 0
    helped = jnp.where(positive, log_ratios > bound, log_ratios < -bound)
    log_ratios = jnp.where(helped, jnp.where(positive, bound, -bound), log_ratios)
    mean_log_ratios, length = sequence_log_ratios(log_ratios, mask, axis, True)
    if per_token:
        advantages = jnp.sum(advantages, axis=axis) / length
    return -ratio_of(mean_log_ratios) * advantages


def squared_value_loss(
    values: ArrayLike, targets: ArrayLike, mask: ArrayLike | None = None
) -> Array:
    """Half the squared error of a value estimate.

    Formula::

        L = ½ (v − G)²

    Args:
        values: ``[...]`` v, the critic's estimates.
        targets: ``[...]`` G, the returns they should match. Stop their gradient if they were
            bootstrapped from the same critic.
        mask: ``[...]`` bool or 0/1, 1 = counts; None is everything.

    Returns:
        ``[...]``, 0 under the mask.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if an argument is not an array of real numbers.

    Example:
        >>> print(squared_value_loss([1.0, 2.0], [3.0, 2.0]))
        [2. 0.]

    References:
        Sutton and Barto, Reinforcement Learning, 2nd edition, eq. 9.4-9.5.
    """
    (values, targets), _ = masked_floats(mask, values=values, targets=targets)
    return 0.5 * jnp.square(values - targets)


def clipped_value_loss(
    values: ArrayLike,
    old_values: ArrayLike,
    targets: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    clip_epsilon: ArrayLike,
) -> Array:
    """The larger of two squared errors: the estimate's, and that of its clipped change.

    Formula::

        L = ½ max((v − G)², (v_old + clip(v − v_old, −ε, ε) − G)²)

    ε is in units of the *value*, not of a probability ratio: 0.2 for returns of 100 stops learning
    after the first step away from the old value (gradient 0). Only use it with scaled returns.

    Args:
        values: ``[...]`` v, the critic's estimates.
        old_values: ``[...]`` v_old, the estimates when the data was collected.
        targets: ``[...]`` G, the returns they should match.
        mask: ``[...]`` bool or 0/1, 1 = counts; None is everything.
        clip_epsilon: scalar ε ≥ 0, in units of the value.

    Returns:
        ``[...]``, 0 under the mask.

    Raises:
        ValueError: if the shapes differ, or `clip_epsilon` is negative.
        TypeError: if an argument is not an array of real numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> loss = clipped_value_loss([1.5, 3.5], [1.0, 1.0], [2.0, 2.0], clip_epsilon=0.2)
        >>> print(jnp.round(loss, 4))
        [0.32  1.125]

    References:
        In no paper's equations: OpenAI Baselines' PPO; Engstrom et al., Implementation Matters in
        Deep Policy Gradients, arXiv 2005.12729, section 3, item 1. Deviation: the factor ½.
    """
    in_range("clip_epsilon", clip_epsilon, 0)
    (values, old_values, targets), _ = masked_floats(
        mask, values=values, old_values=old_values, targets=targets
    )
    epsilon = scalar("clip_epsilon", clip_epsilon, values.dtype)
    plain = jnp.square(values - targets)
    clipped = jnp.square(old_values + jnp.clip(values - old_values, -epsilon, epsilon) - targets)
    return 0.5 * jnp.where(plain >= clipped, plain, clipped)


def truncated_importance_weights(
    old_log_probs: ArrayLike,
    sampler_log_probs: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    max_weight: ArrayLike,
    min_weight: ArrayLike = 0.0,
    zero_outside: bool = False,
) -> Array:
    """Weights per token that correct for a sampling engine whose policy is not quite π_old.

    Formula::

        w = clip(r, min_weight, max_weight),   r = exp(log π_old − log π_sampler)
        w = r where min_weight ≤ r ≤ max_weight, else 0      with zero_outside

    The whole losses take them as ``weights=``. They multiply the policy term only, and a token with
    weight 0 still counts in the denominator.

    Args:
        old_log_probs: ``[...]`` log-probabilities (nats) as the training code computes them.
        sampler_log_probs: ``[...]`` of the same tokens, as the sampling engine reported them.
        mask: ``[...]`` bool or 0/1, 1 = counts; None is everything.
        max_weight: scalar > 0, the largest weight (2 or 3 in common use).
        min_weight: scalar ≥ 0, the smallest.
        zero_outside: drops tokens outside the bounds in place of clipping their weight (IcePop).

    Returns:
        ``[...]`` weights, constants to the gradient; 0 under the mask.

    Raises:
        ValueError: if the shapes differ, or not 0 ≤ min_weight ≤ max_weight.
        TypeError: if an argument is not an array of real numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> old, sampler = jnp.log(jnp.array([0.2, 0.3])), jnp.log(jnp.array([0.4, 0.1]))
        >>> print(jnp.round(truncated_importance_weights(old, sampler, max_weight=2.0), 4))
        [0.5 2. ]
        >>> weights = truncated_importance_weights(old, sampler, max_weight=2.0, zero_outside=True)
        >>> print(jnp.round(weights, 4))
        [0.5 0. ]

    References:
        Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025
        (truncated); Ling Team, Every Step Evolves, arXiv 2510.18855 (IcePop: zero outside).
    """
    (old_log_probs, sampler_log_probs), mask = masked_floats(
        mask, old_log_probs=old_log_probs, sampler_log_probs=sampler_log_probs
    )
    low, high = _weight_bounds(
        "min_weight", min_weight, "max_weight", max_weight, old_log_probs.dtype
    )
    weights = _bounded_weights(old_log_probs - sampler_log_probs, low, high, zero_outside)
    return weights if mask is None else jnp.where(mask, weights, 0)


def sequence_importance_weights(
    old_log_probs: ArrayLike,
    sampler_log_probs: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    max_weight: ArrayLike,
    min_weight: ArrayLike = 0.0,
    zero_outside: bool = False,
    axis: int = -1,
    length_normalize: bool = False,
) -> Array:
    """One weight per sequence: `truncated_importance_weights` of the product of token ratios.

    Formula::

        r = exp(Σ_t (log π_old − log π_sampler))           the probability of the whole sequence
        r = exp((1/n) Σ_t (log π_old − log π_sampler))     with length_normalize: geometric mean

    The product is taken in log space. It is unbiased, but grows with the length: 100 tokens that
    differ by 0.012 each make 3.3. The geometric mean (1.012) does not, and suits a filter: as such
    take ``weights > 0`` of the result with ``zero_outside``.

    Args:
        old_log_probs: ``[..., T]`` log-probabilities (nats) as the training code computes them.
        sampler_log_probs: ``[..., T]`` of the same tokens, as the sampling engine reported them.
        mask: ``[..., T]`` bool or 0/1, 1 = counts; None is everything.
        max_weight: scalar > 0, the largest weight.
        min_weight: scalar ≥ 0, the smallest.
        zero_outside: drops sequences outside the bounds in place of clipping their weight.
        axis: the axis of time.
        length_normalize: the geometric mean of the token ratios rather than their product.

    Returns:
        ``[...]`` without `axis`: weights, constants to the gradient. A sequence without a valid
        token gets 0 (not exp(0) = 1).

    Raises:
        ValueError: if the shapes differ, `axis` does not exist, or not
            0 ≤ min_weight ≤ max_weight.
        TypeError: if an argument is not an array of real numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> old, sampler = jnp.full((1, 100), -1.0), jnp.full((1, 100), -1.012)
        >>> print(sequence_importance_weights(old, sampler, max_weight=3.0))
        [3.]
        >>> weights = sequence_importance_weights(
        ...     old, sampler, max_weight=3.0, length_normalize=True
        ... )
        >>> print(jnp.round(weights, 4))
        [1.0121]

    References:
        Liu et al., When Speed Kills Stability, 2025 (sequence-level truncation and masking).
    """
    (old_log_probs, sampler_log_probs), mask = masked_floats(
        mask, old_log_probs=old_log_probs, sampler_log_probs=sampler_log_probs
    )
    axis = normalize_axis("axis", axis, old_log_probs.ndim)
    low, high = _weight_bounds(
        "min_weight", min_weight, "max_weight", max_weight, old_log_probs.dtype
    )
    log_ratios, _ = sequence_log_ratios(
        old_log_probs - sampler_log_probs, mask, axis, length_normalize
    )
    weights = _bounded_weights(log_ratios, low, high, zero_outside)
    return weights if mask is None else jnp.where(jnp.any(mask, axis=axis), weights, 0)


def off_policy_sequence_mask(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    threshold: ArrayLike,
    axis: int = -1,
) -> Array:
    """False for sequences that are to be learnt *away* from, but that the policy has already left.

    Formula::

        keep = not (A < 0 and (1/n) Σ_t (log π_old − log π) > threshold)

    over the n valid tokens. The whole losses take it as ``weights=``: a dropped sequence keeps its
    KL term and its place in the denominator.

    Args:
        log_probs: ``[..., T]`` log-probabilities (nats) under the policy being trained.
        old_log_probs: ``[..., T]`` of the same tokens under the policy that drew them.
        advantages: ``[...]`` without `axis`, one per sequence; or ``[..., T]``, one per token.
        mask: ``[..., T]`` bool or 0/1, 1 = counts; None is everything.
        threshold: scalar δ, nats a token.
        axis: the axis of time.

    Returns:
        bool, in the shape of `advantages`, True = keep.

    Raises:
        ValueError: if shapes do not fit, `axis` does not exist, or `threshold` is NaN.
        TypeError: if an argument is not an array of real numbers.

    Example:
        >>> log_probs, old_log_probs = [[-3.0, -2.0], [-3.0, -2.0]], [[-1.0, -1.0], [-1.0, -1.0]]
        >>> print(off_policy_sequence_mask(log_probs, old_log_probs, [1.0, -1.0], threshold=1.0))
        [ True False]

    References:
        DeepSeek-AI, DeepSeek-V3.2, arXiv 2512.02556, eq. 8-9 (off-policy sequence masking).
    """
    in_range("threshold", threshold)
    log_probs, old_log_probs, advantages, mask, axis, per_token = _sequence_inputs(
        log_probs, old_log_probs, advantages, mask, axis
    )
    drift, _ = sequence_log_ratios(old_log_probs - log_probs, mask, axis, True)
    left = drift > scalar("threshold", threshold, drift.dtype)
    return ~((advantages < 0) & (jnp.expand_dims(left, axis) if per_token else left))


def token_log_probs(
    logits: ArrayLike,
    token_ids: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    temperature: ArrayLike = 1.0,
) -> Array:
    """Log-probabilities of given tokens under the distribution they were sampled from.

    Formula::

        log softmax(z / τ)[token]

    The temperature divides the logits, *inside* the softmax. ``logits[t]`` scores ``token_ids[t]``:
    a language model, whose logits at t are about token t + 1, needs ``logits[:, :-1]`` beside
    ``token_ids[:, 1:]``.

    Args:
        logits: ``[..., V]`` z; −inf forbids a token.
        token_ids: ``[...]`` integers in 0 … V−1. Others give NaN where the mask lets them through.
        mask: ``[...]`` bool or 0/1, 1 = counts; None is everything. Logits and ids under it may be
            anything (all −inf, NaN, −100).
        temperature: scalar τ > 0, the one that the tokens were sampled with.

    Returns:
        ``[...]`` nats, at least float32 whatever the logits are; 0 under the mask.

    Raises:
        ValueError: if `logits` without its last axis and `token_ids` differ in shape, or
            `temperature` is not positive.
        TypeError: if `token_ids` are not integers.

    Example:
        >>> import jax.numpy as jnp
        >>> logits = jnp.array([[2.0, 0.0], [1.0, -jnp.inf]])
        >>> print(jnp.round(token_log_probs(logits, jnp.array([0, 0]), temperature=0.5), 4))
        [-0.0181  0.    ]
    """
    in_range("temperature", temperature, 0, open_low=True)
    logits, ids = as_float("logits", logits), as_array("token_ids", token_ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"token_ids must be integers, got dtype {ids.dtype}")
    if logits.ndim < 1 or logits.shape[:-1] != ids.shape:
        raise ValueError(
            f"token_ids {ids.shape} must have the shape of logits {logits.shape} without the "
            "last axis"
        )
    mask = as_mask("mask", mask, ids.shape)
    if mask is not None:
        logits, ids = jnp.where(mask[..., None], logits, 0), jnp.where(mask, ids, 0)
    logits = logits / scalar("temperature", temperature, logits.dtype)
    # a negative index would wrap around and score another token: out of range is NaN on both sides
    ids = jnp.where(ids < 0, logits.shape[-1], ids)
    chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1, mode="fill")[..., 0]
    log_probs = chosen - jax.nn.logsumexp(logits, axis=-1)
    return log_probs if mask is None else jnp.where(mask, log_probs, 0)


def clip_bounds(
    clip_epsilon: ArrayLike, clip_epsilon_high: ArrayLike | None, dtype: jnp.dtype
) -> tuple[Array, Array]:
    """The bounds on the ratio, ``(1 − ε, 1 + ε_high)``, checked; None takes ε."""
    in_range("clip_epsilon", clip_epsilon, 0)
    in_range("clip_epsilon_high", clip_epsilon_high, 0)
    if clip_epsilon_high is None:
        clip_epsilon_high = clip_epsilon
    low = 1 - scalar("clip_epsilon", clip_epsilon, dtype)
    return low, 1 + scalar("clip_epsilon_high", clip_epsilon_high, dtype)


def clip_surrogate(
    ratios: Array, advantages: Array, low: Array, high: Array, dual_clip: ArrayLike | None
) -> Array:
    """−min(ρ A, clip(ρ) A), from below −c A where A < 0, element by element."""
    plain, clipped = -ratios * advantages, -jnp.clip(ratios, low, high) * advantages
    # Not jnp.maximum: where both are equal it would halve the gradient between the two.
    loss = jnp.where(plain >= clipped, plain, clipped)
    if dual_clip is None:
        return loss
    in_range("dual_clip", dual_clip, 1, open_low=True)
    bound = -scalar("dual_clip", dual_clip, ratios.dtype) * advantages
    return jnp.where((advantages < 0) & (loss > bound), bound, loss)


def broadcast_per_token(name: str, x: ArrayLike, shape: Sequence[int], axis: int) -> Array:
    """`x` of `shape`, or of `shape` without `axis` and then repeated along it."""
    array = as_float(name, x)
    without = tuple(n for i, n in enumerate(shape) if i != axis)
    if array.shape == without:
        return jnp.broadcast_to(jnp.expand_dims(array, axis), shape)
    if array.shape != tuple(shape):
        raise ValueError(
            f"{name} has shape {array.shape}, expected {tuple(shape)}, or {without} for one "
            "number per sequence"
        )
    return array


def sequence_log_ratios(
    log_ratios: Array, mask: Array | None, axis: int, length_normalize: bool
) -> tuple[Array, Array]:
    """The sum (or mean over valid tokens) of cleaned log-ratios, and max(valid tokens, 1)."""
    total = jnp.sum(log_ratios, axis=axis)
    if mask is None:
        length = jnp.full_like(total, max(log_ratios.shape[axis], 1))
    else:
        count = jnp.sum(mask, axis=axis, dtype=jnp.int32)
        length = jnp.maximum(count, 1).astype(total.dtype)
    return (total / length if length_normalize else total), length


def _sequence_inputs(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None,
    axis: int,
) -> tuple[Array, Array, Array, Array | None, int, bool]:
    """Cleaned inputs of a sequence loss; advantages stay per sequence unless given per token."""
    log_probs, advantages = as_float("log_probs", log_probs), as_float("advantages", advantages)
    axis = normalize_axis("axis", axis, log_probs.ndim)
    per_token = advantages.ndim == log_probs.ndim
    repeated = broadcast_per_token("advantages", advantages, log_probs.shape, axis)
    (log_probs, old_log_probs, repeated), mask = masked_floats(
        mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=repeated
    )
    if per_token:
        advantages = repeated
    else:
        advantages = advantages.astype(repeated.dtype)
        if mask is not None:
            advantages = jnp.where(jnp.any(mask, axis=axis), advantages, 0)
    return log_probs, old_log_probs, advantages, mask, axis, per_token


def _weight_bounds(
    low_name: str, low: ArrayLike, high_name: str, high: ArrayLike, dtype: jnp.dtype
) -> tuple[Array, Array]:
    in_range(low_name, low, 0)
    in_range(high_name, high, 0, open_low=True)
    if is_concrete(low) and is_concrete(high) and low > high:
        raise ValueError(f"{low_name}={low} is larger than {high_name}={high}")
    return scalar(low_name, low, dtype), scalar(high_name, high, dtype)


def _bounded_weights(log_ratios: Array, low: Array, high: Array, zero_outside: bool) -> Array:
    ratios = jax.lax.stop_gradient(ratio_of(log_ratios))
    if zero_outside:
        return jnp.where((ratios >= low) & (ratios <= high), ratios, 0)
    return jnp.clip(ratios, low, high)
