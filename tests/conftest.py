"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

# two CPU devices, so that shardings are tested for what they do; jax reads it once, at its start
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

import jax
import pytest


@pytest.fixture
def key() -> jax.Array:
    """A fixed key: a failure today is the same failure tomorrow."""
    return jax.random.key(0)


@pytest.fixture(params=["eager", "jit", "vmap"])
def variant(request: pytest.FixtureRequest) -> Callable:
    """Runs ``fn(*arrays)`` eagerly, jitted, or vmapped over a new axis of length 1."""
    if request.param == "eager":
        return lambda fn: fn
    if request.param == "jit":
        return jax.jit

    def vmapped(fn: Callable) -> Callable:
        def call(*arrays: object) -> object:
            added = jax.tree.map(lambda x: jax.numpy.asarray(x)[None], arrays)
            return jax.tree.map(lambda x: x[0], jax.vmap(fn)(*added))

        return call

    return vmapped


@pytest.fixture
def x64() -> Iterator[None]:
    """Doubles for the duration of one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def quick_compile() -> Iterator[None]:
    """Compiles with few optimisations while a test that is all compilation runs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
