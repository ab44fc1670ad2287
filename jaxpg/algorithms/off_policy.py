"""Floor 4: the policy gradient from the data of another policy, corrected by importance weights.

What is different about it: two policies. One acts (the same one some updates ago, or a given one),
the other learns, and ratios of their probabilities stand between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxpg._checks import in_range, one_of, positive_int
from jaxpg.advantages import vtrace
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
)
from jaxpg.kl import MAX_LOG_RATIO, kl_k3, ratio_of
from jaxpg.objectives import actor_critic_loss
from jaxpg.optimization import optimize
from jaxpg.returns import discounted_returns, per_decision_returns
from jaxpg.rollouts import replay
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

Behaviour = tuple[Policy, PyTree] | Callable[[PyTree], PyTree]
"""``(policy, params)``, or ``obs[N, …] -> dist_params[N, …]`` of the learner's own family."""


@struct.dataclass(kw_only=True)
class OffPolicyConfig(Config):
    """Settings of `off_policy`."""

    lag: int = static(1)
    """The policy that acts is this many updates old; 0 is on policy. Unused with a `behaviour`."""
    correction: str = static("vtrace")
    """"vtrace" (clipped ratios, a step each), "per_decision" or "trajectory" (plain importance
    weights) or "none"."""
    trace_lambda: float = 1.0
    """λ of V-trace, in [0, 1]."""
    rho_clip: float = 1.0
    """Cap on V-trace's ratios in temporal differences."""
    c_clip: float = 1.0
    """Cap on V-trace's ratios in traces."""
    pg_rho_clip: float = 1.0
    """Cap on the ratio that weighs V-trace's policy gradient."""
    ratio_clip: float | None = None
    """Cap on each ratio in the products of "per_decision" and "trajectory"; None is plain."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""


def off_policy(
    env: Env, policy: Policy, optimizer: Optimizer = adam, behaviour: Behaviour | None = None
) -> Algorithm:
    """The policy gradient with data from a behaviour policy, one step a rollout.

    With ρₖ = π(aₖ|sₖ)/b(aₖ|sₖ), s the first row of the episode (or of the rollout, if the episode
    is older) and e the last one, the gradient is the mean over rows of ∇ log π(aₜ|sₜ) times

        vtrace        min(ρₜ, pg_rho_clip) (R(t+1) + γ vs(t+1) − v(sₜ))
        none          the same with all ratios 1
        per_decision  ρ_s … ρ_{t−1} (Dₜ − ρₜ v(sₜ)),   Dₜ = ρₜ (R(t+1) + γ Dₜ₊₁)
        trajectory    ρ_s … ρ_e (Gₜ − v(sₜ))

    Gₜ and Dₜ bootstrap from the critic where an episode was cut, by a time limit or by the end of
    the rollout. The critic is the learner's own and fits V-trace targets whatever the correction
    (under "none": with all ratios 1). The distribution of a rollout's first states is left as the
    behaviour policy made it.

    Args:
        env: the environment (`from_gymnax` or any `Env`).
        policy: the learner, feed-forward.
        optimizer: ``config -> optax.GradientTransformation``, called inside the trace.
        behaviour: acts in place of an old learner: ``(policy, params)`` with a distribution over
            the learner's samples, or ``obs -> dist_params`` of the learner's own family. It sees
            observations as the learner does, normalised if `normalize_obs` is on.

    Returns:
        `Algorithm`, with `OffPolicyConfig` as its config. ``state.extra`` holds the parameters of
        the last `lag` updates. The info has, besides the shared fields, ``ess`` (the effective
        sample size (Σ w)²/Σ w² as a share of the rows, of the weights w before any clipping: ρₜ,
        ρ_s … ρₜ or ρ_s … ρ_e), ``ratio_mean`` and ``ratio_max`` of ρₜ. ``approx_kl`` is that of
        KL(b‖π).

    Raises:
        ValueError: from ``init``, for a recurrent policy or settings out of range.
        TypeError: `behaviour` is a bare `Policy`, without parameters.

    Example:
        >>> import jax, jaxpg
        >>> env = jaxpg.from_gymnax("CartPole-v1")
        >>> algorithm = jaxpg.off_policy(env, jaxpg.mlp_policy(env))
        >>> config = jaxpg.OffPolicyConfig(num_envs=4, num_steps=16, lag=2)
        >>> state = algorithm.init(jax.random.key(0), config)
        >>> state, info = jax.jit(algorithm.step)(state, config)
        >>> float(info["ess"])
        1.0

    References:
        Precup, Sutton and Singh, Eligibility traces for off-policy policy evaluation, ICML 2000,
        section 3 (per-decision weights); Espeholt et al., IMPALA, arXiv 1802.01561, eq. 1 and
        section 4.2 (V-trace and its policy gradient); Degris, White and Sutton, Off-policy
        actor-critic, arXiv 1205.4839, which leaves out ρ_s … ρ_{t−1}.
    """
    if isinstance(behaviour, Policy):
        raise TypeError("behaviour must be (policy, params) or obs -> dist_params, got a Policy")
    pair = two_policies(policy, behaviour)

    def init(key: Key, config: OffPolicyConfig) -> TrainState:
        feed_forward_only("off_policy", policy)
        check_off_policy_config(config)

        def extra(params: PyTree) -> PyTree:
            if behaviour is not None or config.lag == 0:
                return ()
            return jax.tree.map(lambda x: jnp.repeat(x[None], config.lag, axis=0), params)

        return init_state(key, env, policy, optimizer, config, extra=extra)

    def step(state: TrainState, config: OffPolicyConfig) -> tuple[TrainState, Info]:
        config = current(config, state.update)
        keys = split_key(state.key, "next", "rollout", "optimize")
        actor, past = state.params, state.extra
        if jax.tree.leaves(past):
            # slot u mod lag was written lag updates ago, and is written again now
            slot = state.update % config.lag
            actor = jax.tree.map(lambda x: x[slot], past)
            past = jax.tree.map(lambda x, new: x.at[slot].set(new), past, state.params)
        data = collect(keys["rollout"], env, pair, state, config, params=(actor, state.params))
        rows = data.rows

        family = policy.distribution
        dist_params, _ = replay(policy, state.params, rows.obs, reset=rows.reset)
        log_probs = family.log_prob(dist_params, rows.action)
        # an action that one of the two forbids must not turn the sums into inf - inf
        log_ratios = jnp.clip(log_probs - rows.log_prob, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        advantages, targets, log_weights = corrected(log_ratios, rows, data.next_values, config)

        def loss_fn(params: PyTree, rows: Transition) -> tuple[Array, Info]:
            dist_params, values = replay(policy, params, rows.obs, reset=rows.reset)
            return actor_critic_loss(
                family.log_prob(dist_params, rows.action),
                advantages,
                values,
                targets,
                entropies=family.entropy(dist_params),
                vf_coef=config.vf_coef,
                ent_coef=config.ent_coef,
            )

        params, opt_state, metrics = optimize(
            keys["optimize"],
            loss_fn,
            optimizer(config),
            state.params,
            state.opt_state,
            rows,
            num_epochs=1,
            num_minibatches=1,
        )
        ratios = ratio_of(log_ratios)
        metrics |= {
            "ess": effective_sample_size(log_weights),
            "ratio_mean": jnp.mean(ratios),
            "ratio_max": jnp.max(ratios),
            "approx_kl": jnp.mean(kl_k3(rows.log_prob, log_probs)),
        }
        state = advance(state, keys["next"], data, params, opt_state, extra=past)
        return state, report(data, metrics, targets=targets)

    return Algorithm(init, step, acting(policy), env)


def two_policies(policy: Policy, behaviour: Behaviour | None) -> Policy:
    """Acts as the behaviour policy does, values as `policy` does: parameters are a pair."""
    family = policy.distribution
    if isinstance(behaviour, tuple):
        family = behaviour[0].distribution

    def apply(params: tuple[PyTree, PyTree], obs: PyTree) -> tuple[PyTree, Array]:
        actor, learner = params
        value = policy.apply(learner, obs)[1]
        if behaviour is None:
            return policy.apply(actor, obs)[0], value
        if isinstance(behaviour, tuple):
            return behaviour[0].apply(behaviour[1], obs)[0], value
        return behaviour(obs), value

    return Policy(policy.init, apply, family)


def corrected(
    log_ratios: Array, rows: Transition, next_values: Array, config: OffPolicyConfig
) -> tuple[Array, Array, Array]:
    """``[T, B]`` weighted advantages, the critic's targets, and logarithms of the weights."""
    ends = (rows.terminated, rows.truncated)
    trace = vtrace(
        jnp.zeros_like(log_ratios) if config.correction == "none" else log_ratios,
        rows.reward,
        rows.value,
        next_values,
        *ends,
        gamma=config.gamma,
        lambda_=config.trace_lambda,
        rho_clip=config.rho_clip,
        c_clip=config.c_clip,
        pg_rho_clip=config.pg_rho_clip,
    )
    if config.correction in ("vtrace", "none"):
        return trace.advantages, trace.targets, log_ratios
    clipped = log_ratios
    if config.ratio_clip is not None:
        clipped = jnp.minimum(log_ratios, jnp.log(config.ratio_clip))
    if config.correction == "per_decision":
        until = sum_from_start(clipped, rows)
        returns = per_decision_returns(clipped, rows.reward, *ends, next_values, gamma=config.gamma)
        advantages = ratio_of(until - clipped) * (returns - ratio_of(clipped) * rows.value)
        return advantages, trace.targets, sum_from_start(log_ratios, rows)
    returns = discounted_returns(rows.reward, *ends, next_values, gamma=config.gamma)
    weights = ratio_of(sum_over_episode(clipped, rows))
    return weights * (returns - rows.value), trace.targets, sum_over_episode(log_ratios, rows)


def sum_from_start(x: Array, rows: Transition) -> Array:
    """``[T, B]`` sums of `x` from the episode's first row in the rollout up to this row."""
    return discounted_returns(x[::-1], rows.reset[::-1], gamma=1.0)[::-1]


def sum_over_episode(x: Array, rows: Transition) -> Array:
    """``[T, B]`` sums of `x` over all rows of the episode in the rollout."""
    to_end = discounted_returns(x, rows.terminated | rows.truncated, gamma=1.0)
    return sum_from_start(x, rows) + to_end - x


def effective_sample_size(log_weights: Array) -> Array:
    """(Σ w)² / (n Σ w²), in (0, 1]: 1 for equal weights; from logarithms, so it cannot overflow."""
    total = 2 * jax.nn.logsumexp(log_weights) - jax.nn.logsumexp(2 * log_weights)
    return jnp.exp(total - math.log(log_weights.size))


def check_off_policy_config(config: OffPolicyConfig) -> None:
    """`ValueError` for settings that off-policy learning cannot work with."""
    positive_int("lag", config.lag, minimum=0)
    one_of("correction", config.correction, ("vtrace", "per_decision", "trajectory", "none"))
    in_range("trace_lambda", config.trace_lambda, 0, 1)
    in_range("rho_clip", config.rho_clip, 0, open_low=True)
    in_range("c_clip", config.c_clip, 0, open_low=True)
    in_range("pg_rho_clip", config.pg_rho_clip, 0, open_low=True)
    in_range("ratio_clip", config.ratio_clip, 0, open_low=True)
    in_range("vf_coef", config.vf_coef, 0)
