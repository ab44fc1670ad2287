"""Floor 4: advantage actor-critic; its defaults are A2C.

What is different about it: one gradient step per short rollout, straight along the policy gradient
(no ratios, no clipping), with a choice of how the critic judges an action.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxpg._checks import divides, in_range, one_of, positive_int
from jaxpg.advantages import normalize
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
from jaxpg.kl import kl_k3
from jaxpg.objectives import actor_critic_loss
from jaxpg.optimization import optimize
from jaxpg.returns import lambda_returns, n_step_returns
from jaxpg.rollouts import apply_policy, replay
from jaxpg.types import (
    Algorithm,
    Discrete,
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
class ActorCriticConfig(Config):
    """Settings of `actor_critic`. The defaults are A2C: short rollouts of many environments."""

    num_envs: int = static(16)
    """Environments stepped side by side (B)."""
    num_steps: int = static(8)
    """Steps of each environment in one rollout (T)."""
    learning_rate: float = 7e-4
    """Step size of the optimizer."""
    advantage: str = static("gae")
    """Critic's verdict: "td", "n_step" or "gae" of a state value, or "action_value"."""
    n_step: int = static(5)
    """Rewards in an n-step return, under advantage="n_step"."""
    gae_lambda: float = 1.0
    """λ, in [0, 1], of "gae", and of the returns that an action-value critic learns."""
    num_epochs: int = static(1)
    """Gradient passes over each rollout; later ones are off policy and uncorrected."""
    num_minibatches: int = static(1)
    """Optimizer steps a pass, over groups of environments; divides num_envs."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    normalize_advantages: bool = static(False)
    """Normalise advantages over the whole rollout."""


def actor_critic(env: Env, policy: Policy, optimizer: Optimizer = adam) -> Algorithm:
    """Advantage actor-critic (A2C).

    L = E[−A log π(a|s)] + c_v ½(v − G)² − c_e H(π)

    with A and the critic's target G by ``config.advantage``:

    ==============  =====================================  =======================================
    "td"            A = G − v(s)                           G = r + γ v(s')
    "n_step"        A = G − v(s)                           G of at most n rewards
    "gae"           A = G − v(s)                           G the λ-return
    "action_value"  A = Q(s,a) − Σ_b π(b|s) Q(s,b)         G the λ-return of v = Σ_b π(b|·) Q(·,b),
                    (v becomes Q(s,a) in the loss)         λ = 0: r + γ Σ_b π(b|s') Q(s',b)
    ==============  =====================================  =======================================

    All bootstrap from the true successor, through time limits and at the end of the rollout.

    Args:
        env: the environment.
        policy: feed-forward or recurrent, with shared or separate actor and critic. Under
            "action_value" its ``apply`` returns ``[N, num_actions]`` action values in place of
            ``[N]`` state values (``mlp_policy(env, action_values=True)``), over discrete actions.
        optimizer: ``config -> optax.GradientTransformation``, called inside the trace.

    Returns:
        `Algorithm`, with `ActorCriticConfig` as its config.

    Raises:
        ValueError: from ``init``, for sizes that do not divide, settings out of range, or a critic
            whose output does not fit ``config.advantage``.

    Example:
        >>> import jax, jaxpg
        >>> env = jaxpg.from_gymnax("CartPole-v1")
        >>> algorithm = jaxpg.actor_critic(env, jaxpg.mlp_policy(env))
        >>> config = jaxpg.ActorCriticConfig(num_envs=4, advantage="n_step")
        >>> state = algorithm.init(jax.random.key(0), config)
        >>> state, info = jax.jit(algorithm.step)(state, config)
        >>> int(info["env_steps"])
        32

    References:
        Mnih et al., Asynchronous Methods for Deep Reinforcement Learning, arXiv 1602.01783,
        section 4 (synchronous here); Schulman et al., arXiv 1506.02438, eq. 16; Sutton et al.,
        Policy Gradient Methods for Reinforcement Learning with Function Approximation, NIPS 1999,
        theorem 1 (action values). Deviation: the critic's loss carries a factor ½.
    """
    family = policy.distribution

    def init(key: Key, config: ActorCriticConfig) -> TrainState:
        check_actor_critic_config(config)
        state = init_state(key, env, policy, optimizer, config)
        check_critic(env, policy, state, config)
        return state

    def loss_fn(
        params: PyTree, batch: tuple[Transition, Array, Array, PyTree], config: ActorCriticConfig
    ) -> tuple[Array, Info]:
        rows, advantages, targets, carry = batch
        carry = jax.tree.map(lambda x: x[0], carry)
        dist_params, values = replay(policy, params, rows.obs, carry, rows.reset)
        log_probs = family.log_prob(dist_params, rows.action)
        loss, metrics = actor_critic_loss(
            log_probs,
            advantages,
            taken(values, rows.action) if config.advantage == "action_value" else values,
            targets,
            entropies=family.entropy(dist_params),
            vf_coef=config.vf_coef,
            ent_coef=config.ent_coef,
        )
        return loss, {**metrics, "approx_kl": jnp.mean(kl_k3(rows.log_prob, log_probs))}

    def step(
        state: TrainState, config: ActorCriticConfig, *, pmean: Pmean = one_replica
    ) -> tuple[TrainState, Info]:
        config = current(config, state.update)
        keys = split_key(state.key, "next", "rollout", "optimize")
        by_action = config.advantage == "action_value"
        valued = expected_value(policy) if by_action else policy
        data = collect(keys["rollout"], env, valued, state, config, pmean=pmean)
        rows = data.rows
        targets = value_targets(data, config)
        judged = targets
        if by_action:
            _, values = replay(policy, state.params, rows.obs, data.carry, rows.reset)
            judged = taken(values, rows.action)
        advantages = judged - rows.value
        if config.normalize_advantages:
            advantages = normalize(advantages)
        carry = jax.tree.map(lambda x: x[None], data.carry)
        params, opt_state, metrics = optimize(
            keys["optimize"],
            lambda params, batch: loss_fn(params, batch, config),
            optimizer(config),
            state.params,
            state.opt_state,
            (rows, advantages, targets, carry),
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
            axis=1,
            pmean=pmean,
        )
        state = advance(state, keys["next"], data, params, opt_state)
        return state, report(data, metrics, targets=targets, pmean=pmean)

    return Algorithm(init, step, acting(policy), env, carry_of(policy))


def value_targets(data: Collected, config: ActorCriticConfig) -> Array:
    """``[T, B]`` what the critic learns; minus the state's value, the advantage."""
    rows = data.rows
    steps = (rows.reward, data.next_values, rows.terminated, rows.truncated)
    if config.advantage == "n_step":
        return n_step_returns(*steps, gamma=config.gamma, n=config.n_step)
    lambda_ = 0.0 if config.advantage == "td" else config.gae_lambda
    return lambda_returns(*steps, gamma=config.gamma, lambda_=lambda_)


def taken(action_values: Array, actions: Array) -> Array:
    """``Q(s, a)`` of the actions taken: ``[…, A]`` and ``[…]`` to ``[…]``."""
    return jnp.take_along_axis(action_values, actions[..., None], axis=-1)[..., 0]


def expected_value(policy: Policy) -> Policy:
    """`policy` with ``Σ_b π(b|s) Q(s,b)`` as its state value, from an action-value critic."""

    def expect(out: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
        logits, action_values = out
        return logits, jnp.sum(jax.nn.softmax(logits) * action_values, axis=-1)

    if policy.initial_carry is None:
        return policy._replace(apply=lambda params, obs: expect(policy.apply(params, obs)))

    def apply(*args: PyTree) -> tuple[PyTree, tuple[PyTree, Array]]:
        carry, out = policy.apply(*args)
        return carry, expect(out)

    return policy._replace(apply=apply)


def check_critic(env: Env, policy: Policy, state: TrainState, config: ActorCriticConfig) -> None:
    """`ValueError` when the critic's output does not fit the kind of advantage."""
    want: tuple[int, ...] = (config.num_envs,)
    if config.advantage == "action_value":
        if not isinstance(env.action_space, Discrete):
            raise ValueError(
                f"advantage='action_value' needs a Discrete action space, got {env.action_space}"
            )
        want += (env.action_space.n,)
    runner = state.runner
    value = jax.eval_shape(
        lambda params, *args: apply_policy(policy, params, *args)[2],
        state.params,
        runner.carry,
        runner.obs,
        runner.reset,
    )
    if value.shape != want:
        raise ValueError(
            f"advantage={config.advantage!r} needs a critic with values {want}, got {value.shape}"
        )


def check_actor_critic_config(config: ActorCriticConfig) -> None:
    """`ValueError` for settings that actor-critic cannot work with, naming the numbers."""
    one_of("advantage", config.advantage, ("td", "n_step", "gae", "action_value"))
    for name in ("n_step", "num_epochs", "num_minibatches"):
        positive_int(name, getattr(config, name))
    divides(
        "num_envs",
        positive_int("num_envs", config.num_envs),
        "num_minibatches",
        config.num_minibatches,
    )
    in_range("gae_lambda", config.gae_lambda, 0, 1)
    in_range("vf_coef", config.vf_coef, 0)
    in_range("ent_coef", config.ent_coef)
