"""Whole losses: reference cases, composition, metrics, parts that add up, masks, faults."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases_loader import arrays, assert_close, load_cases

from jaxpg.kl import kl_k1, kl_k2, kl_k3, kl_k3_corrected
from jaxpg.losses import clipped_surrogate_loss, truncated_importance_weights
from jaxpg.objectives import (
    actor_critic_loss,
    dapo_loss,
    dr_grpo_loss,
    grpo_loss,
    gspo_loss,
    ppo_clip_loss,
    ppo_kl_loss,
    reinforce_loss,
    rloo_loss,
)
from jaxpg.reductions import sequence_mean

BOTH = pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
WHOLE = {
    "seq_mean_token_mean": grpo_loss,
    "token_mean": dapo_loss,
    "seq_mean_token_const": dr_grpo_loss,
    "group_token_mean": partial(dapo_loss, group_axis=0),
}
TOKEN_LOSSES: dict[str, Callable] = {
    "grpo": grpo_loss,
    "dapo": dapo_loss,
    "dapo_per_group": partial(dapo_loss, group_axis=0),
    "dr_grpo": partial(dr_grpo_loss, max_length=7),
    "gspo": partial(gspo_loss, clip_epsilon=0.1, clip_epsilon_high=0.2),
    "rloo": rloo_loss,
}
STEP_LOSSES: dict[str, tuple[Callable, int]] = {
    "reinforce": (reinforce_loss, 2),
    "actor_critic": (actor_critic_loss, 4),
    "ppo_clip": (ppo_clip_loss, 5),
    "ppo_kl": (partial(ppo_kl_loss, kl_coef=0.7), 6),
}


def case_id(case: dict) -> str:
    return case["id"]


def tokens(seed: int = 0) -> dict[str, np.ndarray]:
    """``[P, G, T] = [2, 3, 5]``, one sequence without a valid token."""
    rng = np.random.default_rng(seed)
    names = ("log_probs", "old_log_probs", "ref_log_probs", "entropies")
    x = {name: rng.normal(size=(2, 3, 5)).astype(np.float32) for name in names}
    x["advantages"] = rng.normal(size=(2, 3)).astype(np.float32)
    x["weights"] = rng.uniform(0, 2, (2, 3)).astype(np.float32)
    x["mask"] = np.arange(5) < np.array([[5, 2, 4], [0, 3, 1]])[..., None]
    x["mask"][0, 0, 1] = False
    return x


# --- reference cases ---------------------------------------------------------------------------


def whole_cases() -> list[dict]:
    cases = load_cases("group_losses", "policy_loss", "policy_loss_grouped")
    found = [
        case
        for case in cases
        if case["params"]["kind"] == "clip" and case["params"]["aggregation"] in WHOLE
    ]
    assert len(found) >= 25
    return found


@pytest.mark.parametrize("case", whole_cases(), ids=case_id)
def test_token_loss_cases(case: dict) -> None:
    """In float64; the same cases run in both precisions from their parts in test_losses."""
    params = case["params"]
    with jax.enable_x64(True):
        log_probs, old, advantages = arrays(case, "logp", "old_logp", "advantages")
        mask = np.array(case["inputs"]["mask"])
        settings = {
            "clip_epsilon": params["eps_low"],
            "clip_epsilon_high": params["eps_high"],
            "dual_clip": params.get("dual_clip"),
        }
        if params["aggregation"] == "seq_mean_token_mean":
            settings["count_empty"] = params["empty_rows"] == "count"
        if "max_len" in params:
            settings["max_length"] = params["max_len"]
        if "tis" in params:
            settings["weights"] = jnp.asarray(case["expected"]["weights"])
        if "kl" in params:
            (settings["ref_log_probs"],) = arrays(case, "ref_logp")
            settings["kl_coef"] = params["beta"]
            estimators = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
            settings["kl_estimator"] = estimators.get(
                params["kl"], lambda p, ref, m: kl_k3_corrected(p, ref, old, m)
            )
        shape = (2, 2, 5) if "groups" in case["inputs"] else log_probs.shape
        advantages = advantages.reshape(*shape[:-1], *advantages.shape[1:])

        def loss_fn(log_probs: jax.Array) -> tuple:
            return WHOLE[params["aggregation"]](
                log_probs.reshape(shape),
                old.reshape(shape),
                advantages,
                mask.reshape(shape),
                **settings,
            )

        (loss, _), grad = jax.value_and_grad(loss_fn, has_aux=True)(log_probs)
        assert_close(loss, case["expected"]["loss"], "loss")
        assert_close(grad, case["expected"]["grad_logp"], "gradient")


@BOTH
@pytest.mark.parametrize(
    "case",
    load_cases("group_losses", "gspo_loss", "gspo_token_loss", "sequence_clip_loss"),
    ids=case_id,
)
def test_sequence_loss_cases(case: dict, double: bool) -> None:
    with jax.enable_x64(double):
        log_probs, old, advantages = arrays(case, "logp", "old_logp", "advantages")
        mask = np.array(case["inputs"]["mask"])
        fn = rloo_loss if case["fn"] == "sequence_clip_loss" else gspo_loss
        low, high = case["params"]["eps_low"], case["params"]["eps_high"]
        loss_fn = partial(fn, clip_epsilon=low, clip_epsilon_high=high)
        (loss, _), grad = jax.value_and_grad(loss_fn, has_aux=True)(
            log_probs, old, advantages, mask
        )
        assert_close(loss, case["expected"]["loss"], "loss")
        assert_close(grad, case["expected"]["grad_logp"], "gradient")


@BOTH
@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo"])
def test_clip_fraction_case(name: str, double: bool) -> None:
    (case,) = load_cases("group_losses", "clip_fraction")
    with jax.enable_x64(double):
        log_probs, old, advantages = arrays(case, "logp", "old_logp", "advantages")
        params, mask = case["params"], np.array(case["inputs"]["mask"])
        _, metrics = TOKEN_LOSSES[name](
            log_probs,
            old,
            advantages,
            mask,
            clip_epsilon=params["eps_low"],
            clip_epsilon_high=params["eps_high"],
            dual_clip=params["dual_clip"],
        )
        expected = case["expected"]
        assert_close(metrics["clip_fraction_low"], expected["low"])
        assert_close(metrics["clip_fraction_high"], expected["high"])
        assert_close(metrics["clip_fraction"], expected["either"])
        assert_close(metrics["dual_clip_fraction"], expected["dual"])
        assert_close(metrics["approx_kl"], expected["approx_kl_k3"])
        k1 = kl_k1(old, log_probs, mask).sum() / mask.sum()
        assert_close(k1, expected["approx_kl_k1"])


@pytest.mark.parametrize("case", load_cases("policy_losses", "ppo_clip_loss"), ids=case_id)
def test_ppo_cases(case: dict) -> None:
    with jax.enable_x64(True):
        log_probs, old, advantages = arrays(case, "new_log_prob", "old_log_prob", "advantages")
        mask = case["inputs"]["mask"]
        mask = None if mask is None else np.array(mask)
        values = jnp.zeros_like(log_probs)

        def loss_fn(log_probs: jax.Array) -> tuple:
            epsilon = case["params"]["clip_eps"]
            return ppo_clip_loss(
                log_probs, old, advantages, values, values, mask, clip_epsilon=epsilon
            )

        (loss, metrics), grad = jax.value_and_grad(loss_fn, has_aux=True)(log_probs)
        assert_close(loss, case["expected"]["loss"], "loss")
        assert_close(grad, case["expected"]["grad_log_prob"], "gradient")
        assert_close(metrics["clip_fraction"], case["expected"]["clip_fraction"])


@pytest.mark.parametrize("case", load_cases("policy_losses", "clipped_value_loss"), ids=case_id)
def test_ppo_value_clip_cases(case: dict) -> None:
    with jax.enable_x64(True):
        values, old, targets = arrays(case, "values", "old_values", "targets")
        zero = jnp.zeros_like(values)

        def loss_fn(values: jax.Array) -> tuple:
            return ppo_clip_loss(
                *[zero] * 3,
                values,
                targets,
                old_values=old,
                value_clip_epsilon=case["params"]["clip_eps"],
                vf_coef=1.0,
            )

        (loss, metrics), grad = jax.value_and_grad(loss_fn, has_aux=True)(values)
        assert_close(loss, case["expected"]["loss"])
        assert_close(metrics["value_loss"], case["expected"]["loss"])
        assert_close(grad, case["expected"]["grad_values"])


# --- losses per step, by definition ------------------------------------------------------------


def test_step_losses_by_definition(variant: Callable) -> None:
    rng = np.random.default_rng(0)
    p, old, A, v, G, kl, H, old_v = rng.normal(size=(8, 3, 4)).astype(np.float32)
    mask = rng.random((3, 4)) < 0.7
    ratio = np.exp(np.float64(p) - old)

    def mean(x: np.ndarray) -> float:
        return x[mask].mean()

    value, entropy = mean((v - G) ** 2 / 2), mean(H)
    surrogate = mean(np.maximum(-ratio * A, -np.clip(ratio, 0.9, 1.3) * A))
    rest = 0.3 * value - 0.1 * entropy

    loss, metrics = variant(lambda *x: reinforce_loss(*x[:3], entropies=x[3], ent_coef=0.1))(
        p, A, mask, H
    )
    assert_close(loss, mean(-A * p) - 0.1 * entropy)
    assert_close(metrics["policy_loss"], mean(-A * p))
    assert set(metrics) == {"policy_loss", "entropy"}

    coefs = {"vf_coef": 0.3, "ent_coef": 0.1}
    loss, metrics = variant(lambda *x: actor_critic_loss(*x[:5], entropies=x[5], **coefs))(
        p, A, v, G, mask, H
    )
    assert_close(loss, mean(-A * p) + rest)
    assert_close(metrics["value_loss"], value)
    assert_close(metrics["entropy"], entropy)

    clip = {"clip_epsilon": 0.1, "clip_epsilon_high": 0.3}
    loss, metrics = variant(lambda *x: ppo_clip_loss(*x[:6], entropies=x[6], **clip, **coefs))(
        p, old, A, v, G, mask, H
    )
    assert_close(loss, surrogate + rest)
    assert_close(metrics["policy_loss"], surrogate)
    assert_close(metrics["approx_kl"], mean(ratio - 1 - (np.float64(p) - old)))
    assert_close(metrics["clip_fraction"], mean((ratio < 0.9) | (ratio > 1.3)))
    low, high = (ratio < 0.9) & (A < 0), (ratio > 1.3) & (A > 0)
    assert_close(metrics["clip_fraction_low"], mean(low))
    assert_close(metrics["clip_fraction_high"], mean(high))

    clipped_v = old_v + np.clip(v - old_v, -0.5, 0.5)
    clipped_value = mean(np.maximum((v - G) ** 2, (clipped_v - G) ** 2) / 2)
    loss, metrics = ppo_clip_loss(
        p, old, A, v, G, mask, old_values=old_v, value_clip_epsilon=0.5, dual_clip=1.5, **clip
    )
    assert_close(metrics["value_loss"], clipped_value)
    assert_close(metrics["dual_clip_fraction"], mean((ratio > 1.5) & (A < 0)))
    assert_close(loss, metrics["policy_loss"] + 0.5 * clipped_value)

    loss, metrics = variant(lambda *x: ppo_kl_loss(*x[:7], kl_coef=2.0, entropies=x[7], **coefs))(
        p, old, A, v, G, kl, mask, H
    )
    assert_close(loss, mean(-ratio * A) + 2 * mean(kl) + rest)
    assert_close(metrics["kl"], mean(kl))
    assert_close(metrics["policy_loss"], mean(-ratio * A))


def test_r27_value_clipping_is_off_by_default() -> None:
    zero = jnp.zeros(1)

    def loss_fn(v: jax.Array) -> jax.Array:
        targets, old = jnp.full(1, 100.0), jnp.zeros(1)
        return ppo_clip_loss(zero, zero, zero, v, targets, old_values=old, vf_coef=1.0)[0]

    np.testing.assert_allclose(jax.grad(loss_fn)(jnp.full(1, 50.0)), [-50.0])


# --- losses on sequences -----------------------------------------------------------------------


def test_token_losses_by_composition(variant: Callable) -> None:
    """Everything at once: weights, KL, entropy."""
    x = tokens()
    mask, sequences = x["mask"], x["mask"].any(-1)

    def run(name: str) -> tuple:
        def call(p, old, A, mask, ref, w, H) -> tuple:
            settings = {"kl_coef": 0.3, "ent_coef": 0.1}
            return TOKEN_LOSSES[name](
                p, old, A, mask, ref_log_probs=ref, weights=w, entropies=H, **settings
            )

        names = ("log_probs", "old_log_probs", "advantages", "mask", "ref_log_probs")
        return variant(call)(*[x[n] for n in names], x["weights"], x["entropies"])

    p, old, ref = (np.float64(x[n]) for n in ("log_probs", "old_log_probs", "ref_log_probs"))
    A, w = x["advantages"][..., None], x["weights"][..., None]
    ratio, d = np.exp(p - old), p - ref
    kl = np.where(mask, np.exp(-d) + d - 1, 0)
    length = np.maximum(mask.sum(-1), 1)
    entropy = x["entropies"][mask].mean()

    def surrogate(ratio: np.ndarray, A: np.ndarray, low: float, high: float) -> np.ndarray:
        return -np.minimum(ratio * A, np.clip(ratio, 1 - low, 1 + high) * A)

    def over_sequences(per_row: np.ndarray) -> float:
        return per_row[sequences].mean()

    policy = np.where(mask, w * surrogate(ratio, A, 0.2, 0.2), 0)
    higher = np.where(mask, w * surrogate(ratio, A, 0.2, 0.28), 0)
    mean_d = np.where(mask, p - old, 0).sum(-1) / length
    rows = x["weights"] * surrogate(np.exp(mean_d), x["advantages"], 0.1, 0.2)
    whole = x["weights"] * surrogate(np.exp(mean_d * length), x["advantages"], 0.2, 0.2)
    kl_rows = over_sequences(kl.sum(-1) / length)
    groups = mask.sum((1, 2))
    expected = {
        "grpo": (over_sequences(policy.sum(-1) / length), kl_rows),
        "dapo": (higher.sum() / mask.sum(), kl.sum() / mask.sum()),
        "dapo_per_group": (
            (higher.sum((1, 2)) / groups).mean(),
            (kl.sum((1, 2)) / groups).mean(),
        ),
        "dr_grpo": (policy.sum() / (6 * 7), kl.sum() / (6 * 7)),
        "gspo": (over_sequences(rows), kl_rows),
        "rloo": (over_sequences(whole), kl_rows),
    }
    for name, (policy_loss, kl_term) in expected.items():
        loss, metrics = run(name)
        assert_close(metrics["policy_loss"], policy_loss, name)
        assert_close(loss, policy_loss + 0.3 * kl_term - 0.1 * entropy, name)
        assert_close(metrics["kl_ref"], kl[mask].mean(), name)  # G61: nats a token, whatever mean
        assert_close(metrics["entropy"], entropy, name)
        assert_close(metrics["approx_kl"], (ratio - 1 - (p - old))[mask].mean(), name)
        assert all(m.shape == () for m in metrics.values())


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_parts_add_up_to_the_whole(name: str) -> None:
    """Losses, gradients and metrics of micro-batches, with the counts of the whole batch."""
    x = tokens()
    mask = x.pop("mask")
    counts = {"dapo": mask.sum(), "dapo_per_group": 2, "dr_grpo": 6}
    denominator = counts.get(name, mask.any(-1).sum())

    def run(part: dict, mask: np.ndarray, **denominators: object) -> tuple:
        def loss_fn(p: jax.Array) -> tuple:
            settings = {"kl_coef": 0.3, "ent_coef": 0.1, "dual_clip": 2.0}
            rest = {n: part[n] for n in ("ref_log_probs", "weights", "entropies")}
            return TOKEN_LOSSES[name](
                p, part["old_log_probs"], part["advantages"], mask,
                **rest, **settings, **denominators,
            )  # fmt: skip

        return jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(part["log_probs"])

    (loss, metrics), grad = run(x, mask)
    parts = [
        run(
            {n: v[i : i + 1] for n, v in x.items()},
            mask[i : i + 1],
            denominator=denominator,
            token_denominator=mask.sum(),
        )
        for i in range(2)
    ]
    assert_close(sum(part[0][0] for part in parts), loss)
    assert_close(np.concatenate([part[1] for part in parts]), grad)
    for key, value in metrics.items():
        assert_close(sum(part[0][1][key] for part in parts), value, key)


def test_parts_of_step_losses_add_up() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(6, 8)).astype(np.float32)
    mask = np.array([1, 1, 0, 1, 1, 1, 1, 0], bool)
    for name, (fn, num) in STEP_LOSSES.items():
        whole, metrics = fn(*x[:num], mask, entropies=x[0], ent_coef=0.1)
        parts = [
            fn(*x[:num, s], mask[s], entropies=x[0, s], ent_coef=0.1, denominator=6)
            for s in (slice(0, 3), slice(3, 8))
        ]
        assert_close(sum(part[0] for part in parts), whole, name)
        for key in metrics:
            assert_close(sum(part[1][key] for part in parts), metrics[key], key)


def test_entropies_of_a_part_need_a_token_denominator() -> None:
    x = tokens()
    args = [x[n] for n in ("log_probs", "old_log_probs", "advantages", "mask")]
    for name in ("grpo", "dapo_per_group", "dr_grpo", "gspo", "rloo"):
        with pytest.raises(ValueError, match="token_denominator"):
            TOKEN_LOSSES[name](*args, denominator=5, entropies=x["entropies"])
    _, metrics = dapo_loss(*args, denominator=2 * x["mask"].sum(), entropies=x["entropies"])
    assert_close(metrics["entropy"], x["entropies"][x["mask"]].mean() / 2)


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_nan_and_inf_under_the_mask(name: str) -> None:
    """In any array, also a NaN advantage and weight of a sequence without a token."""
    x = tokens()
    mask = x.pop("mask")
    names = list(x)

    @jax.jit
    def run(*values: jax.Array) -> tuple:
        def loss_fn(*values: jax.Array) -> tuple:
            part = dict(zip(names, values, strict=True))
            args = [part.pop(n) for n in ("log_probs", "old_log_probs", "advantages")]
            return TOKEN_LOSSES[name](*args, mask, **part, kl_coef=0.3, ent_coef=0.1)

        argnums = tuple(range(len(names)))
        return jax.value_and_grad(loss_fn, argnums, has_aux=True)(*values)

    poison = np.resize(np.array([np.nan, np.inf, -np.inf], np.float32), mask.shape)
    for full_rank in (False, True):
        if full_rank:
            for key in ("advantages", "weights"):
                x[key] = np.repeat(x[key][..., None], 5, -1)
        bad = {}
        for key, value in x.items():
            where = mask if value.ndim == 3 else mask.any(-1)
            bad[key] = np.where(where, value, poison if value.ndim == 3 else np.nan)
        clean, poisoned = run(*x.values()), run(*bad.values())
        for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(poisoned), strict=True):
            assert np.all(np.isfinite(a))
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", STEP_LOSSES)
def test_nan_and_inf_under_the_mask_of_step_losses(name: str) -> None:
    fn, num = STEP_LOSSES[name]
    x = np.random.default_rng(2).normal(size=(num + 1, 6)).astype(np.float32)
    mask = np.array([1, 0, 1, 0, 1, 0], bool)

    @jax.jit
    def run(*xs: jax.Array) -> tuple:
        def loss_fn(*xs: jax.Array) -> tuple:
            return fn(*xs[:-1], mask, entropies=xs[-1], ent_coef=0.1)

        return jax.value_and_grad(loss_fn, tuple(range(num + 1)), has_aux=True)(*xs)

    bad = np.where(mask, x, np.array([0, np.nan, 0, np.inf, 0, -np.inf], np.float32))
    for a, b in zip(jax.tree.leaves(run(*x)), jax.tree.leaves(run(*bad)), strict=True):
        assert np.all(np.isfinite(a))
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_g01_nothing_valid_and_overflow_are_finite(name: str) -> None:
    x = tokens()
    args = [x[n] for n in ("log_probs", "old_log_probs", "advantages")]
    fn = jax.jit(jax.value_and_grad(TOKEN_LOSSES[name], has_aux=True))
    (loss, metrics), grad = fn(*args, np.zeros_like(x["mask"]))
    assert loss == 0
    assert all(value == 0 for value in metrics.values())
    np.testing.assert_array_equal(grad, np.zeros_like(grad))
    args[1] = args[1] - np.float32(100) * np.sign(x["advantages"])[..., None]
    (loss, metrics), grad = fn(*args, x["mask"])
    assert all(np.all(np.isfinite(v)) for v in [loss, grad, *metrics.values()])


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_forms_of_advantages_weights_and_axis_agree(name: str) -> None:
    if name == "dapo_per_group":
        pytest.skip("its group axis moves as well")
    x = tokens()
    args = [x[n] for n in ("log_probs", "old_log_probs", "advantages", "mask")]
    fn = jax.value_and_grad(partial(TOKEN_LOSSES[name], dual_clip=1.5), has_aux=True)
    (loss, metrics), grad = fn(*args, weights=x["weights"])
    full = [np.repeat(x[n][..., None], 5, -1) for n in ("advantages", "weights")]
    variants = {
        "per token": fn(*args[:2], full[0], args[3], weights=full[1]),
        "mixed": fn(*args[:2], full[0], args[3], weights=x["weights"]),
        "flat": fn(
            *[a.reshape(6, 5) for a in args[:2]], args[2].reshape(6), args[3].reshape(6, 5),
            weights=x["weights"].reshape(6),
        ),
    }  # fmt: skip
    moved = [np.moveaxis(a, -1, 0) for a in (*args[:2], args[3])]
    variants["time first"] = fn(*moved[:2], args[2], moved[2], weights=x["weights"], axis=0)
    for form, ((other, other_metrics), other_grad) in variants.items():
        assert_close(other, loss, form)
        other_grad = np.asarray(other_grad)
        if form == "time first":
            other_grad = np.moveaxis(other_grad, 0, -1)
        assert_close(other_grad.reshape(grad.shape), grad, form)
        assert set(other_metrics) == set(metrics)
        for key, value in metrics.items():
            assert_close(other_metrics[key], value, f"{form} {key}")


def test_weights_multiply_the_policy_term_only_and_keep_the_denominator() -> None:
    """G47 and the rule for rejected tokens: weight 0 is not the mask."""
    x = tokens()
    args = [x[n] for n in ("log_probs", "old_log_probs", "advantages", "mask")]
    for name, fn in TOKEN_LOSSES.items():
        kl = partial(fn, ref_log_probs=x["ref_log_probs"], kl_coef=0.3)
        loss, metrics = kl(*args, weights=np.zeros((2, 3)))
        assert metrics["policy_loss"] == 0
        only_kl = kl(args[0], args[0], np.zeros((2, 3)), args[3])[0]
        assert_close(loss, only_kl, name)
    dropped = np.array([[1, 0, 1], [1, 1, 1]], bool)  # as off_policy_sequence_mask returns it
    loss, _ = grpo_loss(*args, weights=dropped)
    A = np.where(dropped, args[2], 0)
    assert_close(loss, grpo_loss(*args[:2], A, args[3])[0])


def test_truncated_weights_in_a_whole_loss() -> None:
    """Weights from a sampler, applied before the KL term is added."""
    x = tokens()
    p, old, A, mask = (x[n] for n in ("log_probs", "old_log_probs", "advantages", "mask"))
    w = truncated_importance_weights(old, x["ref_log_probs"], mask, max_weight=2.0)
    loss, _ = grpo_loss(p, old, A, mask, weights=w)
    per_token = clipped_surrogate_loss(p, old, np.repeat(A[..., None], 5, -1), mask)
    assert_close(loss, sequence_mean(per_token * w, mask))


def test_g13_a_sequence_ratio_is_averaged_over_sequences() -> None:
    mask = np.array([[1, 0, 0], [1, 1, 1]])
    p = np.zeros((2, 3))
    loss, _ = gspo_loss(p, p, np.array([1.0, -1.0]), mask)
    assert loss == 0


def test_g49_a_loss_of_zero_at_the_first_step_still_learns() -> None:
    p = jnp.array([[-0.5, -1.0], [-2.0, -0.1]])
    for fn in (dapo_loss, grpo_loss):
        loss, grad = jax.value_and_grad(lambda x, fn=fn: fn(x, p, np.array([1.0, -1.0]))[0])(p)
        assert loss == 0
        np.testing.assert_allclose(grad, [[-0.25, -0.25], [0.25, 0.25]])


def test_count_empty() -> None:
    x = tokens()  # 5 of 6 sequences have a token
    args = [x[n] for n in ("log_probs", "old_log_probs", "advantages", "mask")]
    for fn in (grpo_loss, gspo_loss, rloo_loss):
        assert_close(fn(*args, count_empty=True)[0], fn(*args)[0] * 5 / 6)
        assert_close(fn(*args, count_empty=True)[0], fn(*args, denominator=6)[0])


def test_sequence_clip_fractions_are_of_sequences() -> None:
    """Ratios exp(±0.5), exp(0.1), of 1, 3 and 5 tokens; the fourth sequence is empty."""
    mask = np.arange(5) < np.array([[1], [3], [5], [0]])
    p = np.float32([[0.5], [-0.5], [0.1], [9.0]]) + np.zeros((4, 5), np.float32)
    A = np.float32([1, -1, -1, 1])
    settings = {"clip_epsilon": 0.2, "clip_epsilon_high": 0.2, "dual_clip": 1.05}
    _, metrics = gspo_loss(p, np.zeros_like(p), A, mask, **settings)
    for key in ("clip_fraction_high", "clip_fraction_low", "dual_clip_fraction"):
        assert_close(metrics[key], 1 / 3, key)
    assert_close(metrics["clip_fraction"], 2 / 3)


# --- metrics, settings, errors -----------------------------------------------------------------


def all_losses() -> dict[str, Callable]:
    """Every loss as a function of log_probs alone, with all its terms."""
    x = tokens()
    args = [x[n] for n in ("old_log_probs", "advantages", "mask")]
    more = {n: x[n] for n in ("ref_log_probs", "entropies", "weights")}
    calls = {
        name: lambda p, fn=fn: fn(p, *args, **more, kl_coef=0.1, ent_coef=0.1, dual_clip=2.0)
        for name, fn in TOKEN_LOSSES.items()
    }
    for name, (fn, num) in STEP_LOSSES.items():
        steps = [x["old_log_probs"], x["entropies"], x["ref_log_probs"]] * 2
        calls[name] = lambda p, fn=fn, steps=steps[: num - 1]: fn(
            p, *steps, entropies=x["entropies"], ent_coef=0.1
        )
    return calls


@pytest.mark.parametrize("name", all_losses())
def test_metrics_are_scalars_without_gradient_and_the_loss_depends_on_them_nowhere(
    name: str,
) -> None:
    loss_fn, p = all_losses()[name], tokens()["log_probs"]
    grads = jax.jit(jax.jacrev(lambda p: loss_fn(p)[1]))(p)
    for key, grad in grads.items():
        np.testing.assert_array_equal(grad, np.zeros_like(p), err_msg=key)
    assert np.any(np.asarray(jax.grad(lambda p: loss_fn(p)[0])(p)) != 0)


@pytest.mark.parametrize("name", all_losses())
def test_vmap_over_seeds_and_dtypes(name: str) -> None:
    loss_fn = all_losses()[name]
    batch = np.stack([tokens(seed)["log_probs"] for seed in range(3)])
    losses, metrics = jax.jit(jax.vmap(loss_fn))(batch)
    for i, p in enumerate(batch):
        loss, one = loss_fn(p)
        assert_close(losses[i], loss)
        for key, value in one.items():
            assert_close(metrics[key][i], value, key)
    loss, metrics = loss_fn(jnp.asarray(batch[0], "bfloat16"))
    assert {v.dtype for v in (loss, *metrics.values())} == {jnp.dtype("float32")}
    with jax.enable_x64(True):
        loss, metrics = loss_fn(np.float64(batch[0]))
        assert {v.dtype for v in (loss, *metrics.values())} == {jnp.dtype("float64")}


def test_coefficients_may_be_traced_and_swept() -> None:
    x = tokens()
    args = [x[n] for n in ("log_probs", "old_log_probs", "advantages", "mask")]
    more = {n: x[n] for n in ("ref_log_probs", "entropies")}

    def run(kl_coef: object, ent_coef: object, clip_epsilon: object) -> jax.Array:
        return grpo_loss(
            *args, **more, kl_coef=kl_coef, ent_coef=ent_coef, clip_epsilon=clip_epsilon
        )[0]

    settings = np.float32([[0.0, 0.1], [0.2, 0.0], [0.1, 0.3]])
    swept = jax.jit(jax.vmap(run))(*settings)
    for got, one in zip(swept, settings.T, strict=True):
        assert_close(got, run(*one))
    # a traced coefficient of a term that is not there cannot be read, and does nothing
    loss = jax.jit(lambda c: grpo_loss(*args, ent_coef=c, kl_coef=c)[0])(0.3)
    assert_close(loss, grpo_loss(*args)[0])


def test_a_coefficient_without_its_array_is_refused() -> None:
    x = np.zeros(3)
    with pytest.raises(ValueError, match=r"ent_coef=0\.01 needs entropies"):
        reinforce_loss(x, x, ent_coef=0.01)
    with pytest.raises(ValueError, match="needs entropies"):
        ppo_clip_loss(x, x, x, x, x, ent_coef=0.01)
    with pytest.raises(ValueError, match=r"kl_coef=0\.04 needs ref_log_probs"):
        gspo_loss(x[None], x[None], np.ones(1), kl_coef=0.04)
    with pytest.raises(ValueError, match=r"value_clip_epsilon=0\.2 needs old_values"):
        ppo_clip_loss(x, x, x, x, x, value_clip_epsilon=0.2)


def test_bad_input() -> None:
    two, three = np.zeros((2, 5)), np.zeros((3, 5))
    with pytest.raises(ValueError, match=r"advantages has shape \(3,\)"):
        grpo_loss(two, two, np.zeros(3))
    with pytest.raises(ValueError, match=r"weights has shape \(5,\)"):
        dapo_loss(two, two, np.zeros(2), weights=np.ones(5))
    with pytest.raises(ValueError, match=r"ref_log_probs \(3, 5\)"):
        grpo_loss(two, two, np.zeros(2), ref_log_probs=three)
    with pytest.raises(ValueError, match=r"entropies \(3, 5\)"):
        grpo_loss(two, two, np.zeros(2), entropies=three)
    with pytest.raises(ValueError, match=r"values \(3, 5\)"):
        actor_critic_loss(two, two, three, three)
    with pytest.raises(ValueError, match="mask has shape"):
        gspo_loss(two, two, np.zeros(2), np.ones(2))
    with pytest.raises(ValueError, match="axis=2"):
        rloo_loss(two, two, np.zeros(2), axis=2)
    with pytest.raises(ValueError, match="dual_clip must lie in"):
        grpo_loss(two, two, np.zeros(2), dual_clip=0.5)
    with pytest.raises(ValueError, match="max_length must lie in"):
        dr_grpo_loss(two, two, np.zeros(2), max_length=-1)
    with pytest.raises(ValueError, match="denominator must lie in"):
        grpo_loss(two, two, np.zeros(2), denominator=-4)
    with pytest.raises(TypeError, match="max_length"):
        dr_grpo_loss(two, two, np.zeros(2))
