"""Floor 5: whole states on disk, with orbax.

A state is stored as a flat mapping from the path of each leaf (``params/params/Dense_0/kernel``)
to its array, so that any orbax can read it without jaxpg's records. Keys are stored as their words.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.types import PyTree

StateT = TypeVar("StateT")


def save_checkpoint(path: str | Path, state: PyTree, *, overwrite: bool = False) -> None:
    """Writes every leaf of a state: parameters, optimizer, environments, keys, statistics.

    The folder appears only when it is complete; with `overwrite`, an older one stays in place
    until then.

    Args:
        path: the folder to write.
        state: any pytree of arrays, typed keys included, stacked over seeds or not.
        overwrite: replace what is there.

    Raises:
        FileExistsError: there is something at `path` and `overwrite` is not set.

    Example:
        >>> import jax, tempfile
        >>> state = {"w": jax.numpy.ones(3), "key": jax.random.key(0)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(folder + "/checkpoint", state)
        ...     loaded = load_checkpoint(folder + "/checkpoint", state)
        >>> bool((loaded["w"] == state["w"]).all()), loaded["key"] == state["key"]
        (True, Array(True, dtype=bool))
    """
    import orbax.checkpoint as ocp

    target = Path(path).expanduser().resolve()
    if target.exists() and not overwrite:
        raise FileExistsError(f"{path} exists: give overwrite=True to replace it")
    # orbax refuses arrays without elements; there is nothing in them to keep
    stored = {name: x for name, x in _words(state).items() if x.size}
    fresh = target.with_name(target.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(fresh, stored)
        checkpointer.wait_until_finished()
    if target.exists():
        shutil.rmtree(target)
    fresh.rename(target)


def load_checkpoint(path: str | Path, like: StateT) -> StateT:
    """Reads a state back, bit for bit.

    Args:
        path: the folder that `save_checkpoint` wrote.
        like: a state of the same structure: arrays, or what `jax.eval_shape` gives for
            ``algorithm.init``.

    Returns:
        The state, with the structure of `like`, strongly typed, on the default device.

    Raises:
        FileNotFoundError: no checkpoint at `path`.
        ValueError: its leaves differ from those of `like` in name, shape or dtype.

    Example:
        >>> import jax, tempfile
        >>> state = {"w": jax.numpy.ones(3)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(folder + "/checkpoint", state)
        ...     load_checkpoint(folder + "/checkpoint", {"w": jax.numpy.ones(4)})
        Traceback (most recent call last):
        ValueError: the checkpoint does not fit: w is float32(3,) there, float32(4,) expected
    """
    import orbax.checkpoint as ocp

    source = Path(path).expanduser().resolve()
    if not source.is_dir():
        raise FileNotFoundError(f"no checkpoint at {path}")
    # traced, so that `like` may be abstract: an abstract key does not tell its implementation
    order: list[str] = []
    impls: dict[str, Any] = {}

    def words(state: PyTree) -> dict[str, Any]:
        named = _words(state, impls)
        order.extend(named)  # a dict comes out of a trace sorted
        return named

    wanted = jax.eval_shape(words, like)
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(source).item_metadata
        if metadata is None:
            raise FileNotFoundError(f"no checkpoint at {path}")
        _check_fits(dict(metadata.tree), wanted)
        place = jax.sharding.SingleDeviceSharding(jnp.zeros(()).device)
        found = checkpointer.restore(
            source,
            {
                name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
                for name, x in wanted.items()
                if x.size
            },
        )

    def empty(name: str) -> np.ndarray:
        return np.zeros(wanted[name].shape, wanted[name].dtype)

    restored = []
    for name in order:
        # by way of the host: bound to no device, as freshly made arrays are
        x = jnp.asarray(np.asarray(found[name]) if name in found else empty(name))
        restored.append(jax.random.wrap_key_data(x, impl=impls[name]) if name in impls else x)
    return jax.tree.unflatten(jax.tree.structure(like), restored)


def _words(state: PyTree, impls: dict[str, Any] | None = None) -> dict[str, Any]:
    """Leaf by path, typed keys as their ``uint32`` words (and their kind in `impls`)."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        x = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            if impls is not None:
                impls[name] = jax.random.key_impl(x)
            x = jax.random.key_data(x)
        if name in named:
            raise ValueError(f"two leaves of the state share the path {name}")
        named[name] = x
    return named


def _check_fits(stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """`ValueError` naming the first leaf that differs."""

    def kind(x: Any) -> str:
        return "absent" if x is None or not np.prod(x.shape) else f"{x.dtype}{tuple(x.shape)}"

    differing = [
        f"{name} is {kind(stored.get(name))} there, {kind(wanted.get(name))} expected"
        for name in {**wanted, **stored}
        if kind(stored.get(name)) != kind(wanted.get(name))
    ]
    if differing:
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise ValueError(f"the checkpoint does not fit: {differing[0]}{more}")
