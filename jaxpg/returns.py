"""Returns: what an action was followed by, under termination, time limits and cut rollouts.

**The index contract**, for every function that loops over time, here and in `jaxpg.advantages`.
Time is axis 0 and the axes behind it are free: ``[T]``, ``[T, B]``, ``[T, P, G]``. Row ``t`` of a
rollout is one step of the environment:

==================  ==============================================================================
``rewards[t]``      R(t+1), received for the action taken in S(t)
``values[t]``       v(S(t))
``next_values[t]``  v(S(t+1)), where S(t+1) is the true successor, before any reset
``terminated[t]``   this step ended the episode for good: whatever follows is worth 0
``truncated[t]``    this step was cut off (a time limit): what follows is worth ``next_values[t]``
``log_ratios[t]``   log π(a(t)|S(t)) − log μ(a(t)|S(t)), with μ the policy that acted
``gamma[t]``        discounts what follows row ``t``
``lambda_[t]``      weighs the link from row ``t`` to row ``t+1``
==================  ==============================================================================

Either flag cuts: nothing behind it reaches the rows before it, not even a NaN. Where both are set,
termination wins. The last row is continued by ``next_values[T-1]`` unless it terminated. Flags are
bool or integer; a float is a `TypeError`, for a discount is not a flag. Values that the formula
does not read, ``next_values`` where ``terminated`` above all, may hold NaN: they change neither
results nor gradients. Settings are scalars, also traced, or arrays of the rank of the rewards.

Computation is at least in float32 and results have that dtype; nothing is jitted here and no
gradient is stopped: call ``jax.jit`` and ``jax.lax.stop_gradient`` where a reader sees them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxpg import _checks

Coefficients = Callable[..., tuple[Array, Array, Array]]
"""``(**row) -> (a, b, cut)``, elementwise: one row at a time or all of them at once."""


def linear_recurrence(
    coefficients: Coefficients,
    rows: dict[str, Array],
    init: Array,
    *,
    unroll: int = 1,
    associative: bool = False,
) -> Array:
    """Solves x[t] = b[t] + a[t]·x[t+1] backwards in time: the one recursion behind all estimators.

    Where ``cut[t]`` is set, x[t+1] counts as 0 whatever it holds. `coefficients` is called inside
    the loop, so each input is read once and no ``a`` and ``b`` of full size is written: on a CPU
    faster, at nearly all sizes, than preparing them outside.

    Args:
        coefficients: Maps the entries of `rows`, by name, to ``a, b, cut``. A function of a module,
            not a closure: eager calls then find their compiled loop again.
        rows: Arrays ``[T, ...]``, all of one shape, and scalars, which are the same in every row.
        init: ``[...]``, x[T], in the dtype of the result.
        unroll: Rows per iteration of the loop. More than 1 is slower on CPU at most sizes.
        associative: Compute by parallel prefix: O(log T) passes over all rows instead of T steps,
            for accelerators, where each step costs a kernel launch. Slower on CPU. Rounds
            differently.

    Returns:
        ``[T, ...]``, x[t].
    """
    constants = {name: x for name, x in rows.items() if x.ndim == 0}
    varying = {name: x for name, x in rows.items() if x.ndim > 0}
    if not associative:
        body, carry = _loop_body(coefficients), (init, constants)
        return lax.scan(body, carry, varying, reverse=True, unroll=unroll)[1]
    a, b, cut = coefficients(**varying, **constants)
    a, cut = jnp.broadcast_to(a, b.shape), jnp.broadcast_to(cut, b.shape)
    b = b.at[-1].add(a[-1] * jnp.where(cut[-1], 0, init))
    _, x, _ = lax.associative_scan(
        lambda later, row: compose(row, later), (a, b, cut), reverse=True
    )
    return x


@functools.lru_cache(maxsize=64)
def _loop_body(coefficients: Coefficients) -> Callable:
    # One function object per recurrence. The constants ride in the carry for the same reason: a
    # closure over them would be a new function, and a new compilation, at every eager call.
    def body(carry: tuple, row: dict[str, Array]) -> tuple[tuple, Array]:
        following, constants = carry
        a, b, cut = coefficients(**row, **constants)
        x = b + a * jnp.where(cut, 0, following)
        return (x, constants), x

    return body


def compose(
    row: tuple[Array, Array, Array], later: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array]:
    """Joins two neighbouring stretches of a recurrence, each ``(a, b, cut)``, into one."""
    (a, b, cut), (later_a, later_b, later_cut) = row, later
    return a * later_a, b + a * jnp.where(cut, 0, later_b), cut | later_cut


def step_flags(
    like: Array, terminated: ArrayLike, truncated: ArrayLike | None
) -> tuple[Array, Array]:
    """Both flags as bool, of the shape of `like`; a scalar False for ``truncated=None``."""
    flag = _checks.as_flag("terminated", terminated)
    _checks.same_shape(rewards=like, terminated=flag)
    if truncated is None:
        return flag, jnp.zeros((), jnp.bool_)
    other = _checks.as_flag("truncated", truncated)
    _checks.same_shape(rewards=like, truncated=other)
    return flag, other


def unit_setting(name: str, value: ArrayLike, like: Array) -> Array:
    """A setting in [0, 1]: a scalar, or one number per row in the shape of `like`."""
    _checks.in_range(name, value, 0.0, 1.0)
    return _checks.time_setting(name, value, like)


def clipped_ratios(
    log_ratios: Array, ratio_clip: ArrayLike | None, *, name: str = "ratio_clip"
) -> Array:
    """``min(exp(log_ratios), ratio_clip)``, clipped before ``exp`` so that it cannot overflow."""
    if ratio_clip is None:
        return jnp.exp(log_ratios)
    _checks.in_range(name, ratio_clip, 0.0, open_low=True)
    limit = jnp.log(_checks.time_setting(name, ratio_clip, log_ratios))
    return jnp.exp(jnp.minimum(log_ratios, limit))


def td_error_rows(
    rewards: Array, values: Array, next_values: Array, terminated: Array, gamma: Array
) -> Array:
    """The formula of `td_errors` on checked arrays, one row or all."""
    return rewards + gamma * jnp.where(terminated, 0, next_values) - values


def td_errors(
    rewards: ArrayLike,
    values: ArrayLike,
    next_values: ArrayLike,
    terminated: ArrayLike,
    *,
    gamma: ArrayLike,
) -> Array:
    """Temporal-difference errors of one step.

    δ[t] = rewards[t] + γ·next_values[t]·(1 − terminated[t]) − values[t]

    Args:
        rewards: ``[T, ...]``, R(t+1).
        values: ``[T, ...]``, v(S(t)).
        next_values: ``[T, ...]``, v(S(t+1)) before any reset; not read where terminated.
        terminated: ``[T, ...]``, bool or integer.
        gamma: Discount in [0, 1], a scalar or an array of the rank of the rewards.

    Returns:
        ``[T, ...]``, δ[t]. A truncation needs no flag here: its row bootstraps like any other.

    Raises:
        ValueError: Shapes differ, there is no time axis, or gamma has another rank or leaves
            [0, 1].
        TypeError: ``terminated`` is a float.

    Example:
        >>> td_errors([1.0, 1.0], [10.0, 20.0], [20.0, 77.0], [False, True], gamma=0.5).tolist()
        [1.0, -19.0]

    References:
        Sutton and Barto, Reinforcement Learning: An Introduction, 2nd ed. 2018, eq. 6.5.
    """
    rewards, values, next_values = _checks.as_floats(
        rewards=rewards, values=values, next_values=next_values
    )
    _checks.has_time_axis("rewards", rewards)
    terminated, _ = step_flags(rewards, terminated, None)
    return td_error_rows(
        rewards, values, next_values, terminated, unit_setting("gamma", gamma, rewards)
    )


def _return_row(
    rewards: Array, next_values: Array, terminated: Array, truncated: Array, gamma: Array
) -> tuple[Array, Array, Array]:
    bootstrap = jnp.where(truncated & ~terminated, next_values, 0)
    return gamma, rewards + gamma * bootstrap, terminated | truncated


def discounted_returns(
    rewards: ArrayLike,
    terminated: ArrayLike,
    truncated: ArrayLike | None = None,
    next_values: ArrayLike | None = None,
    *,
    gamma: ArrayLike,
    unroll: int = 1,
    associative: bool = False,
) -> Array:
    """Discounted sums of rewards up to the end of the episode, bootstrapped where it was cut.

    G[t] = rewards[t] + γ·G[t+1], where G[t+1] is 0 if row t terminated, and ``next_values[t]`` (or
    0 without them) if row t was truncated or is the last

    Without `next_values` the rows of an episode that did not terminate have no Monte Carlo return:
    leave them out with `complete_episode_mask`, or give `next_values`.

    Args:
        rewards: ``[T, ...]``, R(t+1).
        terminated: ``[T, ...]``, bool or integer.
        truncated: ``[T, ...]``, bool or integer; None means nowhere.
        next_values: ``[T, ...]``, v(S(t+1)) before any reset, read at truncated rows and in the
            last one only; None means 0 there.
        gamma: Discount in [0, 1], a scalar or an array of the rank of the rewards.
        unroll: Rows per iteration of the loop, see `linear_recurrence`.
        associative: Parallel prefix instead of a loop, see `linear_recurrence`.

    Returns:
        ``[T, ...]``, G[t].

    Raises:
        ValueError: Shapes differ, there is no time axis, or gamma has another rank or leaves
            [0, 1].
        TypeError: A flag is a float.

    Example:
        The first episode ends after two steps, the second one goes on after the rollout.

        >>> discounted_returns([1.0, 1.0, 1.0, 1.0], [0, 1, 0, 0], gamma=0.5).tolist()
        [1.5, 1.0, 1.5, 1.0]
        >>> next_values = [0.0, 77.0, 0.0, 10.0]
        >>> discounted_returns(
        ...     [1.0, 1.0, 1.0, 1.0], [0, 1, 0, 0], None, next_values, gamma=0.5
        ... ).tolist()
        [1.5, 1.0, 4.0, 6.0]

    References:
        Sutton and Barto, Reinforcement Learning: An Introduction, 2nd ed. 2018, eq. 3.9. The
        bootstrap at a cut is not part of it.
    """
    if next_values is None:
        (rewards,) = _checks.as_floats(rewards=rewards)
        next_values = jnp.zeros((), rewards.dtype)
    else:
        rewards, next_values = _checks.as_floats(rewards=rewards, next_values=next_values)
    _checks.has_time_axis("rewards", rewards)
    terminated, truncated = step_flags(rewards, terminated, truncated)
    rows = {
        "rewards": rewards,
        "next_values": next_values,
        "terminated": terminated,
        "truncated": truncated,
        "gamma": unit_setting("gamma", gamma, rewards),
    }
    init = _tail_value(next_values, terminated | truncated, rewards)
    return linear_recurrence(_return_row, rows, init, unroll=unroll, associative=associative)


def _tail_value(next_values: Array, cut: Array, like: Array) -> Array:
    # A NaN behind a cut in the last row must not even enter the loop.
    return jnp.where(cut[-1], 0, next_values if next_values.ndim == 0 else next_values[-1]).astype(
        like.dtype
    )


def n_step_returns(
    rewards: ArrayLike,
    next_values: ArrayLike,
    terminated: ArrayLike,
    truncated: ArrayLike | None = None,
    *,
    gamma: ArrayLike,
    n: int,
) -> Array:
    """Sums of at most `n` discounted rewards, bootstrapped from the value behind the last one.

    G[t] = Σₖ₌ₜʰ γᵏ⁻ᵗ·rewards[k] + γʰ⁺¹⁻ᵗ·next_values[h]·(1 − terminated[h])

    with h the first of: t+n−1, the next row with a flag, the last row. An `n` of T or more gives
    bootstrapped Monte Carlo returns, those of `discounted_returns` with `next_values`.

    Windows are doubled until they hold `n` rows: O(T·log n) work and O(T) memory, no loop over T.

    Args:
        rewards: ``[T, ...]``, R(t+1).
        next_values: ``[T, ...]``, v(S(t+1)) before any reset; not read where terminated.
        terminated: ``[T, ...]``, bool or integer.
        truncated: ``[T, ...]``, bool or integer; None means nowhere.
        gamma: Discount in [0, 1], a scalar or an array of the rank of the rewards.
        n: Rows per return, at least 1, static.

    Returns:
        ``[T, ...]``, G[t].

    Raises:
        ValueError: Shapes differ, there is no time axis, `n` is below 1, or gamma has another rank
            or leaves [0, 1].
        TypeError: A flag is a float, or `n` is not a whole number.

    Example:
        >>> n_step_returns(
        ...     [1.0, 2.0, 3.0, 4.0], [9.0, 20.0, 6.0, 40.0], [0, 0, 1, 0], gamma=0.5, n=2
        ... ).tolist()
        [7.0, 3.5, 3.0, 24.0]

    References:
        Sutton and Barto, Reinforcement Learning: An Introduction, 2nd ed. 2018, eq. 7.1. Near the
        end of the rollout, where the book waits for more steps, the windows are shorter.
    """
    n = _checks.positive_int("n", n)
    rewards, next_values = _checks.as_floats(rewards=rewards, next_values=next_values)
    _checks.has_time_axis("rewards", rewards)
    terminated, truncated = step_flags(rewards, terminated, truncated)
    gamma = jnp.broadcast_to(unit_setting("gamma", gamma, rewards), rewards.shape)
    num_rows = rewards.shape[0]
    n = min(n, num_rows)

    # With the last row as a cut of its own, a window that would leave the rollout is a cut one,
    # and what is shifted in from behind it is never read.
    truncated = jnp.broadcast_to(truncated, rewards.shape).at[-1].set(True)
    window = _return_row(rewards, next_values, terminated, truncated, gamma)
    result, length, doubled = None, 0, 1
    while True:
        if n & doubled:
            result = window if result is None else compose(result, _ahead(window, length))
            length += doubled
        if length == n:
            break
        window = compose(window, _ahead(window, doubled))
        doubled *= 2
    a, b, cut = result
    return b + a * jnp.where(cut, 0, _ahead(next_values, n - 1))


def _ahead(tree: Array | tuple[Array, ...], k: int) -> Array | tuple[Array, ...]:
    """Row t+k at row t, zeros (False) behind the end."""
    return jax.tree.map(
        lambda x: jnp.concatenate([x[k:], jnp.zeros_like(x[:k])], axis=0) if k else x, tree
    )


def _lambda_row(
    rewards: Array,
    next_values: Array,
    terminated: Array,
    truncated: Array,
    gamma: Array,
    lambda_: Array,
) -> tuple[Array, Array, Array]:
    bootstrap = jnp.where(truncated, 1, 1 - lambda_) * jnp.where(terminated, 0, next_values)
    return gamma * lambda_, rewards + gamma * bootstrap, terminated | truncated


def lambda_returns(
    rewards: ArrayLike,
    next_values: ArrayLike,
    terminated: ArrayLike,
    truncated: ArrayLike | None = None,
    *,
    gamma: ArrayLike,
    lambda_: ArrayLike,
    unroll: int = 1,
    associative: bool = False,
) -> Array:
    """λ-returns: geometrically weighted means of all n-step returns.

    G[t] = rewards[t] + γ·((1 − λ)·next_values[t] + λ·G[t+1]), where the bracket is 0 if row t
    terminated, and ``next_values[t]`` if row t was truncated or is the last

    λ = 0 gives one-step targets, λ = 1 bootstrapped Monte Carlo returns. Where ``next_values[t]``
    equals ``values[t+1]`` inside episodes, ``lambda_returns − values`` is `jaxpg.gae`.

    Args:
        rewards: ``[T, ...]``, R(t+1).
        next_values: ``[T, ...]``, v(S(t+1)) before any reset; not read where terminated. With λ = 1
            use `discounted_returns` if inner rows may hold NaN.
        terminated: ``[T, ...]``, bool or integer.
        truncated: ``[T, ...]``, bool or integer; None means nowhere.
        gamma: Discount in [0, 1], a scalar or an array of the rank of the rewards.
        lambda_: Trace decay in [0, 1], a scalar or such an array; row t weighs the link to t+1.
        unroll: Rows per iteration of the loop, see `linear_recurrence`.
        associative: Parallel prefix instead of a loop, see `linear_recurrence`.

    Returns:
        ``[T, ...]``, G[t].

    Raises:
        ValueError: Shapes differ, there is no time axis, or a setting has another rank or leaves
            [0, 1].
        TypeError: A flag is a float.

    Example:
        >>> lambda_returns([1.0, 1.0], [3.0, 10.0], [0, 0], gamma=1.0, lambda_=0.5).tolist()
        [8.0, 11.0]

    References:
        Sutton and Barto, Reinforcement Learning: An Introduction, 2nd ed. 2018, eq. 12.18 (with
        ``lambda_[t]`` for the book's λ(t+1)), cut at the end of the rollout as in eq. 12.9.
    """
    rewards, next_values = _checks.as_floats(rewards=rewards, next_values=next_values)
    _checks.has_time_axis("rewards", rewards)
    terminated, truncated = step_flags(rewards, terminated, truncated)
    rows = {
        "rewards": rewards,
        "next_values": next_values,
        "terminated": terminated,
        "truncated": truncated,
        "gamma": unit_setting("gamma", gamma, rewards),
        "lambda_": unit_setting("lambda_", lambda_, rewards),
    }
    init = _tail_value(next_values, terminated | truncated, rewards)
    return linear_recurrence(_lambda_row, rows, init, unroll=unroll, associative=associative)


def _per_decision_row(
    ratios: Array,
    rewards: Array,
    next_values: Array,
    terminated: Array,
    truncated: Array,
    gamma: Array,
) -> tuple[Array, Array, Array]:
    a, b, cut = _return_row(rewards, next_values, terminated, truncated, gamma)
    return jnp.where(cut, 0, ratios * a), ratios * b, cut  # an infinite ratio times 0 is NaN


def per_decision_returns(
    log_ratios: ArrayLike,
    rewards: ArrayLike,
    terminated: ArrayLike,
    truncated: ArrayLike | None = None,
    next_values: ArrayLike | None = None,
    *,
    gamma: ArrayLike,
    ratio_clip: ArrayLike | None = None,
    unroll: int = 1,
    associative: bool = False,
) -> Array:
    """Returns under another policy, each reward weighted by the ratios of the actions before it.

    G[t] = ρ[t]·(rewards[t] + γ·G[t+1]),  ρ[t] = min(exp(log_ratios[t]), ratio_clip)

    with the ends of `discounted_returns`: G[t+1] is 0 if row t terminated, and ``next_values[t]``
    (or 0 without them) if row t was truncated or is the last. Written out,
    G[t] = Σₖ γᵏ⁻ᵗ·ρ[t]···ρ[k]·rewards[k]: ordinary, not weighted, per-decision importance sampling.

    ρ[t] itself multiplies: this estimates the value of the *state* S(t) under π. For the value of
    the action taken there, which needs no correction, drop the first ratio:
    ``rewards[t] + γ·G[t+1]``.

    Args:
        log_ratios: ``[T, ...]``, log π(a(t)|S(t)) − log μ(a(t)|S(t)), nats.
        rewards: ``[T, ...]``, R(t+1).
        terminated: ``[T, ...]``, bool or integer.
        truncated: ``[T, ...]``, bool or integer; None means nowhere.
        next_values: ``[T, ...]``, v(S(t+1)) under π before any reset, read at truncated rows and in
            the last one only; None means 0 there.
        gamma: Discount in [0, 1], a scalar or an array of the rank of the rewards.
        ratio_clip: Upper bound of each ratio, above 0 (biased; the gradient is 0 where it binds).
            It acts before ``exp``. None: no bound, and float32 overflows from a log-ratio of 89,
            or from a product of ratios of that size, to inf or NaN.
        unroll: Rows per iteration of the loop, see `linear_recurrence`.
        associative: Parallel prefix instead of a loop, see `linear_recurrence`.

    Returns:
        ``[T, ...]``, G[t].

    Raises:
        ValueError: Shapes differ, there is no time axis, gamma has another rank or leaves [0, 1],
            or `ratio_clip` is not above 0.
        TypeError: A flag is a float.

    Example:
        Ratios 2 and 1/2: the second reward is weighted by their product.

        >>> import numpy as np
        >>> log_ratios = np.log([2.0, 0.5])
        >>> returns = per_decision_returns(log_ratios, [1.0, 4.0], [0, 1], gamma=0.5)
        >>> print(np.asarray(returns).round(4))
        [4. 2.]
        >>> capped = per_decision_returns(log_ratios, [1.0, 4.0], [0, 1], gamma=0.5, ratio_clip=1.0)
        >>> print(np.asarray(capped).round(4))
        [2. 2.]

    References:
        Precup, Sutton and Singh, Eligibility Traces for Off-Policy Policy Evaluation, ICML 2000,
        per-decision importance sampling (for action values, so without the first ratio); Sutton and
        Barto, Reinforcement Learning: An Introduction, 2nd ed. 2018, section 5.9, the definition of
        G̃ before eq. 5.15. Deviations: the bootstrap at a cut, and `ratio_clip`.
    """
    arrays = {"log_ratios": log_ratios, "rewards": rewards}
    if next_values is None:
        log_ratios, rewards = _checks.as_floats(**arrays)
        next_values = jnp.zeros((), rewards.dtype)
    else:
        log_ratios, rewards, next_values = _checks.as_floats(**arrays, next_values=next_values)
    _checks.has_time_axis("rewards", rewards)
    terminated, truncated = step_flags(rewards, terminated, truncated)
    rows = {
        "ratios": clipped_ratios(log_ratios, ratio_clip),
        "rewards": rewards,
        "next_values": next_values,
        "terminated": terminated,
        "truncated": truncated,
        "gamma": unit_setting("gamma", gamma, rewards),
    }
    init = _tail_value(next_values, terminated | truncated, rewards)
    return linear_recurrence(_per_decision_row, rows, init, unroll=unroll, associative=associative)


def complete_episode_mask(terminated: ArrayLike, truncated: ArrayLike | None = None) -> Array:
    """Which rows belong to an episode that ended inside the rollout.

    mask[t] = whether any row s ≥ t of the column has a flag

    The rows behind the last flag of a column belong to an episode that goes on: without a value to
    bootstrap from they have no Monte Carlo return. Episodes that were already running when the
    rollout began count as complete, for their remaining rewards are all there.

    Args:
        terminated: ``[T, ...]``, bool or integer.
        truncated: ``[T, ...]``, bool or integer; None means nowhere.

    Returns:
        ``[T, ...]``, bool.

    Raises:
        ValueError: Shapes differ or there is no time axis.
        TypeError: A flag is a float.

    Example:
        >>> complete_episode_mask([False, True, False, False]).tolist()
        [True, True, False, False]

    References:
        Sutton and Barto, Reinforcement Learning: An Introduction, 2nd ed. 2018, section 13.3:
        REINFORCE is defined for complete episodes only.
    """
    done = _checks.as_flag("terminated", terminated)
    _checks.has_time_axis("terminated", done)
    if truncated is not None:
        other = _checks.as_flag("truncated", truncated)
        _checks.same_shape(terminated=done, truncated=other)
        done = done | other
    t = jnp.arange(done.shape[0]).reshape(-1, *[1] * (done.ndim - 1))
    return t <= jnp.max(jnp.where(done, t, -1), axis=0)
