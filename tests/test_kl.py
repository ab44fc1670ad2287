"""KL estimators: cases, faults, what their gradients are on average, overflow, masks."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases_loader import arrays, assert_close, load_cases

from jaxpg.kl import (
    MAX_LOG_RATIO,
    adaptive_kl_coef,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_k3_corrected,
    kl_k3_straight_through,
)

ESTIMATORS = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
    "k3_value_k2_grad": kl_k3_straight_through,
    "k3_corrected": kl_k3_corrected,
}
TWO_ARRAYS = [kl_k1, kl_k2, kl_k3, kl_k3_straight_through]


def value_and_grad(fn: Callable, *args: object) -> tuple[jax.Array, jax.Array]:
    value, pullback = jax.vjp(lambda x: fn(x, *args[1:]), args[0])
    return value, pullback(jnp.ones_like(value))[0]


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(
    "case", load_cases("group_losses", "kl_estimate"), ids=lambda case: case["id"]
)
def test_cases(case: dict, double: bool) -> None:
    with jax.enable_x64(double):
        log_probs, ref = arrays(case, "logp", "ref_logp")
        value, grad = value_and_grad(ESTIMATORS[case["params"]["kind"]], log_probs, ref)
        assert_close(value, case["expected"]["value"])
        assert_close(grad, case["expected"]["grad_logp"])


def test_values_by_definition(variant: Callable) -> None:
    rng = np.random.default_rng(0)
    p, q, old = rng.normal(size=(3, 4, 5)).astype(np.float32)
    d = np.float64(p) - q
    k3 = np.exp(-d) + d - 1
    expected = [d, d**2 / 2, k3, k3, np.exp(np.float64(p) - old) * k3]
    for fn, want in zip(ESTIMATORS.values(), expected, strict=True):
        rest = (q, old) if fn is kl_k3_corrected else (q,)
        assert_close(variant(fn)(p, *rest), want, fn.__name__)


def test_gradients_by_definition(x64: None) -> None:
    rng = np.random.default_rng(1)
    p, q, old = rng.normal(size=(3, 20))
    d = p - q
    assert_close(value_and_grad(kl_k1, p, q)[1], np.ones(20))
    assert_close(value_and_grad(kl_k2, p, q)[1], d)
    assert_close(value_and_grad(kl_k3, p, q)[1], 1 - np.exp(-d))
    assert_close(value_and_grad(kl_k3_straight_through, p, q)[1], d)
    assert_close(value_and_grad(kl_k3_corrected, p, q, old)[1], np.exp(p - old) * d)


def test_g35_every_estimator_is_its_own() -> None:
    assert_close(kl_k1(-1.0, -1.5), 0.5)
    assert_close(kl_k2(-1.0, -1.5), 0.125)
    assert_close(kl_k3(-1.0, -1.5), 0.1065307)


def test_g59_straight_through_has_the_value_of_k3_and_the_gradient_of_k2() -> None:
    value, grad = value_and_grad(kl_k3_straight_through, -1.0, -1.5)
    assert_close(value, 0.1065307)
    assert_close(grad, 0.5)


def test_r19_k3_does_not_overflow() -> None:
    value, grad = value_and_grad(kl_k3, jnp.float32(-100.0), jnp.float32(0.0))
    np.testing.assert_allclose(value, 485165174.4, rtol=1e-6)
    assert grad == 0
    d = 0.1  # sanity: logp_ref - logp = 0.1
    assert_close(kl_k1(-d, 0.0), -0.1)
    assert_close(kl_k2(-d, 0.0), 0.005)
    assert_close(kl_k3(-d, 0.0), 0.005170918)


@pytest.mark.parametrize("gap", [100.0, -100.0, 1e30, -1e30])
def test_no_finite_input_gives_nan(gap: float) -> None:
    """Value and gradients, by every argument; only k2's square of 1e30 may overflow to inf."""
    for fn in (kl_k1, kl_k3, kl_k3_corrected):
        args = [jnp.float32(gap), jnp.float32(0.0)] + [jnp.float32(-gap)] * (fn is kl_k3_corrected)
        value, grads = jax.value_and_grad(fn, argnums=tuple(range(len(args))))(*args)
        assert np.isfinite(value), fn
        assert np.all(np.isfinite(grads)), fn
    assert np.isfinite(kl_k3(-np.inf, 0.0)) and np.isfinite(jax.grad(kl_k3)(-jnp.inf, 0.0))


def test_corrected_is_bounded_by_two_clipped_ratios() -> None:
    top = np.exp(MAX_LOG_RATIO)
    value = kl_k3_corrected(jnp.float32(0.0), jnp.float32(90.0), jnp.float32(-90.0))
    np.testing.assert_allclose(value, top * (top - MAX_LOG_RATIO - 1), rtol=1e-5)


def test_k3_is_not_negative_and_exact_for_nearly_equal_policies() -> None:
    d = np.concatenate([-np.logspace(-9, 1, 999), [0.0], np.logspace(-9, 1, 999)])
    d = d.astype(np.float32)
    for fn in (kl_k3, jax.jit(kl_k3)):
        value = np.asarray(fn(d, np.zeros_like(d)))
        assert np.all(value >= 0)
        assert value[999] == 0
        small = np.abs(d) < 1e-3
        # exp(-d) - 1 + d would be off by 6e-8 here, more than the value itself
        np.testing.assert_allclose(value[small], d[small].astype(np.float64) ** 2 / 2, atol=1e-9)


@pytest.mark.parametrize("p", [[0.5, 0.5], [0.2, 0.8]])
def test_what_the_gradient_is_on_average(p: list[float], x64: None) -> None:
    """Sum over actions with probabilities that stay fixed, as sampling does, two actions."""
    reference = np.array([0.9, 0.1])
    logits = jnp.log(jnp.asarray(p))
    old = jax.nn.log_softmax(logits + jnp.array([0.3, -0.2]))  # another policy that samples

    def expected(estimator: Callable, sampler: jax.Array | None = None) -> float:
        weights = jnp.asarray(p) if sampler is None else sampler

        def mean(z: jax.Array) -> jax.Array:
            return jnp.sum(weights * estimator(jax.nn.log_softmax(z), jnp.log(reference)))

        return float(jax.grad(mean)(logits)[0])

    def kl(z: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(z)
        return jnp.sum(jnp.exp(log_p) * (log_p - jnp.log(reference)))

    def forward(z: jax.Array) -> jax.Array:
        return -jnp.sum(reference * jax.nn.log_softmax(z))

    reverse = float(jax.grad(kl)(logits)[0])
    if p == [0.5, 0.5]:
        np.testing.assert_allclose(reverse, -0.5493061, atol=1e-7)  # worked out by hand
    np.testing.assert_allclose(expected(kl_k1), 0, atol=1e-12)
    np.testing.assert_allclose(expected(kl_k2), reverse, atol=1e-12)
    np.testing.assert_allclose(expected(kl_k3), float(jax.grad(forward)(logits)[0]), atol=1e-12)
    np.testing.assert_allclose(expected(kl_k3_straight_through), reverse, atol=1e-12)
    off_policy = expected(lambda a, b: kl_k3_corrected(a, b, old), jnp.exp(old))
    np.testing.assert_allclose(off_policy, reverse, atol=1e-12)


@pytest.mark.parametrize("fn", ESTIMATORS.values(), ids=ESTIMATORS)
def test_nan_and_inf_under_the_mask(fn: Callable) -> None:
    rng = np.random.default_rng(2)
    clean = [x for x in rng.normal(size=(3, 6)).astype(np.float32)][: 2 + (fn is kl_k3_corrected)]
    mask = np.array([1, 0, 1, 0, 1, 0], bool)
    poison = np.array([0, np.nan, 0, np.inf, 0, -np.inf], np.float32)

    @jax.jit
    def both(*xs: jax.Array) -> tuple:
        return fn(*xs, mask), jax.grad(lambda *ys: jnp.sum(fn(*ys, mask)), range(len(xs)))(*xs)

    value, grads = both(*clean)
    bad_value, bad_grads = both(*[np.where(mask, x, poison) for x in clean])
    np.testing.assert_array_equal(bad_value, value)
    np.testing.assert_array_equal(bad_grads, grads)
    assert np.all(np.asarray(value)[~mask] == 0)
    assert np.all(np.asarray(grads)[:, ~mask] == 0)


@pytest.mark.parametrize("fn", TWO_ARRAYS)
def test_dtypes(fn: Callable, x64: None) -> None:
    for given, result in [("bfloat16", "float32"), ("int32", "float32"), ("float64", "float64")]:
        assert fn(jnp.zeros(2, given), jnp.zeros(2, given)).dtype == result
    assert fn(jnp.zeros(2, "bfloat16"), jnp.zeros(2, "float64")).dtype == "float64"
    assert adaptive_kl_coef(jnp.float32(1), jnp.float32(1), target_kl=1.0).dtype == "float32"


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"log_probs \(2,\).*ref_log_probs \(3,\)"):
        kl_k3(np.zeros(2), np.zeros(3))
    with pytest.raises(ValueError, match="mask has shape"):
        kl_k1(np.zeros(2), np.zeros(2), np.ones((2, 1)))
    with pytest.raises(TypeError, match="log_probs"):
        kl_k1(np.zeros(2, np.complex64), np.zeros(2))
    with pytest.raises(ValueError, match="target_kl must lie in"):
        adaptive_kl_coef(1.0, 0.1, target_kl=0.0)
    with pytest.raises(ValueError, match="kl_coef must lie in"):
        adaptive_kl_coef(-1.0, 0.1, target_kl=0.1)


@pytest.mark.parametrize(
    "case", load_cases("policy_losses", "kl_coefficient_update"), ids=lambda case: case["id"]
)
def test_adaptive_coefficient(case: dict) -> None:
    beta, kl, target = case["inputs"]["beta"], case["inputs"]["kl"], case["params"]["target"]
    for double in (False, True):
        with jax.enable_x64(double):
            assert_close(adaptive_kl_coef(beta, kl, target_kl=target), case["expected"]["beta"])
    traced = jax.jit(lambda b, k, t: adaptive_kl_coef(b, k, target_kl=t))(beta, kl, target)
    assert_close(traced, case["expected"]["beta"])


def test_adaptive_coefficient_keeps_beta_when_the_kl_is_nan() -> None:
    assert adaptive_kl_coef(0.7, np.nan, target_kl=0.01) == np.float32(0.7)
    swept = jax.vmap(lambda b, k: adaptive_kl_coef(b, k, target_kl=0.01))
    np.testing.assert_allclose(swept(np.ones(3), np.array([0.0, 0.01, 1.0])), [0.5, 1.0, 2.0])
