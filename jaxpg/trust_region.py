"""Floor 3: natural-gradient steps inside a trust region, on any pytree of parameters.

Three parts that fit together: products with the Fisher matrix, which is never formed; the step of
a given quadratic KL along the natural gradient, by conjugate gradients; and a line search that
checks the true KL and the true improvement. None of them returns NaN: where there is no step to
take the parameters stay as they are and ``accepted`` is False.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxpg._checks import in_range, positive_int
from jaxpg.types import PyTree

MatVec = Callable[[PyTree], PyTree]
"""A symmetric linear map on pytrees of one structure."""


class NaturalStep(NamedTuple):
    """What `natural_step` found. `step` and `scale` are zero where `accepted` is False."""

    step: PyTree  # scale × direction, to be added to the parameters
    direction: PyTree  # s ≈ (F + damping I)⁻¹ g
    curvature: Array  # [] sᵀFs, without damping
    scale: Array  # [] √(2 max_kl / sᵀFs)
    expected_improvement: Array  # [] gᵀ step, the first-order gain
    accepted: Array  # [] bool


class LineSearch(NamedTuple):
    """What `backtracking_line_search` found; all zero but `num_trials` when nothing passed."""

    improvement: Array  # [] surrogate(new) − surrogate(old)
    kl: Array  # [] KL(old‖new), nats
    fraction: Array  # [] of the full step that was taken
    num_trials: Array  # [] int32, candidates evaluated


def fisher_operator(
    dist_params_fn: Callable[[PyTree], PyTree],
    kl_fn: Callable[[PyTree, PyTree], Array],
    params: PyTree,
) -> MatVec:
    """The map ``v ↦ F v`` with the Fisher matrix of a policy, averaged over the rows of a batch.

    F = 1/N Σᵢ Jᵢᵀ Hᵢ Jᵢ,  Jᵢ = ∂z(sᵢ)/∂θ,  Hᵢ = ∂²KL(z‖z')/∂z'² at z' = z

    where ``z`` are the distribution's parameters. That is the Hessian of the mean KL(old‖new) at
    the old parameters, without its second term, which vanishes there: positive semi-definite
    whatever the rounding. The network is linearised once; each product is then one tangent and one
    transposed pass.

    Args:
        dist_params_fn: ``params -> `` the distribution's parameters of a fixed batch, ``[N, …]``
            leaves of float dtype.
        kl_fn: ``(p, q) -> [N]``, such as ``Distribution.kl``.
        params: where F is taken, a pytree of float arrays.

    Returns:
        ``vector -> F vector``, both structured like `params`; float32 or wider.

    Example:
        >>> from jaxpg.distributions import categorical
        >>> logits = lambda w: w[None]
        >>> product = fisher_operator(logits, categorical.kl, jnp.zeros(2))
        >>> print(product(jnp.array([1.0, 0.0])))
        [ 0.25 -0.25]

    References:
        Schulman et al., Trust Region Policy Optimization, arXiv 1502.05477, appendix C.1.
    """
    dist_params, push = jax.linearize(dist_params_fn, params)
    pull = jax.linear_transpose(push, params)
    _, curve = jax.linearize(
        jax.grad(lambda new: jnp.mean(kl_fn(dist_params, new))),
        dist_params,
    )

    def product(vector: PyTree) -> PyTree:
        tangent = jax.tree.map(lambda v, p: jnp.asarray(v, jnp.asarray(p).dtype), vector, params)
        return _tree_float(pull(curve(push(tangent)))[0])

    return product


def fisher_vector_product(
    dist_params_fn: Callable[[PyTree], PyTree],
    kl_fn: Callable[[PyTree, PyTree], Array],
    params: PyTree,
    vector: PyTree,
    *,
    damping: ArrayLike = 0.0,
) -> PyTree:
    """One product ``(F + damping I) v``; for many with one matrix use `fisher_operator`.

    F = E_s[ ∇²_θ' KL(π_θ(·|s) ‖ π_θ'(·|s)) ] at θ' = θ

    Args:
        dist_params_fn: ``params -> `` the distribution's parameters of a fixed batch ``[N, …]``.
        kl_fn: ``(p, q) -> [N]``, such as ``Distribution.kl``.
        params: where F is taken.
        vector: structured like `params`.
        damping: multiple of the identity that is added, at least 0.

    Returns:
        A pytree like `params`, float32 or wider.

    Raises:
        ValueError: a negative damping.

    Example:
        >>> from jaxpg.distributions import categorical
        >>> print(fisher_vector_product(lambda w: w[None], categorical.kl, jnp.zeros(2),
        ...                             jnp.array([1.0, 0.0]), damping=1.0))
        [ 1.25 -0.25]

    References:
        Schulman et al., Trust Region Policy Optimization, arXiv 1502.05477, appendix C.1.
    """
    in_range("damping", damping, 0)
    return _damped(fisher_operator(dist_params_fn, kl_fn, params), damping)(vector)


def conjugate_gradient(
    matvec: MatVec,
    b: PyTree,
    *,
    num_iterations: int = 10,
    residual_tol: ArrayLike = 1e-6,
) -> PyTree:
    """Solves ``A x = b`` for a symmetric positive semi-definite A, from ``x = 0``.

    αₖ = rₖᵀrₖ / pₖᵀApₖ;  xₖ₊₁ = xₖ + αₖpₖ;  rₖ₊₁ = rₖ − αₖApₖ;  pₖ₊₁ = rₖ₊₁ + (|rₖ₊₁|²/|rₖ|²) pₖ

    It stops when ``|r| ≤ residual_tol |b|`` (a singular A in float32 drifts away when iterated
    past that), and at the last good iterate when ``pᵀAp`` is not positive or not finite. So
    ``b = 0`` gives 0, as does a `b` without curvature; neither divides 0 by 0.
    `jax.scipy.sparse.linalg.cg` lacks that second rule.

    Args:
        matvec: ``v -> A v`` on pytrees like `b`.
        b: right-hand side, a pytree of float arrays.
        num_iterations: upper bound on the iterations, static, at least 1.
        residual_tol: relative to the norm of `b`, at least 0.

    Returns:
        ``x``, a pytree like `b`, float32 or wider.

    Raises:
        ValueError: `num_iterations` below 1 or a negative `residual_tol`.

    Example:
        >>> A = jnp.array([[4.0, 1.0], [1.0, 3.0]])
        >>> print(conjugate_gradient(lambda v: A @ v, jnp.array([5.0, 4.0])).round(4))
        [1. 1.]

    References:
        Hestenes and Stiefel, Methods of Conjugate Gradients for Solving Linear Systems, 1952,
        eq. 3:1. Deviation: the stop without positive curvature.
    """
    positive_int("num_iterations", num_iterations)
    in_range("residual_tol", residual_tol, 0)
    b = _tree_float(b)
    squared = _dot(b, b)
    enough = jnp.asarray(residual_tol, squared.dtype) ** 2 * squared

    def going(state: tuple) -> Array:
        k, _, _, _, rr, curved = state
        return (k < num_iterations) & (rr > enough) & curved

    def body(state: tuple) -> tuple:
        k, x, r, p, rr, _ = state
        ap = _tree_float(matvec(p))
        pap = _dot(p, ap)
        curved = jnp.isfinite(pap) & (pap > 0)
        alpha = jnp.where(curved, rr / jnp.where(curved, pap, 1), 0)
        x, r = _axpy(alpha, p, x), _axpy(-alpha, ap, r)
        new_rr = _dot(r, r)
        p = _axpy(new_rr / rr, p, r)
        return k + 1, x, r, p, new_rr, curved

    zeros = jax.tree.map(jnp.zeros_like, b)
    start = (jnp.zeros((), jnp.int32), zeros, b, b, squared, jnp.asarray(True))
    # a matvec with NaN keeps alpha at 0 but not NaN out of the residual: x alone is used
    return jax.lax.while_loop(going, body, start)[1]


def natural_step(
    matvec: MatVec,
    gradient: PyTree,
    *,
    max_kl: ArrayLike,
    damping: ArrayLike = 0.0,
    num_iterations: int = 10,
    residual_tol: ArrayLike = 1e-6,
) -> NaturalStep:
    """The step along the natural gradient whose quadratic KL, ½ΔᵀFΔ, is `max_kl`.

    s = (F + damping I)⁻¹ g;  Δ = √(2 max_kl / sᵀFs) s

    Damping enters the solve only: length and quadratic KL use F itself.

    Args:
        matvec: ``v -> F v`` (`fisher_operator`), without damping.
        gradient: g, of the objective that is maximised; a pytree.
        max_kl: δ > 0, nats.
        damping: at least 0.
        num_iterations: of the conjugate gradient, static.
        residual_tol: of the conjugate gradient.

    Returns:
        `NaturalStep`. A zero gradient, ``sᵀFs ≤ 0``, or anything that is not finite gives a zero
        step with ``accepted=False``.

    Raises:
        ValueError: `max_kl` not above 0, `damping` below 0, or `num_iterations` below 1.

    Example:
        >>> result = natural_step(lambda v: 2.0 * v, jnp.array([4.0, 0.0]), max_kl=0.01)
        >>> print(result.step, bool(result.accepted))
        [0.1 0. ] True

    References:
        Schulman et al., Trust Region Policy Optimization, arXiv 1502.05477, appendix C: the
        direction and the maximal step length β. Deviation: the paper does not damp.
    """
    in_range("max_kl", max_kl, 0, open_low=True)
    in_range("damping", damping, 0)
    direction = conjugate_gradient(
        _damped(matvec, damping),
        gradient,
        num_iterations=num_iterations,
        residual_tol=residual_tol,
    )
    curvature = _dot(direction, _tree_float(matvec(direction)))
    curved = jnp.isfinite(curvature) & (curvature > 0)
    scale = jnp.sqrt(2 * jnp.asarray(max_kl, curvature.dtype) / jnp.where(curved, curvature, 1))
    step = jax.tree.map(lambda s: scale * s, direction)
    gain = _dot(_tree_float(gradient), step)
    accepted = curved & jnp.isfinite(gain) & (gain > 0)
    return NaturalStep(
        step=jax.tree.map(lambda s: jnp.where(accepted, s, 0), step),
        direction=direction,
        curvature=curvature,
        scale=jnp.where(accepted, scale, 0),
        expected_improvement=jnp.where(accepted, gain, 0),
        accepted=accepted,
    )


def backtracking_line_search(
    evaluate: Callable[[PyTree], tuple[Array, Array]],
    params: PyTree,
    step: PyTree,
    *,
    max_kl: ArrayLike,
    expected_improvement: ArrayLike = 0.0,
    accept_ratio: ArrayLike = 0.0,
    kl_tolerance: ArrayLike = 0.0,
    decay: ArrayLike = 0.5,
    num_trials: int = 10,
) -> tuple[PyTree, Array, LineSearch]:
    """Shortens a step until the surrogate improves and the KL stays in the trust region.

    The first k of 0 … num_trials − 1 is taken for which, with f = decayᵏ and θ' = θ + f Δ,

    L(θ') − L(θ) > 0,  L(θ') − L(θ) ≥ accept_ratio · f · gᵀΔ  and  KL(θ‖θ') ≤ δ (1 + kl_tolerance)

    A candidate whose surrogate or KL is not finite fails. Candidates after the one taken are not
    evaluated, and a step of zeros is not tried at all.

    Args:
        evaluate: ``params -> (surrogate, kl)``, scalars: the objective that is maximised, and the
            mean KL(old‖new) in nats.
        params: θ, where the search starts.
        step: Δ, structured like `params`.
        max_kl: δ > 0, nats.
        expected_improvement: gᵀΔ, the first-order gain of the full step.
        accept_ratio: share of it that a candidate must reach, in [0, 1].
        kl_tolerance: relative excess of the KL that still passes, at least 0.
        decay: in (0, 1).
        num_trials: candidates at most, static, at least 1.

    Returns:
        ``(params, accepted, info)``: the parameters unchanged and False when no candidate passed;
        `LineSearch`.

    Raises:
        ValueError: a setting out of range.

    Example:
        >>> evaluate = lambda x: (-((x - 1.0) ** 2), 0.5 * x**2)  # best at 1, KL ≤ 0.5 up to 1
        >>> x, accepted, info = backtracking_line_search(
        ...     evaluate, jnp.zeros(()), jnp.asarray(1.9), max_kl=0.5, decay=0.5)
        >>> print(x, accepted, info.num_trials)
        0.95 True 2

    References:
        Schulman et al., Trust Region Policy Optimization, arXiv 1502.05477, appendix C, last
        paragraph: the objective there is −∞ outside the region, the same test as here.
    """
    positive_int("num_trials", num_trials)
    in_range("max_kl", max_kl, 0, open_low=True)
    in_range("accept_ratio", accept_ratio, 0, 1)
    in_range("kl_tolerance", kl_tolerance, 0)
    in_range("decay", decay, 0, 1, open_low=True, open_high=True)

    def moved(fraction: Array) -> PyTree:
        return jax.tree.map(lambda p, s: (p + fraction * s).astype(p.dtype), params, step)

    params = jax.tree.map(jnp.asarray, params)
    start = evaluate(params)[0]
    start = start.astype(jnp.promote_types(start.dtype, jnp.float32))
    bound = max_kl * (1 + jnp.asarray(kl_tolerance, start.dtype))
    factor = jnp.asarray(decay, start.dtype)

    def going(state: tuple) -> Array:
        k, accepted, _, _ = state
        return (k < num_trials) & ~accepted

    def body(state: tuple) -> tuple:
        k = state[0]
        fraction = factor**k
        surrogate, kl = evaluate(moved(fraction))
        improvement = (surrogate - start).astype(start.dtype)
        accepted = (
            jnp.isfinite(improvement)
            & (improvement > 0)
            & (improvement >= accept_ratio * fraction * expected_improvement)
            & jnp.isfinite(kl)
            & (kl <= bound)
        )
        return k + 1, accepted, improvement, kl.astype(start.dtype)

    zero, none = jnp.zeros((), start.dtype), jnp.zeros((), jnp.int32)
    moves = jnp.any(jnp.stack([jnp.any(s != 0) for s in jax.tree.leaves(step)]))
    first = jnp.where(moves, none, num_trials)
    tried, accepted, improvement, kl = jax.lax.while_loop(
        going, body, (first, jnp.asarray(False), zero, zero)
    )
    fraction = jnp.where(accepted, factor ** (tried - 1), 0)
    new_params = jax.tree.map(
        lambda new, old: jnp.where(accepted, new, old), moved(fraction), params
    )
    info = LineSearch(
        improvement=jnp.where(accepted, improvement, 0),
        kl=jnp.where(accepted, kl, 0),
        fraction=fraction,
        num_trials=tried - first,
    )
    return new_params, accepted, info


def _damped(matvec: MatVec, damping: ArrayLike) -> MatVec:
    return lambda v: _axpy(damping, v, _tree_float(matvec(v)))


def _tree_float(tree: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x: jnp.asarray(x, jnp.promote_types(jnp.asarray(x).dtype, jnp.float32)), tree
    )


def _dot(x: PyTree, y: PyTree) -> Array:
    return functools.reduce(jnp.add, jax.tree.leaves(jax.tree.map(jnp.vdot, x, y)))


def _axpy(a: ArrayLike, x: PyTree, y: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: (a * x + y).astype(y.dtype), x, y)
