"""Generation: what it writes, what it says about it, and that training recomputes the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.tokens.records import LanguageModel
from jaxpg.tokens.sampling import completion_log_probs, generate, positions_from_mask
from jaxpg.tokens.transformer import transformer_model

EOS, PAD = 12, 13


# What runs eagerly compiles operation by operation: slower than one compilation.
scores = jax.jit(completion_log_probs, static_argnums=0)
write = jax.jit(
    generate,
    static_argnums=1,
    static_argnames=("max_new_tokens", "eos_id", "pad_id", "greedy", "use_cache"),
)


def bigram_model(vocab_size: int = 14) -> LanguageModel:
    """The next token depends on the current one alone: logits are rows of a table."""

    def apply(params, tokens, positions):
        return params["table"][tokens]

    def apply_cached(params, tokens, positions, cache):
        return params["table"][tokens], cache

    return LanguageModel(
        lambda key: {"table": jax.random.normal(key, (vocab_size, vocab_size))},
        apply,
        lambda params, batch, length: (),
        apply_cached,
        64,
        vocab_size,
    )


@pytest.fixture(scope="module", params=["rotary", "learned"])
def model(request):
    return transformer_model(
        14, 20, d_model=16, num_layers=1, num_heads=2, position_encoding=request.param
    )


@pytest.fixture(scope="module")
def params(model):
    double = lambda x: 2.0 * x if x.ndim > 1 else x  # noqa: E731
    return jax.tree.map(double, jax.jit(model.init)(jax.random.key(5)))


@pytest.fixture(scope="module")
def prompts():
    tokens = jax.random.randint(jax.random.key(1), (32, 5), 0, 10)
    lengths = 1 + jnp.arange(32) % 5
    mask = jnp.arange(5) >= 5 - lengths[:, None]
    return jnp.where(mask, tokens, PAD), mask


SETTINGS = {"max_new_tokens": 7, "eos_id": EOS, "pad_id": PAD, "temperature": 0.7}


@pytest.fixture(scope="module")
def written(model, params, prompts):
    return write(jax.random.key(2), model, params, *prompts, **SETTINGS)


def test_recomputed_log_probs_agree(model, params, prompts, written):
    log_probs, entropies = scores(
        model, params, *prompts, written.tokens, written.mask, temperature=0.7
    )
    np.testing.assert_allclose(log_probs, written.log_probs, atol=1e-5)
    assert np.all(np.asarray(entropies)[np.asarray(written.mask)] > 0)
    assert np.all(np.asarray(written.log_probs)[np.asarray(written.mask)] < 0)


def test_mask_ends_with_the_end_token(written):
    tokens, mask = np.asarray(written.tokens), np.asarray(written.mask)
    assert 3 < np.asarray(written.finished).sum() < 32  # both kinds are in this sample
    for row in range(32):
        ends = np.flatnonzero(tokens[row] == EOS)
        length = ends[0] + 1 if len(ends) else 7
        assert bool(written.finished[row]) == bool(len(ends))
        np.testing.assert_array_equal(mask[row], np.arange(7) < length)
        assert np.all(tokens[row, length:] == PAD)
        assert np.all(np.asarray(written.log_probs)[row, length:] == 0)


def test_without_a_cache_the_same_tokens(model, params, prompts, written):
    slow = write(jax.random.key(2), model, params, *prompts, use_cache=False, **SETTINGS)
    np.testing.assert_array_equal(slow.tokens, written.tokens)
    np.testing.assert_allclose(slow.log_probs, written.log_probs, atol=1e-5)


def test_padding_a_prompt_to_twice_its_length_changes_nothing(model, params, prompts, written):
    tokens, mask = prompts
    double = (
        jnp.concatenate([jnp.full((32, 5), 7), tokens], axis=1),
        jnp.concatenate([jnp.zeros((32, 5), bool), mask], axis=1),
    )
    out = write(jax.random.key(2), model, params, *double, **SETTINGS)
    np.testing.assert_array_equal(out.tokens, written.tokens)
    np.testing.assert_allclose(out.log_probs, written.log_probs, atol=1e-5)
    alone, _ = scores(model, params, tokens[4:5], mask[4:5], written.tokens[4:5], written.mask[4:5])
    padded, _ = scores(
        model, params, double[0][4:5], double[1][4:5], written.tokens[4:5], written.mask[4:5]
    )
    np.testing.assert_allclose(alone, padded, atol=1e-5)


def test_a_prompt_alone_and_in_a_batch(model, params, prompts, written):
    row = 2  # three tokens and two of padding
    alone, _ = scores(
        model,
        params,
        prompts[0][row : row + 1, 2:],
        prompts[1][row : row + 1, 2:],
        written.tokens[row : row + 1],
        written.mask[row : row + 1],
        temperature=0.7,
    )
    np.testing.assert_allclose(alone[0], written.log_probs[row], atol=1e-5)


def test_temperature_and_shift_by_hand():
    # logits [2, 0] at temperature 0.5 are [4, 0]: log p(0) = −log(1 + e⁻⁴) = −0.01814993, and
    # logits at a column score the token after it: table[i] = 5 on token i means "repeat".
    model = bigram_model(2)
    table = jnp.array([[2.0, 0.0], [0.0, 5.0]])
    log_probs, entropies = scores(
        model, {"table": table}, jnp.array([[0]]), jnp.ones((1, 1), bool),
        jnp.array([[0, 1, 0]]), jnp.ones((1, 3), bool), temperature=0.5,
    )  # fmt: skip
    second = -(4.0 + np.log1p(np.exp(-4.0)))  # 1 after 0
    third = -(10.0 + np.log1p(np.exp(-10.0)))  # 0 after 1
    np.testing.assert_allclose(log_probs[0], [-0.01814993, second, third], atol=1e-5)
    p = 1 / (1 + np.exp(-4.0))
    expected = -p * np.log(p) - (1 - p) * np.log(1 - p)
    np.testing.assert_allclose(entropies[0, :2], [expected, expected], rtol=1e-4)


def test_forbidden_tokens_leave_entropy_and_gradient_finite():
    model = bigram_model(3)
    table = jnp.array([[0.0, 1.0, -jnp.inf]] * 3)
    prompt, one = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)

    def total(table):
        log_probs, entropies = scores(model, {"table": table}, prompt, one, one, one)
        return (log_probs + entropies).sum()

    value, gradient = jax.value_and_grad(total)(table)
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_samples_follow_the_probabilities():
    model = bigram_model(4)
    table = jnp.log(jnp.array([[0.1, 0.2, 0.3, 0.4]] * 4))
    prompts = jnp.zeros((4000, 1), jnp.int32)
    for temperature, expected in (
        (1.0, [0.1, 0.2, 0.3, 0.4]),
        (0.5, [1 / 30, 4 / 30, 0.3, 16 / 30]),
    ):
        out = write(
            jax.random.key(0), model, {"table": table}, prompts, prompts == 0,
            max_new_tokens=4, eos_id=None, pad_id=0, temperature=temperature,
        )  # fmt: skip
        share = np.bincount(np.asarray(out.tokens).ravel(), minlength=4) / 16000
        np.testing.assert_allclose(share, expected, atol=0.015)  # 4 standard deviations
        np.testing.assert_allclose(
            np.exp(out.log_probs), np.asarray(expected)[np.asarray(out.tokens)], rtol=1e-5
        )
        assert bool(out.finished.all()) and bool(out.mask.all())


def test_greedy_takes_the_likeliest_and_pad_may_be_the_end():
    # 0 → 1 → 2 → 3 (the end, and the padding)
    table = jnp.eye(4)[jnp.array([1, 2, 3, 0])] * 3
    prompts = jnp.array([[0], [2]])
    out = write(
        jax.random.key(0), bigram_model(4), {"table": table}, prompts, prompts >= 0,
        max_new_tokens=5, eos_id=3, pad_id=3, greedy=True,
    )  # fmt: skip
    np.testing.assert_array_equal(out.tokens, [[1, 2, 3, 3, 3], [3, 3, 3, 3, 3]])
    np.testing.assert_array_equal(out.mask.sum(axis=1), [3, 1])


def test_one_new_token_and_legacy_keys(model, params, prompts):
    settings = {**SETTINGS, "max_new_tokens": 1}
    a = write(jax.random.PRNGKey(3), model, params, *prompts, **settings)
    b = write(jax.random.key(3), model, params, *prompts, **settings)
    np.testing.assert_array_equal(a.tokens, b.tokens)
    assert a.tokens.shape == (32, 1) and bool(a.mask.all())


def test_bfloat16_sampler_and_training_pass_are_close(prompts):
    model = transformer_model(14, 20, d_model=16, num_layers=1, num_heads=2, dtype=jnp.bfloat16)
    params = jax.jit(model.init)(jax.random.key(0))
    out = write(jax.random.key(2), model, params, *prompts, **SETTINGS)
    again, _ = scores(model, params, *prompts, out.tokens, out.mask, temperature=0.7)
    assert out.log_probs.dtype == again.dtype == jnp.float32
    np.testing.assert_allclose(again, out.log_probs, atol=0.05)


def test_positions_from_mask():
    mask = jnp.array([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(
        positions_from_mask(mask), [[-1, -1, 0, 1, 2, -1], [0, 1, 2, 3, 4, 5]]
    )
    with pytest.raises(TypeError, match="mask must be a bool"):
        positions_from_mask(mask * 1.0)


def test_errors_name_the_numbers(key):
    model = bigram_model()
    params = model.init(key)
    prompts, mask = jnp.zeros((2, 60), jnp.int32), jnp.ones((2, 60), bool)
    settings = {"max_new_tokens": 4, "eos_id": EOS, "pad_id": PAD}

    def call(prompts=prompts, mask=mask, model=model, **changed):
        return generate(key, model, params, prompts, mask, **{**settings, **changed})

    with pytest.raises(
        ValueError, match="60 columns and 5 new tokens exceed the model's max_length=64"
    ):
        call(max_new_tokens=5)
    with pytest.raises(ValueError, match=r"prompt_mask has shape \(2, 59\), prompts \(2, 60\)"):
        call(mask=mask[:, 1:])
    with pytest.raises(ValueError, match="left-padded"):
        call(mask=mask.at[0, -1].set(False))
    with pytest.raises(ValueError, match="left-padded"):
        call(mask=mask.at[0, 3].set(False))
    with pytest.raises(ValueError, match="temperature must lie in"):
        call(temperature=0.0)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1"):
        call(max_new_tokens=0)
    with pytest.raises(ValueError, match="token ids"):
        call(prompts=prompts * 1.0)
    with pytest.raises(ValueError, match="use_cache=False"):
        call(model=model._replace(init_cache=None))
    with pytest.raises(ValueError, match="do not match"):
        completion_log_probs(
            model, params, prompts[:, :8], mask[:, :8], prompts[:, :3], mask[:, :2]
        )
