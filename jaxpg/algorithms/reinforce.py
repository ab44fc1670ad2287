"""Floor 4: REINFORCE, the Monte Carlo policy gradient.

What is different about it: the returns of complete episodes, seen from fresh resets, and baselines
that need no bootstrapping. One optimizer step an update, or one a time step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxpg._checks import in_range, one_of
from jaxpg.advantages import batch_mean_baseline, ema_baseline, normalize
from jaxpg.algorithms.common import (
    Config,
    acting,
    adam,
    advance,
    collect,
    current,
    feed_forward_only,
    init_state,
    report,
    static,
    whole_episodes,
)
from jaxpg.objectives import actor_critic_loss, reinforce_loss
from jaxpg.optimization import optimize, skip_zero_gradients
from jaxpg.returns import complete_episode_mask, discounted_returns
from jaxpg.rollouts import init_runner, replay
from jaxpg.types import (
    Algorithm,
    Env,
    Info,
    Key,
    Optimizer,
    Policy,
    PyTree,
    TrainState,
    Transition,
    split_key,
)


@struct.dataclass(kw_only=True)
class ReinforceConfig(Config):
    """Settings of `reinforce`."""

    num_steps: int | None = static(None)
    """Steps of each environment in one rollout (T); None takes the environment's time limit, so
    that every first episode ends. A smaller number cuts longer episodes."""
    form: str = static("episode")
    """"episode": one optimizer step on the sum over steps; "sequential": one for each time step,
    in order."""
    returns: str = static("to_go")
    """"to_go": discounted reward-to-go; "total" and "discounted_total": one return for all steps
    of an episode, undiscounted or discounted from its start."""
    discount_gradient: bool = static(False)
    """Weigh step t of an episode with γᵗ, as the gradient of v(S₀) asks. Needs "to_go"."""
    episodes: str = static("all")
    """"all" complete episodes of a rollout, or the "first" of each environment alone: later ones
    are seen only if they end in time, which favours short ones."""
    bootstrap: bool = static(False)
    """Complete the returns of truncated and unfinished episodes with the critic's value of the
    true successor. Off: truncated ones count as they stand, unfinished ones are masked out."""
    baseline: str = static("none")
    """"none", "mean" (of the batch), "ema" (moving average of recent batches) or "value" (learned).
    """
    ema_decay: float = 0.9
    """Weight of the past in the moving average, in [0, 1)."""
    normalize_advantages: bool = static(False)
    """Bring the advantages of a batch to mean 0 and standard deviation 1."""
    vf_coef: float = 0.5
    """Weight of the value loss under the "value" baseline."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""


class Batch(NamedTuple):
    """What the loss sees, ``[T, B, …]``."""

    obs: PyTree
    action: Array
    advantage: Array
    target: Array  # the return itself
    live: Array  # rows that count


def reinforce(env: Env, policy: Policy, optimizer: Optimizer = adam) -> Algorithm:
    """REINFORCE on complete episodes.

    Whole episodes:  ∇J = (1/E) Σ_episodes Σ_t (Gₜ − b) ∇ log π(aₜ|sₜ),  one step
    Sequential:      the terms of t = 0, 1, … in order, a step each, at the parameters of the moment

    with Gₜ = Σ_{k≥t} γ^{k−t} R(k+1) (or the episode's whole return) and E episodes. Every rollout
    starts from fresh resets. As the learning rate goes to 0 both forms make the same step. A time
    step at which no episode is running takes none.

    Args:
        env: the environment (`from_gymnax` or any `Env`).
        policy: feed-forward; its critic is trained only under the "value" baseline.
        optimizer: ``config -> optax.GradientTransformation``, called inside the trace.

    Returns:
        `Algorithm`, with `ReinforceConfig` as its config. Under the "ema" baseline
        ``state.extra`` holds the moving average.

    Raises:
        ValueError: from ``init``: a recurrent policy, no `num_steps` where the environment has no
            time limit, or settings that contradict each other.

    Example:
        >>> import jax, jaxpg
        >>> env = jaxpg.from_gymnax("CartPole-v1")
        >>> algorithm = jaxpg.reinforce(env, jaxpg.mlp_policy(env))
        >>> config = jaxpg.ReinforceConfig(num_envs=4, num_steps=32, baseline="mean")
        >>> state = algorithm.init(jax.random.key(0), config)
        >>> state, info = jax.jit(algorithm.step)(state, config)
        >>> int(state.update)
        1

    References:
        Williams, Simple statistical gradient-following algorithms, Machine Learning 8, 1992;
        Sutton and Barto, Reinforcement Learning, 2nd edition, section 13.3 (sequential, with
        `discount_gradient`, one environment and ``episodes="first"``) and 13.4 (learned baseline).
        Deviations: the baseline of a batch is fixed before its first step; the "mean" baseline
        contains each sample's own return, a bias of order one over the batch size.
    """

    def init(key: Key, config: ReinforceConfig) -> TrainState:
        feed_forward_only("reinforce", policy)
        config = whole_episodes(config, env)
        check_reinforce_config(config)

        def extra(params: PyTree) -> PyTree:
            return (jnp.zeros(()), jnp.zeros(())) if config.baseline == "ema" else ()

        return init_state(key, env, policy, optimizer, config, extra=extra)

    def loss_fn(
        params: PyTree, batch: Batch, config: ReinforceConfig, num_live: Array, episodes: Array
    ) -> tuple[Array, Info]:
        dist_params, values = replay(policy, params, batch.obs, reset=batch.live)
        family = policy.distribution
        log_probs = family.log_prob(dist_params, batch.action)
        shared = {
            "entropies": family.entropy(dist_params),
            "ent_coef": config.ent_coef,
            # the live rows of an average minibatch, so that minibatches add up to the whole
            "denominator": num_live,
        }
        if config.baseline == "value":
            arrays = (log_probs, batch.advantage, values, batch.target, batch.live)
            loss, metrics = actor_critic_loss(*arrays, vf_coef=config.vf_coef, **shared)
        else:
            loss, metrics = reinforce_loss(log_probs, batch.advantage, batch.live, **shared)
        # the metrics are means over steps; the gradient is a sum over steps, a mean over episodes
        return loss * num_live / episodes, metrics

    def step(state: TrainState, config: ReinforceConfig) -> tuple[TrainState, Info]:
        config = current(whole_episodes(config, env), state.update)
        keys = split_key(state.key, "next", "reset", "rollout", "optimize")
        runner = init_runner(keys["reset"], env, policy, config.num_envs)
        data = collect(keys["rollout"], env, policy, state, config, runner=runner)
        rows = data.rows
        live = live_steps(rows, config)
        returns = episode_returns(rows, data.next_values if config.bootstrap else None, config)
        # one return for a whole episode is averaged once an episode
        counted = live if config.returns == "to_go" else live & rows.reset
        baseline, extra = jnp.zeros(()), state.extra
        if config.baseline == "mean":
            baseline = batch_mean_baseline(returns, counted)
        elif config.baseline == "ema":
            average, num_batches = state.extra
            baseline, average = ema_baseline(
                average, returns, counted, decay=config.ema_decay, num_updates=num_batches
            )
            extra = (average, num_batches + jnp.any(counted))
        elif config.baseline == "value":
            baseline = rows.value
        advantages = returns - baseline
        if config.normalize_advantages:
            advantages = normalize(advantages, live)
        if config.discount_gradient:
            advantages = advantages * config.gamma ** steps_into_episode(rows.reset)
        num_minibatches = config.num_steps if config.form == "sequential" else 1
        episodes = jnp.maximum(jnp.sum(live & rows.reset), 1)
        num_live = jnp.sum(live) / num_minibatches
        params, opt_state, metrics = optimize(
            keys["optimize"],
            lambda params, batch: loss_fn(params, batch, config, num_live, episodes),
            skip_zero_gradients(optimizer(config)),
            state.params,
            state.opt_state,
            Batch(rows.obs, rows.action, advantages, returns, live),
            num_epochs=1,
            num_minibatches=num_minibatches,
            shuffle=False,
        )
        state = advance(state, keys["next"], data, params, opt_state, extra=extra)
        targets = returns if config.baseline == "value" else None
        return state, report(data, metrics, targets=targets, mask=live)

    return Algorithm(init, step, acting(policy), env)


def live_steps(rows: Transition, config: ReinforceConfig) -> Array:
    """``[T, B]`` the rows that have a return, of the episodes that are used."""
    done = rows.terminated | rows.truncated
    live = jnp.ones_like(done)
    if not config.bootstrap:
        live = complete_episode_mask(rows.terminated, rows.truncated)
    if config.episodes == "first":
        live = live & (jnp.cumsum(done, axis=0) - done == 0)
    return live


def episode_returns(rows: Transition, next_values: Array | None, config: ReinforceConfig) -> Array:
    """``[T, B]`` reward-to-go, or the return from an episode's first row at all of its rows."""
    gamma = 1.0 if config.returns == "total" else config.gamma
    returns = discounted_returns(
        rows.reward, rows.terminated, rows.truncated, next_values, gamma=gamma
    )
    if config.returns == "to_go":
        return returns
    first = jnp.arange(returns.shape[0])[:, None] - steps_into_episode(rows.reset)
    return jnp.take_along_axis(returns, first, axis=0)


def steps_into_episode(reset: Array) -> Array:
    """``[T, B]`` rows since the episode's first one, which `reset` marks (row 0 always is one)."""
    time = jnp.arange(reset.shape[0])[:, None]
    return time - jax.lax.cummax(jnp.where(reset, time, 0), axis=0)


def check_reinforce_config(config: ReinforceConfig) -> None:
    """`ValueError` for settings that REINFORCE cannot work with."""
    one_of("form", config.form, ("episode", "sequential"))
    one_of("returns", config.returns, ("to_go", "total", "discounted_total"))
    one_of("episodes", config.episodes, ("all", "first"))
    one_of("baseline", config.baseline, ("none", "mean", "ema", "value"))
    in_range("ema_decay", config.ema_decay, 0, 1, open_high=True)
    in_range("vf_coef", config.vf_coef, 0)
    if config.discount_gradient and config.returns != "to_go":
        raise ValueError(f"discount_gradient weighs reward-to-go, not returns={config.returns!r}")
    if config.bootstrap and (config.baseline != "value" or config.returns != "to_go"):
        raise ValueError(
            "bootstrap needs baseline='value' and returns='to_go', got "
            f"baseline={config.baseline!r} and returns={config.returns!r}"
        )
