"""Distributions against reference cases, NumPy integrals, autodiff and hand-computed faults."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxpg.distributions import (
    categorical,
    diagonal_gaussian,
    entropy_from_logits,
    mask_logits,
    multi_categorical,
    tanh_gaussian,
)
from jaxpg.types import Distribution

CASES = json.loads((Path(__file__).parent / "cases" / "distributions.json").read_text())["cases"]
INF = float("inf")


def numbers(x: object) -> np.ndarray:
    """JSON numbers as float64; "-inf" and friends are strings there."""
    return np.vectorize(float, otypes=[float])(np.asarray(x, dtype=object))


# fn -> (name of its value, inputs with reference gradients, function of the case's inputs)
CALLS = {
    "categorical_log_prob": (
        "log_prob",
        ["logits"],
        lambda c: categorical.log_prob(c["logits"], c["actions"]),
    ),
    "categorical_entropy": ("entropy", ["logits"], lambda c: categorical.entropy(c["logits"])),
    "categorical_kl": (
        "kl",
        ["p_logits", "q_logits"],
        lambda c: categorical.kl(c["p_logits"], c["q_logits"]),
    ),
    "gaussian_log_prob": (
        "log_prob",
        ["mean", "log_std"],
        lambda c: diagonal_gaussian.log_prob((c["mean"], c["log_std"]), c["actions"]),
    ),
    "gaussian_entropy": (
        "entropy",
        [],
        lambda c: diagonal_gaussian.entropy((jnp.zeros_like(c["log_std"]), c["log_std"])),
    ),
    "gaussian_kl": (
        "kl",
        ["q_mean", "q_log_std"],
        lambda c: diagonal_gaussian.kl(
            (c["p_mean"], c["p_log_std"]), (c["q_mean"], c["q_log_std"])
        ),
    ),
    "tanh_gaussian_log_prob": (
        "log_prob",
        [],
        lambda c: tanh_gaussian.log_prob((c["mean"], c["log_std"]), c["pre_tanh"]),
    ),
}


def check_cases(fn: str, dtype: type, tolerance: float) -> None:
    value_key, differentiated, call = CALLS[fn]
    chosen = [case for case in CASES if case["fn"] == fn]
    assert chosen

    def inputs(case: dict) -> dict[str, jax.Array]:
        return {
            name: jnp.asarray(value, jnp.int32)
            if name == "actions" and fn.startswith("categorical")
            else jnp.asarray(numbers(value), dtype)
            for name, value in case["inputs"].items()
        }

    @jax.jit  # one compilation for all cases of a function
    def run(cases: list[dict]) -> list[dict]:
        results = []
        for c in cases:
            result = {value_key: call(c)}
            floats = {name: c[name] for name in differentiated}
            if floats:
                grads = jax.grad(lambda f, c=c: jnp.sum(call(c | f)))(floats)
                result |= {f"grad_{name}": grad for name, grad in grads.items()}
            if fn.startswith("tanh"):
                base = diagonal_gaussian.log_prob((c["mean"], c["log_std"]), c["pre_tanh"])
                result["log_det"] = base - result[value_key]
            results.append(result)
        return results

    for case, result in zip(chosen, run([inputs(case) for case in chosen]), strict=True):
        assert set(case["expected"]) <= set(result), case["id"]
        for key, value in case["expected"].items():
            expected, actual = numbers(value), result[key]
            if key == "log_det":
                expected = expected.reshape(actual.shape)
            assert actual.dtype == dtype and actual.shape == expected.shape, (case["id"], key)
            atol = tolerance * max(1.0, np.abs(expected).max())
            np.testing.assert_allclose(
                actual, expected, rtol=0, atol=atol, err_msg=f"{case['id']} {key}"
            )
        for key, wrong in case.get("wrong", {}).items():
            assert np.abs(numbers(wrong) - numbers(case["expected"][key])).max() > 1e-3


@pytest.mark.parametrize("fn", sorted(CALLS))
def test_reference_cases_in_float32(fn: str) -> None:
    check_cases(fn, jnp.float32, 1e-5)


@pytest.mark.parametrize("fn", sorted(CALLS))
def test_reference_cases_in_float64(fn: str, x64: None) -> None:
    check_cases(fn, jnp.float64, 1e-8)


# --- every family at once ------------------------------------------------------------------------


def example(name: str, key: jax.Array, dtype: object = None) -> tuple[Distribution, tuple, tuple]:
    """A family with two different parameter pytrees, batch shape [4]."""
    keys = iter(jax.random.split(key, 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape).astype(dtype or jnp.float32)

    if name == "categorical":
        return categorical, normal(4, 5), normal(4, 5)
    if name == "multi_categorical":
        return (
            multi_categorical,
            (normal(4, 2), normal(4, 3)),
            (normal(4, 2), normal(4, 3)),
        )
    family = {"diagonal_gaussian": diagonal_gaussian, "tanh_gaussian": tanh_gaussian}[name]
    return family, (normal(4, 3), 0.3 * normal(4, 3)), (normal(4, 3), 0.3 * normal(4, 3))


FAMILIES = ["categorical", "multi_categorical", "diagonal_gaussian", "tanh_gaussian"]


@pytest.mark.parametrize("name", FAMILIES)
def test_shapes_dtypes_and_vmap(name: str, key: jax.Array) -> None:
    """R51: a vmapped row has the shape and the value of the same row unbatched."""
    family, p, q = example(name, key)

    def everything(p: tuple, q: tuple, x: jax.Array) -> dict[str, jax.Array]:
        return {
            "log_prob": family.log_prob(p, x),
            "entropy": family.entropy(p),
            "kl": family.kl(p, q),
            "mode": family.mode(p),
            "action": family.action(x),
        }

    x = family.sample(key, p)
    second = jax.tree.map(lambda leaf: leaf[1], (p, q, x))
    batched, vmapped, row = jax.jit(
        lambda *args: (everything(*args), jax.vmap(everything)(*args), everything(*second))
    )(p, q, x)
    for field, value in batched.items():
        np.testing.assert_allclose(vmapped[field], value, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(row[field], value[1], rtol=2e-6, atol=2e-6)
        if field in ("log_prob", "entropy", "kl"):
            assert value.shape == (4,) and value.dtype == jnp.float32
            assert row[field].shape == ()
    assert batched["mode"].shape == x.shape == batched["action"].shape
    assert batched["mode"].dtype == x.dtype

    keys = jax.random.split(key, 4)
    sample = jax.jit(family.sample)
    together = jax.vmap(sample)(keys, p)
    apart = [sample(keys[i], jax.tree.map(lambda a, i=i: a[i], p)) for i in range(4)]
    if name.endswith("gaussian"):  # a + b * c may be one instruction in one program, two in another
        np.testing.assert_allclose(together, jnp.stack(apart), rtol=1e-6, atol=1e-6)
    else:
        np.testing.assert_array_equal(together, jnp.stack(apart))


@pytest.mark.parametrize("name", FAMILIES)
def test_kl_of_identical_is_exactly_zero_and_positive_otherwise(name: str, key: jax.Array) -> None:
    """R21: a constant inside the logarithm left 8e-5, above a target KL of 1e-4."""
    family, p, q = example(name, key)
    np.testing.assert_array_equal(family.kl(p, p), 0.0)
    assert (family.kl(p, q) > 1e-3).all()
    grads = jax.grad(lambda q: jnp.sum(family.kl(p, q)))(p)
    for leaf in jax.tree.leaves(grads):
        np.testing.assert_allclose(leaf, 0.0, atol=1e-6)


def test_kl_of_eight_identical_gaussians_is_zero() -> None:
    p = (jnp.full((8,), 0.3), jnp.full((8,), -0.7))
    assert diagonal_gaussian.kl(p, p) == 0.0


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_in_float32_out(name: str, key: jax.Array) -> None:
    family, p, q = example(name, key, jnp.bfloat16)
    p32, q32 = jax.tree.map(lambda a: a.astype(jnp.float32), (p, q))
    x = family.sample(key, p)
    np.testing.assert_array_equal(x, family.sample(key, p32))
    for got, want in (
        (family.log_prob(p, x), family.log_prob(p32, x)),
        (family.entropy(p), family.entropy(p32)),
        (family.kl(p, q), family.kl(p32, q32)),
    ):
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_against_finite_differences(name: str, key: jax.Array, x64: None) -> None:
    family, p, q = example(name, key, jnp.float64)
    x = family.sample(key, p)
    assert x.dtype == (jnp.int32 if "categorical" in name else jnp.float64)

    @jax.jit
    def total(p: tuple, q: tuple) -> jax.Array:
        return jnp.sum(family.log_prob(p, x) + 0.7 * family.entropy(p) + family.kl(p, q))

    check_grads(total, (p, q), order=2, modes=["rev"])


@pytest.mark.parametrize("num_actions", [1, 2, 8, 9, 40])
def test_few_and_many_actions_agree_with_log_softmax(num_actions, key):
    """Values, gradients and second derivatives, where sums over actions are written out or not."""
    keys = jax.random.split(key, 4)
    logits = 3 * jax.random.normal(keys[0], (5, num_actions))
    logits = logits.at[1].add(1e4)  # a common offset is no reason to round
    others = jax.random.normal(keys[1], logits.shape)
    actions = jax.random.randint(keys[2], (5,), 0, num_actions)
    direction = jax.random.normal(keys[3], logits.shape)
    rows = jnp.arange(5)

    def ours(z):
        pair = categorical.kl(z, others) + categorical.kl(others, z)
        return jnp.stack([categorical.log_prob(z, actions), categorical.entropy(z), pair])

    def theirs(z):
        log_p, log_q = jax.nn.log_softmax(z), jax.nn.log_softmax(others)
        p, q = jnp.exp(log_p), jnp.exp(log_q)
        pair = jnp.sum((p - q) * (log_p - log_q), axis=-1)
        return jnp.stack([log_p[rows, actions], -jnp.sum(p * log_p, axis=-1), pair])

    def of(f):
        gradient = jax.jacrev(lambda z: jnp.sum(f(z), axis=1))
        return f(logits), gradient(logits), jax.jvp(gradient, (logits,), (direction,))[1]

    for mine, reference in zip(of(ours), of(theirs), strict=True):
        np.testing.assert_allclose(mine, reference, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_agree_with_log_prob_entropy_and_kl(name: str, key: jax.Array) -> None:
    """Monte Carlo: E[−log π(x)] is the entropy, E[log p − log q] is the KL divergence.

    For the squashed family both carry the Jacobian, so this checks its entropy against its own
    density and that KL does not see the squashing.
    """
    family, p, q = example(name, key)
    n = 20_000

    def row(p: tuple, q: tuple) -> tuple[tuple, tuple]:
        wide_p, wide_q = jax.tree.map(lambda a: jnp.broadcast_to(a, (n, *a.shape)), (p, q))
        x = family.sample(key, wide_p)
        log_p, log_q = family.log_prob(wide_p, x), family.log_prob(wide_q, x)
        return (
            (family.entropy(p) + log_p.mean(), family.kl(p, q) - (log_p - log_q).mean()),
            (log_p.std(), (log_p - log_q).std()),
        )

    difference, spread = jax.jit(jax.vmap(row))(p, q)
    for d, s in zip(difference, spread, strict=True):
        assert (jnp.abs(d) < 4.5 * s / np.sqrt(n) + 1e-5).all()


# --- categorical -----------------------------------------------------------------------------


def test_forbidden_actions_by_minus_infinity() -> None:
    p = jnp.array([[0.3, -INF, 0.1], [-INF, 2.0, -INF]])
    q = jnp.array([[0.9, -INF, -0.4], [-INF, 1.0, -INF]])
    x = jnp.array([2, 1])
    np.testing.assert_allclose(categorical.entropy(p)[1], 0.0)
    np.testing.assert_allclose(categorical.kl(p, q)[1], 0.0)
    assert categorical.log_prob(p, jnp.array([1, 0])).tolist() == [-INF, -INF]

    def total(p: jax.Array, q: jax.Array) -> jax.Array:
        return jnp.sum(categorical.log_prob(p, x) + categorical.entropy(p) + categorical.kl(p, q))

    value, grads = jax.value_and_grad(total, argnums=(0, 1))(p, q)
    assert np.isfinite(value)
    for grad in grads:
        assert np.isfinite(grad).all()
        np.testing.assert_array_equal(np.asarray(grad)[np.isinf(p)], 0.0)
    hessian = jax.hessian(lambda q: jnp.sum(categorical.kl(p, q)))(q)
    assert np.isfinite(hessian).all()


def test_kl_is_infinite_where_q_forbids_what_p_allows() -> None:
    assert categorical.kl(jnp.zeros(2), jnp.array([0.0, -INF])) == INF


def test_mask_logits_gives_probability_zero_and_finite_gradients(key: jax.Array) -> None:
    mask = jnp.array([[True, False, True, False], [False, False, False, True]])
    logits = jnp.array([[3.0, 50.0, 3.0, -2.0], [1.0, 2.0, 3.0, -80.0]])
    z = mask_logits(logits, mask)
    np.testing.assert_array_equal(jax.nn.softmax(z), [[0.5, 0, 0.5, 0], [0, 0, 0, 1]])
    np.testing.assert_allclose(categorical.entropy(z), [np.log(2), 0], atol=1e-6)
    draws = categorical.sample(key, jnp.broadcast_to(z, (500, 2, 4)))
    assert np.asarray(mask)[np.arange(2), draws].all()
    assert set(np.unique(draws[:, 0])) == {0, 2}

    def total(logits: jax.Array) -> jax.Array:
        z = mask_logits(logits, mask)
        kl = categorical.kl(z, mask_logits(0.5 * logits, mask))
        return jnp.sum(categorical.log_prob(z, jnp.array([0, 3])) + categorical.entropy(z) + kl)

    for order in (jax.grad, jax.hessian):
        result = np.asarray(jax.jit(order(total))(logits))
        assert np.isfinite(result).all()
        np.testing.assert_array_equal(result[~np.asarray(mask)], 0.0)
    assert mask_logits(logits.astype(jnp.bfloat16), mask).dtype == jnp.float32
    np.testing.assert_array_equal(mask_logits(logits, mask.astype(jnp.int8)), z)


def test_a_row_without_any_allowed_action_is_uniform() -> None:
    def total(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        z = mask_logits(logits, jnp.zeros((1, 4), bool))
        return jnp.sum(categorical.log_prob(z, jnp.array([2])) + categorical.entropy(z)), z

    (value, z), grad = jax.value_and_grad(total, has_aux=True)(jnp.array([[1.0, 5.0, -3.0, 0.0]]))
    np.testing.assert_array_equal(jax.nn.softmax(z), 0.25)
    assert value == 0.0  # log ¼ + log 4
    np.testing.assert_array_equal(grad, 0.0)


def test_samples_follow_the_probabilities(key: jax.Array) -> None:
    p = jnp.log(jnp.array([0.1, 0.6, 0.3]))
    draws = categorical.sample(key, jnp.broadcast_to(p, (20_000, 3)))
    assert draws.dtype == jnp.int32
    frequencies = np.bincount(draws, minlength=3) / 20_000
    np.testing.assert_allclose(frequencies, [0.1, 0.6, 0.3], atol=0.015)  # 4 standard errors
    assert categorical.mode(p) == 1


def test_actions_out_of_range_are_nan_and_never_wrap() -> None:
    p = jnp.zeros((3, 2))
    scores = categorical.log_prob(p, jnp.array([-1, 2, 1]))
    assert np.isnan(scores[:2]).all() and np.isclose(scores[2], -np.log(2))
    # under a mask such rows must not reach the gradient
    keep = jnp.array([False, False, True])
    grad = jax.grad(
        lambda p: jnp.sum(jnp.where(keep, categorical.log_prob(p, jnp.array([-1, 2, 1])), 0.0))
    )(p)
    np.testing.assert_allclose(grad, [[0, 0], [0, 0], [-0.5, 0.5]])


def test_entropy_is_shift_invariant_at_large_logits() -> None:
    z = jnp.array([1.0, 2.0, 3.0])
    np.testing.assert_allclose(entropy_from_logits(z + 1e4), entropy_from_logits(z), rtol=1e-3)


# --- several components ----------------------------------------------------------------------


def test_components_are_summed_not_averaged() -> None:
    """R25: the ratio of three components at 0.1 each is exp(0.3), entropy of N(0, I₃) 4.2568."""
    p = (jnp.zeros(3), jnp.zeros(3))
    shifted = (jnp.full(3, 0.1 + 0.005), jnp.zeros(3))  # log-ratio at x = 1: 0.105 − 0.105²/2
    x = jnp.ones(3)
    log_ratio = diagonal_gaussian.log_prob(shifted, x) - diagonal_gaussian.log_prob(p, x)
    np.testing.assert_allclose(log_ratio, 3 * (0.105 - 0.105**2 / 2), rtol=1e-5)
    np.testing.assert_allclose(diagonal_gaussian.entropy(p), 4.256816, rtol=1e-6)

    logits = (jnp.zeros((1, 2)), jnp.zeros((1, 3)), jnp.zeros((1, 4)))
    x = jnp.array([[1, 2, 3]])
    np.testing.assert_allclose(multi_categorical.log_prob(logits, x), [-np.log(24)], rtol=1e-6)
    np.testing.assert_allclose(multi_categorical.entropy(logits), [np.log(24)], rtol=1e-6)
    one = (jnp.array([0.0, 0.0]), jnp.array([0.0, 0.0]))
    two = (jnp.array([1.0, 0.0]), jnp.array([1.0, 0.0]))
    np.testing.assert_allclose(multi_categorical.kl(one, two), 2 * 0.120114507, rtol=1e-6)


def test_multi_categorical_components_are_independent_draws(key: jax.Array) -> None:
    p = (jnp.zeros((4000, 2)), jnp.zeros((4000, 2)))
    x = multi_categorical.sample(key, p)
    assert x.shape == (4000, 2) and x.dtype == jnp.int32
    agree = float(jnp.mean(x[:, 0] == x[:, 1]))
    assert abs(agree - 0.5) < 0.03


def test_shared_log_std_broadcasts(key: jax.Array) -> None:
    mean = jax.random.normal(key, (5, 4, 3))
    log_std = jnp.array([0.1, -0.5, 0.3])
    full = jnp.broadcast_to(log_std, mean.shape)
    x = diagonal_gaussian.sample(key, (mean, log_std))
    np.testing.assert_allclose(x, diagonal_gaussian.sample(key, (mean, full)), rtol=1e-6)
    for family in (diagonal_gaussian, tanh_gaussian):
        for fn in (
            lambda s, f=family: f.log_prob((mean, s), x),
            lambda s, f=family: f.entropy((mean, s)),
            lambda s, f=family: f.kl((mean, s), (2 * mean, s)),
        ):
            assert fn(log_std).shape == (5, 4)
            np.testing.assert_allclose(fn(log_std), fn(full), rtol=1e-5, atol=1e-5)
    wide = diagonal_gaussian.kl((mean, log_std), (mean, full + 0.5))
    np.testing.assert_allclose(wide, 3 * 0.5 * (np.exp(-1) - 1 + 1), rtol=1e-5)


def test_gaussian_kl_keeps_its_digits_near_zero() -> None:
    """½(r − 1 − log r) ≈ (Δ log σ)²: by r − 1 in float32 the digits are gone."""
    p = (jnp.zeros(1), jnp.zeros(1))
    q = (jnp.zeros(1), jnp.full(1, 1e-2))
    exact = 0.5 * (np.expm1(-0.02) + 0.02)
    np.testing.assert_allclose(diagonal_gaussian.kl(p, q), exact, rtol=1e-4)


# --- tanh_gaussian ---------------------------------------------------------------------------


def test_saturated_squashing_stays_exact() -> None:
    """R15: at u = 10 float32 has tanh(u) = 1, atanh = ∞, log(1 − tanh²) = −∞."""
    p = (jnp.zeros((2, 1)), jnp.zeros((2, 1)))
    u = jnp.array([[10.0], [-10.0]])
    np.testing.assert_array_equal(tanh_gaussian.action(u), [[1.0], [-1.0]])
    np.testing.assert_allclose(tanh_gaussian.log_prob(p, u), [-32.305233] * 2, rtol=1e-6)
    det = diagonal_gaussian.log_prob(p, u) - tanh_gaussian.log_prob(p, u)
    np.testing.assert_allclose(det, [-18.613706] * 2, rtol=1e-6)
    grad = jax.grad(lambda u: jnp.sum(tanh_gaussian.log_prob(p, u)))(u)
    np.testing.assert_allclose(grad, [[-8.0], [8.0]], rtol=1e-6)  # −u + 2 tanh u


def test_squashed_density_integrates_to_one(x64: None) -> None:
    p = (jnp.array([0.4]), jnp.array([-0.2]))
    a = np.linspace(-1, 1, 200_001)[1:-1]
    density = np.exp(
        tanh_gaussian.log_prob(
            jax.tree.map(lambda s: jnp.broadcast_to(s, (a.size, 1)), p),
            jnp.asarray(np.arctanh(a))[:, None],
        )
    )
    np.testing.assert_allclose(density.sum() * 1e-5, 1.0, atol=1e-6)


def squashed_entropy(mean: float, std: float) -> float:
    """−∫ π log π du by a sum of 400,000 float64 terms over ±12 standard deviations."""
    z = np.linspace(-12, 12, 400_001)
    weight = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi) * (z[1] - z[0])
    u = mean + std * z
    log_det = 2 * (np.log(2) - u - np.logaddexp(0, -2 * u))
    return 0.5 * np.log(2 * np.pi * np.e) + np.log(std) + float(np.sum(weight * log_det))


def test_squashed_entropy_against_a_fine_integral(x64: None) -> None:
    means = np.array([-6.0, -1.3, 0.0, 0.2, 1.0, 3.0])
    bounds = {0.01: 1e-7, 0.3: 1e-6, 1.0: 1e-6, 1.7: 1e-6, float(np.e): 5e-5, 4.5: 2e-3}
    for std, bound in bounds.items():
        p = (jnp.asarray(means)[:, None], jnp.full((1,), np.log(std)))
        exact = [squashed_entropy(mean, std) for mean in means]
        np.testing.assert_allclose(tanh_gaussian.entropy(p), exact, rtol=0, atol=bound)
    # the base normal's entropy grows for ever; the squashed one does not
    wide = tanh_gaussian.entropy((jnp.zeros((1, 1)), jnp.full((1, 1), 1.5)))
    assert wide < tanh_gaussian.entropy((jnp.zeros((1, 1)), jnp.full((1, 1), -0.15)))


def test_mode_of_the_squashed_family_is_its_median(key: jax.Array) -> None:
    p = (jnp.full((4001, 1), 0.8), jnp.zeros((4001, 1)))
    actions = tanh_gaussian.action(tanh_gaussian.sample(key, p))
    median = tanh_gaussian.action(tanh_gaussian.mode(p))[0]
    np.testing.assert_allclose(median, np.tanh(0.8), rtol=1e-6)
    assert abs(float(jnp.mean(actions > median)) - 0.5) < 0.03


# --- bad input -------------------------------------------------------------------------------


def test_bad_input_is_refused_by_name() -> None:
    z = jnp.zeros((4, 3))
    with pytest.raises(TypeError, match=r"x must be integer actions, got dtype float32"):
        categorical.log_prob(z, jnp.zeros(4))
    with pytest.raises(ValueError, match=r"x must have shape \(4,\).*got \(4, 1\)"):
        categorical.log_prob(z, jnp.zeros((4, 1), jnp.int32))
    with pytest.raises(ValueError, match=r"p \(4, 3\), q \(3,\)"):
        categorical.kl(z, z[0])
    with pytest.raises(ValueError, match="at least one action"):
        categorical.entropy(jnp.zeros((4, 0)))
    with pytest.raises(ValueError, match=r"logits \(4, 3\), mask \(3,\)"):
        mask_logits(z, jnp.ones(3, bool))
    with pytest.raises(TypeError, match="mask must be a bool or integer flag"):
        mask_logits(z, jnp.ones((4, 3)))
    with pytest.raises(ValueError, match="tuple of at least one array of logits"):
        multi_categorical.entropy(z)
    with pytest.raises(ValueError, match=r"x must end in 2 components.*\(4, 3\)"):
        multi_categorical.log_prob((z, z), jnp.zeros((4, 3), jnp.int32))
    with pytest.raises(ValueError, match="p has 2 components and q has 1"):
        multi_categorical.kl((z, z), (z,))
    with pytest.raises(ValueError, match=r"p must be \(mean, log_std\)"):
        diagonal_gaussian.entropy(z)
    with pytest.raises(ValueError, match=r"\(4, 3\), got \(2, 3\)"):
        diagonal_gaussian.entropy((z, jnp.zeros((2, 3))))
    with pytest.raises(ValueError, match=r"\(4, 3\), got \(1,\)"):
        diagonal_gaussian.entropy((z, jnp.zeros(1)))
    with pytest.raises(ValueError, match=r"shape of the mean, \(4, 3\), got \(4,\)"):
        diagonal_gaussian.log_prob((z, z), jnp.zeros(4))
    with pytest.raises(ValueError, match=r"p_mean \(4, 3\), q_mean \(3,\)"):
        diagonal_gaussian.kl((z, z), (z[0], z[0]))
