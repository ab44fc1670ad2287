"""Floor 5: algorithms, networks and environments by name, for presets and the command line.

Adding an algorithm is one line of `ALGORITHMS`. Token tasks have their own record, in
`jaxpg.token_domain`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jax import Array

from jaxpg._checks import one_of
from jaxpg.algorithms.actor_critic import ActorCriticConfig, actor_critic
from jaxpg.algorithms.common import whole_episodes
from jaxpg.algorithms.grpo import GRPOConfig, grpo
from jaxpg.algorithms.off_policy import OffPolicyConfig, off_policy
from jaxpg.algorithms.ppo import PPOConfig, ppo
from jaxpg.algorithms.reinforce import ReinforceConfig, reinforce
from jaxpg.algorithms.trpo import TRPOConfig, trpo
from jaxpg.distributions import diagonal_gaussian, tanh_gaussian
from jaxpg.environments import from_gymnax, list_environments
from jaxpg.evaluation import evaluate
from jaxpg.policies import cnn_policy, gru_policy, mlp_policy
from jaxpg.types import Algorithm, Env, Key, Policy, TrainState


class AlgorithmEntry(NamedTuple):
    """What the name of an algorithm stands for."""

    build: Callable[..., Any]  # (env, policy), or (task, model) for tokens -> algorithm
    config: type
    summary: str  # one line for `jaxpg list`
    actions: str = "discrete, box"
    recurrent: bool = False  # takes a recurrent policy


ALGORITHMS: dict[str, AlgorithmEntry] = {
    "reinforce": AlgorithmEntry(
        reinforce, ReinforceConfig, "Monte Carlo policy gradient on complete episodes"
    ),
    "actor_critic": AlgorithmEntry(
        actor_critic, ActorCriticConfig, "advantage actor-critic (A2C)", recurrent=True
    ),
    "off_policy": AlgorithmEntry(
        off_policy, OffPolicyConfig, "policy gradient with importance weights or V-trace"
    ),
    "trpo": AlgorithmEntry(
        trpo, TRPOConfig, "natural-gradient steps within a bound on the KL divergence"
    ),
    "ppo": AlgorithmEntry(
        ppo, PPOConfig, "proximal policy optimisation, clipped or KL-penalised", recurrent=True
    ),
    "grpo": AlgorithmEntry(
        grpo, GRPOConfig, "no critic: advantages relative to a group of rollouts"
    ),
}
"""Every algorithm on environments, by the name that the command line takes."""


@dataclasses.dataclass(frozen=True)
class NetworkOptions:
    """The networks of policy and critic. None is the default of the kind."""

    network: Literal["mlp", "cnn", "gru"] = "mlp"
    """Dense layers; convolutions before them (MinAtar); or a recurrent unit after them."""
    hidden_sizes: tuple[int, ...] | None = None
    """Widths of the dense layers: 64 64 (mlp), 128 (cnn), 64 (gru)."""
    activation: Literal["tanh", "relu", "elu", "gelu", "silu"] | None = None
    """Between the layers: tanh, but relu for cnn."""
    shared: bool | None = None
    """One trunk for actor and critic: True for cnn, else False."""
    channels: tuple[int, ...] | None = None
    """Of the convolutions (cnn): 16."""
    kernel: int | None = None
    """Side of the convolutions' windows (cnn): 3."""
    recurrent_size: int | None = None
    """Numbers that the recurrent unit remembers (gru): 64."""
    distribution: Literal["diagonal_gaussian", "tanh_gaussian"] | None = None
    """Of continuous actions: diagonal_gaussian."""
    log_std_init: float | None = None
    """First log standard deviation of continuous actions: 0."""
    state_dependent_std: bool | None = None
    """The network gives the standard deviation of continuous actions, too: False."""
    action_values: bool | None = None
    """The critic gives one value an action, for actor_critic's --advantage action_value: False."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the products in hidden layers: float32."""


@dataclasses.dataclass(frozen=True)
class EnvironmentOptions:
    """How the environment is set up."""

    box_actions: Literal["clip", "scale"] = "clip"
    """Continuous actions: clip them into their bounds, or scale [-1, 1] to the bounds."""
    env_params: dict[str, int | float | bool | str] = dataclasses.field(default_factory=dict)
    """Parameters of the environment to change, as NAME VALUE pairs."""


def make_environment(name: str, options: EnvironmentOptions | None = None) -> Env:
    """An environment by its name.

    Args:
        name: one of `jaxpg.list_environments`.
        options: how it is set up.

    Returns:
        The `Env`.

    Raises:
        ValueError: an unknown name or parameter.
    """
    options = options or EnvironmentOptions()
    return from_gymnax(name, box_actions=options.box_actions, **options.env_params)


def make_policy(env: Env, options: NetworkOptions | None = None) -> Policy:
    """A policy that fits an environment's observations and actions.

    Args:
        env: the environment.
        options: kind and sizes of the networks.

    Returns:
        The `Policy`.

    Raises:
        ValueError: spaces that this kind of network cannot serve.
    """
    settings = {
        name: x
        for name, x in dataclasses.asdict(options or NetworkOptions()).items()
        if x is not None
    }
    kind = settings.pop("network")
    one_of("network", kind, _NETWORKS)
    make, renamed = _NETWORKS[kind]
    known = inspect.signature(make).parameters
    for name in settings:
        if renamed.get(name, name) not in known:
            raise ValueError(f"a network of kind {kind!r} has no {name}, got {settings[name]}")
    if "distribution" in settings:
        settings["distribution"] = _DISTRIBUTIONS[settings["distribution"]]
    return make(env, **{renamed.get(name, name): x for name, x in settings.items()})


_NETWORKS: dict[str, tuple[Callable[..., Policy], dict[str, str]]] = {
    "mlp": (mlp_policy, {}),
    "cnn": (cnn_policy, {}),
    "gru": (gru_policy, {"hidden_sizes": "embed_sizes", "recurrent_size": "hidden_size"}),
}
_DISTRIBUTIONS = {"diagonal_gaussian": diagonal_gaussian, "tanh_gaussian": tanh_gaussian}


class Domain(NamedTuple):
    """What the loop around training must know of what is learned on.

    Environments are one domain; sequences of tokens are another, with functions of its own. The
    algorithms of a domain need ``init(key, config) -> state``, ``step(state, config) -> (state,
    info)``, with ``state.params`` and ``state.update``.
    """

    kind: str  # what a name of it names
    step_label: str  # what a budget counts
    unit: str  # the same in a word
    episode_label: str  # what an evaluation counts
    num_episodes: int  # of the evaluation after training, unless told otherwise
    score: str  # the metric that a learning curve shows
    score_label: str
    digits: int  # of a score that is shown, after the point
    algorithms: Mapping[str, AlgorithmEntry]
    names: Callable[[], Sequence[str]]
    build: Callable[[AlgorithmEntry, str, Any, Any], Any]
    """``(entry, name, network_options, environment_options) -> algorithm``"""
    steps_per_update: Callable[[Any, Any], int]
    """``(algorithm, config) -> `` steps of one seed in one update"""
    metrics: Callable[[dict[str, np.ndarray], int], dict[str, np.ndarray]]
    """``(sums of the infos, number of updates) -> `` what is logged, `score` among it"""
    evaluate: Callable[[Any, Any, TrainState, Key, int, bool], Array]
    """``(algorithm, config, state, key, num_episodes, deterministic) -> scores[num_episodes]``"""
    samples: Callable[[Any, Any, Key], Callable[[TrainState], list[str]]] | None = None
    """``(algorithm, config, key) -> (states[S] -> lines)``: what the first seed does now, as text
    that is printed while it trains; None where nothing of it is readable"""


def build_on_environment(
    entry: AlgorithmEntry, name: str, network: NetworkOptions, options: EnvironmentOptions
) -> Algorithm:
    """The algorithm bound to its environment and networks; `ValueError` where they do not fit."""
    if network.network == "gru" and not entry.recurrent:
        raise ValueError(f"{entry.build.__name__} needs a feed-forward network, got network='gru'")
    env = make_environment(name, options)
    return entry.build(env, make_policy(env, network))


def environment_steps(algorithm: Algorithm, config: Any) -> int:
    """Environment slots of one update: ``num_envs × num_steps``."""
    return config.num_envs * whole_episodes(config, algorithm.env).num_steps


SUMMED = ("episode_count", "env_steps", "live_steps", "unbootstrapped")
"""Info fields that count something; the others are averaged over updates."""


def episode_metrics(sums: dict[str, np.ndarray], num_updates: int) -> dict[str, np.ndarray]:
    """What is logged of some updates: means over the episodes that ended, counts, means."""
    sums = dict(sums)
    count = sums["episode_count"]
    ended = np.where(count > 0, count, np.nan)
    score = sums.pop("episode_return_sum") / ended
    length = sums.pop("episode_length_sum") / ended
    rest = {n: x if n in SUMMED else x / num_updates for n, x in sums.items()}
    return {"episode_return": score, "episode_length": length, **rest}


def evaluate_on_environment(
    algorithm: Algorithm,
    config: Any,
    state: TrainState,
    key: Key,
    num_episodes: int,
    deterministic: bool,
) -> Array:
    """`jaxpg.evaluate` with positional settings."""
    return evaluate(algorithm, state, key, num_episodes=num_episodes, deterministic=deterministic)


ENVIRONMENTS = Domain(
    kind="environment",
    step_label="environment steps",
    unit="steps",
    episode_label="episodes",
    num_episodes=32,
    score="episode_return",
    score_label="return",
    digits=1,
    algorithms=ALGORITHMS,
    names=list_environments,
    build=build_on_environment,
    steps_per_update=environment_steps,
    metrics=episode_metrics,
    evaluate=evaluate_on_environment,
)


TOKENS_PREFIX = "tokens/"
"""How the names of token tasks begin."""


def domain_of(name: str) -> Domain:
    """The domain that a name belongs to: token tasks begin with ``tokens/``.

    Args:
        name: of an environment or a task; it need not exist.

    Returns:
        The `Domain`.

    Example:
        >>> domain_of("CartPole-v1").unit, domain_of("tokens/add-mod-10").unit
        ('steps', 'completions')
    """
    return token_domain() if name.startswith(TOKENS_PREFIX) else ENVIRONMENTS


def token_domain() -> Domain:
    """The domain of token tasks, imported when it is first asked for.

    ``import jaxpg`` imports this module, and has no need of `jaxpg.tokens`.
    """
    from jaxpg.token_domain import TOKENS

    return TOKENS


def algorithm_name(algorithm: str, environment: str) -> str:
    """The registered spelling of an algorithm: case is free, dash and underscore are the same.

    Args:
        algorithm: as typed.
        environment: what it is to learn on.

    Returns:
        A key of the domain's algorithms.

    Raises:
        ValueError: no such algorithm; the message has the nearest names, or says that it learns
            on something else.

    Example:
        >>> algorithm_name("PPO", "CartPole-v1")
        'ppo'
    """
    spelled = algorithm.replace("-", "_").lower()
    domain = domain_of(environment)
    if spelled not in domain.algorithms:
        for other in (ENVIRONMENTS, token_domain()):
            if spelled in other.algorithms:
                raise ValueError(
                    f"{spelled} learns on {other.kind}s such as {other.names()[0]}; "
                    f"on {environment}: {', '.join(domain.algorithms)}"
                )
    one_of("algorithm", spelled, domain.algorithms)
    return spelled


def environment_name(name: str) -> str:
    """`name`, if there is such an environment or token task.

    Raises:
        ValueError: there is none; the message has the nearest names.

    Example:
        >>> environment_name("CartPole-v1")
        'CartPole-v1'
    """
    domain = domain_of(name)
    if domain is ENVIRONMENTS and TOKENS_PREFIX + name in token_domain().names():
        raise ValueError(f"unknown environment {name!r}: did you mean {TOKENS_PREFIX}{name}?")
    one_of(domain.kind, name, domain.names())
    return name
