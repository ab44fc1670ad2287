"""Floor 0: the records that the parts exchange, and the protocols that plug in from outside.

Records are ``NamedTuple``s of arrays (or of functions): pytrees without machinery. Build and read
them by name. Axes: ``T`` time steps, ``B`` environments, ``N`` rows of a batch, ``K`` kept final
observations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

PyTree = Any
"""Any pytree of arrays: parameters, observations, environment states."""

Key = Array
"""A typed key (`jax.random.key`); legacy ``uint32[2]`` keys are accepted wherever one enters."""


class Discrete(NamedTuple):
    """Integers ``0 … n-1``."""

    n: int


class MultiDiscrete(NamedTuple):
    """A vector of integers, entry ``i`` in ``0 … nvec[i]-1``."""

    nvec: tuple[int, ...]


class Box(NamedTuple):
    """Arrays of `shape` between `low` and `high` (scalars or NumPy arrays of that shape)."""

    low: Any
    high: Any
    shape: tuple[int, ...]

    # bounds may be arrays, whose == is no bool: without these an `Algorithm` could not be static
    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Box)
            and self.shape == other.shape
            and np.array_equal(self.low, other.low)
            and np.array_equal(self.high, other.high)
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((Box, self.shape))


class DictSpace(NamedTuple):
    """A mapping of names to spaces, for observations with several parts."""

    spaces: dict[str, Any]

    def __hash__(self) -> int:
        return hash((DictSpace, *sorted(self.spaces)))


Space = Discrete | MultiDiscrete | Box | DictSpace


class Distribution(NamedTuple):
    """A family of action distributions, as pure functions of its parameters `p`.

    Every function takes any number of leading batch axes. ``x`` is what is stored and scored;
    ``action(x)`` is what the environment gets (the identity but for a squashed family).

    The last two are optional and take sampling apart, ``sample(key, p) = from_noise(p,
    noise(key, p))``, where `noise` reads only the shapes in `p`: a rollout then draws the noise of
    all its steps at once, which is much cheaper than a little at each step.
    """

    sample: Callable[[Key, PyTree], Array]  # (key, p) -> x
    mode: Callable[[PyTree], Array]  # p -> x
    action: Callable[[Array], Array]  # x -> action
    log_prob: Callable[[PyTree, Array], Array]  # (p, x) -> [...]
    entropy: Callable[[PyTree], Array]  # p -> [...], nats
    kl: Callable[[PyTree, PyTree], Array]  # (p, q) -> [...], KL(p‖q), nats
    noise: Callable[[Key, PyTree], PyTree] | None = None  # (key, shapes of p) -> noise
    from_noise: Callable[[PyTree, PyTree], Array] | None = None  # (p, noise) -> x


class Policy(NamedTuple):
    """A policy with a critic, as functions: any network library plugs in here.

    ``init(key, obs[N, …]) -> params``, and feed-forward (``initial_carry is None``)::

        apply(params, obs[N, …]) -> (dist_params[N, …], value[N])

    Recurrent::

        initial_carry(N) -> carry[N, …]
        apply(params, carry, obs[N, …], reset[N]) -> (carry, (dist_params, value))

    one step at a time; ``reset`` says that this observation starts an episode, and the carry is
    zeroed before use. ``obs`` is any pytree with ``N`` leading every leaf.
    """

    init: Callable[..., PyTree]
    apply: Callable[..., Any]
    distribution: Distribution
    initial_carry: Callable[[int], PyTree] | None = None


class EnvStep(NamedTuple):
    """What one step of one environment returns."""

    obs: PyTree  # after an automatic reset, if the episode ended
    reward: Array  # [] float32
    terminated: Array  # [] bool: no continuation value
    truncated: Array  # [] bool: a time limit, bootstrap from `final_obs`
    final_obs: PyTree  # the true successor, before any reset


class Env(NamedTuple):
    """One environment as pure functions; `jaxpg.rollout` batches it with ``vmap``.

    ``time_limit``: consecutive truncations of one environment lie at least this many steps apart,
    and no episode is longer. ``None`` promises nothing: every final observation is then kept and
    scored, which is exact but doubles the critic's work in a rollout.

    ``transition`` is optional: `step` without the reset, ``(key, state, action) -> (state,
    EnvStep)`` with ``obs`` equal to ``final_obs``. A rollout then draws the resets of all its steps
    at once. `auto_reset` and `from_gymnax` provide it.
    """

    reset: Callable[[Key], tuple[PyTree, PyTree]]  # key -> (env_state, obs)
    step: Callable[[Key, PyTree, Array], tuple[PyTree, EnvStep]]
    observation_space: Space
    action_space: Space
    time_limit: int | None = None
    name: str = "custom"
    transition: Callable[[Key, PyTree, Array], tuple[PyTree, EnvStep]] | None = None


def reset_where_done(
    fresh: tuple[PyTree, PyTree], state: PyTree, step: EnvStep
) -> tuple[PyTree, EnvStep]:
    """State and step with a fresh ``(state, obs)`` in place where the episode ended.

    Computed everywhere and selected: under ``vmap`` a ``cond`` becomes a select anyway.
    """
    done = step.terminated | step.truncated

    def select(new: Array, old: Array) -> Array:
        return jnp.where(done.reshape(done.shape + (1,) * (old.ndim - done.ndim)), new, old)

    state, obs = jax.tree.map(select, fresh, (state, step.obs))
    return state, step._replace(obs=obs)


class Transition(NamedTuple):
    """One rollout, every leaf ``[T, B, …]``; row ``t`` is described in `jaxpg.returns`."""

    obs: PyTree
    action: Array  # the sample x of the distribution, before `Distribution.action`
    log_prob: Array  # under the policy that acted
    value: Array  # v(S(t))
    dist_params: PyTree
    reward: Array
    terminated: Array
    truncated: Array
    reset: Array  # obs[t] starts an episode


class Runner(NamedTuple):
    """Where the environments stand between two rollouts, every leaf ``[B, …]``."""

    env_state: PyTree
    obs: PyTree
    carry: PyTree  # of a recurrent policy, else ()
    reset: Array  # the next observation starts an episode
    episode_return: Array  # so far, raw rewards
    episode_length: Array  # so far, int32


class Episodes(NamedTuple):
    """The episodes that ended during a rollout, as sums: add them up, divide once."""

    return_sum: Array  # [] raw, undiscounted
    length_sum: Array  # [] environment steps
    count: Array  # []
    unbootstrapped: Array  # [] truncations beyond what `Env.time_limit` promised


class TrainState(NamedTuple):
    """Everything an algorithm needs to go on: arrays only. Checkpoint, stack, vmap or donate it."""

    params: PyTree
    opt_state: PyTree
    runner: Runner
    statistics: PyTree  # running statistics of observations and returns, () when off
    key: Key
    update: Array  # [] int32, updates done
    extra: PyTree  # what this algorithm alone carries along, () for most


Info = dict[str, Array]
"""Scalars of one update. `jaxpg.algorithms.common.INFO_FIELDS` lists those that all share."""


class ActFn(Protocol):
    """How an algorithm's state acts, for evaluation and deployment."""

    def __call__(
        self,
        state: TrainState,
        key: Key,
        obs: PyTree,
        carry: PyTree,
        reset: Array,
        *,
        deterministic: bool,
    ) -> tuple[PyTree, Array]:
        """Maps ``obs[N, …]`` to ``(carry, action[N, …])``."""
        ...


class Algorithm(NamedTuple):
    """An algorithm bound to its environment and policy. Nothing in it is jitted: the caller does.

    ``init(key, config) -> state`` raises `ValueError` on a bad combination of sizes, before
    anything compiles; ``step(state, config) -> (state, info)`` is one rollout and its updates.
    """

    init: Callable[[Key, Any], TrainState]
    step: Callable[[TrainState, Any], tuple[TrainState, Info]]
    act: ActFn
    env: Env
    initial_carry: Callable[[int], PyTree] = lambda num_envs: ()


Optimizer = Callable[[Any], Any]
"""``config -> optax.GradientTransformation``, called inside the trace so that its numbers can be
swept: a learning rate closed over by a transformation could not."""


Pmean = Callable[[PyTree], PyTree]
"""The mean of every leaf over all replicas that train one agent together. What an algorithm learns
from must pass through it, and then every replica takes the same step."""


def one_replica(tree: PyTree) -> PyTree:
    """The `Pmean` of an agent that is trained by itself: `tree` as it is."""
    return tree


def split_key(key: Key, *names: str) -> dict[str, Key]:
    """One key per name. `jax.random.split(k, 2)` equals ``split(k, 8)[:2]``: split a key once."""
    keys = jax.random.split(key, len(names))
    return dict(zip(names, keys, strict=True))
