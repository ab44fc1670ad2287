"""Advantages within groups and over tokens: values, identities, known faults, gradients."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.test_util import check_grads
from reference import case_ids, close, load_cases

from jaxpg.advantages import (
    batch_std_group_advantages,
    group_advantages,
    leave_one_out_advantages,
    normalize,
    process_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    segment_group_advantages,
)

NAN = float("nan")
# jitted once: the settings are traced, so one shape compiles once for all its cases
jit_group = jax.jit(group_advantages, static_argnames=("axis", "normalize_std"))
jit_segment = jax.jit(segment_group_advantages, static_argnames=("num_groups", "normalize_std"))
jit_leave_one_out = jax.jit(leave_one_out_advantages, static_argnames="axis")
jit_batch_std = jax.jit(batch_std_group_advantages, static_argnames="axis")
jit_process = jax.jit(process_advantages, static_argnames="num_tokens")
jit_reinforce_pp = jax.jit(reinforce_pp_advantages, static_argnames=("axis", "variance_floor"))
jit_baseline = jax.jit(reinforce_pp_baseline_advantages, static_argnames="variance_floor")


@pytest.mark.parametrize("doubles", [False, True])
@pytest.mark.parametrize(
    "case", **case_ids(load_cases("estimators.json", "groups", "group_advantages"))
)
def test_group_case(case: dict, doubles: bool) -> None:
    params = {k: v for k, v in case["params"].items() if k != "scale"}
    params["normalize_std"] = case["params"]["scale"] == "std"
    tol = 1e-8 if doubles else 1e-5
    with jax.enable_x64(doubles):
        rewards = jnp.asarray(case["inputs"]["rewards"])
        ids = jnp.asarray(case["inputs"]["groups"])
        expected = case["expected"]["advantages"]
        close(jit_segment(rewards, ids, num_groups=2, **params), expected, tol)
        groups = rewards.reshape(len(set(case["inputs"]["groups"])), -1)
        close(jit_group(groups, **params).ravel(), expected, tol)
        close(jit_group(groups.T, axis=0, **params).T.ravel(), expected, tol)


@pytest.mark.parametrize(
    "case", **case_ids(load_cases("estimators.json", "groups", "rloo_advantages"))
)
def test_leave_one_out_case(case: dict) -> None:
    rewards, ids = case["inputs"]["rewards"], case["inputs"]["groups"]
    size = max(ids.count(i) for i in set(ids))
    padded, mask = np.full((len(set(ids)), size), NAN), np.zeros((len(set(ids)), size), bool)
    places = [(i, ids[:k].count(i)) for k, i in enumerate(ids)]
    for place, reward in zip(places, rewards, strict=True):
        padded[place], mask[place] = reward, True
    out = jit_leave_one_out(padded, mask)
    close([out[place] for place in places], case["expected"]["advantages"], 1e-6)


def test_groups_match_their_definition(x64: None) -> None:
    rng = np.random.default_rng(1)
    rewards, mask = rng.normal(size=(6, 5)) + 4, rng.random((6, 5)) < 0.7
    rewards[rng.random((6, 5)) < 0.2] = NAN
    rewards[0], mask[1] = 3.0, False
    mask[2] = [True, False, False, False, False]
    valid = mask & ~np.isnan(rewards)
    for ddof in (0, 1):
        expected = np.stack(
            [
                reference.standardize(r, v, ddof=ddof, eps=0.01)
                for r, v in zip(rewards, valid, strict=True)
            ]
        )
        assert (expected[3:] != 0).any()
        close(jit_group(rewards, mask, ddof=ddof, eps=0.01), expected, 1e-12)
        # the same groups in another order, of other sizes: unmasked samples only, shuffled
        places = rng.permutation(np.argwhere(mask))
        picked = tuple(places.T)
        out = jit_segment(rewards[picked], places[:, 0], num_groups=8, ddof=ddof, eps=0.01)
        close(out, expected[picked], 1e-12)
    loo = np.stack([reference.leave_one_out(r, v) for r, v in zip(rewards, valid, strict=True)])
    close(jit_leave_one_out(rewards, mask), loo, 1e-12)
    # leave-one-out is n/(n − 1) times the distance from the mean
    n = valid.sum(axis=1, keepdims=True)
    centered = jit_group(rewards, mask, normalize_std=False)
    close(centered * (n / np.maximum(n - 1, 1)), loo, 1e-12)
    kept = rewards[valid]
    expected = np.asarray(centered) / (kept.std(ddof=1) + 0.01)
    close(jit_batch_std(rewards, mask, eps=0.01), expected, 1e-12)


def test_group_axis_can_be_any(x64: None) -> None:
    rewards = np.random.default_rng(2).normal(size=(2, 4, 3))
    for fn in (jit_group, jit_leave_one_out, jit_batch_std):
        moved = fn(np.moveaxis(rewards, 1, -1))
        close(np.moveaxis(fn(rewards, axis=1), 1, -1), moved, 1e-12)


def test_groups_read_nothing_that_is_masked_or_unscored() -> None:
    ids = jnp.array([0, 0, 0, 1, 1, 9, -1])
    mask = jnp.array([1, 1, 1, 1, 1, 1, 1])
    weights = jnp.arange(7.0)

    @jax.jit
    def run(rewards: jax.Array, mask: jax.Array) -> list:
        row = rewards[None]
        fns = [
            lambda r: segment_group_advantages(r, ids, mask, num_groups=2),
            lambda r: group_advantages(r[None], mask[None])[0],
            lambda r: leave_one_out_advantages(r[None], mask[None])[0],
            lambda r: batch_std_group_advantages(r[None], mask[None])[0],
            lambda r: process_advantages(row * 0 + r, ids[None], mask[None], num_tokens=7)[0],
        ]
        return [(fn(rewards), jax.grad(lambda r, fn=fn: fn(r) @ weights)(rewards)) for fn in fns]

    clean = run(jnp.array([1.0, 0.0, 5.0, 2.0, 4.0, 0.0, 0.0]), mask.at[2].set(0))
    for bad in (jnp.nan, jnp.inf):
        out = run(jnp.array([1.0, 0.0, bad, 2.0, 4.0, 0.0, 0.0]), mask.at[2].set(0))
        for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(clean), strict=True):
            np.testing.assert_array_equal(a, b)
    # a NaN needs no mask, and out-of-range ids count neither for themselves nor for others
    for unscored, (masked, gradient) in zip(
        run(jnp.array([1.0, 0.0, NAN, 2.0, 4.0, 0.0, 0.0]), mask), clean, strict=True
    ):
        np.testing.assert_allclose(unscored[0], masked, atol=1e-6)
        assert np.isfinite(unscored[1]).all()
        assert unscored[0][2] == 0
        np.testing.assert_allclose(unscored[1], gradient, atol=1e-6)
    np.testing.assert_array_equal(clean[0][0][5:], [0.0, 0.0])


def test_r17_gradients_are_finite_without_spread() -> None:
    weights, ids = jnp.arange(4.0), jnp.array([0, 1, 1, 2])

    @jax.jit
    def gradients(x: jax.Array) -> list[jax.Array]:
        zeros, ones = jnp.zeros((4, 1), int), jnp.ones((4, 1))
        fns = [
            lambda x: group_advantages(x, eps=0.0),
            lambda x: segment_group_advantages(x, ids, num_groups=4, eps=0.0),
            leave_one_out_advantages,
            lambda x: batch_std_group_advantages(x, eps=0.0),
            lambda x: process_advantages(x[:, None], zeros, num_tokens=1, eps=0.0)[:, 0],
            lambda x: reinforce_pp_advantages(x, gamma=0.0, eps=0.0),
            lambda x: reinforce_pp_baseline_advantages(x, ones, eps=0.0)[:, 0],
        ]
        return [jax.grad(lambda x, fn=fn: jnp.sin(fn(x)) @ weights)(x) for fn in fns]

    # equal; equal but not representable; so close that the squares underflow
    for x in ([2.0] * 4, [0.1] * 4, [0.0, 1e-30, 2e-30, 0.0]):
        for gradient in gradients(jnp.array(x)):
            assert np.isfinite(gradient).all()


def test_r29_float32_noise_is_not_spread() -> None:
    @jax.jit
    def run(x: jax.Array, eps: jax.Array) -> list[jax.Array]:
        return [
            group_advantages(x, eps=eps),
            group_advantages(x, normalize_std=False),
            leave_one_out_advantages(x),
            batch_std_group_advantages(x, eps=eps),
        ]

    for value, n in ((0.1, 7), (0.3, 10), (1e6 + 0.1, 11)):
        for eps in (0.0, 1e-9, 1e-4):
            for out in run(jnp.full((n,), value, jnp.float32), jnp.float32(eps)):
                np.testing.assert_array_equal(out, np.zeros(n))


def test_g19_constant_group_is_exactly_zero() -> None:
    rewards = jnp.full((1, 3), 0.9, jnp.float32)
    for eps in (0.0, 1e-9, 1e-8, 1e-6, 1e-4):
        np.testing.assert_array_equal(jit_group(rewards, eps=eps), np.zeros((1, 3)))
        segments = jit_segment(rewards, jnp.zeros((1, 3), int), num_groups=1, eps=eps)
        np.testing.assert_array_equal(segments, np.zeros((1, 3)))


def test_g21_leave_one_out_keeps_every_row_of_a_mixed_group() -> None:
    # the rows without the 1 see a constant baseline group too, and still have an advantage
    out = leave_one_out_advantages([1.0, 0.0, 0.0, 0.0])
    close(out, [1.0, -1 / 3, -1 / 3, -1 / 3], 1e-6)


def test_g27_an_empty_answer_has_no_place_for_its_reward() -> None:
    lengths, rewards = jnp.array([0, 3]), jnp.array([10.0, 0.0])
    np.testing.assert_array_equal(group_advantages(rewards, lengths > 0), [0.0, 0.0])
    tokens = process_advantages(rewards[:, None], lengths[:, None] - 1, num_tokens=3)
    np.testing.assert_array_equal(tokens, np.zeros((2, 3)))


def test_g41_statistics_stay_within_the_group() -> None:
    out = group_advantages([[1.0, 0.0], [10.0, 9.0]], eps=1e-4)
    close(out, [[0.7070068, -0.7070068], [0.7070068, -0.7070068]], 1e-6)


def test_g43_an_id_of_its_own_leaves_no_baseline_and_no_raw_reward() -> None:
    out = segment_group_advantages([1.0, 0.0], [0, 1], num_groups=2)
    np.testing.assert_array_equal(out, [0.0, 0.0])
    out = segment_group_advantages([1.0, 0.0], [0, 1], num_groups=2, normalize_std=False)
    np.testing.assert_array_equal(out, [0.0, 0.0])
    with pytest.raises(ValueError, match=r"at least 2 samples .* got 1 along axis 1"):
        group_advantages([[1.0], [0.0]])


def test_g55_normalised_once() -> None:
    rewards = jnp.array([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    out = segment_group_advantages(rewards, jnp.array([0] * 4 + [1] * 4), num_groups=2)
    a, b = 0.8660239, 0.499999
    close(out, [a, -a, -a, a, -b, -b, -b, 1.499997], 1e-6)


def test_g57_one_definition_for_all_ways_to_give_a_group(x64: None) -> None:
    @jax.jit
    def run(rewards: jax.Array) -> list[jax.Array]:
        column, zeros = rewards[:, None], jnp.zeros((2, 1), int)
        return [
            group_advantages(rewards, eps=1e-6),
            segment_group_advantages(rewards, zeros[:, 0], num_groups=1, eps=1e-6),
            normalize(rewards, ddof=1, eps=1e-6),
            process_advantages(column, zeros, num_tokens=1, eps=1e-6)[:, 0],
            batch_std_group_advantages(rewards, eps=1e-6),
        ]

    for out in run(jnp.array([0.5, 0.5005])):
        close(out, [-0.7051124, 0.7051124], 1e-7)


# --- tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("doubles", [False, True])
@pytest.mark.parametrize(
    "case", **case_ids(load_cases("estimators.json", "groups", "process_advantages"))
)
def test_process_case(case: dict, doubles: bool) -> None:
    inputs = case["inputs"]
    width = max(len(steps) for steps in inputs["step_rewards"])
    rewards = np.array([r + [NAN] * (width - len(r)) for r in inputs["step_rewards"]])
    ends = np.array([e + [0] * (width - len(e)) for e in inputs["step_ends"]])
    mask = ~np.isnan(rewards)
    with jax.enable_x64(doubles):
        out = jit_process(rewards, ends, mask, num_tokens=inputs["width"], **case["params"])
        close(out, case["expected"]["advantages"], 1e-8 if doubles else 1e-5)


def test_process_advantages_match_their_definition(x64: None) -> None:
    rng = np.random.default_rng(3)
    rewards, mask = rng.normal(size=(4, 3, 5)), rng.random((4, 3, 5)) < 0.7
    ends = rng.integers(-2, 9, size=(4, 3, 5))
    expected = np.zeros((4, 3, 7))
    inside = mask & (ends >= 0) & (ends < 7)
    for p in range(4):
        z = reference.standardize(rewards[p], inside[p], eps=1e-3)
        for g, t in np.ndindex(3, 7):
            expected[p, g, t] = sum(z[g, j] for j in range(5) if ends[p, g, j] >= t)
    close(jit_process(rewards, ends, mask, num_tokens=7, eps=1e-3), expected, 1e-12)
    # one step at the last token is outcome supervision
    last = np.full((4, 3, 1), 6)
    outcome = jit_process(rewards[..., :1], last, num_tokens=7)
    close(outcome, np.repeat(jit_group(rewards[..., 0])[..., None], 7, axis=-1), 1e-12)


@pytest.mark.parametrize("doubles", [False, True])
@pytest.mark.parametrize(
    "case", **case_ids(load_cases("estimators.json", "groups", "reinforce_pp_advantages"))
)
def test_reinforce_pp_case(case: dict, doubles: bool) -> None:
    params = dict(case["params"])
    floor = {"var_floor": True, "var_plus_eps": False}[params.pop("style")]
    with jax.enable_x64(doubles):
        rewards = jnp.asarray(case["inputs"]["token_rewards"])
        mask = jnp.asarray(case["inputs"]["mask"])
        out = jit_reinforce_pp(rewards, mask, variance_floor=floor, **params)
        close(out, case["expected"]["advantages"], 1e-8 if doubles else 1e-5)


def test_reinforce_pp_matches_its_definition(x64: None) -> None:
    rng = np.random.default_rng(4)
    rewards, mask = rng.normal(size=(4, 6)), rng.random((4, 6)) < 0.7
    to_go = reference.rewards_to_go(rewards, mask, 0.9)
    kept = to_go[mask]
    for floor, scale in ((False, np.sqrt(kept.var() + 0.1)), (True, max(kept.std(), 2.0**0.5))):
        expected = np.where(mask, (to_go - kept.mean()) / scale, 0)
        kwargs = {"gamma": 0.9, "ddof": 0, "eps": 2.0 if floor else 0.1, "variance_floor": floor}
        close(jit_reinforce_pp(np.where(mask, rewards, NAN), mask, **kwargs), expected, 1e-12)
        close(jit_reinforce_pp(rewards.T, mask.T, axis=0, **kwargs).T, expected, 1e-12)
    # three axes, whitened together
    stacked = jit_reinforce_pp(np.stack([rewards, rewards]), np.stack([mask, mask]), **kwargs)
    close(stacked, np.stack([expected, expected]), 1e-12)


def test_reinforce_pp_baseline_matches_its_definition(x64: None) -> None:
    rng = np.random.default_rng(5)
    rewards, mask = rng.normal(size=(3, 4)), rng.random((3, 4, 5)) < 0.7
    rewards[0, 1], mask[1, 2] = NAN, False
    centered = rewards - np.nanmean(rewards, axis=1, keepdims=True)
    spread = np.broadcast_to(centered[..., None], mask.shape)
    valid = mask & ~np.isnan(spread)
    for floor, eps in ((False, 0.1), (True, 3.0)):
        variance = spread[valid].var(ddof=1)
        scale = np.sqrt(max(variance, eps) if floor else variance + eps)
        expected = np.where(valid, (spread - spread[valid].mean()) / scale, 0)
        out = jit_baseline(rewards, mask, eps=eps, variance_floor=floor)
        close(out, expected, 1e-12)


def test_nan_under_the_token_mask_changes_nothing() -> None:
    mask = jnp.array([[1, 0, 1], [1, 1, 0]])

    @jax.jit
    def run(rewards: jax.Array) -> tuple:
        fn = lambda r: reinforce_pp_advantages(r, mask, gamma=0.5)  # noqa: E731
        return fn(rewards), jax.grad(lambda r: jnp.sum(jnp.sin(fn(r))))(rewards)

    clean = run(jnp.array([[1.0, 0.0, 2.0], [3.0, 5.0, 0.0]]))
    for bad in (jnp.nan, jnp.inf):
        out = run(jnp.array([[1.0, bad, 2.0], [3.0, 5.0, bad]]))
        for a, b in zip(out, clean, strict=True):
            assert np.isfinite(a).all()
            np.testing.assert_array_equal(a, b)


# --- ways to call, dtypes, gradients ----------------------------------------------------------

IDS = jnp.array([0, 1, 1, 0])
ENDS = jnp.array([[0], [2], [1], [2]])
TOKENS = jnp.array([[1, 1], [1, 0], [0, 1], [1, 1]])
ONE_ARRAY: dict[str, Callable] = {
    "group_advantages": group_advantages,
    "segment_group_advantages": lambda x: segment_group_advantages(x, IDS, num_groups=2),
    "leave_one_out_advantages": leave_one_out_advantages,
    "batch_std_group_advantages": batch_std_group_advantages,
    "process_advantages": lambda x: process_advantages(x[:, None], ENDS, num_tokens=3),
    "reinforce_pp_advantages": lambda x: reinforce_pp_advantages(x, gamma=0.5),
    "reinforce_pp_baseline_advantages": lambda x: reinforce_pp_baseline_advantages(x, TOKENS),
}


@pytest.mark.parametrize("name", list(ONE_ARRAY))
def test_eager_jit_and_vmap_agree(name: str) -> None:
    fn = ONE_ARRAY[name]
    batch = jnp.array([[3.0, 1.0, 4.0, 1.0], [2.0, 7.0, 1.0, 8.0]])
    jitted = jax.jit(fn)
    close(fn(batch[0]), jitted(batch[0]), 1e-6)
    close(jax.vmap(jitted)(batch), np.stack([jitted(batch[0]), jitted(batch[1])]), 1e-6)


@pytest.mark.parametrize("name", list(ONE_ARRAY))
def test_r49_dtypes(name: str) -> None:
    fn = jax.jit(ONE_ARRAY[name])
    numbers = np.array([1, 0, 1, 3])
    expected = np.asarray(fn(jnp.asarray(numbers, jnp.float32)))
    for dtype in (jnp.bfloat16, jnp.int32, jnp.uint8):
        out = fn(jnp.asarray(numbers, dtype))
        assert out.dtype == jnp.float32
        close(out, expected, 1e-6, str(dtype))
    with jax.enable_x64(True):
        fn = jax.jit(ONE_ARRAY[name])
        for dtype in (jnp.float32, jnp.float64):
            out = fn(jnp.asarray(numbers, dtype))
            assert out.dtype == dtype
            close(out, expected, 1e-5)


@pytest.mark.parametrize("name", list(ONE_ARRAY))
def test_gradients(name: str, x64: None) -> None:
    x = jnp.array([0.3, 1.7, -0.4, 0.9])
    check_grads(jax.jit(ONE_ARRAY[name]), (x,), order=1, modes=("fwd", "rev"))


def test_errors_of_groups_and_tokens() -> None:
    x = jnp.ones((3, 2))
    with pytest.raises(ValueError, match="ddof must lie in"):
        group_advantages(x, ddof=-1)
    for fn in (group_advantages, leave_one_out_advantages, batch_std_group_advantages):
        with pytest.raises(ValueError, match=r"at least 2 samples .* got 1 along axis 1"):
            fn(jnp.ones((3, 1)))
        with pytest.raises(ValueError, match="axis=-3 is no axis"):
            fn(x, axis=-3)
    with pytest.raises(TypeError, match="group_ids must be integers, got dtype float32"):
        segment_group_advantages(x, x, num_groups=2)
    with pytest.raises(ValueError, match=r"rewards \(3, 2\), group_ids \(3,\)"):
        segment_group_advantages(x, jnp.zeros(3, int), num_groups=2)
    with pytest.raises(ValueError, match="num_groups must be at least 1, got 0"):
        segment_group_advantages(x, jnp.zeros((3, 2), int), num_groups=0)
    with pytest.raises(TypeError, match="step_ends must be integers"):
        process_advantages(x, x, num_tokens=2)
    with pytest.raises(ValueError, match=r"step_rewards must be \[..., G, S\]"):
        process_advantages(x[0], jnp.zeros(2, int), num_tokens=2)
    with pytest.raises(ValueError, match=r"step_mask has shape \(2,\)"):
        process_advantages(x, jnp.zeros((3, 2), int), jnp.ones(2), num_tokens=2)
    with pytest.raises(ValueError, match=r"mask must have the shape of rewards and a token axis"):
        reinforce_pp_baseline_advantages(x, jnp.ones((2, 3, 4)))
    with pytest.raises(ValueError, match="gamma must be a scalar or an array of rank 2"):
        reinforce_pp_advantages(x, gamma=jnp.ones(2))
