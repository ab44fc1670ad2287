"""Epochs of minibatches against loops written out by hand."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from jaxpg import optimization
from jaxpg.optimization import optimize, permutation, rows_in_cache

SGD = optax.sgd(0.1)


def mean_loss(params, batch):
    error = params - batch
    return jnp.mean(error**2), {"error": jnp.mean(jnp.abs(error))}


def test_one_minibatch_an_epoch_is_gradient_descent(key):
    batch = jnp.asarray([1.0, 2.0, 6.0])
    params, _, metrics = optimize(
        key, mean_loss, SGD, jnp.zeros(()), SGD.init(0.0), batch, num_epochs=2, num_minibatches=1
    )
    w = 0.0
    norms = []
    for _ in range(2):
        norms.append(abs(2 * (w - 3.0)))
        w -= 0.1 * 2 * (w - 3.0)
    np.testing.assert_allclose(params, w, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], np.mean(norms), rtol=1e-6)
    assert float(metrics["minibatches_applied"]) == 1.0 and float(metrics["nonfinite"]) == 0.0


def test_in_order_without_shuffling_is_sequential(key):
    batch = jnp.asarray([[1.0, 3.0], [5.0, 7.0], [0.0, 2.0]])
    params, _, _ = optimize(
        key,
        mean_loss,
        SGD,
        jnp.zeros(()),
        SGD.init(0.0),
        batch,
        num_epochs=1,
        num_minibatches=3,
        shuffle=False,
    )
    w = 0.0
    for row in np.asarray(batch):
        w -= 0.1 * 2 * (w - row.mean())
    np.testing.assert_allclose(params, w, rtol=1e-6)


def test_every_sample_is_seen_once_an_epoch_in_a_new_order(key):
    batch = {"x": jnp.arange(12.0), "pair": jnp.stack([jnp.arange(12.0)] * 2, axis=1)}

    def loss(params, minibatch):
        # rows stay together, whatever the leaf
        mismatch = jnp.sum(jnp.abs(minibatch["x"][:, None] - minibatch["pair"]))
        seen = jnp.zeros(12).at[minibatch["x"].astype(int)].add(1.0)
        return -jnp.sum(params * seen), {"mismatch": mismatch, "first": minibatch["x"][0]}

    params, _, metrics = optimize(
        key,
        loss,
        optax.sgd(1.0),
        jnp.zeros(12),
        optax.sgd(1.0).init(jnp.zeros(12)),
        batch,
        num_epochs=3,
        num_minibatches=4,
    )
    np.testing.assert_array_equal(params, np.full(12, 3.0))
    assert float(metrics["mismatch"]) == 0.0


def test_minibatches_over_environments_keep_time_whole(key):
    time, envs = jnp.meshgrid(jnp.arange(5.0), jnp.arange(4.0), indexing="ij")

    def loss(params, minibatch):
        t, env = minibatch
        whole = jnp.all(t == jnp.arange(5.0)[:, None]) & jnp.all(env == env[0])
        return params * 0.0, {"whole": whole * 1.0, "envs": jnp.sum(env[0])}

    _, _, metrics = optimize(
        key,
        loss,
        SGD,
        jnp.zeros(()),
        SGD.init(0.0),
        (time, envs),
        num_epochs=2,
        num_minibatches=2,
        axis=1,
    )
    assert float(metrics["whole"]) == 1.0
    assert float(metrics["envs"]) == 3.0  # 0 + 1 + 2 + 3 over two minibatches


def test_target_kl_stops_before_the_step_that_exceeds_it(key):
    def loss(params, batch):
        return -jnp.mean(batch) * params, {"approx_kl": params}

    counting = optax.sgd(lambda count: 1.0)
    params, opt_state, metrics = optimize(
        key,
        loss,
        counting,
        jnp.zeros(()),
        counting.init(jnp.zeros(())),
        jnp.ones(6),
        num_epochs=3,
        num_minibatches=2,
        target_kl=1.5,
    )
    # steps of 1: KL seen is 0, 1, 2: the third minibatch and all later ones take no step
    assert float(params) == 2.0
    assert int(optax.tree.get(opt_state, "count")) == 2
    np.testing.assert_allclose(metrics["minibatches_applied"], 2 / 6, rtol=1e-6)
    assert float(metrics["approx_kl"]) == 0.5  # mean of 0 and 1
    with pytest.raises(ValueError, match="approx_kl"):
        optimize(
            key,
            mean_loss,
            SGD,
            jnp.zeros(()),
            SGD.init(0.0),
            jnp.ones(6),
            num_epochs=1,
            num_minibatches=1,
            target_kl=0.1,
        )


@pytest.mark.parametrize("rows", [2, 3, 6])
def test_parts_of_a_minibatch_make_the_same_steps(key, rows):
    """Gradients and metrics of means are means over equal parts, to rounding."""
    batch = {"x": jax.random.normal(key, (12, 3)), "y": jnp.arange(12.0)}

    def loss(params, batch):
        error = batch["x"] @ params["w"] + params["b"] - batch["y"]
        return jnp.mean(error**2), {"error": jnp.mean(jnp.abs(error))}

    params = {"w": jnp.ones(3), "b": jnp.zeros(())}

    def run(**settings):
        settings |= {"num_epochs": 2, "num_minibatches": 2}
        return optimize(key, loss, SGD, params, SGD.init(params), batch, **settings)

    whole, parts = run(), jax.jit(lambda: run(rows_at_a_time=rows))()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), whole, parts)
    with pytest.raises(ValueError, match="rows_at_a_time=4 does not divide minibatch size=6"):
        run(rows_at_a_time=4)


def test_a_minibatch_is_prepared_whole_and_without_gradient(key):
    """Centred over all six rows of it, whatever the parts; each entry is then what it was alone."""
    batch = jnp.asarray([1.0, 2.0, 3.0, 4.0, 5.0, 15.0])
    seen = optimize(
        key,
        lambda params, batch: (jnp.mean((params - batch) ** 2), {"square": jnp.mean(batch**2)}),
        SGD,
        jnp.zeros(()),
        SGD.init(0.0),
        batch,
        num_epochs=1,
        num_minibatches=1,
        prepare=lambda minibatch: minibatch - jnp.mean(minibatch),
        rows_at_a_time=2,
    )
    np.testing.assert_allclose(seen[0], 0.0, atol=1e-6)
    np.testing.assert_allclose(seen[2]["square"], np.var(batch), rtol=1e-6)


def test_each_minibatch_is_prepared_apart(key):
    """Rows less the mean of their own minibatch, of which there are three an epoch."""
    rows = []

    def loss(params, minibatch):
        jax.debug.callback(lambda x: rows.append(np.asarray(x)), minibatch)
        return jnp.mean(params * minibatch), {}

    w = jnp.zeros(())
    optimize(
        key,
        loss,
        SGD,
        w,
        SGD.init(w),
        jnp.arange(6.0) ** 2,
        num_epochs=2,
        num_minibatches=3,
        shuffle=False,
        prepare=lambda minibatch: minibatch - jnp.mean(minibatch),
    )
    jax.effects_barrier()
    spread = sorted(x[1] for x in rows)  # of 0, 1 and 4, 9 and 16, 25
    assert spread == [0.5, 0.5, 2.5, 2.5, 4.5, 4.5]


def test_rows_in_cache(monkeypatch):
    """Parts only where a replica has a core of its own."""
    monkeypatch.setattr(optimization, "num_cores", lambda: 2)
    assert rows_in_cache(16384) is None
    assert rows_in_cache(16384, replicas=2) == 1024
    assert rows_in_cache(3 * 2**11, replicas=2) == 1024
    assert rows_in_cache(2 * 701, replicas=2) == 701
    assert rows_in_cache(2 * 1031, replicas=2) is None  # twice a prime: parts of 2
    assert rows_in_cache(128, replicas=2) is None


def test_replicas_descend_together(key):
    """Two replicas under `vmap`: the mean of their gradients, and one early stop for both."""
    batches = jnp.asarray([[1.0, 3.0], [5.0, 7.0]])

    def pmean(tree):
        return jax.lax.pmean(tree, "replica")

    def run(batch, **settings):
        def loss(params, batch):
            return jnp.mean((params - batch) ** 2), {"approx_kl": jnp.mean(batch)}

        params = jnp.zeros(())
        settings |= {"num_epochs": 2, "num_minibatches": 1, "pmean": pmean}
        return optimize(key, loss, SGD, params, SGD.init(params), batch, **settings)

    params, _, metrics = jax.vmap(run, axis_name="replica")(batches)
    w = 0.0
    for _ in range(2):
        w -= 0.1 * 2 * (w - 4.0)
    np.testing.assert_allclose(params, [w, w], rtol=1e-6)
    assert metrics["grad_norm"][0] == metrics["grad_norm"][1]
    for target_kl, applied in ((3.0, 0.0), (5.0, 1.0)):  # KL is 2 and 6, so 4 for both

        def stopping(batch, target_kl=target_kl):
            return run(batch, target_kl=target_kl)[2]["minibatches_applied"]

        np.testing.assert_array_equal(
            jax.vmap(stopping, axis_name="replica")(batches), [applied, applied]
        )


def test_a_nan_gradient_is_reported(key):
    _, _, metrics = optimize(
        key,
        mean_loss,
        SGD,
        jnp.zeros(()),
        SGD.init(0.0),
        jnp.asarray([1.0, 1.0, 1.0, jnp.nan]),
        num_epochs=1,
        num_minibatches=4,
        shuffle=False,
    )
    assert float(metrics["nonfinite"]) == 0.25


def test_r41_sizes_that_do_not_divide_name_both_numbers(key):
    with pytest.raises(ValueError, match="num_minibatches=3 does not divide batch size=10"):
        optimize(
            key,
            mean_loss,
            SGD,
            jnp.zeros(()),
            SGD.init(0.0),
            jnp.ones(10),
            num_epochs=1,
            num_minibatches=3,
        )
    with pytest.raises(ValueError, match="differ in length"):
        optimize(
            key,
            mean_loss,
            SGD,
            jnp.zeros(()),
            SGD.init(0.0),
            (jnp.ones(4), jnp.ones(6)),
            num_epochs=1,
            num_minibatches=2,
        )


def test_the_learning_rate_can_be_swept(key):
    def run(learning_rate):
        sgd = optax.sgd(learning_rate)
        return optimize(
            key,
            mean_loss,
            sgd,
            jnp.zeros(()),
            sgd.init(jnp.zeros(())),
            jnp.ones(4),
            num_epochs=1,
            num_minibatches=1,
        )[0]

    swept = jax.vmap(run)(jnp.asarray([0.1, 0.2]))
    np.testing.assert_allclose(swept, [0.2, 0.4], rtol=1e-6)


def test_permutations_are_uniform(key):
    orders = np.asarray(jax.vmap(lambda k: permutation(k, 4))(jax.random.split(key, 24_000)))
    np.testing.assert_array_equal(np.sort(orders, axis=1), np.tile(np.arange(4), (24_000, 1)))
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-3
    # where an element lands is uniform too when there are many
    long = np.asarray(jax.vmap(lambda k: permutation(k, 1000))(jax.random.split(key, 400)))
    assert stats.kstest((np.argsort(long, axis=1)[:, 7] + 0.5) / 1000, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("length", [1, 2, 8_192, 65_536, 65_537])
def test_permutations_of_any_length_hold_every_element_once(key, length):
    order = jax.jit(permutation, static_argnums=1)(key, length)
    assert order.dtype == jnp.int32
    np.testing.assert_array_equal(np.sort(order), np.arange(length))


def test_minibatches_of_a_long_shuffle_are_uniform(key):
    # the most elements that share a word with their number: half a tie for each of them
    length, parts, draws = 65_536, 4, 24
    orders = jax.jit(jax.vmap(lambda k: permutation(k, length)))(jax.random.split(key, draws))
    part_of = np.argsort(np.asarray(orders), axis=1) // (length // parts)
    # each part takes as many of the first elements as of the last ones, in every stretch of them
    stretches = part_of.reshape(draws, 64, -1)
    counts = np.stack([np.sum(stretches == part, axis=(0, 2)) for part in range(parts)])
    assert stats.chi2_contingency(counts).pvalue > 1e-3
    # two elements share a part as often as chance has it
    pairs = np.mean(part_of[:, ::2] == part_of[:, 1::2])
    chance = (length / parts - 1) / (length - 1)
    assert abs(pairs - chance) < 4 * np.sqrt(chance * (1 - chance) / (draws * length / 2))


def test_ties_of_random_bits_come_in_either_order(monkeypatch, key):
    # words whose compared bits are all alike: only the flipped bits decide
    def all_tied(key, shape, dtype):
        return jnp.full(shape, jax.random.randint(key, (), 0, 8), dtype)

    monkeypatch.setattr(jax.random, "bits", all_tied)
    orders = np.asarray(jax.vmap(lambda k: permutation(k, 8))(jax.random.split(key, 2_000)))
    places = np.argsort(orders, axis=1)
    for i, j in itertools.combinations(range(8), 2):
        assert stats.binomtest(int(np.sum(places[:, i] < places[:, j])), 2_000).pvalue > 1e-4
