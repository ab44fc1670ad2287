"""Small token tasks, made and verified on the device.

=============  ==========================================  =====================================
key of TASKS   prompt → answer                             what it exercises
=============  ==========================================  =====================================
add-mod-10     ``7+5=`` → ``2``                            a one-token answer from random weights
copy, reverse  ``4 1 9 >`` → ``4 1 9 .``, ``9 1 4 .``      prompts of unequal length, part scores
sort           ``4 1 9 >`` → ``1 4 9 .``                   the same, and a function of all tokens
addition       ``47+85=`` → ``2 3 1 .`` (units first)      exact scores after a warm-up, held-out
say-n          ``4`` → ``4 4 4 4 .``                       the end token, truncation, length
=============  ==========================================  =====================================

A task of one's own is the record `Task` filled in; `say_n_task` below is about the least it takes.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpg._checks import nearest, positive_int
from jaxpg.tokens.records import Prompts, Task
from jaxpg.types import Key, PyTree

VOCABULARY = (*"0123456789", "+", "=", ".", "_")
"""Digits are their own ids; ``.`` ends an answer, ``_`` pads."""
PLUS, ASK, EOS, PAD = 10, 11, 12, 13


def position_score(targets: Array, target_mask: Array, completions: Array, mask: Array) -> Array:
    """Share of right positions, of the longer of answer and target.

    Formula::

        Σₜ [both count and agree at t] / max(|target|, |answer|)

    so 1 means exactly right, the end token included, and neither stopping early nor going on
    is free.

    Args:
        targets: ``[..., M]`` right answers.
        target_mask: ``[..., M]`` bool.
        completions: ``[..., M]``.
        mask: ``[..., M]`` bool.

    Returns:
        ``[...]`` float32 in 0 … 1.

    Example:
        >>> t = jnp.array([4, 4, 12]); m = jnp.array([True, True, True])
        >>> print(position_score(t, m, jnp.array([4, 12, 13]), jnp.array([True, True, False])))
        0.33333334
    """
    agree = target_mask & mask & (targets == completions)
    longer = jnp.maximum(jnp.sum(target_mask, axis=-1), jnp.sum(mask, axis=-1))
    return jnp.sum(agree, axis=-1) / jnp.maximum(longer, 1).astype(jnp.float32)


def add_mod_task(modulus: int = 10) -> Task:
    """``a+b=`` with digits a, b below `modulus`; the answer is one token, ``(a + b) % modulus``.

    ``evaluation_prompts(key, n)`` enumerates the pairs in order (all of them at
    ``n = modulus²``) and ignores its key.

    Args:
        modulus: 2 … 10.

    Returns:
        A `Task` without an end token.

    Raises:
        ValueError: another modulus.

    Example:
        >>> task = add_mod_task()
        >>> prompts = task.evaluation_prompts(jax.random.key(0), 100)
        >>> print(prompts.tokens[75], prompts.info["answer"][75])
        [ 7 10  5 11] 2
    """
    if not 2 <= positive_int("modulus", modulus) <= 10:
        raise ValueError(f"modulus must lie in 2 … 10, got {modulus}")

    def prompts(a: Array, b: Array) -> Prompts:
        symbols = jnp.full_like(a, PLUS), jnp.full_like(a, ASK)
        tokens = jnp.stack([a, symbols[0], b, symbols[1]], axis=-1)
        return Prompts(tokens, jnp.ones(tokens.shape, bool), {"answer": (a + b) % modulus})

    def sample_prompts(key: Key, n: int) -> Prompts:
        return prompts(*jax.random.randint(key, (2, n), 0, modulus))

    def evaluation_prompts(key: Key, n: int) -> Prompts:
        pair = jnp.arange(n) % modulus**2
        return prompts(pair // modulus, pair % modulus)

    def score(info: PyTree, completions: Array, mask: Array) -> Array:
        return (completions[:, 0] == info["answer"]).astype(jnp.float32)

    def targets(info: PyTree) -> tuple[Array, Array]:
        answer = info["answer"][:, None]
        return answer, jnp.ones(answer.shape, bool)

    return Task(
        f"add-mod-{modulus}",
        sample_prompts,
        score,
        VOCABULARY,
        max_prompt=4,
        max_new=1,
        eos_id=None,
        pad_id=PAD,
        targets=targets,
        evaluation_prompts=evaluation_prompts,
    )


def _list_task(name: str, answer: Callable[[Array, Array], Array], low: int, high: int) -> Task:
    """Digits in, the same digits rearranged out; lists of `low` … `high` digits."""
    if positive_int("min_length", low) > positive_int("max_length", high):
        raise ValueError(f"min_length={low} exceeds max_length={high}")
    place = jnp.arange(high)

    def sample_prompts(key: Key, n: int) -> Prompts:
        digit_key, length_key = jax.random.split(key)
        digits = jax.random.randint(digit_key, (n, high), 0, 10)
        length = jax.random.randint(length_key, (n,), low, high + 1)
        # the list stands right-aligned before the question, so padding comes first
        mask = place >= high - length[:, None]
        ask = jnp.full((n, 1), ASK)
        tokens = jnp.concatenate([jnp.where(mask, digits, PAD), ask], axis=1)
        flags = jnp.concatenate([mask, jnp.ones((n, 1), bool)], axis=1)
        left = jnp.take_along_axis(digits, (place + high - length[:, None]) % high, axis=1)
        return Prompts(tokens, flags, {"digits": left, "length": length})

    def targets(info: PyTree) -> tuple[Array, Array]:
        length = info["length"][:, None]
        listed = place < length
        out = answer(jnp.where(listed, info["digits"], 10), length)
        padded = jnp.pad(out, ((0, 0), (0, 1)))
        column = jnp.arange(high + 1)
        tokens = jnp.where(column < length, padded, jnp.where(column == length, EOS, PAD))
        return tokens, column <= length

    def score(info: PyTree, completions: Array, mask: Array) -> Array:
        return position_score(*targets(info), completions, mask)

    return Task(
        name,
        sample_prompts,
        score,
        VOCABULARY,
        max_prompt=high + 1,
        max_new=high + 1,
        eos_id=EOS,
        pad_id=PAD,
        targets=targets,
    )


def copy_task(min_length: int = 3, max_length: int = 4) -> Task:
    """``4 1 9 >`` → ``4 1 9 .``, lists of `min_length` … `max_length` digits; see `sort_task`."""
    return _list_task("copy", lambda digits, length: digits, min_length, max_length)


def reverse_task(min_length: int = 3, max_length: int = 4) -> Task:
    """``4 1 9 >`` → ``9 1 4 .``, lists of `min_length` … `max_length` digits; see `sort_task`."""

    def backwards(digits: Array, length: Array) -> Array:
        index = (length - 1 - jnp.arange(digits.shape[1])) % digits.shape[1]
        return jnp.take_along_axis(digits, index, axis=1)

    return _list_task("reverse", backwards, min_length, max_length)


def sort_task(min_length: int = 3, max_length: int = 4) -> Task:
    """``4 1 9 >`` → ``1 4 9 .``: digits in ascending order, then the end token.

    Scored by `position_score`; prompts have unequal length (left-padded).

    Args:
        min_length: shortest list.
        max_length: longest list; prompts and answers have ``max_length + 1`` columns.

    Returns:
        A `Task` with targets.

    Raises:
        ValueError: `min_length` above `max_length`.

    Example:
        >>> task = sort_task(3, 3)
        >>> info = {"digits": jnp.array([[4, 1, 9]]), "length": jnp.array([3])}
        >>> print(task.targets(info)[0])
        [[ 1  4  9 12]]
    """
    return _list_task(
        "sort", lambda digits, length: jnp.sort(digits, axis=1), min_length, max_length
    )


def addition_task(num_digits: int = 2, held_out: float = 0.2, seed: int = 0) -> Task:
    """``47+85=`` → ``2 3 1 .``: the sum, units first; 1 if all of it is right, else 0.

    Writing the units first makes every digit a function of what stands before it (Lee et al.,
    arXiv 2307.03381). A fixed part of all pairs is held out: ``sample_prompts`` never draws one,
    ``evaluation_prompts`` draws no other.

    Args:
        num_digits: digits of each summand, 1 … 3.
        held_out: share of pairs held out, between 0 and 1.
        seed: of the split (NumPy; the same on every machine).

    Returns:
        A `Task` with targets and evaluation prompts.

    Raises:
        ValueError: a number of digits or a share out of range.

    Example:
        >>> task = addition_task()
        >>> info = {"sum": jnp.array([47 + 85])}
        >>> print(task.targets(info)[0])
        [[ 2  3  1 12]]
    """
    if not 1 <= positive_int("num_digits", num_digits) <= 3:
        raise ValueError(f"num_digits must lie in 1 … 3, got {num_digits}")
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"held_out must lie between 0 and 1, got {held_out}")
    base = 10**num_digits
    order = np.random.RandomState(seed).permutation(base * base).astype(np.int32)
    split = round(held_out * base * base)
    test_pairs, train_pairs = order[:split], order[split:]
    powers = 10 ** np.arange(num_digits + 1)

    def draw(key: Key, n: int, pairs: np.ndarray) -> Prompts:
        pair = jnp.asarray(pairs)[jax.random.randint(key, (n,), 0, len(pairs))]
        a, b = pair // base, pair % base
        symbol = jnp.ones((n, 1), jnp.int32)
        descending = powers[num_digits - 1 :: -1]
        left, right = (x[:, None] // descending % 10 for x in (a, b))
        tokens = jnp.concatenate([left, PLUS * symbol, right, ASK * symbol], axis=1)
        return Prompts(tokens, jnp.ones(tokens.shape, bool), {"sum": a + b})

    def targets(info: PyTree) -> tuple[Array, Array]:
        digits = info["sum"][:, None] // powers % 10
        tokens = jnp.concatenate([digits, jnp.full_like(digits[:, :1], EOS)], axis=1)
        return tokens, jnp.ones(tokens.shape, bool)

    def score(info: PyTree, completions: Array, mask: Array) -> Array:
        right = position_score(*targets(info), completions, mask) == 1.0
        return right.astype(jnp.float32)

    return Task(
        "addition",
        lambda key, n: draw(key, n, train_pairs),
        score,
        VOCABULARY,
        max_prompt=2 * num_digits + 2,
        max_new=num_digits + 2,
        eos_id=EOS,
        pad_id=PAD,
        targets=targets,
        evaluation_prompts=lambda key, n: draw(key, n, test_pairs),
    )


def say_n_task(max_n: int = 5, max_new: int = 10) -> Task:
    """``4`` → ``4 4 4 4 .``: the digit n, n times, then the end token.

    Args:
        max_n: n is drawn from 1 … `max_n`, at most 9.
        max_new: room for the answer; more than ``max_n + 1`` leaves room for going on too long.

    Returns:
        A `Task` with targets, scored by `position_score`.

    Raises:
        ValueError: `max_n` above 9, or an answer that does not fit in `max_new`.

    Example:
        >>> task = say_n_task()
        >>> print(task.targets({"n": jnp.array([2])})[0][0, :4])
        [ 2  2 12 13]
    """
    if positive_int("max_n", max_n) > 9 or max_n + 1 > positive_int("max_new", max_new):
        raise ValueError(f"max_n={max_n} must be at most 9 and below max_new={max_new}")

    def sample_prompts(key: Key, n: int) -> Prompts:
        number = jax.random.randint(key, (n,), 1, max_n + 1)
        tokens = jnp.stack([number, jnp.full_like(number, ASK)], axis=-1)
        return Prompts(tokens, jnp.ones(tokens.shape, bool), {"n": number})

    def targets(info: PyTree) -> tuple[Array, Array]:
        number, column = info["n"][:, None], jnp.arange(max_new)
        tokens = jnp.where(column < number, number, jnp.where(column == number, EOS, PAD))
        return tokens, column <= number

    def score(info: PyTree, completions: Array, mask: Array) -> Array:
        return position_score(*targets(info), completions, mask)

    return Task("say-n", sample_prompts, score, VOCABULARY, 2, max_new, EOS, PAD, targets)


TASKS: dict[str, Callable[..., Task]] = {
    "add-mod-10": add_mod_task,
    "addition": addition_task,
    "copy": copy_task,
    "reverse": reverse_task,
    "say-n": say_n_task,
    "sort": sort_task,
}
"""Task constructors by the name that the command line uses (``tokens/<name>``)."""


def make_task(name: str, **settings: int | float) -> Task:
    """The task called `name` in `TASKS`; `ValueError` with the nearest names for another."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: {nearest(name, list(TASKS))}")
    return TASKS[name](**settings)
