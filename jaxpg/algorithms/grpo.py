"""Floor 4: group-relative policy optimisation on environments.

What is different about it: no critic. Several rollouts from the same start state are each other's
baseline. Every rollout begins with a fresh reset and counts up to the end of its first episode.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxpg._checks import divides, in_range, one_of, positive_int
from jaxpg.advantages import group_advantages
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
from jaxpg.objectives import dapo_loss, grpo_loss
from jaxpg.optimization import optimize, skip_zero_gradients
from jaxpg.returns import discounted_returns
from jaxpg.rollouts import init_runner, replay
from jaxpg.types import (
    Algorithm,
    Env,
    Info,
    Key,
    Optimizer,
    Pmean,
    Policy,
    PyTree,
    TrainState,
    Transition,
    one_replica,
    split_key,
)


@struct.dataclass(kw_only=True)
class GRPOConfig(Config):
    """Settings of `grpo` on environments."""

    num_envs: int = static(64)
    """Rollouts an update: start states × `group_size`."""
    num_steps: int | None = static(None)
    """Steps of each environment in one rollout (T); None takes the environment's time limit. A
    smaller number cuts longer episodes, whose return counts as it stands."""
    group_size: int = static(8)
    """Rollouts from each start state (G); divides num_envs."""
    form: str = static("outcome")
    """"outcome": one score a rollout, its return, for all of its steps; "per_step": the
    reward-to-go of step t among the members of the group that are still running at t."""
    normalize_std: bool = static(True)
    """Divide advantages by the standard deviation of the group (off in Dr. GRPO)."""
    aggregation: str = static("token")
    """"token": every live step weighs the same; "sequence": every rollout does."""
    minibatch_of: str = static("samples")
    """What minibatches are dealt from: "samples" or whole "groups" (needed by "sequence")."""
    num_epochs: int = static(4)
    """Passes over each set of rollouts."""
    num_minibatches: int = static(4)
    """Optimizer steps a pass; divides num_envs × num_steps, or the number of groups."""
    clip_epsilon: float = 0.2
    """Ratios count up to 1 ± this."""
    clip_epsilon_high: float | None = None
    """Another upper offset from 1; None takes `clip_epsilon`."""
    dual_clip: float | None = None
    """Bound c > 1 on the loss of negative advantages; None is off."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    kl_coef: float | None = None
    """Weight of the k3 penalty towards a reference policy; None is off."""
    ref_refresh_updates: float | None = None
    """The current policy becomes the reference every this many updates; None keeps the first."""
    target_kl: float | None = None
    """Stops an update, per minibatch, once approx_kl exceeds it; None is off."""


class Batch(NamedTuple):
    """What the loss sees: ``[N, …]`` samples, or ``[T, P, G, …]`` groups."""

    obs: PyTree
    action: Array
    old_log_prob: Array
    ref_log_prob: Array | tuple  # () without a penalty
    advantage: Array
    live: Array  # steps of first episodes


def grpo(env: Env, policy: Policy, optimizer: Optimizer = adam) -> Algorithm:
    """Group-relative policy optimisation on environments.

    L = E[−min(ρ A, clip(ρ, 1 − ε, 1 + ε) A)] + β k3(π‖π_ref) − c_e H(π)

    outcome:   A = (R − mean R)/(std R + 1e-6), R the discounted return of the rollout
    per_step:  Aₜ = (Gₜ − mean Gₜ)/(std Gₜ + 1e-6), over the members still running at t

    with mean and std (ddof 1) over the group of G rollouts from one start state. A group of
    identical returns has advantage 0, and so has the last member that is still running: nothing is
    left to compare it with. If that holds for a whole minibatch it takes no step. Truncated
    episodes count as they stand. Steps after a rollout's first episode are masked: `live_steps` in
    the info counts the others, `env_steps` all.

    Args:
        env: the environment (`from_gymnax` or any `Env`).
        policy: feed-forward; its critic is not used.
        optimizer: ``config -> optax.GradientTransformation``, called inside the trace.

    Returns:
        `Algorithm`, with `GRPOConfig` as its config. With `kl_coef` set, ``state.extra`` holds the
        parameters of the reference policy.

    Raises:
        ValueError: from ``init``: sizes that do not divide, a recurrent policy, no `num_steps`
            where the environment has no time limit, or settings out of range.

    Example:
        >>> import jax, jaxpg
        >>> env = jaxpg.from_gymnax("CartPole-v1")
        >>> algorithm = jaxpg.grpo(env, jaxpg.mlp_policy(env))
        >>> config = jaxpg.GRPOConfig(num_envs=8, group_size=4, num_steps=32)
        >>> state = algorithm.init(jax.random.key(0), config)
        >>> state, info = jax.jit(algorithm.step)(state, config)
        >>> int(state.update)
        1

    References:
        Shao et al., DeepSeekMath, arXiv 2402.03300, eq. 3 and 4 and section 4.1.2 (outcome);
        Yu et al., DAPO, arXiv 2503.14476, eq. 8 (token mean, two clip bounds); Liu et al.,
        arXiv 2503.20783 (without the standard deviation). Deviations: "per_step" compares
        reward-to-go at equal times, where section 4.1.3 of the first normalises step rewards over
        the whole group; entropy bonus.
    """
    family = policy.distribution

    def init(key: Key, config: GRPOConfig) -> TrainState:
        feed_forward_only("grpo", policy)
        config = whole_episodes(config, env)
        check_grpo_config(config)

        def extra(params: PyTree) -> PyTree:
            return () if config.kl_coef is None else params

        return init_state(key, env, policy, optimizer, config, extra=extra)

    def loss_fn(
        params: PyTree, batch: Batch, config: GRPOConfig, num_live: Array
    ) -> tuple[Array, Info]:
        lead = batch.live.shape
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(lead) :]), batch)
        dist_params, _ = policy.apply(params, flat.obs)
        arrays = (
            family.log_prob(dist_params, flat.action).reshape(lead),
            batch.old_log_prob,
            batch.advantage,
            batch.live,
        )
        settings = {
            "entropies": family.entropy(dist_params).reshape(lead),
            "ent_coef": config.ent_coef,
            # the live steps of an average minibatch, so that minibatches add up to the whole
            "token_denominator": num_live,
            "clip_epsilon": config.clip_epsilon,
            "clip_epsilon_high": config.clip_epsilon_high,
            "dual_clip": config.dual_clip,
        }
        if config.kl_coef is not None:
            settings |= {"ref_log_probs": batch.ref_log_prob, "kl_coef": config.kl_coef}
        if config.aggregation == "token":
            return dapo_loss(*arrays, denominator=num_live, **settings)
        return grpo_loss(*arrays, axis=0, **settings)

    def step(
        state: TrainState, config: GRPOConfig, *, pmean: Pmean = one_replica
    ) -> tuple[TrainState, Info]:
        config = current(whole_episodes(config, env), state.update)
        keys = split_key(state.key, "next", "reset", "rollout", "optimize")
        runner = init_runner(
            keys["reset"], env, policy, config.num_envs, group_size=config.group_size
        )
        data = collect(keys["rollout"], env, policy, state, config, runner=runner, pmean=pmean)
        rows = data.rows
        live = first_episode_mask(rows)
        num_live = pmean(jnp.sum(live) / config.num_minibatches)
        ref_log_prob = ()
        if config.kl_coef is not None:
            ref_dist_params, _ = replay(policy, state.extra, rows.obs, reset=live)
            ref_log_prob = family.log_prob(ref_dist_params, rows.action)
        advantages = relative_advantages(rows, live, config)
        batch = Batch(rows.obs, rows.action, rows.log_prob, ref_log_prob, advantages, live)
        groups = config.minibatch_of == "groups"
        split = (config.num_steps, -1, config.group_size) if groups else (-1,)
        params, opt_state, metrics = optimize(
            keys["optimize"],
            lambda params, batch: loss_fn(params, batch, config, num_live),
            skip_zero_gradients(optimizer(config)),
            state.params,
            state.opt_state,
            jax.tree.map(lambda x: x.reshape(*split, *x.shape[2:]), batch),
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
            axis=1 if groups else 0,
            target_kl=config.target_kl,
            pmean=pmean,
        )
        reference = state.extra
        if config.kl_coef is not None and config.ref_refresh_updates is not None:
            periods = (state.update + jnp.arange(2)) // config.ref_refresh_updates
            reference = jax.tree.map(
                lambda new, old: jnp.where(periods[1] > periods[0], new, old), params, reference
            )
        state = advance(state, keys["next"], data, params, opt_state, extra=reference)
        return state, report(data, metrics, mask=live)

    return Algorithm(init, step, acting(policy), env)


def first_episode_mask(rows: Transition) -> Array:
    """``[T, B]`` the rows up to and with the first end of an episode in their column."""
    done = rows.terminated | rows.truncated
    return jnp.cumsum(done, axis=0) - done == 0


def relative_advantages(rows: Transition, live: Array, config: GRPOConfig) -> Array:
    """``[T, B]`` advantages over the group, 0 at masked rows."""
    returns = discounted_returns(rows.reward, rows.terminated, rows.truncated, gamma=config.gamma)
    returns, running = (x.reshape(x.shape[0], -1, config.group_size) for x in (returns, live))
    if config.form == "per_step":
        advantages = group_advantages(returns, running, normalize_std=config.normalize_std)
    else:
        scores = group_advantages(returns[0], normalize_std=config.normalize_std)
        advantages = jnp.where(running, scores, 0.0)
    return advantages.reshape(live.shape)


def check_grpo_config(config: GRPOConfig) -> None:
    """`ValueError` for settings that GRPO cannot work with, naming the numbers."""
    positive_int("group_size", config.group_size, minimum=2)
    divides("num_envs", config.num_envs, "group_size", config.group_size)
    positive_int("num_epochs", config.num_epochs)
    positive_int("num_minibatches", config.num_minibatches)
    one_of("form", config.form, ("outcome", "per_step"))
    one_of("aggregation", config.aggregation, ("token", "sequence"))
    one_of("minibatch_of", config.minibatch_of, ("samples", "groups"))
    parts = ("num_minibatches", config.num_minibatches)
    if config.minibatch_of == "groups":
        divides("number of groups", config.num_envs // config.group_size, *parts)
    elif config.aggregation == "sequence":
        raise ValueError("aggregation='sequence' needs whole rollouts: set minibatch_of='groups'")
    else:
        divides("num_envs × num_steps", config.num_envs * config.num_steps, *parts)
    in_range("clip_epsilon", config.clip_epsilon, 0, open_low=True)
    in_range("clip_epsilon_high", config.clip_epsilon_high, 0, open_low=True)
    in_range("dual_clip", config.dual_clip, 1, open_low=True)
    in_range("kl_coef", config.kl_coef, 0)
    in_range("ref_refresh_updates", config.ref_refresh_updates, 0, open_low=True)
    in_range("target_kl", config.target_kl, 0, open_low=True)
    if config.ref_refresh_updates is not None and config.kl_coef is None:
        raise ValueError("ref_refresh_updates refreshes the reference of kl_coef: give kl_coef too")
