"""Floor 1: families of action distributions, each one a record of pure functions.

`categorical`, `multi_categorical`, `diagonal_gaussian` and `tanh_gaussian` are instances of
`jaxpg.types.Distribution`: no classes, no state, and the parameters ``p`` are plain arrays that
can be stacked along time, sliced into minibatches and differentiated. Any number of batch axes
leads; where an action has several components (``D``), log-probability, entropy and KL are
**summed** over them, for these are the numbers of the joint distribution. Everything is in nats and
at least float32, whatever comes in.

>>> import jax.numpy as jnp
>>> p = (jnp.zeros((4, 3)), jnp.zeros(3))  # four standard normals in three dimensions
>>> diagonal_gaussian.entropy(p).shape
(4,)
>>> print(f"{diagonal_gaussian.entropy(p)[0]:.4f}")  # 3/2 (1 + log 2π)
4.2568
>>> print(f"{categorical.kl(jnp.array([0.0, 0.0]), jnp.array([1.0, 0.0])):.4f}")
0.1201
>>> logits = (jnp.zeros(2), jnp.zeros(4))
>>> print(f"{multi_categorical.log_prob(logits, jnp.array([1, 3])):.4f}")  # log 1/8
-2.0794
>>> u = jnp.array([10.0])  # in float32 tanh(10) is 1, and atanh of that is infinite
>>> print(f"{tanh_gaussian.log_prob((jnp.zeros(1), jnp.zeros(1)), u):.3f}")
-32.305
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxpg import _checks
from jaxpg.types import Distribution, Key

LOG_2PI = math.log(2.0 * math.pi)

# Equally spaced nodes against the normal density. The integrand is analytic, so the trapezoidal
# rule converges geometrically, and for wide distributions much faster than Gauss-Hermite, whose
# nodes spread out: with the same 33 points and a standard deviation of e, 2e-5 against 1e-3.
_NODES = np.linspace(-5.5, 5.5, 33)
_WEIGHTS = np.exp(-0.5 * _NODES**2) / np.sum(np.exp(-0.5 * _NODES**2))


def mask_logits(logits: ArrayLike, mask: ArrayLike) -> Array:
    """Forbids actions: their probability becomes exactly 0.

    zₐ ← zₐ if allowedₐ else the lowest finite float

    The lowest finite float rather than −∞, so that differences of masked logits, entropies and
    all gradients stay finite; ``exp(z − max z)`` is exactly 0 all the same. The gradient with
    respect to a forbidden logit is exactly 0. A row in which nothing is allowed has no
    distribution; it becomes the uniform one over all actions, with gradient 0, and no NaN.

    Args:
        logits: [..., A] unnormalised log-probabilities.
        mask: [..., A] bool or integer flags, True = allowed; same shape as `logits`.

    Returns:
        [..., A] logits, at least float32.

    Raises:
        ValueError: the shapes differ.
        TypeError: `mask` is a float array.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> z = mask_logits(jnp.array([1.0, 5.0, 1.0]), jnp.array([True, False, True]))
        >>> print(jax.nn.softmax(z))
        [0.5 0.  0.5]

    References:
        Huang & Ontañón, "A Closer Look at Invalid Action Masking in Policy Gradient Algorithms",
        arXiv:2006.14171, section 3.
    """
    logits = _checks.as_float("logits", logits)
    mask = _checks.as_flag("mask", mask)
    _checks.same_shape(logits=logits, mask=mask)
    return jnp.where(mask, logits, jnp.finfo(logits.dtype).min)


def entropy_from_logits(logits: ArrayLike) -> Array:
    """Entropy of a categorical distribution, in nats.

    H = −Σₐ pₐ log pₐ with p = softmax(z) and 0·log 0 = 0

    Args:
        logits: [..., A] unnormalised log-probabilities; −∞ forbids an action.

    Returns:
        [...] entropies, at least float32; value and gradient are finite.

    Raises:
        ValueError: `logits` has no axis, or the last one is empty.

    Example:
        >>> import jax.numpy as jnp
        >>> print(f"{entropy_from_logits(jnp.array([0.0, 0.0, -jnp.inf])):.4f}")
        0.6931

    References:
        Shannon, "A Mathematical Theory of Communication", 1948, section 6.
    """
    log_p = _log_probs("logits", logits)
    p = [jnp.exp(x) for x in log_p]
    return -_sum([p_i * jnp.where(p_i > 0, x, 0.0) for p_i, x in zip(p, log_p, strict=True)])


# --- categorical: p = logits [..., A], x int [...] ---------------------------------------------


# Few actions are taken apart into columns, and sums over them written out. XLA then computes whole
# losses in a few loops, where a reduction over a short last axis is a kernel of its own on a CPU
# (benchmarks/README.md).
_COLUMNS = 8


def _columns(x: Array) -> list[Array]:
    """``[..., A]`` as ``A`` arrays ``[..., 1]``; as itself where there are many."""
    if x.shape[-1] > _COLUMNS:
        return [x]
    return [x[..., i : i + 1] for i in range(x.shape[-1])]


def _sum(columns: list[Array]) -> Array:
    """Over actions: ``[...]``."""
    return functools.reduce(jnp.add, [jnp.sum(x, axis=-1) for x in columns])


def _log_probs(name: str, logits: ArrayLike) -> list[Array]:
    """Columns of log p."""
    logits = _checks.as_float(name, logits)
    if logits.ndim < 1 or logits.shape[-1] < 1:
        raise ValueError(f"{name} needs a last axis of at least one action, got {logits.shape}")
    columns = _columns(logits)
    largest = functools.reduce(jnp.maximum, [jnp.max(x, axis=-1) for x in columns])
    shifted = [x - jax.lax.stop_gradient(largest)[..., None] for x in columns]
    log_total = _log_sum_exp(shifted)[..., None]
    return [x - log_total for x in shifted]


@jax.custom_jvp
def _log_sum_exp(columns: list[Array]) -> Array:
    """log Σₐ exp zₐ of what cannot overflow, with the derivative Σₐ pₐ dzₐ.

    p = exp log p, which entropies need as well, takes the place of exp z / Σ exp z.
    """
    return jnp.log(_sum([jnp.exp(x) for x in columns]))


@_log_sum_exp.defjvp
def _log_sum_exp_jvp(primals: tuple[list[Array]], tangents: tuple[list[Array]]) -> tuple:
    (columns,), (tangent_columns,) = primals, tangents
    log_total = _log_sum_exp(columns)
    pairs = zip(columns, tangent_columns, strict=True)
    return log_total, _sum([jnp.exp(x - log_total[..., None]) * dx for x, dx in pairs])


def _actions(x: ArrayLike, shape: tuple[int, ...]) -> Array:
    x = _checks.as_array("x", x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"x must be integer actions, got dtype {x.dtype}")
    if x.shape != shape:
        raise ValueError(f"x must have shape {shape} for these logits, got {x.shape}")
    return x


def _categorical_noise(key: Key, p: ArrayLike) -> Array:
    return jax.random.gumbel(key, p.shape, jnp.promote_types(jnp.float32, p.dtype))


def _categorical_from_noise(p: ArrayLike, noise: Array) -> Array:
    return jnp.argmax(_checks.as_float("p", p) + noise, axis=-1).astype(jnp.int32)


def _categorical_sample(key: Key, p: ArrayLike) -> Array:
    logits = _checks.as_float("p", p)
    return _categorical_from_noise(logits, _categorical_noise(key, logits))


def _categorical_mode(p: ArrayLike) -> Array:
    return jnp.argmax(_checks.as_array("p", p), axis=-1).astype(jnp.int32)


def _identity(x: ArrayLike) -> Array:
    return jnp.asarray(x)


def _categorical_log_prob(p: ArrayLike, x: ArrayLike) -> Array:
    log_p = _log_probs("p", p)
    *rows, num_actions = jnp.shape(p)
    x = _actions(x, tuple(rows))
    # selected by comparison: the gradient of a gather is a scatter, slow where A is small
    actions = _columns(jnp.arange(num_actions))
    pairs = zip(actions, log_p, strict=True)
    score = _sum([jnp.where(x[..., None] == action, y, 0.0) for action, y in pairs])
    return jnp.where((x >= 0) & (x < num_actions), score, jnp.nan)


def _categorical_kl(p: ArrayLike, q: ArrayLike) -> Array:
    _checks.same_shape(p=jnp.asarray(p), q=jnp.asarray(q))
    log_p, log_q = _log_probs("p", p), _log_probs("q", q)
    prob = [jnp.exp(x) for x in log_p]
    terms = zip(prob, log_p, log_q, strict=True)
    return _sum([p_i * jnp.where(p_i > 0, x - y, 0.0) for p_i, x, y in terms])


categorical = Distribution(
    sample=_categorical_sample,
    mode=_categorical_mode,
    action=_identity,
    log_prob=_categorical_log_prob,
    entropy=entropy_from_logits,
    kl=_categorical_kl,
    noise=_categorical_noise,
    from_noise=_categorical_from_noise,
)
"""One choice among ``A``: ``p`` = logits ``[..., A]``, ``x`` int32 ``[...]``.

log π(a) = z_a − log Σ_b exp z_b;  H = −Σ p log p;  KL(p‖q) = Σ p (log p − log q)

A logit of −∞ (or of `mask_logits`) forbids an action: probability 0, with finite entropy, KL and
gradients. KL is +∞ where ``q`` forbids what ``p`` allows. An ``x`` outside ``0 … A-1`` scores NaN.
The mode is the first largest logit.
"""


# --- multi_categorical: p = tuple of logits [..., A_i], x int [..., D] -------------------------


def _parts(name: str, p: Sequence[ArrayLike]) -> tuple[ArrayLike, ...]:
    if not isinstance(p, tuple | list) or not p:
        raise ValueError(f"{name} must be a tuple of at least one array of logits, got {type(p)}")
    return tuple(p)


def _multi_categorical_noise(key: Key, p: Sequence[Array]) -> tuple[Array, ...]:
    keys = jax.random.split(key, len(p))
    return tuple(_categorical_noise(k, logits) for k, logits in zip(keys, p, strict=True))


def _multi_categorical_from_noise(p: Sequence[ArrayLike], noise: Sequence[Array]) -> Array:
    pairs = zip(_parts("p", p), noise, strict=True)
    return jnp.stack([_categorical_from_noise(*pair) for pair in pairs], axis=-1)


def _multi_categorical_sample(key: Key, p: Sequence[ArrayLike]) -> Array:
    parts = tuple(_checks.as_float("p", logits) for logits in _parts("p", p))
    return _multi_categorical_from_noise(parts, _multi_categorical_noise(key, parts))


def _multi_categorical_mode(p: Sequence[ArrayLike]) -> Array:
    return jnp.stack([_categorical_mode(logits) for logits in _parts("p", p)], axis=-1)


def _multi_categorical_log_prob(p: Sequence[ArrayLike], x: ArrayLike) -> Array:
    parts = _parts("p", p)
    x = _checks.as_array("x", x)
    if x.ndim < 1 or x.shape[-1] != len(parts):
        raise ValueError(f"x must end in {len(parts)} components, one per logits, got {x.shape}")
    scores = [_categorical_log_prob(logits, x[..., i]) for i, logits in enumerate(parts)]
    return sum(scores[1:], scores[0])


def _multi_categorical_entropy(p: Sequence[ArrayLike]) -> Array:
    entropies = [entropy_from_logits(logits) for logits in _parts("p", p)]
    return sum(entropies[1:], entropies[0])


def _multi_categorical_kl(p: Sequence[ArrayLike], q: Sequence[ArrayLike]) -> Array:
    p, q = _parts("p", p), _parts("q", q)
    if len(p) != len(q):
        raise ValueError(f"p has {len(p)} components and q has {len(q)}")
    kls = [_categorical_kl(p_i, q_i) for p_i, q_i in zip(p, q, strict=True)]
    return sum(kls[1:], kls[0])


multi_categorical = Distribution(
    sample=_multi_categorical_sample,
    mode=_multi_categorical_mode,
    action=_identity,
    log_prob=_multi_categorical_log_prob,
    entropy=_multi_categorical_entropy,
    kl=_multi_categorical_kl,
    noise=_multi_categorical_noise,
    from_noise=_multi_categorical_from_noise,
)
"""``D`` independent choices: ``p`` = tuple of logits ``[..., A_i]``, ``x`` int32 ``[..., D]``.

log π(a) = Σᵢ log πᵢ(aᵢ), and so for entropy and KL: sums over the components, never means.
"""


# --- diagonal_gaussian: p = (mean [..., D], log_std [..., D] or [D]), x [..., D] ----------------


def _mean_and_log_std(name: str, p: tuple[ArrayLike, ArrayLike]) -> tuple[Array, Array]:
    if not isinstance(p, tuple | list) or len(p) != 2:
        raise ValueError(f"{name} must be (mean, log_std), got {type(p)}")
    mean = _checks.as_float(f"{name}: mean", p[0])
    log_std = _checks.as_float(f"{name}: log_std", p[1])
    rows = log_std.shape[:-1]
    if (
        mean.ndim < 1
        or log_std.ndim < 1
        or log_std.shape[-1] != mean.shape[-1]
        or len(rows) >= mean.ndim
        or any(n not in (1, m) for n, m in zip(rows[::-1], mean.shape[-2::-1], strict=False))
    ):
        raise ValueError(
            f"{name}: log_std must be [D] or of the shape of the mean, {mean.shape}, "
            f"got {log_std.shape}"
        )
    return mean, log_std


def _like_mean(x: ArrayLike, mean: Array) -> Array:
    x = _checks.as_float("x", x)
    if x.shape != mean.shape:
        raise ValueError(f"x must have the shape of the mean, {mean.shape}, got {x.shape}")
    return x


def _gaussian_noise(key: Key, p: tuple[Array, Array]) -> Array:
    mean = p[0]
    return jax.random.normal(key, mean.shape, jnp.promote_types(jnp.float32, mean.dtype))


def _gaussian_from_noise(p: tuple[ArrayLike, ArrayLike], noise: Array) -> Array:
    mean, log_std = _mean_and_log_std("p", p)
    return mean + jnp.exp(log_std) * noise


def _gaussian_sample(key: Key, p: tuple[ArrayLike, ArrayLike]) -> Array:
    parameters = _mean_and_log_std("p", p)
    return _gaussian_from_noise(parameters, _gaussian_noise(key, parameters))


def _gaussian_mode(p: tuple[ArrayLike, ArrayLike]) -> Array:
    return _mean_and_log_std("p", p)[0]


def _gaussian_log_prob(p: tuple[ArrayLike, ArrayLike], x: ArrayLike) -> Array:
    mean, log_std = _mean_and_log_std("p", p)
    z = (_like_mean(x, mean) - mean) * jnp.exp(-log_std)
    # log_std is summed at its own shape: once, not once a row, where all rows share it
    return (
        -0.5 * jnp.sum(z * z, axis=-1) - jnp.sum(log_std, axis=-1) - 0.5 * LOG_2PI * mean.shape[-1]
    )


def _gaussian_entropy(p: tuple[ArrayLike, ArrayLike]) -> Array:
    mean, log_std = _mean_and_log_std("p", p)
    entropy = jnp.sum(log_std, axis=-1) + 0.5 * (1.0 + LOG_2PI) * mean.shape[-1]
    return jnp.broadcast_to(entropy, mean.shape[:-1])


def _gaussian_kl(p: tuple[ArrayLike, ArrayLike], q: tuple[ArrayLike, ArrayLike]) -> Array:
    mean_p, log_std_p = _mean_and_log_std("p", p)
    mean_q, log_std_q = _mean_and_log_std("q", q)
    _checks.same_shape(p_mean=mean_p, q_mean=mean_q)
    log_ratio = 2.0 * (log_std_p - log_std_q)
    z = (mean_p - mean_q) * jnp.exp(-log_std_q)
    # r − 1 − log r by expm1: exactly 0 for equal ones, and no cancellation near them
    return 0.5 * jnp.sum(z * z + jnp.expm1(log_ratio) - log_ratio, axis=-1)


diagonal_gaussian = Distribution(
    sample=_gaussian_sample,
    mode=_gaussian_mode,
    action=_identity,
    log_prob=_gaussian_log_prob,
    entropy=_gaussian_entropy,
    kl=_gaussian_kl,
    noise=_gaussian_noise,
    from_noise=_gaussian_from_noise,
)
"""Independent normals: ``p`` = (mean [..., D], log_std [..., D] or [D]), ``x`` [..., D].

log π(x) = −½ Σᵢ ((xᵢ − μᵢ)/σᵢ)² − Σᵢ log σᵢ − ½ D log 2π;  H = Σᵢ log σᵢ + ½ D (1 + log 2π)
KL(p‖q) = ½ Σᵢ [((μpᵢ − μqᵢ)/σqᵢ)² + rᵢ − 1 − log rᵢ],  r = (σp/σq)², exactly 0 when p = q
"""


# --- tanh_gaussian: the same p, x = u before tanh -----------------------------------------------


def _log_det_tanh(u: Array) -> Array:
    """log |d tanh(u)/du| = log(1 − tanh²u), finite where tanh(u) rounds to 1."""
    return 2.0 * (math.log(2.0) - u - jax.nn.softplus(-2.0 * u))


def _tanh_action(x: ArrayLike) -> Array:
    return jnp.tanh(_checks.as_float("x", x))


def _tanh_gaussian_log_prob(p: tuple[ArrayLike, ArrayLike], x: ArrayLike) -> Array:
    u = _checks.as_float("x", x)
    return _gaussian_log_prob(p, u) - jnp.sum(_log_det_tanh(u), axis=-1)


def _tanh_gaussian_entropy(p: tuple[ArrayLike, ArrayLike]) -> Array:
    mean, log_std = _mean_and_log_std("p", p)
    nodes, weights = (jnp.asarray(a, mean.dtype) for a in (_NODES, _WEIGHTS))
    u = mean[..., None] + jnp.exp(log_std)[..., None] * nodes
    expected = jnp.sum(_log_det_tanh(u) * weights, axis=(-2, -1))
    return _gaussian_entropy((mean, log_std)) + expected


tanh_gaussian = Distribution(
    sample=_gaussian_sample,
    mode=_gaussian_mode,
    action=_tanh_action,
    log_prob=_tanh_gaussian_log_prob,
    entropy=_tanh_gaussian_entropy,
    kl=_gaussian_kl,
    noise=_gaussian_noise,
    from_noise=_gaussian_from_noise,
)
"""A normal squashed into (−1, 1): ``p`` as in `diagonal_gaussian`, action = tanh(u), ``x`` = u.

log π(tanh u) = log N(u; μ, σ) − Σᵢ 2 (log 2 − uᵢ − softplus(−2 uᵢ))
H = H[N(μ, σ)] + Σᵢ E[log(1 − tanh² uᵢ)];  KL(p‖q) = KL of the two normals (tanh is invertible)

``x`` is the sample *before* tanh: keep it in the trajectory, for atanh of a stored action is
infinite as soon as tanh rounds to 1 (float32: |u| > 9). The expectation in the entropy is a
trapezoidal rule of 33 nodes: off by less than 5e-5 a component up to a standard deviation of e,
2e-3 at 4.5. ``mode`` is u = μ, so its action tanh(μ) is the median, not the highest density (which
runs to the edges once σ is large).

References: Haarnoja et al., "Soft Actor-Critic", arXiv:1801.01290, appendix C, equation 21; the
stable form of its correction is this softplus one, without a constant inside the logarithm.
"""
