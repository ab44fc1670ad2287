"""Writing completions in one `lax.scan`, and scoring them again with the training forward pass.

The two must agree: same positions, same temperature, float32 from the logits on. What tokens a
policy ratio sees then differs from 1 only by what the update changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxpg._checks import as_flag, in_range, is_concrete, positive_int
from jaxpg.distributions import categorical
from jaxpg.tokens.records import Completions, LanguageModel
from jaxpg.types import Key, PyTree


def positions_from_mask(mask: ArrayLike) -> Array:
    """Position of every token in its own sequence, −1 for padding.

    Formula::

        positionₛ = (Σ_{j ≤ s} maskⱼ) − 1 where maskₛ, else −1

    Args:
        mask: ``[..., S]`` bool, true where a token stands.

    Returns:
        ``[..., S]`` int32.

    Raises:
        TypeError: a float mask.

    Example:
        >>> print(positions_from_mask(jnp.array([[False, False, True, True]])))
        [[-1 -1  0  1]]
    """
    mask = as_flag("mask", mask)
    counted = jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1
    return jnp.where(mask, counted, -1)


def generate(
    key: Key,
    model: LanguageModel,
    params: PyTree,
    prompts: ArrayLike,
    prompt_mask: ArrayLike,
    *,
    max_new_tokens: int,
    eos_id: int | None,
    pad_id: int,
    temperature: ArrayLike = 1.0,
    greedy: bool = False,
    use_cache: bool = True,
) -> Completions:
    """Writes one completion after each prompt.

    Formula::

        tokenₜ ~ softmax(logitsₜ / temperature),   until the end token or `max_new_tokens`

    Args:
        key: consumed.
        model: the language model.
        params: its parameters.
        prompts: ``[N, L]`` token ids, left-padded (the content of padded columns is ignored).
        prompt_mask: ``[N, L]`` bool, true where a token stands; the last column all true.
        max_new_tokens: M, static: the scan always runs M steps.
        eos_id: the token that ends a completion (it is part of it), or None for none.
        pad_id: written after the end; may equal `eos_id`.
        temperature: above 0, may be traced.
        greedy: takes the likeliest token instead of a random one (log-probs as ever).
        use_cache: False runs the whole sequence through ``model.apply`` for every token, for
            models without a cache.

    Returns:
        `Completions` with arrays ``[N, M]``.

    Raises:
        ValueError: prompt and answer longer than the model's context, a mask of another shape or
            not left-padded, temperature not above 0, a model without the cache functions.

    Example:
        A table as the model: after token i, token i + 1.

        >>> table = 9.0 * jnp.eye(6, k=1)
        >>> model = LanguageModel(lambda key: table, lambda params, tokens, positions:
        ...                       params[tokens], None, None, max_length=8, vocab_size=6)
        >>> prompts = jnp.array([[0, 1, 2], [1, 2, 3]])
        >>> out = generate(jax.random.key(0), model, table, prompts, prompts > 0,
        ...                max_new_tokens=4, eos_id=5, pad_id=0, greedy=True, use_cache=False)
        >>> print(out.tokens, out.finished)
        [[3 4 5 0]
         [4 5 0 0]] [ True  True]
    """
    tokens, mask = _check_prompts(prompts, prompt_mask)
    positive_int("max_new_tokens", max_new_tokens)
    in_range("temperature", temperature, 0.0, open_low=True)
    batch, columns = tokens.shape
    length = columns + max_new_tokens
    _fits(model, columns, max_new_tokens)
    if use_cache and (model.init_cache is None or model.apply_cached is None):
        raise ValueError("this model has no cache functions: generate with use_cache=False")

    start_position = jnp.sum(mask, axis=-1, dtype=jnp.int32)
    prompt_positions = positions_from_mask(mask)
    advance: Callable[[Any, Array, Array], tuple[Array, Any]]
    if use_cache:
        cache = model.init_cache(params, batch, length - 1)
        logits, context = model.apply_cached(params, tokens, prompt_positions, cache)
        logits = logits[:, -1]

        def advance(context: Any, token: Array, position: Array) -> tuple[Array, Any]:
            logits, context = model.apply_cached(params, token[:, None], position[:, None], context)
            return logits[:, -1], context

    else:
        room = ((0, 0), (0, max_new_tokens - 1))
        written = jnp.pad(tokens, room, constant_values=pad_id)
        places = jnp.pad(prompt_positions, room, constant_values=-1)
        logits = model.apply(params, written, places)[:, columns - 1]
        context = (written, places, jnp.asarray(columns, jnp.int32))

        def advance(context: Any, token: Array, position: Array) -> tuple[Array, Any]:
            written, places, column = context
            written = jax.lax.dynamic_update_slice_in_dim(written, token[:, None], column, 1)
            places = jax.lax.dynamic_update_slice_in_dim(places, position[:, None], column, 1)
            logits = model.apply(params, written, places)
            logits = jax.lax.dynamic_index_in_dim(logits, column, axis=1, keepdims=False)
            return logits, (written, places, column + 1)

    def choose(key: Key, logits: Array, done: Array) -> tuple[Array, Array, Array]:
        scaled = logits.astype(jnp.float32) / temperature
        token = categorical.mode(scaled) if greedy else categorical.sample(key, scaled)
        token = token.astype(jnp.int32)
        log_prob = categorical.log_prob(scaled, token)
        token = jnp.where(done, pad_id, token)
        ended = done if eos_id is None else done | (token == eos_id)
        return token, jnp.where(done, 0.0, log_prob), ended

    def body(carry: tuple, inputs: tuple) -> tuple[tuple, tuple[Array, Array, Array]]:
        context, token, done = carry
        key, step = inputs
        # What follows the end is padding, here as in the training forward pass.
        position = jnp.where(done, -1, start_position + step)
        logits, context = advance(context, token, position)
        token, log_prob, ended = choose(key, logits, done)
        return (context, token, ended), (token, log_prob, ~done)

    keys = jax.random.split(key, max_new_tokens)
    done = jnp.zeros((batch,), jnp.bool_)
    first, first_log_prob, ended = choose(keys[0], logits, done)
    steps = jnp.arange(max_new_tokens - 1, dtype=jnp.int32)
    (_, _, ended), later = jax.lax.scan(body, (context, first, ended), (keys[1:], steps))
    out_tokens, log_probs, counted = (
        jnp.concatenate([one[:, None], jnp.moveaxis(rest, 0, 1)], axis=1)
        for one, rest in zip((first, first_log_prob, ~done), later, strict=True)
    )
    finished = jnp.ones_like(ended) if eos_id is None else ended
    return Completions(out_tokens, log_probs, counted, finished)


def completion_log_probs(
    model: LanguageModel,
    params: PyTree,
    prompts: ArrayLike,
    prompt_mask: ArrayLike,
    completions: ArrayLike,
    completion_mask: ArrayLike,
    *,
    temperature: ArrayLike = 1.0,
) -> tuple[Array, Array]:
    """Log-probabilities and entropies of completions, by one forward pass to differentiate.

    Formula::

        log_probₜ = log softmax(logitsₜ / temperature)[tokenₜ]

    Args:
        model: the language model.
        params: its parameters.
        prompts: ``[N, L]``, left-padded.
        prompt_mask: ``[N, L]`` bool.
        completions: ``[N, M]``, right-padded.
        completion_mask: ``[N, M]`` bool, up to and including the end token.
        temperature: the one used for sampling.

    Returns:
        ``(log_probs[N, M], entropies[N, M])`` in nats, float32; 0 where the mask is false.

    Raises:
        ValueError: shapes that do not match, or a sequence longer than the model's context.

    Example:
        >>> model = LanguageModel(lambda key: jnp.zeros((4, 4)), lambda params, tokens, positions:
        ...                       params[tokens], None, None, max_length=8, vocab_size=4)
        >>> ones = jnp.ones((1, 2), jnp.int32)
        >>> log_probs, entropies = completion_log_probs(
        ...     model, model.init(jax.random.key(0)), ones, ones, ones, ones)
        >>> print(log_probs.round(3), entropies.round(3))  # uniform: ± log 4
        [[-1.386 -1.386]] [[1.386 1.386]]
    """
    tokens, mask = _check_prompts(prompts, prompt_mask)
    answer = jnp.asarray(completions, jnp.int32)
    answer_mask = as_flag("completion_mask", completion_mask)
    if answer.shape != answer_mask.shape or answer.shape[0] != tokens.shape[0]:
        raise ValueError(
            f"completions {answer.shape} and completion_mask {answer_mask.shape} do not match "
            f"prompts {tokens.shape}"
        )
    _fits(model, tokens.shape[1], answer.shape[1])
    positions = positions_from_mask(jnp.concatenate([mask, answer_mask], axis=1))
    sequence = jnp.concatenate([tokens, answer], axis=1)
    # logits at column s score the token at s + 1, so the last token is never an input
    logits = model.apply(params, sequence[:, :-1], positions[:, :-1])
    scaled = logits[:, tokens.shape[1] - 1 :].astype(jnp.float32) / temperature
    log_probs = categorical.log_prob(scaled, jnp.where(answer_mask, answer, 0))
    entropies = categorical.entropy(scaled)
    return jnp.where(answer_mask, log_probs, 0.0), jnp.where(answer_mask, entropies, 0.0)


def _fits(model: LanguageModel, columns: int, new: int) -> None:
    if columns + new > model.max_length:
        raise ValueError(
            f"a prompt of {columns} columns and {new} new tokens exceed the model's "
            f"max_length={model.max_length}"
        )


def _check_prompts(prompts: ArrayLike, prompt_mask: ArrayLike) -> tuple[Array, Array]:
    tokens = jnp.asarray(prompts)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"prompts must be token ids [N, L], got shape {tokens.shape} of {tokens.dtype}"
        )
    mask = as_flag("prompt_mask", prompt_mask)
    if mask.shape != tokens.shape:
        raise ValueError(f"prompt_mask has shape {mask.shape}, prompts {tokens.shape}")
    if is_concrete(mask):
        flags = np.asarray(mask)
        if not flags[:, -1].all() or (np.diff(flags.astype(np.int8), axis=1) < 0).any():
            raise ValueError("prompt_mask must be left-padded: padding first, then the prompt")
    return tokens.astype(jnp.int32), mask
