"""The command line: what it prints, writes, refuses, and how a run goes on."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxpg import cli, live_runs, throughput
from jaxpg.cli import main
from jaxpg.flags import mesh_of, request_devices
from jaxpg.loggers import read_metrics
from jaxpg.run_folders import load_states, read_config
from jaxpg.runs import Point, Trained, build, seed_keys
from jaxpg.sharding import num_devices
from jaxpg.terminal import RunDisplay

TINY = (
    "train ppo CartPole-v1 --num-seeds 2 --num-envs 2 --num-steps 16 --num-epochs 1 "
    "--num-minibatches 2 --hidden-sizes 8 --env-params max_steps_in_episode 20 "
    "--eval-episodes 3 --anneal-updates 6"
)
"""32 steps an update."""


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def call(*words: Any) -> Outcome:
    """Runs a command; a string of several words is several."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([part for word in words for part in str(word).split()])
    return Outcome(code, out.getvalue(), err.getvalue())


def table_row(out: str, name: str) -> list[str]:
    (row,) = [line for line in out.splitlines() if line.startswith(f"│ {name}")]
    return [cell.strip() for cell in row.strip("│").split("│")]


def rows_without_seconds(folder: Path) -> list[list[str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [[x for i, x in enumerate(row) if i != 2] for row in csv.reader(file)]


def all_states(folder: Path) -> list[np.ndarray]:
    spec = read_config(folder)
    states = load_states(folder, spec, build(spec))
    states = states._replace(key=jax.random.key_data(states.key))
    return [np.asarray(x) for x in jax.tree.leaves(states)]


def assert_same_run(one: Path, other: Path) -> None:
    assert rows_without_seconds(one) == rows_without_seconds(other)
    for a, b in zip(all_states(one), all_states(other), strict=True):
        np.testing.assert_array_equal(a, b)
    results = [json.loads((x / "results.json").read_text()) for x in (one, other)]
    assert results[0]["evaluation"] == results[1]["evaluation"]


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs of the same program share what XLA made of it: most of the time here is compilation."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("cache")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """One whole run: 170 steps a seed are 6 updates of 32."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, call(TINY, "--total-steps", 170, "--run-dir", folder)


def test_train_prints_steps_table_and_speed(finished: tuple[Path, Outcome]) -> None:
    folder, (code, out, err) = finished
    assert (code, err) == (0, "")
    assert "ppo on CartPole-v1: 2 seeds × 192 environment steps (6 updates of 32)" in out
    assert "settings: tuned for CartPole-v1, and your flags" in out
    assert "compiled in" in out and str(folder) in out
    assert "192 / 192 steps a seed" in out and "\x1b" not in out
    results = json.loads((folder / "results.json").read_text())
    for name in ("greedy", "sampled"):
        x = results["evaluation"][name]
        assert table_row(out, name) == [
            name,
            f"{x['iqm']:.1f}",
            f"{x['low']:.1f} … {x['high']:.1f}",
            f"{x['mean']:.1f}",
            f"{x['minimum']:.1f}",
            f"{x['maximum']:.1f}",
            "2",
            "2 × 3",
        ]
        assert x["mean"] == pytest.approx(np.mean(x["seed_means"]))
        assert 1 <= x["minimum"] <= x["maximum"] <= 20
    speed = results["steps_per_second"]
    assert f"{speed:,.0f} steps a second over all seeds: 384 steps" in out
    assert speed == pytest.approx(384 / results["run_seconds"])
    assert results["compile_seconds"] > 0 and results["diverged_seeds"] == []


def test_run_folder_holds_what_the_run_follows_from(finished: tuple[Path, Outcome]) -> None:
    folder, _ = finished
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint",
        "config.json",
        "learning_curve.png",
        "metrics.csv",
        "results.json",
    ]
    config = json.loads((folder / "config.json").read_text())
    assert config["config"]["num_envs"] == 2 and config["config"]["anneal_updates"] == 6.0
    assert config["network"]["hidden_sizes"] == [8]
    assert config["environment_options"]["env_params"] == {"max_steps_in_episode": 20}
    assert config["versions"]["jax"] == jax.__version__
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    spec = read_config(folder)
    assert spec.config.annealed == ("learning_rate", "clip_epsilon") and spec.num_updates == 6
    states = load_states(folder, spec, build(spec))
    np.testing.assert_array_equal(states.update, [6, 6])
    metrics = read_metrics(folder / "metrics.csv")
    assert metrics["steps"].tolist() == [32, 64, 96, 128, 160, 192]
    assert metrics["env_steps"].tolist() == [[32.0, 32.0]] * 6
    ended = metrics["episode_count"] > 0
    np.testing.assert_array_equal(np.isnan(metrics["episode_return"]), ~ended)
    np.testing.assert_array_equal(metrics["episode_return"], metrics["episode_length"])
    # two environments of 20-step episodes end at least once in 32 steps each over two updates
    assert metrics["episode_count"].sum(axis=0).min() >= 2 * 96 // 20


def test_resume_equals_not_stopping(finished: tuple[Path, Outcome], tmp_path: Path) -> None:
    folder, _ = finished
    half = call(TINY, "--total-steps", 96, "--run-dir", tmp_path / "half", "--quiet")
    assert half.code == 0
    assert "updates of" not in half.out and "greedy" in half.out
    whole = call("train", "--resume", tmp_path / "half", "--total-steps 192 --eval-episodes 3")
    assert (whole.code, whole.err) == (0, "")
    assert "goes on after 96 steps of each seed" in whole.out
    assert_same_run(folder, tmp_path / "half")
    over = call("train", "--resume", tmp_path / "half", "--total-steps", 192)
    assert over.code == 2
    assert over.err == (
        "jaxpg: total_steps=192, and the run has done 192: give more --total-steps\n"
    )
    annealed = call("train", "--resume", tmp_path / "half", "--total-steps", 300)
    assert annealed.code == 2 and "anneal_updates=6, and the run has done 6 updates" in annealed.err
    other = call("train", "--resume", tmp_path / "half", "--total-steps", 300, "--num-envs", 4)
    assert other.code == 2 and "the checkpoint does not fit" in other.err
    assert_same_run(folder, tmp_path / "half")


def test_interrupted_run_goes_on(
    finished: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = finished
    asked = iter([False, False, True, True])
    with monkeypatch.context() as patch:
        patch.setattr(
            live_runs, "interruptible", lambda: contextlib.nullcontext(lambda: next(asked))
        )
        cut = call(TINY, "--total-steps", 192, "--run-dir", tmp_path / "cut")
    assert cut.code == 130
    assert f"stopped at 96 steps; go on with: jaxpg train --resume {tmp_path / 'cut'}" in cut.out
    assert not (tmp_path / "cut" / "results.json").exists()
    # rows past the checkpoint, as a killed run leaves them, are written anew
    with (tmp_path / "cut" / "metrics.csv").open("a") as file:
        last = (tmp_path / "cut" / "metrics.csv").read_text().splitlines()[-2:]
        file.writelines(row.replace("3,96", "4,128", 1) + "\n" for row in last)
    assert call("train", "--resume", tmp_path / "cut", "--eval-episodes", 3).code == 0
    assert_same_run(folder, tmp_path / "cut")


def test_interrupts_are_orderly_first() -> None:
    import os
    import signal

    before = signal.getsignal(signal.SIGINT)
    with live_runs.interruptible() as pressed:
        assert not pressed()
        os.kill(os.getpid(), signal.SIGINT)
        assert pressed()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_seeds_spread_over_devices_and_in_chunks(
    finished: tuple[Path, Outcome], tmp_path: Path
) -> None:
    folder, _ = finished
    spread = call(TINY, "--total-steps 170 --devices 2 --run-dir", tmp_path / "spread")
    assert (spread.code, spread.err) == (0, "")
    one, two = (read_metrics(x / "metrics.csv") for x in (folder, tmp_path / "spread"))
    np.testing.assert_array_equal(one["episode_return"], two["episode_return"])
    np.testing.assert_allclose(one["value_loss"], two["value_loss"], rtol=1e-4)
    chunks = call(TINY, "--total-steps 170 --chunk-size 1 --run-dir", tmp_path / "chunks")
    assert (chunks.code, chunks.err) == (0, "")
    apart = read_metrics(tmp_path / "chunks" / "metrics.csv")
    np.testing.assert_array_equal(one["episode_return"], apart["episode_return"])
    np.testing.assert_allclose(one["value_loss"], apart["value_loss"], rtol=1e-4)
    many = call(TINY, "--devices 3 --num-seeds 3 --run-dir", tmp_path / "many")
    assert many.code == 2 and many.err == "jaxpg: devices=3, but jax has 2 (cpu)\n"
    odd = call(TINY, "--devices 2 --num-seeds 3 --run-dir", tmp_path / "odd")
    assert odd.code == 2 and odd.err == "jaxpg: devices=2 does not divide num_seeds=3\n"


def test_seeds_are_spread_as_far_as_they_divide() -> None:
    """Over the two devices of these tests; what is trained at a time must divide as well."""
    sizes = {
        (num_seeds, chunk_size): num_devices(mesh_of(None, num_seeds, chunk_size))
        for num_seeds, chunk_size in [(1, None), (3, None), (4, None), (4, 1), (4, 2), (6, 3)]
    }
    assert sizes == {(1, None): 1, (3, None): 1, (4, None): 2, (4, 1): 1, (4, 2): 2, (6, 3): 1}
    assert mesh_of(1, 4) is None


def test_devices_are_asked_for_before_jax_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(jax.config, "update", lambda *setting: asked.append(setting))
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    request_devices(["--devices", "3"], default=5)
    monkeypatch.setenv("XLA_FLAGS", "")
    for words in (["--devices", "3"], ["--devices=4"], ["--devices", "1"], ["--devices", "x"]):
        request_devices(words, default=5)
    request_devices(["--devices", "None"], default=6)
    request_devices([], default=7)
    request_devices([])
    assert asked == [("jax_num_cpu_devices", n) for n in (3, 4, 6, 7)]


def test_one_seed_spread_over_devices(tmp_path: Path) -> None:
    """By its environments; a run that is cut and goes on there is the uncut one."""
    one = TINY.replace("--num-seeds 2", "--num-seeds 1") + " --devices 2"
    whole = call(one, "--total-steps 170 --run-dir", tmp_path / "whole")
    assert (whole.code, whole.err) == (0, "")
    assert read_metrics(tmp_path / "whole" / "metrics.csv")["steps"][-1] == 192
    assert call(one, "--total-steps 64 --run-dir", tmp_path / "cut").code == 0
    further = "--total-steps 170 --devices 2 --eval-episodes 3"
    resumed = call("train --resume", tmp_path / "cut", further)
    assert (resumed.code, resumed.err) == (0, "")
    results = [json.loads((tmp_path / x / "results.json").read_text()) for x in ("whole", "cut")]
    assert results[0]["evaluation"] == results[1]["evaluation"]
    for a, b in zip(all_states(tmp_path / "whole"), all_states(tmp_path / "cut"), strict=True):
        np.testing.assert_array_equal(a, b)
    apart = call(one, "--num-envs 3 --num-minibatches 3 --run-dir", tmp_path / "apart")
    assert apart.code == 2
    assert apart.err == "jaxpg: number of devices=2 does not divide num_envs=3\n"
    alone = call("train reinforce CartPole-v1 --num-seeds 1 --devices 2 --run-dir", tmp_path / "no")
    assert alone.code == 2 and "reinforce on CartPole-v1 cannot spread a single seed" in alone.err
    assert not (tmp_path / "no").exists()


def test_evaluate_agrees_with_the_run(finished: tuple[Path, Outcome]) -> None:
    folder, trained = finished
    greedy = call("evaluate", folder, "--episodes", 3)
    assert greedy.code == 0
    assert table_row(greedy.out, "greedy") == table_row(trained.out, "greedy")
    sampled = call("evaluate", folder, "--episodes", 3, "--sampled")
    assert table_row(sampled.out, "sampled") == table_row(trained.out, "sampled")
    other = call("evaluate", folder, "--episodes", 3, "--sampled", "--seed", 5)
    assert table_row(other.out, "sampled") != table_row(trained.out, "sampled")


def test_divergence_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "nan"
    code, out, err = call(
        TINY, "--total-steps", 192, "--run-dir", folder, "--learning-rate", "1e38"
    )
    assert code == 1
    assert "2 of 2 seeds diverged: their parameters hold NaN or inf, first seen at 32 steps" in err
    assert table_row(out, "greedy")[1] == "nan"
    results = json.loads((folder / "results.json").read_text())
    assert results["diverged_seeds"] == [0, 1] and results["diverged_at_steps"] == 32
    assert results["evaluation"]["greedy"]["iqm"] is None
    # with every seed lost there is no use in going on
    assert results["steps_per_seed"] == 32
    again = call("evaluate", folder, "--episodes", 3)
    assert again.code == 1 and "2 of 2 seeds diverged" in again.err


def test_never_overwrites_silently(finished: tuple[Path, Outcome], tmp_path: Path) -> None:
    folder, _ = finished
    before = rows_without_seconds(folder)
    refused = call(TINY, "--run-dir", folder)
    assert refused.code == 2
    assert refused.err == (f"jaxpg: run_dir {folder} exists: choose another, or give --overwrite\n")
    assert rows_without_seconds(folder) == before
    (tmp_path / "thesis.tex").touch()
    other = call(TINY, "--run-dir", tmp_path, "--overwrite")
    assert other.code == 2 and "is no run folder: it is not overwritten" in other.err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def captured(monkeypatch: pytest.MonkeyPatch, *words: Any) -> dict[str, Any]:
    """What `train` would run with, without running it."""
    seen: dict[str, Any] = {}

    def run(spec: Any, algorithm: Any, folder: Path, run: Any, **rest: Any) -> int:
        seen.update(spec=spec, folder=folder, run=run, **rest)
        return 0

    monkeypatch.setattr(cli, "run_to_end", run)
    seen["outcome"] = call(*words)
    return seen


def test_overwrite_clears_the_older_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoint").mkdir(parents=True)
    for name in ("config.json", "results.json", "notes.txt"):
        (folder / name).write_text("old")
    captured(monkeypatch, TINY, "--run-dir", folder, "--overwrite")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "notes.txt"]
    assert read_config(folder).algorithm == "ppo"


def test_flags_reach_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = captured(
        monkeypatch,
        "train actor-critic Catch-bsuite --num_envs 4 --num-steps 5 --learning_rate 1",
        "--max-grad-norm None --total-steps 50 --num_seeds 3 --seed 7 --no-anneal",
        "--activation relu --shared True --env-params rows 6",
    )
    assert seen["outcome"].code == 0
    spec = seen["spec"]
    assert (spec.algorithm, spec.environment) == ("actor_critic", "Catch-bsuite")
    assert (spec.config.num_envs, spec.config.max_grad_norm) == (4, None)
    assert spec.config.learning_rate == 1.0 and isinstance(spec.config.learning_rate, float)
    assert spec.config.anneal_updates is None
    # 50 steps are 3 updates of 20
    assert (spec.num_updates, spec.num_seeds, spec.seed) == (3, 3, 7)
    assert (spec.network.activation, spec.network.shared) == ("relu", True)
    assert seen["notes"] == [
        "settings: no preset of actor_critic for Catch-bsuite, so its general ones, and your flags"
    ]
    assert seen["folder"].parent == Path("runs")
    assert seen["folder"].name.startswith("actor_critic-Catch-bsuite-")


def test_anneals_over_the_run_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "train ppo CartPole-v1 --num-envs 2 --num-steps 16 --total-steps 320 --run-dir"
    seen = captured(monkeypatch, words, tmp_path / "a", "--anneal")
    assert seen["spec"].config.anneal_updates == 10.0
    seen = captured(monkeypatch, words, tmp_path / "b", "--anneal", "--anneal-updates", 4)
    assert seen["spec"].config.anneal_updates == 4.0


def test_seeds_are_those_of_a_split_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = captured(monkeypatch, TINY, "--run-dir", tmp_path / "a", "--seed", 3)
    keys, _ = seed_keys(seen["spec"])
    expected = jax.random.split(jax.random.key(3), 2)
    assert (jax.random.key_data(keys) == jax.random.key_data(expected)).all()


def test_bench_measures_a_grid(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Counts, not times: the steps of a row divided by its seconds are its speed."""
    grid = "--environments CartPole-v1 --num-seeds 1 2 --num-envs 3 --num-steps 4 --num-updates 2"
    words = f"bench {grid} --stages environment --repeats 3 --output {tmp_path}"
    assert main(words.split()) == 0
    assert "ppo | CartPole-v1 | mlp | 2 × 3 × 4" in capsys.readouterr().out
    (path,) = tmp_path.glob("grid-*.json")
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".md", ".png"}
    report = json.loads(path.read_text())
    assert report["machine"]["packages"]["jax"] == jax.__version__
    for row, steps in zip(report["rows"], (1 * 3 * 4 * 2, 2 * 3 * 4 * 2), strict=True):
        stage = row["stages"]["environment"]
        assert len(stage["run_seconds"]) == 3
        median = sorted(stage["run_seconds"])[1]
        np.testing.assert_allclose(stage["steps_per_second"] * median, steps)


def test_every_kind_of_row_of_the_bench_presets_can_run() -> None:
    rows = [row for rows in throughput.PRESETS.values() for row in rows]
    for row in {(row.algorithm, row.environment, row.network): row for row in rows}.values():
        throughput.check(row, None, None, 1)


PPO = "train ppo CartPole-v1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian ppo CartPole-v1", "unknown command 'trian': did you mean train?"),
        (f"{PPO} --num-seeds 6 --chunk-size 4", "chunk_size=4 does not divide num_seeds=6"),
        (f"{PPO} --chunk-size 0", "chunk_size must be at least 1, got 0"),
        ("bench --algorithms reinforc", "unknown algorithm 'reinforc': did you mean reinforce?"),
        ("bench --num-seeds 4 --chunk-size 3", "chunk_size=3 does not divide num_seeds=4"),
        ("bench --num-seeds 4 --chunk-size 0", "chunk_size must be at least 1, got 0"),
        ("bench --num-envs 0", "num_envs must be at least 1, got 0"),
        ("bench --num-envs 3 --num-steps 5", "num_minibatches=4 does not divide"),
        ("bench --repeats 0", "repeats must be at least 1, got 0"),
        ("train", "train needs ALGORITHM and ENV before any flag"),
        ("train --num-seeds 3 ppo CartPole-v1", "train needs ALGORITHM and ENV before any flag"),
        ("train pppo CartPole-v1", "unknown algorithm 'pppo': did you mean ppo"),
        ("train ppo cartpole", "unknown environment 'cartpole': did you mean CartPole-v1"),
        ("train ppo MNISTBandit-bsuite", "MNISTBandit-bsuite downloads a data set"),
        (f"{PPO} --gamma 1.5", "gamma must lie in [0, 1], got 1.5"),
        (f"{PPO} --gamma nan", "gamma must lie in [0, 1], got nan"),
        (f"{PPO} --total-steps 0", "total_steps must be at least 1, got 0"),
        (f"{PPO} --num-seeds 0", "num_seeds must be at least 1, got 0"),
        (f"{PPO} --eval-episodes -1", "eval_episodes must be at least 1, got -1"),
        (
            f"{PPO} --num-envs 3 --num-steps 5 --num-minibatches 2",
            "num_minibatches=2 does not divide num_envs × num_steps=15",
        ),
        ("train grpo CartPole-v1 --group-size 7", "group_size=7 does not divide num_envs="),
        ("train ppo Pendulum-v1 --network cnn", "cnn_policy needs observations [H, W, C]"),
        ("train trpo CartPole-v1 --network gru", "trpo needs a feed-forward network, got"),
        (f"{PPO} --kernel 3", "a network of kind 'mlp' has no kernel, got 3"),
        (f"{PPO} --distribution tanh_gaussian", "a distribution of Box actions cannot act in"),
        (f"{PPO} --env-params max_step 9", "unknown setting of CartPole-v1 'max_step': did you"),
        (f"{PPO} --gama 1", "Unrecognized options: --gama, 1 (did you mean --gamma?); see jaxpg"),
        (
            f"{PPO} --gama 1 --nm-envs 2",
            "Unrecognized options: --gama, 1, --nm-envs, 2 (did you mean --",
        ),
        (f"{PPO} --gamma high", "Error parsing --gamma: could not convert string to float: 'high'"),
        (f"{PPO} --network rnn", "invalid choice 'rnn' for argument '--network'. Expected one of"),
        (f"{PPO} --num-envs", "Missing value for argument '--num-envs'"),
        ("train --resume", "--resume needs the run folder to go on in"),
        ("train --resume nowhere", "nowhere is no run folder: it has no config.json"),
        ("train ppo CartPole-v1 --resume x", "with --resume, ALGORITHM and ENV come from the run"),
        ("evaluate nowhere", "nowhere is no run folder: it has no config.json"),
        ("evaluate", "Missing from jaxpg evaluate: RUN"),
        ("list everything", "Unrecognized options: everything"),
    ],
)
def test_wrong_command_lines(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *args: pytest.fail("it compiles"))
    code, out, err = call(words)
    assert code == 2
    assert err.startswith("jaxpg: " + message), err
    assert err.count("\n") == 1 and err.endswith("\n")
    assert out == "" and not list(tmp_path.iterdir())


def test_damaged_run_folder(finished: tuple[Path, Outcome], tmp_path: Path) -> None:
    folder, _ = finished
    saved = json.loads((folder / "config.json").read_text())
    del saved["config"]["gamma"]
    saved["config"]["discount"] = 0.9
    (tmp_path / "config.json").write_text(json.dumps(saved))
    code, _, err = call("evaluate", tmp_path)
    assert code == 2
    assert "does not describe a run of this version: settings differ in discount, gamma" in err
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    code, _, err = call("evaluate", tmp_path)
    assert code == 2 and "no checkpoint at" in err and err.count("\n") == 1


def test_help() -> None:
    assert call().code == 2
    code, out, _ = call("--help")
    assert code == 0
    for command in cli.COMMANDS:
        assert f"\n  {command} " in out
    code, out, _ = call("train", "--help")
    assert code == 0 and "--resume RUN" in out
    assert all(f"\n  {name} " in out for name in cli.ALGORITHMS)
    code, out, _ = call("train", "ppo", "CartPole-v1", "--help")
    assert code == 0
    for flag in ("--clip-epsilon", "--hidden-sizes", "--env-params", "--num-seeds", "--no-anneal"):
        assert flag in out
    assert "(default: 50000)" in out
    code, out, _ = call("train", "trpo", "--help")
    assert code == 0 and "usage: jaxpg train trpo ENV" in out and "--max-kl" in out
    code, out, _ = call("evaluate", "--help")
    assert code == 0 and "RUN" in out


def test_list_constructs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import gymnax

    monkeypatch.setattr(gymnax, "make", lambda *args, **kwargs: pytest.fail("constructed"))
    code, out, err = call("list")
    assert (code, err) == (0, "")
    assert table_row(out, "ppo")[2:4] == ["discrete, box", "mlp, cnn, gru"]
    assert table_row(out, "trpo")[3] == "mlp, cnn"
    assert table_row(out, "Pendulum-v1")[1:4] == ["(3,)", "box (1,)", "200"]
    assert "downloads data" in table_row(out, "MNISTBandit-bsuite")[4]


def test_what_the_info_says_went_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    watch = live_runs.Watch()
    for share, cut in ((0.0, 0.0), (0.25, 2.0), (0.125, 1.0)):
        metrics = {"nonfinite": np.array([0.0, share]), "unbootstrapped": np.array([cut, 0.0])}
        watch.update(Point(1, 1, 1.0, metrics))
    trained = Trained(None, 1, 1, 1, 1.0, 1.0, np.array([False, False]), None)  # type: ignore[arg-type]
    assert live_runs.warn(watch, trained, None) == 0  # type: ignore[arg-type]
    first, second = capsys.readouterr().err.splitlines()
    assert "gradients held NaN or inf in up to 25% of the optimizer steps" in first
    assert "3 truncations came sooner than the environment's time limit promises" in second


def points() -> list[Point]:
    scores = (np.array([np.nan, np.nan]), np.array([10.0, 12.0]), np.array([np.nan, np.nan]))
    lost = np.array([0.0, 1.0])
    return [
        Point(i, 100 * i, 0.5 * i, {"score": x, "diverged": lost * (i > 2)})
        for i, x in enumerate(scores, start=1)
    ]


def show(console: Console, quiet: bool = False) -> None:
    display = RunDisplay(
        console, total_steps=300, done=0, num_seeds=2, score="score", label="return", quiet=quiet
    )
    with display:
        for point in points():
            display.show(point)


def test_progress_on_a_terminal_and_elsewhere() -> None:
    log = io.StringIO()
    show(Console(file=log, width=100))
    lines = [" ".join(line.split()) for line in log.getvalue().splitlines()]
    assert lines == [
        "100 / 300 steps a seed return nan 400 steps/s",
        "200 / 300 steps a seed return 11.0 400 steps/s",
        "300 / 300 steps a seed return 11.0 (1 diverged) 400 steps/s",
    ]
    terminal = io.StringIO()
    show(Console(file=terminal, force_terminal=True, width=120))
    assert "\x1b[" in terminal.getvalue()
    assert "300 steps a seed" in terminal.getvalue() and "return 11.0" in terminal.getvalue()
    silent = io.StringIO()
    show(Console(file=silent, force_terminal=True), quiet=True)
    assert silent.getvalue() == ""
