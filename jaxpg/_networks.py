"""Floor 2: the flax modules that `jaxpg.policies` assembles.

A torso is ``(x, carry) -> (features, carry)``, with ``()`` as the carry where nothing is
remembered; a head is ``features -> dist_params`` or ``features -> value``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import traverse_util
from jax import Array

from jaxpg._products import Product, product
from jaxpg.types import Key, PyTree

GATES = 3  # of the recurrent unit, side by side in its kernels


def split_last(x: Array, sizes: Sequence[int]) -> tuple[Array, ...]:
    """`x` cut along its last axis into parts of these sizes."""
    ends = list(itertools.accumulate(sizes))
    return tuple(x[..., end - size : end] for size, end in zip(sizes, ends, strict=True))


def marked(gain: float) -> Callable:
    """Initialiser of a kernel that `draw_kernels` will make orthogonal: full of its gain."""
    return nn.initializers.constant(gain)


def draw_kernels(key: Key, params: PyTree) -> PyTree:
    """Orthogonal columns (or rows, where those are fewer) in every kernel, times its `marked` gain.

    All kernels come from one draw of normal numbers: a draw of its own for each, as flax's
    initialisers have it, took a seventh of the time in which a whole training run compiles.
    """
    leaves = traverse_util.flatten_dict(params, keep_empty_nodes=True)
    kernels = {path: x for path, x in sorted(leaves.items()) if path[-1] == "kernel"}
    sizes = [x.size for x in kernels.values()]
    noise = split_last(jax.random.normal(key, (sum(sizes),), jnp.float32), sizes)
    for (path, kernel), part in zip(kernels.items(), noise, strict=True):
        blocks = GATES if path[-2] in ("input", "recurrent") else 1
        columns = kernel.shape[-1] // blocks
        parts = jnp.split(part.reshape(-1, blocks * columns), blocks, axis=1)
        drawn = jnp.concatenate([_orthogonal(x) for x in parts], axis=1)
        leaves[path] = kernel * drawn.reshape(kernel.shape)
    return traverse_util.unflatten_dict(leaves)


def _orthogonal(x: Array) -> Array:
    rows, columns = x.shape
    q, r = jnp.linalg.qr(x if rows >= columns else x.T)
    q = q * jnp.sign(jnp.diagonal(r))  # else not uniform over orthogonal matrices
    return q if rows >= columns else q.T


def layer(features: int, multiply: Product, gain: float, name: str, **settings: bool) -> nn.Dense:
    """A dense layer with this product of its inputs and its kernel."""
    return nn.Dense(
        features,
        kernel_init=marked(gain),
        dot_general=lambda x, kernel, *_, **__: multiply(x, kernel),
        name=name,
        **settings,
    )


def dense_layers(x: Array, sizes: Sequence[int], activation: Callable, product: Product) -> Array:
    """Hidden layers ``dense_0``, ``dense_1``, … of the module that calls this."""
    for i, size in enumerate(sizes):
        x = activation(layer(size, product, math.sqrt(2.0), f"dense_{i}")(x))
    return x


class Dense(nn.Module):
    """Dense layers."""

    sizes: tuple[int, ...]
    activation: Callable
    product: Product

    @nn.compact
    def __call__(self, x: Array, carry: PyTree = ()) -> tuple[Array, PyTree]:
        return dense_layers(x, self.sizes, self.activation, self.product), carry


class Convolution(nn.Module):
    """Stride 1, no padding, as one product: see `jaxpg.policies.cnn_policy` for the reason."""

    features: int
    kernel: int
    product: Product

    @nn.compact
    def __call__(self, x: Array) -> Array:
        k = self.kernel
        height, width = x.shape[1] - k + 1, x.shape[2] - k + 1
        shape = (k, k, x.shape[3], self.features)
        kernel = self.param("kernel", marked(math.sqrt(2.0)), shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        shifted = [x[:, i : i + height, j : j + width] for i in range(k) for j in range(k)]
        patches = jnp.concatenate(shifted, axis=-1)
        flat = kernel.reshape(-1, self.features)
        return self.product(patches, flat) + bias


class Convolutional(nn.Module):
    """Convolutions, then dense layers on all that they give."""

    channels: tuple[int, ...]
    kernel: int
    sizes: tuple[int, ...]
    activation: Callable
    product: Product

    @nn.compact
    def __call__(self, x: Array, carry: PyTree = ()) -> tuple[Array, PyTree]:
        for i, features in enumerate(self.channels):
            convolution = Convolution(features, self.kernel, self.product, name=f"conv_{i}")
            x = self.activation(convolution(x))
        x = x.reshape(x.shape[0], -1)
        return dense_layers(x, self.sizes, self.activation, self.product), carry


class Recurrent(nn.Module):
    """Dense layers, then a gated recurrent unit; its output is its carry."""

    sizes: tuple[int, ...]
    width: int
    activation: Callable
    product: Product

    @nn.compact
    def __call__(self, x: Array, carry: Array) -> tuple[Array, Array]:
        x = dense_layers(x, self.sizes, self.activation, self.product)

        width = GATES * self.width
        new = layer(width, self.product, 1.0, "input")(x)
        old = layer(width, self.product, 1.0, "recurrent", use_bias=False)(carry)
        bias = self.param("candidate_bias", nn.initializers.zeros, (self.width,), jnp.float32)
        new_r, new_z, new_n = jnp.split(new, 3, axis=-1)
        old_r, old_z, old_n = jnp.split(old, 3, axis=-1)
        r, z = jax.nn.sigmoid(new_r + old_r), jax.nn.sigmoid(new_z + old_z)
        candidate = jnp.tanh(new_n + r * (old_n + bias))
        carry = (1.0 - z) * candidate + z * carry
        return carry, carry


class LogitsHead(nn.Module):
    """Logits of one choice, or of several."""

    sizes: tuple[int, ...]
    joint: bool  # a tuple of logits, one entry per component

    @nn.compact
    def __call__(self, x: Array) -> PyTree:
        logits = layer(sum(self.sizes), product, 0.01, "logits")(x)
        return split_last(logits, self.sizes) if self.joint else logits


class GaussianHead(nn.Module):
    """Mean and log standard deviation, both [N, D]."""

    dim: int
    log_std_init: float
    state_dependent: bool

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        width = 2 * self.dim if self.state_dependent else self.dim
        mean = layer(width, product, 0.01, "mean")(x)
        if self.state_dependent:
            mean, log_std = jnp.split(mean, 2, axis=-1)
            return mean, log_std + self.log_std_init
        constant = nn.initializers.constant(self.log_std_init)
        log_std = self.param("log_std", constant, (self.dim,), jnp.float32)
        return mean, jnp.broadcast_to(log_std, mean.shape)


class ValueHead(nn.Module):
    """The critic's number for every row, or one for every action."""

    num_actions: int | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        value = layer(self.num_actions or 1, product, 1.0, "value")(x)
        return value.squeeze(-1) if self.num_actions is None else value


class Branch(nn.Module):
    """A torso and a head: all of one network that shares nothing."""

    torso: nn.Module
    head: nn.Module

    def __call__(self, x: Array, carry: PyTree = ()) -> tuple[PyTree, PyTree]:
        x, carry = self.torso(x, carry)
        return self.head(x), carry
