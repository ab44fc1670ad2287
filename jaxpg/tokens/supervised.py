"""Supervised warm-up: cross-entropy on a task's own answers, before rewards take over.

A group of completions teaches only when its scores differ. Where the right answer is a rare one,
no group ever holds it; some supervised steps lift the policy to where groups are mixed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from jaxpg._checks import as_key, in_range, positive_int
from jaxpg.reductions import masked_mean
from jaxpg.tokens.config import check_task
from jaxpg.tokens.groups import draw_prompts
from jaxpg.tokens.records import LanguageModel, Task, TokenAlgorithm
from jaxpg.tokens.sampling import completion_log_probs
from jaxpg.types import Key, PyTree, TrainState, split_key


def warm_up(
    key: Key,
    task: Task,
    model: LanguageModel,
    params: PyTree,
    *,
    num_steps: int,
    batch_size: int = 128,
    learning_rate: ArrayLike = 1e-3,
) -> tuple[PyTree, Array]:
    """Trains `params` on right answers to training prompts, in one `lax.scan`.

    Formula::

        loss = −mean over answer tokens of log π(target token)

    Args:
        key: consumed.
        task: with `Task.targets`.
        model: the model.
        params: where to start, for example ``model.init(key)``.
        num_steps: optimizer steps (Adam, gradient norm clipped at 1), static.
        batch_size: prompts a step, static.
        learning_rate: may be traced.

    Returns:
        ``(params, losses[num_steps])``, nats per token.

    Raises:
        ValueError: a task without targets, or one that does not fit the model.

    Example:
        >>> from jaxpg.tokens import say_n_task
        >>> model = LanguageModel(lambda key: jnp.zeros((14, 14)), lambda params, tokens, positions:
        ...                       params[tokens], None, None, max_length=8, vocab_size=14)
        >>> params, losses = warm_up(jax.random.key(0), say_n_task(2, 3), model,
        ...                          jnp.zeros((14, 14)), num_steps=50, learning_rate=0.1)
        >>> bool(losses[-1] < losses[0] - 1.0)
        True
    """
    if task.targets is None:
        raise ValueError(f"task {task.name!r} has no targets to warm up on")
    positive_int("num_steps", num_steps)
    positive_int("batch_size", batch_size)
    in_range("learning_rate", learning_rate, 0.0)
    check_task(task, model)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))

    def loss_fn(params: PyTree, key: Key) -> Array:
        prompts = draw_prompts(key, task, batch_size)
        targets, mask = task.targets(prompts.info)
        log_probs, _ = completion_log_probs(
            model, params, prompts.tokens, prompts.mask, targets, mask
        )
        return -masked_mean(log_probs, mask)

    def body(carry: tuple, key: Key) -> tuple[tuple, Array]:
        params, opt_state = carry
        loss, gradient = jax.value_and_grad(loss_fn)(params, key)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    params = jax.tree.map(jnp.asarray, params)
    keys = jax.random.split(key, num_steps)
    (params, _), losses = jax.lax.scan(body, (params, optimizer.init(params)), keys)
    return params, losses


def warmed_up(
    algorithm: TokenAlgorithm,
    *,
    num_steps: int,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
) -> TokenAlgorithm:
    """An algorithm whose `init` runs `warm_up` first, for `jaxpg.train` and the like.

    Args:
        algorithm: any token algorithm.
        num_steps: see `warm_up`; 0 leaves the algorithm as it is.
        batch_size: see `warm_up`.
        learning_rate: see `warm_up`.

    Returns:
        The algorithm, its `init` changed: parameters given there are warmed up as well.

    Raises:
        ValueError: from ``init``, as `warm_up`.

    Example:
        >>> from jaxpg.tokens import GRPOConfig, addition_task, grpo, transformer_model
        >>> algorithm = grpo(addition_task(), transformer_model(14, 10))
        >>> algorithm = warmed_up(algorithm, num_steps=300)
        >>> init = jax.jit(lambda key: algorithm.init(key, GRPOConfig()))
    """
    if num_steps == 0:
        return algorithm

    def init(key: Key, config: Any, *, params: PyTree | None = None) -> TrainState:
        # Traced only: a bad config is told before anything is trained.
        jax.eval_shape(lambda key: algorithm.init(key, config), key)
        keys = split_key(as_key(key), "params", "warm_up", "run")
        params = algorithm.model.init(keys["params"]) if params is None else params
        params, _ = warm_up(
            keys["warm_up"],
            algorithm.task,
            algorithm.model,
            params,
            num_steps=num_steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
        )
        return algorithm.init(keys["run"], config, params=params)

    return algorithm._replace(init=init)
