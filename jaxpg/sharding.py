"""Floor 5: runs spread over devices, and over time, as shardings of arrays under `jit`.

Nothing below this floor places anything on a device or names an axis. A mesh of Auto axes and a
sharding of the leading axis are enough for seeds (or settings): they do not talk to each other, so
XLA splits a vmapped run without any communication. One agent on several devices is `data_parallel`:
every device collects and shuffles rows of its own, and the only thing exchanged in an optimizer
step is the gradient.

On CPU, ``XLA_FLAGS=--xla_force_host_platform_device_count=2``, set before jax starts, makes two
devices of two cores (`jaxpg train --devices 2` sets it).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpg._checks import divides, positive_int
from jaxpg.algorithms.common import INFO_SUMS
from jaxpg.types import Algorithm, Info, Key, PyTree, TrainState

Tree = TypeVar("Tree")

AXIS = "devices"


def device_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A one-dimensional mesh of Auto axes.

    Args:
        devices: which; None takes all of them.

    Returns:
        The mesh, with the one axis ``"devices"``.

    Example:
        >>> device_mesh().axis_names
        ('devices',)
    """
    found = np.asarray(jax.devices() if devices is None else devices)
    return Mesh(found, (AXIS,), axis_types=(AxisType.Auto,))


def shard_leading_axis(tree: Tree, mesh: Mesh) -> Tree:
    """Spreads axis 0 of every leaf over the mesh: keys, configs or states of many runs.

    Args:
        tree: every leaf ``[S, …]``.
        mesh: from `device_mesh`.

    Returns:
        The same arrays on the devices of the mesh, ``S / devices`` entries on each.

    Raises:
        ValueError: the number of devices does not divide ``S``.

    Example:
        >>> import jax
        >>> keys = shard_leading_axis(jax.random.split(jax.random.key(0), 4), device_mesh())
        >>> keys.shape
        (4,)
    """
    for leaf in jax.tree.leaves(tree):
        divides("leading axis", leaf.shape[0], "number of devices", mesh.size)
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(AXIS)))


def shard_environments(state: TrainState, mesh: Mesh) -> TrainState:
    """Spreads the environments of one run over the mesh, under any algorithm's own `step`.

    XLA then splits that step and computes the same numbers as one device: a shuffle over all rows
    moves most of them to another device. `data_parallel` leaves rows where they are.

    Args:
        state: of one run (not a stack of runs).
        mesh: from `device_mesh`.

    Returns:
        The state with ``runner`` (and the running returns of a reward normaliser) split along its
        environments, and everything else on every device.

    Raises:
        ValueError: the number of devices does not divide the number of environments.
    """
    divides("num_envs", state.runner.reset.shape[0], "number of devices", mesh.size)
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), state, _specs(state)
    )


def data_parallel(algorithm: Algorithm, mesh: Mesh) -> Algorithm:
    """`algorithm` with the environments of one agent spread over the devices of a mesh.

    Each of D devices steps ``num_envs / D`` environments, and cuts its own rows into
    ``num_minibatches``, in an order of its own. Optimizer step k is along the mean over devices of
    the gradients of their k-th minibatches::

        g = 1/D Σ_d ∇L(minibatch k of device d)

    which is the gradient of the union of these minibatches, but for one thing: advantages are
    normalised over what a device holds. Early stops, adaptive KL coefficients and running
    statistics follow the mean over devices too, so parameters stay equal everywhere.

    Args:
        algorithm: `ppo`, `actor_critic`, `grpo`, or one of your own whose ``step`` takes ``pmean=``
            and passes it on to `optimize` (and to whatever else must agree over devices).
        mesh: from `device_mesh`.

    Returns:
        An `Algorithm` with the same configs and states, whose ``num_envs`` are those of all
        devices. ``init`` spreads the state; jit, `train` and `evaluate` as any other. Sums in the
        info are over all devices, everything else is the mean.

    Raises:
        TypeError: ``algorithm.step`` takes no ``pmean``.
        ValueError: from ``init``: the devices do not divide ``num_envs``, or what is left for a
            device does not divide into minibatches or groups.

    Example:
        >>> import jax, jaxpg
        >>> env = jaxpg.from_gymnax("CartPole-v1")
        >>> algorithm = data_parallel(jaxpg.ppo(env, jaxpg.mlp_policy(env)), device_mesh())
        >>> config = jaxpg.PPOConfig(num_envs=8, num_steps=16)
        >>> state, infos = jaxpg.train(algorithm, jax.random.key(0), config, 2)
        >>> print(infos["env_steps"])
        [128. 128.]
    """
    if "pmean" not in inspect.signature(algorithm.step).parameters:
        raise TypeError(
            "data_parallel needs an algorithm whose step takes pmean=, as those of ppo, "
            "actor_critic and grpo do: shard_environments spreads any other"
        )

    def of_one_device(config: Any) -> Any:
        divides("num_envs", config.num_envs, "number of devices", mesh.size)
        return config.replace(num_envs=config.num_envs // mesh.size)

    def init(key: Key, config: Any) -> TrainState:
        # for its checks of sizes
        jax.eval_shape(lambda key: algorithm.init(key, of_one_device(config)), key)
        return shard_environments(algorithm.init(key, config), mesh)

    def step(state: TrainState, config: Any) -> tuple[TrainState, Info]:
        config = of_one_device(config)
        specs = _specs(state)

        def on_one_device(state: TrainState, config: Any) -> tuple[TrainState, Info]:
            next_key, key = jax.random.split(state.key)
            own = state._replace(key=jax.random.fold_in(key, jax.lax.axis_index(AXIS)))
            after, info = algorithm.step(own, config, pmean=_pmean)
            info = _pmean(info)
            info |= {name: info[name] * mesh.size for name in INFO_SUMS if name in info}
            return after._replace(key=next_key), info

        # With check_vma, gradients of unvarying parameters would come out as sums over devices,
        # and their mean would be D times too large.
        return jax.shard_map(
            on_one_device,
            mesh=mesh,
            in_specs=(specs, PartitionSpec()),
            out_specs=(specs, PartitionSpec()),
            check_vma=False,
        )(state, jax.tree.map(jnp.asarray, config))

    return algorithm._replace(init=init, step=step)


def _pmean(tree: Tree) -> Tree:
    """The mean over devices, of all leaves in one message: many small ones take longer."""
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.lax.pmean(flat, AXIS))


def _specs(state: TrainState) -> TrainState:
    """The part of each leaf that a device holds: its own environments, and all of the rest."""

    def spec(path: tuple[Any, ...], _: jax.Array) -> PartitionSpec:
        names = tuple(getattr(entry, "name", None) for entry in path)
        of_environments = names[0] == "runner" or names == ("statistics", "returns", "discounted")
        return PartitionSpec(AXIS) if of_environments else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, state)


def num_devices(mesh: Mesh | None) -> int:
    """Devices of a mesh; None is one device."""
    return 1 if mesh is None else mesh.size


def seeds_at_a_time(num_seeds: int, devices: int = 1) -> int:
    """How many seeds are best vmapped at a time: what fits the cache of a CPU; elsewhere all.

    Args:
        num_seeds: of the run.
        devices: that they are spread over.

    Returns:
        On a CPU the largest divisor of the seeds of a device that is at most 16, for every device;
        all seeds where that would be fewer than 4 a device.

    Example:
        >>> seeds_at_a_time(128), seeds_at_a_time(10), seeds_at_a_time(17)
        (16, 10, 17)
    """
    if jax.default_backend() != "cpu":
        return num_seeds
    each = num_seeds // devices
    size = max(n for n in range(1, min(each, 16) + 1) if each % n == 0)
    return size * devices if size >= 4 else num_seeds


def check_chunks(chunk_size: int, num_seeds: int, devices: int) -> None:
    """`ValueError` unless the devices divide the seeds trained at a time, and these all seeds."""
    positive_int("chunk_size", chunk_size)
    divides("num_seeds", num_seeds, "chunk_size", chunk_size)
    divides("chunk_size", chunk_size, "devices", devices)


def map_in_chunks(
    fn: Callable[..., Tree], *, chunk_size: int, mesh: Mesh | None = None
) -> Callable[..., Tree]:
    """`jax.vmap` over axis 0, `chunk_size` entries at a time, one chunk after another.

    A hundred agents at once do not fit a CPU's cache: eight at a time on each core are faster, and
    take less memory, than all of them.

    Args:
        fn: of one entry.
        chunk_size: entries vmapped at a time, static; over all devices when `mesh` is given.
        mesh: spreads every chunk over its devices.

    Returns:
        A function of the same arguments with a leading axis ``S`` on every leaf.

    Raises:
        ValueError: `chunk_size` does not divide ``S``, or the devices do not divide `chunk_size`.

    Example:
        >>> import jax.numpy as jnp
        >>> print(map_in_chunks(lambda x: x**2, chunk_size=2)(jnp.arange(4)))
        [0 1 4 9]
    """
    positive_int("chunk_size", chunk_size)
    if mesh is not None:
        divides("chunk_size", chunk_size, "number of devices", mesh.size)

    parts = num_devices(mesh)

    def mapped(*args: PyTree) -> Tree:
        size = jax.tree.leaves(args)[0].shape[0]
        divides("leading axis", size, "chunk_size", chunk_size)

        # each device keeps its contiguous share of the entries, so that nothing is communicated
        def deal(x: jax.Array) -> jax.Array:
            shares = x.reshape(parts, -1, chunk_size // parts, *x.shape[1:])
            return shares.swapaxes(0, 1).reshape(-1, chunk_size, *x.shape[1:])

        def collect(x: jax.Array) -> jax.Array:
            shares = x.reshape(-1, parts, chunk_size // parts, *x.shape[2:])
            return spread(shares.swapaxes(0, 1).reshape(size, *x.shape[2:]))

        def spread(x: jax.Array) -> jax.Array:
            if mesh is None:
                return x
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(AXIS)))

        def one_chunk(chunk: PyTree) -> Tree:
            return jax.tree.map(spread, jax.vmap(fn)(*jax.tree.map(spread, chunk)))

        return jax.tree.map(collect, jax.lax.map(one_chunk, jax.tree.map(deal, args)))

    return mapped
