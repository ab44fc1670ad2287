"""Actor-critic: whole updates against gradients written out in NumPy, then learning."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import probe_environments as probes
import pytest
from tabular import REWARDS, ring, softmax, table_policy

from jaxpg.algorithms.actor_critic import ActorCriticConfig, actor_critic, expected_value
from jaxpg.algorithms.common import collect, current
from jaxpg.distributions import diagonal_gaussian
from jaxpg.environments import from_gymnax
from jaxpg.evaluation import evaluate
from jaxpg.policies import gru_policy, mlp_policy
from jaxpg.training import train
from jaxpg.types import split_key

SMALL = {"num_envs": 6, "num_steps": 7, "gamma": 0.9, "max_grad_norm": None}


def sgd(config):
    """Steps that can be read off: the change is minus learning_rate times the gradient."""
    return optax.sgd(config.learning_rate)


def forward_target(rows, next_values, t, b, *, gamma, n=None, lambda_=None):
    """G[t] as a sum over rewards (n-step), or a weighted sum of those (λ-return)."""
    end = t
    num_steps = rows.reward.shape[0]
    while end < num_steps - 1 and not (rows.terminated[end, b] or rows.truncated[end, b]):
        end += 1

    def n_step(n):
        last = min(t + n - 1, end)
        total = sum(gamma ** (k - t) * float(rows.reward[k, b]) for k in range(t, last + 1))
        if not rows.terminated[last, b]:
            total += gamma ** (last + 1 - t) * float(next_values[last, b])
        return total

    if n is not None:
        return n_step(n)
    horizon = end - t + 1
    weighted = sum((1 - lambda_) * lambda_ ** (m - 1) * n_step(m) for m in range(1, horizon))
    return weighted + lambda_ ** (horizon - 1) * n_step(horizon)


def expected_gradients(params, rows, targets, config):
    """∂L/∂actor and ∂L/∂critic of the whole batch, row by row."""
    actor, critic = np.asarray(params["actor"], np.float64), np.asarray(params["critic"])
    grads = {"actor": np.zeros_like(actor), "critic": np.zeros_like(critic, dtype=np.float64)}
    places = np.argmax(rows.obs, axis=-1)
    p = softmax(actor)
    by_action = critic.ndim == 2
    state_value = (p * critic).sum(-1) if by_action else critic
    advantages = np.zeros(places.shape)
    for t, b in np.ndindex(places.shape):
        s, a = places[t, b], rows.action[t, b]
        advantages[t, b] = (critic[s, a] if by_action else targets[t, b]) - state_value[s]
    if config.normalize_advantages:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    for t, b in np.ndindex(places.shape):
        s, a = places[t, b], rows.action[t, b]
        score = np.eye(3)[a] - p[s]
        grads["actor"][s] -= advantages[t, b] * score
        log_p = np.log(p[s])
        entropy = -(p[s] * log_p).sum()
        grads["actor"][s] -= config.ent_coef * -p[s] * (log_p + entropy)
        at = (s, a) if by_action else (s,)
        grads["critic"][at] += config.vf_coef * (critic[at] - targets[t, b])
    return {name: grad / places.size for name, grad in grads.items()}


@pytest.mark.parametrize(
    ("settings", "target"),
    [
        ({"advantage": "td"}, {"n": 1}),
        ({"advantage": "n_step", "n_step": 3}, {"n": 3}),
        ({"advantage": "gae", "gae_lambda": 0.7}, {"lambda_": 0.7}),
        ({"advantage": "gae", "normalize_advantages": True}, {"n": 99}),
        ({"advantage": "action_value", "gae_lambda": 0.0}, {"n": 1}),
        ({"advantage": "action_value", "gae_lambda": 0.7}, {"lambda_": 0.7}),
    ],
    ids=lambda x: "-".join(str(v) for v in x.values()),
)
def test_one_update_is_the_gradient_written_out(settings, target):
    by_action = settings["advantage"] == "action_value"
    env, policy = ring(), table_policy(action_values=by_action)
    config = ActorCriticConfig(**SMALL, **settings, learning_rate=0.3, ent_coef=0.05)
    algorithm = actor_critic(env, policy, sgd)
    state = jax.jit(algorithm.init)(jax.random.key(1), config)
    after, info = jax.jit(algorithm.step)(state, config)

    # the same rollout, by the same key
    key = split_key(state.key, "next", "rollout", "optimize")["rollout"]
    valued = expected_value(policy) if by_action else policy
    data = collect(key, env, valued, state, current(config, state.update))
    rows, next_values = jax.tree.map(np.asarray, (data.rows, data.next_values))
    assert rows.terminated.any() and (rows.truncated & ~rows.terminated).any()
    if by_action:
        table = (softmax(np.asarray(state.params["actor"])) * state.params["critic"]).sum(-1)
        np.testing.assert_allclose(rows.value, rows.obs @ table, atol=1e-5)
    targets = np.zeros(rows.reward.shape)
    for t, b in np.ndindex(targets.shape):
        targets[t, b] = forward_target(rows, next_values, t, b, gamma=0.9, **target)
    expected = expected_gradients(state.params, rows, targets, config)
    for name, grad in expected.items():
        change = np.asarray(after.params[name]) - np.asarray(state.params[name])
        np.testing.assert_allclose(change, -0.3 * grad, atol=2e-6, err_msg=name)
    assert float(info["approx_kl"]) == pytest.approx(0.0, abs=1e-6)
    norm = np.sqrt(sum((grad**2).sum() for grad in expected.values()))
    np.testing.assert_allclose(info["grad_norm"], norm, rtol=1e-4)


def test_minibatches_are_groups_of_environments():
    """Two half-batches in turn, on parameters that hardly move, sum to the whole gradient."""
    env, policy = ring(), table_policy()
    whole = ActorCriticConfig(**SMALL, learning_rate=1e-3)
    halves = whole.replace(num_minibatches=2)
    algorithm = actor_critic(env, policy, sgd)
    state = jax.jit(algorithm.init)(jax.random.key(1), whole)
    step = jax.jit(algorithm.step)
    (one, _), (two, info) = step(state, whole), step(state, halves)
    change = jax.tree.map(lambda new, old: new - old, (one.params, two.params), (state.params,) * 2)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(y, 2 * x, atol=1e-5), *change)
    assert float(info["approx_kl"]) > 0  # the second half sees a policy that has moved


def test_action_values_under_a_recurrent_policy():
    """`expected_value` keeps the carry; the update runs and is finite."""
    env = ring()
    base = table_policy(action_values=True)

    def apply(params, carry, obs, reset):
        carry = jnp.where(reset[:, None], 0.0, carry) + 1.0
        return carry, base.apply(params, obs + 0.0 * carry)

    policy = base._replace(
        init=base.init,
        apply=apply,
        initial_carry=lambda n: jnp.zeros((n, 1)),
    )
    config = ActorCriticConfig(**SMALL, advantage="action_value", learning_rate=0.3)

    def one_update(chosen):
        algorithm = actor_critic(env, chosen, sgd)
        return jax.jit(lambda key: algorithm.step(algorithm.init(key, config), config))

    state, info = one_update(policy)(jax.random.key(1))
    plain, expected = one_update(base)(jax.random.key(1))
    for name in ("policy_loss", "value_loss", "grad_norm"):
        np.testing.assert_allclose(info[name], expected[name], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(state.params["actor"], plain.params["actor"], atol=1e-6)


def test_recurrent_policy_replays_from_its_stored_carry():
    """At unchanged parameters the replayed log-probabilities are those of the rollout."""
    env = from_gymnax("CartPole-v1", max_steps_in_episode=5)
    algorithm = actor_critic(env, gru_policy(env, hidden_size=8, embed_sizes=(8,)), sgd)
    config = ActorCriticConfig(num_envs=4, num_steps=6, num_minibatches=2, learning_rate=0.0)
    step = jax.jit(algorithm.step)
    state = algorithm.init(jax.random.key(0), config)
    for _ in range(2):  # the second rollout starts inside of episodes
        state, info = step(state, config)
        assert abs(float(info["approx_kl"])) < 1e-9


@pytest.mark.parametrize("settings", [{"advantage": "td"}, {"advantage": "n_step"}, {}])
def test_continuous_actions_update_every_parameter(settings):
    env = from_gymnax("Pendulum-v1", max_steps_in_episode=5)
    policy = mlp_policy(env, hidden_sizes=(8,), shared=True)
    assert policy.distribution is diagonal_gaussian
    algorithm = actor_critic(env, policy)
    config = ActorCriticConfig(num_envs=4, ent_coef=0.01, **settings)
    state = algorithm.init(jax.random.key(0), config)
    after, info = jax.jit(algorithm.step)(state, config)
    moved = jax.tree.map(lambda x, y: bool(np.any(x != y)), state.params, after.params)
    assert all(jax.tree.leaves(moved)), moved
    assert all(np.isfinite(x) for x in info.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": "tde"}, "unknown advantage 'tde': did you mean td"),
        ({"n_step": 0}, "n_step must be at least 1, got 0"),
        ({"num_minibatches": 4}, "num_minibatches=4 does not divide num_envs=6"),
        ({"num_epochs": 0}, "num_epochs"),
        ({"gae_lambda": 1.5}, r"gae_lambda must lie in \[0, 1\], got 1.5"),
        ({"vf_coef": -1.0}, "vf_coef"),
        ({"advantage": "action_value"}, r"needs a critic with values \(6, 3\), got \(6,\)"),
    ],
)
def test_bad_settings_raise_in_init(settings, message):
    algorithm = actor_critic(ring(), table_policy())
    with pytest.raises(ValueError, match=message):
        algorithm.init(jax.random.key(0), ActorCriticConfig(**SMALL, **settings))


def test_critics_of_the_wrong_kind_raise_in_init():
    config = ActorCriticConfig(**SMALL)
    algorithm = actor_critic(ring(), table_policy(action_values=True))
    with pytest.raises(ValueError, match=r"values \(6,\), got \(6, 3\)"):
        algorithm.init(jax.random.key(0), config)
    pendulum = from_gymnax("Pendulum-v1")
    algorithm = actor_critic(pendulum, mlp_policy(pendulum))
    with pytest.raises(ValueError, match="Discrete"):
        algorithm.init(jax.random.key(0), config.replace(advantage="action_value"))


def test_learns_the_best_plan_around_the_ring():
    """Value iteration says which action is best in each of the three states."""
    algorithm = actor_critic(ring(), table_policy())
    config = ActorCriticConfig(gamma=0.9, advantage="td", learning_rate=0.03, ent_coef=0.2)
    run = jax.jit(jax.vmap(lambda key: train(algorithm, key, config, 200)))
    states, infos = run(jax.random.split(jax.random.key(0), 3))
    logits = np.asarray(states.params["actor"])
    np.testing.assert_array_equal(np.argmax(logits[:, :3], -1), [optimal_actions(0.9)] * 3)
    mean = np.asarray(infos["episode_return_sum"] / infos["episode_count"])
    assert np.all(mean[:, -20:].mean(1) > mean[:, :5].mean(1) + 1.0)


def test_action_values_learn_the_rewards_of_a_bandit():
    """Without a future Q(s, a) is the reward; the policy leans towards the larger ones."""
    algorithm = actor_critic(ring(), table_policy(action_values=True))
    config = ActorCriticConfig(
        gamma=0.0, advantage="action_value", learning_rate=0.03, ent_coef=0.5, max_grad_norm=None
    )
    run = jax.jit(jax.vmap(lambda key: train(algorithm, key, config, 300)[0].params))
    params = run(jax.random.split(jax.random.key(0), 3))
    policy = softmax(np.asarray(params["actor"])[:, :3])
    often = policy > 0.1  # a rare action is learned slowly
    error = np.abs(np.asarray(params["critic"])[:, :3] - REWARDS[:3])
    assert np.all(error[often] < 0.02), error
    np.testing.assert_array_equal(np.argmax(policy, -1), [[2, 1, 2]] * 3)


@pytest.mark.parametrize(
    ("probe", "settings", "best"),
    [
        (probes.multi_discrete, {}, 1.0),
        (probes.continuous_action, {"normalize_rewards": True}, 0.0),
        # one of three actions is forbidden: on average (2 + 2 + 1) / 3
        (probes.action_mask, {"advantage": "action_value", "ent_coef": 0.01}, 5 / 3),
    ],
    ids=["multi-discrete", "continuous", "masked-action-values"],
)
def test_probes_are_solved(probe, settings, best):
    env = probe()
    by_action = "advantage" in settings
    policy = mlp_policy(env, hidden_sizes=(16,), shared=True, action_values=by_action)
    algorithm = actor_critic(env, policy)
    config = ActorCriticConfig(num_envs=32, num_steps=4, learning_rate=1e-2, **settings)

    @jax.jit
    def run(key):
        state, _ = train(algorithm, key, config, 200)
        greedy = evaluate(algorithm, state, key, num_episodes=200)
        return jnp.mean(greedy), jnp.min(greedy)

    mean, lowest = run(jax.random.key(0))
    assert float(mean) > best - (0.15 if by_action else 0.02)
    assert float(lowest) > -1.0  # no forbidden action, which pays -10


def test_a_recurrent_policy_remembers():
    """Without memory no policy earns more than 0 on this probe."""
    env = probes.memory()
    algorithm = actor_critic(env, gru_policy(env, hidden_size=8, embed_sizes=()))
    config = ActorCriticConfig(num_envs=32, num_steps=6, learning_rate=1e-2)

    @jax.jit
    def run(key):
        state, _ = train(algorithm, key, config, 150)
        return jnp.mean(evaluate(algorithm, state, key, num_episodes=64))

    assert float(run(jax.random.key(0))) > 0.9


def optimal_actions(gamma):
    """By value iteration, with time limits bootstrapped (they do not change what is best)."""
    value = np.zeros(4)
    for _ in range(200):
        successor = np.array([[(s + a + 1) % 4 for a in range(3)] for s in range(3)])
        q = REWARDS[:3] + gamma * np.where(successor == 3, 0.0, value[successor])
        value[:3] = q.max(1)
    return np.argmax(q, 1)
