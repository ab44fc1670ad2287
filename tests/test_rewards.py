"""Overlong penalty, groups worth keeping, completion masks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
import pytest
from cases_loader import assert_close, load_cases

from jaxpg.rewards import completion_mask, mixed_group_mask, soft_overlong_penalty


def test_r33_soft_overlong_penalty(variant: Callable) -> None:
    penalty = variant(partial(soft_overlong_penalty, max_length=20, cache_length=4))
    lengths = np.array([16, 17, 18, 20, 21, 0, 15, 400])
    assert_close(penalty(lengths), [0, -0.25, -0.5, -1, -1, 0, 0, -1])


def test_soft_overlong_penalty_of_the_paper(x64: None) -> None:
    lengths = np.array([16384, 16385, 20479, 20480, 20481])
    for double in (False, True):
        with jax.enable_x64(double):
            penalty = soft_overlong_penalty(lengths, max_length=20480, cache_length=4096)
            assert_close(penalty, [0, -1 / 4096, -4095 / 4096, -1, -1])
    assert soft_overlong_penalty(np.float64(3), max_length=9, cache_length=3).dtype == "float64"
    assert soft_overlong_penalty(np.int32(3), max_length=9, cache_length=3).dtype == "float32"


def test_g25_a_buffer_longer_than_the_limit_is_rejected() -> None:
    with pytest.raises(ValueError, match="cache_length=12 is larger than max_length=10"):
        soft_overlong_penalty(5, max_length=10, cache_length=12)
    assert soft_overlong_penalty(5, max_length=10, cache_length=10) == -0.5
    with pytest.raises(ValueError, match="cache_length must lie in"):
        soft_overlong_penalty(5, max_length=10, cache_length=0)
    with pytest.raises(ValueError, match="max_length must lie in"):
        soft_overlong_penalty(5, max_length=-1, cache_length=1)
    with pytest.raises(TypeError, match="lengths"):
        soft_overlong_penalty("twelve", max_length=10, cache_length=1)


def test_overlong_settings_may_be_traced() -> None:
    swept = jax.vmap(lambda cache: soft_overlong_penalty(9, max_length=10, cache_length=cache))
    assert_close(swept(np.array([2.0, 4.0])), [-0.5, -0.75])


def test_dynamic_sampling_case(variant: Callable) -> None:
    (case,) = load_cases("group_losses", "keep_groups")
    scores = np.array(case["inputs"]["rewards"]).reshape(4, 3)
    keep = np.array(case["expected"]["keep"]).reshape(4, 3)
    np.testing.assert_array_equal(variant(mixed_group_mask)(scores), keep.all(1))
    np.testing.assert_array_equal(keep.all(1), keep.any(1))
    np.testing.assert_array_equal(mixed_group_mask(scores.T, axis=0), keep.all(1))


def test_g21_groups_are_kept_whole() -> None:
    np.testing.assert_array_equal(mixed_group_mask([[1, 0, 0, 0]]), [True])


def test_g23_the_filter_looks_at_correctness_not_at_the_shaped_reward() -> None:
    correct = np.array([[1.0, 1, 1, 1]])
    shaped = correct + soft_overlong_penalty([[1, 2, 9, 4]], max_length=10, cache_length=2)
    np.testing.assert_array_equal(shaped, [[1, 1, 0.5, 1]])
    np.testing.assert_array_equal(mixed_group_mask(correct), [False])


def test_unscored_samples_are_left_out() -> None:
    nan = np.nan
    scores = np.array([[nan, nan, nan], [nan, 1, 1], [nan, 0, 1], [nan, nan, 1], [7, 7, 7]])
    expected = [False, False, True, False, False]
    np.testing.assert_array_equal(mixed_group_mask(scores), expected)
    np.testing.assert_array_equal(jax.jit(mixed_group_mask)(scores), expected)
    infinite = [[-np.inf, 0.0], [np.inf, np.inf], [-np.inf, nan]]
    np.testing.assert_array_equal(mixed_group_mask(infinite), [True, False, False])


def test_mixed_groups_of_other_dtypes_and_shapes() -> None:
    assert mixed_group_mask(np.array([True, False])).dtype == bool
    # an exact test: no copy of 0.1 counts as different, one unit in the last place does
    copies = np.full((1, 7), 0.1, np.float32)
    assert not mixed_group_mask(copies)[0]
    copies[0, 3] = np.nextafter(np.float32(0.1), np.float32(1))
    assert mixed_group_mask(copies)[0]
    np.testing.assert_array_equal(mixed_group_mask(np.zeros((3, 1))), [False] * 3)
    with pytest.raises(ValueError, match="axis=1 is no axis"):
        mixed_group_mask(np.zeros(3), axis=1)


def test_completion_mask_case(variant: Callable) -> None:
    (case,) = load_cases("group_losses", "completion_mask")
    ids, eos = np.array(case["inputs"]["ids"]), case["params"]["eos"]
    expected = np.array(case["expected"]["mask"], bool)
    np.testing.assert_array_equal(variant(partial(completion_mask, eos_id=eos))(ids), expected)
    np.testing.assert_array_equal(completion_mask(ids.T, eos_id=eos, axis=0), expected.T)


def test_g29_padding_without_an_end_token_is_cut_by_length(variant: Callable) -> None:
    ids = np.array([[5, 6, 0, 0], [5, 2, 0, 0], [5, 6, 7, 8]])
    mask = variant(lambda x, n: completion_mask(x, eos_id=2, lengths=n))(ids, np.array([2, 4, 4]))
    np.testing.assert_array_equal(mask, [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])


def test_g31_a_tail_filled_with_the_end_id() -> None:
    mask = completion_mask(np.array([[7, 2, 2, 2], [7, 8, 9, 2]]), eos_id=2)
    np.testing.assert_array_equal(mask.sum(-1), [2, 4])


def test_several_end_tokens_and_an_empty_answer() -> None:
    ids = np.array([[5, 3, 6, 2], [2, 5, 5, 5], [5, 5, 5, 3]])
    mask = completion_mask(ids, eos_id=(2, 3), lengths=np.array([4, 0, 4]))
    np.testing.assert_array_equal(mask, [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert completion_mask(ids[0], eos_id=2).shape == (4,)


def test_completion_mask_rejects() -> None:
    ids = np.zeros((2, 3), int)
    with pytest.raises(TypeError, match="token_ids must be integers"):
        completion_mask(np.zeros((2, 3)), eos_id=2)
    with pytest.raises(TypeError, match="eos_id must be integers"):
        completion_mask(ids, eos_id=2.5)
    with pytest.raises(ValueError, match=r"lengths has shape \(3,\)"):
        completion_mask(ids, eos_id=2, lengths=np.zeros(3, int))
    with pytest.raises(TypeError, match="lengths must be integers"):
        completion_mask(ids, eos_id=2, lengths=np.zeros(2))
    with pytest.raises(ValueError, match="axis=2"):
        completion_mask(ids, eos_id=2, axis=2)
