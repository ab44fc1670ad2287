"""GRPO on token sequences, and its relatives as presets of the same assembly.

One update: prompts → G completions of each → scores → (groups that count) → advantages → epochs
of minibatches over prompts. What differs between the algorithms is how a group's rewards become
advantages, and which ratio is clipped and how the tokens are averaged:

===============  ==================================  ==========================================
preset           advantage of sample i               loss
===============  ==================================  ==========================================
`grpo`           (rᵢ − mean)/std of the group        token ratios clipped, mean per sequence
`dapo`           the same, mixed groups only         clip-higher, mean over all tokens
`dr_grpo`        rᵢ − mean                           token ratios clipped, constant length
`rloo`           rᵢ − mean of the others             sequence ratio clipped (a product)
`gspo`           (rᵢ − mean)/std                     sequence ratio clipped (a geometric mean)
`cispo`          (rᵢ − mean)/std                     capped ratio as a constant weight of log π
`reinforce_pp`   reward-to-go, whitened over tokens  token ratios clipped, mean over all tokens
===============  ==================================  ==========================================

Each is `grpo` with another `advantages` or `loss` function; so is an algorithm of one's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxpg._checks import as_key
from jaxpg.advantages import (
    group_advantages,
    leave_one_out_advantages,
    reinforce_pp_advantages,
)
from jaxpg.algorithms.common import INFO_FIELDS, adam, current, own_buffer
from jaxpg.kl import kl_k1, kl_k3
from jaxpg.losses import broadcast_per_token, cispo_loss
from jaxpg.objectives import dapo_loss, dr_grpo_loss, grpo_loss, gspo_loss, rloo_loss
from jaxpg.optimization import optimize, skip_zero_gradients
from jaxpg.reductions import masked_mean, token_mean
from jaxpg.tokens.config import (
    CISPOConfig,
    DAPOConfig,
    GRPOConfig,
    GSPOConfig,
    ReinforcePPConfig,
    RLOOConfig,
    TokenConfig,
    check_config,
)
from jaxpg.tokens.dense_rewards import last_token_rewards
from jaxpg.tokens.groups import Groups, group_log_probs, sample_groups
from jaxpg.tokens.records import LanguageModel, Task, TokenAlgorithm
from jaxpg.types import Info, Key, Optimizer, PyTree, TrainState, split_key

AdvantageFn = Callable[[Groups, Any], Array]
"""``(groups, config) -> advantages[P, G]``, or ``[P, G, M]`` per token."""
LossFn = Callable[[Array, Groups, Array, Any], tuple[Array, Info]]
"""``(log_probs[P', G, M], groups, advantages, config) -> (loss, metrics)`` of one minibatch."""


def grpo_advantages(groups: Groups, config: TokenConfig) -> Array:
    """Rewards in units of the group's standard deviation: `jaxpg.group_advantages`."""
    return group_advantages(groups.rewards)


def grpo_objective(
    log_probs: Array, groups: Groups, advantages: Array, config: GRPOConfig
) -> tuple[Array, Info]:
    """`jaxpg.grpo_loss` of a minibatch, with what the config switches on."""
    return grpo_loss(log_probs, *_constants(groups, advantages), **_clip(config, groups))


def grpo(
    task: Task,
    model: LanguageModel,
    *,
    optimizer: Optimizer = adam,
    advantages: AdvantageFn = grpo_advantages,
    loss: LossFn = grpo_objective,
    config_type: type[TokenConfig] = GRPOConfig,
) -> TokenAlgorithm:
    """Group relative policy optimisation on a token task: groups in place of a critic.

    Formula::

        Aᵢ = (rᵢ − mean r)/std r,   J = mean over i of mean over t of min(ρA, clip(ρ, 1−ε, 1+ε)A)

    with ρ = π(token)/π_old(token), and − kl_coef · k3(π, π_ref) and + ent_coef · entropy where
    those are on.

    Args:
        task: what is asked and how answers are scored.
        model: the policy.
        optimizer: ``config -> optax.GradientTransformation``.
        advantages: how rewards of groups become advantages.
        loss: the loss of a minibatch, as a function of the new log-probs.
        config_type: the config that `advantages` and `loss` read.

    Returns:
        A `TokenAlgorithm`. ``init(key, config, params=None)`` takes parameters from a warm-up;
        with ``kl_coef`` on they are also the reference policy. The info of ``step`` holds, beside
        `jaxpg.algorithms.common.INFO_FIELDS` (a completion is an episode there, a token a step):
        ``score``, ``exact``, ``reward``, ``mean_length``, ``eos_rate``, ``drawn_entropy`` over all
        completions drawn, ``mixed_share`` of the groups drawn, ``kept_share`` of the batch's
        groups, and the metrics of the loss on what trains: ``entropy``, ``approx_kl``,
        ``clip_fraction_low``, ``clip_fraction_high`` and so on.

    Raises:
        ValueError: from ``init``, sizes or numbers that cannot work together.
        TypeError: from ``init``, a config of another algorithm.

    Example:
        >>> from jaxpg.tokens import GRPOConfig, add_mod_task, transformer_model
        >>> model = transformer_model(14, 8, d_model=16, num_layers=1, num_heads=2)
        >>> algorithm = grpo(add_mod_task(), model)
        >>> config = GRPOConfig(num_prompts=4, group_size=4)
        >>> state = jax.jit(algorithm.init)(jax.random.key(0), config)
        >>> state, info = jax.jit(algorithm.step)(state, config)
        >>> int(state.update), float(info["episode_count"])
        (1, 16.0)

    References:
        Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1; the mean over tokens and
        sequences as in eq. 5 of Yu et al., DAPO, arXiv 2503.14476. Deviations: the standard
        deviation has ddof 1 and eps 1e-6; the reference policy is off by default.
    """

    def init(key: Key, config: TokenConfig, *, params: PyTree | None = None) -> TrainState:
        if not isinstance(config, config_type):
            raise TypeError(
                f"this algorithm takes a {config_type.__name__}, got {type(config).__name__}"
            )
        check_config(config, task, model)
        keys = split_key(as_key(key), "params", "run")
        params = model.init(keys["params"]) if params is None else params
        update = jnp.zeros((), jnp.int32)
        state = TrainState(
            params=params,
            opt_state=optimizer(current(config, update)).init(params),
            runner=(),  # every completion starts anew
            statistics=(),
            key=keys["run"],
            update=update,
            extra=() if config.kl_coef is None else params,
        )
        return jax.tree.map(own_buffer, state)

    def step(state: TrainState, config: TokenConfig) -> tuple[TrainState, Info]:
        config = current(config, state.update)
        keys = split_key(state.key, "next", "groups", "optimization")
        ref_params = None if config.kl_coef is None else state.extra
        groups, drawn = sample_groups(
            keys["groups"], task, model, state.params, config, ref_params=ref_params
        )
        # Before the minibatches are dealt: whitening and baselines see the whole batch.
        batch = (groups, advantages(groups, config))

        def loss_fn(params: PyTree, batch: tuple[Groups, Array]) -> tuple[Array, Info]:
            groups, advantage = batch
            log_probs, entropies = group_log_probs(
                model, params, groups, temperature=config.temperature
            )
            value, metrics = loss(log_probs, groups, advantage, config)
            entropy = masked_mean(entropies, groups.mask)
            if config.ent_coef is not None:
                value = value - config.ent_coef * entropy
            return value, {**metrics, "entropy": jax.lax.stop_gradient(entropy)}

        params, opt_state, metrics = optimize(
            keys["optimization"],
            loss_fn,
            # a minibatch without a mixed group is no evidence for moving on
            skip_zero_gradients(optimizer(config)),
            state.params,
            state.opt_state,
            batch,
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
            target_kl=config.target_kl,
        )
        extra = state.extra
        if config.ref_refresh is not None:
            renew = (state.update + 1) % config.ref_refresh < 1
            extra = jax.tree.map(lambda new, old: jnp.where(renew, new, old), params, extra)
        state = state._replace(
            params=params,
            opt_state=opt_state,
            key=keys["next"],
            update=state.update + 1,
            extra=extra,
        )
        return state, _report(task, groups, drawn, metrics)

    return TokenAlgorithm(init, step, task, model)


def dapo(task: Task, model: LanguageModel, *, optimizer: Optimizer = adam) -> TokenAlgorithm:
    """DAPO: clip-higher, dynamic sampling, the mean over all tokens; `DAPOConfig`.

    The soft overlong penalty and overlong filtering are ``overlong_cache`` and
    ``mask_truncated``. See `grpo` for the arguments.

    References:
        Yu et al., arXiv 2503.14476, eq. 8-13. Deviations: one count of tokens for the minibatch,
        as the field has it (eq. 8 counts per group); dynamic sampling draws a fixed number of
        groups, see `select_mixed_groups`.
    """

    def objective(
        log_probs: Array, groups: Groups, advantages: Array, config: DAPOConfig
    ) -> tuple[Array, Info]:
        return dapo_loss(log_probs, *_constants(groups, advantages), **_clip(config, groups))

    return grpo(task, model, optimizer=optimizer, loss=objective, config_type=DAPOConfig)


def dr_grpo(task: Task, model: LanguageModel, *, optimizer: Optimizer = adam) -> TokenAlgorithm:
    """Dr. GRPO: no standard deviation, a constant length in the mean; `GRPOConfig`.

    See `grpo` for the arguments; the constant is the task's ``max_new``.

    References:
        Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.2.
    """

    def centred(groups: Groups, config: GRPOConfig) -> Array:
        return group_advantages(groups.rewards, normalize_std=False)

    def objective(
        log_probs: Array, groups: Groups, advantages: Array, config: GRPOConfig
    ) -> tuple[Array, Info]:
        return dr_grpo_loss(
            log_probs,
            *_constants(groups, advantages),
            max_length=task.max_new,
            **_clip(config, groups),
        )

    return grpo(task, model, optimizer=optimizer, advantages=centred, loss=objective)


def gspo(task: Task, model: LanguageModel, *, optimizer: Optimizer = adam) -> TokenAlgorithm:
    """GSPO: one ratio a sequence, its geometric mean per token, clipped; `GSPOConfig`.

    See `grpo` for the arguments.

    References:
        Zheng et al., arXiv 2507.18071, eq. 5-7.
    """

    def objective(
        log_probs: Array, groups: Groups, advantages: Array, config: GSPOConfig
    ) -> tuple[Array, Info]:
        return gspo_loss(log_probs, *_constants(groups, advantages), **_clip(config, groups))

    return grpo(task, model, optimizer=optimizer, loss=objective, config_type=GSPOConfig)


def rloo(task: Task, model: LanguageModel, *, optimizer: Optimizer = adam) -> TokenAlgorithm:
    """REINFORCE leave-one-out, with the clipped ratio of whole sequences; `RLOOConfig`.

    ``kl_coef`` puts −kl_coef · Σₜ k1 into the reward, before the baseline. See `grpo` for the
    arguments.

    References:
        Ahmadian et al., arXiv 2402.14740, section 3.3. Deviation: several optimizer steps a batch,
        so the ratio exp(Σₜ log π − log π_old) is clipped as in PPO.
    """

    def leave_one_out(groups: Groups, config: RLOOConfig) -> Array:
        rewards = groups.rewards
        if groups.ref_log_probs is not None:
            rewards = rewards - config.kl_coef * jnp.sum(_k1(groups), axis=-1)
        return leave_one_out_advantages(rewards)

    def objective(
        log_probs: Array, groups: Groups, advantages: Array, config: RLOOConfig
    ) -> tuple[Array, Info]:
        groups = groups._replace(ref_log_probs=None)  # it is in the reward
        return rloo_loss(log_probs, *_constants(groups, advantages), **_clip(config, groups))

    return grpo(
        task,
        model,
        optimizer=optimizer,
        advantages=leave_one_out,
        loss=objective,
        config_type=RLOOConfig,
    )


def cispo(task: Task, model: LanguageModel, *, optimizer: Optimizer = adam) -> TokenAlgorithm:
    """CISPO: every token keeps its gradient, weighted by a capped ratio; `CISPOConfig`.

    See `grpo` for the arguments.

    References:
        MiniMax, arXiv 2506.13585, eq. 4-5. Here only the upper side is capped, as in the paper's
        experiments.
    """

    def objective(
        log_probs: Array, groups: Groups, advantages: Array, config: CISPOConfig
    ) -> tuple[Array, Info]:
        old, advantages, mask = _constants(groups, advantages)
        advantages = broadcast_per_token("advantages", advantages, mask.shape, mask.ndim - 1)
        capped = cispo_loss(log_probs, old, advantages, mask, max_ratio=config.max_ratio)
        if groups.weights is not None:
            capped = capped * groups.weights
        value = policy_loss = token_mean(capped, mask)
        over = (log_probs - old > jnp.log(config.max_ratio)).astype(jnp.float32)
        metrics = {
            "policy_loss": policy_loss,
            "approx_kl": masked_mean(kl_k3(old, log_probs, mask), mask),
            "clip_fraction": masked_mean(over, mask),
            "clip_fraction_low": jnp.zeros(()),
            "clip_fraction_high": masked_mean(over, mask),
        }
        if groups.ref_log_probs is not None:
            metrics["kl_ref"] = token_mean(kl_k3(log_probs, groups.ref_log_probs, mask), mask)
            value = value + config.kl_coef * metrics["kl_ref"]
        return value, jax.lax.stop_gradient(metrics)

    return grpo(task, model, optimizer=optimizer, loss=objective, config_type=CISPOConfig)


def reinforce_pp(
    task: Task, model: LanguageModel, *, optimizer: Optimizer = adam
) -> TokenAlgorithm:
    """REINFORCE++: reward-to-go per token, whitened over the batch; `ReinforcePPConfig`.

    ``kl_coef`` puts −kl_coef · k1 into the reward of every token; ``group_baseline`` subtracts
    the group's mean from the scores first. See `grpo` for the arguments.

    References:
        Hu et al., REINFORCE++, arXiv 2501.03262.
    """

    def whitened(groups: Groups, config: ReinforcePPConfig) -> Array:
        rewards = groups.rewards
        if config.group_baseline:
            rewards = group_advantages(rewards, normalize_std=False)
        kl = None if groups.ref_log_probs is None else _k1(groups)
        dense = last_token_rewards(
            rewards, groups.mask, kl, kl_coef=0.0 if kl is None else config.kl_coef
        )
        return reinforce_pp_advantages(dense, groups.mask, gamma=config.gamma)

    def objective(
        log_probs: Array, groups: Groups, advantages: Array, config: ReinforcePPConfig
    ) -> tuple[Array, Info]:
        groups = groups._replace(ref_log_probs=None)  # it is in the reward
        return dapo_loss(log_probs, *_constants(groups, advantages), **_clip(config, groups))

    return grpo(
        task,
        model,
        optimizer=optimizer,
        advantages=whitened,
        loss=objective,
        config_type=ReinforcePPConfig,
    )


ALGORITHMS: dict[str, tuple[Callable[..., TokenAlgorithm], type[TokenConfig]]] = {
    "cispo": (cispo, CISPOConfig),
    "dapo": (dapo, DAPOConfig),
    "dr_grpo": (dr_grpo, GRPOConfig),
    "grpo": (grpo, GRPOConfig),
    "gspo": (gspo, GSPOConfig),
    "reinforce_pp": (reinforce_pp, ReinforcePPConfig),
    "rloo": (rloo, RLOOConfig),
}
"""Every algorithm by name, with its config."""


def _constants(groups: Groups, advantages: Array) -> tuple[Array, Array, Array]:
    return groups.old_log_probs, advantages, groups.mask


def _clip(config: Any, groups: Groups) -> dict[str, Any]:
    """The keyword settings of a whole loss, as far as the config has them."""
    names = ("clip_epsilon", "clip_epsilon_high", "dual_clip")
    settings = {name: getattr(config, name) for name in names if hasattr(config, name)}
    if groups.weights is not None:
        settings["weights"] = groups.weights
    if groups.ref_log_probs is not None:
        settings |= {"ref_log_probs": groups.ref_log_probs, "kl_coef": config.kl_coef}
    return settings


def _k1(groups: Groups) -> Array:
    """k1 of the policy that wrote the tokens, per token, 0 under the mask."""
    return kl_k1(groups.old_log_probs, groups.ref_log_probs, groups.mask)


def _report(task: Task, groups: Groups, drawn: Info, metrics: Info) -> Info:
    """`INFO_FIELDS`, a completion being an episode and a token a step, and what is ours."""
    info: dict[str, Any] = dict.fromkeys(INFO_FIELDS, 0.0)
    completions = drawn["completions"]
    info |= {
        "episode_return_sum": drawn["score_sum"],
        "episode_length_sum": drawn["length_sum"],
        "episode_count": completions,
        "env_steps": completions * task.max_new,
        "live_steps": jnp.sum(groups.mask),
    }
    ours = ("completions", "score_sum", "length_sum")
    info |= {name: x for name, x in drawn.items() if name not in ours}
    info |= metrics
    return {name: jnp.asarray(x, jnp.float32) for name, x in info.items()}
