"""Products whose gradients are laid out by shape, against the plain one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpg._products import product, product_in
from jaxpg.sharding import device_mesh

SHAPES = {
    "blocks": ((512, 48), (48, 64)),
    "blocks of 64 rows": ((320, 64), (64, 64)),
    "one block": ((128, 16), (16, 16)),
    "rows that make no blocks": ((130, 16), (16, 16)),
    "few columns": ((256, 64), (64, 2)),
    "one column": ((256, 64), (64, 1)),
    "a large kernel": ((256, 80), (80, 80)),
    "images": ((4, 8, 8, 9), (9, 16)),
    "no rows of their own": ((16,), (16, 8)),
}


def operands_of(name, key):
    x_shape, kernel_shape = SHAPES[name]
    keys = jax.random.split(key, 3)
    x = jax.random.normal(keys[0], x_shape)
    delta = jax.random.normal(keys[2], (*x_shape[:-1], kernel_shape[1]))
    return x, jax.random.normal(keys[1], kernel_shape), delta


@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients_are_those_of_a_product(name, key):
    operands = operands_of(name, key)
    x, kernel, delta = (np.asarray(a, np.float64) for a in operands)
    value, pullback = jax.vjp(product, *operands[:2])
    dx, dkernel = pullback(operands[2])
    np.testing.assert_allclose(value, x @ kernel, atol=1e-4)
    np.testing.assert_allclose(dx, delta @ kernel.T, atol=1e-4)
    rows = x.reshape(-1, x.shape[-1])
    np.testing.assert_allclose(dkernel, rows.T @ delta.reshape(len(rows), -1), atol=2e-4)


@pytest.mark.parametrize("name", ["blocks", "few columns", "a large kernel"])
def test_forward_mode_and_second_derivatives(name, key):
    def loss(multiply, x, kernel):
        return jnp.mean(jnp.tanh(multiply(x, kernel)) ** 2)

    def plain(x, kernel):
        return x @ kernel

    x, kernel, _ = operands_of(name, key)
    tangents = jnp.sin(x), jnp.cos(kernel)
    for differentiate in (
        lambda f: jax.jvp(f, (x, kernel), tangents)[1],
        lambda f: jax.jvp(jax.grad(f, argnums=(0, 1)), (x, kernel), tangents)[1],
        lambda f: jax.grad(lambda x, k: jax.jvp(f, (x, k), tangents)[1], argnums=(0, 1))(x, kernel),
        lambda f: jax.jvp(lambda k: f(x, k), (kernel,), tangents[1:])[1],
    ):
        ours = differentiate(lambda x, k: loss(product, x, k))
        expected = differentiate(lambda x, k: loss(plain, x, k))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, expected)


@pytest.mark.parametrize("columns", [2, 64])
def test_a_stack_of_networks(columns, key):
    x = jax.random.normal(key, (3, 256, 64))
    kernel = jax.random.normal(key, (3, 64, columns))
    gradient = jax.grad(lambda k, x: jnp.sum(jnp.sin(product(x, k))))
    stacked = jax.jit(jax.vmap(gradient))(kernel, x)
    one_by_one = jnp.stack([gradient(k, x) for k, x in zip(kernel, x, strict=True)])
    np.testing.assert_allclose(stacked, one_by_one, atol=1e-4)


def test_the_gradient_of_a_small_kernel_goes_by_blocks_of_rows():
    gradient = jax.grad(lambda kernel, x: jnp.sum(product(x, kernel)))
    text = str(jax.make_jaxpr(gradient)(jnp.ones((64, 64)), jnp.ones((512, 64))))
    assert "f32[4,64,64]" in text
    text = str(jax.make_jaxpr(gradient)(jnp.ones((64, 2)), jnp.ones((512, 64))))
    assert "optimization_barrier" in text and "f32[2,64]" in text


def test_inputs_rounded_and_gradients_not(key):
    x, kernel = jax.random.normal(key, (256, 32)), jax.random.normal(key, (32, 32))
    short = product_in(jnp.bfloat16)
    rounded = [np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (x, kernel)]
    assert short(x, kernel).dtype == jnp.float32
    np.testing.assert_allclose(short(x, kernel), rounded[0] @ rounded[1], atol=1e-4)
    dx, dkernel = jax.grad(lambda *a: jnp.sum(short(*a)), argnums=(0, 1))(x, kernel)
    np.testing.assert_allclose(dx, np.tile(np.sum(kernel, axis=1), (256, 1)), atol=1e-4)
    np.testing.assert_allclose(dkernel, np.tile(np.sum(x, axis=0)[:, None], 32), atol=1e-4)


def test_inside_shard_map_gradients_of_inputs_are_rounded_too(key):
    """There a CPU device is one core. Right is the product of rounded factors; XLA may round it."""
    keys = jax.random.split(key, 3)
    x, delta = (jax.random.normal(k, (256, 32)) for k in keys[:2])
    kernel = jax.random.normal(keys[2], (32, 32))
    short = product_in(jnp.bfloat16)

    def gradients(x, kernel, delta):
        return jax.vjp(short, x, kernel)[1](delta)

    mesh, whole = device_mesh(), PartitionSpec()
    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    dx, dkernel = jax.jit(mapped)(x, kernel, delta)
    rounded = [np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (delta, kernel)]
    exact = rounded[0] @ rounded[1].T
    assert dx.dtype == jnp.float32
    np.testing.assert_allclose(dx, exact, rtol=2**-8, atol=1e-3)
    assert np.abs(dx - np.asarray(delta @ kernel.T)).max() > 1e-2  # float32 is no such thing
    # those of the kernel are not
    np.testing.assert_allclose(dkernel, gradients(x, kernel, delta)[1], rtol=1e-4, atol=1e-4)


def test_only_float_dtypes():
    assert product_in(None) is product
    with pytest.raises(ValueError, match="compute_dtype must be a float dtype, got int32"):
        product_in(jnp.int32)
