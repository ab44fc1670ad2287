"""Floor 2: networks behind the `Policy` protocol, ready-made ones and any other library's.

`mlp_policy`, `cnn_policy` and `gru_policy` read the spaces of an `Env` and return a `Policy` whose
parameters are ``{"actor": …, "critic": …}``: two networks that share nothing. With ``shared=True``
they are ``{"trunk": …, "actor": …, "critic": …}``. Initialisation is orthogonal: gain √2 in hidden
layers, 0.01 in the policy head (a new policy is close to uniform), 1 in the value head, biases 0.

**Action masks.** When the observation is a dict with an entry ``"action_mask"`` (bool ``[N, A]``,
True = allowed; for `MultiDiscrete` the masks of its components one after the other), that entry is
no input of the network: it is applied to the logits, see `jaxpg.distributions.mask_logits`.

**Other networks.** A `Policy` is two functions, so anything plugs in. `from_linen` wraps a flax
linen module. A dict of arrays, with nothing but JAX:

>>> import jax, jax.numpy as jnp
>>> from jaxpg.distributions import categorical
>>> from jaxpg.types import Policy
>>> def init(key, obs):
...     return {"actor": jnp.zeros((obs.shape[-1], 2)), "critic": jnp.zeros(obs.shape[-1])}
>>> def apply(params, obs):
...     return obs @ params["actor"], obs @ params["critic"]
>>> policy = Policy(init, apply, categorical)
>>> obs = jnp.ones((5, 4))
>>> logits, value = jax.jit(policy.apply)(policy.init(jax.random.key(0), obs), obs)
>>> logits.shape, value.shape
((5, 2), (5,))

A flax nnx module, split into its structure (static) and its arrays (the parameters):

>>> from flax import nnx
>>> class Network(nnx.Module):
...     def __init__(self, rngs):
...         self.actor, self.critic = nnx.Linear(4, 2, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
...     def __call__(self, obs):
...         return self.actor(obs), self.critic(obs)[:, 0]
>>> graphdef = nnx.graphdef(nnx.eval_shape(lambda: Network(nnx.Rngs(0))))
>>> policy = Policy(
...     init=lambda key, obs: nnx.to_pure_dict(nnx.state(Network(nnx.Rngs(key)), nnx.Param)),
...     apply=lambda params, obs: nnx.merge(graphdef, nnx.State(params))(obs),
...     distribution=categorical,
... )
>>> logits, value = jax.jit(policy.apply)(policy.init(jax.random.key(0), obs), obs)
>>> logits.shape, value.shape
((5, 2), (5,))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxpg import _checks
from jaxpg._networks import (
    Branch,
    Convolutional,
    Dense,
    GaussianHead,
    LogitsHead,
    Recurrent,
    ValueHead,
    draw_kernels,
    split_last,
)
from jaxpg._products import product_in
from jaxpg.distributions import (
    categorical,
    diagonal_gaussian,
    mask_logits,
    multi_categorical,
    tanh_gaussian,
)
from jaxpg.types import (
    Box,
    DictSpace,
    Discrete,
    Distribution,
    Env,
    Key,
    MultiDiscrete,
    Policy,
    PyTree,
    Space,
)

Activation = str | Callable[[Array], Array]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}


def default_distribution(action_space: Space) -> Distribution:
    """The family of action distributions that fits an action space.

    Args:
        action_space: `Discrete`, `MultiDiscrete`, or a `Box` with one axis.

    Returns:
        `categorical`, `multi_categorical` or `diagonal_gaussian`.

    Raises:
        ValueError: there is none.

    Example:
        >>> default_distribution(Discrete(3)) is categorical
        True
    """
    if isinstance(action_space, Discrete) and action_space.n >= 1:
        return categorical
    if isinstance(action_space, MultiDiscrete) and action_space.nvec:
        return multi_categorical
    if isinstance(action_space, Box) and len(action_space.shape) == 1:
        return diagonal_gaussian
    raise ValueError(
        "policies act in Discrete, MultiDiscrete or Box spaces with one axis, "
        f"not in {_shown(action_space)}"
    )


def mlp_policy(
    env: Env,
    *,
    hidden_sizes: Sequence[int] = (64, 64),
    activation: Activation = "tanh",
    shared: bool = False,
    distribution: Distribution | None = None,
    log_std_init: float = 0.0,
    state_dependent_std: bool = False,
    compute_dtype: DTypeLike | None = None,
    action_mask: str | None = "action_mask",
    action_values: bool = False,
) -> Policy:
    """Dense layers for policy and critic.

    h₀ = obs;  hᵢ = φ(hᵢ₋₁ Wᵢ + bᵢ);  heads: dist_params = h W + b,  value = h w + b

    Observations are flattened per row; integers of a `Discrete` space become one-hot vectors; the
    parts of a `DictSpace` are concatenated in the order of their names.

    Args:
        env: its spaces decide the shapes; `Discrete` actions get logits ``[N, A]``,
            `MultiDiscrete` a tuple of logits, `Box` ``(mean [N, D], log_std [N, D])``.
        hidden_sizes: widths of the hidden layers; ``()`` is a linear policy.
        activation: ``"tanh"``, ``"relu"``, ``"elu"``, ``"gelu"``, ``"silu"``, or a function.
        shared: one trunk under both heads instead of two networks. Two are the default: they
            run at the same time on two cores, and `trpo` needs them.
        distribution: another family with the same parameters, such as `tanh_gaussian`; by
            default that of `default_distribution`.
        log_std_init: initial log standard deviation of `Box` actions, a parameter of its own.
        state_dependent_std: the network gives the log standard deviation, too (added to
            `log_std_init`).
        compute_dtype: such as ``jnp.bfloat16``: inputs of the products in hidden layers are rounded
            to it and summed in float32, and on accelerators and under `data_parallel` also those of
            the products that carry gradients backwards. Parameters, their gradients, logits and
            values stay float32. None: off.
        action_mask: name of the observation's entry with the mask; None: no entry is one.
        action_values: the critic gives ``Q(s, ·)`` ``[N, A]`` over `Discrete` actions, in place of
            ``v(s)`` ``[N]``, as `actor_critic` takes it under ``advantage="action_value"``.

    Returns:
        A feed-forward policy; ``params["actor"]`` and ``params["critic"]`` (and ``["trunk"]``).

    Raises:
        ValueError: a space that such a policy cannot serve, or a setting that does not fit it.

    Example:
        >>> from jaxpg.types import Env
        >>> env = Env(None, None, Box(-1.0, 1.0, (4,)), Discrete(2))
        >>> policy = mlp_policy(env, hidden_sizes=(8,))
        >>> obs = jnp.zeros((3, 4))
        >>> params = policy.init(jax.random.key(0), obs)
        >>> logits, value = policy.apply(params, obs)
        >>> sorted(params), logits.shape, value.shape
        (['actor', 'critic'], (3, 2), (3,))

    References:
        Andrychowicz et al., "What Matters in On-Policy Reinforcement Learning?",
        arXiv:2006.05990, section 3.2 (separate networks, tanh, small initial policy head).
    """
    fit = _fit(env, distribution, log_std_init, state_dependent_std, action_mask, action_values)
    sizes = _sizes("hidden_sizes", hidden_sizes)
    act, product = _activation(activation), product_in(compute_dtype)
    return _feed_forward(fit, lambda: Dense(sizes, act, product), shared)


def cnn_policy(
    env: Env,
    *,
    channels: Sequence[int] = (16,),
    kernel: int = 3,
    hidden_sizes: Sequence[int] = (128,),
    activation: Activation = "relu",
    shared: bool = True,
    distribution: Distribution | None = None,
    log_std_init: float = 0.0,
    state_dependent_std: bool = False,
    compute_dtype: DTypeLike | None = None,
    action_mask: str | None = "action_mask",
    action_values: bool = False,
) -> Policy:
    """Convolutions and dense layers for small images such as MinAtar's ``[10, 10, C]``.

    The defaults are the network of the MinAtar paper: one 3 × 3 convolution with 16 channels and
    stride 1, without padding, then 128 units. Images enter as they are: bytes are not divided by
    255 (normalise observations for that).

    Each convolution is written as one matrix product over shifted copies of the image. XLA's own
    convolution is as fast outside of loops, but on CPU its gradient inside `jax.lax.scan`, where
    every update lives, takes 6 to 14 times as long (measured at 64 to 512 images).

    Args:
        env: observations must be one `Box` of shape ``[H, W, C]``, beside an action mask.
        channels: of the convolutions, in order.
        kernel: side of every convolution's window.
        hidden_sizes: widths of the dense layers after them.
        activation: as in `mlp_policy`.
        shared: one trunk under both heads; `trpo` needs False.
        distribution: as in `mlp_policy`.
        log_std_init: as in `mlp_policy`.
        state_dependent_std: as in `mlp_policy`.
        compute_dtype: as in `mlp_policy`.
        action_mask: as in `mlp_policy`.
        action_values: as in `mlp_policy`.

    Returns:
        A feed-forward policy; ``params["trunk"]``, ``["actor"]``, ``["critic"]``, or the latter
        two.

    Raises:
        ValueError: observations of another rank, images smaller than the windows, or as in
            `mlp_policy`.

    Example:
        >>> from jaxpg.types import Env
        >>> env = Env(None, None, Box(0.0, 1.0, (5, 5, 4)), Discrete(3))
        >>> policy = cnn_policy(env, hidden_sizes=(32,))
        >>> params = policy.init(jax.random.key(0), jnp.zeros((1, 5, 5, 4)))
        >>> params["trunk"]["conv_0"]["kernel"].shape, params["trunk"]["dense_0"]["kernel"].shape
        ((3, 3, 4, 16), (144, 32))

    References:
        Young & Tian, "MinAtar", arXiv:1903.03176, section 4.
    """
    fit = _fit(
        env,
        distribution,
        log_std_init,
        state_dependent_std,
        action_mask,
        action_values,
        images=True,
    )
    widths = _sizes("channels", channels)
    sizes = _sizes("hidden_sizes", hidden_sizes)
    kernel = _checks.positive_int("kernel", kernel)
    side = min(fit.input_shape[:2])
    if side <= len(widths) * (kernel - 1):
        raise ValueError(
            f"{len(widths)} convolutions with kernel={kernel} do not fit images {fit.input_shape}"
        )
    act, product = _activation(activation), product_in(compute_dtype)
    return _feed_forward(fit, lambda: Convolutional(widths, kernel, sizes, act, product), shared)


def gru_policy(
    env: Env,
    *,
    hidden_size: int = 64,
    embed_sizes: Sequence[int] = (64,),
    activation: Activation = "tanh",
    shared: bool = False,
    distribution: Distribution | None = None,
    log_std_init: float = 0.0,
    state_dependent_std: bool = False,
    compute_dtype: DTypeLike | None = None,
    action_mask: str | None = "action_mask",
    action_values: bool = False,
) -> Policy:
    """Dense layers, then a gated recurrent unit, for policy and critic.

    r = σ(x Wᵣ + h Uᵣ + bᵣ);  z = σ(x W_z + h U_z + b_z);  n = tanh(x Wₙ + bₙ + r (h Uₙ + cₙ))
    h ← (1 − z) n + z h, with h = 0 where an episode starts

    Actor and critic each remember for themselves by default, so the layout of the parameters is
    that of `mlp_policy` and the critic may keep what the actor has no use for.

    Args:
        env: as in `mlp_policy`.
        hidden_size: ``H``, numbers remembered by each unit.
        embed_sizes: widths of the dense layers before it.
        activation: of these layers, as in `mlp_policy`.
        shared: one unit under both heads instead of two.
        distribution: as in `mlp_policy`.
        log_std_init: as in `mlp_policy`.
        state_dependent_std: as in `mlp_policy`.
        compute_dtype: as in `mlp_policy`; the carry stays float32.
        action_mask: as in `mlp_policy`.
        action_values: as in `mlp_policy`.

    Returns:
        A recurrent policy: ``initial_carry(N)`` is ``{"actor": [N, H], "critic": [N, H]}``, or
        ``{"trunk": [N, H]}``; ``init(key, obs)`` also takes the arguments of ``apply``, ``init(key,
        carry, obs, reset)``.

    Raises:
        ValueError: as `mlp_policy`.

    Example:
        >>> from jaxpg.types import Env
        >>> env = Env(None, None, Box(-1.0, 1.0, (4,)), Discrete(2))
        >>> policy = gru_policy(env, hidden_size=8, embed_sizes=())
        >>> obs, carry = jnp.ones((3, 4)), policy.initial_carry(3)
        >>> params = policy.init(jax.random.key(0), obs)
        >>> carry, (logits, value) = policy.apply(params, carry, obs, jnp.zeros(3, bool))
        >>> carry["actor"].shape, logits.shape, value.shape
        ((3, 8), (3, 2), (3,))

    References:
        Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder", arXiv:1406.1078,
        section 2.3. Deviations: z and 1 − z change places, and r multiplies h U + c, not h, so that
        all gates take one product (as in cuDNN).
    """
    fit = _fit(env, distribution, log_std_init, state_dependent_std, action_mask, action_values)
    width = _checks.positive_int("hidden_size", hidden_size)
    sizes = _sizes("embed_sizes", embed_sizes)
    act, product = _activation(activation), product_in(compute_dtype)
    networks = _networks(fit, lambda: Recurrent(sizes, width, act, product), shared)
    memories = ("trunk",) if shared else ("actor", "critic")

    def initial_carry(num_envs: int) -> dict[str, Array]:
        return {name: jnp.zeros((num_envs, width), jnp.float32) for name in memories}

    def init(key: Key, obs: PyTree) -> PyTree:
        x, _ = fit.observe(obs)
        return _init(key, networks, x, initial_carry(x.shape[0]))

    def apply(params: PyTree, carry: PyTree, obs: PyTree, reset: ArrayLike) -> Any:
        x, mask = fit.observe(obs)
        dist_params, value, carry = _run(params, networks, x, reset_carry(carry, reset))
        return carry, (fit.apply_mask(dist_params, mask), value)

    return Policy(init, apply, fit.distribution, initial_carry)


def from_linen(
    module: nn.Module,
    distribution: Distribution,
    *,
    initial_carry: Callable[[int], PyTree] | None = None,
) -> Policy:
    """A `Policy` from a flax linen module with outputs for both policy and critic.

    Args:
        module: ``module(obs[N, …]) -> (dist_params, value[N])``; a recurrent one is
            ``module(carry, obs) -> (carry, (dist_params, value))``, where the carry arrives already
            zeroed for rows that start an episode. Submodules named ``actor`` and ``critic`` that
            share nothing make it fit for `trpo`.
        distribution: the family of `dist_params`.
        initial_carry: ``N -> carry`` of zeros, for a recurrent module.

    Returns:
        The policy; its parameters are the module's collection ``"params"``.

    Raises:
        ValueError: in ``init``, when the module has other collections (running batch statistics):
            nothing would carry them from one call to the next.

    Example:
        >>> class Network(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, obs):
        ...         return nn.Dense(2, name="actor")(obs), nn.Dense(1, name="critic")(obs)[:, 0]
        >>> policy = from_linen(Network(), categorical)
        >>> params = policy.init(jax.random.key(0), jnp.zeros((1, 4)))
        >>> sorted(params)
        ['actor', 'critic']
    """

    def parameters(key: Key, *inputs: PyTree) -> PyTree:
        variables = module.init(key, *inputs)
        others = sorted(set(variables) - {"params"})
        if others:
            raise ValueError(f"{type(module).__name__} keeps state in {others}: use params only")
        return variables.get("params", {})

    if initial_carry is None:
        return Policy(
            init=parameters,
            apply=lambda params, obs: module.apply({"params": params}, obs),
            distribution=distribution,
        )

    def init(key: Key, obs: PyTree) -> PyTree:
        return parameters(key, initial_carry(jax.tree.leaves(obs)[0].shape[0]), obs)

    def apply(params: PyTree, carry: PyTree, obs: PyTree, reset: ArrayLike) -> Any:
        return module.apply({"params": params}, reset_carry(carry, reset), obs)

    return Policy(init, apply, distribution, initial_carry)


def reset_carry(carry: PyTree, reset: ArrayLike) -> PyTree:
    """The carry of a recurrent network, zero in the rows that start an episode.

    Args:
        carry: any pytree of ``[N, …]``.
        reset: ``[N]`` flags.

    Returns:
        The carry; by ``where``, so that a NaN left by the last episode is gone too.

    Raises:
        TypeError: `reset` is a float array.

    Example:
        >>> print(reset_carry(jnp.array([[1.0], [jnp.nan]]), jnp.array([False, True])).tolist())
        [[1.0], [0.0]]
    """
    reset = _checks.as_flag("reset", reset)

    def zeroed(x: Array) -> Array:
        rows = reset.reshape(reset.shape + (1,) * (x.ndim - reset.ndim))
        return jnp.where(rows, jnp.zeros((), x.dtype), x)

    return jax.tree.map(zeroed, carry)


# --- what a policy reads off the spaces of its environment ---------------------------------------

_FAMILIES = {
    categorical: Discrete,
    multi_categorical: MultiDiscrete,
    diagonal_gaussian: Box,
    tanh_gaussian: Box,
}


class _Fit(NamedTuple):
    distribution: Distribution
    head: Callable[[], nn.Module]  # of the actor
    critic: Callable[[], nn.Module]  # head of the critic
    observe: Callable[[PyTree], tuple[Array, Array | None]]  # obs -> (network input, mask)
    apply_mask: Callable[[PyTree, Array | None], PyTree]  # (dist_params, mask) -> dist_params
    input_shape: tuple[int, ...]  # of one image, () where rows are flattened


def _fit(
    env: Env,
    distribution: Distribution | None,
    log_std_init: float,
    state_dependent_std: bool,
    action_mask: str | None,
    action_values: bool,
    *,
    images: bool = False,
) -> _Fit:
    family, head = _actor(env.action_space, distribution, log_std_init, state_dependent_std)
    num_actions = None
    if action_values:
        if not isinstance(env.action_space, Discrete):
            raise ValueError(f"action_values need Discrete actions, not {env.action_space!r:.200}")
        num_actions = env.action_space.n
    space, masked = env.observation_space, False
    if action_mask is not None and isinstance(space, DictSpace) and action_mask in space.spaces:
        masked = True
        space = DictSpace({k: v for k, v in space.spaces.items() if k != action_mask})
    image = _image_space(space) if images else None

    if image is None:
        _check_observable("observation", space)

    def observe(obs: PyTree) -> tuple[Array, Array | None]:
        _check_entries("observation", env.observation_space, obs)
        mask = _checks.as_flag(action_mask, obs[action_mask]) if masked else None
        if image is not None:
            x = obs[next(iter(space.spaces))] if isinstance(space, DictSpace) else obs
            return _rows("observation", x, image.shape).astype(jnp.float32), mask
        parts = list(_features("observation", space, obs))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1), mask

    apply_mask = _masking(env.action_space) if masked else lambda dist_params, mask: dist_params
    shape = image.shape if image is not None else ()
    return _Fit(family, head, lambda: ValueHead(num_actions), observe, apply_mask, shape)


def _actor(
    space: Space, distribution: Distribution | None, log_std_init: float, state_dependent_std: bool
) -> tuple[Distribution, Callable[[], nn.Module]]:
    default = default_distribution(space)
    family = distribution or default
    for known, fits in _FAMILIES.items():
        if family == known and not isinstance(space, fits):
            raise ValueError(
                f"a distribution of {fits.__name__} actions cannot act in {_shown(space)}"
            )
    if isinstance(space, Box):
        dim = space.shape[0]
        return family, lambda: GaussianHead(dim, float(log_std_init), bool(state_dependent_std))
    if log_std_init != 0.0 or state_dependent_std:
        raise ValueError(
            f"log_std_init and state_dependent_std are of Box actions, not of {_shown(space)}"
        )
    joint = isinstance(space, MultiDiscrete)
    sizes = tuple(space.nvec) if joint else (space.n,)
    return family, lambda: LogitsHead(sizes, joint)


def _masking(space: Space) -> Callable[[PyTree, Array], PyTree]:
    if isinstance(space, Discrete):
        return mask_logits
    if not isinstance(space, MultiDiscrete):
        raise ValueError(f"an action mask needs discrete actions, not {_shown(space)}")

    def apply_mask(logits: tuple[Array, ...], mask: Array) -> tuple[Array, ...]:
        if mask.shape[-1] != sum(space.nvec):
            raise ValueError(
                f"the action mask needs {sum(space.nvec)} entries for {space}, got {mask.shape}"
            )
        return tuple(map(mask_logits, logits, split_last(mask, space.nvec)))

    return apply_mask


def _image_space(space: Space) -> Box:
    parts = list(space.spaces.values()) if isinstance(space, DictSpace) else [space]
    if len(parts) != 1 or not isinstance(parts[0], Box) or len(parts[0].shape) != 3:
        raise ValueError(f"cnn_policy needs observations [H, W, C], got the space {_shown(space)}")
    return parts[0]


def _check_observable(name: str, space: Space) -> None:
    if isinstance(space, DictSpace) and space.spaces:
        for key, part in space.spaces.items():
            _check_observable(f"{name}[{key!r}]", part)
    elif isinstance(space, DictSpace) or not isinstance(space, Box | Discrete | MultiDiscrete):
        raise ValueError(f"policies cannot observe {name} in the space {_shown(space)}")


def _check_entries(name: str, space: Space, obs: PyTree) -> None:
    if not isinstance(space, DictSpace):
        return
    given = set(obs) if isinstance(obs, Mapping) else type(obs)
    if given != set(space.spaces):
        raise ValueError(f"{name} must be a dict with entries {set(space.spaces)}, got {given}")


def _features(name: str, space: Space, obs: PyTree) -> Iterator[Array]:
    """The parts of an observation as float32 ``[N, F]``."""
    if isinstance(space, DictSpace):
        for key in sorted(space.spaces):
            part, where = space.spaces[key], f"{name}[{key!r}]"
            _check_entries(where, part, obs[key])
            yield from _features(where, part, obs[key])
    elif isinstance(space, Box):
        x = _rows(name, obs, space.shape).astype(jnp.float32)
        yield x.reshape(x.shape[0], math.prod(space.shape))
    else:
        sizes = (space.n,) if isinstance(space, Discrete) else space.nvec
        x = _rows(name, obs, () if isinstance(space, Discrete) else (len(sizes),))
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name} must be integers of {space}, got dtype {x.dtype}")
        x = x.reshape(x.shape[0], len(sizes))
        for i, n in enumerate(sizes):
            yield jax.nn.one_hot(x[:, i], n, dtype=jnp.float32)


def _shown(space: Space) -> str:
    """The space in one short line, array bounds and all."""
    return " ".join(repr(space).split())[:200]


def _rows(name: str, x: ArrayLike, shape: tuple[int, ...]) -> Array:
    x = _checks.as_array(name, x)
    if x.ndim < 1 or x.shape[1:] != tuple(shape):
        raise ValueError(f"{name} must be N rows of shape {tuple(shape)}, got shape {x.shape}")
    return x


def _sizes(name: str, sizes: Sequence[int]) -> tuple[int, ...]:
    if isinstance(sizes, int):
        raise TypeError(f"{name} must be a sequence of whole numbers, got {sizes}")
    return tuple(_checks.positive_int(name, size) for size in sizes)


def _activation(activation: Activation) -> Callable[[Array], Array]:
    if callable(activation):
        return activation
    _checks.one_of("activation", activation, ACTIVATIONS)
    return ACTIVATIONS[activation]


# --- assembly: actor and critic, apart or on a trunk ---------------------------------------------


def _networks(fit: _Fit, torso: Callable[[], nn.Module], shared: bool) -> dict[str, nn.Module]:
    if shared:
        return {"trunk": torso(), "actor": fit.head(), "critic": fit.critic()}
    # two networks, whose first products are not fused into one: they run on two cores at once
    return {"actor": Branch(torso(), fit.head()), "critic": Branch(torso(), fit.critic())}


def _init(key: Key, networks: dict[str, nn.Module], x: Array, carry: PyTree) -> PyTree:
    params = {}

    def add(name: str, *inputs: PyTree) -> None:
        params[name] = networks[name].init(key, *inputs).get("params", {})

    if "trunk" in networks:
        add("trunk", x, carry.get("trunk", ()))
        h, _ = networks["trunk"].apply({"params": params["trunk"]}, x, carry.get("trunk", ()))
        add("actor", h)
        add("critic", h)
    else:
        add("actor", x, carry.get("actor", ()))
        add("critic", x, carry.get("critic", ()))
    return draw_kernels(key, params)


def _run(
    params: PyTree, networks: dict[str, nn.Module], x: Array, carry: PyTree
) -> tuple[PyTree, Array, PyTree]:
    """``(dist_params, value, carry)``"""

    def call(name: str, *inputs: PyTree) -> Any:
        return networks[name].apply({"params": params[name]}, *inputs)

    if "trunk" in networks:
        h, memory = call("trunk", x, carry.get("trunk", ()))
        return call("actor", h), call("critic", h), {"trunk": memory}
    dist_params, actor = call("actor", x, carry.get("actor", ()))
    value, critic = call("critic", x, carry.get("critic", ()))
    return dist_params, value, {"actor": actor, "critic": critic}


def _feed_forward(fit: _Fit, torso: Callable[[], nn.Module], shared: bool) -> Policy:
    networks = _networks(fit, torso, shared)

    def init(key: Key, obs: PyTree) -> PyTree:
        return _init(key, networks, fit.observe(obs)[0], {})

    def apply(params: PyTree, obs: PyTree) -> tuple[PyTree, Array]:
        x, mask = fit.observe(obs)
        dist_params, value, _ = _run(params, networks, x, {})
        return fit.apply_mask(dist_params, mask), value

    return Policy(init, apply, fit.distribution)
