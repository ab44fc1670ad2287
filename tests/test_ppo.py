"""PPO: one update written out, what each option changes, and probes with known answers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import probe_environments as probes
import pytest
from tabular import ring, table_policy

import jaxpg

RING = {"num_envs": 4, "num_steps": 8, "num_epochs": 1, "num_minibatches": 1}


def sgd(config):
    return optax.sgd(config.learning_rate)


def ring_ppo(**settings):
    config = jaxpg.PPOConfig(**{**RING, "learning_rate": 0.1, "gamma": 0.9, **settings})
    algorithm = jaxpg.ppo(ring(), table_policy(), optimizer=sgd)
    state = algorithm.init(jax.random.key(4), config)
    return algorithm, config, state


def rollout_of(state, config):
    """The rollout that a step from `state` makes: its key is split by name, in this order."""
    key = jax.random.split(state.key, 3)[1]
    _, rows, next_values, _ = jaxpg.rollout(
        key, ring(), table_policy(), state.params, state.runner, num_steps=config.num_steps
    )
    return jax.tree.map(np.asarray, (rows, next_values))


def gae_forward(rows, next_values, gamma, lambda_):
    """Advantages as sums of discounted TD errors up to the end of each piece of an episode."""
    delta = rows.reward + gamma * np.where(rows.terminated, 0, next_values) - rows.value
    advantages = np.zeros_like(delta)
    for start in range(delta.shape[0]):
        for b in range(delta.shape[1]):
            weight = 1.0
            for t in range(start, delta.shape[0]):
                advantages[start, b] += weight * delta[t, b]
                if rows.terminated[t, b] or rows.truncated[t, b]:
                    break
                weight *= gamma * lambda_
    return advantages


def test_the_first_update_is_the_gradient_written_out():
    algorithm, config, state = ring_ppo(normalize_advantages=None, vf_coef=0.5, ent_coef=0.1)
    rows, next_values = rollout_of(state, config)
    advantages = gae_forward(rows, next_values, 0.9, 0.95)
    logits = np.asarray(state.params["actor"], np.float64)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    n = advantages.size
    actor, critic = np.zeros_like(logits), np.zeros(4)
    entropy = -(p * np.log(p)).sum(1)
    for t, b in np.ndindex(advantages.shape):
        s, a = rows.obs[t, b].argmax(), rows.action[t, b]
        # at ratio 1 the clipped surrogate has the gradient of −A log π
        actor[s] -= advantages[t, b] * (np.eye(3)[a] - p[s]) / n
        actor[s] += 0.1 * p[s] * (np.log(p[s]) + entropy[s]) / n
        critic[s] -= 0.5 * advantages[t, b] / n  # target − value is the advantage
    after, info = jax.jit(algorithm.step)(state, config)
    expected = {"actor": logits - 0.1 * actor, "critic": state.params["critic"] - 0.1 * critic}
    for name in ("actor", "critic"):
        np.testing.assert_allclose(after.params[name], expected[name], rtol=1e-5, atol=1e-6)
    norm = np.sqrt((actor**2).sum() + (critic**2).sum())
    np.testing.assert_allclose(info["grad_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(info["value_loss"], 0.5 * (advantages**2).mean(), rtol=1e-5)
    assert float(info["approx_kl"]) == float(info["clip_fraction"]) == 0.0
    explained = 1 - advantages.var() / (advantages + rows.value).var()
    np.testing.assert_allclose(info["explained_variance"], explained, rtol=1e-4)


def test_advantages_are_normalised_in_the_scope_named():
    _, _, state = ring_ppo()
    changes = {}
    for scope in ("minibatch", "batch", None):
        algorithm, config, _ = ring_ppo(normalize_advantages=scope)
        after, _ = jax.jit(algorithm.step)(state, config)
        changes[scope] = np.asarray(after.params["actor"] - state.params["actor"])
    # one minibatch is the batch; without normalisation the step is another one
    np.testing.assert_allclose(changes["minibatch"], changes["batch"], rtol=1e-5, atol=1e-7)
    assert not np.allclose(changes["minibatch"], changes[None], rtol=0.1)


def test_both_directions_of_the_penalty_and_the_rule_for_its_coefficient():
    steps = {"num_epochs": 4, "learning_rate": 1.0, "kl_coef": 0.7, "kl_target": 1e-3}
    after = {}
    for direction in ("old_new", "new_old"):
        algorithm, config, state = ring_ppo(**steps, kl_direction=direction)
        assert float(state.extra) == np.float32(0.7)
        after[direction], info = jax.jit(algorithm.step)(state, config)
        # far above 1.5 × the target: the coefficient doubles, once for the update
        assert float(info["kl"]) > 1.5e-3 and float(info["kl_coef"]) == np.float32(0.7)
        np.testing.assert_allclose(after[direction].extra, 1.4, rtol=1e-6)
    actors = [np.asarray(x.params["actor"]) for x in after.values()]
    assert not np.array_equal(*actors) and np.allclose(*actors, atol=0.05)
    fixed, config, state = ring_ppo(kl_coef=0.7)
    state, info = jax.jit(fixed.step)(state, config.replace(kl_coef=0.2))
    assert float(info["kl_coef"]) == np.float32(0.2)  # fixed: the config's, every time


def test_a_strong_penalty_holds_the_policy():
    kls = []
    for kl_coef in (0.0, 30.0):
        algorithm, config, state = ring_ppo(num_epochs=8, learning_rate=0.3, kl_coef=kl_coef)
        kls.append(float(jax.jit(algorithm.step)(state, config)[1]["kl"]))
    assert kls[1] < 0.05 * kls[0]


def test_target_kl_takes_fewer_steps():
    algorithm, config, state = ring_ppo(num_epochs=10, learning_rate=2.0, target_kl=0.02)
    _, info = jax.jit(algorithm.step)(state, config)
    assert 0 < float(info["minibatches_applied"]) < 1


def test_annealing_counts_updates():
    algorithm, config, state = ring_ppo(anneal_updates=4.0)
    step = jax.jit(algorithm.step)
    halfway = state._replace(update=jnp.int32(2))
    full = step(state, config.replace(anneal_updates=None, learning_rate=0.05))[0]
    np.testing.assert_allclose(
        step(halfway, config)[0].params["actor"], full.params["actor"], rtol=1e-6, atol=1e-7
    )
    over = step(state._replace(update=jnp.int32(9)), config)[0]
    np.testing.assert_array_equal(over.params["actor"], state.params["actor"])


def test_normalisers_lag_one_rollout():
    env = jaxpg.from_gymnax("Pendulum-v1", max_steps_in_episode=5)
    algorithm = jaxpg.ppo(env, jaxpg.mlp_policy(env, hidden_sizes=(4,)))
    config = jaxpg.PPOConfig(
        num_envs=4, num_steps=8, normalize_obs=True, normalize_rewards=True, num_minibatches=2
    )
    state = algorithm.init(jax.random.key(0), config)
    step = jax.jit(algorithm.step)
    after, info = step(state, config)
    assert float(state.statistics.obs.count) == 0 and float(after.statistics.obs.count) == 32
    # the ratio at unchanged parameters is 1: rollout and update used the same statistics
    frozen = config.replace(learning_rate=0.0)
    _, info = step(after, frozen)
    assert abs(float(info["approx_kl"])) < 1e-10


def solve(env, *, updates=60, policy=None, **settings):
    settings = {"num_envs": 32, "num_steps": 8, "learning_rate": 1e-2, "gamma": 0.9, **settings}
    config = jaxpg.PPOConfig(**settings)
    policy = jaxpg.mlp_policy(env, hidden_sizes=(16,)) if policy is None else policy
    algorithm = jaxpg.ppo(env, policy)

    @jax.jit
    def run(key):
        train_key, test_key = jax.random.split(key)
        state, _ = jaxpg.train(algorithm, train_key, config, updates)
        return state, jaxpg.evaluate(algorithm, state, test_key, num_episodes=32)

    state, returns = run(jax.random.key(0))
    return policy, state, float(returns.mean())


def value(policy, state, obs):
    return np.asarray(policy.apply(state.params, jnp.asarray(obs, jnp.float32))[1])


@pytest.mark.parametrize(
    ("probe", "obs", "values"),
    [
        (probes.constant_reward, [[0.0]], [1.0]),
        (probes.observation_reward, [[-1.0], [1.0]], [-1.0, 1.0]),
        (probes.delayed_reward, [[0.0], [1.0]], [0.9, 1.0]),
        # only truncated, never terminated: a wrong bootstrap would give Σ γ^t over 5 steps at most
        (probes.time_limit_only, [[0.0]], [10.0]),
    ],
    ids=["constant", "observation", "delayed", "time-limit"],
)
def test_the_critic_learns_known_values(probe, obs, values):
    longer = {"updates": 250, "gae_lambda": 0.95} if probe is probes.time_limit_only else {}
    policy, state, _ = solve(probe(), **longer)
    np.testing.assert_allclose(value(policy, state, obs), values, atol=0.1 * max(map(abs, values)))


@pytest.mark.parametrize(
    ("probe", "best"),
    [
        (probes.action_reward, 1.0),
        (probes.observation_action_reward, 1.0),
        (probes.multi_discrete, 1.0),
        (probes.action_mask, 5 / 3),
        (probes.continuous_action, 0.0),
    ],
    ids=["action", "observation-action", "multi-discrete", "action-mask", "continuous"],
)
def test_the_policy_finds_the_best_action(probe, best):
    env = probe()
    _, _, greedy = solve(env)
    # the mask's best is an average over which action is forbidden, and 32 episodes sample it
    slack = 0.2 if probe is probes.action_mask else 0.02
    assert greedy > best - slack


def test_memory_needs_the_recurrent_policy():
    env = probes.memory()
    recurrent = jaxpg.gru_policy(env, hidden_size=16, embed_sizes=())
    _, _, remembered = solve(env, policy=recurrent, updates=80)
    _, _, guessed = solve(env, updates=80)
    assert remembered > 0.9 and guessed < 0.6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_minibatches": 3},
            "num_minibatches=3 does not divide num_envs × num_steps=32",
        ),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"gae_lambda": 1.01}, r"gae_lambda must lie in \[0, 1\], got 1.01"),
        ({"normalize_advantages": "bath"}, "did you mean batch"),
        ({"kl_target": 0.1}, "kl_coef"),
        ({"num_epochs": 0}, "num_epochs must be at least 1, got 0"),
    ],
)
def test_bad_settings_raise_in_init(changes, message):
    with pytest.raises(ValueError, match=message):
        ring_ppo(**changes)


def test_a_recurrent_policy_divides_environments():
    env = probes.memory()
    algorithm = jaxpg.ppo(env, jaxpg.gru_policy(env, hidden_size=4))
    with pytest.raises(ValueError, match="num_minibatches=4 does not divide num_envs=6"):
        algorithm.init(jax.random.key(0), jaxpg.PPOConfig(num_envs=6, num_steps=8))
