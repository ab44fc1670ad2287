"""Advantages over time, normalisation, baselines: values, identities, known faults, gradients."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.test_util import check_grads
from reference import case_ids, close, load_cases, rollout, settings

from jaxpg.advantages import (
    batch_mean_baseline,
    ema_baseline,
    gae,
    normalize,
    reinforce_pp_advantages,
    vtrace,
)
from jaxpg.returns import discounted_returns, lambda_returns, td_errors

GAE = ("rewards", "values", "next_values", "terminated", "truncated")
VTRACE = ("log_ratios", *GAE)
BOOT = ("rewards", "next_values", "terminated", "truncated")
NAN = float("nan")
# jitted once: the settings are traced, so one shape compiles once for all its cases
jit_gae = jax.jit(gae)
jit_vtrace = jax.jit(vtrace)
jit_normalize = jax.jit(normalize, static_argnames="axis")


def pick(data: dict, names: tuple[str, ...]) -> list:
    """Positional arguments in float32 or float64, whichever JAX uses now."""
    found = (data[name] for name in names)
    return [None if x is None else jnp.asarray(np.asarray(x)) for x in found]


def run_case(case: dict) -> dict[str, object]:
    """What the library gives for a case, by the names of its expected numbers."""
    inputs, params = case["inputs"], settings(case)
    if case["fn"] == "gae":
        return {"out": jit_gae(*pick(inputs, GAE), **params)}
    if case["fn"] == "vtrace":
        out = jit_vtrace(*pick(inputs, VTRACE), **params)
        return {"vs": out.targets, "pg_advantages": out.advantages}
    if case["fn"] == "normalize":
        return {"out": jit_normalize(*pick(inputs, ("x", "mask")), **params)}
    if case["fn"] == "batch_mean_baseline":
        returns, mask = pick(inputs, ("returns", "mask"))
        baseline = batch_mean_baseline(returns, mask, **params)
        columns = baseline if params["axis"] is None else jnp.expand_dims(baseline, params["axis"])
        advantages = jnp.where(True if mask is None else mask, returns - columns, 0)
        return {"baseline": baseline, "advantages": advantages}
    state, baselines, advantages, states = params["init"], [], [], []
    for i, batch in enumerate(inputs["batches"]):
        mask = None if inputs["masks"] is None else inputs["masks"][i]
        baseline, state = ema_baseline(state, batch, mask, decay=params["decay"])
        baselines.append(baseline)
        states.append(state)
        advantages.append(jnp.asarray(batch) - baseline)
    return {
        "baselines": jnp.stack(baselines),
        "advantages": jnp.stack(advantages),
        "state_after": jnp.stack(states),
    }


IN_CASES = ("gae", "vtrace", "normalize", "batch_mean_baseline", "ema_baseline")


@pytest.mark.parametrize("case", **case_ids(load_cases("estimators.json", "cases", *IN_CASES)))
def test_reference_case(case: dict) -> None:
    for doubles, tol in {False: 1e-5, True: 1e-8}.items():
        with jax.enable_x64(doubles):
            for name, out in run_case(case).items():
                close(out, case["expected"][name], tol, f"{case['id']}: {name}")


@pytest.mark.parametrize("case", **case_ids(load_cases("estimators.json", "faults", *IN_CASES)))
def test_fault(case: dict) -> None:
    differs = False
    for name, out in run_case(case).items():
        close(out, case["right"][name], 1e-6, case["title"])
        wrong = case["wrong"].get(name, case["right"][name])
        differs |= not np.allclose(out, wrong, atol=1e-6)
    assert differs, case["wrong_how"]


# --- over time ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7,), (6, 3), (5, 2, 3)])
def test_forward_views(shape: tuple[int, ...], x64: None) -> None:
    for seed in (0, 1):
        data = rollout(seed, shape)
        gamma, lambda_ = data["gamma"], data["lambda_"]
        out = jit_gae(*pick(data, GAE), gamma=gamma, lambda_=lambda_)
        close(out, reference.gae(*(data[x] for x in GAE), gamma, lambda_), 1e-9)
        clips = {"rho_clip": 1.3, "c_clip": 0.9, "pg_rho_clip": 1.7}
        rows = [data[x] for x in VTRACE]
        out = jit_vtrace(*pick(data, VTRACE), gamma=gamma, lambda_=lambda_, **clips)
        targets, advantages = reference.vtrace(*rows, gamma, lambda_, **clips)
        close(out.targets, targets, 1e-9)
        close(out.advantages, advantages, 1e-9)
        open_ended = dict.fromkeys(clips, np.inf)
        out = jit_vtrace(
            *pick(data, VTRACE), gamma=gamma, lambda_=lambda_, **dict.fromkeys(clips, None)
        )
        targets, advantages = reference.vtrace(*rows, gamma, lambda_, **open_ended)
        close(out.targets, targets, 1e-9)
        close(out.advantages, advantages, 1e-9)


def test_identities_over_time(x64: None) -> None:
    data = rollout(2, (9, 2))
    # inside an episode the next value is the value of the next row
    inner = np.concatenate([data["values"][1:], data["next_values"][-1:]])
    flags = data["terminated"] | data["truncated"]
    data["next_values"] = np.where(flags, data["next_values"], inner)
    rows, boot = pick(data, GAE), pick(data, BOOT)
    deltas = td_errors(*rows[:4], gamma=0.9)
    close(jit_gae(*rows, gamma=0.9, lambda_=0.0), deltas, 1e-12)
    monte_carlo = discounted_returns(rows[0], *rows[3:], rows[2], gamma=0.9)
    close(jit_gae(*rows, gamma=0.9, lambda_=1.0), monte_carlo - data["values"], 1e-12)
    targets = jit_gae(*rows, gamma=0.9, lambda_=0.7) + data["values"]
    close(targets, lambda_returns(*boot, gamma=0.9, lambda_=0.7), 1e-12)
    # no flag at all is truncation nowhere
    nowhere = jnp.zeros_like(rows[4])
    with_flag = jit_gae(*rows[:4], nowhere, gamma=0.9, lambda_=0.7)
    close(jit_gae(*rows[:4], gamma=0.9, lambda_=0.7), with_flag, 1e-12)

    zeros = jnp.zeros_like(rows[0])
    on_policy = jit_vtrace(zeros, *rows, gamma=0.9, lambda_=0.7)
    close(on_policy.targets, targets, 1e-12)
    on_policy = jit_vtrace(zeros, *rows, gamma=0.9, lambda_=1.0)
    close(on_policy.targets, monte_carlo, 1e-12)
    close(on_policy.advantages, monte_carlo - data["values"], 1e-12)
    # a large cap is no cap
    off_policy = pick(data, VTRACE)
    caps = ("rho_clip", "c_clip", "pg_rho_clip")
    capped = jit_vtrace(*off_policy, gamma=0.9, **dict.fromkeys(caps, 1e6))
    uncapped = jit_vtrace(*off_policy, gamma=0.9, **dict.fromkeys(caps, None))
    for a, b in zip(capped, uncapped, strict=True):
        close(a, b, 1e-12)


@pytest.mark.parametrize("options", [{"associative": True}, {"unroll": 3}])
def test_ways_to_run_the_recurrence_agree(options: dict, x64: None) -> None:
    data = rollout(3, (13, 2))
    names = ("log_ratios", "rewards", "values", "next_values")
    flags = (data["terminated"], data["truncated"])

    def run(**kwargs: object) -> list:
        def total(*inputs: jax.Array) -> tuple[jax.Array, list]:
            outs = [
                gae(*inputs[1:], *flags, gamma=0.9, lambda_=data["lambda_"], **kwargs),
                *vtrace(*inputs, *flags, gamma=0.9, lambda_=0.8, c_clip=1.5, **kwargs),
                reinforce_pp_advantages(inputs[1], ~flags[1], axis=0, gamma=0.9, **kwargs),
            ]
            return sum(jnp.sum(jnp.sin(x)) for x in outs), outs

        fn = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True))
        return jax.tree.leaves(fn(*pick(data, names)))

    for ours, plain in zip(run(**options), run(), strict=True):
        assert np.isfinite(plain).all()
        close(ours, plain, 1e-10)


def over_time(data: dict) -> dict[str, tuple[Callable, tuple[str, ...]]]:
    flags = (data["terminated"], data["truncated"])
    return {
        "gae": (lambda *x: gae(*x, *flags, gamma=0.9, lambda_=0.8), GAE[:3]),
        "vtrace": (lambda *x: jnp.stack(vtrace(*x, *flags, gamma=0.9, lambda_=0.8)), VTRACE[:4]),
    }


@pytest.mark.parametrize("name", ["gae", "vtrace"])
def test_next_values_that_are_not_read_change_nothing(name: str) -> None:
    data = rollout(4, (8, 2), flag_rate=0.4)
    fn, names = over_time(data)[name]
    argnums = tuple(range(len(names)))

    @jax.jit
    def run(*inputs: jax.Array) -> tuple:
        loss = lambda *inputs: jnp.sum(fn(*inputs) ** 2)  # noqa: E731
        return fn(*inputs), jax.grad(loss, argnums=argnums)(*inputs)

    results = []
    for unread in (0.0, np.nan, np.inf):
        data["next_values"] = np.where(data["terminated"], unread, data["next_values"])
        results.append(run(*pick(data, names)))
    for other in results[1:]:
        for a, b in zip(jax.tree.leaves(results[0]), jax.tree.leaves(other), strict=True):
            assert np.isfinite(a).all()
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["gae", "vtrace"])
def test_gradients_over_time(name: str, x64: None) -> None:
    data = rollout(5, (6, 2))
    data["next_values"] = np.nan_to_num(data["next_values"])
    fn, names = over_time(data)[name]
    check_grads(jax.jit(fn), tuple(data[x] for x in names), order=1, modes=("fwd", "rev"))


def test_r1_truncation_bootstraps() -> None:
    ten = [10.0] * 3
    out = gae([1.0] * 3, ten, ten, [0, 0, 0], [0, 0, 1], gamma=0.9, lambda_=0.95)
    np.testing.assert_allclose(out, [0.0, 0.0, 0.0], atol=1e-6)
    # the same numbers as a termination: what a library without the distinction would give
    out = gae([1.0] * 3, ten, ten, [0, 0, 1], gamma=0.9, lambda_=0.95)
    close(out, [-6.579225, -7.695, -9.0], 1e-6)


def test_r3_bootstrap_reads_the_next_value_not_the_value() -> None:
    close(gae([1.0], [10.0], [2.0], [0], [1], gamma=0.9, lambda_=0.95), [-7.2], 1e-6)


def test_r5_the_next_episode_does_not_leak() -> None:
    values, next_values = [1.0, 1.0, 100.0, 100.0], [1.0, 1.0, 100.0, 100.0]
    out = gae([0.0] * 4, values, next_values, [0] * 4, [0, 1, 0, 0], gamma=1.0, lambda_=1.0)
    np.testing.assert_array_equal(out, [0.0, 0.0, 0.0, 0.0])


def test_r7_a_flag_belongs_to_the_step_that_ended_the_episode() -> None:
    zeros = [0.0] * 3
    out = gae([1.0] * 3, zeros, zeros, [0, 1, 0], gamma=1.0, lambda_=1.0)
    np.testing.assert_array_equal(out, [2.0, 1.0, 1.0])


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
@pytest.mark.parametrize("options", [{}, {"associative": True}])
def test_r13_a_nan_behind_a_flag_does_not_reach_back(flag: str, options: dict) -> None:
    flags = {"terminated": jnp.zeros(4, bool), "truncated": jnp.zeros(4, bool)}
    flags[flag] = jnp.array([False, True, False, False])
    bad = jnp.array([0.0, 0.0, jnp.nan, jnp.inf])
    good = jnp.ones(4)

    @jax.jit
    def run(bad: jax.Array) -> list[jax.Array]:
        targets, advantages = vtrace(bad, good + bad, good, good, **flags, gamma=0.5, **options)
        return [
            gae(good + bad, good + bad, good, **flags, gamma=0.5, lambda_=0.5, **options),
            targets,
            advantages,
        ]

    for out in run(bad):
        assert np.isfinite(out[:2]).all()


def test_vtrace_with_extreme_log_ratios() -> None:
    log_ratios = jnp.array([1000.0, -1000.0, jnp.inf, -jnp.inf])
    ones, flags = jnp.ones(4), jnp.array([False, False, False, True])

    @jax.jit
    def run(log_ratios: jax.Array) -> tuple:
        def loss(log_ratios: jax.Array) -> jax.Array:
            return jnp.sum(jnp.stack(vtrace(log_ratios, ones, ones, ones, flags, gamma=0.5)))

        return vtrace(log_ratios, ones, ones, ones, flags, gamma=0.5), jax.grad(loss)(log_ratios)

    out, gradient = run(log_ratios)
    # ratios 1, 0, 1, 0; delta = .5 .5 .5 0: vs = 1+.5+.5·0, 1+0, 1+.5+.5·(1−1), 1
    close(out.targets, [1.5, 1.0, 1.5, 1.0], 1e-6)
    close(out.advantages, [0.5, 0.0, 0.5, 0.0], 1e-6)
    assert np.isfinite(gradient).all()


def test_errors_over_time() -> None:
    r, f = jnp.ones((3, 3)), jnp.zeros((3, 3), bool)
    with pytest.raises(TypeError, match="terminated must be a bool or integer flag"):
        gae(r, r, r, jnp.zeros((3, 3)), gamma=0.9, lambda_=0.9)
    with pytest.raises(ValueError, match=r"values \(3,\)"):
        gae(r, r[0], r, f, gamma=0.9, lambda_=0.9)
    with pytest.raises(ValueError, match=r"terminated \(3, 1\)"):
        gae(r, r, r, f[:, :1], gamma=0.9, lambda_=0.9)
    with pytest.raises(ValueError, match="lambda_ must be a scalar or an array of rank 2"):
        gae(r, r, r, f, gamma=0.9, lambda_=jnp.ones(3))
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got 99"):
        gae(r, r, r, f, gamma=99.0, lambda_=0.9)
    with pytest.raises(ValueError, match="c_clip must lie in"):
        vtrace(r, r, r, r, f, gamma=0.9, c_clip=-1.0)
    with pytest.raises(ValueError, match=r"log_ratios \(3,\)"):
        vtrace(r[0], r, r, r, f, gamma=0.9)


# --- normalisation and baselines ----------------------------------------------------------------


def test_normalize_matches_its_definition(x64: None) -> None:
    rng = np.random.default_rng(0)
    x, mask = rng.normal(size=(5, 4)) * 3 + 7, rng.random((5, 4)) < 0.6
    for ddof in (0, 1, 2.5):
        out = jit_normalize(x, mask, ddof=ddof, eps=0.01)
        close(out, reference.standardize(x, mask, ddof=ddof, eps=0.01), 1e-12)
    columns = jit_normalize(x, mask, axis=0, ddof=1, eps=0.0)
    for j in range(4):
        close(columns[:, j], reference.standardize(x[:, j], mask[:, j]), 1e-12)
    whole = jit_normalize(x[None], mask[None], axis=(1, -1))
    close(whole, jit_normalize(x, mask)[None], 1e-12)


def test_normalize_reads_nothing_under_the_mask() -> None:
    mask = jnp.array([True, True, True, False, False])

    @jax.jit
    def run(x: jax.Array) -> tuple:
        loss = lambda x: jnp.sum(normalize(x, mask) * jnp.arange(5.0))  # noqa: E731
        return normalize(x, mask), jax.grad(loss)(x)

    clean = run(jnp.array([1.0, 2.0, 4.0, 0.0, 0.0]))
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        out = run(jnp.array([1.0, 2.0, 4.0, bad, bad]))
        for a, b in zip(out, clean, strict=True):
            np.testing.assert_array_equal(a, b)
    assert np.isfinite(clean[1]).all()
    np.testing.assert_array_equal(clean[1][3:], [0.0, 0.0])


def test_normalize_shows_a_nan_that_counts() -> None:
    assert np.isnan(jit_normalize(jnp.array([1.0, NAN, 2.0]))).all()
    out = normalize(jnp.array([[1.0, NAN], [1.0, 2.0]]), axis=1)
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all()


def test_r17_gradients_are_finite_without_spread() -> None:
    weights = jnp.arange(4.0)

    @jax.jit
    def gradients(x: jax.Array) -> list[jax.Array]:
        fns = [
            normalize,
            lambda x: normalize(x, eps=0.0),
            lambda x: normalize(x, jnp.array([1, 0, 0, 0]), ddof=1, eps=0.0),
            lambda x: normalize(x, jnp.zeros(4)),
        ]
        return [jax.grad(lambda x, fn=fn: jnp.sin(fn(x)) @ weights)(x) for fn in fns]

    # equal; equal but not representable; so close that the squares underflow
    for x in ([2.0] * 4, [0.1] * 4, [0.0, 1e-30, 2e-30, 0.0]):
        for gradient in gradients(jnp.array(x)):
            assert np.isfinite(gradient).all()


def test_r23_scope_is_the_whole_batch_and_one_sample_is_zero() -> None:
    whole = jit_normalize(jnp.array([1.0, 2.0, 3.0, 10.0]))
    close(whole, [-0.848528, -0.565685, -0.282843, 1.697056], 1e-6)
    halves = normalize(jnp.array([[1.0, 2.0], [3.0, 10.0]]), axis=1)
    close(halves, [[-1.0, 1.0], [-1.0, 1.0]], 1e-6)
    for ddof in (0, 1):
        np.testing.assert_array_equal(jit_normalize(jnp.array([5.0]), ddof=ddof), [0.0])
    # seeds under vmap never mix
    seeds = jnp.array([[1.0, 2.0, 3.0, 10.0], [100.0, 200.0, 300.0, 1000.0]])
    close(jax.vmap(jit_normalize)(seeds), np.stack([whole, whole]), 1e-5)


def test_r29_float32_noise_is_not_spread() -> None:
    for value, n in ((0.1, 7), (0.3, 10), (0.9, 3), (1e6 + 0.1, 11)):
        x = jnp.full((n,), value, jnp.float32)
        for eps in (0.0, 1e-9, 1e-8, 1e-4):
            np.testing.assert_array_equal(jit_normalize(x, eps=eps), np.zeros(n))


def test_batch_mean_baseline_ignores_what_is_masked() -> None:
    returns = jnp.array([[1.0, NAN], [3.0, jnp.inf]])
    mask = jnp.array([[1, 0], [1, 0]])
    assert batch_mean_baseline(returns, mask) == 2.0
    np.testing.assert_array_equal(batch_mean_baseline(returns, mask, axis=0), [2.0, 0.0])
    gradient = jax.grad(lambda x: batch_mean_baseline(x, mask))(returns)
    np.testing.assert_array_equal(gradient, [[0.5, 0.0], [0.5, 0.0]])
    assert batch_mean_baseline(returns, jnp.zeros((2, 2))) == 0.0


def test_ema_baseline_with_correction_is_the_weighted_mean_of_the_batches() -> None:
    @jax.jit
    def step(state: jax.Array, batch: jax.Array) -> tuple:
        baseline, moved = ema_baseline(state[0], batch, decay=0.8, num_updates=state[1])
        return (moved, state[1] + 1), baseline

    batches = jnp.array([[4.0, 6.0], [1.0, 3.0], [7.0, 7.0], [0.0, 1.0]])
    means = np.asarray(batches).mean(axis=1)
    (_, count), baselines = jax.lax.scan(step, (jnp.float32(0.0), jnp.int32(0)), batches)
    assert count == 4
    expected = [0.0]
    for k in range(1, 4):
        weights = 0.8 ** np.arange(k - 1, -1, -1)
        expected.append((weights * means[:k]).sum() / weights.sum())
    close(baselines, expected, 1e-6)


def test_ema_baseline_keeps_its_state_when_nothing_counts() -> None:
    baseline, state = ema_baseline(3.0, [NAN, 9.0], [0, 0], decay=0.5)
    assert (baseline, state) == (3.0, 3.0)
    baseline, state = ema_baseline(3.0, [NAN, 9.0], [0, 1], decay=0.5)
    assert (baseline, state) == (3.0, 6.0)
    # decay 1 never moves and has no weight to divide by
    assert ema_baseline(0.0, [9.0], decay=1.0, num_updates=5)[0] == 0.0


# --- ways to call, dtypes, gradients ----------------------------------------------------------

FLAGS = jnp.array([False, True, False, False])
ONE_ARRAY: dict[str, Callable] = {
    "gae": lambda x: gae(x, x * 0, x + 1, FLAGS, gamma=0.5, lambda_=0.5),
    "vtrace": lambda x: jnp.stack(vtrace(x * 0, x, x * 0, x + 1, FLAGS, gamma=0.5)),
    "normalize": normalize,
    "batch_mean_baseline": batch_mean_baseline,
    "ema_baseline": lambda x: jnp.stack(ema_baseline(1.0, x, decay=0.5)),
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


def test_errors_of_normalisation_and_baselines() -> None:
    x = jnp.ones((3, 2))
    with pytest.raises(ValueError, match=r"mask has shape \(3,\)"):
        normalize(x, jnp.ones(3))
    with pytest.raises(ValueError, match="axis=2 is no axis of an array of rank 2"):
        normalize(x, axis=2)
    with pytest.raises(ValueError, match="axis=-3 is no axis of an array of rank 2"):
        batch_mean_baseline(x, axis=(0, -3))
    with pytest.raises(ValueError, match=r"eps must lie in \[0, inf\], got -1"):
        normalize(x, eps=-1.0)
    with pytest.raises(ValueError, match="state must be a scalar"):
        ema_baseline(jnp.zeros(2), x, decay=0.9)
    with pytest.raises(ValueError, match=r"decay must lie in \[0, 1\], got 1.5"):
        ema_baseline(0.0, x, decay=1.5)
