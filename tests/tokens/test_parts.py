"""Groups, token rewards, evaluation, presets, and the namespace itself."""

from __future__ import annotations

import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpg.tokens
from jaxpg.advantages import reinforce_pp_advantages, reinforce_pp_baseline_advantages
from jaxpg.tokens import (
    ALGORITHMS,
    TASKS,
    Completions,
    LanguageModel,
    Prompts,
    add_mod_task,
    answer_prompts,
    evaluate,
    format_completions,
    group_log_probs,
    last_token_rewards,
    sample_groups,
    say_n_task,
    select_mixed_groups,
    show_samples,
    split_groups,
    warm_up,
)
from jaxpg.tokens.config import GRPOConfig
from jaxpg.tokens.presets import PRESETS, ModelOptions, build_algorithm, build_model, token_preset

EOS = 12


def knowing_model(table: np.ndarray) -> LanguageModel:
    """Writes ``table[token]`` after `token`, whatever the parameters."""
    logits = 20.0 * jax.nn.one_hot(jnp.asarray(table), 14)
    return LanguageModel(
        lambda key: (), lambda params, tokens, positions: logits[tokens], None, None, 64, 14
    )


def test_namespace_is_sorted_and_no_module_shares_a_name():
    names = jaxpg.tokens.__all__
    constants = [n for n in names if n.isupper()]
    classes = [n for n in names if n[0].isupper() and not n.isupper()]
    functions = [n for n in names if n[0].islower()]
    assert names == sorted(constants) + sorted(classes) + sorted(functions)
    for name in names:
        assert getattr(jaxpg.tokens, name).__doc__, name
    assert not {m.name for m in pkgutil.iter_modules(jaxpg.tokens.__path__)} & set(names)


def test_split_groups():
    np.testing.assert_array_equal(split_groups(jnp.arange(6), 3), [[0, 1, 2], [3, 4, 5]])
    assert split_groups(jnp.zeros((6, 4)), 2).shape == (3, 2, 4)
    with pytest.raises(ValueError, match="7 samples are not divisible into groups of group_size=3"):
        split_groups(jnp.zeros(7), 3)
    with pytest.raises(ValueError, match="group_size must be at least 2, got 1"):
        split_groups(jnp.zeros(7), 1)


def test_select_mixed_groups_is_stable_and_flags_what_is_missing():
    scores = jnp.array([[0, 0], [0, 1], [1, 1], [1, 0], [0.5, 0.5], [0, 0.5]])
    for num, expected, kept in (
        (2, [1, 3], [1, 1]),
        (3, [1, 3, 5], [1, 1, 1]),
        (5, [1, 3, 5, 0, 2], [1, 1, 1, 0, 0]),
    ):
        index, flags = select_mixed_groups(scores, num)
        np.testing.assert_array_equal(index, expected)
        np.testing.assert_array_equal(flags, kept)
    with pytest.raises(ValueError, match="num_groups=7 exceeds the 6 groups drawn"):
        select_mixed_groups(scores, 7)


def test_last_token_rewards_and_penalty():
    mask = jnp.array([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    kl = jnp.array([[0.1, jnp.nan, 0.3, 9.0], [0.0, 0.1, 0.0, -0.2], [jnp.inf] * 4])
    out = last_token_rewards(jnp.array([1.0, 2.0, 7.0]), mask, kl, kl_coef=0.5)
    expected = [[-0.05, 0, 0.85, 0], [0, -0.05, 0, 2.1], [0, 0, 0, 0]]
    np.testing.assert_allclose(out, expected, atol=1e-6)
    np.testing.assert_allclose(
        last_token_rewards(jnp.array([1.0, 2.0, 7.0]), mask.T, kl.T, kl_coef=0.5, axis=0).T, out
    )
    with pytest.raises(ValueError, match=r"rewards \(2,\) must have the shape of mask \(3, 4\)"):
        last_token_rewards(jnp.zeros(2), mask)


def test_reinforce_pp_baseline_is_the_same_composed():
    """Without KL and discount: centred score on the last token, reward-to-go, whitening."""
    rewards = jnp.array([[1.0, 0.0, 0.5], [0.2, 0.2, 0.9]])
    mask = jnp.arange(4) < jnp.array([[1, 2, 3], [4, 1, 2]])[..., None]
    centred = rewards - rewards.mean(axis=-1, keepdims=True)
    composed = reinforce_pp_advantages(last_token_rewards(centred, mask), mask)
    np.testing.assert_allclose(composed, reinforce_pp_baseline_advantages(rewards, mask), atol=1e-5)


def test_group_log_probs_match_the_samplers(key):
    task = say_n_task(3, 5)
    model = build_model(task, ModelOptions(d_model=16, num_layers=1, num_heads=2))
    params = jax.jit(model.init)(key)
    config = GRPOConfig(num_prompts=4, group_size=3, temperature=0.8)
    groups, _ = jax.jit(sample_groups, static_argnums=(1, 2))(key, task, model, params, config)
    log_probs, entropies = jax.jit(group_log_probs, static_argnums=0)(
        model, params, groups, temperature=0.8
    )
    assert log_probs.shape == entropies.shape == (4, 3, 5)
    np.testing.assert_allclose(log_probs, groups.old_log_probs, atol=1e-5)


def test_evaluation_by_hand(key):
    task = say_n_task(3, 5)
    # after "=" (11) it writes 2, after 2 the end: right for n = 1? no: "2 ." is never right,
    # and for n = 2 it is one of three positions
    table = np.full(14, EOS)
    table[11] = 2
    prompts = Prompts(jnp.array([[1, 11], [2, 11], [3, 11]]), jnp.ones((3, 2), bool),
                      {"n": jnp.array([1, 2, 3])})  # fmt: skip
    out = evaluate(task, knowing_model(table), (), key, prompts=prompts)
    # n = 1: "2 ." against "1 .": 1 of 2; n = 2: "2 ." against "2 2 .": 1 of 3; n = 3: 0 of 4
    np.testing.assert_allclose(out.score, (1 / 2 + 1 / 3 + 0) / 3, atol=1e-6)
    assert float(out.exact) == 0 and float(out.eos_rate) == 1
    assert float(out.mean_length) == 2 and float(out.target_length) == 3
    np.testing.assert_allclose(out.length_error, (0 + 1 + 2) / 3, atol=1e-6)

    forever = evaluate(task, knowing_model(np.full(14, 2)), (), key, prompts=prompts)
    assert float(forever.eos_rate) == 0 and float(forever.mean_length) == 5
    bare = evaluate(task._replace(targets=None), knowing_model(table), (), key, prompts=prompts)
    assert np.isnan(bare.target_length) and np.isnan(bare.length_error)
    np.testing.assert_allclose(bare.score, out.score)


def test_evaluation_takes_held_out_prompts(key):
    task = add_mod_task()
    prompts, completions, scores = answer_prompts(
        task, knowing_model(np.full(14, 3)), (), key, num_prompts=100
    )
    assert len({tuple(row) for row in np.asarray(prompts.tokens)}) == 100
    np.testing.assert_array_equal(scores, np.asarray(prompts.info["answer"]) == 3)
    assert float(scores.mean()) == pytest.approx(0.1)
    assert completions.tokens.shape == (100, 1)


def test_text_of_completions(key):
    task = say_n_task(3, 4)
    prompts = Prompts(jnp.array([[1, 11], [13, 2]]), jnp.array([[True, True], [False, True]]), ())
    completions = Completions(
        jnp.array([[1, EOS, 13, 13], [2, 2, 2, 99]]),
        jnp.zeros((2, 4)),
        jnp.array([[True, True, False, False], [True] * 4]),
        jnp.array([True, False]),
    )
    assert format_completions(task, prompts, completions, [1.0, 0.25]) == [
        "1 = → 1 .  (score 1.00)",
        "2 → 2 2 2 ? …  (score 0.25)",
    ]
    lines = show_samples(task, knowing_model(np.full(14, 2)), (), key, num_prompts=3)
    assert len(lines) == 3 and all("→ 2 2 2 2 …" in line for line in lines)


def test_warm_up_learns_targets(key):
    task = say_n_task(2, 3)
    model = build_model(task, ModelOptions(d_model=16, num_layers=1, num_heads=2))
    params = jax.jit(model.init)(key)
    run = jax.jit(
        lambda key, params, rate: warm_up(
            key, task, model, params, num_steps=60, batch_size=32, learning_rate=rate
        )
    )
    _, losses = run(key, params, 1e-2)
    assert losses.shape == (60,) and float(losses[0]) > 2.0 and float(losses[-1]) < 0.3
    same, _ = run(key, params, 0.0)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), same, params))
    for changes, message in (
        ({"targets": None}, "has no targets"),
        ({"max_prompt": 9}, "more than the model's max_length"),
    ):
        with pytest.raises(ValueError, match=message):
            warm_up(key, task._replace(**changes), model, params, num_steps=1)
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        warm_up(key, task, model, params, num_steps=0)


def test_presets_cover_every_pair_and_are_valid(key):
    assert set(PRESETS) == {(a, t) for a in ALGORITHMS for t in TASKS}
    for (algorithm, task), preset in PRESETS.items():
        assert isinstance(preset.config, ALGORITHMS[algorithm][1])
        built = build_algorithm(algorithm, task, model=preset.model, warm_up=preset.warm_up)
        # traces everything that init does, and compiles nothing
        state = jax.eval_shape(lambda k, b=built, c=preset.config: b.init(k, c), key)
        assert state.update.shape == ()
    assert token_preset("grpo", "addition").warm_up.num_steps > 0
    with pytest.raises(ValueError, match=r"unknown algorithm 'grp'.*grpo"):
        token_preset("grp", "sort")
    with pytest.raises(ValueError, match=r"unknown task 'sorting'.*sort"):
        build_algorithm("grpo", "sorting")
