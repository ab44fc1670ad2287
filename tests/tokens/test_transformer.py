"""The transformer as a language model: causal, blind to padding, the same with a cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.tokens.records import LanguageModel
from jaxpg.tokens.transformer import transformer_model

SMALL = {"d_model": 16, "num_layers": 2, "num_heads": 2}


def jitted(model: LanguageModel) -> LanguageModel:
    """Compiled functions: the checks on shapes still run, while tracing."""
    return model._replace(
        init=jax.jit(model.init),
        apply=jax.jit(model.apply),
        apply_cached=jax.jit(model.apply_cached),
    )


@pytest.fixture(scope="module", params=["rotary", "learned"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return jitted(transformer_model(14, 12, position_encoding=request.param, **SMALL))


@pytest.fixture(scope="module")
def params(model):
    # larger matrices than at the start, so that attention is not nearly uniform
    double = lambda x: 2.0 * x if x.ndim > 1 else x  # noqa: E731
    return jax.tree.map(double, model.init(jax.random.key(0)))


def sequences(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    tokens = jax.random.randint(key, (3, 8), 0, 14)
    return tokens, jnp.broadcast_to(jnp.arange(8), (3, 8))


def test_future_tokens_do_not_matter(model, params, key):
    tokens, positions = sequences(key)
    changed = tokens.at[:, 5].set((tokens[:, 5] + 1) % 14)
    a, b = (model.apply(params, x, positions) for x in (tokens, changed))
    assert a.shape == (3, 8, 14) and a.dtype == jnp.float32
    np.testing.assert_array_equal(a[:, :5], b[:, :5])
    assert np.abs(a[:, 5:] - b[:, 5:]).max() > 1e-3


def test_padding_is_not_seen_and_stays_finite(model, params, key):
    tokens, positions = sequences(key)
    padded = jnp.concatenate([jnp.full((3, 4), 13), tokens], axis=1)
    places = jnp.concatenate([jnp.full((3, 4), -1), positions], axis=1)
    a, b = model.apply(params, tokens, positions), model.apply(params, padded, places)
    np.testing.assert_allclose(a, b[:, 4:], atol=1e-5)
    other = model.apply(params, padded.at[:, :4].set(7), places)
    np.testing.assert_array_equal(b[:, 4:], other[:, 4:])
    grads = jax.jit(jax.grad(lambda p: model.apply(p, padded, places)[:, 4:].sum()))(params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((b, grads)))


def test_order_of_the_prompt_matters(model, params, key):
    tokens, positions = sequences(key)
    swapped = tokens.at[0, 0].set(1).at[0, 1].set(2), tokens.at[0, 0].set(2).at[0, 1].set(1)
    a, b = (model.apply(params, x, positions)[0, -1] for x in swapped)
    assert np.abs(a - b).max() > 1e-4


def test_cache_in_pieces_equals_the_whole_pass(model, params, key):
    tokens, positions = sequences(key)
    # sequence 1 is left-padded by three columns, sequence 2 ends early
    positions = positions.at[1].set(jnp.array([-1, -1, -1, 0, 1, 2, 3, 4])).at[2, 6:].set(-1)
    whole = model.apply(params, tokens, positions)
    cache = model.init_cache(params, 3, 10)
    pieces = []
    for start, stop in ((0, 4), (4, 5), (5, 8)):
        logits, cache = model.apply_cached(
            params, tokens[:, start:stop], positions[:, start:stop], cache
        )
        pieces.append(logits)
    joined = jnp.concatenate(pieces, axis=1)
    real = np.asarray(positions) >= 0
    np.testing.assert_allclose(np.asarray(joined)[real], np.asarray(whole)[real], atol=1e-5)
    assert int(cache.index) == 8 and cache.positions.shape == (3, 10)


def test_bfloat16_computes_low_and_answers_in_float32(key):
    low = jitted(transformer_model(14, 12, dtype=jnp.bfloat16, **SMALL))
    high = jitted(transformer_model(14, 12, **SMALL))
    params = high.init(key)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(low.init(key)))
    tokens, positions = sequences(key)
    a, b = low.apply(params, tokens, positions), high.apply(params, tokens, positions)
    assert a.dtype == jnp.float32
    difference = np.abs(a - b).max()
    assert 0 < difference < 0.05
    logits, cache = low.apply_cached(params, tokens, positions, low.init_cache(params, 3, 8))
    assert cache.keys[0].dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, a, atol=0.02)


def test_starts_close_to_uniform(key):
    model = jitted(transformer_model(14, 12))
    tokens, positions = sequences(key)
    log_probs = jax.nn.log_softmax(model.apply(model.init(key), tokens, positions))
    assert np.abs(np.exp(log_probs) * 14 - 1).max() < 0.8


def test_same_dtypes_under_x64(x64, key):
    model = jitted(transformer_model(14, 12, **SMALL))
    params = model.init(key)
    tokens, positions = sequences(key)
    assert model.apply(params, tokens, positions).dtype == jnp.float32
    logits, cache = model.apply_cached(
        params,
        tokens.astype(jnp.int32),
        positions.astype(jnp.int32),
        model.init_cache(params, 3, 8),
    )
    assert logits.dtype == jnp.float32 and cache.index.dtype == jnp.int32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"d_model": 10, "num_heads": 3}, "num_heads=3 does not divide d_model=10"),
        ({"d_model": 6, "num_heads": 2}, "even head size, got 6/2=3"),
        ({"position_encoding": "rotari"}, "did you mean rotary"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
    ],
)
def test_bad_sizes_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        transformer_model(14, 12, **settings)


def test_context_limits_are_named(key):
    model = transformer_model(14, 6, **SMALL)
    params = jax.jit(model.init)(key)
    tokens, positions = sequences(key)
    with pytest.raises(ValueError, match="8 tokens is longer than max_length=6"):
        model.apply(params, tokens, positions)
    with pytest.raises(ValueError, match="cache of length 7 exceeds max_length=6"):
        model.init_cache(params, 3, 7)
    cache = model.init_cache(params, 3, 6)
    with pytest.raises(ValueError, match="8 tokens do not fit a cache of length 6"):
        model.apply_cached(params, tokens, positions, cache)
    cache = cache._replace(index=jnp.asarray(4, jnp.int32))
    with pytest.raises(
        ValueError, match="3 more tokens do not fit a cache of length 6 that holds 4"
    ):
        model.apply_cached(params, tokens[:, :3], positions[:, 4:7], cache)
