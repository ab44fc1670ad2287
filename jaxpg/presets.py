"""Floor 5: settings that work, by algorithm and environment.

One readable table, used by the command line for its defaults and by the benchmarks. ``"*"`` is
the entry of an algorithm for environments without one of their own. The settings of token tasks
stand in `jaxpg.tokens.presets`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxpg.algorithms.actor_critic import ActorCriticConfig
from jaxpg.algorithms.grpo import GRPOConfig
from jaxpg.algorithms.off_policy import OffPolicyConfig
from jaxpg.algorithms.ppo import PPOConfig
from jaxpg.algorithms.reinforce import ReinforceConfig
from jaxpg.algorithms.trpo import TRPOConfig
from jaxpg.registry import (
    TOKENS_PREFIX,
    EnvironmentOptions,
    NetworkOptions,
    algorithm_name,
    environment_name,
)


@dataclasses.dataclass(frozen=True)
class Preset:
    """Everything that a run needs but its seeds."""

    config: Any
    total_steps: int  # steps of each seed
    network: Any = dataclasses.field(default_factory=NetworkOptions)
    environment: Any = dataclasses.field(default_factory=EnvironmentOptions)
    anneal: bool = False  # config.anneal_updates becomes the number of updates of the run


MINATAR = Preset(
    PPOConfig(num_envs=64, num_steps=128, num_minibatches=8, learning_rate=5e-3, ent_coef=0.01),
    total_steps=10_000_000,
    network=NetworkOptions(network="cnn"),
    anneal=True,
)

PRESETS: dict[tuple[str, str], Preset] = {
    # reinforce
    ("reinforce", "*"): Preset(
        ReinforceConfig(
            num_envs=4,
            learning_rate=3e-3,
            baseline="value",
            bootstrap=True,
            normalize_advantages=True,
        ),
        total_steps=1_000_000,
        anneal=True,
    ),
    ("reinforce", "CartPole-v1"): Preset(
        ReinforceConfig(
            num_envs=4,
            learning_rate=5e-3,
            baseline="value",
            bootstrap=True,
            normalize_advantages=True,
        ),
        total_steps=500_000,
        anneal=True,
    ),
    ("reinforce", "Acrobot-v1"): Preset(
        ReinforceConfig(
            num_envs=2,
            learning_rate=2e-3,
            baseline="value",
            bootstrap=True,
            normalize_advantages=True,
        ),
        total_steps=1_000_000,
        anneal=True,
    ),
    ("reinforce", "Pendulum-v1"): Preset(
        ReinforceConfig(
            num_envs=8,
            learning_rate=5e-3,
            gamma=0.9,
            baseline="value",
            bootstrap=True,
            normalize_advantages=True,
            normalize_obs=True,
            normalize_rewards=True,
        ),
        total_steps=1_000_000,
        network=NetworkOptions(activation="relu"),
        anneal=True,
    ),
    # actor_critic
    ("actor_critic", "*"): Preset(
        ActorCriticConfig(learning_rate=1e-3, gae_lambda=0.95), total_steps=500_000, anneal=True
    ),
    ("actor_critic", "CartPole-v1"): Preset(
        ActorCriticConfig(num_envs=16, num_steps=8, learning_rate=2e-3),
        total_steps=500_000,
        anneal=True,
    ),
    ("actor_critic", "Acrobot-v1"): Preset(
        ActorCriticConfig(num_envs=16, num_steps=8, learning_rate=2e-3, gae_lambda=0.95),
        total_steps=500_000,
        anneal=True,
    ),
    ("actor_critic", "Pendulum-v1"): Preset(
        ActorCriticConfig(
            num_envs=8,
            num_steps=8,
            learning_rate=1e-3,
            gamma=0.9,
            gae_lambda=0.9,
            normalize_rewards=True,
        ),
        total_steps=1_000_000,
        anneal=True,
    ),
    # off_policy
    ("off_policy", "*"): Preset(
        OffPolicyConfig(
            lag=4,
            num_envs=16,
            num_steps=32,
            learning_rate=1e-3,
            trace_lambda=0.95,
            ent_coef=0.01,
            normalize_rewards=True,
        ),
        total_steps=500_000,
        anneal=True,
    ),
    ("off_policy", "CartPole-v1"): Preset(
        OffPolicyConfig(
            lag=4,
            num_envs=16,
            num_steps=32,
            learning_rate=2e-3,
            trace_lambda=0.95,
            ent_coef=0.01,
            normalize_rewards=True,
        ),
        total_steps=500_000,
        anneal=True,
    ),
    ("off_policy", "Acrobot-v1"): Preset(
        OffPolicyConfig(
            lag=4,
            num_envs=16,
            num_steps=32,
            learning_rate=2e-3,
            trace_lambda=0.95,
            ent_coef=0.01,
            normalize_obs=True,
            normalize_rewards=True,
        ),
        total_steps=500_000,
        anneal=True,
    ),
    ("off_policy", "Pendulum-v1"): Preset(
        OffPolicyConfig(
            lag=4,
            num_envs=8,
            num_steps=8,
            learning_rate=1e-3,
            gamma=0.9,
            trace_lambda=0.9,
            normalize_rewards=True,
        ),
        total_steps=1_000_000,
        anneal=True,
    ),
    # trpo
    ("trpo", "*"): Preset(TRPOConfig(num_envs=16, num_steps=128), total_steps=300_000),
    ("trpo", "CartPole-v1"): Preset(TRPOConfig(num_envs=8, num_steps=128), total_steps=100_000),
    ("trpo", "Acrobot-v1"): Preset(TRPOConfig(num_envs=8, num_steps=128), total_steps=300_000),
    ("trpo", "Pendulum-v1"): Preset(
        TRPOConfig(num_envs=8, num_steps=256, gamma=0.95, normalize_rewards=True),
        total_steps=500_000,
    ),
    # ppo
    ("ppo", "*"): Preset(PPOConfig(num_envs=16, num_steps=128), total_steps=500_000, anneal=True),
    ("ppo", "CartPole-v1"): Preset(
        PPOConfig(
            num_envs=8,
            num_steps=32,
            learning_rate=1e-3,
            gamma=0.98,
            gae_lambda=0.8,
            num_epochs=20,
            num_minibatches=1,
            annealed=("learning_rate", "clip_epsilon"),
        ),
        total_steps=50_000,
        anneal=True,
    ),
    ("ppo", "Acrobot-v1"): Preset(
        PPOConfig(
            num_envs=16,
            num_steps=128,
            learning_rate=1e-3,
            num_epochs=10,
            num_minibatches=8,
            normalize_obs=True,
        ),
        total_steps=500_000,
        anneal=True,
    ),
    ("ppo", "Pendulum-v1"): Preset(
        PPOConfig(
            num_envs=16,
            num_steps=128,
            learning_rate=1e-3,
            max_grad_norm=1.0,
            num_epochs=10,
            num_minibatches=16,
            normalize_obs=True,
            normalize_rewards=True,
        ),
        total_steps=500_000,
        network=NetworkOptions(activation="relu"),
        anneal=True,
    ),
    ("ppo", "MemoryChain-bsuite"): Preset(
        PPOConfig(num_envs=16, num_steps=64, learning_rate=1e-3, ent_coef=0.01),
        total_steps=500_000,
        network=NetworkOptions(network="gru"),
        anneal=True,
    ),
    ("ppo", "Asterix-MinAtar"): MINATAR,
    ("ppo", "Breakout-MinAtar"): MINATAR,
    ("ppo", "Freeway-MinAtar"): MINATAR,
    ("ppo", "SpaceInvaders-MinAtar"): MINATAR,
    # grpo
    ("grpo", "*"): Preset(
        GRPOConfig(num_envs=16, learning_rate=1e-3, form="per_step"),
        total_steps=1_000_000,
        anneal=True,
    ),
    ("grpo", "CartPole-v1"): Preset(
        GRPOConfig(num_envs=16, learning_rate=1e-3, form="per_step"),
        total_steps=500_000,
        anneal=True,
    ),
    ("grpo", "Acrobot-v1"): Preset(
        GRPOConfig(num_envs=16, learning_rate=1e-3, form="per_step"),
        total_steps=1_000_000,
        anneal=True,
    ),
    ("grpo", "Pendulum-v1"): Preset(
        GRPOConfig(num_envs=16, learning_rate=1e-3, gamma=0.95, form="per_step"),
        total_steps=1_000_000,
        anneal=True,
    ),
}
"""The table: ``(algorithm, environment)`` to `Preset`."""


def preset(algorithm: str, environment: str) -> Preset:
    """The settings of a pair: its own entry, else the algorithm's general one.

    Args:
        algorithm: as on the command line; dash and underscore are the same.
        environment: as on the command line; ``tokens/<task>`` is a token task.

    Returns:
        The `Preset`.

    Raises:
        ValueError: an unknown algorithm or environment.

    Example:
        >>> settings = preset("ppo", "CartPole-v1")
        >>> settings.total_steps, settings.config.num_envs
        (50000, 8)
    """
    name = algorithm_name(algorithm, environment_name(environment))
    if environment.startswith(TOKENS_PREFIX):
        from jaxpg.token_domain import token_settings  # which imports `Preset`

        return token_settings(name, environment)
    return PRESETS.get((name, environment)) or PRESETS[name, "*"]


def has_preset(algorithm: str, environment: str) -> bool:
    """Whether a pair has an entry of its own.

    Args:
        algorithm: as on the command line.
        environment: as on the command line.

    Returns:
        False where `preset` falls back to the algorithm's general entry.

    Raises:
        ValueError: an unknown algorithm or environment.

    Example:
        >>> has_preset("ppo", "CartPole-v1"), has_preset("ppo", "Pong-misc")
        (True, False)
    """
    name = algorithm_name(algorithm, environment_name(environment))
    return environment.startswith(TOKENS_PREFIX) or (name, environment) in PRESETS
