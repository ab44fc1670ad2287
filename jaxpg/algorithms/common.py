"""Floor 4: what every algorithm on environments shares: config, state, collecting, reporting.

An algorithm's own file shows only what is different about it. The order of one update is always:
current config → rollout with the statistics from before it → advantages → optimisation →
statistics updated → info.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array
from jax.typing import ArrayLike

from jaxpg._checks import as_key, in_range, is_concrete, positive_int
from jaxpg.rollouts import apply_policy, init_runner, rollout
from jaxpg.running_statistics import (
    ReturnStatistics,
    RunningStatistics,
    init_return_statistics,
    init_statistics,
    normalize_with,
    scale_rewards,
    update_return_statistics,
    update_statistics,
)
from jaxpg.types import (
    ActFn,
    Env,
    Episodes,
    Info,
    Key,
    Optimizer,
    Pmean,
    Policy,
    PyTree,
    Runner,
    TrainState,
    Transition,
    one_replica,
    split_key,
)

INFO_FIELDS = (
    "episode_return_sum",  # raw undiscounted return, summed over the episodes that ended
    "episode_length_sum",  # environment steps of those episodes
    "episode_count",
    "env_steps",  # environment slots of this update, T × B
    "live_steps",  # those of them that the losses saw (not masked)
    "policy_loss",
    "value_loss",
    "entropy",  # nats
    "approx_kl",  # nats, k3 estimate of KL(old‖new)
    "clip_fraction",
    "explained_variance",  # of the value targets by the critic, before the update
    "grad_norm",  # before clipping
    "nonfinite",  # share of optimizer steps whose gradient held NaN or inf
    "unbootstrapped",  # truncations beyond what `Env.time_limit` promised
)
"""What the info of every algorithm holds. A field that does not apply to one is 0 there."""

INFO_SUMS = (
    "episode_return_sum",
    "episode_length_sum",
    "episode_count",
    "env_steps",
    "live_steps",
    "unbootstrapped",
)
"""Those of them that add up over replicas. The others are means."""


def static(default: Any, **kwargs: Any) -> Any:
    """A config field that fixes shapes or structure: a changed value compiles anew."""
    return struct.field(pytree_node=False, default=default, **kwargs)


@struct.dataclass(kw_only=True)
class Config:
    """Settings that all algorithms share.

    Numbers are traced: they can be swept with `jax.vmap`, and a changed value does not compile
    anew. Sizes and switches are static. ``None`` is off.
    """

    num_envs: int = static(8)
    """Environments stepped side by side (B)."""
    num_steps: int = static(128)
    """Steps of each environment in one rollout (T)."""
    gamma: float = 0.99
    """Discount factor, in [0, 1]."""
    learning_rate: float = 3e-4
    """Step size of the optimizer."""
    adam_eps: float = 1e-5
    """Epsilon in Adam's denominator."""
    max_grad_norm: float | None = 0.5
    """Global gradient norm above which gradients are scaled down; None is off."""
    anneal_updates: float | None = None
    """Updates over which the `annealed` fields fall linearly to zero; None is off."""
    annealed: tuple[str, ...] = static(("learning_rate",))
    """Names of the fields that anneal."""
    normalize_obs: bool = static(False)
    """Normalise observations by running mean and standard deviation."""
    normalize_rewards: bool = static(False)
    """Divide rewards by the running standard deviation of the discounted return."""


ConfigT = TypeVar("ConfigT", bound=Config)


class Statistics(NamedTuple):
    """Running statistics; a part that is off is ``()``."""

    obs: RunningStatistics | tuple
    returns: ReturnStatistics | tuple


class Collected(NamedTuple):
    """One rollout as the losses see it: observations normalised, rewards scaled."""

    runner: Runner
    rows: Transition  # [T, B, …]
    next_values: Array  # [T, B]
    carry: PyTree  # [B, …] the policy's carry before row 0
    episodes: Episodes
    statistics: Statistics  # after this rollout: for the next one


def adam(config: Any) -> optax.GradientTransformation:
    """Adam behind global-norm clipping, from `learning_rate`, `adam_eps`, `max_grad_norm`.

    Args:
        config: any config with these fields; its numbers may be traced.

    Returns:
        The optax transformation.

    Example:
        >>> import jaxpg
        >>> transformation = jaxpg.adam(jaxpg.PPOConfig(learning_rate=1e-3))
    """
    steps = [optax.adam(config.learning_rate, eps=config.adam_eps)]
    if config.max_grad_norm is not None:
        steps.insert(0, optax.clip_by_global_norm(config.max_grad_norm))
    return optax.chain(*steps)


def check_config(config: Config) -> None:
    """`ValueError`/`TypeError` for sizes and concrete numbers that cannot work."""
    positive_int("num_envs", config.num_envs)
    positive_int("num_steps", config.num_steps)
    in_range("gamma", config.gamma, 0, 1)
    in_range("learning_rate", config.learning_rate, 0)
    in_range("adam_eps", config.adam_eps, 0)
    in_range("max_grad_norm", config.max_grad_norm, 0, open_low=True)
    in_range("anneal_updates", config.anneal_updates, 0, open_low=True)
    fields = {field.name for field in dataclasses.fields(config)}
    for name in config.annealed:
        if name not in fields:
            raise ValueError(f"annealed names {name!r}, which is no field of the config")


def current(config: ConfigT, update: Array) -> ConfigT:
    """`config` at this update: numbers as float32 arrays, annealed fields rescaled.

    The factor is ``max(0, 1 − update / anneal_updates)``, counted in updates and never in
    optimizer steps, which an early stop would leave behind.
    """
    config = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), config)
    if config.anneal_updates is None:
        return config
    left = jnp.maximum(0.0, 1.0 - update.astype(jnp.float32) / config.anneal_updates)
    values = {name: getattr(config, name) for name in config.annealed}
    return config.replace(**{k: v * left for k, v in values.items() if v is not None})


def init_state(
    key: Key,
    env: Env,
    policy: Policy,
    optimizer: Optimizer,
    config: Config,
    *,
    extra: Callable[[PyTree], PyTree] = lambda params: (),
    init_opt_state: Callable[[Any, PyTree], PyTree] | None = None,
) -> TrainState:
    """The state before the first update. Every leaf is a buffer of its own, the key too.

    Args:
        key: typed or legacy; copied, so donating the state never deletes the caller's.
        env: the environment.
        policy: the policy.
        optimizer: ``config -> optax.GradientTransformation``.
        config: checked here.
        extra: ``params -> `` what the algorithm alone carries along.
        init_opt_state: ``(config, params) -> opt_state`` for an algorithm with several optimizers.

    Returns:
        The state, all strongly typed arrays.
    """
    check_config(config)
    names = split_key(as_key(key), "params", "envs", "run")
    runner = init_runner(names["envs"], env, policy, config.num_envs)
    params = policy.init(names["params"], runner.obs)
    numbers = current(config, jnp.zeros((), jnp.int32))
    if init_opt_state is None:
        opt_state = optimizer(numbers).init(params)
    else:
        opt_state = init_opt_state(numbers, params)
    first_obs = jax.tree.map(lambda x: x[0], observed(runner.obs))
    statistics = Statistics(
        obs=init_statistics(first_obs) if config.normalize_obs else (),
        returns=init_return_statistics(config.num_envs) if config.normalize_rewards else (),
    )
    state = TrainState(
        params=params,
        opt_state=opt_state,
        runner=runner,
        statistics=statistics,
        key=names["run"],
        update=jnp.zeros((), jnp.int32),
        extra=extra(params),
    )
    return jax.tree.map(own_buffer, state)


def whole_episodes(config: ConfigT, env: Env) -> ConfigT:
    """`config` with a `num_steps` of None replaced by the time limit of `env`.

    For algorithms that start every rollout from fresh resets: every first episode then ends.

    Raises:
        ValueError: `num_steps` is None and the environment has no time limit.
    """
    if config.num_steps is not None:
        return config
    if env.time_limit is None:
        raise ValueError(f"environment {env.name!r} has no time limit: give num_steps")
    return config.replace(num_steps=env.time_limit)


def feed_forward_only(name: str, policy: Policy) -> None:
    """`ValueError` for a recurrent policy, in `init` of an algorithm that shuffles time."""
    if policy.initial_carry is not None:
        raise ValueError(
            f"{name} needs a feed-forward policy: use ppo or actor_critic with a recurrent one"
        )


def own_buffer(x: ArrayLike) -> Array:
    """A strongly typed copy of `x` that shares no buffer."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.clone(x) if not is_concrete(x) else jnp.copy(x)
    return jnp.array(x, dtype=x.dtype, copy=True)


def observed(obs: PyTree) -> PyTree:
    """The part of an observation that is normalised: all of it but an ``action_mask``."""
    if isinstance(obs, Mapping):
        return {name: x for name, x in obs.items() if name != "action_mask"}
    return obs


def normalize_obs(statistics: Statistics, obs: PyTree) -> PyTree:
    """Observations as the networks see them; unchanged when normalisation is off."""
    if isinstance(statistics.obs, tuple) and not isinstance(statistics.obs, RunningStatistics):
        return obs
    normalized = normalize_with(statistics.obs, observed(obs))
    if isinstance(obs, Mapping):
        return {**obs, **normalized}
    return normalized


def observing(policy: Policy, statistics: Statistics) -> Policy:
    """`policy` fed raw observations: it normalises them with fixed `statistics` first."""
    if policy.initial_carry is None:

        def apply(params: PyTree, obs: PyTree) -> Any:
            return policy.apply(params, normalize_obs(statistics, obs))
    else:

        def apply(params: PyTree, carry: PyTree, obs: PyTree, reset: Array) -> Any:
            return policy.apply(params, carry, normalize_obs(statistics, obs), reset)

    return policy._replace(apply=apply)


def collect(
    key: Key,
    env: Env,
    policy: Policy,
    state: TrainState,
    config: Config,
    *,
    params: PyTree | None = None,
    runner: Runner | None = None,
    pmean: Pmean = one_replica,
) -> Collected:
    """One rollout from where the state stands, with the statistics from before it.

    Args:
        key: consumed.
        env: the environment.
        policy: the bare policy (it sees normalised observations).
        state: parameters, runner and statistics.
        config: the current config.
        params: act with these instead of ``state.params`` (a behaviour policy).
        runner: start here instead of ``state.runner`` (fresh resets).
        pmean: of what the statistics take in.

    Returns:
        The rollout, normalised and scaled, and the statistics for the next one.
    """
    params = state.params if params is None else params
    statistics = state.statistics
    if runner is None:
        runner = state.runner
    elif config.normalize_rewards:
        # the discounted returns that were running belong to episodes that were left
        running = jnp.zeros_like(statistics.returns.discounted)
        statistics = statistics._replace(returns=statistics.returns._replace(discounted=running))
    after, rows, next_values, episodes = rollout(
        key, env, observing(policy, statistics), params, runner, num_steps=config.num_steps
    )
    obs_statistics, return_statistics = statistics
    obs, reward = rows.obs, rows.reward
    if config.normalize_obs:
        obs_statistics = update_statistics(statistics.obs, observed(obs), pmean=pmean)
        obs = normalize_obs(statistics, obs)
    if config.normalize_rewards:
        return_statistics = update_return_statistics(
            statistics.returns,
            reward,
            rows.terminated,
            rows.truncated,
            gamma=config.gamma,
            pmean=pmean,
        )
        reward = scale_rewards(statistics.returns, reward)
    return Collected(
        runner=after,
        rows=rows._replace(obs=obs, reward=reward),
        next_values=next_values,
        carry=runner.carry,
        episodes=episodes,
        statistics=Statistics(obs_statistics, return_statistics),
    )


def advance(
    state: TrainState,
    key: Key,
    data: Collected,
    params: PyTree,
    opt_state: PyTree,
    extra: PyTree | None = None,
) -> TrainState:
    """The state after an update."""
    return TrainState(
        params=params,
        opt_state=opt_state,
        runner=data.runner,
        statistics=data.statistics,
        key=key,
        update=state.update + 1,
        extra=state.extra if extra is None else extra,
    )


def report(
    data: Collected,
    metrics: Mapping[str, Array],
    *,
    targets: Array | None = None,
    mask: Array | None = None,
    pmean: Pmean = one_replica,
) -> Info:
    """The info of one update: `INFO_FIELDS` and whatever else `metrics` holds.

    Args:
        data: the rollout.
        metrics: scalars of the losses and the optimizer.
        targets: ``[T, B]`` value targets, for the explained variance of the critic.
        mask: ``[T, B]`` the rows that the losses saw; None is all.
        pmean: for the explained variance over all replicas. What else is there counts, or is a
            mean, and is left to the caller.

    Returns:
        Scalars, float32.
    """
    slots = data.rows.reward.size
    info: dict[str, Any] = dict.fromkeys(INFO_FIELDS, 0.0)
    info |= {
        "episode_return_sum": data.episodes.return_sum,
        "episode_length_sum": data.episodes.length_sum,
        "episode_count": data.episodes.count,
        "unbootstrapped": data.episodes.unbootstrapped,
        "env_steps": slots,
        "live_steps": slots if mask is None else jnp.sum(mask),
    }
    if targets is not None:
        info["explained_variance"] = explained_variance(data.rows.value, targets, mask, pmean)
    info |= metrics
    return {name: jnp.asarray(x, jnp.float32) for name, x in info.items()}


def explained_variance(
    values: Array, targets: Array, mask: Array | None = None, pmean: Pmean = one_replica
) -> Array:
    """``1 − Var[target − value] / Var[target]``: 1 is perfect, 0 is no better than a constant.

    Args:
        values: ``[…]`` predictions.
        targets: ``[…]`` what they should have been.
        mask: ``[…]`` the entries that count; None is all.
        pmean: where several replicas hold entries of their own.

    Returns:
        A scalar; 0 where the targets do not vary.
    """
    pairs = jnp.stack([targets - values, targets])
    axes = tuple(range(1, pairs.ndim))
    count = targets.size if mask is None else jnp.maximum(pmean(jnp.sum(mask) * 1.0), 1.0)

    def average(x: Array) -> Array:
        return pmean(jnp.sum(x, axis=axes, where=mask, keepdims=True)) / count

    residual, spread = average((pairs - average(pairs)) ** 2).ravel()
    varies = spread > 0
    return jnp.where(varies, 1.0 - residual / jnp.where(varies, spread, 1.0), 0.0)


def acting(policy: Policy) -> ActFn:
    """How a state of any algorithm here acts: `Algorithm.act`."""

    def act(
        state: TrainState,
        key: Key,
        obs: PyTree,
        carry: PyTree,
        reset: Array,
        *,
        deterministic: bool,
    ) -> tuple[PyTree, Array]:
        seeing = observing(policy, state.statistics)
        carry, dist_params, _ = apply_policy(seeing, state.params, carry, obs, reset)
        family = policy.distribution
        x = family.mode(dist_params) if deterministic else family.sample(key, dist_params)
        return carry, family.action(x)

    return act


def carry_of(policy: Policy) -> Callable[[int], PyTree]:
    """``num_envs -> carry`` of any policy: ``()`` for a feed-forward one."""
    return policy.initial_carry or (lambda num_envs: ())
