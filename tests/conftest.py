"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

# Two CPU devices, so that shardings are tested for what they do; jax reads it once, at its start
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

import jax
import pytest

# tracing makes millions of small objects: searching all of them for cycles took 7 % of the time
gc.set_threshold(100_000, 20, 20)


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


# Nearly all tests compile whole programs to run them for a moment: with few optimisations, the
# doctests of the package included. Tests of pure functions compile as users do.
jax.config.update("jax_disable_most_optimizations", True)

FULLY_OPTIMISED = {
    "test_advantages",
    "test_distributions",
    "test_group_advantages",
    "test_kl",
    "test_losses",
    "test_objectives",
    "test_reductions",
    "test_returns",
    "test_rewards",
    "test_running_statistics",
}


@pytest.fixture(scope="module", autouse=True)
def optimisations(request: pytest.FixtureRequest) -> Iterator[None]:
    """All of XLA's optimisations in the modules of `FULLY_OPTIMISED`."""
    jax.config.update(
        "jax_disable_most_optimizations", request.module.__name__ not in FULLY_OPTIMISED
    )
    yield
    jax.config.update("jax_disable_most_optimizations", True)
