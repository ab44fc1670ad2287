"""TRPO: its step against an explicit Fisher matrix, its constraint, and when it stands still."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import probe_environments as probes
import pytest
from tabular import REWARDS, ring, softmax, table_policy

from jaxpg.algorithms.common import collect, current
from jaxpg.algorithms.trpo import TRPOConfig, trpo
from jaxpg.environments import from_gymnax
from jaxpg.evaluation import evaluate
from jaxpg.policies import gru_policy, mlp_policy
from jaxpg.training import train
from jaxpg.types import split_key

SMALL = {"num_envs": 8, "num_steps": 16, "critic_epochs": 2}


def collected(env, policy, state, config):
    """The rollout that `step` makes from this state."""
    key = split_key(state.key, "next", "rollout", "fisher", "critic")["rollout"]
    return collect(key, env, policy, state, current(config, state.update))


def ring_update(config, kl_sign=1.0, rewards=REWARDS, critic_scale=1.0):
    """One update on the ring: ``(state, after, info, rollout)``."""
    return compiled_ring_update(config, kl_sign, rewards, critic_scale)


@jax.jit  # once for all: everything that the tests change is traced
def compiled_ring_update(config, kl_sign, rewards, critic_scale):
    env, policy = ring(rewards), table_policy()
    family = policy.distribution
    bent = family._replace(kl=lambda p, q: kl_sign * family.kl(p, q))
    algorithm = trpo(env, policy._replace(distribution=bent))
    state = algorithm.init(jax.random.key(0), config)
    critic = critic_scale * state.params["critic"]
    state = state._replace(params={**state.params, "critic": critic})
    data = collected(env, policy, state, config)
    return state, *algorithm.step(state, config), (data.rows, data.next_values)


RING = TRPOConfig(**SMALL, cg_iterations=30, cg_damping=0.01, gae_lambda=0.7)


def test_the_step_is_the_natural_gradient_of_an_explicit_fisher_matrix():
    config = RING.replace(kl_tolerance=0.5, max_kl=0.005)
    state, after, info, data = ring_update(config)
    rows, next_values = jax.tree.map(np.asarray, data)
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


@pytest.mark.parametrize(
    ("name", "settings"), [("CartPole-v1", {}), ("Pendulum-v1", {"fisher_subsample": 4})]
)
def test_every_accepted_step_keeps_the_kl_within_delta(name, settings):
    """Measured from outside, with the stored distributions, over seeds and swept deltas."""
    env = from_gymnax(name, max_steps_in_episode=20)
    policy = mlp_policy(env, hidden_sizes=(16,))
    algorithm = trpo(env, policy)
    config = TRPOConfig(**SMALL, **settings)

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


def test_without_anything_to_gain_the_policy_stays_and_the_critic_learns():
    """Fault R35: every advantage equal means a zero gradient, and 0/0 in the first CG step."""
    # every return is 1 and every value 0
    config = RING.replace(gamma=0.0)
    state, after, info, _ = ring_update(config, rewards=np.ones((4, 3)), critic_scale=0.0)
    assert (float(info["accepted"]), float(info["kl"]), float(info["step_scale"])) == (0, 0, 0)
    assert float(info["grad_norm"]) == 0 and all(np.isfinite(x) for x in info.values())
    np.testing.assert_array_equal(state.params["actor"], after.params["actor"])
    assert np.all(np.asarray(after.params["critic"])[:3] > 0)


@pytest.mark.parametrize("kl_sign", [-1.0, 0.0, np.nan])
def test_bad_curvature_leaves_the_policy_unchanged(kl_sign):
    """Fault R35 again: a KL that curves down, not at all, or is not a number."""
    for damping in (0.0, 10.0):
        state, after, info, _ = ring_update(RING.replace(cg_damping=damping), kl_sign=kl_sign)
        assert float(info["accepted"]) == 0 and float(info["kl"]) == 0
        assert all(np.isfinite(x) for x in info.values()), info
        np.testing.assert_array_equal(state.params["actor"], after.params["actor"])


def test_only_the_critic_has_an_optimizer_and_it_never_touches_the_actor():
    state, fitted, info, _ = ring_update(RING)
    _, frozen, _, _ = ring_update(RING.replace(learning_rate=0.0))
    assert {x.shape for x in jax.tree.leaves(state.opt_state)} == {(), (4,)}
    np.testing.assert_array_equal(frozen.params["critic"], state.params["critic"])
    np.testing.assert_array_equal(frozen.params["actor"], fitted.params["actor"])
    assert not np.array_equal(fitted.params["critic"], state.params["critic"])
    assert float(info["critic_grad_norm"]) > 0


def test_the_entropy_bonus_enters_the_surrogate():
    """A weight that outweighs every advantage makes the step flatten the policy."""
    for ent_coef, flatter in [(0.0, False), (100.0, True)]:
        state, after, info, data = ring_update(RING.replace(ent_coef=ent_coef, max_kl=0.05))
        assert float(info["accepted"]) == 1
        places = np.argmax(data[0].obs, axis=-1)

        def entropy(params, places=places):
            p = softmax(np.asarray(params["actor"], np.float64))
            return -(p * np.log(p)).sum(-1)[places].mean()

        np.testing.assert_allclose(info["entropy"], entropy(state.params), rtol=1e-5)
        assert (entropy(after.params) > entropy(state.params)) == flatter


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


def test_probes_are_solved():
    """The best continuous action, and the value of a reward of 1 for ever behind time limits."""

    @jax.jit
    def run(key):
        env = probes.continuous_action()
        algorithm = trpo(env, mlp_policy(env, hidden_sizes=(16,)))
        state, _ = train(algorithm, key, TRPOConfig(**SMALL, max_kl=0.05), 60)
        action = evaluate(algorithm, state, key, num_episodes=1)

        env = probes.time_limit_only()
        policy = mlp_policy(env, hidden_sizes=(16,))
        config = TRPOConfig(num_envs=8, num_steps=16, gamma=0.9, learning_rate=0.01)
        state, _ = train(trpo(env, policy), key, config, 60)
        return action, policy.apply(state.params, jnp.zeros((1, 1)))[1]

    action, value = run(jax.random.key(0))
    assert float(action[0]) > -0.02
    np.testing.assert_allclose(value, 10.0, rtol=0.05)


def test_cartpole_improves_within_few_updates():
    env = from_gymnax("CartPole-v1")
    algorithm = trpo(env, mlp_policy(env, hidden_sizes=(32,)))
    config = TRPOConfig(num_envs=8, num_steps=128, max_kl=0.03)
    run = jax.jit(jax.vmap(lambda key: train(algorithm, key, config, 20)))
    _, infos = run(jax.random.split(jax.random.key(0), 3))
    mean = np.asarray(infos["episode_return_sum"] / np.maximum(infos["episode_count"], 1))
    assert np.all(mean[:, 0] < 40) and np.all(mean[:, -1] > 100), mean[:, [0, -1]]
