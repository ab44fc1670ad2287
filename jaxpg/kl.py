"""Floor 1: estimators of the KL divergence from log-probabilities of samples, per element.

The first argument is the log-probability under the policy **that drew the samples**, so
``kl_k3(a, b)`` estimates KL(a‖b). A penalty towards a reference policy on samples of the current
one is ``kl_k3(log_probs, ref_log_probs)``; PPO's approximate KL of an update, on samples of the old
policy, is ``kl_k3(old_log_probs, log_probs)``.

With d = log π(a) − log π_ref(a) and a ~ π. What the estimators give as a *value* and what their
*gradient* by π's parameters gives are two questions:

===========================  ==============  =================  ==========================
estimator                    value           mean of the value  mean of the gradient
===========================  ==============  =================  ==========================
`kl_k1`                      d               KL(π‖π_ref)        0: useless as a loss
`kl_k2`                      ½ d²            biased             that of KL(π‖π_ref)
`kl_k3`                      e^(−d) + d − 1  KL(π‖π_ref), ≥ 0   that of KL(π_ref‖π)
`kl_k3_straight_through`     as k3           KL(π‖π_ref), ≥ 0   that of KL(π‖π_ref)
`kl_k3_corrected`            ρ k3            KL(π‖π_ref)        that of KL(π‖π_ref)
===========================  ==============  =================  ==========================

The last one also holds for samples of an older policy, ρ = π/π_old. As a constant inside a reward
only `kl_k1` has the right gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxpg._checks import as_float, in_range, masked_floats, same_shape, scalar

MAX_LOG_RATIO = 20.0
"""Log-ratios are clipped to ± this before `exp`, here and in `jaxpg.losses`.

float32 overflows at exp(88.7), and inf − inf or 0 × inf then is NaN in the value or the gradient.
exp(20) = 4.85e8 is far outside any trust region, and the product of two such ratios still fits.
Outside the interval the gradient is exactly 0. One number for the whole package, as verl, OpenRLHF
and tunix have it.
"""


def ratio_of(log_ratios: Array) -> Array:
    """exp(log_ratios) that cannot overflow: see `MAX_LOG_RATIO`."""
    return jnp.exp(jnp.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def kl_k1(log_probs: ArrayLike, ref_log_probs: ArrayLike, mask: ArrayLike | None = None) -> Array:
    """The plain estimator of KL(π‖π_ref): unbiased, of either sign.

    Formula::

        k1 = d,   d = log π(a) − log π_ref(a),   a ~ π

    Its gradient by log π is 1 everywhere, whose expectation is 0: as a loss it does nothing on
    policy. Use it inside rewards, or as a metric.

    Args:
        log_probs: ``[...]`` log-probabilities (nats) under the policy that drew the samples.
        ref_log_probs: ``[...]`` of the same samples under the other policy.
        mask: ``[...]`` bool or 0/1, 1 = counts; None is everything.

    Returns:
        ``[...]`` nats, 0 under the mask.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if an argument is not an array of real numbers.

    Example:
        >>> print(kl_k1([-1.0, -0.5], [-1.5, -0.5]))
        [0.5 0. ]

    References:
        Schulman, Approximating KL Divergence, 2020 (joschu.net/blog/kl-approx.html), k1.
    """
    (log_probs, ref_log_probs), _ = masked_floats(
        mask, log_probs=log_probs, ref_log_probs=ref_log_probs
    )
    return log_probs - ref_log_probs


def kl_k2(log_probs: ArrayLike, ref_log_probs: ArrayLike, mask: ArrayLike | None = None) -> Array:
    """Half the squared log-ratio: biased as a value, exact in its gradient.

    Formula::

        k2 = ½ d²,   d = log π(a) − log π_ref(a),   a ~ π

    Its gradient by log π is d, whose expectation on policy is the gradient of KL(π‖π_ref).

    Args:
        log_probs: ``[...]`` log-probabilities (nats) under the policy that drew the samples.
        ref_log_probs: ``[...]`` of the same samples under the other policy.
        mask: ``[...]`` bool or 0/1, 1 = counts; None is everything.

    Returns:
        ``[...]`` nats, at least 0, and 0 under the mask.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if an argument is not an array of real numbers.

    Example:
        >>> print(kl_k2([-1.0, -0.5], [-1.5, -0.5]))
        [0.125 0.   ]

    References:
        Schulman, Approximating KL Divergence, 2020 (joschu.net/blog/kl-approx.html), k2.
    """
    return 0.5 * jnp.square(kl_k1(log_probs, ref_log_probs, mask))


def kl_k3(log_probs: ArrayLike, ref_log_probs: ArrayLike, mask: ArrayLike | None = None) -> Array:
    """The non-negative unbiased estimator of KL(π‖π_ref).

    Formula::

        k3 = exp(−d) + d − 1,   d = clip(log π(a) − log π_ref(a), −20, 20),   a ~ π

    Its gradient by log π is 1 − exp(−d), whose expectation on policy is the gradient of the *other*
    direction, KL(π_ref‖π); see the table at the top of this module.

    Args:
        log_probs: ``[...]`` log-probabilities (nats) under the policy that drew the samples.
        ref_log_probs: ``[...]`` of the same samples under the other policy.
        mask: ``[...]`` bool or 0/1, 1 = counts; None is everything.

    Returns:
        ``[...]`` nats, at least 0, and 0 under the mask. Finite for any finite input: d is clipped
        at ± `MAX_LOG_RATIO` first, and the gradient is 0 outside.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if an argument is not an array of real numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> print(jnp.round(kl_k3([-1.0, -0.5], [-1.5, -0.5]), 4))
        [0.1065 0.    ]

    References:
        Schulman, Approximating KL Divergence, 2020 (joschu.net/blog/kl-approx.html), k3; Shao et
        al., DeepSeekMath, arXiv 2402.03300, eq. 4. Deviation: the clip of d.
    """
    d = jnp.clip(kl_k1(log_probs, ref_log_probs, mask), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1 keeps the digits, and the sign, of values near 0: k3 of nearly equal policies is ½ d².
    return jnp.expm1(-d) + d


def kl_k3_straight_through(
    log_probs: ArrayLike, ref_log_probs: ArrayLike, mask: ArrayLike | None = None
) -> Array:
    """The value of `kl_k3` with the gradient of `kl_k2`.

    Formula::

        sg(k3) + k2 − sg(k2),   sg = stop_gradient

    Value: unbiased and non-negative. Gradient by log π: d, on policy that of KL(π‖π_ref). Known as
    "k3+" elsewhere.

    Args:
        log_probs: ``[...]`` log-probabilities (nats) under the policy that drew the samples.
        ref_log_probs: ``[...]`` of the same samples under the other policy.
        mask: ``[...]`` bool or 0/1, 1 = counts; None is everything.

    Returns:
        ``[...]`` nats, at least 0, and 0 under the mask.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if an argument is not an array of real numbers.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> value, grad = jax.value_and_grad(kl_k3_straight_through)(-1.0, -1.5)
        >>> print(jnp.round(value, 4), grad)
        0.1065 0.5

    References:
        Tang and Munos, On a few pitfalls in KL divergence gradient estimation for RL,
        arXiv 2506.09477 (the gradients of the estimators).
    """
    k2 = kl_k2(log_probs, ref_log_probs, mask)
    k3 = kl_k3(log_probs, ref_log_probs, mask)
    return jax.lax.stop_gradient(k3) + (k2 - jax.lax.stop_gradient(k2))


def kl_k3_corrected(
    log_probs: ArrayLike,
    ref_log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    mask: ArrayLike | None = None,
) -> Array:
    """`kl_k3` weighted with the importance ratio: unbiased on samples of an older policy.

    Formula::

        ρ k3,   ρ = π(a)/π_old(a),   a ~ π_old
        k3 = exp(−d) + d − 1,   d = log π(a) − log π_ref(a)

    The gradient flows through ρ too; by log π it is ρ d, whose expectation is the gradient of
    KL(π‖π_ref). On policy (ρ = 1) the value is that of `kl_k3` and the gradient that of `kl_k2`.

    Args:
        log_probs: ``[...]`` log-probabilities (nats) under the policy being trained.
        ref_log_probs: ``[...]`` of the same samples under the reference policy.
        old_log_probs: ``[...]`` under the policy that drew the samples; a constant to the gradient
            only if the caller makes it one.
        mask: ``[...]`` bool or 0/1, 1 = counts; None is everything.

    Returns:
        ``[...]`` nats, at least 0, and 0 under the mask. Both log-ratios are clipped at
        ± `MAX_LOG_RATIO`.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if an argument is not an array of real numbers.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> value, grad = jax.value_and_grad(kl_k3_corrected)(-1.0, -1.5, -1.0)
        >>> print(jnp.round(value, 4), grad)
        0.1065 0.5

    References:
        DeepSeek-AI, DeepSeek-V3.2, arXiv 2512.02556, eq. 7 (unbiased KL estimate).
    """
    (log_probs, ref_log_probs, old_log_probs), _ = masked_floats(
        mask, log_probs=log_probs, ref_log_probs=ref_log_probs, old_log_probs=old_log_probs
    )
    return ratio_of(log_probs - old_log_probs) * kl_k3(log_probs, ref_log_probs)


def adaptive_kl_coef(kl_coef: ArrayLike, kl: ArrayLike, *, target_kl: ArrayLike) -> Array:
    """The next coefficient of an adaptive KL penalty: halved, doubled or kept.

    Formula::

        β/2 if kl < target/1.5;   2β if kl > 1.5·target;   β otherwise (also at equality)

    Args:
        kl_coef: scalar (or any shape) β ≥ 0 of the update that has just been done.
        kl: mean KL (nats) of that update, of the same shape. NaN keeps β.
        target_kl: scalar d_targ > 0, nats.

    Returns:
        β of the next update, in the shape of `kl_coef`.

    Raises:
        ValueError: if `target_kl` is not positive, `kl_coef` is negative, or the shapes differ.

    Example:
        >>> print(adaptive_kl_coef(1.0, 0.02, target_kl=0.01))
        2.0

    References:
        Schulman et al., Proximal Policy Optimization Algorithms, arXiv 1707.06347, section 4.
    """
    in_range("kl_coef", kl_coef, 0)
    in_range("target_kl", target_kl, 0, open_low=True)
    kl_coef, kl = as_float("kl_coef", kl_coef), as_float("kl", kl)
    same_shape(kl_coef=kl_coef, kl=kl)
    target = scalar("target_kl", target_kl, kl.dtype)
    factor = jnp.where(kl < target / 1.5, 0.5, jnp.where(kl > target * 1.5, 2.0, 1.0))
    return kl_coef * factor.astype(kl_coef.dtype)
