"""Floor 4: trust region policy optimisation.

What is different about it: the policy takes one natural-gradient step per rollout, of a given KL
divergence, checked by a line search; the critic is fitted apart from it, by its own optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from jaxpg._checks import divides, in_range, positive_int
from jaxpg.advantages import gae, normalize
from jaxpg.algorithms.common import (
    Config,
    acting,
    adam,
    advance,
    carry_of,
    collect,
    current,
    feed_forward_only,
    init_state,
    report,
    static,
)
from jaxpg.kl import kl_k3
from jaxpg.losses import importance_sampling_loss, squared_value_loss
from jaxpg.optimization import optimize, permutation
from jaxpg.trust_region import backtracking_line_search, fisher_operator, natural_step
from jaxpg.types import Algorithm, Env, Info, Key, Optimizer, Policy, PyTree, TrainState, split_key


@struct.dataclass(kw_only=True)
class TRPOConfig(Config):
    """Settings of `trpo`. `learning_rate`, `adam_eps` and `max_grad_norm` are the critic's."""

    learning_rate: float = 1e-3
    """Step size of the critic's optimizer."""
    gae_lambda: float = 0.95
    """λ of generalised advantage estimation, in [0, 1]."""
    max_kl: float = 0.01
    """δ, bound on the mean KL(old‖new) of one update, nats."""
    cg_iterations: int = static(10)
    """Conjugate-gradient iterations at most."""
    cg_damping: float = 0.1
    """Multiple of the identity added to the Fisher matrix while solving."""
    fisher_subsample: int = static(1)
    """The Fisher matrix averages over one row in this many, drawn at random."""
    line_search_steps: int = static(10)
    """Candidates of the line search at most."""
    line_search_decay: float = 0.8
    """Factor between one candidate and the next, in (0, 1)."""
    accept_ratio: float = 0.1
    """Share of the first-order gain that a candidate must reach, in [0, 1]."""
    kl_tolerance: float = 0.0
    """Relative excess of the KL over `max_kl` that the line search still accepts."""
    ent_coef: float = 0.0
    """Weight of an entropy bonus in the surrogate."""
    critic_epochs: int = static(10)
    """Passes over each rollout that fit the critic."""
    critic_minibatches: int = static(4)
    """Critic steps a pass; divides num_envs × num_steps."""


class Batch(NamedTuple):
    """One rollout, flattened to ``[N, …]``."""

    obs: PyTree
    action: Array
    old_log_prob: Array
    advantage: Array
    target: Array


def trpo(env: Env, policy: Policy, optimizer: Optimizer = adam) -> Algorithm:
    """Trust region policy optimisation.

    maximise  E[ρ A] + c_e H(π)  subject to  E[KL(π_old‖π)] ≤ δ,   ρ = π(a|s)/π_old(a|s)

    by one step along F⁻¹∇ of quadratic KL δ, shortened until the true KL is within δ and the
    surrogate has improved. If no candidate passes, the gradient is zero, or the curvature is not
    positive, the policy stays as it is and ``info["accepted"]`` is 0. A is GAE(λ), normalised
    over the batch; the critic minimises ½(v − G)² with G = A + v_old.

    Args:
        env: the environment.
        policy: feed-forward, with ``params = {"actor": …, "critic": …}`` and nothing shared: a
            critic step on a shared trunk would move the policy out of its trust region.
        optimizer: ``config -> optax.GradientTransformation``, of the critic only.

    Returns:
        `Algorithm`, with `TRPOConfig` as its config. Its info also holds ``kl`` (of this update,
        KL(old‖new), nats), ``accepted``, ``step_scale`` (√(2δ/sᵀFs) times the fraction that the
        line search left), ``improvement`` (of the surrogate), ``expected_improvement`` (first
        order, full step) and ``critic_grad_norm``; ``grad_norm`` is the surrogate's.

    Raises:
        ValueError: from ``init``, for a shared trunk, a recurrent policy, sizes that do not divide
            or settings out of range.

    Example:
        >>> import jax, jaxpg
        >>> env = jaxpg.from_gymnax("CartPole-v1")
        >>> algorithm = jaxpg.trpo(env, jaxpg.mlp_policy(env))
        >>> config = jaxpg.TRPOConfig(num_envs=4, num_steps=16)
        >>> state = algorithm.init(jax.random.key(0), config)
        >>> state, info = jax.jit(algorithm.step)(state, config)
        >>> bool(info["kl"] <= config.max_kl)
        True

    References:
        Schulman et al., Trust Region Policy Optimization, arXiv 1502.05477, eq. 14 and appendix C.
        Deviations: damping; advantages by GAE (arXiv 1506.02438) and normalised; the critic is
        fitted by minibatches of a first-order optimizer.
    """
    family = policy.distribution

    def init(key: Key, config: TRPOConfig) -> TrainState:
        feed_forward_only("trpo", policy)
        check_trpo_config(config)

        def init_opt_state(config: TRPOConfig, params: PyTree) -> PyTree:
            check_separate(params)
            return optimizer(config).init(params["critic"])

        return init_state(key, env, policy, optimizer, config, init_opt_state=init_opt_state)

    def improve(key: Key, params: PyTree, batch: Batch, config: TRPOConfig) -> tuple[PyTree, Info]:
        """The actor's one step."""

        def dist_params_of(obs: PyTree) -> Callable[[PyTree], PyTree]:
            return lambda actor: policy.apply({**params, "actor": actor}, obs)[0]

        dist_params_fn = dist_params_of(batch.obs)
        old = jax.lax.stop_gradient(dist_params_fn(params["actor"]))

        def surrogate(actor: PyTree) -> tuple[Array, tuple[Array, Array, PyTree]]:
            new = dist_params_fn(actor)
            log_probs = family.log_prob(new, batch.action)
            entropy = jnp.mean(family.entropy(new))
            loss = importance_sampling_loss(log_probs, batch.old_log_prob, batch.advantage)
            policy_loss = jnp.mean(loss)
            approx_kl = jnp.mean(kl_k3(batch.old_log_prob, log_probs))
            value = config.ent_coef * entropy - policy_loss
            return value, (
                {"policy_loss": policy_loss, "entropy": entropy, "approx_kl": approx_kl},
                new,
            )

        def evaluate(actor: PyTree) -> tuple[Array, Array]:
            value, (_, new) = surrogate(actor)
            return value, jnp.mean(family.kl(old, new))

        gradient, (metrics, _) = jax.grad(surrogate, has_aux=True)(params["actor"])
        rows = batch.obs
        if config.fisher_subsample > 1:
            size = batch.advantage.shape[0]
            chosen = permutation(key, size)[: size // config.fisher_subsample]
            rows = jax.tree.map(lambda x: x[chosen], rows)
        full = natural_step(
            fisher_operator(dist_params_of(rows), family.kl, params["actor"]),
            gradient,
            max_kl=config.max_kl,
            damping=config.cg_damping,
            num_iterations=config.cg_iterations,
        )
        actor, accepted, search = backtracking_line_search(
            evaluate,
            params["actor"],
            full.step,
            max_kl=config.max_kl,
            expected_improvement=full.expected_improvement,
            accept_ratio=config.accept_ratio,
            kl_tolerance=config.kl_tolerance,
            decay=config.line_search_decay,
            num_trials=config.line_search_steps,
        )
        return actor, metrics | {
            "approx_kl": surrogate(actor)[1][0]["approx_kl"],
            "grad_norm": optax.tree.norm(gradient),
            "kl": search.kl,
            "accepted": accepted,
            "step_scale": full.scale * search.fraction,
            "improvement": search.improvement,
            "expected_improvement": full.expected_improvement,
        }

    def step(state: TrainState, config: TRPOConfig) -> tuple[TrainState, Info]:
        config = current(config, state.update)
        keys = split_key(state.key, "next", "rollout", "fisher", "critic")
        data = collect(keys["rollout"], env, policy, state, config)
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
        batch = Batch(rows.obs, rows.action, rows.log_prob, normalize(advantages), targets)
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        actor, metrics = improve(keys["fisher"], state.params, batch, config)

        def critic_loss(critic: PyTree, batch: tuple[PyTree, Array]) -> tuple[Array, Info]:
            obs, target = batch
            values = policy.apply({**state.params, "critic": critic}, obs)[1]
            loss = jnp.mean(squared_value_loss(values, target))
            return loss, {"value_loss": loss}

        critic, opt_state, fit = optimize(
            keys["critic"],
            critic_loss,
            optimizer(config),
            state.params["critic"],
            state.opt_state,
            (batch.obs, batch.target),
            num_epochs=config.critic_epochs,
            num_minibatches=config.critic_minibatches,
        )
        actor_nonfinite = ~jnp.isfinite(metrics["grad_norm"])
        metrics |= {
            "value_loss": fit["value_loss"],
            "critic_grad_norm": fit["grad_norm"],
            "nonfinite": jnp.maximum(fit["nonfinite"], actor_nonfinite),
        }
        params = {"actor": actor, "critic": critic}
        state = advance(state, keys["next"], data, params, opt_state)
        return state, report(data, metrics, targets=targets)

    return Algorithm(init, step, acting(policy), env, carry_of(policy))


def check_separate(params: PyTree) -> None:
    """`ValueError` unless the parameters are an actor and a critic and nothing else."""
    found = sorted(params) if isinstance(params, dict) else type(params).__name__
    if found != ["actor", "critic"]:
        raise ValueError(
            "trpo needs params = {'actor': …, 'critic': …} without a shared trunk "
            f"(critic steps would move the policy), got {found}"
        )


def check_trpo_config(config: TRPOConfig) -> None:
    """`ValueError` for settings that TRPO cannot work with, naming the numbers."""
    for name in ("cg_iterations", "line_search_steps", "critic_epochs", "critic_minibatches"):
        positive_int(name, getattr(config, name))
    size = positive_int("num_envs", config.num_envs) * positive_int("num_steps", config.num_steps)
    divides("num_envs × num_steps", size, "critic_minibatches", config.critic_minibatches)
    positive_int("fisher_subsample", config.fisher_subsample)
    divides("num_envs × num_steps", size, "fisher_subsample", config.fisher_subsample)
    in_range("gae_lambda", config.gae_lambda, 0, 1)
    in_range("max_kl", config.max_kl, 0, open_low=True)
    in_range("cg_damping", config.cg_damping, 0)
    in_range("line_search_decay", config.line_search_decay, 0, 1, open_low=True, open_high=True)
    in_range("accept_ratio", config.accept_ratio, 0, 1)
    in_range("kl_tolerance", config.kl_tolerance, 0)
