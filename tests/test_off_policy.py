"""Off-policy gradients: every correction as products and sums in NumPy, then learning."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import probe_environments as probes
import pytest
from tabular import ring, softmax, table_policy

from jaxpg.algorithms.actor_critic import ActorCriticConfig, actor_critic
from jaxpg.algorithms.common import collect, current
from jaxpg.algorithms.off_policy import (
    OffPolicyConfig,
    effective_sample_size,
    off_policy,
    two_policies,
)
from jaxpg.distributions import categorical
from jaxpg.environments import auto_reset
from jaxpg.evaluation import evaluate
from jaxpg.policies import gru_policy, mlp_policy
from jaxpg.training import train
from jaxpg.types import Box, Discrete, Policy, split_key

GAMMA = 0.9
SMALL = {"num_envs": 6, "num_steps": 7, "gamma": GAMMA, "learning_rate": 0.3}
OTHER = {
    "actor": np.array([[1.0, 0.0, 0.5], [0.0, 0.7, 0.0], [0.3, 0.0, 0.9], [0.0, 0.0, 0.0]]),
    "critic": np.full(4, np.nan),  # the critic of the behaviour policy has no say
}


def sgd(config):
    """Steps that can be read off: the change is minus learning_rate times the gradient."""
    return optax.sgd(config.learning_rate)


def behaviour():
    return table_policy(), jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), OTHER)


def collected(policy, given, state, config, actor):
    """The rollout of the update that comes after `state`, by the parameters `actor`."""
    pair = two_policies(policy, given)
    key = split_key(state.key, "next", "rollout", "optimize")["rollout"]
    params = (actor, state.params)
    now = current(config, state.update)
    data = collect(key, ring(), pair, state, now, params=params)
    return data.rows, data.next_values


@pytest.fixture(scope="module")
def rollout():
    """A state with episodes under way on the ring, and the rollout that comes next."""
    config = OffPolicyConfig(**SMALL)
    algorithm = off_policy(ring(), table_policy(), sgd, behaviour())
    begin = jax.jit(lambda key: algorithm.step(algorithm.init(key, config), config)[0])
    state = begin(jax.random.key(1))
    assert not state.runner.reset.all()
    gather = jax.jit(lambda s: collected(table_policy(), behaviour(), s, config, s.params))
    return state, *jax.tree.map(np.asarray, gather(state))


def segments(rows):
    """``(column, first row, last row)`` of every piece of an episode."""
    done = rows.terminated | rows.truncated
    found = []
    for b in range(done.shape[1]):
        start = 0
        for t in range(done.shape[0]):
            if done[t, b] or t == done.shape[0] - 1:
                found.append((b, start, t))
                start = t + 1
    return found


def expected(rows, next_values, ratios, config):
    """Weighted advantages, the critic's targets, and weights before clipping, ``[T, B]`` each."""
    shape = rows.reward.shape
    advantages, targets, weights = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    clip = np.inf if config.ratio_clip is None else config.ratio_clip
    for b, s, e in segments(rows):
        r, v, rho = (
            np.asarray(x[s : e + 1, b], np.float64) for x in (rows.reward, rows.value, ratios)
        )
        last = 0.0 if rows.terminated[e, b] else float(next_values[e, b])
        after = np.append(v[1:], last)
        n = e - s + 1
        unit = np.ones(n) if config.correction == "none" else rho
        c, rho_v = np.minimum(unit, config.c_clip), np.minimum(unit, config.rho_clip)
        delta = rho_v * (r + GAMMA * after - v)
        vs = np.array(
            [
                v[t]
                + sum(
                    (GAMMA * config.trace_lambda) ** (k - t) * c[t:k].prod() * delta[k]
                    for k in range(t, n)
                )
                for t in range(n)
            ]
        )
        targets[s : e + 1, b] = vs
        capped = np.minimum(rho, clip)
        for t in range(n):
            gained = sum(GAMMA ** (k - t) * r[k] for k in range(t, n)) + GAMMA ** (n - t) * last
            if config.correction in ("vtrace", "none"):
                pg = min(unit[t], config.pg_rho_clip)
                follow = vs[t + 1] if t + 1 < n else last
                advantages[s + t, b] = pg * (r[t] + GAMMA * follow - v[t])
                weights[s + t, b] = rho[t]
            elif config.correction == "trajectory":
                advantages[s + t, b] = capped.prod() * (gained - v[t])
                weights[s + t, b] = rho.prod()
            else:
                decided = sum(
                    GAMMA ** (k - t) * capped[t : k + 1].prod() * r[k] for k in range(t, n)
                )
                decided += GAMMA ** (n - t) * capped[t:].prod() * last
                advantages[s + t, b] = capped[:t].prod() * (decided - capped[t] * v[t])
                weights[s + t, b] = rho[: t + 1].prod()
    return advantages, targets, weights


@pytest.mark.parametrize(
    "settings",
    [
        {"correction": "vtrace"},
        {
            "correction": "vtrace",
            "trace_lambda": 0.7,
            "rho_clip": 1.3,
            "c_clip": 0.9,
            "pg_rho_clip": 2.0,
        },
        {"correction": "per_decision"},
        {"correction": "per_decision", "ratio_clip": 1.1},
        {"correction": "trajectory", "ent_coef": 0.1},
        {"correction": "none"},
    ],
    ids=lambda x: "-".join(str(v) for v in x.values()),
)
def test_an_update_is_the_sum_written_out(rollout, settings):
    state, rows, next_values = rollout
    config = OffPolicyConfig(**SMALL, **settings)
    algorithm = off_policy(ring(), table_policy(), sgd, behaviour())
    after, info = jax.jit(algorithm.step)(state, config)

    places, actions = np.argmax(rows.obs, axis=-1), rows.action
    actor = np.asarray(state.params["actor"], np.float64)
    p, q = softmax(actor), softmax(OTHER["actor"])
    ratios = p[places, actions] / q[places, actions]
    assert (rows.truncated & ~rows.terminated).any() and not rows.reset[0].all()
    advantages, targets, weights = expected(rows, next_values, ratios, config)
    change = {"actor": np.zeros((4, 3)), "critic": np.zeros(4)}
    for t, b in np.ndindex(places.shape):
        s, a = places[t, b], actions[t, b]
        change["actor"][s] += advantages[t, b] * (np.eye(3)[a] - p[s])
        log_p = np.log(p[s])
        change["actor"][s] += config.ent_coef * -p[s] * (log_p - (p[s] * log_p).sum())
        change["critic"][s] -= config.vf_coef * (state.params["critic"][s] - targets[t, b])
    for name, sums in change.items():
        found = np.asarray(after.params[name] - state.params[name])
        np.testing.assert_allclose(found, 0.3 * sums / places.size, atol=3e-6, err_msg=name)
    size = weights.sum() ** 2 / (weights**2).sum() / weights.size
    np.testing.assert_allclose(info["ess"], size, rtol=1e-5)
    np.testing.assert_allclose(info["ratio_mean"], ratios.mean(), rtol=1e-5)
    np.testing.assert_allclose(info["ratio_max"], ratios.max(), rtol=1e-5)
    k3 = ratios - 1 - np.log(ratios)
    np.testing.assert_allclose(info["approx_kl"], k3.mean(), rtol=1e-4)


def test_without_lag_every_correction_is_the_actor_critic():
    env, policy = ring(), table_policy()
    on_policy = actor_critic(env, policy, sgd)
    config = ActorCriticConfig(**SMALL, advantage="gae", gae_lambda=1.0, ent_coef=0.1)
    first = jax.jit(on_policy.init)(jax.random.key(3), config)
    wanted, _ = jax.jit(on_policy.step)(first, config)
    assert float(jnp.abs(wanted.params["actor"] - first.params["actor"]).max()) > 0.01
    algorithm = off_policy(env, policy, sgd)
    for correction in ("vtrace", "per_decision", "trajectory", "none"):
        config = OffPolicyConfig(**SMALL, lag=0, ent_coef=0.1, correction=correction)
        assert jax.eval_shape(algorithm.init, jax.random.key(3), config).extra == ()
        after, info = jax.jit(algorithm.step)(first, config)
        for name, x in wanted.params.items():
            np.testing.assert_allclose(after.params[name], x, atol=2e-6, err_msg=correction)
        assert float(info["ess"]) == pytest.approx(1.0, abs=1e-5)
        assert float(info["ratio_max"]) == pytest.approx(1.0, abs=1e-5)
        assert float(info["approx_kl"]) == pytest.approx(0.0, abs=1e-6)


def test_the_policy_that_acts_is_the_one_of_lag_updates_ago():
    env, policy = ring(), table_policy()
    config = OffPolicyConfig(**SMALL, lag=3)
    algorithm = off_policy(env, policy, sgd)
    step = jax.jit(algorithm.step)
    gather = jax.jit(lambda s, actor: collected(policy, None, s, config, actor)[0])
    states, infos = [jax.jit(algorithm.init)(jax.random.key(0), config)], []
    for _ in range(8):
        state, info = step(states[-1], config)
        states.append(state)
        infos.append(info)
    assert float(infos[0]["ess"]) == pytest.approx(1.0, abs=1e-5)  # nothing older than the first
    for update in (1, 2, 3, 7):
        now, old = states[update].params, states[max(update - 3, 0)].params
        rows = jax.tree.map(np.asarray, gather(states[update], old))
        p, q = (softmax(np.asarray(x["actor"], np.float64)) for x in (now, old))
        places = np.argmax(rows.obs, axis=-1)
        ratios = p[places, rows.action] / q[places, rows.action]
        assert ratios.max() > 1.001
        np.testing.assert_allclose(infos[update]["ratio_max"], ratios.max(), rtol=1e-5)
        size = ratios.sum() ** 2 / (ratios**2).sum() / ratios.size
        np.testing.assert_allclose(infos[update]["ess"], size, rtol=1e-5)


def test_effective_sample_size():
    assert float(effective_sample_size(jnp.zeros((3, 4)))) == pytest.approx(1.0)
    weights = np.array([1.0, 2.0, 3.0, 0.5])
    expected = weights.sum() ** 2 / (weights**2).sum() / 4
    found = effective_sample_size(jnp.log(weights) + 300.0)  # exp would overflow
    assert float(found) == pytest.approx(expected, rel=1e-5)
    assert float(effective_sample_size(jnp.array([0.0, -80.0, -90.0]))) == pytest.approx(1 / 3)


def test_importance_weights_make_the_gradient_of_another_policys_data_right_in_expectation():
    means, logits, n = np.array([1.0, 3.0]), np.array([0.4, -0.2]), 50_000
    other = np.array([0.75, 0.25])
    pi = softmax(logits)
    truth = pi * (means - pi @ means)

    def step(key, state, action):
        return state, jnp.ones(1), jnp.asarray(means)[action] + jax.random.normal(key), True, False

    bandit = auto_reset(
        lambda key: ((), jnp.ones(1)),
        step,
        observation_space=Box(1.0, 1.0, (1,)),
        action_space=Discrete(2),
        time_limit=1,
    )
    policy = Policy(
        init=lambda key, obs: jnp.asarray(logits, jnp.float32),
        apply=lambda theta, obs: (jnp.tile(theta, (len(obs), 1)), jnp.full(len(obs), 2.0)),
        distribution=categorical,
    )
    given = lambda obs: jnp.tile(jnp.log(jnp.asarray(other)), (len(obs), 1))  # noqa: E731
    algorithm = off_policy(bandit, policy, sgd, given)
    config = OffPolicyConfig(num_envs=n, num_steps=1, learning_rate=1.0)
    state = jax.jit(algorithm.init)(jax.random.key(7), config)
    ratios = pi / other
    square = other @ (
        ((means - 2.0) ** 2 + 1.0)[:, None] * (ratios[:, None] * (np.eye(2) - pi)) ** 2
    )
    error = np.sqrt((square - truth**2) / n)
    assert np.all(4 * error < 0.1 * np.abs(truth))  # else it proves little
    for correction, right in (("trajectory", True), ("none", False)):
        after, info = jax.jit(algorithm.step)(state, config.replace(correction=correction))
        off = np.abs(np.asarray(after.params) - logits - truth)
        assert np.all(off < 4 * error) == right, correction
        size = (other @ ratios) ** 2 / (other @ ratios**2)
        assert float(info["ess"]) == pytest.approx(size, rel=0.02)


def test_settings_that_cannot_work_are_refused():
    env, policy = ring(), table_policy()
    algorithm, key = off_policy(env, policy), jax.random.key(0)
    for changes, message in (
        ({"lag": -1}, "lag must be at least 0, got -1"),
        ({"correction": "v_trace"}, "did you mean vtrace"),
        ({"trace_lambda": 1.5}, r"trace_lambda must lie in \[0, 1\], got 1.5"),
        ({"rho_clip": 0.0}, "rho_clip must lie"),
        ({"ratio_clip": -1.0}, "ratio_clip must lie"),
        ({"vf_coef": -1.0}, "vf_coef must lie"),
    ):
        with pytest.raises(ValueError, match=message):
            algorithm.init(key, OffPolicyConfig(**changes))
    with pytest.raises(TypeError, match=r"behaviour must be \(policy, params\)"):
        off_policy(env, policy, behaviour=policy)
    cue = probes.memory()
    with pytest.raises(ValueError, match="off_policy needs a feed-forward policy"):
        off_policy(cue, gru_policy(cue)).init(key, OffPolicyConfig())


def uniform(obs):
    """Any allowed action: logits for `probes.action_mask`."""
    return jnp.where(obs["action_mask"], 0.0, -jnp.inf)


@pytest.mark.parametrize(
    ("env", "given", "settings", "at_least"),
    [
        (probes.observation_action_reward, None, {"lag": 4}, 0.95),
        (probes.continuous_action, None, {"lag": 2, "correction": "trajectory"}, -0.05),
        (probes.multi_discrete, None, {"lag": 2, "correction": "per_decision"}, 0.95),
        (probes.action_mask, uniform, {"normalize_obs": True}, 1.4),  # 5/3 is the best
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_it_learns_what_to_do(env, given, settings, at_least):
    env = env()
    algorithm = off_policy(env, mlp_policy(env, hidden_sizes=(16,)), behaviour=given)
    config = OffPolicyConfig(**{"num_envs": 64, "num_steps": 2, "learning_rate": 0.02, **settings})

    @jax.jit
    def run(key):
        state, infos = train(algorithm, key, config, 200)
        return evaluate(algorithm, state, key, num_episodes=256), infos

    returns, infos = run(jax.random.key(0))
    assert float(returns.mean()) > at_least
    assert 0 < float(infos["ess"].min()) <= float(infos["ess"].max()) <= 1 + 1e-5
