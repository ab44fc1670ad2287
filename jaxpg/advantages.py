"""Advantages: how much better an action was than expected.

Over time (`gae`, `vtrace`), against a baseline, within a group of samples of one prompt or start
state, and over tokens. The index contract of the functions over time stands in `jaxpg.returns`.

Group statistics subtract the smallest member before anything else, and centre before squaring: a
group without spread then gives exactly 0 in float32 too, where the mean of seven 0.1 is not 0.1. A
NaN reward is a sample that nobody scored: it stays out of the statistics and gets 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxpg import _checks
from jaxpg.returns import (
    clipped_ratios,
    linear_recurrence,
    step_flags,
    td_error_rows,
    unit_setting,
)

Axis = int | tuple[int, ...] | None


class VTrace(NamedTuple):
    """What `vtrace` returns."""

    targets: Array  # [T, ...], vs(t), for the critic
    advantages: Array  # [T, ...], for the policy gradient


def _gae_row(
    rewards: Array,
    values: Array,
    next_values: Array,
    terminated: Array,
    truncated: Array,
    gamma: Array,
    lambda_: Array,
) -> tuple[Array, Array, Array]:
    delta = td_error_rows(rewards, values, next_values, terminated, gamma)
    return gamma * lambda_, delta, terminated | truncated


def gae(
    rewards: ArrayLike,
    values: ArrayLike,
    next_values: ArrayLike,
    terminated: ArrayLike,
    truncated: ArrayLike | None = None,
    *,
    gamma: ArrayLike,
    lambda_: ArrayLike,
    unroll: int = 1,
    associative: bool = False,
) -> Array:
    """Generalised advantage estimates, exact through time limits.

    A[t] = δ[t] + γ·λ·A[t+1], where A[t+1] is 0 behind a flag and behind the last row, and
    δ[t] = rewards[t] + γ·next_values[t]·(1 − terminated[t]) − values[t]

    ``gae(...) + values`` are the targets for the critic, its λ-returns.

    Args:
        rewards: ``[T, ...]``, R(t+1).
        values: ``[T, ...]``, v(S(t)).
        next_values: ``[T, ...]``, v(S(t+1)) before any reset; not read where terminated.
        terminated: ``[T, ...]``, bool or integer: row t ended the episode.
        truncated: ``[T, ...]``, bool or integer: row t was cut off; None means nowhere.
        gamma: Discount in [0, 1], a scalar or an array of the rank of the rewards.
        lambda_: Trace decay in [0, 1], a scalar or such an array; row t weighs the link to t+1.
        unroll: Rows per iteration of the loop, see `jaxpg.returns.linear_recurrence`.
        associative: Parallel prefix instead of a loop, see `jaxpg.returns.linear_recurrence`.

    Returns:
        ``[T, ...]``, A[t].

    Raises:
        ValueError: Shapes differ, there is no time axis, or a setting has another rank or leaves
            [0, 1].
        TypeError: A flag is a float.

    Example:
        A critic that knows the constant reward of 1 is never surprised by a time limit.

        >>> gae(
        ...     [1.0] * 3, [10.0] * 3, [10.0] * 3, [0, 0, 0], [0, 0, 1], gamma=0.9, lambda_=0.95
        ... ).tolist()
        [0.0, 0.0, 0.0]

    References:
        Schulman, Moritz, Levine, Jordan and Abbeel, High-Dimensional Continuous Control Using
        Generalized Advantage Estimation, arXiv 1506.02438, eq. 16, cut at the end of the rollout.
    """
    rewards, values, next_values = _checks.as_floats(
        rewards=rewards, values=values, next_values=next_values
    )
    _checks.has_time_axis("rewards", rewards)
    terminated, truncated = step_flags(rewards, terminated, truncated)
    rows = {
        "rewards": rewards,
        "values": values,
        "next_values": next_values,
        "terminated": terminated,
        "truncated": truncated,
        "gamma": unit_setting("gamma", gamma, rewards),
        "lambda_": unit_setting("lambda_", lambda_, rewards),
    }
    init = jnp.zeros_like(rewards[0])
    return linear_recurrence(_gae_row, rows, init, unroll=unroll, associative=associative)


def _vtrace_row(
    rho: Array, trace: Array, delta: Array, terminated: Array, truncated: Array, gamma: Array
) -> tuple[Array, Array, Array]:
    cut = terminated | truncated
    return jnp.where(cut, 0, gamma * trace), rho * delta, cut  # an infinite ratio times 0 is NaN


def vtrace(
    log_ratios: ArrayLike,
    rewards: ArrayLike,
    values: ArrayLike,
    next_values: ArrayLike,
    terminated: ArrayLike,
    truncated: ArrayLike | None = None,
    *,
    gamma: ArrayLike,
    lambda_: ArrayLike = 1.0,
    rho_clip: ArrayLike | None = 1.0,
    c_clip: ArrayLike | None = 1.0,
    pg_rho_clip: ArrayLike | None = 1.0,
    unroll: int = 1,
    associative: bool = False,
) -> VTrace:
    """Value targets and policy-gradient advantages from the actions of another policy.

    vs[t] = values[t] + Σₖ₌ₜ γᵏ⁻ᵗ·(c[t]···c[k−1])·ρ[k]·δ[k], up to the first flag or the last row
    advantages[t] = ρ'[t]·(rewards[t] + γ·vs(t+1) − values[t])

    with ρ = min(rho_clip, r), c = λ·min(c_clip, r), ρ' = min(pg_rho_clip, r), r = exp(log_ratios).
    vs(t+1) is ``vs[t+1]`` inside an episode, ``next_values[t]`` at a truncation and in the last
    row, 0 at a termination.

    On policy the targets are those of `jaxpg.lambda_returns`. The advantages bootstrap from vs(t+1)
    as in the paper; the mix λ·vs(t+1) + (1 − λ)·v(S(t+1)), which would be GAE on policy, differs
    from it for λ < 1.

    Args:
        log_ratios: ``[T, ...]``, log π(a(t)|S(t)) − log μ(a(t)|S(t)), nats. Clipped before ``exp``.
        rewards: ``[T, ...]``, R(t+1).
        values: ``[T, ...]``, v(S(t)).
        next_values: ``[T, ...]``, v(S(t+1)) before any reset; not read where terminated.
        terminated: ``[T, ...]``, bool or integer.
        truncated: ``[T, ...]``, bool or integer; None means nowhere.
        gamma: Discount in [0, 1], a scalar or an array of the rank of the rewards.
        lambda_: Trace decay in [0, 1], a scalar or such an array; row t weighs the link to t+1.
        rho_clip: Cap on the ratios that weigh δ, above 0; it decides which policy's values are
            learnt. None: no cap, here and below, and large log-ratios overflow.
        c_clip: Cap on the ratios that carry the trace.
        pg_rho_clip: Cap on the ratios that weigh the advantages.
        unroll: Rows per iteration of the loop, see `jaxpg.returns.linear_recurrence`.
        associative: Parallel prefix instead of a loop, see `jaxpg.returns.linear_recurrence`.

    Returns:
        ``VTrace(targets[T, ...], advantages[T, ...])``, differentiable in all arguments: stop
        gradients where they serve as constants.

    Raises:
        ValueError: Shapes differ, there is no time axis, a setting has another rank or leaves
            [0, 1], or a cap is not above 0.
        TypeError: A flag is a float.

    Example:
        Ratios 1/2 and 2, the second one capped at 1.

        >>> import numpy as np
        >>> log_ratios = np.log([0.5, 2.0])
        >>> out = vtrace(log_ratios, [1.0, 1.0], [0.0, 0.0], [0.0, 4.0], [0, 0], gamma=0.5)
        >>> print(np.asarray(out.targets).round(4), np.asarray(out.advantages).round(4))
        [1.25 3.  ] [1.25 3.  ]

    References:
        Espeholt et al., IMPALA: Scalable Distributed Deep-RL with Importance Weighted
        Actor-Learner Architectures, arXiv 1802.01561, eq. 1 and remark 2 (λ); the advantages are
        the bracket of the policy gradient in section 4.2, with a cap of their own.
    """
    log_ratios, rewards, values, next_values = _checks.as_floats(
        log_ratios=log_ratios, rewards=rewards, values=values, next_values=next_values
    )
    _checks.has_time_axis("rewards", rewards)
    terminated, truncated = step_flags(rewards, terminated, truncated)
    gamma = unit_setting("gamma", gamma, rewards)
    lambda_ = unit_setting("lambda_", lambda_, rewards)
    rows = {
        "rho": clipped_ratios(log_ratios, rho_clip, name="rho_clip"),
        "trace": lambda_ * clipped_ratios(log_ratios, c_clip, name="c_clip"),
        "delta": td_error_rows(rewards, values, next_values, terminated, gamma),
        "terminated": terminated,
        "truncated": truncated,
        "gamma": gamma,
    }
    init = jnp.zeros_like(rewards[0])
    targets = values + linear_recurrence(
        _vtrace_row, rows, init, unroll=unroll, associative=associative
    )
    following = jnp.concatenate([targets[1:], next_values[-1:]], axis=0)
    following = jnp.where(truncated, next_values, following)
    advantages = clipped_ratios(log_ratios, pg_rho_clip, name="pg_rho_clip") * td_error_rows(
        rewards, values, following, terminated, gamma
    )
    return VTrace(targets, advantages)


class _Reductions(NamedTuple):
    """How to reduce over whatever shares its statistics; results broadcast against the input."""

    sum: Callable[[Array], Array]
    min: Callable[[Array], Array]
    max: Callable[[Array], Array]


def _over_axes(axis: Axis) -> _Reductions:
    return _Reductions(
        lambda x: jnp.sum(x, axis=axis, keepdims=True),
        lambda x: jnp.min(x, axis=axis, keepdims=True),
        lambda x: jnp.max(x, axis=axis, keepdims=True),
    )


def _over_segments(ids: Array, num_groups: int) -> _Reductions:
    return _Reductions(
        lambda x: jax.ops.segment_sum(x, ids, num_groups)[ids],
        lambda x: jax.ops.segment_min(x, ids, num_groups)[ids],
        lambda x: jax.ops.segment_max(x, ids, num_groups)[ids],
    )


class _Spread(NamedTuple):
    """What is left of entries when their mean is taken away."""

    valid: Array  # bool
    centered: Array  # 0 where invalid
    count: Array
    squares: Array  # sum of centered²
    varies: Array  # bool: some valid entry differs from another

    def variance(self, ddof: ArrayLike) -> tuple[Array, Array]:
        """The variance, and where it is one; 1 elsewhere, so that roots keep finite gradients."""
        enough = self.count > ddof
        variance = self.squares / jnp.where(enough, self.count - ddof, 1)
        usable = self.varies & enough & (variance != 0)  # squares of tiny differences underflow
        return jnp.where(usable, variance, 1), usable

    def over_std(self, ddof: ArrayLike, eps: ArrayLike) -> Array:
        """centered/(std + eps), 0 where there is no spread or nothing valid."""
        variance, usable = self.variance(ddof)
        scaled = self.centered / (jnp.sqrt(variance) + jnp.asarray(eps, variance.dtype))
        return jnp.where(self.valid & usable, scaled, 0)

    def whitened(self, ddof: ArrayLike, eps: ArrayLike, variance_floor: bool) -> Array:
        """centered/√(variance + eps), or over √max(variance, eps)."""
        variance, usable = self.variance(ddof)
        eps = jnp.asarray(eps, variance.dtype)
        variance = jnp.maximum(variance, eps) if variance_floor else variance + eps
        return jnp.where(self.valid & usable, self.centered * lax.rsqrt(variance), 0)


def _spread(x: Array, valid: Array, reduce: _Reductions) -> _Spread:
    count = reduce.sum(valid.astype(x.dtype))
    low = reduce.min(jnp.where(valid, x, jnp.inf))
    high = reduce.max(jnp.where(valid, x, -jnp.inf))
    # A shift changes no statistic, and so no gradient.
    shifted = jnp.where(valid, x - lax.stop_gradient(jnp.where(count > 0, low, 0)), 0)
    mean = reduce.sum(shifted) / jnp.maximum(count, 1)
    centered = jnp.where(valid, shifted - mean, 0)
    # "Differs" and not "is larger": a NaN that is no missing score has to stay visible.
    varies = (count > 0) & (low != high)
    return _Spread(valid, centered, count, reduce.sum(centered**2), varies)


def _valid(mask: ArrayLike | None, shape: tuple[int, ...]) -> Array:
    checked = _checks.as_mask("mask", mask, shape)
    return jnp.ones(shape, jnp.bool_) if checked is None else checked


def _scored(rewards: Array, mask: ArrayLike | None) -> Array:
    return _valid(mask, rewards.shape) & ~jnp.isnan(rewards)


def _check_spread_settings(ddof: ArrayLike, eps: ArrayLike) -> None:
    _checks.in_range("ddof", ddof, 0.0)
    _checks.in_range("eps", eps, 0.0)


def _group_axis(rewards: Array, axis: int) -> int:
    axis = _checks.normalize_axis("axis", axis, rewards.ndim)
    if rewards.shape[axis] < 2:
        raise ValueError(
            f"a group needs at least 2 samples to be compared, got {rewards.shape[axis]} "
            f"along axis {axis} of rewards {rewards.shape}"
        )
    return axis


def normalize(
    x: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    axis: Axis = None,
    ddof: ArrayLike = 0,
    eps: ArrayLike = 1e-8,
) -> Array:
    """Shifts and scales the counted entries to mean 0 and standard deviation 1.

    (x − mean)/(std + eps), with std = √(Σ(x − mean)²/(n − ddof)) over the n counted entries

    0 off the mask, where all entries are equal, and where n ≤ ddof. The scope is the whole array
    unless `axis` says otherwise; under ``vmap`` it is one member of the batch, so seeds never mix.

    Args:
        x: Any shape, most often advantages ``[T, B]``.
        mask: Of the same shape, bool or 0/1, 1 = counts; None = everything.
        axis: Axis or axes that share their statistics; None means all of them.
        ddof: Taken off n in the variance: 0 as usual for PPO, 1 for the sample variance.
        eps: Added to the standard deviation, at least 0.

    Returns:
        The shape of `x`. A NaN that counts makes everything NaN that shares its statistics.

    Raises:
        ValueError: The mask has another shape, the axis does not exist, ddof or eps is negative.

    Example:
        >>> normalize([1.0, 3.0, 99.0], [1, 1, 0], eps=0.0).tolist()
        [-1.0, 1.0, 0.0]
        >>> normalize([0.1, 0.1, 0.1]).tolist()
        [0.0, 0.0, 0.0]

    References:
        Andrychowicz et al., What Matters in On-Policy Reinforcement Learning, arXiv 2006.05990,
        choice C67, normalisation of advantages. Zero spread gives exactly 0 here, not noise divided
        by eps.
    """
    (x,) = _checks.as_floats(x=x)
    _check_spread_settings(ddof, eps)
    for one in (axis,) if isinstance(axis, int) else axis or ():
        _checks.normalize_axis("axis", one, x.ndim)
    return _spread(x, _valid(mask, x.shape), _over_axes(axis)).over_std(ddof, eps)


def batch_mean_baseline(
    returns: ArrayLike, mask: ArrayLike | None = None, *, axis: Axis = None
) -> Array:
    """The mean return of a batch, as the baseline of all its rows.

    b = Σ mask·returns / max(Σ mask, 1)

    It contains each row's own return, so for n rows it shrinks the expected gradient by 1 − 1/n;
    `leave_one_out_advantages` does not.

    Args:
        returns: Any shape, most often ``[T, B]``.
        mask: Of the same shape, bool or 0/1, 1 = counts; None = everything. Leave the returns of
            unfinished episodes out with `jaxpg.complete_episode_mask`.
        axis: Axis or axes to average over; None means all. ``axis=1`` of ``[T, B]`` gives one
            baseline per step, ``[T]``.

    Returns:
        `returns` without the averaged axes; 0 where nothing counts.

    Raises:
        ValueError: The mask has another shape or the axis does not exist.

    Example:
        >>> float(batch_mean_baseline([1.0, 2.0, 3.0, 60.0], [1, 1, 1, 0]))
        2.0

    References:
        Williams, Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement
        Learning, Machine Learning 8 (1992), theorem 1: any baseline b that does not depend on the
        action. Sutton and Barto, Reinforcement Learning: An Introduction, 2nd ed. 2018, eq. 13.11.
    """
    (returns,) = _checks.as_floats(returns=returns)
    for one in (axis,) if isinstance(axis, int) else axis or ():
        _checks.normalize_axis("axis", one, returns.ndim)
    valid = _valid(mask, returns.shape)
    count = jnp.sum(valid, axis=axis, dtype=returns.dtype)
    return jnp.sum(jnp.where(valid, returns, 0), axis=axis) / jnp.maximum(count, 1)


def ema_baseline(
    state: ArrayLike,
    returns: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    decay: ArrayLike,
    num_updates: ArrayLike | None = None,
) -> tuple[Array, Array]:
    """A baseline that follows the mean return from batch to batch.

    state' = decay·state + (1 − decay)·mean(returns);  baseline = state

    A batch is compared with the state from before it, so the baseline does not depend on the
    actions of the batch. Start from any number: 0, or a guess of the return.

    Args:
        state: ``[]``, what the last call returned, or the number to start from.
        returns: Any shape; averaged as a whole.
        mask: Of the same shape, bool or 0/1, 1 = counts; None = everything. A batch in which
            nothing counts leaves the state as it is.
        decay: In [0, 1]; 1 never moves, 0 is the mean of the batch before.
        num_updates: ``[]``, how many batches the state has seen. Given, the state must have started
            from 0, and the baseline is state/(1 − decay^num_updates), the weighted mean of the
            batches so far without the pull towards 0; 0 before the first batch. None: as above.

    Returns:
        ``(baseline[], state'[])``, in the dtype of the returns.

    Raises:
        ValueError: The mask has another shape, `state` is no scalar, or decay leaves [0, 1].

    Example:
        >>> baseline, state = ema_baseline(0.0, [4.0, 6.0], decay=0.75)
        >>> float(baseline), float(state)
        (0.0, 1.25)
        >>> baseline, state = ema_baseline(state, [1.0, 3.0], decay=0.75, num_updates=1)
        >>> float(baseline), float(state)
        (5.0, 1.4375)

    References:
        Williams, Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement
        Learning, Machine Learning 8 (1992), there as reinforcement comparison; the correction by
        1 − decay^n as in Kingma and Ba, Adam, arXiv 1412.6980, section 3.
    """
    (returns,) = _checks.as_floats(returns=returns)
    state = _checks.as_float("state", state).astype(returns.dtype)
    if state.ndim:
        raise ValueError(f"state must be a scalar, got shape {state.shape}")
    _checks.in_range("decay", decay, 0.0, 1.0)
    _checks.in_range("num_updates", num_updates, 0.0)
    decay = jnp.asarray(decay, returns.dtype)
    valid = _valid(mask, returns.shape)
    moved = decay * state + (1 - decay) * batch_mean_baseline(returns, mask)
    moved = jnp.where(jnp.any(valid), moved, state)
    if num_updates is None:
        return state, moved
    weight = 1 - decay ** jnp.asarray(num_updates, returns.dtype)
    return jnp.where(weight > 0, state / jnp.where(weight > 0, weight, 1), 0), moved


def group_advantages(
    rewards: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    axis: int = -1,
    normalize_std: bool = True,
    ddof: ArrayLike = 1,
    eps: ArrayLike = 1e-6,
) -> Array:
    """How much better each sample did than the others of its group.

    A = (r − mean)/(std + eps), or r − mean without ``normalize_std``, over the scored samples

    0 for a sample that is masked or NaN, in a group whose scored rewards are all equal, and in one
    with fewer than two scored samples (or no more than `ddof`).

    Args:
        rewards: ``[..., G]``, most often ``[P, G]``: P prompts or start states, G samples of each.
            NaN marks a sample without a score. Give a sample without a single token ``mask`` 0.
        mask: Of the same shape, bool or 0/1, 1 = counts; None = everything.
        axis: The group axis.
        normalize_std: Divide by the standard deviation (GRPO, DAPO) or not (Dr. GRPO).
        ddof: 1 divides the squares by n − 1 (TRL, verl, OpenRLHF, tunix), 0 by n (MaxText): in a
            group of two ±0.71 or ±1.
        eps: Added to the standard deviation, at least 0 (1e-4 in TRL, 1e-6 in verl and tunix).

    Returns:
        The shape of `rewards`: one number per sample, for all of its tokens or steps.

    Raises:
        ValueError: The group axis is shorter than 2 or does not exist, the mask has another shape,
            ddof or eps is negative.

    Example:
        >>> import numpy as np
        >>> rewards = [[1.0, 0.0, float("nan"), 1.0], [5.0, 5.0, 5.0, 5.0]]
        >>> print(np.asarray(group_advantages(rewards)).round(4))
        [[ 0.5773 -1.1547  0.      0.5773]
         [ 0.      0.      0.      0.    ]]

    References:
        Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1.2 (outcome supervision); Yu et al.,
        DAPO, arXiv 2503.14476, eq. 9; Liu et al., Understanding R1-Zero-Like Training (Dr. GRPO),
        arXiv 2503.20783, section 3.2. The papers name neither ddof nor eps.
    """
    (rewards,) = _checks.as_floats(rewards=rewards)
    axis = _group_axis(rewards, axis)
    _check_spread_settings(ddof, eps)
    spread = _spread(rewards, _scored(rewards, mask), _over_axes(axis))
    return spread.over_std(ddof, eps) if normalize_std else spread.centered


def segment_group_advantages(
    rewards: ArrayLike,
    group_ids: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    num_groups: int,
    normalize_std: bool = True,
    ddof: ArrayLike = 1,
    eps: ArrayLike = 1e-6,
) -> Array:
    """`group_advantages` for groups given by an id per sample, of any sizes and in any order.

    A = (r − mean)/(std + eps) over the scored samples with the same id

    Args:
        rewards: ``[N]``, or any shape. NaN marks a sample without a score.
        group_ids: Of the same shape, integers in 0 … num_groups−1. An id out of that range masks
            its sample. An id that no other sample has leaves it without a comparison: it gets 0.
        mask: Of the same shape, bool or 0/1, 1 = counts; None = everything.
        num_groups: Static, at least 1; ids that do not occur cost memory only.
        normalize_std: Divide by the standard deviation or not.
        ddof: Taken off the size of the group in the variance.
        eps: Added to the standard deviation, at least 0.

    Returns:
        The shape of `rewards`.

    Raises:
        ValueError: Shapes differ, `num_groups` is below 1, ddof or eps is negative.
        TypeError: `group_ids` are not integers.

    Example:
        >>> segment_group_advantages(
        ...     [1.0, 9.0, 0.0, 10.0, 7.0], [0, 1, 0, 1, -1], num_groups=2, normalize_std=False
        ... ).tolist()
        [0.5, -0.5, -0.5, 0.5, 0.0]

    References:
        Those of `group_advantages`.
    """
    (rewards,) = _checks.as_floats(rewards=rewards)
    ids = _checks.as_array("group_ids", group_ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"group_ids must be integers, got dtype {ids.dtype}")
    _checks.same_shape(rewards=rewards, group_ids=ids)
    num_groups = _checks.positive_int("num_groups", num_groups)
    _check_spread_settings(ddof, eps)
    inside = (ids >= 0) & (ids < num_groups)
    scored = _scored(rewards, mask) & inside
    reduce = _over_segments(jnp.where(inside, ids, 0).ravel(), num_groups)
    spread = _spread(rewards.ravel(), scored.ravel(), reduce)
    advantages = spread.over_std(ddof, eps) if normalize_std else spread.centered
    return advantages.reshape(rewards.shape)


def leave_one_out_advantages(
    rewards: ArrayLike, mask: ArrayLike | None = None, *, axis: int = -1
) -> Array:
    """Each sample against the mean of the others in its group.

    A[i] = r[i] − Σⱼ≠ᵢ r[j]/(n − 1) = n/(n − 1)·(r[i] − mean), over the n scored samples

    0 for a sample that is masked or NaN, and where fewer than two are scored.

    Args:
        rewards: ``[..., G]``, most often ``[P, G]``. NaN marks a sample without a score.
        mask: Of the same shape, bool or 0/1, 1 = counts; None = everything.
        axis: The group axis.

    Returns:
        The shape of `rewards`.

    Raises:
        ValueError: The group axis is shorter than 2 or does not exist, or the mask has another
            shape.

    Example:
        >>> import numpy as np
        >>> print(np.asarray(leave_one_out_advantages([[1.0, 0.0, 0.0, 3.0]])).round(4))
        [[ 0.     -1.3333 -1.3333  2.6667]]

    References:
        Kool, van Hoof and Welling, Buy 4 REINFORCE Samples, Get a Baseline for Free!, ICLR 2019
        workshop; Ahmadian et al., Back to Basics, arXiv 2402.14740, the REINFORCE Leave-One-Out
        estimator.
    """
    (rewards,) = _checks.as_floats(rewards=rewards)
    axis = _group_axis(rewards, axis)
    spread = _spread(rewards, _scored(rewards, mask), _over_axes(axis))
    return spread.centered * (spread.count / jnp.maximum(spread.count - 1, 1))


def batch_std_group_advantages(
    rewards: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    axis: int = -1,
    ddof: ArrayLike = 1,
    eps: ArrayLike = 1e-6,
) -> Array:
    """Each sample against its group, in units of the spread of the whole batch.

    A = (r − mean of the group)/(std of all rewards + eps)

    One scale for all prompts: an almost solved prompt is not blown up to the weight of a mixed one.
    0 where `group_advantages` is 0.

    Args:
        rewards: ``[..., G]``, most often ``[P, G]``. NaN marks a sample without a score.
        mask: Of the same shape, bool or 0/1, 1 = counts; None = everything.
        axis: The group axis.
        ddof: Taken off the number of rewards in the variance.
        eps: Added to the standard deviation, at least 0.

    Returns:
        The shape of `rewards`.

    Raises:
        ValueError: The group axis is shorter than 2 or does not exist, the mask has another shape,
            ddof or eps is negative.

    Example:
        >>> import numpy as np
        >>> print(np.asarray(batch_std_group_advantages([[1.0, 0.0], [1.0, 1.0]], ddof=0)).round(4))
        [[ 1.1547 -1.1547]
         [ 0.      0.    ]]

    References:
        Liu et al., Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning (Lite PPO), arXiv
        2508.08221: mean over the group, standard deviation over the batch.
    """
    (rewards,) = _checks.as_floats(rewards=rewards)
    axis = _group_axis(rewards, axis)
    _check_spread_settings(ddof, eps)
    scored = _scored(rewards, mask)
    group = _spread(rewards, scored, _over_axes(axis))
    return (
        _spread(rewards, scored, _over_axes(None))
        ._replace(centered=group.centered)
        .over_std(ddof, eps)
    )


def process_advantages(
    step_rewards: ArrayLike,
    step_ends: ArrayLike,
    step_mask: ArrayLike | None = None,
    *,
    num_tokens: int,
    ddof: ArrayLike = 1,
    eps: ArrayLike = 1e-6,
) -> Array:
    """Advantages of tokens from rewards of reasoning steps (process supervision).

    A[t] = Σ z[j] over the steps j with step_ends[j] ≥ t,  z = (r − mean)/(std + eps)

    with the statistics over all scored steps of all samples of a group: each token gets the sum of
    what its own and the later steps earned. One step at the last token is `group_advantages`.

    Args:
        step_rewards: ``[..., G, S]``: G samples of a group, at most S steps each. NaN marks a step
            without a score.
        step_ends: Of the same shape, integers: 0-based position of the last token of each step, in
            any order. A step that ends outside 0 … num_tokens−1 is masked, such as the step of an
            empty answer that ends at −1.
        step_mask: Of the same shape, bool or 0/1, 1 = counts; None = everything. Mask the padding
            of samples with fewer than S steps.
        num_tokens: Width T of the token axis, static.
        ddof: Taken off the number of steps in the variance.
        eps: Added to the standard deviation, at least 0.

    Returns:
        ``[..., G, num_tokens]``, 0 behind the end of a sample's last step.

    Raises:
        ValueError: Shapes differ, the rank is below 2, `num_tokens` is below 1, ddof or eps is
            negative.
        TypeError: `step_ends` are not integers.

    Example:
        >>> process_advantages([[1.0], [0.0]], [[2], [1]], num_tokens=3, ddof=0, eps=0.0).tolist()
        [[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]]

    References:
        Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1.3 (process supervision). The paper
        names neither ddof nor eps.
    """
    (rewards,) = _checks.as_floats(step_rewards=step_rewards)
    ends = _checks.as_array("step_ends", step_ends)
    if not jnp.issubdtype(ends.dtype, jnp.integer):
        raise TypeError(f"step_ends must be integers, got dtype {ends.dtype}")
    _checks.same_shape(step_rewards=rewards, step_ends=ends)
    if rewards.ndim < 2:
        raise ValueError(f"step_rewards must be [..., G, S], got shape {rewards.shape}")
    num_tokens = _checks.positive_int("num_tokens", num_tokens)
    _check_spread_settings(ddof, eps)
    mask = _checks.as_mask("step_mask", step_mask, rewards.shape)
    scored = _scored(rewards, mask) & (ends >= 0) & (ends < num_tokens)
    z = _spread(rewards, scored, _over_axes((-2, -1))).over_std(ddof, eps)
    reaches = ends[..., None] >= jnp.arange(num_tokens)
    return jnp.sum(jnp.where(reaches, z[..., None], 0), axis=-2)


def _token_row(rewards: Array, valid: Array, gamma: Array) -> tuple[Array, Array, Array]:
    return jnp.where(valid, gamma, 1), rewards, jnp.zeros_like(valid)


def reinforce_pp_advantages(
    token_rewards: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    axis: int = -1,
    gamma: ArrayLike = 1.0,
    ddof: ArrayLike = 1,
    eps: ArrayLike = 1e-8,
    variance_floor: bool = False,
    unroll: int = 1,
    associative: bool = False,
) -> Array:
    """Rewards-to-go of tokens, whitened over all valid tokens of the batch (REINFORCE++).

    R[t] = r[t] + γ·R[t+1] along the valid tokens;  A = (R − mean)/√(variance + eps)

    A masked token (a prompt, a tool's answer, padding) is stepped over: it neither adds, nor
    discounts, nor stops the sum. No critic and no group is needed.

    Args:
        token_rewards: ``[..., T]``: most often −β·(log π − log π_ref) at every token, plus the
            score of the answer at its last valid token.
        mask: Of the same shape, bool or 0/1, 1 = a token that the policy wrote; None = everything.
        axis: The token axis.
        gamma: Discount per valid token in [0, 1], a scalar or an array of that rank.
        ddof: Taken off the number of tokens in the variance: 1 in verl, 0 in OpenRLHF.
        eps: At least 0.
        variance_floor: Divide by √max(variance, eps) as OpenRLHF does, not by √(variance + eps) as
            verl does.
        unroll: Tokens per iteration of the loop, see `jaxpg.returns.linear_recurrence`.
        associative: Parallel prefix instead of a loop, see `jaxpg.returns.linear_recurrence`.

    Returns:
        The shape of `token_rewards`; 0 off the mask and where there is no spread.

    Raises:
        ValueError: The mask has another shape, the axis does not exist or is empty, gamma has
            another rank or leaves [0, 1], ddof or eps is negative.

    Example:
        Rewards-to-go 0.5, 1, 2: the masked token is stepped over.

        >>> import numpy as np
        >>> rewards, mask = [[0.0, 7.0, 0.0, 2.0]], [[1, 0, 1, 1]]
        >>> print(np.asarray(reinforce_pp_advantages(rewards, mask, gamma=0.5, ddof=0)).round(4))
        [[-1.069   0.     -0.2673  1.3363]]

    References:
        Hu, Liu, Xu and Shen, REINFORCE++, arXiv 2501.03262, the advantage and its normalisation
        over the global batch (equation numbers differ between its versions). The KL term belongs
        to `token_rewards` here.
    """
    (rewards,) = _checks.as_floats(token_rewards=token_rewards)
    axis = _checks.normalize_axis("axis", axis, rewards.ndim)
    gamma = unit_setting("gamma", gamma, rewards)
    _check_spread_settings(ddof, eps)
    valid = _valid(mask, rewards.shape)
    rows = {
        "rewards": jnp.moveaxis(jnp.where(valid, rewards, 0), axis, 0),
        "valid": jnp.moveaxis(valid, axis, 0),
        "gamma": jnp.moveaxis(gamma, axis, 0) if gamma.ndim else gamma,
    }
    _checks.has_time_axis("token_rewards", rows["rewards"])
    init = jnp.zeros_like(rows["rewards"][0])
    to_go = linear_recurrence(_token_row, rows, init, unroll=unroll, associative=associative)
    spread = _spread(jnp.moveaxis(to_go, 0, axis), valid, _over_axes(None))
    return spread.whitened(ddof, eps, variance_floor)


def reinforce_pp_baseline_advantages(
    rewards: ArrayLike,
    mask: ArrayLike,
    *,
    ddof: ArrayLike = 1,
    eps: ArrayLike = 1e-8,
    variance_floor: bool = False,
) -> Array:
    """Each sample against its group mean, whitened over all valid tokens of the batch.

    A[i, t] = (a[i] − mean)/√(variance + eps),  a[i] = r[i] − mean of the group

    where mean and variance run over the valid tokens, so long answers weigh more in them.

    Args:
        rewards: ``[..., G]``, one score per sample. NaN marks a sample without a score: it and its
            tokens stay out of all statistics.
        mask: ``[..., G, T]``, bool or 0/1, 1 = a token that the policy wrote. The reward of a
            sample without such tokens still counts in its group.
        ddof: Taken off the number of tokens in the variance: 1 in verl, 0 in OpenRLHF.
        eps: At least 0.
        variance_floor: Divide by √max(variance, eps) as OpenRLHF does, not by √(variance + eps) as
            verl does.

    Returns:
        ``[..., G, T]``, 0 off the mask, for unscored samples, and where there is no spread.

    Raises:
        ValueError: The group axis is shorter than 2, the mask does not have the shape of the
            rewards and one axis more, ddof or eps is negative.

    Example:
        >>> import numpy as np
        >>> rewards, mask = [[1.0, 0.0]], [[[1, 1], [1, 0]]]
        >>> print(np.asarray(reinforce_pp_baseline_advantages(rewards, mask, ddof=0)).round(4))
        [[[ 0.7071  0.7071]
          [-1.4142  0.    ]]]

    References:
        Hu, Liu, Xu and Shen, REINFORCE++, arXiv 2501.03262, the variant with baseline (equation
        numbers differ between its versions).
    """
    (rewards,) = _checks.as_floats(rewards=rewards)
    axis = _group_axis(rewards, -1)
    _check_spread_settings(ddof, eps)
    tokens = _checks.as_array("mask", mask)
    if tokens.shape[:-1] != rewards.shape:
        raise ValueError(
            f"mask must have the shape of rewards and a token axis, got {tokens.shape} "
            f"beside rewards {rewards.shape}"
        )
    scored = _scored(rewards, None)
    centered = _spread(rewards, scored, _over_axes(axis)).centered
    valid = tokens.astype(jnp.bool_) & scored[..., None]
    spread = _spread(jnp.broadcast_to(centered[..., None], valid.shape), valid, _over_axes(None))
    return spread.whitened(ddof, eps, variance_floor)
