"""Means: definitions, denominators that add up, empty masks, faults."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases_loader import arrays, assert_close, load_cases

from jaxpg.reductions import constant_norm, masked_mean, sequence_mean, token_mean

REDUCTIONS = {
    "token_mean": token_mean,
    "group_token_mean": partial(token_mean, group_axis=0),
    "sequence_mean": sequence_mean,
    "sequence_mean_counting_empty": partial(sequence_mean, count_empty=True),
    "sequence_mean_of_sums": partial(sequence_mean, token_sum=True),
    "constant_norm": partial(constant_norm, max_length=7),
    "masked_mean": masked_mean,
}


def by_definition(name: str, x: np.ndarray, mask: np.ndarray) -> float:
    """Loops, over ``[P, G, T]``."""
    P, G, T = x.shape
    rows = [
        ([x[p, g, t] for t in range(T) if mask[p, g, t]], p) for p in range(P) for g in range(G)
    ]
    tokens = [v for row, _ in rows for v in row]
    if name in ("token_mean", "masked_mean"):
        return sum(tokens) / max(len(tokens), 1)
    if name == "constant_norm":
        return sum(tokens) / (P * G * 7)
    if name == "group_token_mean":
        groups = [[v for row, q in rows if q == p for v in row] for p in range(P)]
        means = [sum(group) / len(group) for group in groups if group]
        return sum(means) / max(len(means), 1)
    reduce = sum if name == "sequence_mean_of_sums" else lambda row: sum(row) / max(len(row), 1)
    kept = [row for row, _ in rows if row or name == "sequence_mean_counting_empty"]
    return sum(reduce(row) for row in kept) / max(len(kept), 1)


@pytest.fixture
def batch() -> tuple[np.ndarray, np.ndarray]:
    """``[3, 4, 5]``; one sequence and one whole group have no valid token, one mask has a hole."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 6, (3, 4))
    lengths[0, 1] = 0
    lengths[2] = 0
    mask = np.arange(5) < lengths[..., None]
    mask[1, 0, 0] = False
    return rng.normal(size=(3, 4, 5)).astype(np.float32), mask


@pytest.mark.parametrize("name", REDUCTIONS)
def test_definitions(name: str, batch: tuple, variant: Callable) -> None:
    assert_close(variant(REDUCTIONS[name])(*batch), by_definition(name, *batch))
    x = batch[0]
    assert_close(variant(REDUCTIONS[name])(x), by_definition(name, x, np.ones_like(x)), "no mask")


@pytest.mark.parametrize("name", REDUCTIONS)
def test_parts_add_up_to_the_whole(name: str, batch: tuple) -> None:
    """Value and gradient, with the count of the whole batch as the denominator of each part."""
    x, mask = batch
    sequences = mask.any(-1)
    count = {
        "token_mean": mask.sum(),
        "masked_mean": mask.sum(),
        "group_token_mean": sequences.any(-1).sum(),
        "sequence_mean": sequences.sum(),
        "sequence_mean_of_sums": sequences.sum(),
    }.get(name, sequences.size)
    reduce = REDUCTIONS[name]
    whole, whole_grad = jax.value_and_grad(reduce)(x, mask)
    # uneven parts; groups must not be torn apart where groups count
    cuts = [1, 2] if name == "group_token_mean" else [1, 5, 9]
    x, mask = (x, mask) if name == "group_token_mean" else (x.reshape(12, 5), mask.reshape(12, 5))
    parts = [
        jax.value_and_grad(partial(reduce, denominator=count))(part, part_mask)
        for part, part_mask in zip(np.split(x, cuts), np.split(mask, cuts), strict=True)
    ]
    np.testing.assert_allclose(sum(value for value, _ in parts), whole, rtol=1e-6, atol=1e-7)
    grad = np.concatenate([grad for _, grad in parts]).reshape(whole_grad.shape)
    np.testing.assert_allclose(grad, whole_grad, rtol=1e-6)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_nan_and_inf_under_the_mask(name: str, batch: tuple) -> None:
    x, mask = batch
    fn = jax.jit(jax.value_and_grad(REDUCTIONS[name]))
    bad = np.where(mask, x, np.resize([np.nan, np.inf, -np.inf], x.shape)).astype(np.float32)
    for clean, poisoned in zip(fn(x, mask), fn(bad, mask), strict=True):
        np.testing.assert_array_equal(clean, poisoned)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_g01_an_empty_mask_gives_zero_and_a_zero_gradient(name: str) -> None:
    x = jnp.array([[[1.0, 2.0]]])
    for denominator in (None, 0):  # the count of an empty whole batch is 0 as well
        reduce = partial(REDUCTIONS[name], denominator=denominator)
        value, grad = jax.value_and_grad(reduce)(x, np.zeros((1, 1, 2)))
        assert value == 0
        np.testing.assert_array_equal(grad, np.zeros((1, 1, 2)))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_dtypes(name: str, x64: None) -> None:
    for given, result in [("bfloat16", "float32"), ("int32", "float32"), ("float64", "float64")]:
        assert REDUCTIONS[name](jnp.ones((2, 2, 2), given)).dtype == result
    assert REDUCTIONS[name](np.ones((2, 2, 2), bool)).dtype == "float32"
    # sums are not taken in bfloat16, which has 8 bits
    many = jnp.full((1, 1, 1000), 1.015625, "bfloat16")
    assert_close(token_mean(many), 1.015625)


def test_aggregation_case() -> None:
    (case,) = load_cases("group_losses", "aggregate")
    for double in (False, True):
        with jax.enable_x64(double):
            (x,) = arrays(case, "per_token")
            value, grad = jax.value_and_grad(sequence_mean)(x, np.array(case["inputs"]["mask"]))
            assert_close(value, case["expected"]["loss"])
            assert_close(grad, case["expected"]["weights"])


def test_r31_denominators() -> None:
    x = np.array([[1.0, 1, 1, 1], [5, 99, 99, 99]])
    mask = np.array([[1, 1, 1, 1], [1, 0, 0, 0]])
    assert_close(token_mean(x, mask), 1.8)
    assert_close(sequence_mean(x, mask), 3.0)
    assert_close(constant_norm(x, mask, max_length=4), 1.125)


def test_g07_what_leaves_the_mask_leaves_the_denominator() -> None:
    mask = np.zeros((2, 6))
    mask[0, :2] = 1  # row 1 was truncated and is masked out
    assert_close(token_mean(np.full((2, 6), -1.0), mask), -1.0)


def test_g09_the_denominator_of_one_optimizer_step() -> None:
    """Two micro-batches of 10 tokens make one step; a generation batch has four of them."""
    micro = np.ones((2, 5))
    tokens_of_the_step = 2 * micro.size
    assert_close(sum(token_mean(micro, denominator=tokens_of_the_step) for _ in range(2)), 1.0)


def test_g11_a_constant_length_does_not_forget_the_batch() -> None:
    assert_close(constant_norm(np.ones((4, 8)), max_length=8), 1.0)
    # and the sum over one constant alone, where that is wanted
    assert_close(constant_norm(np.ones((4, 8)), max_length=8, denominator=1), 4.0)


def test_g17_a_metric_over_shards() -> None:
    shards = [np.full(4, 0.2), np.ones(1)]
    assert_close(sum(masked_mean(shard, denominator=5) for shard in shards), 0.36)


def test_g61_a_kl_metric_is_not_divided_by_the_padded_width() -> None:
    assert_close(masked_mean(np.array([[1.0, 1, 0, 0]]), np.array([[1, 1, 0, 0]])), 1.0)


def test_g63_mean_over_groups_or_over_samples() -> None:
    x = np.array([[1.0, 1, 0, 0], [4, 4, 4, 4]])
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 1]])
    assert_close(token_mean(x, mask, group_axis=0), 2.5)
    assert_close(token_mean(x, mask), 3.0)


def test_axes() -> None:
    x = np.arange(24.0).reshape(2, 3, 4)
    mask = x % 5 != 0
    assert_close(masked_mean(x, axis=1), x.mean(1))
    assert_close(masked_mean(x, mask, axis=(0, -1)), (x * mask).sum((0, 2)) / mask.sum((0, 2)))
    assert_close(masked_mean(x, axis=-1, denominator=np.full((2, 1), 2.0)), x.sum(-1) / 2)
    for fn in (sequence_mean, partial(constant_norm, max_length=3)):
        moved = fn(np.moveaxis(x, -1, 0), np.moveaxis(mask, -1, 0), axis=0)
        np.testing.assert_allclose(moved, fn(x, mask), rtol=1e-6)
    both = token_mean(x, mask, group_axis=(0, 1))  # every row is a group
    assert_close(both, (((x * mask).sum(-1)) / mask.sum(-1)).mean())
    assert_close(token_mean(x[0], group_axis=-1), x[0].mean())


def test_settings_may_be_traced() -> None:
    x = np.ones((2, 4), np.float32)
    fn = jax.vmap(lambda n: constant_norm(x, max_length=n))
    np.testing.assert_allclose(fn(np.array([4.0, 8.0])), [1.0, 0.5])
    fn = jax.jit(lambda n: token_mean(x, denominator=n))
    np.testing.assert_allclose([fn(16), fn(0)], [0.5, 8.0])


def test_bad_input() -> None:
    x = np.ones((2, 3))
    with pytest.raises(ValueError, match=r"mask has shape \(2,\).*\(2, 3\)"):
        token_mean(x, np.ones(2))
    with pytest.raises(ValueError, match="axis=2 is no axis of an array of rank 2"):
        sequence_mean(x, axis=2)
    with pytest.raises(ValueError, match="group_axis=-3"):
        token_mean(x, group_axis=-3)
    with pytest.raises(ValueError, match=r"denominator must lie in \[0, inf\], got -1"):
        masked_mean(x, denominator=-1)
    with pytest.raises(ValueError, match="denominator must lie in"):
        token_mean(x, group_axis=0, denominator=np.nan)
    with pytest.raises(ValueError, match=r"denominator has shape \(5,\)"):
        masked_mean(x, axis=1, denominator=np.ones(5))
    with pytest.raises(ValueError, match="max_length must lie in"):
        constant_norm(x, max_length=0)
    with pytest.raises(TypeError, match="x must be an array of real numbers"):
        masked_mean("abc")
