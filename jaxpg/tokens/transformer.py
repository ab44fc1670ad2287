"""A small decoder-only transformer in flax linen, as a `LanguageModel`."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxpg._checks import divides, is_concrete, one_of, positive_int
from jaxpg.tokens.records import LanguageModel
from jaxpg.types import Key, PyTree


class KVCache(NamedTuple):
    """Keys and values of the columns seen so far; room for ``S`` columns."""

    keys: tuple[Array, ...]  # one [N, S, heads, head size] a layer
    values: tuple[Array, ...]
    positions: Array  # [N, S] int32, −1 where nothing (or padding) was written
    index: Array  # [] int32, columns written


def _rotate(x: Array, positions: Array) -> Array:
    """Rotary positions (Su et al., arXiv 2104.09864, eq. 34) on ``x[N, S, H, D]``."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies  # [N, S, 1, D/2]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class _Attention(nn.Module):
    num_heads: int
    rotary: bool
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self,
        x: Array,
        positions: Array,
        visible: Array,
        cached: tuple[Array, Array] | None,
        index: Array | None,
    ) -> tuple[Array, tuple[Array, Array]]:
        width = x.shape[-1]
        head = width // self.num_heads
        qkv = nn.DenseGeneral((3, self.num_heads, head), use_bias=False, dtype=self.dtype)(x)
        query, key, value = qkv[..., 0, :, :], qkv[..., 1, :, :], qkv[..., 2, :, :]
        if self.rotary:
            query, key = _rotate(query, positions), _rotate(key, positions)
        if cached is not None:
            key = jax.lax.dynamic_update_slice_in_dim(cached[0], key, index, axis=1)
            value = jax.lax.dynamic_update_slice_in_dim(cached[1], value, index, axis=1)
        scores = jnp.einsum("nqhd,nkhd->nhqk", query, key) / head**0.5
        # A finite fill: a padding query sees nothing, and must not become NaN for it.
        scores = jnp.where(visible[:, None], scores.astype(jnp.float32), -1e30)
        weights = jax.nn.softmax(scores, axis=-1).astype(self.dtype)
        mixed = jnp.einsum("nhqk,nkhd->nqhd", weights, value)
        out = nn.DenseGeneral(width, axis=(-2, -1), use_bias=False, dtype=self.dtype)(mixed)
        return out, (key, value)


class _Transformer(nn.Module):
    vocab_size: int
    max_length: int
    d_model: int
    num_layers: int
    num_heads: int
    d_ff: int
    rotary: bool
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, tokens: Array, positions: Array, cache: KVCache | None = None
    ) -> tuple[Array, KVCache | None]:
        embed = nn.Embed(self.vocab_size, self.d_model, dtype=self.dtype, name="tokens")
        x = embed(tokens)
        if not self.rotary:
            places = nn.Embed(self.max_length, self.d_model, dtype=self.dtype, name="positions")
            x = x + places(jnp.maximum(positions, 0))
        index = None
        key_positions = positions
        if cache is not None:
            index = cache.index
            key_positions = jax.lax.dynamic_update_slice_in_dim(
                cache.positions, positions, index, axis=1
            )
        # [N, queries, keys]: the past of the same sequence, without its padding
        visible = (key_positions[:, None] >= 0) & (key_positions[:, None] <= positions[..., None])
        keys, values = [], []
        for layer in range(self.num_layers):
            cached = None if cache is None else (cache.keys[layer], cache.values[layer])
            attention = _Attention(self.num_heads, self.rotary, self.dtype)
            normed = nn.RMSNorm(dtype=self.dtype)(x)
            mixed, (key, value) = attention(normed, positions, visible, cached, index)
            x = x + mixed
            hidden = nn.Dense(self.d_ff, dtype=self.dtype)(nn.RMSNorm(dtype=self.dtype)(x))
            x = x + nn.Dense(self.d_model, dtype=self.dtype)(nn.gelu(hidden))
            keys.append(key)
            values.append(value)
        x = nn.RMSNorm(dtype=jnp.float32)(x)
        # Small weights: the first policy is close to uniform, and explores every token.
        small = nn.initializers.normal(0.02)
        logits = nn.Dense(self.vocab_size, dtype=jnp.float32, kernel_init=small, name="head")(x)
        if cache is None:
            return logits, None
        written = (index + tokens.shape[1]).astype(jnp.int32)
        return logits, KVCache(tuple(keys), tuple(values), key_positions, written)


def transformer_model(
    vocab_size: int,
    max_length: int,
    *,
    d_model: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    d_ff: int | None = None,
    position_encoding: str = "rotary",
    dtype: DTypeLike = jnp.float32,
) -> LanguageModel:
    """A decoder-only transformer, pre-norm, with a key-value cache.

    Formula::

        x ← x + attention(norm(x)),   x ← x + W₂ gelu(W₁ norm(x)),   logits = W norm(x)

    Args:
        vocab_size: number of tokens V.
        max_length: longest sequence, prompt and answer together.
        d_model: width, divisible by `num_heads`.
        num_layers: blocks of attention and feed-forward.
        num_heads: attention heads; with rotary positions ``d_model / num_heads`` must be even.
        d_ff: width of the feed-forward layer, ``4 d_model`` by default.
        position_encoding: ``"rotary"`` or ``"learned"``.
        dtype: of the computation (``jnp.bfloat16`` on an accelerator); parameters, attention
            weights' normalisation and logits stay float32.

    Returns:
        A `LanguageModel`; its cache functions hold ``[N, S, heads, head size]`` a layer.

    Raises:
        ValueError: sizes that do not divide, an unknown position encoding; from the model's
            functions, a sequence or a cache longer than `max_length`.

    Example:
        >>> model = transformer_model(14, 8, d_model=16, num_heads=2)
        >>> params = jax.jit(model.init)(jax.random.key(0))
        >>> positions = jnp.array([[0, 1, 2]])
        >>> jax.jit(model.apply)(params, jnp.array([[1, 10, 2]]), positions).shape
        (1, 3, 14)

    References:
        Vaswani et al., arXiv 1706.03762; pre-norm: Xiong et al., arXiv 2002.04745; RMS norm:
        Zhang and Sennrich, arXiv 1910.07467, eq. 4; rotary positions: Su et al., arXiv
        2104.09864, eq. 34 (halves rotated together instead of neighbours).
    """
    vocab_size = positive_int("vocab_size", vocab_size, minimum=2)
    max_length = positive_int("max_length", max_length)
    positive_int("num_layers", num_layers)
    divides("d_model", positive_int("d_model", d_model), "num_heads", num_heads)
    one_of("position_encoding", position_encoding, ("rotary", "learned"))
    rotary = position_encoding == "rotary"
    if rotary and (d_model // num_heads) % 2:
        raise ValueError(
            f"rotary positions need an even head size, got {d_model}/{num_heads}="
            f"{d_model // num_heads}"
        )
    d_ff = 4 * d_model if d_ff is None else positive_int("d_ff", d_ff)
    network = _Transformer(
        vocab_size, max_length, d_model, num_layers, num_heads, d_ff, rotary, dtype
    )

    def init(key: Key) -> PyTree:
        one = jnp.zeros((1, 1), jnp.int32)
        return network.init(key, one, one)["params"]

    def apply(params: PyTree, tokens: Array, positions: Array) -> Array:
        if tokens.shape[1] > max_length:
            raise ValueError(
                f"a sequence of {tokens.shape[1]} tokens is longer than max_length={max_length}"
            )
        return network.apply({"params": params}, tokens, positions)[0]

    def init_cache(params: PyTree, batch: int, length: int) -> KVCache:
        if length > max_length:
            raise ValueError(f"a cache of length {length} exceeds max_length={max_length}")
        shape = (batch, length, num_heads, d_model // num_heads)
        keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)) for _ in range(2))
        empty = jnp.full((batch, length), -1, jnp.int32)
        return KVCache(keys, values, empty, jnp.zeros((), jnp.int32))

    def apply_cached(
        params: PyTree, tokens: Array, positions: Array, cache: KVCache
    ) -> tuple[Array, KVCache]:
        columns, room = tokens.shape[1], cache.positions.shape[1]
        if columns > room:
            raise ValueError(f"{columns} tokens do not fit a cache of length {room}")
        if is_concrete(cache.index) and int(cache.index) + columns > room:
            raise ValueError(
                f"{columns} more tokens do not fit a cache of length {room} that holds "
                f"{int(cache.index)}"
            )
        return network.apply({"params": params}, tokens, positions, cache)

    return LanguageModel(init, apply, init_cache, apply_cached, max_length, vocab_size)
