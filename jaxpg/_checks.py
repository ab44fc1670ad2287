"""Floor 0: checks that run before anything compiles.

They look at shapes and dtypes, which are known while tracing, and at numbers only when those are
concrete: a traced setting (swept, annealed) passes unchecked. Every message names the argument
and what it was.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike


def is_concrete(x: object) -> bool:
    """Whether the numbers in `x` can be read now (it is not being traced)."""
    return not isinstance(x, jax.core.Tracer)


def as_key(key: Array) -> Array:
    """A typed key from a typed or a legacy ``uint32[2]`` one; `TypeError` for anything else."""
    if isinstance(key, Array | np.ndarray):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            return key
        if key.dtype == jnp.uint32 and key.ndim >= 1:
            return jax.random.wrap_key_data(key)
    raise TypeError(f"key must come from jax.random.key or jax.random.PRNGKey, got {key!r:.80}")


def as_array(name: str, x: ArrayLike) -> Array:
    """`x` as an array of a real dtype; `TypeError` for complex numbers and objects."""
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array of real numbers, got {x!r:.80}") from error
    if not (
        jnp.issubdtype(array.dtype, jnp.floating)
        or jnp.issubdtype(array.dtype, jnp.integer)
        or array.dtype == jnp.bool_
    ):
        raise TypeError(f"{name} must be an array of real numbers, got dtype {array.dtype}")
    return array


def as_float(name: str, x: ArrayLike) -> Array:
    """`x` in ``promote(float32, dtype)``: bfloat16, integers and flags become float32."""
    array = as_array(name, x)
    return array.astype(jnp.promote_types(jnp.float32, array.dtype))


def as_floats(**arrays: ArrayLike) -> list[Array]:
    """Several arrays in one common dtype, at least float32, all of one shape."""
    floats = {name: as_float(name, x) for name, x in arrays.items()}
    same_shape(**floats)
    dtype = jnp.result_type(*floats.values())
    return [x.astype(dtype) for x in floats.values()]


def as_flag(name: str, x: ArrayLike) -> Array:
    """A bool or integer array as bool; a float is a `TypeError` (a discount is not a flag)."""
    array = as_array(name, x)
    if jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be a bool or integer flag, got dtype {array.dtype}")
    return array.astype(jnp.bool_)


def as_mask(name: str, mask: ArrayLike | None, shape: tuple[int, ...]) -> Array | None:
    """A mask (bool or 0/1 of any dtype, 1 = counts) as bool, of exactly `shape`; None stays."""
    if mask is None:
        return None
    array = as_array(name, mask)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, but what it masks has shape {shape}")
    return array.astype(jnp.bool_)


def masked_floats(mask: ArrayLike | None, **arrays: ArrayLike) -> tuple[list[Array], Array | None]:
    """`as_floats`, with zeros where `mask` is False, and the mask as bool (None stays None).

    Cleaning the inputs, rather than the result, is what keeps NaN and inf under the mask out of
    gradients: NaN times a zero cotangent is NaN.
    """
    floats = as_floats(**arrays)
    valid = as_mask("mask", mask, floats[0].shape)
    if valid is None:
        return floats, None
    return [jnp.where(valid, x, 0) for x in floats], valid


def same_shape(**arrays: Array) -> None:
    """`ValueError` naming every shape when the arrays differ."""
    shapes = {name: tuple(x.shape) for name, x in arrays.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"shapes must be equal, got {listed}")


def has_time_axis(name: str, x: Array) -> None:
    """`ValueError` unless `x` has at least one axis and that axis is not empty."""
    if x.ndim < 1 or x.shape[0] < 1:
        raise ValueError(f"{name} needs a time axis 0 of length at least 1, got shape {x.shape}")


def normalize_axis(name: str, axis: int, ndim: int) -> int:
    """`axis` counted from the front; `ValueError` when the array has no such axis."""
    if not -ndim <= axis < ndim:
        raise ValueError(f"{name}={axis} is no axis of an array of rank {ndim}")
    return axis % ndim


def time_setting(name: str, value: ArrayLike, like: Array) -> Array:
    """A setting used per step: a scalar, or an array of the rank of `like` that broadcasts to it.

    A ``[T]`` gamma beside ``[T, B]`` rewards would line up with columns whenever T = B, so another
    rank is a `ValueError`. The result has the dtype of `like` and is a scalar or its full shape.
    """
    setting = as_float(name, value).astype(like.dtype)
    if setting.ndim == 0:
        return setting
    if setting.ndim != like.ndim:
        raise ValueError(
            f"{name} must be a scalar or an array of rank {like.ndim} like the rewards "
            f"{like.shape}, got shape {setting.shape}"
        )
    try:
        return jnp.broadcast_to(setting, like.shape)
    except ValueError as error:
        raise ValueError(
            f"{name} has shape {setting.shape}, which does not broadcast to {like.shape}"
        ) from error


def scalar(name: str, value: ArrayLike, dtype: jnp.dtype) -> Array:
    """A setting that is one number (also traced), in `dtype`; `ValueError` for an array."""
    number = as_float(name, value)
    if number.ndim:
        raise ValueError(f"{name} must be a scalar, got shape {number.shape}")
    return number.astype(dtype)


def in_range(
    name: str,
    value: ArrayLike | None,
    low: float = -np.inf,
    high: float = np.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """`ValueError` when a concrete `value` leaves the interval or is NaN; None passes."""
    if value is None or not is_concrete(value):
        return
    numbers = np.asarray(value, dtype=np.float64)
    above = numbers > low if open_low else numbers >= low
    below = numbers < high if open_high else numbers <= high
    if not np.all(above & below):
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
        shown = numbers.item() if numbers.ndim == 0 else numbers[~(above & below)].ravel()[0]
        raise ValueError(f"{name} must lie in {interval}, got {shown:g}")


def positive_int(name: str, value: object, *, minimum: int = 1) -> int:
    """`value` as an int of at least `minimum`; `TypeError` for other types, bools included."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return int(value)


def divides(name: str, size: int, parts_name: str, parts: int) -> None:
    """`ValueError` naming both numbers unless `parts` divides `size`."""
    if size % parts:
        raise ValueError(f"{parts_name}={parts} does not divide {name}={size}")


def one_of(name: str, value: object, choices: Iterable[str]) -> None:
    """`ValueError` listing the nearest names (or all) unless `value` is one of `choices`."""
    names = list(choices)
    if value not in names:
        raise ValueError(f"unknown {name} {value!r}: {nearest(str(value), names)}")


def nearest(value: str, choices: Sequence[str]) -> str:
    """A phrase for an error message: the names closest to `value`, or all of them."""
    lowered = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(value.lower(), lowered, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(lowered[c] for c in close) + "?"
    return "choose from " + ", ".join(choices)
