"""REINFORCE: whole updates against sums written out in NumPy, then learning."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import probe_environments as probes
import pytest
from tabular import ring, softmax, table_policy

from jaxpg.algorithms.common import collect, current
from jaxpg.algorithms.reinforce import ReinforceConfig, episode_returns, live_steps, reinforce
from jaxpg.distributions import categorical
from jaxpg.environments import auto_reset
from jaxpg.policies import gru_policy, mlp_policy
from jaxpg.rollouts import init_runner
from jaxpg.training import train
from jaxpg.types import Box, Discrete, Policy, Transition, split_key

GAMMA = 0.9
# 4 steps are the ring's limit: 7 end in the middle of some second episodes
SMALL = {"num_envs": 6, "num_steps": 7, "gamma": GAMMA, "learning_rate": 0.3}


def sgd(config):
    """Steps that can be read off: the change is minus learning_rate times the gradient."""
    return optax.sgd(config.learning_rate)


@pytest.fixture(scope="module")
def rollout():
    """A state on the ring, and the rollout that the first update makes from it, settings apart."""
    env, policy, config = ring(), table_policy(), ReinforceConfig(**SMALL)

    @jax.jit
    def begin(key):
        state = reinforce(env, policy, sgd).init(key, config)
        keys = split_key(state.key, "next", "reset", "rollout", "optimize")
        runner = init_runner(keys["reset"], env, policy, config.num_envs)
        now = current(config, state.update)
        data = collect(keys["rollout"], env, policy, state, now, runner=runner)
        return state, data.rows, data.next_values

    state, rows, next_values = begin(jax.random.key(1))
    return state, jax.tree.map(np.asarray, rows), np.asarray(next_values)


def one_update(state, config):
    """The state after an update, and its info."""
    return jax.jit(reinforce(ring(), table_policy(), sgd).step)(state, config)


def episodes_of(rows, config):
    """``(column, first row, last row, whether it ended)`` of the episodes that are used."""
    done = rows.terminated | rows.truncated
    found = []
    for b in range(done.shape[1]):
        start = 0
        for t in range(done.shape[0]):
            if done[t, b] or t == done.shape[0] - 1:
                used = done[t, b] or config.bootstrap
                if used and (config.episodes == "all" or start == 0):
                    found.append((b, start, t))
                start = t + 1
    return found


def expected_terms(state, rows, next_values, config):
    """Per used row: ``(time, place, action, advantage, return)``, and the number of episodes."""
    episodes = episodes_of(rows, config)
    power = {"to_go": GAMMA, "total": 1.0, "discounted_total": GAMMA}[config.returns]
    terms = []
    for b, start, end in episodes:
        rewards = rows.reward[start : end + 1, b]
        tail = 0.0
        if config.bootstrap and not rows.terminated[end, b]:
            tail = next_values[end, b]
        for t in range(start, end + 1):
            first = t if config.returns == "to_go" else start
            value = sum(power ** (k - first) * rewards[k - start] for k in range(first, end + 1))
            value += GAMMA ** (end + 1 - t) * tail
            terms.append([t, t - start, np.argmax(rows.obs[t, b]), rows.action[t, b], value])
    returns = np.array([x[-1] for x in terms])
    whole = config.returns != "to_go"
    firsts = np.array([x[1] == 0 for x in terms])
    baseline = 0.0
    if config.baseline == "mean":
        baseline = returns[firsts].mean() if whole else returns.mean()
    elif config.baseline == "value":
        baseline = np.array([state.params["critic"][x[2]] for x in terms])
    advantages = returns - baseline
    if config.normalize_advantages:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    if config.discount_gradient:
        advantages = advantages * GAMMA ** np.array([x[1] for x in terms])
    rows_out = [
        (x[0], x[2], x[3], a, g) for x, a, g in zip(terms, advantages, returns, strict=True)
    ]
    return rows_out, len(episodes)


def descend(params, terms, config, scale):
    """One step of gradient descent on the sum over `terms`, times `scale`, in place."""
    actor, critic = params["actor"].copy(), params["critic"].copy()
    p = softmax(actor)
    for _, s, a, advantage, target in terms:
        params["actor"][s] += config.learning_rate * scale * advantage * (np.eye(3)[a] - p[s])
        log_p = np.log(p[s])
        slope = -p[s] * (log_p - (p[s] * log_p).sum())
        params["actor"][s] += config.learning_rate * scale * config.ent_coef * slope
        if config.baseline == "value":
            error = critic[s] - target
            params["critic"][s] -= config.learning_rate * scale * config.vf_coef * error


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"form": "sequential"},
        {"returns": "total", "baseline": "mean"},
        {"returns": "discounted_total", "episodes": "first", "normalize_advantages": True},
        {"form": "sequential", "baseline": "mean", "ent_coef": 0.1},
        {"form": "sequential", "baseline": "value", "discount_gradient": True},
        {"baseline": "value", "bootstrap": True, "normalize_advantages": True, "ent_coef": 0.1},
    ],
    ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items()) or "plain",
)
def test_an_update_is_the_sum_written_out(rollout, settings):
    state, rows, next_values = rollout
    config = ReinforceConfig(**SMALL, **settings)
    after, info = one_update(state, config)
    terms, count = expected_terms(state, rows, next_values, config)
    assert 0 < len(terms) < rows.reward.size or config.bootstrap
    params = jax.tree.map(lambda x: np.array(x, np.float64), state.params)
    if config.form == "episode":
        descend(params, terms, config, 1 / count)
    else:
        for t in range(config.num_steps):
            descend(params, [x for x in terms if x[0] == t], config, 1 / count)
    for name, expected in params.items():
        np.testing.assert_allclose(after.params[name], expected, atol=3e-6, err_msg=name)
    assert float(info["live_steps"]) == len(terms)
    if config.form == "episode":  # a metric is a mean over live steps
        p = softmax(np.asarray(state.params["actor"], np.float64))
        logs = [-a * np.log(p[s, action]) for _, s, action, a, _ in terms]
        np.testing.assert_allclose(info["policy_loss"], np.mean(logs), rtol=1e-4)


def test_both_forms_take_the_same_step_as_the_learning_rate_vanishes(rollout):
    state, *_ = rollout
    changes = []
    for form in ("episode", "sequential"):
        config = ReinforceConfig(**SMALL | {"learning_rate": 1e-3}, form=form, baseline="mean")
        after, _ = one_update(state, config)
        changes.append(np.asarray(after.params["actor"] - state.params["actor"]) / 1e-3)
    # second order in the learning rate
    np.testing.assert_allclose(*changes, atol=2e-2 * np.abs(changes[0]).max())


def rows_of(rewards, terminated, truncated=None):
    rewards = jnp.asarray(rewards, jnp.float32)[:, None]
    terminated = jnp.asarray(terminated, bool)[:, None]
    truncated = jnp.zeros_like(terminated) if truncated is None else jnp.asarray(truncated)[:, None]
    done = terminated | truncated
    reset = jnp.concatenate([jnp.ones((1, 1), bool), done[:-1]])
    empty = jnp.zeros_like(rewards)
    return Transition(empty, empty, empty, empty, empty, rewards, terminated, truncated, reset)


def test_returns_stop_at_episode_ends_and_unfinished_episodes_are_masked():
    config = ReinforceConfig(gamma=1.0)
    rows = rows_of([1, 1, 1, 1], [0, 1, 0, 1])
    assert episode_returns(rows, None, config)[:, 0].tolist() == [2, 1, 2, 1]
    assert live_steps(rows, config)[:, 0].tolist() == [True] * 4
    total = episode_returns(rows, None, config.replace(returns="total"))
    assert total[:, 0].tolist() == [2, 2, 2, 2]

    rows = rows_of([1, 1, 1, 1], [0, 1, 0, 0])
    assert live_steps(rows, config)[:, 0].tolist() == [True, True, False, False]
    assert live_steps(rows, config.replace(bootstrap=True))[:, 0].all()
    # a time limit ends an episode too: its return counts as it stands, or bootstraps by option
    rows = rows_of([1, 1, 1, 1], [0, 0, 0, 0], [False, True, False, False])
    assert live_steps(rows, config)[:, 0].tolist() == [True, True, False, False]
    assert episode_returns(rows, None, config)[:2, 0].tolist() == [2, 1]
    assert episode_returns(rows, jnp.full((4, 1), 10.0), config)[:, 0].tolist() == [12, 11, 12, 11]
    first = config.replace(episodes="first", bootstrap=True)
    assert live_steps(rows, first)[:, 0].tolist() == [True, True, False, False]


def test_moving_average_compares_a_batch_with_those_before_it(rollout):
    state, rows, next_values = rollout
    config = ReinforceConfig(**SMALL, baseline="ema", ema_decay=0.75)
    init = reinforce(ring(), table_policy(), sgd).init
    first = jax.jit(init)(jax.random.key(1), config)
    assert [float(x) for x in first.extra] == [0.0, 0.0]
    after, _ = one_update(first, config)
    terms, _ = expected_terms(state, rows, next_values, config)
    returns = [x[-1] for x in terms]
    np.testing.assert_allclose(after.extra, [0.25 * np.mean(returns), 1.0], rtol=1e-5)
    # nothing to compare the first batch with: no baseline
    params = jax.tree.map(lambda x: np.array(x, np.float64), state.params)
    descend(params, terms, config, 1 / len(episodes_of(rows, config)))
    np.testing.assert_allclose(after.params["actor"], params["actor"], atol=3e-6)


def test_time_steps_without_a_running_episode_take_no_step():
    """Adam would go on by its momentum: 8 rows of first episodes must equal their 4."""
    states = []
    for num_steps in (None, 8):
        config = ReinforceConfig(
            num_envs=6, num_steps=num_steps, form="sequential", episodes="first", learning_rate=0.1
        )
        algorithm = reinforce(ring(), table_policy())
        update = jax.jit(lambda key, a=algorithm, c=config: a.step(a.init(key, c), c)[0])
        states.append(update(jax.random.key(1)))
    counts = [int(state.opt_state[1][0].count) for state in states]
    assert counts[0] == counts[1] <= 4
    np.testing.assert_array_equal(states[0].params["actor"], states[1].params["actor"])


def bandit(means):
    """One step; arm a pays a normal number around ``means[a]``."""

    def step(key, state, action):
        reward = jnp.asarray(means)[action] + jax.random.normal(key)
        return state, jnp.ones(1), reward, True, False

    return auto_reset(
        lambda key: ((), jnp.ones(1)),
        step,
        observation_space=Box(1.0, 1.0, (1,)),
        action_space=Discrete(len(means)),
        time_limit=1,
    )


def test_two_armed_bandit_matches_the_analytic_gradient_in_expectation():
    means, logits, n = np.array([1.0, 3.0]), np.array([0.4, -0.2]), 50_000
    value = 1.5
    pi = softmax(logits)
    truth = pi * (means - pi @ means)
    policy = Policy(
        init=lambda key, obs: jnp.asarray(logits, jnp.float32),
        apply=lambda theta, obs: (jnp.tile(theta, (len(obs), 1)), jnp.full(len(obs), value)),
        distribution=categorical,
    )
    algorithm = reinforce(bandit(means), policy, sgd)
    errors = {}
    config = ReinforceConfig(num_envs=n, learning_rate=1.0)
    state = jax.jit(algorithm.init)(jax.random.key(7), config)
    for baseline, b in (("none", 0.0), ("mean", pi @ means), ("value", value)):
        after, info = jax.jit(algorithm.step)(state, config.replace(baseline=baseline))
        estimate = np.asarray(after.params) - logits
        # E[(r − b)² (1{a=i} − π_i)²] − ∇², with the noise of the reward
        score = np.eye(2) - pi
        square = pi @ (((means - b) ** 2 + 1.0)[:, None] * score**2)
        errors[baseline] = np.sqrt((square - truth**2) / n)
        assert np.all(np.abs(estimate - truth) < 4 * errors[baseline]), baseline
        assert np.all(4 * errors[baseline] < 0.1 * np.abs(truth))  # else it proves little
        assert float(info["live_steps"]) == float(info["episode_count"]) == n
    assert np.all(errors["mean"] < errors["none"])


def test_settings_that_cannot_work_are_refused():
    env, policy = ring(), table_policy()
    algorithm, key = reinforce(env, policy), jax.random.key(0)
    for changes, message in (
        ({"bootstrap": True}, "bootstrap needs baseline='value'"),
        ({"bootstrap": True, "baseline": "value", "returns": "total"}, "returns='to_go', got"),
        ({"discount_gradient": True, "returns": "total"}, "returns='total'"),
        ({"baseline": "average"}, "baseline 'average'"),
        ({"form": "online"}, "form 'online'"),
        ({"returns": "togo"}, "did you mean to_go"),
        ({"episodes": "last"}, "episodes 'last'"),
        ({"ema_decay": 1.0}, r"ema_decay must lie in \[0, 1\), got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            algorithm.init(key, ReinforceConfig(**changes))
    with pytest.raises(ValueError, match="'ring' has no time limit: give num_steps"):
        reinforce(env._replace(time_limit=None), policy).init(key, ReinforceConfig())
    cue = probes.memory()
    with pytest.raises(ValueError, match="reinforce needs a feed-forward policy"):
        reinforce(cue, gru_policy(cue)).init(key, ReinforceConfig())


def learn(env, num_updates, **settings):
    """Return per episode over the last tenth of a run, and its state."""
    algorithm = reinforce(env, mlp_policy(env, hidden_sizes=(16,)))
    config = ReinforceConfig(**{"num_envs": 32, "learning_rate": 0.02, **settings})
    run = jax.jit(train, static_argnums=(0, 3))
    state, infos = run(algorithm, jax.random.key(0), config, num_updates)
    late = jax.tree.map(lambda x: np.asarray(x[-(num_updates // 10) :]).sum(), infos)
    return late["episode_return_sum"] / late["episode_count"], state


@pytest.mark.parametrize(
    ("env", "settings", "at_least"),
    [
        (probes.action_reward, {"form": "sequential", "baseline": "ema"}, 0.95),
        (probes.observation_action_reward, {"baseline": "mean"}, 0.95),
        (probes.continuous_action, {"baseline": "value", "num_envs": 64}, -0.05),
        (probes.multi_discrete, {"normalize_advantages": True}, 0.95),
        (probes.action_mask, {"baseline": "value"}, 1.6),  # 5/3 is the best
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_it_learns_what_to_do(env, settings, at_least):
    reached, _ = learn(env(), 200, **settings)
    assert reached > at_least


def test_the_learned_baseline_is_the_value():
    # 1 for ever with γ = 0.8 is worth 5; what is left of 5 steps is worth 2.2 on average
    env = probes.time_limit_only()
    policy = mlp_policy(env, hidden_sizes=(16,))
    for bootstrap, value in (
        (True, 5.0),
        (False, np.mean([(1 - 0.8**k) / 0.2 for k in range(1, 6)])),
    ):
        settings = {"gamma": 0.8, "bootstrap": bootstrap, "max_grad_norm": None}
        _, state = learn(env, 400, baseline="value", **settings)
        found = policy.apply(state.params, jnp.zeros((1, 1)))[1]
        np.testing.assert_allclose(found, [value], atol=0.1)
