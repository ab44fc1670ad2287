"""The command line on token tasks: what it prints, writes, refuses, and how a run goes on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_cli import (
    Outcome,
    assert_same_run,
    call,
    captured,
    compiled_once,  # noqa: F401  (a fixture: every run here is the same program)
    table_row,
)

from jaxpg import tokens
from jaxpg.cli import main
from jaxpg.loggers import read_metrics
from jaxpg.presets import has_preset, preset
from jaxpg.registry import ENVIRONMENTS, domain_of
from jaxpg.run_folders import load_states, read_config
from jaxpg.runs import build, make_spec
from jaxpg.token_domain import (
    NUM_PROMPTS,
    TASK_NOTES,
    TOKENS,
    TaskOptions,
    evaluate_on_task,
    evaluation_prompts,
    token_settings,
)
from jaxpg.tokens.presets import ModelOptions, token_preset

TINY = (
    "train grpo tokens/say-n --num-seeds 2 --num-prompts 4 --group-size 2 --num-epochs 1 "
    "--num-minibatches 1 --d-model 8 --num-layers 1 --num-heads 2 --task-params max_n 2 max_new 4 "
    "--overlong-cache 2 --kl-coef 0.01 --warm-up-steps 2 --warm-up-batch-size 4 --eval-episodes 8"
)
"""8 completions an update."""

SAMPLE = re.compile(r"^      ([12]) = → (.*?)( …)?  \(score (\d\.\d\d)\)$", re.MULTILINE)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """One whole run: 30 completions a seed are 4 updates of 8."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, call(TINY, "--total-steps", 30, "--run-dir", folder)


def test_train_prints_completions_and_samples(finished: tuple[Path, Outcome]) -> None:
    folder, (code, out, err) = finished
    assert (code, err) == (0, "")
    assert "grpo on tokens/say-n: 2 seeds × 32 completions (4 updates of 8)" in out
    assert "settings: tuned for tokens/say-n, and your flags" in out
    assert "32 / 32 completions a seed" in out and "completions/s" in out
    assert "completions a second over all seeds: 64 completions in" in out
    assert "grpo on tokens/say-n after 32 completions a seed" in out
    assert " steps" not in out and "\x1b" not in out
    samples = SAMPLE.findall(out)
    assert len(samples) == 4 * 3
    # the same prompts at each point
    assert [x[0] for x in samples[:3]] == [x[0] for x in samples[-3:]]
    for n, text, more, score in samples:
        answer, right = text.split(), [n] * int(n) + ["."]
        agree = sum(a == b for a, b in zip(answer, right, strict=False))
        assert float(score) == pytest.approx(agree / max(len(answer), len(right)), abs=0.006)
        assert bool(more) == (answer[-1] != ".")
    results = json.loads((folder / "results.json").read_text())
    for name in ("greedy", "sampled"):
        x = results["evaluation"][name]
        row = table_row(out, name)
        assert row[1] == f"{x['iqm']:.3f}" and row[3] == f"{x['mean']:.3f}"
        assert row[6:] == ["2", "2 × 8"]
        assert 0 <= x["minimum"] <= x["maximum"] <= 1 and x["episodes"] == 8


def test_run_folder_of_a_token_run(finished: tuple[Path, Outcome]) -> None:
    folder, _ = finished
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint",
        "config.json",
        "learning_curve.png",
        "metrics.csv",
        "results.json",
    ]
    spec = read_config(folder)
    assert isinstance(spec.config, tokens.GRPOConfig) and spec.config.overlong_cache == 2.0
    assert spec.network == ModelOptions(d_model=8, num_layers=1, num_heads=2)
    assert spec.environment_options.task_params == {"max_n": 2, "max_new": 4}
    assert spec.environment_options.warm_up_steps == 2
    metrics = read_metrics(folder / "metrics.csv")
    assert metrics["steps"].tolist() == [8, 16, 24, 32]
    np.testing.assert_array_equal(metrics["completions"], np.full((4, 2), 8))
    # no group is left out here: all tokens of all completions train
    np.testing.assert_array_equal(metrics["trained_tokens"], metrics["tokens"])
    np.testing.assert_allclose(metrics["mean_length"], metrics["tokens"] / 8, rtol=1e-6)
    assert (metrics["exact"] <= metrics["score"] + 1e-6).all() and (metrics["score"] <= 1).all()
    # lengths in (2, 4] are punished by (length − 2) / 2
    assert (metrics["reward"] <= metrics["score"] + 1e-6).all()
    assert (metrics["reward"] < metrics["score"]).any()
    assert "value_loss" not in metrics and "episode_return_sum" not in metrics


def test_resume_equals_not_stopping(finished: tuple[Path, Outcome], tmp_path: Path) -> None:
    folder, _ = finished
    half = call(TINY, "--total-steps", 16, "--run-dir", tmp_path / "half", "--quiet")
    assert half.code == 0 and not SAMPLE.search(half.out) and "greedy" in half.out
    whole = call("train --resume", tmp_path / "half", "--total-steps 32 --eval-episodes 8")
    assert (whole.code, whole.err) == (0, "")
    assert "goes on after 16 completions of each seed" in whole.out
    assert_same_run(folder, tmp_path / "half")
    _, (_, out, _) = finished
    assert SAMPLE.findall(whole.out) == SAMPLE.findall(out)[6:]
    over = call("train --resume", tmp_path / "half", "--total-steps 32")
    assert over.code == 2 and "the run has done 32: give more --total-steps" in over.err


def test_evaluate_a_token_run(finished: tuple[Path, Outcome]) -> None:
    folder, trained = finished
    greedy = call("evaluate", folder, "--episodes 8")
    assert (greedy.code, greedy.err) == (0, "")
    assert "grpo on tokens/say-n after 32 completions a seed" in greedy.out
    assert table_row(greedy.out, "greedy") == table_row(trained.out, "greedy")
    sampled = call("evaluate", folder, "--sampled")
    assert table_row(sampled.out, "sampled")[7] == f"2 × {NUM_PROMPTS}"


def test_scores_of_an_evaluation_are_those_of_the_policy(finished: tuple[Path, Outcome]) -> None:
    spec = read_config(finished[0])
    algorithm = build(spec)
    states = load_states(finished[0], spec, algorithm)
    state = states._replace(params=jax.tree.map(lambda x: x[1], states.params))
    key = jax.random.key(3)
    score = jax.jit(evaluate_on_task, static_argnums=(0, 4, 5))
    greedy = score(algorithm, spec.config, state, key, NUM_PROMPTS, True)
    cold = score(algorithm, spec.config.replace(temperature=1e-4), state, key, NUM_PROMPTS, False)
    warm = score(algorithm, spec.config, state, key, NUM_PROMPTS, False)
    # sampling takes the temperature of the config
    np.testing.assert_array_equal(greedy, cold)
    assert (warm != greedy).any()
    # two prompts have two greedy answers: ask for them one by one
    results = json.loads((finished[0] / "results.json").read_text())
    asked = tokens.Prompts(np.array([[1, 11], [2, 11]]), np.ones((2, 2), bool), {"n": [1, 2]})
    asked = jax.tree.map(np.asarray, asked, is_leaf=lambda x: isinstance(x, list))
    *_, one, two = tokens.answer_prompts(
        algorithm.task, algorithm.model, state.params, key, prompts=asked
    )[2]
    assert set(np.asarray(greedy).tolist()) == {float(one), float(two)}
    mean = results["evaluation"]["greedy"]["seed_means"][1]
    assert min(one, two) - 1e-6 <= mean <= max(one, two) + 1e-6


def test_prompts_of_an_evaluation_are_spread() -> None:
    task = tokens.add_mod_task()

    def pairs(num_prompts: int) -> list[int]:
        x = evaluation_prompts(task, jax.random.key(0), num_prompts).tokens
        return (10 * x[:, 0] + x[:, 2]).tolist()

    assert np.bincount(pairs(NUM_PROMPTS)).tolist() == [5] * 100
    # the first 20 pairs in order would be 0 + b and 1 + b
    assert len({pair // 10 for pair in pairs(20)}) > 5


def test_divergence_is_said(tmp_path: Path) -> None:
    code, _, err = call(
        TINY, "--total-steps 32 --learning-rate 1e38 --quiet --run-dir", tmp_path / "nan"
    )
    assert code == 1
    assert "2 of 2 seeds diverged" in err and "first seen at 16 completions" in err


def test_domains_and_presets() -> None:
    assert domain_of("CartPole-v1") is ENVIRONMENTS
    assert domain_of("tokens/sort") is TOKENS and domain_of("tokens/none") is TOKENS
    assert set(TOKENS.algorithms) == set(tokens.ALGORITHMS)
    assert set(TASK_NOTES) == set(tokens.TASKS)
    for name in TOKENS.names():
        for algorithm, entry in TOKENS.algorithms.items():
            settings, own = preset(algorithm, name), token_preset(algorithm, name[7:])
            assert settings == token_settings(algorithm, name) and has_preset(algorithm, name)
            assert type(settings.config) is entry.config and settings.config == own.config
            per_update = TOKENS.steps_per_update(None, settings.config)
            assert settings.total_steps == own.num_updates * per_update
            assert all(isinstance(x, float) for x in jax.tree.leaves(settings.config))
    dapo = preset("dapo", "tokens/copy").config
    assert TOKENS.steps_per_update(None, dapo) == 2 * 32 * 8
    assert preset("Dr-GRPO", "tokens/copy") == token_settings("dr_grpo", "tokens/copy")
    assert preset("grpo", "tokens/addition").environment == TaskOptions(
        warm_up_steps=token_preset("grpo", "addition").warm_up.num_steps
    )


@pytest.mark.parametrize(
    ("algorithm", "task"),
    [*((name, "addition") for name in TOKENS.algorithms), *(("dapo", t) for t in tokens.TASKS)],
)
def test_every_algorithm_and_every_task_builds(algorithm: str, task: str) -> None:
    spec, built = make_spec(algorithm, f"tokens/{task}", preset(algorithm, f"tokens/{task}"))
    assert built.task.name == task
    assert spec.num_updates == token_preset(algorithm, task).num_updates


def test_flags_reach_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = captured(
        monkeypatch,
        "train DAPO tokens/addition --num-layers 1 --d-model 8 --num-heads 2 --d-ff 12",
        "--task-params num_digits 1 held_out 0.5 --warm-up-steps 3 --clip-epsilon-high 0.3",
        "--oversample 3 --num-prompts 4 --group-size 2 --num-minibatches 2 --total-steps 50",
    )
    assert seen["outcome"].code == 0, seen["outcome"].err
    spec, algorithm = seen["spec"], build(seen["spec"])
    assert (spec.algorithm, spec.environment) == ("dapo", "tokens/addition")
    # 50 completions are 3 updates of 3 × 4 × 2
    assert spec.num_updates == 3 and spec.config.clip_epsilon_high == 0.3
    assert (algorithm.task.max_prompt, algorithm.task.max_new) == (4, 3)
    shapes = jax.eval_shape(algorithm.model.init, jax.random.key(0))
    assert (8, 12) in {x.shape for x in jax.tree.leaves(shapes)}
    assert spec.environment_options.warm_up_steps == 3
    assert seen["run"].eval_episodes == NUM_PROMPTS
    assert seen["folder"].name.startswith("dapo-tokens-addition-")


COPY = "train grpo tokens/copy"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train grpo tokens/ad-mod-10", "unknown token task 'tokens/ad-mod-10': did you mean tok"),
        ("train grpo add-mod-10", "unknown environment 'add-mod-10': did you mean tokens/add-mod"),
        ("train dap tokens/copy", "unknown algorithm 'dap': did you mean dapo?"),
        ("train dap --help", "unknown algorithm 'dap': did you mean"),
        ("train ppo tokens/copy", "ppo learns on environments such as CartPole-v1; on tokens/copy"),
        ("train dapo CartPole-v1", "dapo learns on token tasks such as tokens/add-mod-10; on Car"),
        (f"{COPY} --group-size 1", "group_size must be at least 2, got 1"),
        (f"{COPY} --num-minibatches 3", "num_minibatches=3 does not divide num_prompts=32"),
        (f"{COPY} --oversample 0", "oversample must be at least 1, got 0"),
        (f"{COPY} --overlong-cache 40", "overlong_cache must lie in (0, 5], got 40"),
        (f"{COPY} --dual-clip 1", "dual_clip must lie in (1, inf], got 1"),
        (f"{COPY} --num-heads 3", "num_heads=3 does not divide d_model=64"),
        (f"{COPY} --num-heads 0", "num_heads must be at least 1, got 0"),
        (f"{COPY} --d-ff 0", "d_ff must be at least 1, got 0"),
        (f"{COPY} --warm-up-steps -1", "warm_up_steps must be at least 0, got -1"),
        (f"{COPY} --warm-up-batch-size 0", "warm_up_batch_size must be at least 1, got 0"),
        (f"{COPY} --warm-up-learning-rate -1", "warm_up_learning_rate must lie in [0, inf], got"),
        (f"{COPY} --task-params max_lenght 3", "unknown setting of tokens/copy 'max_lenght': did"),
        (f"{COPY} --task-params max_length 2", "min_length=3 exceeds max_length=2"),
        (f"{COPY} --task-params max_length 4.5", "max_length must be a whole number, got 4.5"),
        (f"{COPY} --max-ratio 3", "Unrecognized options: --max-ratio"),
        (f"{COPY} --hidden-sizes 3", "Unrecognized options: --hidden-sizes"),
        (f"{COPY} --eval-episodes 0", "eval_episodes must be at least 1, got 0"),
        (f"{COPY} --total-steps 0", "total_steps must be at least 1, got 0"),
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


def test_list_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call("list")
    assert code == 0
    for name, (example, note) in TASK_NOTES.items():
        assert table_row(out, f"tokens/{name}") == [f"tokens/{name}", example, note]
    for name in TOKENS.algorithms:
        assert f"│ {name} " in out
    code, out, _ = call("train --help")
    assert code == 0 and all(f"\n  {name} " in out for name in TOKENS.algorithms)
    code, out, _ = call("train cispo --help")
    assert code == 0 and "usage: jaxpg train cispo ENV" in out and "--max-ratio" in out
    code, out, _ = call("train dapo tokens/say-n --help")
    assert code == 0
    for flag in ("--oversample", "--num-layers", "--task-params", "--warm-up-steps"):
        assert flag in out


def test_examples_in_the_list_are_right_answers() -> None:
    for name, (example, _) in TASK_NOTES.items():
        task = tokens.make_task(name)
        prompt, answer = (side.split() for side in example.split(" → "))
        digits = [int(x) for x in prompt if x.isdecimal()]
        info: dict[str, Any]
        if name == "add-mod-10":
            info = {"answer": np.array([sum(digits) % 10])}
        elif name == "addition":
            info = {"sum": np.array([10 * digits[0] + digits[1] + 10 * digits[2] + digits[3]])}
        elif name == "say-n":
            info = {"n": np.array(digits)}
        else:
            info = {"digits": np.array([[*digits, 0]]), "length": np.array([len(digits)])}
        ids, mask = task.targets(jax.tree.map(jax.numpy.asarray, info))
        assert [task.vocabulary[i] for i in np.asarray(ids)[np.asarray(mask)]] == answer, name
        assert all(word in task.vocabulary for word in prompt)


def test_import_of_jaxpg_leaves_tokens_alone() -> None:
    source = "import sys, jaxpg; sys.exit(any(x.startswith('jaxpg.tokens') for x in sys.modules))"
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0
    assert main(["list", "--help"]) == 0
