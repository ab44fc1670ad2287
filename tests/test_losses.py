"""Per-element losses: definitions, reference cases, known faults, overflow, masks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases_loader import arrays, assert_close, load_cases

from jaxpg.kl import kl_k1, kl_k2, kl_k3, kl_k3_corrected
from jaxpg.losses import (
    cispo_loss,
    clipped_surrogate_loss,
    clipped_value_loss,
    geometric_mean_loss,
    importance_sampling_loss,
    off_policy_sequence_mask,
    policy_gradient_loss,
    sequence_clipped_loss,
    sequence_importance_weights,
    soft_gated_loss,
    squared_value_loss,
    token_log_probs,
    truncated_importance_weights,
)
from jaxpg.reductions import constant_norm, masked_mean, sequence_mean, token_mean

# --- by definition, in NumPy -------------------------------------------------------------------


def clip_np(p: np.ndarray, old: np.ndarray, A: np.ndarray) -> np.ndarray:
    ratio = np.exp(p - old)
    loss = -np.minimum(ratio * A, np.clip(ratio, 0.8, 1.3) * A)
    return np.where(A < 0, np.minimum(loss, -2.0 * A), loss)


def sapo_np(p: np.ndarray, old: np.ndarray, A: np.ndarray) -> np.ndarray:
    tau = np.where(A > 0, 1.5, 2.5)
    return -4 / tau / (1 + np.exp(-tau * (np.exp(p - old) - 1))) * A


def value_np(v: np.ndarray, old: np.ndarray, target: np.ndarray) -> np.ndarray:
    clipped = old + np.clip(v - old, -0.5, 0.5)
    return np.maximum((v - target) ** 2, (clipped - target) ** 2) / 2


def sequence_np(p: np.ndarray, old: np.ndarray, A: np.ndarray, mean: bool = True) -> np.ndarray:
    """Rows of 5 tokens, the first of them masked; one advantage a row, that of its first token."""
    d = (p - old)[:, 1:]
    s = np.exp(d.mean(1) if mean else d.sum(1))
    return -np.minimum(s * A, np.clip(s, 0.8, 1.3) * A)


def gmpo_np(p: np.ndarray, old: np.ndarray, A: np.ndarray) -> np.ndarray:
    d = (p - old)[:, 1:]
    d = np.where(A[:, None] > 0, np.minimum(d, 0.4), np.maximum(d, -0.4))
    return -A * np.exp(d.mean(1))


ELEMENTWISE: dict[str, tuple[Callable, Callable]] = {
    "policy_gradient": (policy_gradient_loss, lambda p, A: -A * p),
    "importance_sampling": (importance_sampling_loss, lambda p, old, A: -np.exp(p - old) * A),
    "clipped": (
        partial(clipped_surrogate_loss, clip_epsilon_high=0.3, dual_clip=2.0),
        clip_np,
    ),
    "cispo": (
        partial(cispo_loss, max_ratio=1.5, min_ratio=0.5),
        lambda p, old, A: -np.clip(np.exp(p - old), 0.5, 1.5) * A * p,
    ),
    "soft_gated": (partial(soft_gated_loss, temperature=1.5, temperature_negative=2.5), sapo_np),
    "squared_value": (squared_value_loss, lambda v, target: (v - target) ** 2 / 2),
    "clipped_value": (partial(clipped_value_loss, clip_epsilon=0.5), value_np),
    "token_weights": (
        partial(truncated_importance_weights, max_weight=1.5, min_weight=0.5),
        lambda old, sampler: np.clip(np.exp(old - sampler), 0.5, 1.5),
    ),
}
ROW_MASK = np.tile([False, True, True, True, True], (4, 1))
SEQUENCE: dict[str, tuple[Callable, Callable]] = {
    "geometric": (
        partial(sequence_clipped_loss, clip_epsilon=0.2, clip_epsilon_high=0.3),
        sequence_np,
    ),
    "whole": (
        partial(
            sequence_clipped_loss, length_normalize=False, clip_epsilon=0.2, clip_epsilon_high=0.3
        ),
        partial(sequence_np, mean=False),
    ),
    "gmpo": (geometric_mean_loss, gmpo_np),
}


def sample(num: int, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).normal(size=(num, 4, 5)))


def num_arrays(name: str) -> int:
    return 2 if name in ("policy_gradient", "squared_value", "token_weights") else 3


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_definitions(name: str, variant: Callable) -> None:
    fn, expected = ELEMENTWISE[name]
    inputs = sample(num_arrays(name))
    assert_close(variant(fn)(*[x.astype(np.float32) for x in inputs]), expected(*inputs))


@pytest.mark.parametrize("name", SEQUENCE)
def test_sequence_definitions(name: str, variant: Callable) -> None:
    fn, expected = SEQUENCE[name]
    p, old, A = (x.astype(np.float32) for x in sample(3))
    A = A[:, 0]
    want = expected(*np.float64((p, old)), A)
    result = variant(lambda p, old, A, m: fn(p, old, A, m))(p, old, A, ROW_MASK)
    assert_close(result, want)
    moved = fn(p.T, old.T, A, ROW_MASK.T, axis=0)
    assert_close(moved, want)


@pytest.mark.parametrize("name", [*ELEMENTWISE, *SEQUENCE])
def test_gradients_are_those_of_the_definition(name: str, x64: None) -> None:
    """Central differences of the NumPy form, by every argument."""
    fn, expected = (ELEMENTWISE | SEQUENCE)[name]
    inputs = sample(3 if name in SEQUENCE else num_arrays(name), seed=1)
    if name in SEQUENCE:
        inputs[2] = inputs[2][:, 0]
        fn = partial(fn, mask=ROW_MASK)
    grads = jax.grad(lambda *xs: jnp.sum(fn(*xs)), tuple(range(len(inputs))))(*inputs)
    if name == "token_weights":  # constants to the gradient
        assert all(np.all(np.asarray(g) == 0) for g in grads)
        return
    if name == "cispo":  # the weight is a constant, so not the gradient of the value
        p, old, A = inputs
        weight = np.clip(np.exp(p - old), 0.5, 1.5)
        for grad, want in zip(grads, [-weight * A, 0 * p, -weight * p], strict=True):
            assert_close(grad, want)
        return
    h = 1e-6
    for i, grad in enumerate(grads):
        for index in np.ndindex(inputs[i].shape):
            up, down = ([x.copy() for x in inputs] for _ in range(2))
            up[i][index] += h
            down[i][index] -= h
            slope = (expected(*up).sum() - expected(*down).sum()) / (2 * h)
            np.testing.assert_allclose(grad[index], slope, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("name", [*ELEMENTWISE, *SEQUENCE])
def test_nan_and_inf_under_the_mask(name: str) -> None:
    """Neither the value nor the gradient by any argument sees them, and they are 0 there."""
    fn, _ = (ELEMENTWISE | SEQUENCE)[name]
    inputs = [x.astype(np.float32) for x in sample(3 if name in SEQUENCE else num_arrays(name))]
    mask = np.arange(5) < np.array([[5], [2], [0], [3]])
    poison = np.resize(np.array([np.nan, np.inf, -np.inf], np.float32), mask.shape)

    @jax.jit
    def both(*xs: jax.Array) -> tuple:
        grads = jax.grad(lambda *ys: jnp.sum(fn(*ys, mask)), tuple(range(len(xs))))(*xs)
        return fn(*xs, mask), grads

    value, grads = both(*inputs)
    bad_value, bad_grads = both(*[np.where(mask, x, poison) for x in inputs])
    np.testing.assert_array_equal(bad_value, value)
    for grad, bad in zip(grads, bad_grads, strict=True):
        np.testing.assert_array_equal(bad, grad)
        assert np.all(np.asarray(grad)[~mask] == 0)
    off = ~mask.any(1) if name in SEQUENCE else ~mask
    assert np.all(np.asarray(value)[off] == 0)
    if name in SEQUENCE:  # one advantage a sequence, NaN for the one without a token
        per_row = np.array([1.0, -1, np.nan, 0.5], np.float32)
        value, grads = both(*[np.where(mask, x, poison) for x in inputs[:2]], per_row)
        assert np.all(np.isfinite(value))
        assert all(np.all(np.isfinite(grad)) for grad in grads)
        assert value[2] == 0


RATIO_LOSSES = {
    "importance_sampling": importance_sampling_loss,
    "clipped": clipped_surrogate_loss,
    "dual": partial(clipped_surrogate_loss, dual_clip=3.0),
    "cispo": partial(cispo_loss, max_ratio=5.0),
    "soft_gated": soft_gated_loss,
    "geometric": sequence_clipped_loss,
    "whole": partial(sequence_clipped_loss, length_normalize=False),
    "gmpo": geometric_mean_loss,
}


@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_overflow_of_the_ratio_is_finite_in_value_and_gradient(name: str) -> None:
    """A log-ratio of ±100, and of ±inf, that the mask lets through, in float32."""

    @jax.jit
    def both(p: jax.Array, old: jax.Array, A: jax.Array) -> tuple:
        fn = RATIO_LOSSES[name]
        return fn(p, old, A), jax.grad(lambda *xs: jnp.sum(fn(*xs)), (0, 1, 2))(p, old, A)

    p = np.array([[-0.5], [-0.5], [-100.5], [-100.5]], np.float32)
    old = np.array([[-100.5], [-100.5], [-0.5], [-0.5]], np.float32)
    A = np.array([[1.0], [-1.0], [1.0], [-1.0]], np.float32)
    value, grads = both(p, old, A)
    assert np.all(np.isfinite(value))
    assert all(np.all(np.isfinite(grad)) for grad in grads)
    if name != "cispo":  # whose weight is a constant: the gradient is −weight A
        np.testing.assert_array_equal(grads[0], np.zeros((4, 1)))
    value, grads = both(p, np.where(old < -50, -np.inf, old), A)
    assert np.all(np.isfinite(value))
    assert np.all(np.isfinite(grads[0]))


@pytest.mark.parametrize("name", [*ELEMENTWISE, *SEQUENCE])
def test_dtypes(name: str, x64: None) -> None:
    fn, _ = (ELEMENTWISE | SEQUENCE)[name]
    num = 3 if name in SEQUENCE else num_arrays(name)
    for given, result in [("bfloat16", "float32"), ("int32", "float32"), ("float64", "float64")]:
        assert fn(*[jnp.ones((2, 3), given)] * num).dtype == result
    mixed = [jnp.ones((2, 3), "bfloat16")] * (num - 1) + [jnp.ones((2, 3), "float64")]
    assert fn(*mixed).dtype == "float64"


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    p = jnp.asarray([-1.0, -2.0], "bfloat16")
    loss = clipped_surrogate_loss(p, p - 1, np.ones(2))
    exact = clipped_surrogate_loss(p.astype("float32"), (p - 1).astype("float32"), np.ones(2))
    np.testing.assert_array_equal(loss, exact)


# --- reference cases ---------------------------------------------------------------------------

AGGREGATIONS = {
    "token_mean": lambda p: token_mean,
    "seq_mean_token_mean": lambda p: partial(sequence_mean, count_empty=p["empty_rows"] == "count"),
    "seq_mean_token_sum": lambda p: partial(
        sequence_mean, token_sum=True, count_empty=p["empty_rows"] == "count"
    ),
    "seq_mean_token_const": lambda p: partial(constant_norm, max_length=p["max_len"]),
    "token_sum_const": lambda p: partial(constant_norm, max_length=p["max_len"], denominator=1),
    "group_token_mean": lambda p: partial(token_mean, group_axis=0),
}
POLICY_CASES = load_cases("group_losses", "policy_loss", "policy_loss_grouped")
BOTH = pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])


def case_id(case: dict) -> str:
    return case["id"]


def full(advantages: jax.Array, like: jax.Array) -> jax.Array:
    return advantages if advantages.ndim == like.ndim else advantages[..., None] + 0 * like


def case_weights(case: dict, old: jax.Array, mask: np.ndarray) -> jax.Array:
    params, (sampler,) = case["params"], arrays(case, "sampler_logp")
    bounds = {"max_weight": params["w_max"], "min_weight": params["w_min"] or 0.0}
    if params["tis"] == "sequence_geo_mask":  # a filter: no weights inside
        kept = sequence_importance_weights(
            old, sampler, mask, zero_outside=True, length_normalize=True, **bounds
        )
        return mask * (kept > 0)[:, None].astype(old.dtype)
    return truncated_importance_weights(old, sampler, mask, **bounds)


def composed(case: dict, log_probs: jax.Array) -> jax.Array:
    """A case put together from a per-element loss, a KL estimator and a mean."""
    params = case["params"]
    old, advantages = arrays(case, "old_logp", "advantages")
    mask = np.array(case["inputs"]["mask"])
    advantages = full(advantages, log_probs)
    if params["kind"] == "reinforce":
        per_token = policy_gradient_loss(log_probs, advantages, mask)
    else:
        per_token = clipped_surrogate_loss(
            log_probs,
            old,
            advantages,
            mask,
            clip_epsilon=params["eps_low"],
            clip_epsilon_high=params["eps_high"],
            dual_clip=params.get("dual_clip"),
        )
    if "tis" in params:
        weights = case_weights(case, old, mask)
        assert_close(weights, case["expected"]["weights"], "weights")
        per_token = per_token * weights
    if "kl" in params:
        (ref,) = arrays(case, "ref_logp")
        estimators = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
        if params["kl"] == "k3_is":
            kl = kl_k3_corrected(log_probs, ref, old, mask)
        else:
            kl = estimators[params["kl"]](log_probs, ref, mask)
        per_token = per_token + params["beta"] * kl
    if "groups" in case["inputs"]:
        assert case["inputs"]["groups"] == [0, 0, 1, 1]
        per_token, mask = per_token.reshape(2, 2, -1), mask.reshape(2, 2, -1)
    return AGGREGATIONS[params["aggregation"]](params)(per_token, mask)


@BOTH
@pytest.mark.parametrize("case", POLICY_CASES, ids=case_id)
def test_policy_loss_cases(case: dict, double: bool) -> None:
    with jax.enable_x64(double):
        (log_probs,) = arrays(case, "logp")
        loss, grad = jax.value_and_grad(partial(composed, case))(log_probs)
        assert_close(loss, case["expected"]["loss"], "loss")
        assert_close(grad, case["expected"]["grad_logp"], "gradient")


@BOTH
@pytest.mark.parametrize(
    "case",
    load_cases("group_losses", "gspo_loss", "gspo_token_loss", "sequence_clip_loss"),
    ids=case_id,
)
def test_sequence_ratio_cases(case: dict, double: bool) -> None:
    with jax.enable_x64(double):
        log_probs, old, advantages = arrays(case, "logp", "old_logp", "advantages")
        mask, normalize = np.array(case["inputs"]["mask"]), case["fn"] != "sequence_clip_loss"

        def loss_fn(log_probs: jax.Array, advantages: jax.Array) -> jax.Array:
            per_sequence = sequence_clipped_loss(
                log_probs,
                old,
                advantages,
                mask,
                length_normalize=normalize,
                clip_epsilon=case["params"]["eps_low"],
                clip_epsilon_high=case["params"]["eps_high"],
            )
            assert per_sequence.shape == (4,)
            return masked_mean(per_sequence, mask.any(1))

        for given in (advantages, full(advantages, log_probs)):  # the two forms agree
            loss, grad = jax.value_and_grad(loss_fn)(log_probs, given)
            assert_close(loss, case["expected"]["loss"], "loss")
            assert_close(grad, case["expected"]["grad_logp"], "gradient")
        if "seq_ratio" in case["expected"]:
            ones = jnp.ones(4, log_probs.dtype)
            ratio = -sequence_clipped_loss(log_probs, old, ones, mask, clip_epsilon=np.inf)
            assert_close(ratio, case["expected"]["seq_ratio"], "ratio")


@BOTH
@pytest.mark.parametrize("case", load_cases("group_losses", "cispo_loss"), ids=case_id)
def test_cispo_cases(case: dict, double: bool) -> None:
    with jax.enable_x64(double):
        log_probs, old, advantages = arrays(case, "logp", "old_logp", "advantages")
        mask, params = np.array(case["inputs"]["mask"]), case["params"]

        def loss_fn(log_probs: jax.Array) -> jax.Array:
            per_token = cispo_loss(
                log_probs,
                old,
                full(advantages, log_probs),
                mask,
                max_ratio=params["ratio_max"],
                min_ratio=params["ratio_min"] or 0.0,
            )
            return token_mean(per_token, mask)

        loss, grad = jax.value_and_grad(loss_fn)(log_probs)
        assert_close(loss, case["expected"]["loss"], "loss")
        assert_close(grad, case["expected"]["grad_logp"], "gradient")


@BOTH
@pytest.mark.parametrize("case", load_cases("policy_losses", "policy_gradient_loss"), ids=case_id)
def test_policy_gradient_cases(case: dict, double: bool) -> None:
    """Also E44 (probability term of the gradient) and E45 (mean of products)."""
    with jax.enable_x64(double):
        logits, advantages = arrays(case, "logits", "advantages")
        actions = np.array(case["inputs"]["actions"])
        weights = case["inputs"]["weights"]

        def loss_fn(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
            terms = policy_gradient_loss(token_log_probs(logits, actions), advantages)
            terms = terms if weights is None else terms * jnp.asarray(weights)
            return masked_mean(terms), terms

        (loss, terms), grad = jax.value_and_grad(loss_fn, has_aux=True)(logits)
        assert_close(terms, case["expected"]["terms"], "terms")
        assert_close(loss, case["expected"]["loss"], "loss")
        assert_close(grad, case["expected"]["grad_logits"], "gradient")


@BOTH
@pytest.mark.parametrize("case", load_cases("policy_losses", "ppo_clip_loss"), ids=case_id)
def test_ppo_cases(case: dict, double: bool) -> None:
    with jax.enable_x64(double):
        log_probs, old, advantages = arrays(case, "new_log_prob", "old_log_prob", "advantages")
        mask = case["inputs"]["mask"]
        mask = None if mask is None else np.array(mask)

        def loss_fn(log_probs: jax.Array) -> tuple[jax.Array, jax.Array]:
            terms = clipped_surrogate_loss(
                log_probs, old, advantages, mask, clip_epsilon=case["params"]["clip_eps"]
            )
            return masked_mean(terms, mask), terms

        (loss, terms), grad = jax.value_and_grad(loss_fn, has_aux=True)(log_probs)
        assert_close(terms, case["expected"]["terms"], "terms")
        assert_close(loss, case["expected"]["loss"], "loss")
        assert_close(grad, case["expected"]["grad_log_prob"], "gradient")


@BOTH
def test_ppo_categorical_case(double: bool) -> None:
    (case,) = load_cases("policy_losses", "ppo_clip_loss_categorical")
    with jax.enable_x64(double):
        logits, old, advantages = arrays(case, "logits", "old_log_prob", "advantages")
        actions = np.array(case["inputs"]["actions"])

        def loss_fn(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
            terms = clipped_surrogate_loss(token_log_probs(logits, actions), old, advantages)
            return masked_mean(terms), terms

        (loss, terms), grad = jax.value_and_grad(loss_fn, has_aux=True)(logits)
        assert_close(terms, case["expected"]["terms"], "terms")
        assert_close(loss, case["expected"]["loss"], "loss")
        assert_close(grad, case["expected"]["grad_logits"], "gradient")


@BOTH
@pytest.mark.parametrize("case", load_cases("policy_losses", "clipped_value_loss"), ids=case_id)
def test_clipped_value_cases(case: dict, double: bool) -> None:
    """Also E49 (the larger of the two)."""
    with jax.enable_x64(double):
        values, old, targets = arrays(case, "values", "old_values", "targets")

        def loss_fn(values: jax.Array) -> tuple[jax.Array, jax.Array]:
            epsilon = case["params"]["clip_eps"]
            terms = clipped_value_loss(values, old, targets, clip_epsilon=epsilon)
            return masked_mean(terms), terms

        (loss, terms), grad = jax.value_and_grad(loss_fn, has_aux=True)(values)
        assert_close(terms, case["expected"]["terms"], "terms")
        assert_close(loss, case["expected"]["loss"], "loss")
        assert_close(grad, case["expected"]["grad_values"], "gradient")


@BOTH
def test_token_log_prob_case(double: bool) -> None:
    (case,) = load_cases("group_losses", "token_logp")
    with jax.enable_x64(double):
        (logits,) = arrays(case, "logits")
        result = token_log_probs(logits, np.array(case["inputs"]["ids"]), **case["params"])
        assert_close(result, case["expected"]["logp"])


# --- identities and faults ---------------------------------------------------------------------


def test_at_ratio_one_every_gradient_is_the_policy_gradient() -> None:
    log_probs, advantages = sample(2, seed=3)
    advantages[0, 0] = 0.0
    want = jax.grad(lambda p: jnp.sum(policy_gradient_loss(p, advantages)))(log_probs)
    fns = [*list(RATIO_LOSSES.values())[:5], partial(clipped_surrogate_loss, clip_epsilon=0.0)]
    for fn in fns:
        grad = jax.grad(lambda p, fn=fn: jnp.sum(fn(p, log_probs, advantages)))(log_probs)
        np.testing.assert_allclose(grad, want, rtol=1e-6)


def test_r27_value_clip_is_in_units_of_the_value() -> None:
    fn = partial(clipped_value_loss, old_values=0.0, targets=100.0, clip_epsilon=0.2)
    value, grad = jax.value_and_grad(lambda v: 2 * fn(v))(50.0)
    assert_close(value, 9960.04)
    assert grad == 0
    assert_close(jax.grad(squared_value_loss)(50.0, 100.0), -50.0)  # the default elsewhere


def test_g03_padding_does_not_overflow() -> None:
    log_ratio, mask = jnp.array([0.0, 0.0, 100.0]), np.array([1, 1, 0])

    def loss_fn(x: jax.Array) -> jax.Array:
        return token_mean(clipped_surrogate_loss(x, jnp.zeros(3), jnp.ones(3), mask), mask)

    loss, grad = jax.value_and_grad(loss_fn)(log_ratio)
    assert loss == -1
    np.testing.assert_array_equal(grad, [-0.5, -0.5, 0])


def test_g05_a_sequence_ratio_is_bounded() -> None:
    p, old = jnp.full((1, 3), 800.0), jnp.zeros((1, 3))
    for advantages in (jnp.array([-1.0]), jnp.full((1, 3), -1.0)):
        fn = partial(sequence_clipped_loss, old_log_probs=old, clip_epsilon=0.2)
        loss, pullback = jax.vjp(lambda p, A=advantages, fn=fn: fn(p, advantages=A), p)
        np.testing.assert_allclose(loss, [4.851652e08], rtol=1e-6)
        np.testing.assert_array_equal(pullback(jnp.ones(1))[0], np.zeros((1, 3)))


def test_g15_one_ratio_a_token() -> None:
    log_ratios = np.log(np.float32([1.1, 0.9, 1.5]))
    loss = clipped_surrogate_loss(log_ratios, np.zeros(3), np.ones(3))
    assert_close(-token_mean(loss), 1.066667)


def test_g37_dual_clip_leaves_positive_advantages_alone() -> None:
    loss = partial(clipped_surrogate_loss, old_log_probs=0.0, dual_clip=3.0)
    assert_close(loss(np.log(np.float32(1.1)), advantages=1.0), -1.1)
    assert_close(loss(np.log(np.float32(7.0)), advantages=-1.0), 3.0)
    assert_close(loss(np.log(np.float32(2.0)), advantages=-1.0), 2.0)


def test_g39_cispo_bound_is_a_cap_on_the_ratio() -> None:
    loss = cispo_loss(-2.0, -2.0 - np.log(np.float32(6.0)), 1.0, max_ratio=5.0)
    assert_close(loss, 10.0)


def test_g45_the_product_of_ratios_grows_with_length_the_geometric_mean_does_not() -> None:
    old, sampler = np.full((1, 100), -1.0), np.full((1, 100), -1.012)
    weights = partial(sequence_importance_weights, old, sampler)
    assert_close(weights(max_weight=10.0), [3.320117])
    assert weights(max_weight=3.0, zero_outside=True) == 0
    assert_close(weights(max_weight=3.0, zero_outside=True, length_normalize=True), [1.012072])


def test_g47_a_sequence_without_a_token_weighs_nothing() -> None:
    p, mask = np.zeros((1, 3)), np.zeros((1, 3), bool)
    assert sequence_importance_weights(p, p, mask, max_weight=2.0) == 0
    np.testing.assert_array_equal(truncated_importance_weights(p, p, mask, max_weight=2.0), p)
    assert sequence_clipped_loss(p, p, np.array([2.0]), mask) == 0


def test_g51_old_log_probs_are_those_of_the_start_of_the_update() -> None:
    """A second update on the same batch: new -0.5, old -1."""
    loss, grad = jax.value_and_grad(clipped_surrogate_loss)(-0.5, -1.0, 1.0)
    assert_close(loss, -1.2)
    assert grad == 0


def test_g33_the_temperature_is_inside_the_softmax() -> None:
    logits = np.array([2.0, 0.0])
    assert_close(token_log_probs(logits, np.int32(0), temperature=0.5), -0.01814993)


def test_g53_logits_at_t_score_the_token_after_it() -> None:
    logits = np.array([[[5.0, 0], [0, 5], [5, 0]]])
    ids = np.array([[0, 1, 0]])
    assert_close(token_log_probs(logits[:, :-1], ids[:, 1:]), [[-5.006715, -5.006715]])


# --- importance weights, off-policy mask, log-probabilities ------------------------------------


def test_zero_outside_drops_and_keeps() -> None:
    old = np.log(np.float32([[0.2, 0.3, 0.4, 0.1]]))
    sampler = np.log(np.float32([[0.4, 0.1, 0.4, 0.4]]))
    weights = partial(truncated_importance_weights, old, sampler, max_weight=2.0, min_weight=0.4)
    assert_close(weights(), [[0.5, 2.0, 1.0, 0.4]])
    assert_close(weights(zero_outside=True), [[0.5, 0.0, 1.0, 0.0]])
    mask = np.array([[1, 1, 1, 0]])
    whole = partial(sequence_importance_weights, old, sampler, mask, max_weight=2.0)
    assert_close(whole(), [1.5])  # 0.5 × 3 × 1
    assert_close(whole(axis=1, length_normalize=True), [1.5 ** (1 / 3)])
    assert_close(whole(min_weight=1.8), [1.8])
    # a product far beyond float32 is one exp of a clipped sum
    far = sequence_importance_weights(np.zeros((1, 9)), np.full((1, 9), -50.0), max_weight=2.0)
    assert far == 2.0


def test_off_policy_sequence_mask() -> None:
    old = np.zeros((4, 3), np.float32)
    p = old - np.float32([[1.5], [1.5], [0.5], [9.0]])
    mask = np.array([[1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0]])
    p[0, 2], mask[0, 2] = np.nan, 0
    A = np.float32([-1, 1, -1, np.nan])
    keep = jax.jit(partial(off_policy_sequence_mask, threshold=1.0))(p, old, A, mask)
    np.testing.assert_array_equal(keep, [False, True, True, True])
    per_token = np.float32([[-1, 1, -1]] * 4)
    keep = off_policy_sequence_mask(p, old, per_token, mask, threshold=1.0)
    np.testing.assert_array_equal(keep[0], [False, True, True])
    np.testing.assert_array_equal(keep[2], [True, True, True])


def test_token_log_probs_with_forbidden_tokens_masks_and_bad_ids() -> None:
    logits = np.float32([[0.0, -np.inf, 1.0], [-np.inf] * 3, [np.nan] * 3, [1.0, 2.0, 3.0]])
    ids, mask = np.array([2, -100, 7, 1]), np.array([1, 0, 0, 1])

    def loss_fn(z: jax.Array) -> jax.Array:
        return jnp.sum(token_log_probs(z, ids, mask))

    result = token_log_probs(logits, ids, mask)
    grad = jax.grad(loss_fn)(logits)
    softmax = np.exp([1.0, 2, 3]) / np.exp([1.0, 2, 3]).sum()
    assert_close(result, [-np.log(1 + np.exp(-1.0)), 0, 0, np.log(softmax[1])])
    assert_close(grad[0], [-1 / (1 + np.e), 0.0, 1 / (1 + np.e)])
    assert_close(grad[3], np.array([0, 1, 0]) - softmax)
    np.testing.assert_array_equal(grad[1:3], np.zeros((2, 3)))
    assert token_log_probs(logits[0], 1) == -np.inf  # forbidden, and said so
    assert np.all(np.isnan(token_log_probs(logits[[3, 3, 3]], np.array([-1, -100, 3]))))
    assert token_log_probs(jnp.zeros((2, 4), "bfloat16"), np.zeros(2, int)).dtype == "float32"


# --- bad input ---------------------------------------------------------------------------------


def test_bad_shapes() -> None:
    two, three = np.zeros((2, 5)), np.zeros((3, 5))
    with pytest.raises(ValueError, match=r"log_probs \(2, 5\), advantages \(3, 5\)"):
        policy_gradient_loss(two, three)
    with pytest.raises(ValueError, match=r"old_log_probs \(3, 5\)"):
        clipped_surrogate_loss(two, three, two)
    with pytest.raises(ValueError, match=r"advantages \(2,\)"):
        clipped_surrogate_loss(two, two, np.zeros(2))  # element-wise losses do not broadcast
    with pytest.raises(ValueError, match="mask has shape"):
        squared_value_loss(two, two, np.ones(2))
    with pytest.raises(ValueError, match=r"advantages has shape \(5,\).*or \(2,\)"):
        sequence_clipped_loss(two, two, np.zeros(5))
    with pytest.raises(ValueError, match="axis=2"):
        sequence_clipped_loss(two, two, np.zeros(2), axis=2)
    with pytest.raises(ValueError, match=r"token_ids \(2,\).*logits \(2, 5, 7\)"):
        token_log_probs(np.zeros((2, 5, 7)), np.zeros(2, int))


def test_bad_settings() -> None:
    x = np.zeros(2)
    with pytest.raises(ValueError, match=r"dual_clip must lie in \(1, inf\], got 1"):
        clipped_surrogate_loss(x, x, x, dual_clip=1.0)
    with pytest.raises(ValueError, match="clip_epsilon must lie in"):
        clipped_surrogate_loss(x, x, x, clip_epsilon=-0.1)
    with pytest.raises(ValueError, match="clip_epsilon_high must lie in"):
        clipped_surrogate_loss(x, x, x, clip_epsilon_high=np.nan)
    with pytest.raises(ValueError, match=r"clip_epsilon must be a scalar, got shape \(2,\)"):
        clipped_surrogate_loss(x, x, x, clip_epsilon=np.full(2, 0.2))
    with pytest.raises(ValueError, match=r"min_ratio=2\.0 is larger than max_ratio=1\.5"):
        cispo_loss(x, x, x, max_ratio=1.5, min_ratio=2.0)
    with pytest.raises(ValueError, match="max_weight must lie in"):
        truncated_importance_weights(x, x, max_weight=0.0)
    with pytest.raises(ValueError, match="temperature_negative must lie in"):
        soft_gated_loss(x, x, x, temperature_negative=0.0)
    with pytest.raises(ValueError, match="max_log_ratio must lie in"):
        geometric_mean_loss(x, x, 1.0, max_log_ratio=-1.0)
    with pytest.raises(ValueError, match="temperature must lie in"):
        token_log_probs(np.zeros((2, 3)), np.zeros(2, int), temperature=0.0)
    with pytest.raises(ValueError, match="threshold must lie in"):
        off_policy_sequence_mask(x, x, 1.0, threshold=np.nan)
    with pytest.raises(TypeError, match="token_ids must be integers"):
        token_log_probs(np.zeros((2, 3)), np.zeros(2))
    with pytest.raises(TypeError, match="advantages must be an array of real numbers"):
        policy_gradient_loss(x, "A")


def test_settings_may_be_traced_and_swept() -> None:
    p, old, A = (x.astype(np.float32) for x in sample(3))
    settings = np.float32([0.1, 0.2])
    swept = jax.vmap(lambda e, c: clipped_surrogate_loss(p, old, A, clip_epsilon=e, dual_clip=c))
    result = swept(settings, np.float32([2.0, 3.0]))
    for got, epsilon, dual in zip(result, settings, [2.0, 3.0], strict=True):
        one = clipped_surrogate_loss(p, old, A, clip_epsilon=epsilon, dual_clip=dual)
        np.testing.assert_allclose(got, one, rtol=1e-6)
    jitted = jax.jit(lambda low, high: cispo_loss(p, old, A, max_ratio=high, min_ratio=low))
    np.testing.assert_allclose(
        jitted(0.5, 1.5), cispo_loss(p, old, A, max_ratio=1.5, min_ratio=0.5), rtol=1e-6
    )


def test_weights_masks_and_log_probs_eager_jitted_and_vmapped(variant: Callable) -> None:
    """With NaN and inf under the mask, by definition."""
    old, sampler, p = (x.astype(np.float32) for x in sample(3, seed=5))
    A = np.float32([1, -1, -1, -1])
    poison = np.resize(np.array([np.nan, np.inf, -np.inf], np.float32), old.shape)
    bad = [np.where(ROW_MASK, x, poison) for x in (old, sampler, p)]
    d = (np.float64(old) - sampler)[:, 1:]
    weights = partial(sequence_importance_weights, max_weight=1.5, min_weight=0.5)
    result = variant(lambda a, b, m: weights(a, b, m))(*bad[:2], ROW_MASK)
    assert_close(result, np.clip(np.exp(d.sum(1)), 0.5, 1.5))
    result = variant(lambda a, b, m: weights(a, b, m, length_normalize=True))(*bad[:2], ROW_MASK)
    assert_close(result, np.clip(np.exp(d.mean(1)), 0.5, 1.5))
    keep = variant(lambda *x: off_policy_sequence_mask(*x, threshold=0.1))(
        bad[2], bad[0], A, ROW_MASK
    )
    np.testing.assert_array_equal(keep, ~((A < 0) & ((old - p)[:, 1:].mean(1) > 0.1)))
    ids = np.array([0, 4, 2, 3])
    result = variant(lambda z, i: token_log_probs(z, i, temperature=2.0))(old, ids)
    z = np.float64(old) / 2
    assert_close(result, z[np.arange(4), ids] - np.log(np.exp(z).sum(1)))
