"""Floor 4: proximal policy optimisation, clipped or with a KL penalty.

What is different about it: several epochs of minibatches on one rollout, held near the policy
that acted by clipping the ratio, or by a penalty on the KL divergence whose coefficient may adapt.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxpg._checks import divides, in_range, one_of, positive_int
from jaxpg.advantages import gae, normalize
from jaxpg.algorithms.common import (
    Collected,
    Config,
    acting,
    adam,
    advance,
    carry_of,
    collect,
    current,
    init_state,
    report,
    static,
)
from jaxpg.kl import adaptive_kl_coef
from jaxpg.objectives import ppo_clip_loss, ppo_kl_loss
from jaxpg.optimization import optimize, rows_in_cache
from jaxpg.rollouts import replay
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
    one_replica,
    split_key,
)


@struct.dataclass(kw_only=True)
class PPOConfig(Config):
    """Settings of `ppo`."""

    gae_lambda: float = 0.95
    """λ of generalised advantage estimation, in [0, 1]."""
    num_epochs: int = static(4)
    """Passes over each rollout."""
    num_minibatches: int = static(4)
    """Optimizer steps a pass; divides num_envs × num_steps (num_envs for a recurrent policy)."""
    clip_epsilon: float = 0.2
    """Ratios count up to 1 ± this. Unused when `kl_coef` is set."""
    clip_epsilon_high: float | None = None
    """Another upper offset from 1; None takes `clip_epsilon`."""
    dual_clip: float | None = None
    """Bound c > 1 on the loss of negative advantages; None is off."""
    value_clip_epsilon: float | None = None
    """Clips the value's change, in (scaled) reward units; None is off."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    normalize_advantages: str | None = static("minibatch")
    """Scope of advantage normalisation: "minibatch", "batch" (once a rollout) or None."""
    target_kl: float | None = None
    """Stops an update, per minibatch, once approx_kl exceeds it; None is off."""
    kl_coef: float | None = None
    """Coefficient of a KL penalty that takes the place of clipping; None clips."""
    kl_target: float | None = None
    """Adapts the coefficient after each update towards this KL (nats); None keeps it fixed."""
    kl_direction: str = static("old_new")
    """Which KL is penalised: "old_new" is KL(old‖new), the paper's; "new_old" is KL(new‖old)."""


class Batch(NamedTuple):
    """What the loss sees, ``[N, …]``, or ``[T, N, …]`` under a recurrent policy."""

    obs: PyTree
    action: Array
    old_log_prob: Array
    old_value: Array
    old_dist_params: PyTree  # () when clipping
    advantage: Array
    target: Array
    reset: Array | tuple  # recurrent only
    carry: PyTree  # recurrent only, with a leading axis of length 1


def ppo(env: Env, policy: Policy, optimizer: Optimizer = adam) -> Algorithm:
    """Proximal policy optimisation.

    Clipped:    L = E[−min(ρ A, clip(ρ, 1 − ε, 1 + ε) A)] + c_v ½(v − G)² − c_e H(π)
    Penalised:  L = E[−ρ A + β KL(π_old‖π)] + c_v ½(v − G)² − c_e H(π)

    with ρ = π(a|s)/π_old(a|s), A from GAE(λ), G = A + v_old. Truncated steps bootstrap from the
    value of their own final observation.

    Args:
        env: the environment (`from_gymnax` or any `Env`).
        policy: feed-forward or recurrent; a recurrent one gets minibatches of whole environments.
        optimizer: ``config -> optax.GradientTransformation``, called inside the trace.

    Returns:
        `Algorithm`, with `PPOConfig` as its config. With `kl_coef` set, ``state.extra`` holds the
        coefficient in use; it adapts once per update when `kl_target` is set.

    Raises:
        ValueError: from ``init``, for sizes that do not divide or settings out of range.

    Example:
        >>> import jax, jaxpg
        >>> env = jaxpg.from_gymnax("CartPole-v1")
        >>> algorithm = jaxpg.ppo(env, jaxpg.mlp_policy(env))
        >>> config = jaxpg.PPOConfig(num_envs=4, num_steps=16)
        >>> state = algorithm.init(jax.random.key(0), config)
        >>> state, info = jax.jit(algorithm.step)(state, config)
        >>> int(state.update)
        1

    References:
        Schulman et al., Proximal Policy Optimization Algorithms, arXiv 1707.06347, eq. 7 (clipped),
        eq. 8 and the rule below it (penalised), eq. 9 (whole loss). Deviations: advantages are
        normalised; the critic's targets are λ-returns.
    """
    recurrent = policy.initial_carry is not None
    family = policy.distribution

    def init(key: Key, config: PPOConfig) -> TrainState:
        check_ppo_config(config, recurrent=recurrent)

        def extra(params: PyTree) -> PyTree:
            return () if config.kl_coef is None else jnp.asarray(config.kl_coef, jnp.float32)

        return init_state(key, env, policy, optimizer, config, extra=extra)

    def loss_fn(
        params: PyTree, batch: Batch, config: PPOConfig, kl_coef: Array
    ) -> tuple[Array, Info]:
        carry = jax.tree.map(lambda x: x[0], batch.carry)
        dist_params, values = replay(
            policy, params, batch.obs, carry, batch.reset if recurrent else None
        )
        log_probs = family.log_prob(dist_params, batch.action)
        shared = {
            "entropies": family.entropy(dist_params),
            "vf_coef": config.vf_coef,
            "ent_coef": config.ent_coef,
        }
        if config.kl_coef is None:
            return ppo_clip_loss(
                log_probs,
                batch.old_log_prob,
                batch.advantage,
                values,
                batch.target,
                old_values=batch.old_value,
                clip_epsilon=config.clip_epsilon,
                clip_epsilon_high=config.clip_epsilon_high,
                dual_clip=config.dual_clip,
                value_clip_epsilon=config.value_clip_epsilon,
                **shared,
            )
        pair = (batch.old_dist_params, dist_params)
        kl = family.kl(*pair) if config.kl_direction == "old_new" else family.kl(*pair[::-1])
        return ppo_kl_loss(
            log_probs,
            batch.old_log_prob,
            batch.advantage,
            values,
            batch.target,
            kl,
            kl_coef=kl_coef,
            **shared,
        )

    def step(
        state: TrainState, config: PPOConfig, *, pmean: Pmean = one_replica
    ) -> tuple[TrainState, Info]:
        config = current(config, state.update)
        keys = split_key(state.key, "next", "rollout", "optimize")
        data = collect(keys["rollout"], env, policy, state, config, pmean=pmean)
        rows = data.rows
        advantages = gae(
            rows.reward,
            rows.value,
            data.next_values,
            rows.terminated,
            rows.truncated,
            gamma=config.gamma,
            lambda_=config.gae_lambda,
        )
        targets = advantages + rows.value
        if config.normalize_advantages == "batch":
            advantages = normalize(advantages)
        batch = make_batch(data, advantages, targets, recurrent, config.kl_coef is not None)

        def prepare(minibatch: Batch) -> Batch:
            if config.normalize_advantages != "minibatch":
                return minibatch
            return minibatch._replace(advantage=normalize(minibatch.advantage))

        minibatch_size = config.num_envs * config.num_steps // config.num_minibatches
        replicas = 1 if pmean is one_replica else jax.local_device_count()
        kl_coef = state.extra
        if config.kl_coef is not None and config.kl_target is None:
            kl_coef = config.kl_coef
        params, opt_state, metrics = optimize(
            keys["optimize"],
            lambda params, batch: loss_fn(params, batch, config, kl_coef),
            optimizer(config),
            state.params,
            state.opt_state,
            batch,
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
            axis=1 if recurrent else 0,
            target_kl=config.target_kl,
            prepare=prepare,
            # the rows of a recurrent policy are moments in time, not to be parted
            rows_at_a_time=None if recurrent else rows_in_cache(minibatch_size, replicas=replicas),
            pmean=pmean,
        )
        if config.kl_coef is not None:
            dist_params, _ = replay(policy, params, rows.obs, data.carry, rows.reset)
            kl = pmean(jnp.mean(family.kl(rows.dist_params, dist_params)))
            metrics |= {"kl": kl, "kl_coef": jnp.asarray(kl_coef)}
            if config.kl_target is not None:
                kl_coef = adaptive_kl_coef(kl_coef, kl, target_kl=config.kl_target)
        state = advance(state, keys["next"], data, params, opt_state, extra=kl_coef)
        return state, report(data, metrics, targets=targets, pmean=pmean)

    return Algorithm(init, step, acting(policy), env, carry_of(policy))


def make_batch(
    data: Collected, advantages: Array, targets: Array, recurrent: bool, penalised: bool
) -> Batch:
    """The rollout as the loss wants it: samples flattened unless the policy is recurrent."""
    rows = data.rows
    batch = Batch(
        obs=rows.obs,
        action=rows.action,
        old_log_prob=rows.log_prob,
        old_value=rows.value,
        old_dist_params=rows.dist_params if penalised else (),
        advantage=advantages,
        target=targets,
        reset=rows.reset if recurrent else (),
        carry=(),
    )
    if recurrent:
        return batch._replace(carry=jax.tree.map(lambda x: x[None], data.carry))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)


def check_ppo_config(config: PPOConfig, *, recurrent: bool) -> None:
    """`ValueError` for settings that PPO cannot work with, naming the numbers."""
    positive_int("num_epochs", config.num_epochs)
    positive_int("num_minibatches", config.num_minibatches)
    if recurrent:
        divides("num_envs", config.num_envs, "num_minibatches", config.num_minibatches)
    else:
        size: Any = config.num_envs * config.num_steps
        divides("num_envs × num_steps", size, "num_minibatches", config.num_minibatches)
    in_range("gae_lambda", config.gae_lambda, 0, 1)
    in_range("clip_epsilon", config.clip_epsilon, 0, open_low=True)
    in_range("clip_epsilon_high", config.clip_epsilon_high, 0, open_low=True)
    in_range("dual_clip", config.dual_clip, 1, open_low=True)
    in_range("value_clip_epsilon", config.value_clip_epsilon, 0, open_low=True)
    in_range("vf_coef", config.vf_coef, 0)
    in_range("target_kl", config.target_kl, 0, open_low=True)
    in_range("kl_coef", config.kl_coef, 0)
    in_range("kl_target", config.kl_target, 0, open_low=True)
    if config.normalize_advantages is not None:
        one_of("normalize_advantages", config.normalize_advantages, ("minibatch", "batch"))
    one_of("kl_direction", config.kl_direction, ("old_new", "new_old"))
    if config.kl_target is not None and config.kl_coef is None:
        raise ValueError("kl_target adapts kl_coef: give kl_coef its first value as well")
