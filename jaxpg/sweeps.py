"""Floor 5: many settings of one config at once."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpg._checks import nearest

ConfigT = TypeVar("ConfigT")


def sweep(config: ConfigT, **values: ArrayLike) -> tuple[ConfigT, ConfigT]:
    """A config whose named fields are arrays, and the ``in_axes`` that map over just these.

    The fields are zipped: entry ``i`` of each belongs to setting ``i``. For a grid, build the
    columns first (``numpy.meshgrid``).

    Args:
        config: a config of one algorithm.
        **values: a ``[S]`` sequence of numbers per traced field.

    Returns:
        ``(configs, axes)``: the config with ``[S]`` float32 arrays, and a config of the same
        structure that holds 0 at swept fields and None elsewhere.

    Raises:
        ValueError: no fields, an unknown or a static field, values that are not one-dimensional,
            or of unequal lengths.

    Example:
        >>> import jax, jaxpg
        >>> configs, axes = jaxpg.sweep(jaxpg.PPOConfig(), learning_rate=[1e-4, 1e-3, 1e-2])
        >>> jax.vmap(lambda config: config.learning_rate * config.gamma, (axes,))(configs).shape
        (3,)
    """
    if not values:
        raise ValueError("sweep needs at least one field, such as learning_rate=[1e-4, 1e-3]")
    fields = {field.name: field for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    columns = {}
    for name, column in values.items():
        if name not in fields:
            known = sorted(fields)
            raise ValueError(
                f"{type(config).__name__} has no field {name!r}: {nearest(name, known)}"
            )
        if not fields[name].metadata.get("pytree_node", True):
            raise ValueError(f"{name} is static: it fixes shapes, so it cannot be swept")
        array = jnp.asarray(column, jnp.float32)
        if array.ndim != 1 or array.shape[0] < 1:
            raise ValueError(f"{name} must be a sequence of numbers, got shape {array.shape}")
        columns[name] = array
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"swept fields must have equal lengths, got {lengths}")
    configs = dataclasses.replace(config, **columns)  # type: ignore[type-var]
    axes = jax.tree.map(lambda _: None, config)
    axes = dataclasses.replace(axes, **dict.fromkeys(columns, 0))
    return configs, axes
