"""Floor 0: the matrix products of the networks, ``x W`` over the last axis of `x`.

Their values are ordinary products; what differs is how XLA is asked for the gradient of `W`,
which on a CPU decides how fast training is. ``xᵀ δ`` over all rows at once is spread over the
cores at up to twice its cost on one of them, and is slow where `W` has few columns. Small kernels
get the sum of the products of blocks of rows, which stay on one core and leave the other to the
other network; kernels with at most half as many columns as rows get ``(δᵀ x)ᵀ``; others are left
alone. The figures are in `benchmarks/README.md`. Derivatives of every order and both modes exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

Product = Callable[[Array, Array], Array]

BLOCK = 128
"""Rows whose products make one summand; 64 and 256 were slower."""
SMALL = 64 * 64
"""Numbers in a kernel up to which blocks are faster."""


def product_in(compute_dtype: DTypeLike | None) -> Product:
    """The product of hidden layers, its inputs rounded to a short float, its sums in float32.

    Args:
        compute_dtype: such as ``jnp.bfloat16``; None rounds nothing. Gradients of `W` are
            products in float32; those of `x` have their factors and may have their result rounded,
            but are in float32 as well on a CPU outside of `jax.shard_map` (`data_parallel`): with
            several cores to a device that is faster.

    Returns:
        ``(x [..., I], W [I, J]) -> [..., J]``.

    Raises:
        ValueError: `compute_dtype` is no float dtype.
    """
    if compute_dtype is None:
        return product
    dtype = jnp.dtype(compute_dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"compute_dtype must be a float dtype, got {dtype}")

    def rounded(x: Array, kernel: Array) -> Array:
        return _last_axis(x.astype(dtype), kernel.astype(dtype), preferred=jnp.float32)

    def input_tangent(dx: Array, kernel: Array) -> Array:
        if jax.default_backend() == "cpu" and not jax.sharding.get_abstract_mesh().manual_axes:
            return _last_axis(dx, kernel)
        # its transpose is what training computes: δ arrives rounded, and so both factors are
        return _last_axis(dx, kernel.astype(dtype), preferred=dtype).astype(jnp.float32)

    return _differentiable(rounded, input_tangent)


def _differentiable(value: Product, input_tangent: Product) -> Product:
    """`value`, with the derivative of ``x W``, laid out for the device.

    Args:
        value: of the product.
        input_tangent: ``(dx, W) -> dx W``, linear in ``dx``.

    Returns:
        The product.
    """

    @jax.custom_jvp
    def product(x: Array, kernel: Array) -> Array:
        return value(x, kernel)

    def jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
        (x, kernel), (dx, dkernel) = primals, tangents
        out = product(x, kernel)
        parts = []
        if not isinstance(dx, SymbolicZero):
            parts.append(input_tangent(dx, kernel))
        if not isinstance(dkernel, SymbolicZero):
            parts.append(_kernel_tangent(x, dkernel))
        return out, sum(parts[1:], start=parts[0]) if parts else jnp.zeros_like(out)

    product.defjvp(jvp, symbolic_zeros=True)
    return product


def _last_axis(x: Array, kernel: Array, preferred: DTypeLike | None = None) -> Array:
    dimensions = (((x.ndim - 1,), (0,)), ((), ()))
    return jax.lax.dot_general(x, kernel, dimensions, preferred_element_type=preferred)


def _kernel_tangent(x: Array, dkernel: Array) -> Array:
    """``x dW``, written so that its transpose, the gradient, is the product that is fastest."""
    rows, (inputs, outputs) = math.prod(x.shape[:-1]), dkernel.shape
    if jax.default_backend() != "cpu":
        return _last_axis(x, dkernel)
    if inputs >= 2 * outputs:
        # without the barrier XLA turns (δᵀ x)ᵀ back into xᵀ δ
        transposed = jax.lax.optimization_barrier(dkernel.T)
        return jax.lax.dot_general(x, transposed, (((x.ndim - 1,), (1,)), ((), ())))
    block = math.gcd(rows, BLOCK)
    if dkernel.size > SMALL or block < BLOCK // 2 or block == rows:
        return _last_axis(x, dkernel)
    blocks = x.reshape(-1, block, inputs)
    copies = jnp.broadcast_to(dkernel, (len(blocks), inputs, outputs))
    return jnp.einsum("bri,bij->brj", blocks, copies).reshape(*x.shape[:-1], outputs)


product = _differentiable(_last_axis, _last_axis)
"""``x W``, ``(x [..., I], W [I, J]) -> [..., J]``."""
