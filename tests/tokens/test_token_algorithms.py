"""Conformance of every token algorithm, and what only some of them do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpg.algorithms.common import INFO_FIELDS
from jaxpg.sweeps import sweep
from jaxpg.tokens import (
    ALGORITHMS,
    CISPOConfig,
    DAPOConfig,
    GRPOConfig,
    LanguageModel,
    Prompts,
    ReinforcePPConfig,
    RLOOConfig,
    Task,
    TokenConfig,
    add_mod_task,
    dapo,
    evaluate,
    grpo,
    reinforce_pp,
    rloo,
    sample_groups,
    say_n_task,
    transformer_model,
    warmed_up,
)
from jaxpg.training import train

TASK = say_n_task(3, 5)
SIZES = {"num_prompts": 16, "group_size": 4, "num_epochs": 2, "num_minibatches": 2}


def bigram_model(vocab_size: int = 14) -> LanguageModel:
    """The next token depends on the current one alone: a dict with one table of logits."""

    def apply(params, tokens, positions):
        return params["table"][tokens]

    def apply_cached(params, tokens, positions, cache):
        return params["table"][tokens], cache

    return LanguageModel(
        lambda key: {"table": 0.1 * jax.random.normal(key, (vocab_size, vocab_size))},
        apply,
        lambda params, batch, length: (),
        apply_cached,
        64,
        vocab_size,
    )


MODEL = bigram_model()
draw = jax.jit(sample_groups, static_argnums=(1, 2))


def same(a: object, b: object, atol: float = 0.0) -> None:
    def compare(x: jax.Array, y: jax.Array) -> None:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, atol=atol, rtol=atol)

    jax.tree.map(compare, a, b)


def signature(tree: object) -> object:
    return jax.tree.map(lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False)), tree)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_conformance(name, key):
    make, config_type = ALGORITHMS[name]
    algorithm = make(TASK, MODEL)
    config = config_type(**SIZES, kl_coef=0.1, anneal_updates=10.0)
    traces = 0

    @jax.jit
    def step(state, config):
        nonlocal traces
        traces += 1
        return algorithm.step(state, config)

    state = algorithm.init(key, config)
    buffers = [
        x.unsafe_buffer_pointer()
        for x in jax.tree.leaves(state)
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    ]
    assert len(set(buffers)) == len(buffers)  # no buffer twice: the reference is a copy
    first, info = step(state, config)
    assert signature(first) == signature(state)
    second, _ = step(first, config)
    step(first, config.replace(learning_rate=1e-2, temperature=0.9, kl_coef=0.2))
    assert traces == 1
    assert int(second.update) == 2

    assert set(INFO_FIELDS) <= set(info)
    ours = ("score", "exact", "reward", "mean_length", "eos_rate", "mixed_share", "kept_share")
    losses = ("entropy", "approx_kl", "clip_fraction", "clip_fraction_low", "clip_fraction_high")
    for field in (*INFO_FIELDS, *ours, *losses):
        assert info[field].shape == () and info[field].dtype == jnp.float32, field
        assert np.isfinite(info[field]), field
    np.testing.assert_allclose(info["drawn_entropy"], np.log(14), atol=0.1)
    assert float(info["entropy"]) > 2 and float(info["grad_norm"]) > 0
    drawn = 64 * (config.oversample or 1)
    assert float(info["episode_count"]) == drawn and float(info["env_steps"]) == drawn * 5


def test_scan_resume_seeds_and_settings(key):
    """Two updates at once, or one after the other; two seeds and learning rates at once, or one."""
    algorithm = dapo(TASK, MODEL)
    config = DAPOConfig(**SIZES, kl_coef=0.1)
    run = jax.jit(lambda key, config: train(algorithm, key, config, 2))
    step = jax.jit(algorithm.step)
    whole, infos = run(key, config)
    state = algorithm.init(key, config)
    for _ in range(2):
        state, _ = step(state, config)
    same(whole, state, atol=1e-6)
    assert infos["score"].shape == (2,)

    seeds = jax.random.split(jax.random.key(7), 2)
    configs, axes = sweep(config, learning_rate=[1e-3, 5e-3])
    together, _ = jax.jit(
        jax.vmap(lambda key, config: train(algorithm, key, config, 2), in_axes=(0, axes))
    )(seeds, configs)
    alone, _ = run(seeds[1], config.replace(learning_rate=5e-3))
    same(jax.tree.map(lambda x: x[1], together), alone, atol=1e-5)


def test_donated_state_leaves_the_users_arrays(key):
    algorithm = grpo(TASK, MODEL)
    config = GRPOConfig(**SIZES, kl_coef=0.1)
    params = MODEL.init(key)
    state = algorithm.init(key, config, params=params)
    step = jax.jit(algorithm.step, donate_argnums=0)
    state, _ = step(state, config)
    state, _ = step(state, config)
    assert np.isfinite(params["table"]).all() and jax.random.normal(key) is not None
    same(state.extra, params)  # the reference stays where it was
    assert np.abs(state.params["table"] - params["table"]).max() > 0


def test_legacy_keys(key):
    algorithm = grpo(TASK, MODEL)
    config = GRPOConfig(**SIZES)
    a, b = algorithm.init(jax.random.PRNGKey(0), config), algorithm.init(key, config)
    same(a, b)


def test_reference_is_renewed_on_time(key):
    algorithm = grpo(TASK, MODEL)
    config = GRPOConfig(**SIZES, kl_coef=0.1, ref_refresh=2.0)
    states = [algorithm.init(key, config)]
    step = jax.jit(algorithm.step)
    for _ in range(3):
        states.append(step(states[-1], config)[0])
    same(states[1].extra, states[0].params)
    same(states[2].extra, states[2].params)
    same(states[3].extra, states[2].params)


def test_the_kl_term_holds_the_policy_near_its_reference(key):
    distances = []
    run = jax.jit(lambda key, config: train(grpo(TASK, MODEL), key, config, 30))
    for coefficient in (0.0, 10.0):
        state, _ = run(key, GRPOConfig(**SIZES, kl_coef=coefficient, learning_rate=0.02))
        move = jax.nn.log_softmax(state.params["table"]) - jax.nn.log_softmax(state.extra["table"])
        distances.append(float(np.abs(move).mean()))
    assert distances[1] < 0.5 * distances[0]


@pytest.mark.parametrize("maker", [rloo, reinforce_pp])
def test_kl_in_the_reward_pulls_back(maker, key):
    """All scores equal: only the KL in the reward moves the policy, towards the reference."""
    task = TASK._replace(score=lambda info, tokens, mask: jnp.ones(tokens.shape[0]))
    config_type = {rloo: RLOOConfig, reinforce_pp: ReinforcePPConfig}[maker]
    algorithm = maker(task, MODEL)
    config = config_type(num_prompts=16, group_size=8, kl_coef=1.0, learning_rate=0.01)
    state = algorithm.init(key, config)
    away = {"table": state.params["table"].at[:, 3].add(2.0)}
    state = state._replace(params=away)
    step = jax.jit(algorithm.step)
    for _ in range(20):
        state, _ = step(state, config)

    def three(params):
        return jax.nn.softmax(params["table"], axis=-1)[1:4, 3].mean()

    assert three(state.params) < three(away) - 0.05
    # and without the KL nothing moves at all: equal rewards are no evidence
    off = config_type(num_prompts=16, group_size=8, learning_rate=0.01)
    start = algorithm.init(key, off)
    after, info = jax.jit(algorithm.step)(start, off)
    same(after.params, start.params)
    assert float(info["grad_norm"]) == 0.0


def test_dynamic_sampling_with_nothing_to_keep_changes_nothing(key):
    task = TASK._replace(score=lambda info, tokens, mask: jnp.zeros(tokens.shape[0]))
    algorithm = dapo(task, MODEL)
    config = DAPOConfig(**SIZES)
    start = algorithm.init(key, config)
    after, info = jax.jit(algorithm.step)(start, config)
    same(after.params, start.params)
    same(after.opt_state, start.opt_state)
    assert float(info["kept_share"]) == float(info["mixed_share"]) == 0.0
    assert float(info["live_steps"]) == 0.0 and float(info["entropy"]) == 0.0


def test_groups_of_dynamic_sampling(key):
    config = DAPOConfig(num_prompts=6, group_size=4, oversample=3)
    params = {"table": jnp.zeros((14, 14)).at[:, 12].set(2.0)}
    groups, info = draw(key, TASK, MODEL, params, config)
    plain, all_info = draw(key, TASK, MODEL, params, GRPOConfig(num_prompts=18, group_size=4))
    scores = np.asarray(plain.scores)  # the same draw, all 18 groups
    mixed = scores.max(axis=1) != scores.min(axis=1)
    assert mixed.sum() > 0
    chosen = np.concatenate([np.flatnonzero(mixed), np.flatnonzero(~mixed)])[:6]
    np.testing.assert_array_equal(groups.scores, scores[chosen])
    np.testing.assert_array_equal(groups.completions, plain.completions[chosen])
    np.testing.assert_array_equal(groups.kept, mixed[chosen])
    assert float(info["mixed_share"]) == pytest.approx(mixed.mean())
    assert float(info["kept_share"]) == pytest.approx(min(mixed.sum(), 6) / 6)
    for field in ("score", "exact", "mean_length", "eos_rate"):  # over everything drawn
        assert float(info[field]) == pytest.approx(float(all_info[field]))
    assert not np.asarray(groups.mask)[~np.asarray(groups.kept)].any()


def test_overlong_penalty_and_filter_shape_rewards_but_not_scores(key):
    config = GRPOConfig(num_prompts=8, group_size=4, overlong_cache=2.0, mask_truncated=True)
    params = {"table": jnp.zeros((14, 14)).at[:, 12].set(1.5)}
    groups, info = draw(key, TASK, MODEL, params, config)
    written, _ = draw(key, TASK, MODEL, params, GRPOConfig(num_prompts=8, group_size=4))
    lengths = np.asarray(written.mask).sum(axis=-1)
    ended = (np.asarray(written.completions) == 12).any(axis=-1)
    assert {4, 5} <= set(lengths.ravel()) and not ended.all()
    penalty = np.select([lengths <= 3, lengths == 4], [0.0, -0.5], -1.0)  # of 5, from 3 on
    np.testing.assert_allclose(groups.rewards, np.asarray(written.scores) + penalty, atol=1e-6)
    np.testing.assert_array_equal(groups.scores, written.scores)
    np.testing.assert_array_equal(
        np.asarray(groups.mask), np.asarray(written.mask) & ended[..., None]
    )
    assert float(info["eos_rate"]) == pytest.approx(ended.mean())
    # a length penalty does not make a group of equal scores look mixed
    flat = TASK._replace(score=lambda info, tokens, mask: jnp.ones(tokens.shape[0]))
    config = DAPOConfig(num_prompts=8, group_size=4, overlong_cache=2.0)
    _, info = draw(key, flat, MODEL, params, config)
    assert float(info["kept_share"]) == 0.0


def test_truncated_importance_weights_see_the_samplers_error(key):
    """A sampler whose logits are off by a factor: weights are min(π/π_sampler, cap)."""
    off = MODEL._replace(
        apply_cached=lambda params, tokens, positions, cache: (
            0.5 * params["table"][tokens],
            cache,
        )
    )
    params = {"table": jax.random.normal(key, (14, 14))}
    config = GRPOConfig(num_prompts=8, group_size=4, tis_cap=1.5)
    groups, _ = draw(key, TASK, off, params, config)
    off_policy, _ = draw(key, TASK, off, params, config.replace(tis_cap=None))
    right = jax.nn.log_softmax(params["table"])
    previous = np.concatenate(
        [np.full((8, 4, 1), 11), np.asarray(groups.completions)[..., :-1]], axis=-1
    )
    mask = np.asarray(groups.mask)
    expected = np.asarray(right)[previous, np.asarray(groups.completions)]
    np.testing.assert_allclose(np.asarray(groups.old_log_probs)[mask], expected[mask], atol=1e-5)
    ratio = np.exp(expected - np.asarray(off_policy.old_log_probs))
    np.testing.assert_allclose(
        np.asarray(groups.weights)[mask], np.minimum(ratio, 1.5)[mask], rtol=1e-4
    )
    assert off_policy.weights is None and (ratio[mask] > 1.5).any()


def test_advantages_see_the_whole_batch(key):
    """REINFORCE++ whitens over all tokens: dealt into minibatches, each alone is not white."""
    seen = {}

    def advantages(groups, config):
        seen["shape"] = groups.rewards.shape
        return jnp.broadcast_to(jnp.arange(16.0)[:, None], (16, 4))

    def loss(log_probs, groups, advantages, config):
        seen["minibatch"] = log_probs.shape, advantages.shape
        value = -jnp.mean(log_probs.sum(axis=-1) * advantages)
        return value, {"policy_loss": value}

    algorithm = grpo(TASK, MODEL, advantages=advantages, loss=loss, config_type=TokenConfig)
    config = TokenConfig(**SIZES)
    jax.eval_shape(algorithm.step, algorithm.init(key, config), config)
    assert seen == {"shape": (16, 4), "minibatch": ((8, 4, 5), (8, 4))}


def test_optimizer_is_called_inside_the_trace(key):
    algorithm = grpo(TASK, MODEL, optimizer=lambda config: optax.sgd(config.learning_rate))
    config = GRPOConfig(num_prompts=16, group_size=4, num_epochs=1, num_minibatches=1)
    start = algorithm.init(key, config)
    step = jax.jit(algorithm.step)
    moved = [
        np.asarray(step(start, config.replace(learning_rate=rate))[0].params["table"])
        - np.asarray(start.params["table"])
        for rate in (0.1, 0.2)
    ]
    np.testing.assert_allclose(2 * moved[0], moved[1], atol=1e-6)
    assert np.abs(moved[0]).max() > 0


def test_annealing_reaches_zero(key):
    algorithm = grpo(TASK, MODEL)
    config = GRPOConfig(**SIZES, anneal_updates=2.0)
    step = jax.jit(algorithm.step)
    state = algorithm.init(key, config)
    for _ in range(2):
        state, _ = step(state, config)
    after, _ = step(state, config)
    same(after.params, state.params)


def test_a_task_in_twenty_lines_is_learned(key):
    """Answer an even digit: from a model without a cache, in seconds."""

    def sample_prompts(key, n):
        tokens = jax.random.randint(key, (n, 1), 0, 4)
        return tokens, jnp.ones((n, 1), bool), ()

    def score(info, completions, mask):
        return (completions[:, 0] % 2 == 0).astype(jnp.float32)

    task = Task(
        "even", sample_prompts, score, tuple("0123456789"), max_prompt=1, max_new=1,
        eos_id=None, pad_id=0,
    )  # fmt: skip
    model = bigram_model(10)._replace(init_cache=None, apply_cached=None)
    algorithm = grpo(task, model)
    config = GRPOConfig(num_prompts=16, group_size=4, learning_rate=0.05)
    state, infos = jax.jit(lambda key: train(algorithm, key, config, 40))(key)
    assert float(infos["score"][0]) < 0.75 and float(infos["score"][-5:].mean()) > 0.97
    assert float(evaluate(task, model, state.params, key, num_prompts=16).exact) == 1.0


def test_warmed_up_starts_from_answers_and_checks_first(key):
    model = transformer_model(14, 8, d_model=16, num_layers=1, num_heads=2)
    algorithm = warmed_up(grpo(say_n_task(2, 3), model), num_steps=60, learning_rate=3e-3)
    config = GRPOConfig(num_prompts=2, group_size=2, kl_coef=0.1)
    state = jax.jit(lambda key: algorithm.init(key, config))(key)
    assert float(evaluate(algorithm.task, model, state.params, key, num_prompts=32).exact) > 0.9
    same(state.extra, state.params)  # the reference is the warmed-up policy
    with pytest.raises(ValueError, match="num_minibatches=3 does not divide num_prompts=2"):
        algorithm.init(key, config.replace(num_minibatches=3))
    with pytest.raises(ValueError, match="no targets"):
        warmed_up(grpo(algorithm.task._replace(targets=None), model), num_steps=1).init(key, config)
    assert warmed_up(algorithm, num_steps=0) is algorithm


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 1}, "group_size must be at least 2, got 1"),
        ({"num_prompts": 5}, "num_minibatches=2 does not divide num_prompts=5"),
        ({"dual_clip": 1.0}, r"dual_clip must lie in \(1, inf"),
        ({"overlong_cache": 6.0}, r"overlong_cache must lie in \(0, 5\], got 6"),
        ({"temperature": 0.0}, "temperature must lie in"),
        ({"kl_coef": -1.0}, "kl_coef must lie in"),
        ({"ref_refresh": 3.0}, "ref_refresh renews a reference policy, but kl_coef is None"),
        ({"oversample": 0}, "oversample must be at least 1, got 0"),
        ({"annealed": ("learning_rat",)}, "annealed names 'learning_rat'"),
        ({"tis_cap": 0.0}, "tis_cap must lie in"),
        ({"num_epochs": 0}, "num_epochs must be at least 1"),
        ({"clip_epsilon": -0.1}, "clip_epsilon must lie in"),
    ],
)
def test_bad_configs_are_told_before_anything_compiles(changes, message, key):
    with pytest.raises(ValueError, match=message):
        grpo(TASK, MODEL).init(key, GRPOConfig(**{**SIZES, **changes}))


def test_tasks_and_models_that_do_not_fit(key):
    config = GRPOConfig(**SIZES)
    with pytest.raises(
        ValueError, match=r"needs 2 prompt and 5 new tokens, more than .*max_length=6"
    ):
        grpo(TASK, MODEL._replace(max_length=6)).init(key, config)
    with pytest.raises(ValueError, match="has 14 tokens, the model's vocab_size is 10"):
        grpo(TASK, MODEL._replace(vocab_size=10)).init(key, config)
    with pytest.raises(ValueError, match="eos_id=14 is no token of a vocabulary of 14"):
        grpo(TASK._replace(eos_id=14), MODEL).init(key, config)
    with pytest.raises(ValueError, match="no end token"):
        grpo(add_mod_task(), MODEL).init(key, config.replace(mask_truncated=True))
    with pytest.raises(TypeError, match="takes a GRPOConfig, got CISPOConfig"):
        grpo(TASK, MODEL).init(key, CISPOConfig(**SIZES))
    wide = TASK._replace(
        sample_prompts=lambda key, n: Prompts(jnp.zeros((n, 3), int), jnp.ones((n, 3), bool), ())
    )
    with pytest.raises(ValueError, match=r"prompt tokens of shape \(16, 2\), got \(16, 3\)"):
        sample_groups(key, wide, MODEL, MODEL.init(key), config)
    scalar = TASK._replace(score=lambda info, tokens, mask: jnp.zeros(()))
    with pytest.raises(ValueError, match=r"one score per completion, \(64,\), got shape \(\)"):
        sample_groups(key, scalar, MODEL, MODEL.init(key), config)
