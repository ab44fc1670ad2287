"""Interquartile mean and bootstrap interval against cases worked out apart."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from jaxpg.aggregates import bootstrap_interval, interquartile_mean, summarize


def test_interquartile_mean_by_hand() -> None:
    assert interquartile_mean([3.0]) == 3.0
    assert interquartile_mean([1.0, 5.0]) == 3.0
    assert interquartile_mean([0.0, 1.0, 5.0, 100.0]) == 3.0
    # ten scores: two left out at either end
    assert interquartile_mean([9, 8, 7, 6, 5, 4, 3, 2, 1000, -1000]) == pytest.approx(5.5)


def test_interquartile_mean_reduces_the_axes_it_is_given() -> None:
    scores = np.random.default_rng(0).normal(size=(3, 4, 8))
    by_task = interquartile_mean(scores, axis=(0, 2))
    assert by_task.shape == (4,)
    for task in range(4):
        expected = np.sort(scores[:, task].ravel())[6:-6].mean()
        assert by_task[task] == pytest.approx(expected)
    assert interquartile_mean(scores, axis=-1).shape == (3, 4)


def test_a_diverged_seed_is_not_trimmed_away() -> None:
    assert np.isnan(interquartile_mean([1.0, 2.0, 3.0, np.nan]))
    assert np.isnan(summarize([1.0, 2.0, 3.0, np.nan]).low)
    assert np.isnan(summarize([1.0, 2.0, 3.0, np.nan]).minimum)


def test_interval_of_a_mean_matches_every_resample_there_is() -> None:
    scores = np.array([1.0, 2.0, 4.0, 8.0])
    every = [np.mean(draw) for draw in itertools.product(scores, repeat=4)]
    low, high = bootstrap_interval(scores, np.mean, num_resamples=20_000)
    assert (low, high) == pytest.approx(np.quantile(every, [0.025, 0.975]), abs=0.25)


def test_interval_agrees_with_scipy() -> None:
    scores = np.random.default_rng(1).normal(100, 15, size=30)
    expected = stats.bootstrap(
        (scores,),
        lambda x, axis: stats.trim_mean(x, 0.25, axis=axis),
        n_resamples=5000,
        method="percentile",
        rng=np.random.default_rng(2),
    ).confidence_interval
    low, high = bootstrap_interval(scores, num_resamples=5000)
    assert low == pytest.approx(expected.low, abs=0.5)
    assert high == pytest.approx(expected.high, abs=0.5)


def test_strata_are_resampled_apart() -> None:
    # constant within each task: without mixing tasks nothing can vary
    scores = np.array([[0.0] * 5, [100.0] * 5])
    assert bootstrap_interval(scores, np.mean) == (50.0, 50.0)


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(3)
    hits = 0
    for _ in range(200):
        low, high = bootstrap_interval(generator.normal(size=40), np.mean, num_resamples=400)
        hits += low <= 0.0 <= high
    # the percentile method is a little narrow at 40 seeds; 200 trials scatter by 1.5 points
    assert 0.88 <= hits / 200 <= 0.99


def test_same_scores_same_interval_and_wider_with_confidence() -> None:
    scores = np.arange(10.0)
    assert bootstrap_interval(scores) == bootstrap_interval(scores)
    low, high = bootstrap_interval(scores, confidence=0.5)
    wide_low, wide_high = bootstrap_interval(scores, confidence=0.99)
    assert wide_low < low < high < wide_high


def test_summary_averages_episodes_first() -> None:
    returns = np.array([[0.0, 2.0], [10.0, 10.0], [20.0, 22.0], [1000.0, 1000.0]])
    summary = summarize(returns)
    assert summary.iqm == pytest.approx(15.5)
    assert (summary.minimum, summary.maximum, summary.num_seeds) == (1.0, 1000.0, 4)
    assert summary.mean == pytest.approx(258.0)
    assert summary[:3] == summarize(returns.mean(axis=1))[:3]


def test_one_seed_has_no_interval() -> None:
    summary = summarize([7.0])
    assert summary.iqm == 7.0
    assert np.isnan(summary.low) and np.isnan(summary.high)


@pytest.mark.parametrize("scores", [[1.0], [[1.0], [2.0]], 3.0, np.zeros((2, 2, 2))])
def test_interval_refuses_what_it_cannot_resample(scores: object) -> None:
    with pytest.raises(ValueError, match="scores must be"):
        bootstrap_interval(scores)


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="confidence must lie in"):
        bootstrap_interval([1.0, 2.0], confidence=1.0)
    with pytest.raises(ValueError, match="num_resamples must be at least 1, got 0"):
        bootstrap_interval([1.0, 2.0], num_resamples=0)
    with pytest.raises(ValueError, match=r"returns must be .* shape \(0,\)"):
        summarize([])
