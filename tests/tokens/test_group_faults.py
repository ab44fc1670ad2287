"""Faults that group and token losses have had elsewhere: each with its right value, by hand.

The comment of a test says what went wrong. Gradients are by the new log-probs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.advantages import group_advantages, segment_group_advantages
from jaxpg.kl import kl_k1, kl_k2, kl_k3, kl_k3_straight_through
from jaxpg.losses import (
    cispo_loss,
    clipped_surrogate_loss,
    sequence_importance_weights,
    token_log_probs,
)
from jaxpg.objectives import dapo_loss, grpo_loss, gspo_loss
from jaxpg.reductions import constant_norm, masked_mean, sequence_mean, token_mean
from jaxpg.rewards import completion_mask, mixed_group_mask, soft_overlong_penalty
from jaxpg.tokens import completion_log_probs, last_token_rewards, select_mixed_groups
from jaxpg.tokens.records import LanguageModel


def close(actual: object, expected: object) -> None:
    bound = 1e-5 * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(actual, expected, atol=bound, rtol=0)


def value_and_gradient(loss, log_probs, *rest, **settings):
    def total(x):
        out = loss(x, *rest, **settings)
        return out[0] if isinstance(out, tuple) else out

    return jax.value_and_grad(total)(jnp.asarray(log_probs, jnp.float32))


def test_g01_nothing_valid():  # 0/0
    x, mask = jnp.array([[1.0, 2.0]]), jnp.array([[0, 0]])
    for mean in (token_mean, sequence_mean, lambda x, m: constant_norm(x, m, max_length=2)):
        value, grad = jax.value_and_grad(mean)(x, mask)
        close(value, 0.0)
        close(grad, [[0.0, 0.0]])
    for loss in (grpo_loss, dapo_loss, gspo_loss):
        value, grad = value_and_gradient(loss, x, x, jnp.array([1.0]), mask)
        close(value, 0.0)
        close(grad, [[0.0, 0.0]])


def test_g03_padding_overflows():  # inf · 0 in the value, 0 · inf in the gradient
    settings = [jnp.zeros((1, 3)), jnp.array([1.0]), jnp.array([[1, 1, 0]])]
    value, grad = value_and_gradient(dapo_loss, [[0.0, 0.0, 100.0]], *settings)
    close(value, -1.0)
    close(grad, [[-0.5, -0.5, 0.0]])


def test_g05_unbounded_sequence_ratio():  # inf, then NaN in the gradient
    value, grad = value_and_gradient(
        gspo_loss, [[800.0, 800.0]], jnp.zeros((1, 2)), jnp.array([-1.0]), clip_epsilon=0.2
    )
    close(value, 4.851652e8)  # exp(20)
    assert np.isfinite(grad).all()


def test_g07_truncated_samples_leave_the_denominator_too():
    x = jnp.array([[-1.0, -1, 0, 0, 0, 0], [-3.0] * 6])
    mask = jnp.array([[1, 1, 0, 0, 0, 0], [0] * 6])  # the second was truncated
    close(token_mean(x, mask), -1.0)  # not −2/8
    close(sequence_mean(x, mask), -1.0)


def test_g09_g17_parts_add_up_over_the_optimizers_window():
    # two micro-batches of 10 tokens, though 4 were generated: the window has 20
    close(sum(token_mean(jnp.ones((2, 5)), denominator=20) for _ in range(2)), 1.0)  # not 0.5
    # a metric over shards of 4 and 1 tokens: 0.36, not the mean of means, 0.6
    shards = [jnp.full(4, 0.2), jnp.ones(1)]
    close(sum(masked_mean(x, denominator=5) for x in shards), 0.36)


def test_g11_constant_length_counts_the_batch():
    close(constant_norm(jnp.ones((4, 8)), max_length=8), 1.0)  # not 4


def test_g13_a_sequence_ratio_with_a_sequence_mean():
    mask = jnp.array([[1, 0, 0], [1, 1, 1]])
    zeros = jnp.zeros((2, 3))
    loss, _ = gspo_loss(zeros, zeros, jnp.array([1.0, -1.0]), mask)
    close(loss, 0.0)  # a token mean of the same would give 0.5


def test_g15_one_ratio_a_token():
    ratios = jnp.log(jnp.array([[1.1, 0.9, 1.5]]))
    loss, _ = grpo_loss(ratios, jnp.zeros((1, 3)), jnp.array([1.0]), clip_epsilon=0.2)
    close(loss, -(1.1 + 0.9 + 1.2) / 3)  # the product, 1.485, would be clipped to 1.2


def test_g19_constant_group_in_float32():
    rewards = jnp.full(3, 0.9, jnp.float32)
    for eps in (1e-9, 1e-8, 1e-6, 1e-4):
        np.testing.assert_array_equal(group_advantages(rewards, eps=eps), [0, 0, 0])


def test_g21_dynamic_sampling_keeps_groups_not_rows():
    scores = jnp.array([[1, 0, 0, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(mixed_group_mask(scores), [True, False])
    index, kept = select_mixed_groups(scores, 1)
    assert index.tolist() == [0] and kept.tolist() == [True]


def test_g23_filter_on_correctness_not_on_the_shaped_reward():
    correct, penalty = jnp.ones(4), jnp.array([0.0, 0.0, -0.5, 0.0])
    assert not mixed_group_mask(correct)
    # unfiltered, the penalty alone would have made advantages of order 1
    shaped = group_advantages(correct + penalty)
    close(shaped, [0.499999, 0.499999, -1.499994, 0.499999])


def test_g25_penalty_buffer_longer_than_the_limit():
    with pytest.raises(ValueError, match="cache_length=12 is larger than max_length=10"):
        soft_overlong_penalty(5, max_length=10, cache_length=12)


def test_g27_reward_of_an_empty_answer_goes_nowhere():  # not to index −1
    dense = last_token_rewards(jnp.array([10.0, 0.0]), jnp.array([[0, 0, 0], [1, 1, 1]]))
    np.testing.assert_array_equal(dense, np.zeros((2, 3)))
    np.testing.assert_array_equal(group_advantages(dense.sum(axis=-1)), [0, 0])


def test_g29_g31_what_belongs_to_an_answer():
    no_end = completion_mask(jnp.array([[5, 6, 0, 0]]), eos_id=2, lengths=jnp.array([2]))
    np.testing.assert_array_equal(no_end, [[1, 1, 0, 0]])
    filled = completion_mask(jnp.array([[7, 2, 2, 2], [7, 8, 9, 2]]), eos_id=2)
    np.testing.assert_array_equal(filled.sum(axis=-1), [2, 4])


def test_g33_temperature_inside_the_softmax():
    close(token_log_probs(jnp.array([2.0, 0.0]), 0, temperature=0.5), -0.01814993)


def test_g35_every_estimator_is_itself():
    for kl, expected in ((kl_k1, 0.5), (kl_k2, 0.125), (kl_k3, 0.1065307)):
        close(kl(-1.0, -1.5), expected)


def test_g37_dual_clip_is_for_negative_advantages():
    settings = {"clip_epsilon": 0.2, "dual_clip": 3.0}
    close(clipped_surrogate_loss(jnp.log(1.1), 0.0, 1.0, **settings), -1.1)  # not −3
    close(clipped_surrogate_loss(jnp.log(5.0), 0.0, -1.0, **settings), 3.0)


def test_g39_max_ratio_is_a_cap_not_an_offset():
    old = -2.0 - np.log(6.0)
    close(cispo_loss(-2.0, old, 1.0, max_ratio=5.0), 10.0)
    close(cispo_loss(-2.0, old, 1.0, max_ratio=1.0 + 5.0), 12.0)


def test_g41_g43_g57_statistics_of_groups():
    rewards = jnp.array([[1.0, 0.0], [10.0, 9.0]])
    expected = [[0.7070068, -0.7070068]] * 2
    close(group_advantages(rewards, eps=1e-4), expected)
    by_id = segment_group_advantages(
        rewards.ravel(), jnp.array([0, 0, 1, 1]), num_groups=2, eps=1e-4
    )
    close(by_id, np.ravel(expected))
    # ids unique per sample: no baseline, so no advantage (not the raw reward)
    alone = segment_group_advantages(jnp.array([1.0, 0.0]), jnp.array([0, 1]), num_groups=2)
    np.testing.assert_array_equal(alone, [0, 0])
    # two implementations of one estimator agree on a small spread
    small = jnp.array([0.5, 0.5005])
    with jax.enable_x64(True):
        close(group_advantages(np.array([0.5, 0.5005]), eps=1e-6), [-0.7051124, 0.7051124])
    close(
        group_advantages(small),
        segment_group_advantages(small, jnp.array([0, 0]), num_groups=1),
    )


def test_g45_product_ratios_grow_with_length():
    old, sampler = jnp.full((1, 100), -1.0), jnp.full((1, 100), -1.012)
    unbounded = {"max_weight": 1e6}
    close(sequence_importance_weights(old, sampler, **unbounded), [3.320117])
    dropped = sequence_importance_weights(old, sampler, max_weight=3.0, zero_outside=True)
    close(dropped, [0.0])
    close(sequence_importance_weights(old, sampler, length_normalize=True, **unbounded), [1.012072])


def test_g47_a_dropped_sequence_weighs_nothing():  # not exp(0) = 1
    zeros, mask = jnp.zeros((1, 3)), jnp.zeros((1, 3), bool)
    weights = sequence_importance_weights(zeros, zeros, mask, max_weight=2.0)
    close(weights, [0.0])
    loss, _ = gspo_loss(zeros, zeros, jnp.array([2.0]), mask)
    close(loss, 0.0)


def test_g49_loss_zero_at_the_first_step_is_no_fault():
    zeros = jnp.zeros((2, 2))
    value, grad = value_and_gradient(grpo_loss, zeros, zeros, jnp.array([1.0, -1.0]))
    close(value, 0.0)
    close(grad, [[-0.25, -0.25], [0.25, 0.25]])


def test_g51_old_log_probs_are_those_of_the_sampling_policy():
    settings = [jnp.array([[-1.0]]), jnp.array([1.0])]
    value, grad = value_and_gradient(grpo_loss, [[-0.5]], *settings, clip_epsilon=0.2)
    close(value, -1.2)  # ratio e^0.5 is clipped
    close(grad, [[0.0]])  # not −1


def test_g53_logits_score_the_next_token():
    logits = jnp.array([[5.0, 0.0], [0.0, 5.0], [5.0, 0.0]])
    model = LanguageModel(
        lambda key: (),
        lambda params, tokens, positions: logits[positions],
        None,
        None,
        max_length=3,
        vocab_size=2,
    )
    one = jnp.ones((1, 1), bool)
    log_probs, _ = completion_log_probs(
        model, (), jnp.array([[0]]), one, jnp.array([[1, 0]]), jnp.ones((1, 2), bool)
    )
    close(log_probs, [[-5.006715, -5.006715]])  # not −0.0067 for each


def test_g55_normalised_once():
    rewards = jnp.array([[1.0, 0, 0, 1], [0, 0, 0, 1.0]])
    expected = [[0.8660239, -0.8660239, -0.8660239, 0.8660239], [-0.499999] * 3 + [1.499997]]
    close(group_advantages(rewards), expected)


def test_g59_value_of_k3_gradient_of_k2():
    value, grad = jax.value_and_grad(kl_k3_straight_through)(-1.0, -1.5)
    close(value, 0.1065307)
    close(grad, 0.5)


def test_g61_metric_per_valid_token():
    close(masked_mean(jnp.array([[1.0, 1, 0, 0]]), jnp.array([[1, 1, 0, 0]])), 1.0)  # not 0.5


def test_g63_mean_of_samples_or_of_groups():
    x = jnp.array([[1.0, 1, 0, 0], [4.0, 4, 4, 4]])[..., None]
    mask = jnp.array([[1, 1, 0, 0], [1, 1, 1, 1]])[..., None]
    close(token_mean(x, mask, group_axis=0), 2.5)
    close(token_mean(x, mask), 3.0)
