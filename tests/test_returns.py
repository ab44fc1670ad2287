"""Returns: reference cases, forward views, identities, known faults, dtypes, gradients, errors."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.test_util import check_grads
from reference import case_ids, close, load_cases, rollout, settings

from jaxpg import returns as module
from jaxpg.returns import (
    complete_episode_mask,
    discounted_returns,
    lambda_returns,
    n_step_returns,
    per_decision_returns,
    td_errors,
)

TD = ("rewards", "values", "next_values", "terminated")
MC = ("rewards", "terminated", "truncated", "next_values")
BOOT = ("rewards", "next_values", "terminated", "truncated")
PD = ("log_ratios", *MC)
INPUTS = {
    "td_errors": TD,
    "discounted_returns": MC,
    "n_step_returns": BOOT,
    "lambda_returns": BOOT,
    "per_decision_returns": PD,
    "complete_episode_mask": ("terminated", "truncated"),
}
# jitted once: the settings are traced, so one shape compiles once for all its cases
JITTED = {
    name: jax.jit(getattr(module, name), static_argnames="n" if name == "n_step_returns" else None)
    for name in INPUTS
}
SHAPES = [(7,), (6, 3), (5, 2, 3)]
IN_CASES = tuple(name for name in INPUTS if name != "per_decision_returns")


def arrays(case: dict, names: tuple[str, ...]) -> list:
    """Positional arguments in float32 or float64, whichever JAX uses now."""
    found = (case[name] for name in names)
    return [None if x is None else jnp.asarray(np.asarray(x)) for x in found]


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", **case_ids(load_cases("estimators.json", "cases", *IN_CASES)))
def test_reference_case(case: dict) -> None:
    tolerances = {False: 1e-5, True: 1e-8}
    for doubles, tol in tolerances.items():
        with jax.enable_x64(doubles):
            positional = arrays(case["inputs"], INPUTS[case["fn"]])
            out = JITTED[case["fn"]](*positional, **settings(case))
            close(out, case["expected"]["out"], tol, case["id"])


@pytest.mark.parametrize("case", **case_ids(load_cases("estimators.json", "faults", *IN_CASES)))
def test_fault(case: dict) -> None:
    positional = arrays(case["inputs"], INPUTS[case["fn"]])
    out = JITTED[case["fn"]](*positional, **settings(case))
    close(out, case["right"]["out"], 1e-6, case["title"])
    assert not np.allclose(out, case["wrong"]["out"]), case["wrong_how"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_forward_views(shape: tuple[int, ...], seed: int, x64: None) -> None:
    data = rollout(seed, shape)
    gamma, lambda_ = data["gamma"], data["lambda_"]

    def take(names: tuple[str, ...]) -> list:
        return [data[name] for name in names]

    close(JITTED["td_errors"](*take(TD), gamma=gamma), reference.td_errors(*take(TD), gamma), 1e-9)
    monte_carlo = reference.n_step_returns(*take(BOOT), gamma, n=99)
    close(JITTED["discounted_returns"](*take(MC), gamma=gamma), monte_carlo, 1e-9)
    for n in (1, 2, 3, 5, 6, 99):
        out = JITTED["n_step_returns"](*take(BOOT), gamma=gamma, n=n)
        close(out, reference.n_step_returns(*take(BOOT), gamma, n), 1e-9, f"n={n}")
    out = JITTED["lambda_returns"](*take(BOOT), gamma=gamma, lambda_=lambda_)
    close(out, reference.lambda_returns(*take(BOOT), gamma, lambda_), 1e-9)
    out = JITTED["per_decision_returns"](*take(PD), gamma=gamma)
    close(out, reference.per_decision_returns(*take(PD), gamma, np.inf), 1e-9)
    out = JITTED["per_decision_returns"](*take(PD), gamma=gamma, ratio_clip=1.2)
    close(out, reference.per_decision_returns(*take(PD), gamma, 1.2), 1e-9)
    done = data["terminated"] | data["truncated"]
    ended = np.stack([done[t:].any(axis=0) for t in range(shape[0])])
    mask = complete_episode_mask(data["terminated"], data["truncated"])
    assert mask.dtype == jnp.bool_
    np.testing.assert_array_equal(mask, ended)


def test_without_next_values_a_cut_is_worth_nothing(x64: None) -> None:
    data = rollout(2, (9, 2))
    zeros = {**data, "next_values": np.zeros((9, 2))}
    for name, names in (("discounted_returns", MC), ("per_decision_returns", PD)):
        fn = functools.partial(JITTED[name], gamma=0.9)
        close(fn(*(data[x] for x in names[:-1])), fn(*(zeros[x] for x in names)), 1e-12)


def calls(data: dict) -> dict[str, tuple[Callable, tuple[str, ...]]]:
    """Every function as one of float arrays alone, on the flags of `data`."""
    flags = {"terminated": data["terminated"], "truncated": data["truncated"]}
    return {
        "td_errors": (
            lambda r, v, nv: td_errors(r, v, nv, flags["terminated"], gamma=0.9),
            ("rewards", "values", "next_values"),
        ),
        "discounted_returns": (
            lambda r, nv: discounted_returns(r, **flags, next_values=nv, gamma=0.9),
            ("rewards", "next_values"),
        ),
        "n_step_returns": (
            lambda r, nv: n_step_returns(r, nv, **flags, gamma=0.9, n=3),
            ("rewards", "next_values"),
        ),
        "lambda_returns": (
            lambda r, nv: lambda_returns(r, nv, **flags, gamma=0.9, lambda_=0.7),
            ("rewards", "next_values"),
        ),
        "per_decision_returns": (
            lambda lr, r, nv: per_decision_returns(
                lr, r, **flags, next_values=nv, gamma=0.9, ratio_clip=1.5
            ),
            ("log_ratios", "rewards", "next_values"),
        ),
    }


FLOAT_FUNCTIONS = list(calls(rollout(0, (2,))))


@pytest.mark.parametrize("name", FLOAT_FUNCTIONS)
def test_eager_jit_and_vmap_agree(name: str, variant: Callable) -> None:
    data = rollout(3, (8, 2))
    fn, names = calls(data)[name]
    floats = [jnp.asarray(data[x], jnp.float32) for x in names]
    expected = jax.jit(fn)(*floats)
    out = variant(fn)(*floats)
    assert out.dtype == jnp.float32
    close(out, expected, 1e-6)


def test_columns_are_independent_and_vmap_over_them_changes_nothing() -> None:
    data = rollout(4, (6, 3))
    names = (*BOOT, "gamma", "lambda_")
    fn = jax.jit(lambda r, nv, te, tr, g, lam: lambda_returns(r, nv, te, tr, gamma=g, lambda_=lam))
    whole = fn(*(data[x] for x in names))
    mapped = jax.vmap(fn, in_axes=1, out_axes=1)(*(data[x] for x in names))
    close(mapped, whole, 1e-6)
    order = np.array([2, 0, 1])
    close(fn(*(data[x][:, order] for x in names)), np.asarray(whole)[:, order], 1e-6)


def test_settings_can_be_swept() -> None:
    data = rollout(5, (6, 2))
    fn = jax.jit(lambda g, lam: lambda_returns(*(data[x] for x in BOOT), gamma=g, lambda_=lam))
    gammas, lambdas = jnp.array([0.0, 0.5, 1.0]), jnp.array([1.0, 0.3, 0.0])
    swept = jax.vmap(fn)(gammas, lambdas)
    for i in range(3):
        close(swept[i], fn(gammas[i], lambdas[i]), 1e-6)


@pytest.mark.parametrize("gamma", [np.full((4, 1), 0.5), np.full((1, 2), 0.5), np.float32(0.5)])
def test_gamma_of_the_rank_of_the_rewards_broadcasts(gamma: np.ndarray) -> None:
    data = rollout(6, (4, 2))
    fn = JITTED["discounted_returns"]
    out = fn(*(data[x] for x in MC), gamma=gamma)
    close(out, fn(*(data[x] for x in MC), gamma=np.full((4, 2), 0.5)), 1e-6)


# --- identities ---------------------------------------------------------------------------------


def test_identities(x64: None) -> None:
    data = rollout(7, (9, 2))
    boot = [data[x] for x in BOOT]
    monte_carlo = JITTED["discounted_returns"](*(data[x] for x in MC), gamma=0.9)
    one_step = td_errors(*(data[x] for x in TD), gamma=0.9) + data["values"]
    close(JITTED["n_step_returns"](*boot, gamma=0.9, n=1), one_step, 1e-12)
    close(JITTED["n_step_returns"](*boot, gamma=0.9, n=9), monte_carlo, 1e-12)
    close(JITTED["n_step_returns"](*boot, gamma=0.9, n=500), monte_carlo, 1e-12)
    close(JITTED["lambda_returns"](*boot, gamma=0.9, lambda_=0.0), one_step, 1e-12)
    finite = [boot[0], np.nan_to_num(boot[1]), *boot[2:]]
    close(JITTED["lambda_returns"](*finite, gamma=0.9, lambda_=1.0), monte_carlo, 1e-12)
    on_policy = [np.zeros((9, 2)), *(data[x] for x in MC)]
    close(JITTED["per_decision_returns"](*on_policy, gamma=0.9), monte_carlo, 1e-12)
    # a value function that satisfies the Bellman equation along the rollout: all n agree
    r, v = data["rewards"], data["values"]
    consistent = np.concatenate([v[1:], v[-1:]])
    rewards = v - 0.9 * np.where(data["terminated"], 0, consistent)
    for n in (1, 4, 9):
        out = JITTED["n_step_returns"](rewards, consistent, *boot[2:], gamma=0.9, n=n)
        close(out, v, 1e-12, f"n={n}")
    assert r.shape == v.shape


def test_one_row_equals_the_same_row_of_a_longer_rollout() -> None:
    data = rollout(8, (5, 2))
    fn = JITTED["lambda_returns"]
    whole = fn(*(data[x] for x in BOOT), gamma=0.9, lambda_=0.6)
    last = fn(*(data[x][-1:] for x in BOOT), gamma=0.9, lambda_=0.6)
    close(last, np.asarray(whole)[-1:], 1e-6)


@pytest.mark.parametrize("options", [{"associative": True}, {"unroll": 3}])
def test_ways_to_run_the_recurrence_agree(options: dict, x64: None) -> None:
    data = rollout(9, (13, 2))

    def values_and_gradients(**kwargs: object) -> list:
        def total(
            log_ratios: jax.Array, rewards: jax.Array, next_values: jax.Array, gamma: jax.Array
        ) -> tuple[jax.Array, list]:
            flags = (data["terminated"], data["truncated"])
            boot = (rewards, next_values, *flags)
            mc = (rewards, *flags, next_values)
            outs = [
                lambda_returns(*boot, gamma=gamma, lambda_=0.7, **kwargs),
                discounted_returns(*mc, gamma=gamma, **kwargs),
                per_decision_returns(log_ratios, *mc, gamma=gamma, **kwargs),
            ]
            return sum(jnp.sum(jnp.sin(x)) for x in outs), outs

        inputs = [data[x] for x in ("log_ratios", "rewards", "next_values")]
        fn = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True))
        return jax.tree.leaves(fn(*inputs, 0.9))

    for ours, plain in zip(values_and_gradients(**options), values_and_gradients(), strict=True):
        assert np.isfinite(plain).all()
        close(ours, plain, 1e-10)


def test_linear_recurrence_starts_from_init_unless_cut() -> None:
    a, b = jnp.array([[2.0, 2.0], [3.0, 3.0]]), jnp.array([[1.0, 1.0], [1.0, 1.0]])
    rows = {"a": a, "b": b, "cut": jnp.array([[False, False], [False, True]])}
    for associative in (False, True):
        x = module.linear_recurrence(
            _plain_row, rows, jnp.array([10.0, jnp.nan]), associative=associative
        )
        # column 0: 1 + 3·10 = 31, 1 + 2·31 = 63; column 1 is cut behind its last row
        np.testing.assert_array_equal(x, [[63.0, 3.0], [31.0, 1.0]])


def _plain_row(a: jax.Array, b: jax.Array, cut: jax.Array) -> tuple:
    return a, b, cut


def test_eager_calls_compile_once() -> None:
    compiled = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    data = rollout(10, (11, 3))
    floats = [jnp.asarray(data[x]) for x in BOOT]
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        lambda_returns(*floats, gamma=0.91, lambda_=0.5)
        first = len(compiled)
        lambda_returns(*floats, gamma=0.92, lambda_=0.4)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert first > 0
    assert len(compiled) == first


# --- known faults -------------------------------------------------------------------------------


def test_r3_bootstrap_reads_the_next_value_not_the_value() -> None:
    # 1 + 0.9·2 − 10 = −7.2; with v(S(t)) in place of the next value it would be 0
    close(td_errors([1.0], [10.0], [2.0], [0], gamma=0.9), [-7.2], 1e-6)
    close(lambda_returns([1.0], [2.0], [0], [1], gamma=0.9, lambda_=0.95), [2.8], 1e-6)


def test_r7_a_flag_belongs_to_the_step_that_ended_the_episode() -> None:
    out = discounted_returns([1.0, 1.0, 1.0], [0, 1, 0], gamma=1.0)
    np.testing.assert_array_equal(out, [2.0, 1.0, 1.0])


def test_r9_returns_stop_at_the_end_of_the_episode() -> None:
    out = discounted_returns([1.0, 1.0, 1.0, 1.0], [0, 1, 0, 0], gamma=1.0)
    np.testing.assert_array_equal(out, [2.0, 1.0, 2.0, 1.0])
    # the tail of the second episode has no Monte Carlo return: the mask says so
    np.testing.assert_array_equal(complete_episode_mask([0, 1, 0, 0]), [True, True, False, False])


@pytest.mark.parametrize("options", [{}, {"associative": True}])
@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_r13_a_nan_behind_a_flag_does_not_reach_back(flag: str, options: dict) -> None:
    flags = {"terminated": jnp.zeros(4, bool), "truncated": jnp.zeros(4, bool)}
    flags[flag] = jnp.array([False, True, False, False])
    rewards = jnp.array([1.0, 1.0, jnp.nan, jnp.inf])
    next_values = jnp.ones(4)
    log_ratios = jnp.array([0.0, 0.0, jnp.nan, 0.0])

    @jax.jit
    def run(log_ratios: jax.Array, rewards: jax.Array) -> list[jax.Array]:
        mc = {**flags, "next_values": next_values, "gamma": 0.5}
        return [
            discounted_returns(rewards, **mc, **options),
            lambda_returns(rewards, next_values, **flags, gamma=0.5, lambda_=0.5, **options),
            per_decision_returns(log_ratios, rewards, **mc, **options),
            n_step_returns(rewards, next_values, **flags, gamma=0.5, n=3),
        ]

    ends = 1.0 if flag == "terminated" else 1.5
    for out in run(log_ratios, rewards):
        assert out[1] == ends
        assert np.isfinite(out[0])


@pytest.mark.parametrize("name", FLOAT_FUNCTIONS)
def test_next_values_that_are_not_read_change_nothing(name: str) -> None:
    data = rollout(11, (8, 2), flag_rate=0.4)
    fn, names = calls(data)[name]
    read = ~data["terminated"]
    if name in ("discounted_returns", "per_decision_returns"):
        read &= data["truncated"] | (np.arange(8)[:, None] == 7)
    assert not read.all()
    argnums = tuple(range(len(names)))

    @jax.jit
    def run(*inputs: jax.Array) -> tuple:
        loss = lambda *inputs: jnp.sum(fn(*inputs) ** 2)  # noqa: E731
        return fn(*inputs), jax.grad(loss, argnums=argnums)(*inputs)

    results = []
    for unread in (0.0, np.nan, np.inf):
        filled = {**data, "next_values": np.where(read, data["next_values"], unread)}
        results.append(run(*(jnp.asarray(filled[x], jnp.float32) for x in names)))
    for other in results[1:]:
        for a, b in zip(jax.tree.leaves(results[0]), jax.tree.leaves(other), strict=True):
            assert np.isfinite(a).all()
            np.testing.assert_array_equal(a, b)
    gradient = results[0][1][names.index("next_values")]
    assert (np.asarray(gradient)[~read] == 0).all()
    assert (np.asarray(gradient)[read] != 0).any()


def test_n_step_windows_do_not_read_next_values_behind_a_cut() -> None:
    # row 2 serves only the window that starts at row 0, and that one ends at row 1
    next_values = jnp.array([1.0, 2.0, jnp.nan, 3.0, 4.0])
    flags = ([0, 0, 0, 0, 0], [0, 1, 0, 0, 0])
    out = n_step_returns(jnp.ones(5), next_values, *flags, gamma=0.5, n=3)
    close(out, [2.0, 2.0, 2.25, 2.5, 3.0], 1e-6)


def test_large_log_ratios() -> None:
    log_ratios, rewards = jnp.array([1000.0, -1000.0, 500.0]), jnp.ones(3)

    @jax.value_and_grad
    def clipped(log_ratios: jax.Array) -> jax.Array:
        out = per_decision_returns(log_ratios, rewards, [0, 0, 1], gamma=1.0, ratio_clip=2.0)
        return jnp.sum(out)

    value, gradient = clipped(log_ratios)
    # ratios 2, 0, 2: returns 2, 0, 2, and no gradient through a bound or an underflow
    np.testing.assert_allclose(value, 4.0, rtol=1e-6)
    np.testing.assert_array_equal(gradient, [0.0, 0.0, 0.0])
    unclipped = per_decision_returns(log_ratios, rewards, [0, 0, 1], gamma=1.0)
    assert np.isinf(unclipped[2])


# --- dtypes, gradients, errors ------------------------------------------------------------------


def test_r49_dtypes() -> None:
    rewards, done, v = np.array([1, 0, 1]), np.array([False, False, True]), np.array([2, 3, 4])
    expected = {
        "td_errors": [1 + 0.5 * 2 - 2, 0 + 0.5 * 3 - 3, 1 - 4],
        "discounted_returns": [1.25, 0.5, 1.0],
        "n_step_returns": [1.75, 0.5, 1.0],
        "lambda_returns": [1.75, 1.0, 1.0],
        "per_decision_returns": [1.25, 0.5, 1.0],
    }

    def run(dtype: type) -> dict[str, jax.Array]:
        fns = {
            "td_errors": lambda r, nv: td_errors(r, nv, nv, done.astype(np.int8), gamma=0.5),
            "discounted_returns": lambda r, nv: discounted_returns(r, done, gamma=0.5),
            "n_step_returns": lambda r, nv: n_step_returns(r, nv, done, gamma=0.5, n=2),
            "lambda_returns": lambda r, nv: lambda_returns(r, nv, done, gamma=0.5, lambda_=0.5),
            "per_decision_returns": lambda r, nv: per_decision_returns(r * 0, r, done, gamma=0.5),
        }
        inputs = jnp.asarray(rewards, dtype), jnp.asarray(v, dtype)
        outs = jax.jit(lambda r, nv: {name: fn(r, nv) for name, fn in fns.items()})(*inputs)
        for name, out in outs.items():
            close(out, expected[name], 1e-6, name)
        return {name: out.dtype for name, out in outs.items()}

    kinds = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32, jnp.uint8)
    for kind in kinds:
        assert set(run(kind).values()) == {jnp.dtype(jnp.float32)}, kind
    with jax.enable_x64(True):
        assert set(run(jnp.float64).values()) == {jnp.dtype(jnp.float64)}
        assert set(run(jnp.float32).values()) == {jnp.dtype(jnp.float32)}
        assert set(run(jnp.bfloat16).values()) == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("name", FLOAT_FUNCTIONS)
def test_gradients(name: str, x64: None) -> None:
    data = rollout(12, (6, 2))
    data["next_values"] = np.nan_to_num(data["next_values"])
    data["log_ratios"] = data["log_ratios"] + 0.01
    fn, names = calls(data)[name]
    check_grads(jax.jit(fn), tuple(data[x] for x in names), order=1, modes=("fwd", "rev"))


def test_gradients_of_the_settings(x64: None) -> None:
    data = rollout(13, (6, 2))
    boot = [data["rewards"], np.nan_to_num(data["next_values"]), *(data[x] for x in BOOT[2:])]

    @jax.jit
    def fn(gamma: jax.Array, lambda_: jax.Array) -> tuple:
        return (
            lambda_returns(*boot, gamma=gamma, lambda_=lambda_),
            n_step_returns(*boot, gamma=gamma, n=3),
        )

    # 0 and 1 too: a cut there would be right in value and wrong in slope
    for point in (0.3, 0.0, 1.0):
        check_grads(fn, (point, point), order=1, modes=("fwd", "rev"))


def test_errors_name_the_argument() -> None:
    r, f = jnp.ones((3, 3)), jnp.zeros((3, 3), bool)
    with pytest.raises(TypeError, match="terminated must be a bool or integer flag"):
        td_errors(r, r, r, jnp.zeros((3, 3)), gamma=0.9)
    with pytest.raises(TypeError, match="truncated must be a bool or integer flag"):
        discounted_returns(r, f, jnp.zeros((3, 3)), gamma=0.9)
    with pytest.raises(ValueError, match=r"rewards \(3, 3\), next_values \(3,\)"):
        lambda_returns(r, r[0], f, gamma=0.9, lambda_=0.9)
    with pytest.raises(ValueError, match=r"rewards \(3, 3\), terminated \(3,\)"):
        n_step_returns(r, r, f[0], gamma=0.9, n=1)
    with pytest.raises(ValueError, match=r"rewards \(3, 3\), truncated \(3, 1\)"):
        n_step_returns(r, r, f, f[:, :1], gamma=0.9, n=1)
    with pytest.raises(ValueError, match="gamma must be a scalar or an array of rank 2"):
        discounted_returns(r, f, gamma=jnp.ones(3))
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got 1.1"):
        discounted_returns(r, f, gamma=1.1)
    with pytest.raises(ValueError, match=r"lambda_ must lie in \[0, 1\], got -0.5"):
        lambda_returns(r, r, f, gamma=0.9, lambda_=-0.5)
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got nan"):
        discounted_returns(r, f, gamma=float("nan"))
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        n_step_returns(r, r, f, gamma=0.9, n=0)
    with pytest.raises(TypeError, match="n must be a whole number"):
        n_step_returns(r, r, f, gamma=0.9, n=2.0)
    with pytest.raises(ValueError, match="ratio_clip must lie in"):
        per_decision_returns(r, r, f, gamma=0.9, ratio_clip=0.0)
    with pytest.raises(ValueError, match="time axis"):
        discounted_returns(1.0, False, gamma=0.9)
    with pytest.raises(ValueError, match=r"terminated \(3, 3\), truncated \(3,\)"):
        complete_episode_mask(f, f[0])
    with pytest.raises(ValueError, match="time axis"):
        complete_episode_mask(jnp.zeros((0, 3), bool))
    with pytest.raises(TypeError, match="rewards must be an array of real numbers"):
        discounted_returns(r * 1j, f, gamma=0.9)
