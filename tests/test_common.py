"""What algorithms share: the optimizer, annealing, explained variance, normalised observations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpg
from jaxpg.algorithms.common import (
    Statistics,
    current,
    explained_variance,
    normalize_obs,
    own_buffer,
)
from jaxpg.running_statistics import init_statistics, update_statistics


def test_r39_gradients_are_clipped_by_their_global_norm():
    config = jaxpg.PPOConfig(max_grad_norm=0.5, learning_rate=1.0)
    grads = {"a": jnp.asarray([3.0]), "b": jnp.asarray([4.0])}
    adam = jaxpg.adam(config)
    # Adam's first step is the sign of the gradient, clipped or not: its first moment tells,
    # a tenth of the clipped gradient [0.3, 0.4]
    _, state = adam.update(grads, adam.init(grads))
    mu = optax.tree.get(state, "mu")
    np.testing.assert_allclose([mu["a"][0], mu["b"][0]], [0.03, 0.04], rtol=1e-6)
    unclipped = jaxpg.adam(config.replace(max_grad_norm=None))
    _, state = unclipped.update(grads, unclipped.init(grads))
    np.testing.assert_allclose(optax.tree.get(state, "mu")["a"], [0.3], rtol=1e-6)


def test_r11_targets_are_constants_to_the_critic():
    def loss(theta):
        values = jnp.stack([theta, theta])
        # one step from v(s) = θ to v(s′) = θ with reward 1, γ = 0.9
        deltas = jaxpg.td_errors(jnp.ones(1), values[:1], values[1:], jnp.zeros(1, bool), gamma=0.9)
        targets = jax.lax.stop_gradient(deltas + values[:1])
        return jnp.sum(jaxpg.squared_value_loss(values[:1], targets))

    # the semi-gradient −(r + γ v′ − v), not −0.1 of the residual gradient
    np.testing.assert_allclose(jax.grad(loss)(0.0), -1.0, rtol=1e-6)


def test_annealed_fields_fall_linearly_and_stay_at_zero():
    config = jaxpg.PPOConfig(
        learning_rate=0.4,
        clip_epsilon=0.2,
        clip_epsilon_high=None,
        anneal_updates=10,
        annealed=("learning_rate", "clip_epsilon_high"),
    )
    for update, left in ((0, 1.0), (5, 0.5), (10, 0.0), (25, 0.0)):
        now = current(config, jnp.int32(update))
        np.testing.assert_allclose(now.learning_rate, 0.4 * left, rtol=1e-6)
        np.testing.assert_allclose(now.clip_epsilon, 0.2, rtol=1e-6)
        assert now.clip_epsilon_high is None
        assert now.gamma.dtype == jnp.float32 and not now.gamma.weak_type
    assert current(jaxpg.PPOConfig(gamma=1), jnp.int32(0)).gamma.dtype == jnp.float32


def test_explained_variance():
    targets = jnp.asarray([1.0, 2.0, 3.0, 4.0])
    assert float(explained_variance(targets, targets)) == 1.0
    assert float(explained_variance(jnp.zeros(4), targets)) == 0.0
    assert float(explained_variance(targets, jnp.full(4, 2.0))) == 0.0  # nothing to explain
    values = jnp.asarray([1.5, 1.5, 3.5, 99.0])
    mask = jnp.asarray([True, True, True, False])
    expected = 1 - np.var([-0.5, 0.5, -0.5]) / np.var([1.0, 2.0, 3.0])
    np.testing.assert_allclose(explained_variance(values, targets, mask), expected, rtol=1e-6)


def test_explained_variance_of_all_replicas_is_no_mean_of_theirs():
    """G17: two replicas with unequal counts, far apart in mean."""
    targets = jnp.asarray([[1.0, 2.0, 4.0, 0.0], [100.0, 103.0, 0.0, 0.0]])
    values = targets + jnp.asarray([[0.5, -0.5, 0.2, 9.0], [3.0, 5.0, 9.0, 9.0]])
    mask = jnp.asarray([[True, True, True, False], [True, True, False, False]])

    def shared(*arrays):
        return explained_variance(*arrays, lambda x: jax.lax.pmean(x, "replica"))

    got = jax.vmap(shared, axis_name="replica")(values, targets, mask)
    t, v = (np.asarray(x)[np.asarray(mask)] for x in (targets, values))
    np.testing.assert_allclose(got, [1 - np.var(t - v) / np.var(t)] * 2, rtol=1e-5)


def test_an_action_mask_is_not_normalised():
    obs = {"x": jnp.asarray([[0.0], [10.0]]), "action_mask": jnp.asarray([[True, False]] * 2)}
    statistics = update_statistics(init_statistics({"x": jnp.zeros(1)}), {"x": obs["x"]})
    seen = normalize_obs(Statistics(statistics, ()), obs)
    np.testing.assert_allclose(seen["x"], [[-1.0], [1.0]], rtol=1e-5)
    np.testing.assert_array_equal(seen["action_mask"], obs["action_mask"])
    assert normalize_obs(Statistics((), ()), obs) is obs


def test_r47_copies_share_no_buffer():
    x = jnp.arange(3.0)
    assert own_buffer(x).unsafe_buffer_pointer() != x.unsafe_buffer_pointer()
    key = jax.random.key(3)
    copy = own_buffer(key)
    jax.jit(lambda k: jax.random.fold_in(k, 1), donate_argnums=0)(copy)
    assert jax.random.key_data(key).shape == (2,)
    assert not own_buffer(2.0).weak_type


def test_r53_two_halves_are_the_whole():
    env = jaxpg.from_gymnax("CartPole-v1", max_steps_in_episode=6)
    algorithm = jaxpg.ppo(env, jaxpg.mlp_policy(env, hidden_sizes=(4,)))
    config = jaxpg.PPOConfig(
        num_envs=2, num_steps=4, num_epochs=1, num_minibatches=1, anneal_updates=8.0
    )
    train = jax.jit(jaxpg.train, static_argnums=(0, 3))
    whole, infos = train(algorithm, jax.random.key(0), config, 4)
    half, first = train(algorithm, jax.random.key(0), config, 2)
    # the config as an argument here too: constants would be folded, and round otherwise
    go_on = jax.jit(lambda state, config: jaxpg.train(algorithm, None, config, 2, state=state))
    rest, second = go_on(half, config)

    def words(state):
        return state._replace(key=jax.random.key_data(state.key))

    jax.tree.map(np.testing.assert_array_equal, words(whole), words(rest))
    joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, second)
    jax.tree.map(np.testing.assert_array_equal, infos, joined)
    with pytest.raises(ValueError, match="key"):
        jaxpg.train(algorithm, None, config, 1)
    with pytest.raises(ValueError, match="num_updates must be at least 1, got 0"):
        jaxpg.train(algorithm, jax.random.key(0), config, 0)


def test_sweep_zips_and_refuses_what_cannot_be_swept():
    config = jaxpg.PPOConfig()
    configs, axes = jaxpg.sweep(config, learning_rate=[1e-4, 1e-3], target_kl=[0.1, 0.2])
    assert configs.learning_rate.dtype == jnp.float32 and configs.gamma == config.gamma
    assert (axes.learning_rate, axes.target_kl, axes.gamma) == (0, 0, None)
    for changes, message in (
        ({}, "at least one field"),
        ({"num_envs": [1, 2]}, "num_envs is static"),
        ({"learning_rat": [1.0]}, "did you mean learning_rate"),
        ({"gamma": 0.5}, "sequence of numbers"),
        ({"gamma": [0.5, 0.6], "ent_coef": [0.1]}, "equal lengths"),
    ):
        with pytest.raises(ValueError, match=message):
            jaxpg.sweep(config, **changes)
