"""Learning curves and the metrics files that they are drawn from."""

from __future__ import annotations

from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest

from jaxpg.loggers import CSVLogger, drop_points_after, read_metrics
from jaxpg.plotting import learning_curve, plot_curve, save_learning_curve

NAN = float("nan")


def test_missing_points_keep_the_last_value() -> None:
    returns = [[NAN, NAN, 3.0], [1.0, NAN, NAN], [NAN, 5.0, 4.0], [2.0, NAN, NAN]]
    curve = learning_curve([1, 2, 3, 4], returns)
    # seeds at step 3: 1 (kept), 5, 4; at step 4: 2, 5 (kept), 4 (kept)
    assert curve.steps.tolist() == [3, 4]
    assert curve.center == pytest.approx([10 / 3, 11 / 3])
    assert (curve.low >= [1, 2]).all() and (curve.high <= [5, 5]).all()
    assert (curve.low < curve.center).all() and (curve.center < curve.high).all()


def test_one_seed_has_a_line_and_no_band() -> None:
    curve = learning_curve([1, 2], [[3.0], [4.0]])
    assert curve.low.tolist() == curve.center.tolist() == curve.high.tolist() == [3.0, 4.0]


def test_no_episode_at_all() -> None:
    curve = learning_curve([1, 2], [[NAN, NAN], [1.0, NAN]])
    assert curve.steps.shape == curve.center.shape == (0,)


def test_shapes_must_fit() -> None:
    with pytest.raises(ValueError, match=r"\(3,\), \(2, 1\)"):
        learning_curve([1, 2, 3], [[1.0], [2.0]])


def test_what_is_drawn() -> None:
    axes = matplotlib.figure.Figure().add_subplot()
    curve = learning_curve([10, 20], [[1.0, 3.0], [2.0, 6.0]])
    plot_curve(axes, curve, label="ppo")
    assert axes.lines[0].get_xydata().tolist() == [[10.0, 2.0], [20.0, 4.0]]
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == curve.low.min() and band[:, 1].max() == curve.high.max()


@pytest.mark.parametrize("returns", [[[1.0, NAN], [2.0, 4.0]], [[1.0], [2.0]], [[NAN], [NAN]]])
def test_picture_is_written(tmp_path: Path, returns: list[list[float]]) -> None:
    path = tmp_path / "curve.png"
    save_learning_curve(path, [10, 20], returns, title="ppo on CartPole-v1")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000


def test_csv_round_trip_append_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    with CSVLogger(path) as logger:
        logger.log(1, 64, 0.25, {"episode_return": np.array([NAN, 9.5]), "loss": np.ones(2)})
        logger.log(2, 128, 0.5, {"episode_return": np.array([1.0, -2e-7]), "loss": np.ones(2)})
    with CSVLogger(path, append=True) as logger:
        logger.log(3, 192, 0.75, {"episode_return": np.array([3.0, 4.0]), "loss": np.zeros(2)})
    header = path.read_text().splitlines()[0]
    assert header == "update,steps,seconds,seed,episode_return,loss"
    metrics = read_metrics(path)
    assert metrics["update"].tolist() == [1, 2, 3]
    assert metrics["steps"].dtype == np.int64
    np.testing.assert_array_equal(metrics["episode_return"], [[NAN, 9.5], [1.0, -2e-7], [3.0, 4.0]])
    drop_points_after(path, 1)
    assert read_metrics(path)["update"].tolist() == [1]


def test_csv_refuses_other_columns_and_ragged_files(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    with CSVLogger(path) as logger:
        logger.log(1, 64, 0.25, {"a": np.ones(2)})
        with pytest.raises(ValueError, match="has columns"):
            logger.log(2, 64, 0.25, {"b": np.ones(2)})
        logger.log(2, 64, 0.25, {"a": np.ones(3)})
    with pytest.raises(ValueError, match="unequal numbers of seeds"):
        read_metrics(path)
    path.write_text("")
    with pytest.raises(ValueError, match="holds no points"):
        read_metrics(path)
