"""TRPO: its step against an explicit Fisher matrix, its constraint, and when it stands still."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tabular import ring, softmax, table_policy

from jaxpg.algorithms.common import collect, current
from jaxpg.algorithms.trpo import TRPOConfig, trpo
from jaxpg.environments import from_gymnax
from jaxpg.policies import gru_policy, mlp_policy
from jaxpg.training import train
from jaxpg.types import split_key

SMALL = {"num_envs": 8, "num_steps": 16, "critic_epochs": 2}


def collected(env, policy, state, config):
    """The rollout that `step` makes from this state."""
    key = split_key(state.key, "next", "rollout", "fisher", "critic")["rollout"]
    return collect(key, env, policy, state, current(config, state.update))


def test_the_step_is_the_natural_gradient_of_an_explicit_fisher_matrix():
    env, policy = ring(), table_policy()
    config = TRPOConfig(
        **SMALL, cg_damping=0.01, cg_iterations=30, kl_tolerance=0.5, gae_lambda=0.7, max_kl=0.005
    )
    algorithm = trpo(env, policy)
    state = jax.jit(algorithm.init)(jax.random.key(0), config)
    after, info = jax.jit(algorithm.step)(state, config)
    data = jax.tree.map(np.asarray, collected(env, policy, state, config)._replace(carry=()))
    rows, next_values = data.rows, data.next_values
    rewards, values = rows.reward.astype(np.float64), rows.value.astype(np.float64)

    # GAE as a sum over later errors, then normalised
    errors = rewards + 0.99 * np.where(rows.terminated, 0.0, next_values) - values
    advantages = np.zeros_like(errors)
    for t, b in np.ndindex(errors.shape):
        for k in range(t, errors.shape[0]):
            advantages[t, b] += (0.99 * 0.7) ** (k - t) * errors[k, b]
            if rows.terminated[k, b] or rows.truncated[k, b]:
                break
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    p = softmax(np.asarray(state.params["actor"], np.float64))
    gradient, fisher = np.zeros((4, 3)), np.zeros((4, 3, 4, 3))
    for t, b in np.ndindex(errors.shape):
        s, a = np.argmax(rows.obs[t, b]), rows.action[t, b]
        gradient[s] += advantages[t, b] * (np.eye(3)[a] - p[s]) / errors.size
        fisher[s, :, s, :] += (np.diag(p[s]) - np.outer(p[s], p[s])) / errors.size
    gradient, fisher = gradient.ravel(), fisher.reshape(12, 12)
    direction = np.linalg.solve(fisher + 0.01 * np.eye(12), gradient)
    scale = np.sqrt(2 * 0.005 / (direction @ fisher @ direction))
    change = np.asarray(after.params["actor"]) - np.asarray(state.params["actor"])
    np.testing.assert_allclose(change.ravel(), scale * direction, atol=1e-5)
    np.testing.assert_allclose(info["step_scale"], scale, rtol=1e-4)
    np.testing.assert_allclose(
        info["expected_improvement"], scale * gradient @ direction, rtol=1e-4
    )
    # and the KL that it reports is the one of the two tables, about the quadratic 0.005
    q = softmax(np.asarray(after.params["actor"], np.float64))
    kl = ((p * np.log(p / q)).sum(-1)[np.argmax(rows.obs, -1)]).mean()
    np.testing.assert_allclose(info["kl"], kl, rtol=1e-3)
    assert 0.8 * 0.005 < kl < 1.2 * 0.005


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_every_accepted_step_keeps_the_kl_within_delta(name):
    """Measured from outside, with the stored distributions, over seeds and swept deltas."""
    env = from_gymnax(name, max_steps_in_episode=20)
    policy = mlp_policy(env, hidden_sizes=(16,))
    algorithm = trpo(env, policy)
    config = TRPOConfig(**SMALL)

    def updates(key, max_kl):
        def body(state, _):
            chosen = config.replace(max_kl=max_kl)
            rows = collected(env, policy, state, chosen).rows
            after, info = algorithm.step(state, chosen)
            obs = rows.obs.reshape(-1, *rows.obs.shape[2:])
            old, _ = policy.apply(state.params, obs)
            new, _ = policy.apply(after.params, obs)
            same = jax.tree.map(
                lambda x, y: jnp.all(x == y), state.params["actor"], after.params["actor"]
            )
            still = jnp.all(jnp.stack(jax.tree.leaves(same)))
            return after, (jnp.mean(policy.distribution.kl(old, new)), still, info)

        return jax.lax.scan(body, algorithm.init(key, config), length=8)[1]

    deltas = jnp.array([0.002, 0.01, 0.05])
    kl, still, info = jax.jit(jax.vmap(updates))(jax.random.split(jax.random.key(0), 3), deltas)
    accepted = np.asarray(info["accepted"]) == 1
    assert accepted.mean() > 0.9
    assert np.all(kl <= deltas[:, None] * (1 + 1e-4) + 1e-7)
    assert np.all(
        np.asarray(kl)[accepted] > 0.2 * np.broadcast_to(deltas[:, None], kl.shape)[accepted]
    )
    np.testing.assert_allclose(kl, info["kl"], rtol=1e-2, atol=1e-6)
    assert np.all(np.asarray(info["improvement"])[accepted] > 0)
    np.testing.assert_array_equal(still, ~accepted)


def unchanged(state, after):
    jax.tree.map(np.testing.assert_array_equal, state.params["actor"], after.params["actor"])


def test_without_anything_to_gain_the_policy_stays_and_the_critic_learns():
    """Fault R35: every advantage equal means a zero gradient, and 0/0 in the first CG step."""
    env = ring(np.ones((4, 3)))
    policy = table_policy()
    # a critic that is exact from the start: advantages are exactly 0
    policy = policy._replace(
        init=lambda key, obs: {
            "actor": table_policy().init(key, obs)["actor"],
            "critic": jnp.zeros(4),
        },
    )
    algorithm = trpo(env, policy)
    config = TRPOConfig(**SMALL, gamma=0.0)  # every return is 1, every value 0
    state = jax.jit(algorithm.init)(jax.random.key(0), config)
    after, info = jax.jit(algorithm.step)(state, config)
    assert (float(info["accepted"]), float(info["kl"]), float(info["step_scale"])) == (0, 0, 0)
    assert float(info["grad_norm"]) == 0 and all(np.isfinite(x) for x in info.values())
    unchanged(state, after)
    assert np.all(np.asarray(after.params["critic"])[:3] > 0)


def test_bad_curvature_leaves_the_policy_unchanged():
    """Fault R35 again: a KL that curves down, not at all, or is not a number."""
    policy = table_policy()
    family = policy.distribution
    config = TRPOConfig(**SMALL, cg_damping=0.0)

    @jax.jit
    @jax.vmap
    def update(sign):
        bent = family._replace(kl=lambda p, q: sign * family.kl(p, q))
        algorithm = trpo(ring(), policy._replace(distribution=bent))
        state = algorithm.init(jax.random.key(0), config)
        return state, *algorithm.step(state, config)

    state, after, info = update(jnp.array([1.0, -1.0, 0.0, jnp.nan]))
    np.testing.assert_array_equal(info["accepted"], [1, 0, 0, 0])
    np.testing.assert_array_equal(info["kl"] > 0, [True, False, False, False])
    assert all(np.all(np.isfinite(x)) for x in info.values()), info
    changed = np.any(np.asarray(state.params["actor"] != after.params["actor"]), axis=(1, 2))
    np.testing.assert_array_equal(changed, [True, False, False, False])


def test_only_the_critic_has_an_optimizer_and_it_never_touches_the_actor():
    env, policy = ring(), table_policy()
    algorithm = trpo(env, policy)
    config = TRPOConfig(**SMALL, max_kl=1e-3)
    state = jax.jit(algorithm.init)(jax.random.key(0), config)
    shapes = {x.shape for x in jax.tree.leaves(state.opt_state)}
    assert shapes == {(), (4,)}
    step = jax.jit(algorithm.step)
    frozen, _ = step(state, config.replace(learning_rate=0.0))
    fitted, info = step(state, config)
    np.testing.assert_array_equal(frozen.params["critic"], state.params["critic"])
    np.testing.assert_array_equal(frozen.params["actor"], fitted.params["actor"])
    assert not np.array_equal(fitted.params["critic"], state.params["critic"])
    assert float(info["critic_grad_norm"]) > 0


def test_subsampled_fisher_steps_within_the_same_bound():
    env = from_gymnax("CartPole-v1", max_steps_in_episode=20)
    algorithm = trpo(env, mlp_policy(env, hidden_sizes=(16,)))
    config = TRPOConfig(**SMALL, fisher_subsample=4)
    _, infos = jax.jit(lambda key: train(algorithm, key, config, 4))(jax.random.key(0))
    assert np.all(np.asarray(infos["kl"]) <= 0.01) and np.mean(infos["accepted"]) > 0.5


def test_the_entropy_bonus_keeps_the_policy_wide():
    env, policy = ring(), table_policy()
    algorithm = trpo(env, policy)

    def entropy(ent_coef):
        config = TRPOConfig(**SMALL, ent_coef=ent_coef, max_kl=0.05)
        return train(algorithm, jax.random.key(0), config, 30)[1]["entropy"][-1]

    narrow, wide = jax.jit(jax.vmap(entropy))(jnp.array([0.0, 5.0]))
    assert float(wide) > 1.0 > float(narrow)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_kl": 0.0}, "max_kl"),
        ({"cg_damping": -0.1}, "cg_damping"),
        ({"cg_iterations": 0}, "cg_iterations must be at least 1, got 0"),
        (
            {"critic_minibatches": 3},
            "critic_minibatches=3 does not divide num_envs × num_steps=128",
        ),
        ({"fisher_subsample": 3}, "fisher_subsample=3 does not divide num_envs × num_steps=128"),
        ({"line_search_steps": 0}, "line_search_steps"),
        ({"line_search_decay": 1.0}, "line_search_decay"),
        ({"accept_ratio": 1.5}, "accept_ratio"),
        ({"kl_tolerance": -0.5}, "kl_tolerance"),
        ({"gae_lambda": 1.5}, "gae_lambda"),
    ],
)
def test_bad_settings_raise_in_init(settings, message):
    algorithm = trpo(ring(), table_policy())
    with pytest.raises(ValueError, match=message):
        algorithm.init(jax.random.key(0), TRPOConfig(**{**SMALL, **settings}))


def test_shared_and_recurrent_policies_raise_in_init():
    env = from_gymnax("CartPole-v1")
    config = TRPOConfig(**SMALL)
    shared = trpo(env, mlp_policy(env, shared=True))
    with pytest.raises(ValueError, match=r"got \['actor', 'critic', 'trunk'\]"):
        shared.init(jax.random.key(0), config)
    with pytest.raises(ValueError, match="feed-forward"):
        trpo(env, gru_policy(env)).init(jax.random.key(0), config)
    whole = table_policy()._replace(init=lambda key, obs: jnp.zeros((4, 3)))
    with pytest.raises(ValueError, match="trunk"):
        trpo(ring(), whole).init(jax.random.key(0), config)


def test_cartpole_improves_within_few_updates():
    env = from_gymnax("CartPole-v1")
    algorithm = trpo(env, mlp_policy(env, hidden_sizes=(32,)))
    config = TRPOConfig(num_envs=8, num_steps=128, max_kl=0.03)
    run = jax.jit(jax.vmap(lambda key: train(algorithm, key, config, 20)))
    _, infos = run(jax.random.split(jax.random.key(0), 3))
    mean = np.asarray(infos["episode_return_sum"] / np.maximum(infos["episode_count"], 1))
    assert np.all(mean[:, 0] < 40) and np.all(mean[:, -1] > 100), mean[:, [0, -1]]
