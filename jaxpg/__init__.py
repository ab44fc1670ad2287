"""The functional core of policy-gradient reinforcement learning in JAX.

Everything public is here, flat; `jaxpg.tokens` is a namespace of its own. Functions on arrays
(returns, advantages, losses) need nothing else of the library.
"""

import warnings as _warnings

import jaxlib as _jaxlib

from jaxpg.advantages import (
    VTrace,
    batch_mean_baseline,
    batch_std_group_advantages,
    ema_baseline,
    gae,
    group_advantages,
    leave_one_out_advantages,
    normalize,
    process_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    segment_group_advantages,
    vtrace,
)
from jaxpg.aggregates import (
    Summary,
    bootstrap_interval,
    interquartile_mean,
    summarize,
)
from jaxpg.algorithms.actor_critic import (
    ActorCriticConfig,
    actor_critic,
)
from jaxpg.algorithms.common import (
    INFO_FIELDS,
    Config,
    adam,
    static,
)
from jaxpg.algorithms.grpo import (
    GRPOConfig,
    grpo,
)
from jaxpg.algorithms.off_policy import (
    OffPolicyConfig,
    off_policy,
)
from jaxpg.algorithms.ppo import (
    PPOConfig,
    ppo,
)
from jaxpg.algorithms.reinforce import (
    ReinforceConfig,
    reinforce,
)
from jaxpg.algorithms.trpo import (
    TRPOConfig,
    trpo,
)
from jaxpg.checkpoints import (
    load_checkpoint,
    save_checkpoint,
)
from jaxpg.distributions import (
    categorical,
    diagonal_gaussian,
    entropy_from_logits,
    mask_logits,
    multi_categorical,
    tanh_gaussian,
)
from jaxpg.environments import (
    auto_reset,
    environment_notes,
    from_gymnax,
    list_environments,
)
from jaxpg.evaluation import (
    evaluate,
)
from jaxpg.kl import (
    adaptive_kl_coef,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_k3_corrected,
    kl_k3_straight_through,
)
from jaxpg.losses import (
    cispo_loss,
    clipped_surrogate_loss,
    clipped_value_loss,
    geometric_mean_loss,
    importance_sampling_loss,
    off_policy_sequence_mask,
    policy_gradient_loss,
    sequence_clipped_loss,
    sequence_importance_weights,
    soft_gated_loss,
    squared_value_loss,
    token_log_probs,
    truncated_importance_weights,
)
from jaxpg.objectives import (
    actor_critic_loss,
    dapo_loss,
    dr_grpo_loss,
    grpo_loss,
    gspo_loss,
    ppo_clip_loss,
    ppo_kl_loss,
    reinforce_loss,
    rloo_loss,
)
from jaxpg.optimization import (
    optimize,
    permutation,
    skip_zero_gradients,
)
from jaxpg.policies import (
    cnn_policy,
    default_distribution,
    from_linen,
    gru_policy,
    mlp_policy,
    reset_carry,
)
from jaxpg.presets import (
    Preset,
    preset,
)
from jaxpg.reductions import (
    constant_norm,
    masked_mean,
    sequence_mean,
    token_mean,
)
from jaxpg.returns import (
    complete_episode_mask,
    discounted_returns,
    lambda_returns,
    linear_recurrence,
    n_step_returns,
    per_decision_returns,
    td_errors,
)
from jaxpg.rewards import (
    completion_mask,
    mixed_group_mask,
    soft_overlong_penalty,
)
from jaxpg.rollouts import (
    apply_policy,
    init_runner,
    replay,
    rollout,
)
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
from jaxpg.sharding import (
    data_parallel,
    device_mesh,
    map_in_chunks,
    shard_environments,
    shard_leading_axis,
)
from jaxpg.sweeps import (
    sweep,
)
from jaxpg.training import (
    train,
)
from jaxpg.trust_region import (
    backtracking_line_search,
    conjugate_gradient,
    fisher_vector_product,
    natural_step,
)
from jaxpg.types import (
    Algorithm,
    Box,
    DictSpace,
    Discrete,
    Distribution,
    Env,
    EnvStep,
    Episodes,
    MultiDiscrete,
    Policy,
    Runner,
    TrainState,
    Transition,
)

__version__ = "0.1.0"

__all__ = [
    "INFO_FIELDS",
    "ActorCriticConfig",
    "Algorithm",
    "Box",
    "Config",
    "DictSpace",
    "Discrete",
    "Distribution",
    "Env",
    "EnvStep",
    "Episodes",
    "GRPOConfig",
    "MultiDiscrete",
    "OffPolicyConfig",
    "PPOConfig",
    "Policy",
    "Preset",
    "ReinforceConfig",
    "ReturnStatistics",
    "Runner",
    "RunningStatistics",
    "Summary",
    "TRPOConfig",
    "TrainState",
    "Transition",
    "VTrace",
    "actor_critic",
    "actor_critic_loss",
    "adam",
    "adaptive_kl_coef",
    "apply_policy",
    "auto_reset",
    "backtracking_line_search",
    "batch_mean_baseline",
    "batch_std_group_advantages",
    "bootstrap_interval",
    "categorical",
    "cispo_loss",
    "clipped_surrogate_loss",
    "clipped_value_loss",
    "cnn_policy",
    "complete_episode_mask",
    "completion_mask",
    "conjugate_gradient",
    "constant_norm",
    "dapo_loss",
    "data_parallel",
    "default_distribution",
    "device_mesh",
    "diagonal_gaussian",
    "discounted_returns",
    "dr_grpo_loss",
    "ema_baseline",
    "entropy_from_logits",
    "environment_notes",
    "evaluate",
    "fisher_vector_product",
    "from_gymnax",
    "from_linen",
    "gae",
    "geometric_mean_loss",
    "group_advantages",
    "grpo",
    "grpo_loss",
    "gru_policy",
    "gspo_loss",
    "importance_sampling_loss",
    "init_return_statistics",
    "init_runner",
    "init_statistics",
    "interquartile_mean",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_k3_corrected",
    "kl_k3_straight_through",
    "lambda_returns",
    "leave_one_out_advantages",
    "linear_recurrence",
    "list_environments",
    "load_checkpoint",
    "map_in_chunks",
    "mask_logits",
    "masked_mean",
    "mixed_group_mask",
    "mlp_policy",
    "multi_categorical",
    "n_step_returns",
    "natural_step",
    "normalize",
    "normalize_with",
    "off_policy",
    "off_policy_sequence_mask",
    "optimize",
    "per_decision_returns",
    "permutation",
    "policy_gradient_loss",
    "ppo",
    "ppo_clip_loss",
    "ppo_kl_loss",
    "preset",
    "process_advantages",
    "reinforce",
    "reinforce_loss",
    "reinforce_pp_advantages",
    "reinforce_pp_baseline_advantages",
    "replay",
    "reset_carry",
    "rloo_loss",
    "rollout",
    "save_checkpoint",
    "scale_rewards",
    "segment_group_advantages",
    "sequence_clipped_loss",
    "sequence_importance_weights",
    "sequence_mean",
    "shard_environments",
    "shard_leading_axis",
    "skip_zero_gradients",
    "soft_gated_loss",
    "soft_overlong_penalty",
    "squared_value_loss",
    "static",
    "summarize",
    "sweep",
    "tanh_gaussian",
    "td_errors",
    "token_log_probs",
    "token_mean",
    "train",
    "trpo",
    "truncated_importance_weights",
    "update_return_statistics",
    "update_statistics",
    "vtrace",
]


def _warn_of_deadlock() -> None:
    """jaxlib 0.10.* can wait for ever on CPU in vmapped training."""
    if _jaxlib.__version__.startswith("0.10."):
        import jax

        if jax.default_backend() == "cpu":
            _warnings.warn(
                f"jaxlib {_jaxlib.__version__} can deadlock on CPU in vmapped training: install "
                "another version, or set the environment variable "
                "XLA_FLAGS=--xla_cpu_enable_concurrency_optimized_scheduler=false",
                RuntimeWarning,
                stacklevel=3,
            )


_warn_of_deadlock()
