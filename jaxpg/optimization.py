"""Floor 3: epochs of minibatches, as one nested `lax.scan` around any optax optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from jaxpg._checks import divides, normalize_axis, positive_int
from jaxpg.types import Info, Key, Pmean, PyTree, one_replica

LossFn = Callable[[PyTree, PyTree], tuple[Array, Info]]
GradientFn = Callable[[PyTree, PyTree], tuple[PyTree, Info]]


def optimize(
    key: Key,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    params: PyTree,
    opt_state: PyTree,
    batch: PyTree,
    *,
    num_epochs: int,
    num_minibatches: int,
    axis: int = 0,
    shuffle: bool = True,
    target_kl: ArrayLike | None = None,
    prepare: Callable[[PyTree], PyTree] = lambda minibatch: minibatch,
    rows_at_a_time: int | None = None,
    pmean: Pmean = one_replica,
) -> tuple[PyTree, PyTree, Info]:
    """Takes ``num_epochs × num_minibatches`` optimizer steps on a batch.

    Every epoch deals the batch out along `axis` into equal minibatches, uniformly at random when
    `shuffle`, else in order: samples (axis 0 of a flat batch), environments (axis 1 of
    ``[T, B, …]``, for recurrent policies), groups, or time in order (``shuffle=False`` with
    ``num_minibatches = T``, which is sequential REINFORCE).

    Args:
        key: consumed (unused without shuffling).
        loss_fn: ``(params, minibatch) -> (loss, metrics)``, metrics a dict of scalars.
        optimizer: an optax transformation, built from the current config inside the trace.
        params: parameters.
        opt_state: the optimizer's state.
        batch: a pytree; every leaf has the same length ``N`` along `axis`.
        num_epochs: passes over the batch, static.
        num_minibatches: optimizer steps a pass, static.
        axis: the axis dealt out.
        shuffle: whether to permute it anew each epoch.
        target_kl: early stop, checked per minibatch: the first minibatch whose
            ``metrics["approx_kl"]`` exceeds it takes no step, nor does any later one. None is off.
            (Stable-Baselines3 compares with 1.5 times its ``target_kl``.)
        prepare: what is done with a whole minibatch outside of the gradient; vmapped over those
            of an epoch before its first step, so that no step waits for it.
        rows_at_a_time: gradients and metrics of a minibatch are means over parts of this many
            entries of its axis 0, one part after another, which takes less memory. Right for
            losses and metrics that are means over entries, each counting alike. None takes all.
        pmean: of the gradients, and of the KL that `target_kl` bounds, where several replicas train
            on batches of their own.

    Returns:
        ``(params, opt_state, metrics)``: the loss function's metrics as means over the minibatches
        that took a step, with ``grad_norm`` (before any clipping), ``nonfinite`` (the share of
        minibatches whose gradient held NaN or inf) and ``minibatches_applied`` (the share that
        took a step) added.

    Raises:
        ValueError: `num_minibatches` does not divide ``N``, or `rows_at_a_time` what is then left;
            leaves differ in ``N``; `target_kl` is given and the metrics hold no ``approx_kl``.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> loss = lambda w, x: (jnp.mean((w - x) ** 2), {"error": jnp.mean(jnp.abs(w - x))})
        >>> sgd = optax.sgd(0.5)
        >>> w = jnp.zeros(())
        >>> w, _, metrics = optimize(jax.random.key(0), loss, sgd, w, sgd.init(w), jnp.ones(4),
        ...                          num_epochs=1, num_minibatches=2)
        >>> print(w, sorted(metrics))
        1.0 ['error', 'grad_norm', 'minibatches_applied', 'nonfinite']
    """
    positive_int("num_epochs", num_epochs)
    positive_int("num_minibatches", num_minibatches)
    leaves = jax.tree.leaves(batch)
    if not leaves:
        raise ValueError("batch has no leaves")
    lengths = {x.shape[normalize_axis("axis", axis, x.ndim)] for x in leaves}
    if len(lengths) > 1:
        raise ValueError(f"batch leaves differ in length along axis {axis}: {sorted(lengths)}")
    length = lengths.pop()
    divides("batch size", length, "num_minibatches", num_minibatches)

    gradient = _in_parts(jax.grad(loss_fn, has_aux=True), rows_at_a_time)

    def minibatch_step(state: tuple, minibatch: PyTree) -> tuple[tuple, tuple[Info, Array]]:
        params, opt_state, stopped = state
        grads, metrics = gradient(params, minibatch)
        grads = pmean(grads)
        grad_norm = optax.tree.norm(grads)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        if target_kl is not None:
            if "approx_kl" not in metrics:
                raise ValueError("target_kl needs an 'approx_kl' among the metrics of loss_fn")
            stopped = stopped | (pmean(metrics["approx_kl"]) > target_kl)
            new_params, new_opt_state = jax.tree.map(
                lambda new, old: jnp.where(stopped, old, new),
                (new_params, new_opt_state),
                (params, opt_state),
            )
        nonfinite = (~jnp.isfinite(grad_norm)).astype(jnp.float32)
        metrics = {**metrics, "grad_norm": grad_norm, "nonfinite": nonfinite}
        return (new_params, new_opt_state, stopped), (metrics, ~stopped)

    def epoch(state: tuple, order: Array | None) -> tuple[tuple, tuple[Info, Array]]:
        minibatches = _deal(batch, order, num_minibatches, axis)
        return jax.lax.scan(minibatch_step, state, jax.vmap(prepare)(minibatches))

    state = (params, opt_state, jnp.asarray(False))
    # With one minibatch the order cannot matter. All orders at once: a sort in every epoch would
    # stand between minibatches, which wait for it.
    orders = None
    if shuffle and num_minibatches > 1:
        keys = jax.random.split(key, num_epochs)
        orders = jax.vmap(lambda key: permutation(key, length))(keys)
    (params, opt_state, _), (metrics, applied) = jax.lax.scan(epoch, state, orders, num_epochs)
    if target_kl is None:
        averaged = jax.tree.map(jnp.mean, metrics)
        return params, opt_state, {**averaged, "minibatches_applied": jnp.ones(())}
    count = jnp.maximum(jnp.sum(applied), 1)
    averaged = jax.tree.map(lambda x: jnp.sum(jnp.where(applied, x, 0.0)) / count, metrics)
    # a gradient that was never applied for being NaN must still be seen
    averaged["nonfinite"] = jnp.mean(metrics["nonfinite"])
    return params, opt_state, {**averaged, "minibatches_applied": jnp.mean(applied * 1.0)}


def rows_in_cache(size: int, *, replicas: int = 1) -> int | None:
    """A `rows_at_a_time` of `optimize` that keeps the activations of small networks in cache.

    Args:
        size: entries of a minibatch.
        replicas: of the agent on this machine, which share its cores.

    Returns:
        The largest divisor of `size` up to 1,024, where that is at least 512 and a replica has one
        core of a CPU; else None. Several cores are kept busy better by all rows at once.
    """
    if jax.default_backend() != "cpu" or num_cores() // replicas > 1:
        return None
    rows = max(n for n in range(1, min(size, 1024) + 1) if size % n == 0)
    return rows if rows >= 512 else None


def num_cores() -> int:
    """Cores of this machine that the process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def skip_zero_gradients(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer`, standing still (its state too) on a gradient that is exactly zero.

    Adam goes on moving on its momentum through a minibatch in which everything is masked or every
    advantage is zero, which is no evidence for moving anywhere.

    Args:
        optimizer: any optax transformation.

    Returns:
        A transformation with the same state as `optimizer`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> adam = skip_zero_gradients(optax.adam(0.1))
        >>> _, state = adam.update(jnp.ones(1), adam.init(jnp.zeros(1)))
        >>> print(adam.update(jnp.zeros(1), state)[0])
        [0.]
    """

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        updates, new_state = optimizer.update(grads, state, params)
        moves = jnp.any(jnp.stack([jnp.any(g != 0) for g in jax.tree.leaves(grads)]))
        updates = jax.tree.map(lambda u: jnp.where(moves, u, jnp.zeros_like(u)), updates)
        return updates, jax.tree.map(lambda new, old: jnp.where(moves, new, old), new_state, state)

    return optax.GradientTransformation(optimizer.init, update)


def permutation(key: Key, length: int) -> Array:
    """A uniform permutation of ``0 … length-1`` by one sort of random words.

    `jax.random.permutation` sorts repeatedly to rule out ties. Here each element is one word of
    32 bits, its number in the lowest and random bits above, and words without a second operand sort
    twice as fast again. Two elements whose random bits tie (a word in 2¹⁹ among 8,192 elements,
    2¹⁶ among 65,536) stand in the order of their numbers, of which the same random bits are
    flipped for all: of any two elements, either comes first with probability ½. Beyond 65,536
    elements the number becomes the second operand of a sort of all 32 bits.

    Args:
        key: consumed.
        length: number of elements, static.

    Returns:
        ``[length]`` int32.
    """
    words = jax.random.bits(key, (length,), jnp.uint32)
    number_bits = (length - 1).bit_length()
    if number_bits > 16:
        numbers = jnp.arange(length, dtype=jnp.int32)
        return jax.lax.sort((words, numbers), num_keys=1, is_stable=False)[1]
    low = jnp.uint32(2**number_bits - 1)
    flipped = words[0] & low  # the lowest bits are not compared: still unused
    numbers = jnp.arange(length, dtype=jnp.uint32) ^ flipped
    return ((jax.lax.sort((words & ~low) | numbers) & low) ^ flipped).astype(jnp.int32)


def _in_parts(gradient: GradientFn, rows_at_a_time: int | None) -> GradientFn:
    """`gradient` and the metrics beside it, as means over parts of the minibatch."""
    if rows_at_a_time is None:
        return gradient

    def in_parts(params: PyTree, minibatch: PyTree) -> tuple[PyTree, Info]:
        size = len(jax.tree.leaves(minibatch)[0])
        divides("minibatch size", size, "rows_at_a_time", rows_at_a_time)
        if size == rows_at_a_time:
            return gradient(params, minibatch)
        stacked = jax.tree.map(lambda x: x.reshape(-1, rows_at_a_time, *x.shape[1:]), minibatch)
        like = jax.eval_shape(gradient, params, jax.tree.map(lambda x: x[0], stacked))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

        def add(total: PyTree, part: PyTree) -> tuple[PyTree, None]:
            return jax.tree.map(jnp.add, total, gradient(params, part)), None

        total, _ = jax.lax.scan(add, zeros, stacked)
        return jax.tree.map(lambda x: x * (rows_at_a_time / size), total)

    return in_parts


def _deal(batch: PyTree, order: Array | None, parts: int, axis: int) -> PyTree:
    """Splits `axis` into `parts` equal pieces and puts the pieces on a new axis 0."""

    def deal(x: Any) -> Array:
        at = axis % x.ndim
        x = x if order is None else jnp.take(x, order, axis=at, unique_indices=True)
        pieces = x.reshape(*x.shape[:at], parts, x.shape[at] // parts, *x.shape[at + 1 :])
        return jnp.moveaxis(pieces, at, 0)

    return jax.tree.map(deal, batch)
