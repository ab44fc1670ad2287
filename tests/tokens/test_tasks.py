"""Tasks: right answers score 1, wrong ones what the rule says, held-out pairs stay out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.tokens.tasks import (
    EOS,
    PAD,
    TASKS,
    VOCABULARY,
    add_mod_task,
    addition_task,
    copy_task,
    make_task,
    position_score,
    reverse_task,
    say_n_task,
    sort_task,
)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_shapes_and_right_answers(name, key):
    task = make_task(name)
    prompts = task.sample_prompts(key, 50)
    assert prompts.tokens.shape == prompts.mask.shape == (50, task.max_prompt)
    assert prompts.tokens.dtype == jnp.int32 and prompts.mask.dtype == jnp.bool_
    mask = np.asarray(prompts.mask)
    assert mask[:, -1].all() and (np.diff(mask.astype(int), axis=1) >= 0).all()
    assert np.all(np.asarray(prompts.tokens)[~mask] == PAD)
    targets, target_mask = task.targets(prompts.info)
    assert targets.shape == target_mask.shape == (50, task.max_new)
    scores = task.score(prompts.info, targets, target_mask)
    np.testing.assert_array_equal(scores, np.ones(50))
    assert scores.dtype == jnp.float32
    wrong = task.score(prompts.info, (targets + 1) % 10, target_mask)
    assert np.all(np.asarray(wrong) < 0.21)
    assert len(set(task.vocabulary)) == len(task.vocabulary) == 14
    again = task.sample_prompts(key, 50)
    np.testing.assert_array_equal(prompts.tokens, again.tokens)
    if task.eos_id is not None:  # the end token stands last, once
        ends = np.asarray(targets == EOS) & np.asarray(target_mask)
        assert (ends.sum(axis=1) == 1).all()
        last = np.asarray(target_mask).sum(axis=1) - 1
        assert ends[np.arange(50), last].all()


def words(tokens: jax.Array, mask: jax.Array) -> str:
    return "".join(VOCABULARY[i] for i in np.asarray(tokens)[np.asarray(mask)])


def test_answers_are_what_python_says(key):
    """Every task against the obvious Python on the text of its prompts."""
    rules = {
        "add-mod-10": lambda s: str((int(s[0]) + int(s[2])) % 10),
        "copy": lambda s: s[:-1] + ".",
        "reverse": lambda s: s[:-1][::-1] + ".",
        "sort": lambda s: "".join(sorted(s[:-1])) + ".",
        "addition": lambda s: f"{int(s[:2]) + int(s[3:5]):03d}"[::-1] + ".",
        "say-n": lambda s: s[0] * int(s[0]) + ".",
    }
    assert rules.keys() == TASKS.keys()
    for name, rule in rules.items():
        task = make_task(name)
        prompts = task.sample_prompts(key, 40)
        targets = task.targets(prompts.info)
        for row in range(40):
            prompt = words(prompts.tokens[row], prompts.mask[row])
            assert words(targets[0][row], targets[1][row]) == rule(prompt), (name, prompt)


def test_position_score_by_hand():
    targets = jnp.array([[4, 4, EOS, PAD]] * 5)
    target_mask = jnp.array([[True, True, True, False]] * 5)
    completions = jnp.array(
        [
            [4, 4, EOS, PAD],  # right
            [4, EOS, PAD, PAD],  # stopped early: 1 of 3
            [4, 4, 4, 4],  # went on: 2 of 4
            [5, 4, EOS, PAD],  # one wrong: 2 of 3
            [4, 4, 4, EOS],  # one too many: 2 of 4
        ]
    )
    lengths = jnp.array([3, 2, 4, 3, 4])
    mask = jnp.arange(4) < lengths[:, None]
    np.testing.assert_allclose(
        position_score(targets, target_mask, completions, mask), [1, 1 / 3, 0.5, 2 / 3, 0.5]
    )


def test_a_right_number_with_no_end_is_not_exact():
    task = addition_task()
    info = {"sum": jnp.array([132, 132, 132])}
    completions = jnp.array([[2, 3, 1, EOS], [2, 3, 1, 0], [2, 3, EOS, PAD]])
    mask = jnp.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]) > 0
    np.testing.assert_array_equal(task.score(info, completions, mask), [1, 0, 0])


def test_all_hundred_pairs(key):
    task = add_mod_task()
    prompts = task.evaluation_prompts(key, 100)
    pairs = {(int(a), int(b)) for a, _, b, _ in np.asarray(prompts.tokens)}
    assert len(pairs) == 100
    small = add_mod_task(3).evaluation_prompts(key, 9)
    assert int(small.info["answer"].max()) == 2


def test_held_out_pairs_stay_out(key):
    task = addition_task()
    train = np.asarray(task.sample_prompts(key, 20_000).tokens)
    test = np.asarray(task.evaluation_prompts(key, 20_000).tokens)
    seen, held = ({tuple(row) for row in rows} for rows in (train, test))
    assert not seen & held
    assert 7000 < len(seen) <= 8000 and 1900 < len(held) <= 2000  # of 10,000 pairs, 20 % held out
    other = addition_task(seed=1).evaluation_prompts(key, 20_000)
    assert seen & {tuple(row) for row in np.asarray(other.tokens)}


def test_lengths_are_all_drawn(key):
    for task in (copy_task(2, 4), sort_task(2, 4), reverse_task(2, 4)):
        lengths = np.asarray(task.sample_prompts(key, 200).mask).sum(axis=1) - 1
        assert set(lengths) == {2, 3, 4}
    n = say_n_task(5).sample_prompts(key, 200).info["n"]
    assert set(np.asarray(n)) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: add_mod_task(11), "modulus must lie in 2 … 10, got 11"),
        (lambda: addition_task(4), "num_digits must lie in 1 … 3, got 4"),
        (lambda: addition_task(held_out=1.0), "held_out must lie between 0 and 1"),
        (lambda: sort_task(5, 4), "min_length=5 exceeds max_length=4"),
        (lambda: say_n_task(9, 9), "max_n=9 must be at most 9 and below max_new=9"),
        (lambda: make_task("ad-mod-10"), "unknown task 'ad-mod-10': did you mean add-mod-10"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
