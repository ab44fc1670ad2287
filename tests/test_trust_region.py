"""Fisher products, conjugate gradients, natural steps and the line search."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.trust_region import (
    backtracking_line_search,
    conjugate_gradient,
    fisher_operator,
    fisher_vector_product,
    natural_step,
)

DATA = json.loads((Path(__file__).parent / "cases" / "trust_region.json").read_text())
CASES = {case["id"]: case for case in DATA["cases"]}


def softmax_kl(p, q):
    """KL between rows of logits, from the definition."""
    log_p, log_q = jax.nn.log_softmax(p), jax.nn.log_softmax(q)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def explicit_fisher(features, weights):
    """E_s[(x xᵀ) ⊗ (diag(p) − p pᵀ)], parameters flattened row by row, by NumPy alone."""
    features, weights = np.asarray(features, np.float64), np.asarray(weights, np.float64)
    logits = features @ weights
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    terms = [
        np.kron(np.outer(x, x), np.diag(q) - np.outer(q, q))
        for x, q in zip(features, p, strict=True)
    ]
    return np.mean(terms, axis=0)


def linear_policy(inputs, dtype):
    features = jnp.asarray(inputs["features"], dtype)
    return (lambda weights: features @ weights), jnp.asarray(inputs["weights"], dtype)


def close(actual, expected, dtype):
    expected = np.asarray(expected)
    scale = max(1.0, np.abs(expected).max())
    tolerance = 1e-8 if dtype == jnp.float64 else 1e-5
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale)


def check_case(case, dtype):
    inputs, params, expected = case["inputs"], case["params"], case["expected"]
    if case["fn"] == "natural_step_matrix":
        matrix = jnp.asarray(inputs["matrix"], dtype)
        product = lambda v: matrix @ v  # noqa: E731
    else:
        logits, weights = linear_policy(inputs, dtype)
        product = fisher_operator(logits, softmax_kl, weights)
    if case["fn"] == "softmax_fisher":
        columns = jnp.eye(weights.size, dtype=dtype).reshape(-1, *weights.shape)
        close(jax.vmap(product)(columns).reshape(weights.size, -1), expected["fisher"], dtype)
    elif case["fn"] == "fisher_vector_product":
        vector = jnp.asarray(inputs["vector"], dtype)
        out = fisher_vector_product(logits, softmax_kl, weights, vector, **params)
        close(out, expected["out"], dtype)
    else:
        result = natural_step(
            product,
            jnp.asarray(inputs["gradient"], dtype),
            max_kl=params["delta"],
            damping=params["damping"],
            num_iterations=20,
            residual_tol=1e-12 if dtype == jnp.float64 else 1e-6,
        )
        for name, value in [
            ("direction", result.direction),
            ("sFs", result.curvature),
            ("step_scale", result.scale),
            ("step", result.step),
            ("quadratic_kl", 0.5 * jnp.vdot(result.step, product(result.step))),
        ]:
            assert value.dtype == dtype, name
            close(value, expected[name], dtype)
        assert bool(result.accepted) == (expected["step_scale"] > 0)
        if "kl_at_step" in expected:
            kl = jnp.mean(softmax_kl(logits(weights), logits(weights + result.step)))
            close(kl, expected["kl_at_step"], dtype)


@pytest.mark.parametrize("name", CASES)
def test_reference_case_in_doubles(name, x64):
    check_case(CASES[name], jnp.float64)


@pytest.mark.parametrize("name", [name for name in CASES if "singular" not in CASES[name]["tags"]])
def test_reference_case_in_singles(name):
    check_case(CASES[name], jnp.float32)


def test_fisher_is_a_mean_over_states():
    """Fault E53: a sum over states would shrink the trust region with the batch."""
    for case in DATA["faults"]:
        check_case({**case, "expected": case["right"]}, jnp.float32)


def test_singular_fisher_does_not_drift_in_singles():
    """Iterated far past convergence, the solve stays at the solution (it stops on the residual)."""
    case = CASES["trpo_bandit"]
    logits, weights = linear_policy(case["inputs"], jnp.float32)
    product = fisher_operator(logits, softmax_kl, weights)
    gradient = jnp.asarray(case["inputs"]["gradient"], jnp.float32)
    for num_iterations in (2, 10, 200):
        result = natural_step(product, gradient, max_kl=0.01, num_iterations=num_iterations)
        np.testing.assert_allclose(result.step, case["expected"]["step"], atol=1e-4)


def test_fisher_against_an_explicit_matrix(variant, key):
    names = jax.random.split(key, 3)
    features = jax.random.normal(names[0], (7, 4))
    weights = {"w": jax.random.normal(names[1], (4, 3))}
    vector = {"w": jax.random.normal(names[2], (4, 3))}

    def product(features, weights, vector):
        return fisher_vector_product(
            lambda w: features @ w["w"], softmax_kl, weights, vector, damping=0.3
        )

    out = variant(product)(features, weights, vector)["w"]
    flat = np.asarray(vector["w"], np.float64).ravel()
    expected = explicit_fisher(features, weights["w"]) @ flat + 0.3 * flat
    np.testing.assert_allclose(np.ravel(out), expected, atol=1e-6)


def test_fisher_is_the_hessian_of_the_kl_through_a_network(key, x64):
    """Gauss-Newton equals the full Hessian at the old parameters, for a Gaussian policy too."""
    names = jax.random.split(key, 3)
    obs = jax.random.normal(names[0], (5, 3))
    params = jax.random.normal(names[1], (3 * 2 + 2,))
    vector = jax.random.normal(names[2], params.shape)

    def dist(params):
        return jnp.tanh(obs @ params[:6].reshape(3, 2)), jnp.broadcast_to(params[6:], (5, 2))

    def gaussian_kl(p, q):
        (mean, log_std), (other, other_std) = p, q
        ratio = jnp.exp(2 * (log_std - other_std))
        distance = ((mean - other) / jnp.exp(other_std)) ** 2
        return jnp.sum(other_std - log_std + 0.5 * (ratio + distance - 1), axis=-1)

    old = dist(params)
    hessian = jax.hessian(lambda params: jnp.mean(gaussian_kl(old, dist(params))))(params)
    out = fisher_vector_product(dist, gaussian_kl, params, vector)
    np.testing.assert_allclose(out, hessian @ vector, atol=1e-10)
    # the KL at the old parameters and its gradient are 0, yet its Hessian is not (fault R37)
    assert float(vector @ out) > 0.1


def test_conjugate_gradient_solves_a_known_system(variant):
    rng = np.random.default_rng(0)
    root = rng.normal(size=(6, 6))
    matrix = root @ root.T + np.eye(6)
    b = rng.normal(size=6)
    solve = lambda A, b: conjugate_gradient(lambda v: A @ v, b, num_iterations=30)  # noqa: E731
    x = variant(solve)(jnp.asarray(matrix, jnp.float32), jnp.asarray(b, jnp.float32))
    np.testing.assert_allclose(x, np.linalg.solve(matrix, b), atol=1e-4)


def test_conjugate_gradient_stops_early_on_trees():
    """Two distinct eigenvalues take two iterations; the matrix is never applied a third time."""
    calls = []

    def product(v):
        jax.debug.callback(lambda: calls.append(1))
        return {"a": 2.0 * v["a"], "b": 5.0 * v["b"]}

    b = {"a": jnp.array([2.0, 4.0]), "b": jnp.ones((1, 1))}
    x = conjugate_gradient(product, b, num_iterations=50)
    jax.effects_barrier()
    np.testing.assert_allclose(x["a"], [1.0, 2.0], atol=1e-5)
    np.testing.assert_allclose(x["b"], [[0.2]], atol=1e-5)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("name", "diagonal", "gradient", "damping"),
    [
        ("zero gradient", [2.0, 1.0], [0.0, 0.0], 0.0),
        ("no curvature", [0.0, 0.0], [1.0, 2.0], 0.0),
        ("no curvature, damped", [0.0, 0.0], [1.0, 2.0], 0.1),
        ("negative curvature (R35)", [-3.0, -3.0], [1.0, 0.0], 0.0),
        ("negative curvature under damping", [-3.0, -3.0], [1.0, 0.0], 5.0),
        ("NaN in the matrix", [np.nan, 1.0], [1.0, 1.0], 0.0),
        ("inf in the matrix", [np.inf, 1.0], [1.0, 1.0], 0.0),
        ("NaN in the gradient", [1.0, 1.0], [np.nan, 1.0], 0.0),
        ("inf in the gradient", [1.0, 1.0], [np.inf, 1.0], 0.1),
    ],
)
def test_no_step_rather_than_nan(name, diagonal, gradient, damping, variant):
    def step(diagonal, gradient):
        return natural_step(lambda v: diagonal * v, gradient, max_kl=0.01, damping=damping)

    result = variant(step)(jnp.array(diagonal), jnp.array(gradient))
    assert not result.accepted
    np.testing.assert_array_equal(result.step, [0.0, 0.0])
    assert float(result.scale) == 0 and float(result.expected_improvement) == 0
    params, accepted, info = variant(
        lambda step: backtracking_line_search(
            lambda x: (jnp.sum(x), jnp.zeros(())), jnp.ones(2), step, max_kl=0.01
        )
    )(result.step)
    assert not accepted and int(info.num_trials) == 0
    np.testing.assert_array_equal(params, [1.0, 1.0])


def search(surrogate, kl, variant=lambda f: f, **settings):
    """From 0 with a step of 1; `decay` 0.5 tries 1, ½, ¼, ⅛."""
    settings = {"max_kl": 1.0, "decay": 0.5, "num_trials": 4} | settings

    def run(x, step):
        return backtracking_line_search(
            lambda x: (surrogate(x), kl(x)), {"x": x}, {"x": step}, **settings
        )

    params, accepted, info = variant(run)(jnp.zeros(()), jnp.ones(()))
    return float(params["x"]), bool(accepted), info


def test_line_search_checks_both_conditions(variant):
    up = lambda p: p["x"]  # noqa: E731
    square = lambda p: p["x"] ** 2  # noqa: E731
    # the KL alone fails at 1 and ½ (fault R37: accepting without checking it)
    x, accepted, info = search(up, square, variant, max_kl=0.1)
    assert (x, accepted, int(info.num_trials)) == (0.25, True, 3)
    assert float(info.kl) == 0.0625 and float(info.improvement) == 0.25
    # the improvement alone fails at 1 and ½: the surrogate peaks at 0.2
    x, accepted, info = search(lambda p: 0.04 - (p["x"] - 0.2) ** 2, square, variant)
    assert (x, accepted, float(info.fraction)) == (0.25, True, 0.25)
    # no improvement anywhere, or one that is exactly 0: nothing moves
    for surrogate in (lambda p: -p["x"], lambda p: 0 * p["x"]):
        x, accepted, info = search(surrogate, square, variant)
        assert (x, accepted, int(info.num_trials)) == (0.0, False, 4)
        assert float(info.kl) == 0 and float(info.improvement) == 0


def test_line_search_accept_ratio_and_tolerance():
    up, square = (lambda p: p["x"]), (lambda p: p["x"] ** 2)
    # a gain of 0.5 x² reaches half of the promised x only at the full step
    bowl = lambda p: 0.5 * p["x"] ** 2  # noqa: E731
    assert search(bowl, square, expected_improvement=1.0, accept_ratio=0.5)[:2] == (1.0, True)
    assert search(bowl, square, expected_improvement=1.0, accept_ratio=0.6)[:2] == (0.0, False)
    # KL(1) = 1 exceeds 0.8 by a quarter
    assert search(up, square, max_kl=0.8)[0] == 0.5
    assert search(up, square, max_kl=0.8, kl_tolerance=0.2)[0] == 0.5
    assert search(up, square, max_kl=0.8, kl_tolerance=0.26)[0] == 1.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["surrogate", "kl"])
def test_candidates_that_are_not_finite_fail(bad, which):
    broken = lambda p: jnp.where(p["x"] > 0.6, bad, p["x"])  # noqa: E731
    if which == "surrogate":
        x, accepted, _ = search(broken, lambda p: p["x"])
    else:
        x, accepted, _ = search(lambda p: p["x"], broken)
    assert (x, accepted) == (0.5, True)
    always = jnp.asarray(bad)
    assert search(lambda p: always, lambda p: p["x"])[:2] == (0.0, False)


def test_line_search_keeps_structure_and_dtypes():
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": (jnp.zeros((2, 2)),)}
    step = {"a": jnp.full(3, 0.5), "b": (jnp.ones((2, 2)),)}
    new, accepted, _ = backtracking_line_search(
        lambda p: (jnp.sum(p["b"][0]), jnp.zeros(())), params, step, max_kl=0.1
    )
    assert accepted
    assert jax.tree.structure(new) == jax.tree.structure(params)
    assert new["a"].dtype == jnp.bfloat16 and new["b"][0].dtype == jnp.float32
    np.testing.assert_array_equal(new["a"], np.full(3, 1.5))
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(new))


def test_vmap_searches_each_member_alone():
    """Members that need 1, 2 and 3 trials, and one that fails, in one batch."""
    limits = jnp.array([1.0, 0.5, 0.2, 0.01])

    def run(limit):
        return backtracking_line_search(
            lambda x: (x, x**2), jnp.zeros(()), jnp.ones(()), max_kl=limit, num_trials=3
        )

    params, accepted, info = jax.jit(jax.vmap(run))(limits)
    np.testing.assert_array_equal(params, [1.0, 0.5, 0.25, 0.0])
    np.testing.assert_array_equal(accepted, [True, True, True, False])
    np.testing.assert_array_equal(info.num_trials, [1, 2, 3, 3])


def test_bfloat16_policy_solves_in_singles():
    features = jnp.eye(2, dtype=jnp.bfloat16)
    weights = jnp.zeros((2, 2), jnp.bfloat16)
    product = fisher_operator(lambda w: features @ w, softmax_kl, weights)
    result = natural_step(product, jnp.array([[1.0, -1.0], [0.0, 0.0]]), max_kl=0.01)
    assert result.step.dtype == jnp.float32
    # p = ½: F = ⅛ [[1, −1], [−1, 1]] in the first row, so s = 4 g and sᵀFs = 8
    np.testing.assert_allclose(result.direction, [[4.0, -4.0], [0.0, 0.0]], rtol=1e-2)
    np.testing.assert_allclose(result.curvature, 8.0, rtol=1e-2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: natural_step(lambda v: v, jnp.ones(1), max_kl=0.0), "max_kl"),
        (lambda: natural_step(lambda v: v, jnp.ones(1), max_kl=0.1, damping=-1.0), "damping"),
        (lambda: conjugate_gradient(lambda v: v, jnp.ones(1), num_iterations=0), "num_iterations"),
        (lambda: conjugate_gradient(lambda v: v, jnp.ones(1), residual_tol=-1.0), "residual_tol"),
        (lambda: search(None, None, decay=1.0), "decay"),
        (lambda: search(None, None, num_trials=0), "num_trials"),
        (lambda: search(None, None, max_kl=-0.1), "max_kl"),
        (lambda: search(None, None, accept_ratio=2.0), "accept_ratio"),
        (lambda: search(None, None, kl_tolerance=-0.1), "kl_tolerance"),
        (
            lambda: fisher_vector_product(
                lambda w: w, softmax_kl, jnp.ones(2), jnp.ones(2), damping=-0.1
            ),
            "damping",
        ),
    ],
)
def test_bad_settings_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
