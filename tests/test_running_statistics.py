"""Running statistics against NumPy on all the data at once, and hand-computed faults."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.running_statistics import (
    ReturnStatistics,
    RunningStatistics,
    init_return_statistics,
    init_statistics,
    normalize_with,
    scale_rewards,
    update_return_statistics,
    update_statistics,
)


@pytest.mark.parametrize("mean,std", [(0.0, 1.0), (1e4, 1.0), (-3e-3, 1e-3)])
def test_batches_merge_to_the_statistics_of_all_rows(mean: float, std: float) -> None:
    """In float32, also where the mean is 10⁴ standard deviations away."""
    rng = np.random.default_rng(0)
    batches = [rng.normal(mean, std, (n, 5, 2)).astype(np.float32) for n in (1, 7, 400, 64)]
    stats = init_statistics(jnp.zeros(2))
    update = jax.jit(update_statistics)
    for batch in batches:
        stats = update(stats, batch)
    rows = np.concatenate([b.reshape(-1, 2) for b in batches]).astype(np.float64)
    assert stats.count == len(rows)
    np.testing.assert_allclose(stats.mean, rows.mean(0), rtol=2e-7, atol=1e-6 * std)
    np.testing.assert_allclose(stats.var, rows.var(0), rtol=3e-5 if mean > 1 else 2e-6)
    z = normalize_with(stats, batches[2], clip=None)
    assert abs(float(z.mean())) < 0.1 and abs(float(z.std()) - 1) < 0.05


def test_one_large_batch_far_from_zero_keeps_its_digits() -> None:
    """A plain float32 mean of a million rows, or E[x²] − E[x]², would be off by more than std."""
    x = np.random.default_rng(1).normal(1e4, 1.0, 200_000).astype(np.float32)
    stats = update_statistics(init_statistics(jnp.zeros(())), jnp.asarray(x))
    np.testing.assert_allclose(stats.mean, x.astype(np.float64).mean(), atol=1e-3)
    np.testing.assert_allclose(stats.var, x.astype(np.float64).var(), rtol=1e-4)


def test_updates_go_on_when_the_count_has_lost_its_last_digit() -> None:
    """Beyond 2²⁴ rows float32 no longer counts singly; the statistics must still follow."""
    stats = RunningStatistics(jnp.float32(2**25), jnp.float32(0.0), jnp.float32(1.0))
    after = update_statistics(stats, jnp.full((2**20,), 4.0))
    w = 2**20 / (2**25 + 2**20)
    np.testing.assert_allclose(after.mean, 4 * w, rtol=1e-6)
    np.testing.assert_allclose(after.var, (1 - w) + w * (1 - w) * 16, rtol=1e-6)


def test_before_any_data_nothing_changes() -> None:
    stats = init_statistics({"a": jnp.zeros(2), "b": jnp.zeros((), jnp.uint8)})
    x = {"a": jnp.array([[1.5, -2.0]]), "b": jnp.array([7], jnp.uint8)}
    z = normalize_with(stats, x)
    np.testing.assert_array_equal(z["a"], x["a"])
    np.testing.assert_array_equal(z["b"], [7.0])
    assert z["b"].dtype == jnp.float32
    empty = update_statistics(stats, x, mask=jnp.zeros(1, bool))
    jax.tree.map(np.testing.assert_array_equal, empty, stats)


def test_fixed_statistics_in_hand_numbers() -> None:
    """R45: mean 100, variance 25, observation 110 gives 2.0; fresh statistics would give 110."""
    stats = RunningStatistics(jnp.float32(10), jnp.float32(100), jnp.float32(25))
    assert normalize_with(stats, jnp.array(110)) == 2.0
    assert normalize_with(stats, jnp.array([0.0, 1e9]), clip=5.0).tolist() == [-5.0, 5.0]
    assert normalize_with(stats, jnp.array(1100.0), clip=None) == 200.0


def test_masked_rows_do_not_count_even_if_nan() -> None:
    x = jnp.array([[1.0, 10.0], [jnp.nan, jnp.inf], [3.0, 30.0]])
    mask = jnp.array([1, 0, 1])
    stats = update_statistics(init_statistics(jnp.zeros(2)), x, mask)
    np.testing.assert_allclose(stats.mean, [2.0, 20.0])
    np.testing.assert_allclose(stats.var, [1.0, 100.0])
    assert stats.count == 2


def test_components_without_spread_are_centred_only() -> None:
    """R29's kind: the rounding of a mean is no standard deviation."""
    stats = init_statistics(jnp.zeros(3))
    for _ in range(3):
        rows = jnp.broadcast_to(jnp.array([0.1, 12345.678, 0.0]), (7, 3))
        stats = update_statistics(stats, rows)
    z = normalize_with(stats, jnp.array([0.1, 12345.678, 0.0]))
    np.testing.assert_allclose(z, 0.0, atol=2e-3)
    np.testing.assert_allclose(
        normalize_with(stats, jnp.array([1.1, 12346.678, 1.0])), 1, rtol=2e-3
    )


def test_trees_dtypes_and_flags() -> None:
    """R49: integers in, float32 out; a bool leaf is an action mask and stays one."""
    rng = np.random.default_rng(2)
    batch = {
        "image": jnp.asarray(rng.integers(0, 256, (6, 3, 4, 4)), jnp.uint8),
        "position": jnp.asarray(rng.normal(size=(6, 3, 2)), jnp.bfloat16),
        "action_mask": jnp.asarray(rng.integers(0, 2, (6, 3, 5)), bool),
    }
    stats = init_statistics(jax.tree.map(lambda x: x[0, 0], batch))
    after = jax.jit(update_statistics)(stats, batch)
    for old, new in zip(jax.tree.leaves(stats), jax.tree.leaves(after), strict=True):
        assert (old.shape, old.dtype, old.weak_type) == (new.shape, new.dtype, new.weak_type)
        assert new.dtype == jnp.float32
    image = np.asarray(batch["image"], np.float64).reshape(18, 4, 4)
    np.testing.assert_allclose(after.mean["image"], image.mean(0), rtol=1e-6)
    np.testing.assert_allclose(after.var["image"], image.var(0), rtol=1e-5)
    z = normalize_with(after, batch)
    assert z["image"].dtype == z["position"].dtype == jnp.float32
    np.testing.assert_array_equal(z["action_mask"], batch["action_mask"])
    assert z["action_mask"].dtype == jnp.bool_


def test_dtypes_are_stable_under_x64(x64: None) -> None:
    for dtype, expected in ((jnp.int64, jnp.float32), (jnp.float64, jnp.float64)):
        stats = init_statistics(jnp.zeros(2, dtype))
        after = update_statistics(stats, jnp.ones((4, 2), dtype))
        assert after.mean.dtype == after.var.dtype == stats.mean.dtype == expected
        assert after.count.dtype == jnp.float32
        assert normalize_with(after, jnp.ones((4, 2), dtype)).dtype == expected
    returns = init_return_statistics(2)
    after = update_return_statistics(
        returns, jnp.ones((3, 2)), jnp.zeros((3, 2), bool), jnp.zeros((3, 2), bool), gamma=0.9
    )
    for old, new in zip(returns, after, strict=True):
        assert (old.dtype, old.shape, old.weak_type) == (new.dtype, new.shape, new.weak_type)


def test_seeds_do_not_share_statistics() -> None:
    x = jnp.asarray(np.random.default_rng(3).normal(size=(4, 50, 2)), jnp.float32)
    x = x * jnp.arange(1, 5)[:, None, None]
    fresh = init_statistics(jnp.zeros(2))
    stacked = jax.tree.map(lambda a: jnp.broadcast_to(a, (4, *a.shape)), fresh)
    together = jax.vmap(lambda s, b: update_statistics(s, b))(stacked, x)
    for seed in range(4):
        apart = update_statistics(fresh, x[seed])
        for a, b in zip(together, apart, strict=True):
            np.testing.assert_allclose(a[seed], b, rtol=1e-6, atol=1e-7)


# --- rewards ---------------------------------------------------------------------------------


def forward_returns(rewards: np.ndarray, done: np.ndarray, gamma: float) -> np.ndarray:
    """y(t) as an explicit sum over the rewards of its episode up to t."""
    out = np.zeros_like(rewards)
    for b in range(rewards.shape[1]):
        for t in range(rewards.shape[0]):
            starts = [s + 1 for s in range(t) if done[s, b]]
            first = max(starts, default=0)
            out[t, b] = sum(gamma ** (t - k) * rewards[k, b] for k in range(first, t + 1))
    return out


def test_discounted_returns_are_carried_and_cut() -> None:
    rng = np.random.default_rng(4)
    rewards = rng.normal(size=(12, 3))
    terminated, truncated = rng.random((2, 12, 3)) < 0.15
    assert (terminated & ~truncated).any() and (truncated & ~terminated).any()
    expected = forward_returns(rewards, terminated | truncated, 0.9)
    stats = init_return_statistics(3)
    update = jax.jit(update_return_statistics)
    for part in (slice(0, 5), slice(5, 12)):  # a rollout boundary is no episode boundary
        stats = update(stats, rewards[part], terminated[part], truncated[part], gamma=0.9)
    assert stats.count == 36
    np.testing.assert_allclose(stats.mean, expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(stats.var, expected.var(), rtol=1e-5)
    done = (terminated | truncated)[-1]
    np.testing.assert_allclose(stats.discounted, np.where(done, 0, expected[-1]), rtol=1e-5)

    scaled = scale_rewards(stats, rewards, clip=None)
    np.testing.assert_allclose(scaled, rewards / expected.std(), rtol=1e-5)
    assert np.abs(scale_rewards(stats, 100 * rewards, clip=2.0)).max() == 2.0


def test_rewards_pass_unchanged_before_data_and_without_spread() -> None:
    stats = init_return_statistics(2)
    np.testing.assert_array_equal(scale_rewards(stats, jnp.array([1, 0, -3])), [1.0, 0.0, -3.0])
    assert scale_rewards(stats, jnp.array([1])).dtype == jnp.float32
    zeros = jnp.zeros((4, 2))
    stats = update_return_statistics(stats, zeros, zeros.astype(bool), zeros.astype(bool), gamma=1)
    assert stats.count == 8
    np.testing.assert_array_equal(scale_rewards(stats, jnp.array([1, 0, -3])), [1.0, 0.0, -3.0])


def test_scaling_does_not_centre() -> None:
    """A reward keeps its sign: a centred reward would pay for short or for long episodes."""
    stats = ReturnStatistics(jnp.zeros(1), jnp.float32(5), jnp.float32(50.0), jnp.float32(4.0))
    np.testing.assert_array_equal(scale_rewards(stats, jnp.array([1.0, 0.0])), [0.5, 0.0])


def test_nan_leaves_with_its_episode() -> None:
    """R13: (1 − done) · NaN is NaN for ever; where is not."""
    rewards = jnp.array([[jnp.nan, 1.0], [1.0, 1.0], [3.0, 1.0]])
    ends = jnp.array([[False, False], [True, False], [False, False]])
    none = jnp.zeros_like(ends)
    for flags in ((ends, none), (none, ends)):
        stats = update_return_statistics(init_return_statistics(2), rewards, *flags, gamma=1.0)
        np.testing.assert_array_equal(stats.discounted, [3.0, 3.0])
        assert stats.count == 4  # the two rows with NaN are left out
        np.testing.assert_allclose(stats.mean, np.mean([3, 1, 2, 3]))
        np.testing.assert_allclose(stats.var, np.var([3, 1, 2, 3]), rtol=1e-6)


def test_replicas_share_statistics_of_all_rows() -> None:
    """Two replicas with unequal numbers of valid rows: mean and variance of all of them."""
    rng = np.random.default_rng(6)
    x = rng.normal(1e3, 2.0, (2, 3, 9)).astype(np.float32)  # two batches
    masks = rng.random((2, 3, 9)) < np.array([0.2, 0.9, 0.5])[:, None]

    def pmean(tree: jax.Array) -> jax.Array:
        return jax.lax.pmean(tree, "replica")

    def run(batches: jax.Array, masks: jax.Array) -> RunningStatistics:
        stats = init_statistics(jnp.zeros(()))
        for batch, mask in zip(batches, masks, strict=True):
            stats = update_statistics(stats, batch, mask, pmean=pmean)
        return stats

    together = jax.vmap(run, in_axes=1, axis_name="replica")(jnp.asarray(x), jnp.asarray(masks))
    rows = x[masks].astype(np.float64)
    np.testing.assert_allclose(together.mean, [rows.mean()] * 3, rtol=1e-6)
    np.testing.assert_allclose(together.var, [rows.var()] * 3, rtol=1e-4)
    np.testing.assert_allclose(together.count, [masks.sum() / 3] * 3, rtol=1e-6)

    rewards = jnp.asarray(x[:, :2, :8].reshape(2, 4, 4))  # [replica, T, B]
    ends = jnp.zeros((2, 4, 4), bool)

    def scaled(rewards: jax.Array, ends: jax.Array, **settings: object) -> ReturnStatistics:
        stats = init_return_statistics(rewards.shape[1])
        return update_return_statistics(stats, rewards, ends, ends, gamma=0.9, **settings)

    shared = jax.vmap(lambda r, e: scaled(r, e, pmean=pmean), axis_name="replica")(rewards, ends)
    alone = scaled(jnp.concatenate(list(rewards), axis=1), jnp.zeros((4, 8), bool))
    np.testing.assert_allclose(shared.var, [alone.var] * 2, rtol=1e-5)
    np.testing.assert_allclose(shared.mean, [alone.mean] * 2, rtol=1e-6)
    np.testing.assert_allclose(shared.discounted.ravel(), alone.discounted, rtol=1e-6)


def test_reward_statistics_vmap_over_seeds_and_gamma() -> None:
    rng = np.random.default_rng(5)
    rewards = jnp.asarray(rng.normal(size=(2, 6, 3)), jnp.float32)
    ends = jnp.asarray(rng.random((2, 6, 3)) < 0.2)
    gammas = jnp.array([0.5, 0.99])

    def run(rewards: jax.Array, ends: jax.Array, gamma: jax.Array) -> ReturnStatistics:
        stats = init_return_statistics(3)
        return update_return_statistics(stats, rewards, ends, ends & False, gamma=gamma)

    together = jax.vmap(run)(rewards, ends, gammas)
    for seed in range(2):
        apart = run(rewards[seed], ends[seed], gammas[seed])
        for a, b in zip(together, apart, strict=True):
            np.testing.assert_allclose(a[seed], b, rtol=1e-5, atol=1e-6)


def test_bad_input_is_refused_by_name() -> None:
    stats = init_statistics({"a": jnp.zeros(2), "b": jnp.zeros(())})
    with pytest.raises(
        ValueError, match=r"rows of shapes \[\(2,\), \(\)\], got \[\(4, 2\), \(3,\)"
    ):
        update_statistics(stats, {"a": jnp.zeros((4, 2)), "b": jnp.zeros(3)})
    with pytest.raises(ValueError, match=r"got \[\(4, 3\), \(4,\)\]"):
        normalize_with(stats, {"a": jnp.zeros((4, 3)), "b": jnp.zeros(4)})
    with pytest.raises(ValueError, match="rows like"):
        normalize_with(stats, {"a": jnp.zeros((4, 2))})
    with pytest.raises(ValueError, match=r"mask has shape \(3,\)"):
        update_statistics(init_statistics(jnp.zeros(2)), jnp.zeros((4, 2)), jnp.ones(3, bool))
    with pytest.raises(ValueError, match="clip must lie in"):
        normalize_with(init_statistics(jnp.zeros(2)), jnp.zeros(2), clip=0.0)
    returns, flags = init_return_statistics(2), jnp.zeros((3, 2), bool)
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got 1.5"):
        update_return_statistics(returns, jnp.zeros((3, 2)), flags, flags, gamma=1.5)
    with pytest.raises(ValueError, match=r"rewards \(3, 4\).*\(2,\)"):
        wide = jnp.zeros((3, 4), bool)
        update_return_statistics(returns, jnp.zeros((3, 4)), wide, wide, gamma=1.0)
    with pytest.raises(TypeError, match="terminated must be a bool or integer flag"):
        update_return_statistics(returns, jnp.zeros((3, 2)), jnp.zeros((3, 2)), flags, gamma=1.0)
    with pytest.raises(ValueError, match="clip must lie in"):
        scale_rewards(returns, jnp.zeros(2), clip=-1.0)
