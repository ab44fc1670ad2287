"""How well a policy does on a task, in numbers and in text."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxpg._checks import positive_int
from jaxpg.tokens.config import check_task
from jaxpg.tokens.groups import draw_prompts, score_completions
from jaxpg.tokens.records import Completions, LanguageModel, Prompts, Task
from jaxpg.tokens.sampling import generate
from jaxpg.types import Key, PyTree, split_key


class Evaluation(NamedTuple):
    """Means over the completions of one evaluation, float32 scalars."""

    score: Array  # of the task
    exact: Array  # share with score 1
    eos_rate: Array  # share that wrote the end token
    mean_length: Array  # tokens, the end token included
    target_length: Array  # of the right answers; NaN for a task without targets
    length_error: Array  # mean |length − length of the right answer|, tokens; NaN likewise


def answer_prompts(
    task: Task,
    model: LanguageModel,
    params: PyTree,
    key: Key,
    *,
    prompts: Prompts | tuple | None = None,
    num_prompts: int = 256,
    greedy: bool = True,
    temperature: ArrayLike = 1.0,
) -> tuple[Prompts, Completions, Array]:
    """One completion for each of some prompts, with its score; see `evaluate` for the arguments.

    Returns:
        ``(prompts, completions, scores[N])``, for `format_completions` or statistics of one's own.

    Example:
        >>> import jax
        >>> from jaxpg.tokens import add_mod_task
        >>> always = jnp.zeros((14, 14)).at[:, 3].set(9.0)  # a model that says 3
        >>> model = LanguageModel(lambda key: always, lambda params, tokens, positions:
        ...                       params[tokens], None, None, max_length=8, vocab_size=14)
        >>> _, completions, scores = answer_prompts(
        ...     add_mod_task(), model, always, jax.random.key(0), num_prompts=5)
        >>> print(completions.tokens[:, 0], scores)  # of 0+0 … 0+4
        [3 3 3 3 3] [0. 0. 0. 1. 0.]
    """
    check_task(task, model)
    keys = split_key(key, "prompts", "completions")
    if prompts is None:
        positive_int("num_prompts", num_prompts)
        drawn = draw_prompts(keys["prompts"], task, num_prompts, evaluation=True)
    else:
        drawn = Prompts(*prompts)
    out = generate(
        keys["completions"],
        model,
        params,
        drawn.tokens,
        drawn.mask,
        max_new_tokens=task.max_new,
        eos_id=task.eos_id,
        pad_id=task.pad_id,
        temperature=temperature,
        greedy=greedy,
        use_cache=model.init_cache is not None,
    )
    return drawn, out, score_completions(task, drawn.info, out.tokens, out.mask)


def evaluate(
    task: Task,
    model: LanguageModel,
    params: PyTree,
    key: Key,
    *,
    prompts: Prompts | tuple | None = None,
    num_prompts: int = 256,
    greedy: bool = True,
    temperature: ArrayLike = 1.0,
) -> Evaluation:
    """One completion for each of some prompts: its score, and whether it is exactly right.

    Args:
        task: the task.
        model: the model.
        params: the policy's parameters.
        key: consumed: draws the prompts and, unless `greedy`, the tokens.
        prompts: these prompts, a `Prompts`; None draws them from ``task.evaluation_prompts``
            (held-out ones) or, without those, from ``task.sample_prompts``.
        num_prompts: how many to draw, static.
        greedy: writes the likeliest tokens.
        temperature: of sampling, unless `greedy`.

    Returns:
        An `Evaluation`.

    Raises:
        ValueError: a task that does not fit the model, arrays of other shapes than it promises.

    Example:
        >>> import jax
        >>> from jaxpg.tokens import add_mod_task
        >>> always = jnp.zeros((14, 14)).at[:, 3].set(9.0)  # a model that says 3
        >>> model = LanguageModel(lambda key: always, lambda params, tokens, positions:
        ...                       params[tokens], None, None, max_length=8, vocab_size=14)
        >>> out = evaluate(add_mod_task(), model, always, jax.random.key(0), num_prompts=100)
        >>> print(out.exact, out.mean_length)
        0.1 1.0
    """
    drawn, out, scores = answer_prompts(
        task,
        model,
        params,
        key,
        prompts=prompts,
        num_prompts=num_prompts,
        greedy=greedy,
        temperature=temperature,
    )
    length = jnp.sum(out.mask, axis=-1).astype(jnp.float32)
    wanted = jnp.full_like(length, jnp.nan)
    if task.targets is not None:
        wanted = jnp.sum(task.targets(drawn.info)[1], axis=-1).astype(jnp.float32)
    return Evaluation(
        score=jnp.nanmean(scores),
        exact=jnp.nanmean(jnp.where(jnp.isnan(scores), jnp.nan, scores >= 1.0)),
        eos_rate=jnp.mean(out.finished.astype(jnp.float32)),
        mean_length=jnp.mean(length),
        target_length=jnp.mean(wanted),
        length_error=jnp.mean(jnp.abs(length - wanted)),
    )


def show_samples(
    task: Task,
    model: LanguageModel,
    params: PyTree,
    key: Key,
    *,
    num_prompts: int = 4,
    greedy: bool = False,
    temperature: ArrayLike = 1.0,
) -> list[str]:
    """Some prompts with what the policy writes after them, a line of text each.

    Args:
        task: the task.
        model: the model.
        params: the policy's parameters.
        key: consumed.
        num_prompts: lines.
        greedy: writes the likeliest tokens.
        temperature: of sampling, unless `greedy`.

    Returns:
        Lines as `format_completions` makes them. Not for use inside `jit`.

    Example:
        >>> import jax
        >>> from jaxpg.tokens import add_mod_task
        >>> always = jnp.zeros((14, 14)).at[:, 3].set(9.0)  # a model that says 3
        >>> model = LanguageModel(lambda key: always, lambda params, tokens, positions:
        ...                       params[tokens], None, None, max_length=8, vocab_size=14)
        >>> lines = show_samples(add_mod_task(), model, always, jax.random.key(0), num_prompts=2)
        >>> lines[0].split(" → ")[1]
        '3  (score 0.00)'
    """
    drawn, out, scores = answer_prompts(
        task, model, params, key, num_prompts=num_prompts, greedy=greedy, temperature=temperature
    )
    return format_completions(task, drawn, out, scores)


def format_completions(
    task: Task, prompts: Prompts, completions: Completions, scores: ArrayLike
) -> list[str]:
    """Prompts, completions and scores as text, padding left out.

    Args:
        task: for its vocabulary.
        prompts: ``[N, L]``.
        completions: ``[N, M]``; what was never ended is followed by ``…``.
        scores: ``[N]``.

    Returns:
        N lines such as ``"4 4 4 4 .  (score 1.00)"`` after the prompt and an arrow.

    Example:
        >>> from jaxpg.tokens import say_n_task
        >>> prompts = Prompts(jnp.array([[2, 11]]), jnp.ones((1, 2), bool), ())
        >>> out = Completions(jnp.array([[2, 2, 12, 13]]), jnp.zeros((1, 4)),
        ...                   jnp.array([[True, True, True, False]]), jnp.array([True]))
        >>> print(format_completions(say_n_task(), prompts, out, [1.0])[0])
        2 = → 2 2 .  (score 1.00)
    """
    words = np.array([*task.vocabulary, "?"])

    def text(tokens: Array, mask: Array) -> str:
        ids = np.asarray(tokens)[np.asarray(mask)]
        # a model may have more tokens than the task has names
        return " ".join(words[np.minimum(ids, len(task.vocabulary))])

    lines = []
    for row, score in enumerate(np.asarray(scores, np.float64)):
        prompt = text(prompts.tokens[row], prompts.mask[row])
        answer = text(completions.tokens[row], completions.mask[row])
        more = "" if bool(completions.finished[row]) else " …"
        lines.append(f"{prompt} → {answer}{more}  (score {score:.2f})")
    return lines
