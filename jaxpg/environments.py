"""Floor 2: environments as pure functions. The one place that knows gymnax.

`auto_reset` makes an `Env` of any ``reset`` and ``step``; `from_gymnax` does it for gymnax, from
``step_env``, ``is_truncated`` and ``reset_env``, so that the true successor of every step and both
flags survive. gymnax's own jitted ``step`` is never called.

gymnax takes seconds to import (it brings plotting libraries), so it is imported where it is used.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpg._checks import as_flag, is_concrete, one_of
from jaxpg.types import (
    Box,
    DictSpace,
    Discrete,
    Env,
    EnvStep,
    Key,
    MultiDiscrete,
    PyTree,
    Space,
    reset_where_done,
    split_key,
)

_NEEDS_DATA = "MNISTBandit-bsuite"


def auto_reset(
    reset: Callable[[Key], tuple[PyTree, PyTree]],
    step: Callable[[Key, PyTree, Array], tuple[PyTree, PyTree, Any, Any, Any]],
    *,
    observation_space: Space,
    action_space: Space,
    time_limit: int | None = None,
    name: str = "custom",
) -> Env:
    """An `Env` that resets by itself, from functions that do not.

    Where ``terminated | truncated`` the returned state and ``obs`` are those of a fresh reset, and
    ``final_obs`` is the successor that the step really reached. State and observation leave with
    the shapes and (strong) dtypes that `reset` gives them, so that they can be carried by
    `jax.lax.scan`; rewards leave as float32, flags as bool.

    Args:
        reset: ``key -> (state, obs)``; the state is any pytree of arrays and numbers.
        step: ``(key, state, action) -> (state, obs, reward, terminated, truncated)``, the last
            three scalars: the environment alone, without any reset.
        observation_space: of one observation.
        action_space: of one action.
        time_limit: a promise about `step`: it truncates no sooner than this many steps after a
            reset, and never lets an episode run longer. ``None`` promises nothing.
        name: shown in messages.

    Returns:
        The environment. A key given to ``env.step`` is split into one for `step` and one for the
        reset, as gymnax does.

    Raises:
        ValueError: while tracing, when a step changes the structure or a shape of the state or
            observation, or when reward or flags are no scalars.
        TypeError: while tracing, when casting would lose something (a state integer at reset that
            becomes a fraction), or when a flag is a float.

    Example:
        >>> import jax
        >>> def reset(key):
        ...     return 0, jax.numpy.zeros(1)
        >>> def step(key, count, action):
        ...     count = count + 1
        ...     return count, jax.numpy.full(1, count), 1, False, count >= 3
        >>> env = auto_reset(reset, step, observation_space=Box(0, 3, (1,)),
        ...                  action_space=Discrete(2), time_limit=3)
        >>> key = jax.random.key(0)
        >>> state, obs = env.reset(key)
        >>> for _ in range(3):
        ...     state, out = env.step(key, state, 0)
        >>> out.final_obs.item(), out.obs.item(), out.truncated.item()
        (3.0, 0.0, True)
    """

    def fresh(key: Key) -> tuple[PyTree, PyTree]:
        return _strong(reset(key))

    def transition(key: Key, state: PyTree, action: Array) -> tuple[PyTree, EnvStep]:
        next_state, obs, reward, terminated, truncated = step(key, state, action)
        next_state, obs = jax.tree_util.tree_map_with_path(
            _cast_like, jax.eval_shape(fresh, key), (next_state, obs)
        )
        reward = _scalar("reward", reward).astype(jnp.float32)
        terminated = _flag("terminated", terminated)
        truncated = _flag("truncated", truncated)
        return next_state, EnvStep(obs, reward, terminated, truncated, final_obs=obs)

    def auto_step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, EnvStep]:
        keys = split_key(key, "step", "reset")
        state, out = transition(keys["step"], state, action)
        state, out = reset_where_done(fresh(keys["reset"]), state, out)
        return state, out

    return Env(fresh, auto_step, observation_space, action_space, time_limit, name, transition)


def _strong(tree: PyTree) -> PyTree:
    """Every leaf a new array without weak type: Python numbers become int32 and float32.

    New, because a reset may return one array twice, or one that the environment keeps (MetaMaze):
    a caller who donates the state would delete it.
    """
    return jax.tree.map(lambda x: jnp.array(x, dtype=jnp.asarray(x).dtype), tree)


def _cast_like(path: tuple, fresh: Array, stepped: Any) -> Array:
    """`stepped` in the dtype of `fresh`, if it has its shape and loses nothing but precision."""
    stepped = jnp.asarray(stepped)
    if stepped.shape == fresh.shape and stepped.dtype == fresh.dtype:
        return stepped if not stepped.weak_type else stepped.astype(fresh.dtype)
    where = ("state", "observation")[path[0].idx] + jax.tree_util.keystr(path[1:])
    if stepped.shape != fresh.shape:
        raise ValueError(
            f"the {where} has shape {fresh.shape} after a reset but {stepped.shape} after a step"
        )
    if _kind(stepped) > _kind(fresh):
        raise TypeError(
            f"the {where} has dtype {fresh.dtype} after a reset but {stepped.dtype} after a step"
        )
    return stepped.astype(fresh.dtype)


def _kind(x: Array) -> int:
    kinds = jnp.bool_, jnp.integer, jnp.floating, jnp.generic
    return next(i for i, kind in enumerate(kinds) if jnp.issubdtype(x.dtype, kind))


def _scalar(name: str, x: Any) -> Array:
    x = jnp.asarray(x)
    if x.shape != ():
        raise ValueError(f"{name} of one environment must be a scalar, got shape {x.shape}")
    return x


def _flag(name: str, x: Any) -> Array:
    return as_flag(name, _scalar(name, x))


def from_gymnax(
    id_or_env: Any, params: Any = None, *, box_actions: str = "clip", **overrides: Any
) -> Env:
    """A gymnax environment as an `Env`.

    Everything inside computes in 32 bits, also under ``jax_enable_x64``: gymnax mixes 32 and 64
    bits there and some of its environments raise, and a trajectory should not depend on the mode.

    Observations are float32: a `Box` keeps its shape (a scalar one becomes ``[1]``), integers of a
    discrete space become one-hot vectors, dictionaries become dicts whose entry ``action_mask`` is
    bool. Box actions are clipped to the space or scaled to it; a scalar one is ``[1]`` for the
    policy.

    Args:
        id_or_env: a name (`list_environments`), or a gymnax ``Environment`` (not a wrapper).
        params: the environment's ``EnvParams``; by default its ``default_params``.
        box_actions: ``"clip"`` lets the policy act in the space's own units and clips; ``"scale"``
            clips to [−1, 1] and maps that onto the (bounded) space.
        **overrides: fields of the ``EnvParams`` (``max_steps_in_episode=100``), or keyword
            arguments of the environment's constructor when it is given by name (``size=12``).

    Returns:
        The environment. ``time_limit`` is ``max_steps_in_episode`` where truncation is gymnax's
        own rule, ``time >= max_steps_in_episode``, else ``None``.

    Raises:
        ValueError: unknown name or override (with the nearest ones), a space that policies do not
            know, a time limit below 1, scaling what has no bounds, an environment that needs data.
        TypeError: neither a name nor a gymnax environment, or an override of the wrong type.

    Example:
        >>> env = from_gymnax("CartPole-v1", max_steps_in_episode=100)
        >>> env.observation_space.shape, env.action_space, env.time_limit
        ((4,), Discrete(n=2), 100)

    References:
        Lange, gymnax: A JAX-based Reinforcement Learning Environment Library, 2022. Deviations:
        32 bits as above; bsuite's sums over episodes in the state of DeepSea are not kept.
    """
    one_of("box_actions", box_actions, ("clip", "scale"))
    # concrete constants even when called inside a trace: spaces are read now, with NumPy
    with jax.enable_x64(False), jax.ensure_compile_time_eval():
        env, params, name = _construct(id_or_env, params, overrides)
        observation_space, encode = _observation(env.observation_space(params))
        action_space, decode = _action(env.action_space(params), box_actions, name)

    def reset(key: Key) -> tuple[PyTree, PyTree]:
        with jax.enable_x64(False):
            obs, state = env.reset_env(key, params)
            return _strong((state, encode(obs)))

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, PyTree, Array, Array, Array]:
        with jax.enable_x64(False):
            obs, state, reward, terminated, _ = env.step_env(key, state, decode(action), params)
            return state, encode(obs), reward, terminated, env.is_truncated(state, params)

    return auto_reset(
        reset,
        step,
        observation_space=observation_space,
        action_space=action_space,
        time_limit=_time_limit(env, params),
        name=name,
    )


def _construct(id_or_env: Any, params: Any, overrides: dict[str, Any]) -> tuple[Any, Any, str]:
    """The environment, its parameters with the overrides in place, and its name."""
    import gymnax
    from gymnax.environments.environment import Environment

    if isinstance(id_or_env, str):
        name = id_or_env
        one_of("environment", name, list_environments())
        if name == _NEEDS_DATA:
            raise ValueError(
                f"{name} downloads a data set when it is constructed; construct it yourself "
                f"with gymnax.make({name!r}) and pass the environment"
            )
        env, _ = gymnax.make(name)
        arguments = _constructor_arguments(env)
    else:
        env, arguments = id_or_env, ()
        name = getattr(env, "name", type(env).__name__)
    if not isinstance(env, Environment):
        raise TypeError(
            f"expected the name of a gymnax environment or a gymnax Environment, got {env!r:.80}; "
            "wrappers act in gymnax's `step`, which is not used here: pass what they wrap"
        )
    _check_step_is_inherited(env, Environment)
    fields = [field.name for field in dataclasses.fields(params or env.default_params)]
    for key in overrides:
        one_of(f"setting of {name}", key, [*fields, *arguments])
    constructor = {key: value for key, value in overrides.items() if key not in fields}
    if constructor:
        env, _ = gymnax.make(name, **constructor)
    default = env.default_params
    if params is None:
        params = default
    elif not isinstance(params, type(default)):
        raise TypeError(f"params of {name} must be {type(default)}, got {type(params)}")
    changed = {
        key: _setting(key, value, getattr(params, key))
        for key, value in overrides.items()
        if key in fields
    }
    return _narrow(env), jax.tree.map(_to_32_bits, params.replace(**changed)), name


def _constructor_arguments(env: Any) -> tuple[str, ...]:
    """Keyword arguments of the environment's own constructor."""
    parameters = inspect.signature(type(env).__init__).parameters.values()
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return tuple(p.name for p in parameters if p.name != "self" and p.kind not in variadic)


def _check_step_is_inherited(env: Any, base: type) -> None:
    """Refuses a user's own ``step`` or ``reset``: only ``step_env`` and ``reset_env`` are used.

    Of gymnax's own only DeepSea has one, which keeps sums over episodes that nothing else reads.
    """
    own = [
        name for name in ("step", "reset") if getattr(type(env), name) is not getattr(base, name)
    ]
    if own and not type(env).__module__.startswith("gymnax."):
        raise ValueError(
            f"{type(env).__name__} overrides {' and '.join(own)}, which would not be called; "
            "write step_env and reset_env instead"
        )


def _setting(name: str, value: Any, default: Any) -> Any:
    """`value` in the type of the `default` that it replaces; a traced value passes."""
    if not is_concrete(value):
        return value
    if isinstance(default, jax.Array | np.ndarray):
        return jnp.asarray(value, default.dtype)
    wanted = bool, numbers.Integral, numbers.Real
    names = "True or False", "a whole number", "a number"
    for type_, kind, phrase in zip((bool, int, float), wanted, names, strict=True):
        if isinstance(default, type_):
            number = value.item() if isinstance(value, jax.Array | np.generic) else value
            if isinstance(number, bool) != (type_ is bool) or not isinstance(number, kind):
                raise TypeError(f"{name} must be {phrase}, got {value!r}")
            return type_(number)
    return value


def _to_32_bits(x: Any) -> Any:
    """An array made under x64 in 32 bits; anything else as it is."""
    if not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return jnp.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))


def _narrow(env: Any) -> Any:
    """A copy of an environment whose own arrays are 32 bits, if they were made under x64."""
    attributes = vars(env)
    narrowed = {key: jax.tree.map(_to_32_bits, value) for key, value in attributes.items()}
    env = copy.copy(env)
    vars(env).update(narrowed)
    return env


def _time_limit(env: Any, params: Any) -> int | None:
    """``max_steps_in_episode`` if gymnax's own rule truncates: its ``time`` counts the steps."""
    from gymnax.environments.environment import Environment

    limit = getattr(params, "max_steps_in_episode", None)
    if limit is None or not is_concrete(limit):
        return None
    if not float(limit) >= 1:
        raise ValueError(f"max_steps_in_episode must be at least 1, got {limit}")
    if type(env).is_truncated is not Environment.is_truncated or math.isinf(limit):
        return None
    return math.ceil(limit)


def _observation(space: Any) -> tuple[Space, Callable[[Any], PyTree]]:
    """The space that policies see, and the function from gymnax's observation into it."""
    from gymnax.environments import spaces

    if isinstance(space, spaces.Discrete):
        n = int(space.n)
        return Box(0.0, 1.0, (n,)), lambda x: jax.nn.one_hot(x, n, dtype=jnp.float32)
    if isinstance(space, spaces.Box):
        declared = tuple(space.shape)
        shape = declared or (1,)

        def encode(x: Any) -> Array:
            _check_shape("observation", x, declared)
            return jnp.asarray(x, jnp.float32).reshape(shape)

        return Box(_bound(space.low, shape), _bound(space.high, shape), shape), encode
    if isinstance(space, spaces.Dict):
        parts = {key: _observation(part) for key, part in space.spaces.items()}

        def encode_dict(x: Any) -> dict[str, PyTree]:
            entry = x.__getitem__ if isinstance(x, Mapping) else lambda key: getattr(x, key)
            obs = {key: encode(entry(key)) for key, (_, encode) in parts.items()}
            if "action_mask" in obs:
                obs["action_mask"] = obs["action_mask"].astype(jnp.bool_)
            return obs

        return DictSpace({key: part for key, (part, _) in parts.items()}), encode_dict
    raise ValueError(f"no policy knows what to do with the observation space {space!r}")


def _action(space: Any, box_actions: str, name: str) -> tuple[Space, Callable[[Array], Any]]:
    """The space that policies act in, and the function from their action to gymnax's."""
    from gymnax.environments import spaces

    if isinstance(space, spaces.Box):
        return _box_action(space, box_actions, name)
    if box_actions != "clip":
        raise ValueError(f"box_actions={box_actions!r}, but {name} has the actions {space!r}")
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n)), lambda x: _integers(x, ())
    if isinstance(space, spaces.Tuple) and all(
        isinstance(part, spaces.Discrete) for part in space.spaces
    ):
        nvec = tuple(int(part.n) for part in space.spaces)
        return MultiDiscrete(nvec), lambda x: tuple(_integers(x, (len(nvec),)))
    raise ValueError(f"no policy knows how to act in the action space {space!r}")


def _box_action(space: Any, box_actions: str, name: str) -> tuple[Space, Callable[[Array], Array]]:
    declared = tuple(space.shape)
    shape = declared or (1,)
    dtype = jax.dtypes.canonicalize_dtype(space.dtype)
    low, high = _bound(space.low, shape), _bound(space.high, shape)

    def clip(x: Array) -> Array:
        _check_shape("action", x, shape)
        x = jnp.asarray(x, jnp.float32)
        return jnp.clip(x, low, high).astype(dtype).reshape(declared)

    def scale(x: Array) -> Array:
        x = jnp.clip(jnp.asarray(x, jnp.float32), -1.0, 1.0)
        return clip(low + (x + 1) / 2 * (high - low))

    if box_actions == "clip":
        return Box(low, high, shape), clip
    if not (np.all(np.isfinite(low)) and np.all(np.isfinite(high))):
        raise ValueError(f"box_actions='scale' needs bounds, but {name} has the actions {space!r}")
    return Box(-1.0, 1.0, shape), scale


def _bound(bound: Any, shape: tuple[int, ...]) -> Any:
    """A bound of a box: a float if it is the same everywhere it was given once, else an array."""
    bound = np.asarray(bound, np.float32)
    return float(bound) if bound.ndim == 0 else np.broadcast_to(bound, shape)


def _integers(x: Array, shape: tuple[int, ...]) -> Array:
    x = jnp.asarray(x)
    _check_shape("action", x, shape)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"action must be an integer, got dtype {x.dtype}")
    return x.astype(jnp.int32)


def _check_shape(name: str, x: Any, shape: tuple[int, ...]) -> None:
    if jnp.shape(x) != shape:
        raise ValueError(f"{name} has shape {jnp.shape(x)}, but the space has shape {shape}")


def list_environments() -> tuple[str, ...]:
    """The names that `from_gymnax` takes, those registered at run time included.

    Nothing is constructed.

    Returns:
        The names, in gymnax's order.

    Example:
        >>> "CartPole-v1" in list_environments()
        True
    """
    import gymnax

    return tuple(gymnax.registered_envs)


class EnvironmentNote(NamedTuple):
    """One line of the list of environments; ``None`` where only construction could tell."""

    observation_shape: tuple[int, ...] | None
    actions: str | None  # a number of choices, or the shape of a box
    time_limit: int | None
    arguments: tuple[str, ...] = ()  # of the constructor; fields of EnvParams are not listed
    remark: str = ""


_MINATAR = ("use_minimal_action_set",)
_NOTES = {
    "CartPole-v1": EnvironmentNote((4,), "2", 500),
    "Pendulum-v1": EnvironmentNote((3,), "box (1,)", 200),
    "Acrobot-v1": EnvironmentNote((6,), "3", 500),
    "MountainCar-v0": EnvironmentNote((2,), "3", 200),
    "MountainCarContinuous-v0": EnvironmentNote((2,), "box (1,)", 999),
    "Asterix-MinAtar": EnvironmentNote((10, 10, 4), "5", 1000, _MINATAR),
    "Breakout-MinAtar": EnvironmentNote((10, 10, 4), "3", 1000, _MINATAR),
    "Freeway-MinAtar": EnvironmentNote((10, 10, 7), "3", 2500, _MINATAR),
    "Seaquest-MinAtar": EnvironmentNote((10, 10, 10), "6", 1000, _MINATAR),
    "SpaceInvaders-MinAtar": EnvironmentNote((10, 10, 6), "4", 1000, _MINATAR),
    "Catch-bsuite": EnvironmentNote((10, 5), "3", 1000, ("rows", "columns")),
    "DeepSea-bsuite": EnvironmentNote((8, 8), "2", 8, ("size", "action_mapping_key")),
    "MemoryChain-bsuite": EnvironmentNote((3,), "2", 1000, ("num_bits",), "needs memory"),
    "UmbrellaChain-bsuite": EnvironmentNote((3,), "2", 100, ("n_distractor",)),
    "DiscountingChain-bsuite": EnvironmentNote((2,), "5", 100, ("n_actions", "mapping_seed")),
    "MNISTBandit-bsuite": EnvironmentNote(
        (28, 28), "10", 1, ("fraction",), "refused by name: downloads data when constructed"
    ),
    "SimpleBandit-bsuite": EnvironmentNote(
        (1, 1), "11", 100, ("num_actions",), "one-step episodes, arms shuffled in each"
    ),
    "FourRooms-misc": EnvironmentNote(
        (4,), "4", 500, ("use_visual_obs", "goal_fixed", "pos_fixed")
    ),
    "MetaMaze-misc": EnvironmentNote((15,), "4", 200, ("maze_size", "rf_size"), "needs memory"),
    "PointRobot-misc": EnvironmentNote((6,), "box (2,)", 100, (), "needs memory"),
    "BernoulliBandit-misc": EnvironmentNote((4,), "2", 100, (), "needs memory"),
    "GaussianBandit-misc": EnvironmentNote((4,), "2", 100, (), "needs memory"),
    "Reacher-misc": EnvironmentNote(
        (8,), "box (2,)", 100, ("num_joints",), "gymnax fails unless num_joints is 2"
    ),
    "Swimmer-misc": EnvironmentNote((16,), "box (2,)", 500, ("num_urchins",)),
    "Pong-misc": EnvironmentNote((30, 40, 3), "3", 1000, ("width", "height", "paddle_half_height")),
    "FrozenLake-misc": EnvironmentNote(
        (16,),
        "4",
        100,
        ("desc", "map_name", "is_slippery", "success_rate", "reward_schedule"),
    ),
}


def environment_notes() -> dict[str, EnvironmentNote]:
    """What each environment is like by default, without constructing any.

    Returns:
        A note for every name of `list_environments`.

    Example:
        >>> environment_notes()["Pendulum-v1"][:3]
        ((3,), 'box (1,)', 200)
    """
    unknown = EnvironmentNote(None, None, None, remark="registered at run time")
    return {name: _NOTES.get(name, unknown) for name in list_environments()}
