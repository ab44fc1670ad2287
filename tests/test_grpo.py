"""GRPO on environments: whole updates against sums written out in NumPy, then learning."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import probe_environments as probes
import pytest
from tabular import ring, softmax, table_policy

from jaxpg.algorithms.common import collect, current
from jaxpg.algorithms.grpo import GRPOConfig, first_episode_mask, grpo, relative_advantages
from jaxpg.policies import gru_policy, mlp_policy
from jaxpg.rollouts import init_runner
from jaxpg.training import train
from jaxpg.types import Transition, split_key

GAMMA = 0.9
SMALL = {
    "num_envs": 8,
    "group_size": 4,
    "num_steps": 6,  # the ring's episodes are 1 to 4 steps long
    "gamma": GAMMA,
    "learning_rate": 0.3,
    "num_epochs": 1,
    "num_minibatches": 1,
}


def sgd(config):
    """Steps that can be read off: the change is minus learning_rate times the gradient."""
    return optax.sgd(config.learning_rate)


def collected(env, policy, state, config):
    """The rollout of the update that comes after `state`."""
    keys = split_key(state.key, "next", "reset", "rollout", "optimize")
    size = config.group_size
    runner = init_runner(keys["reset"], env, policy, config.num_envs, group_size=size)
    now = current(config, state.update)
    return collect(keys["rollout"], env, policy, state, now, runner=runner).rows


@pytest.fixture(scope="module")
def rollout():
    """A state on the ring, and the rollout that the first update makes from it, settings apart."""
    env, policy, config = ring(), table_policy(), GRPOConfig(**SMALL)

    @jax.jit
    def begin(key):
        state = grpo(env, policy, sgd).init(key, config)
        return state, collected(env, policy, state, config)

    state, rows = begin(jax.random.key(1))
    return state, jax.tree.map(np.asarray, rows)


def lengths_of(rows):
    """Steps of the first episode of each column."""
    done = rows.terminated | rows.truncated
    return [int(np.argmax(column)) + 1 for column in done.T]


def expected_advantages(rows, config):
    """``{(t, b): advantage}`` of the rows that count, group by group."""
    lengths, size = lengths_of(rows), config.group_size
    returns = {}
    for b, length in enumerate(lengths):
        for t in range(length):
            rewards = rows.reward[t:length, b]
            returns[t, b] = sum(config.gamma**k * r for k, r in enumerate(rewards))
    advantages = {}
    for t, b in returns:
        group = range(b - b % size, b - b % size + size)
        at = t if config.form == "per_step" else 0
        scores = [returns[at, m] for m in group if (at, m) in returns]
        centred = returns[at, b] - np.mean(scores)
        spread = np.std(scores, ddof=1) + 1e-6 if config.normalize_std and len(scores) > 1 else 1.0
        advantages[t, b] = centred / spread
    return advantages


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"form": "per_step", "normalize_std": False},
        {"form": "per_step", "aggregation": "sequence", "minibatch_of": "groups"},
        {"aggregation": "sequence", "minibatch_of": "groups", "ent_coef": 0.1, "gamma": 1.0},
    ],
    ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items()) or "plain",
)
def test_an_update_is_the_sum_written_out(rollout, settings):
    state, rows = rollout
    config = GRPOConfig(**SMALL | settings)
    after, info = jax.jit(grpo(ring(), table_policy(), sgd).step)(state, config)

    # groups start together, and part
    places = np.argmax(rows.obs, axis=-1)
    assert all(len(set(places[0, g : g + 4])) == 1 for g in (0, 4))
    assert len({tuple(column) for column in places[:, :4].T}) == 4
    lengths = lengths_of(rows)
    assert len(set(lengths)) > 1 and max(lengths) < config.num_steps
    advantages = expected_advantages(rows, config)
    actor = np.asarray(state.params["actor"], np.float64)
    p, change = softmax(actor), np.zeros_like(actor)
    for (t, b), advantage in advantages.items():
        s, a = places[t, b], rows.action[t, b]
        weight = 1 / len(advantages)
        if config.aggregation == "sequence":
            weight = 1 / (len(lengths) * lengths[b])
        change[s] += weight * advantage * (np.eye(3)[a] - p[s])
        log_p = np.log(p[s])
        slope = -p[s] * (log_p - (p[s] * log_p).sum())
        change[s] += config.ent_coef / len(advantages) * slope
    found = np.asarray(after.params["actor"] - state.params["actor"])
    np.testing.assert_allclose(found, 0.3 * change, atol=2e-6)
    np.testing.assert_array_equal(after.params["critic"], state.params["critic"])
    assert float(info["live_steps"]) == sum(lengths) == len(advantages)
    assert float(info["env_steps"]) == rows.reward.size


def test_minibatches_add_up_to_the_whole(rollout):
    """Of samples or of groups, masked ones or not: on parameters that hardly move."""
    state, _ = rollout
    changes = {}
    for aggregation, parts in (
        ("token", (1, "samples")),
        ("token", (4, "samples")),
        ("sequence", (1, "groups")),
        ("sequence", (2, "groups")),
    ):
        count, kind = parts
        config = GRPOConfig(
            **SMALL | {"learning_rate": 1e-3, "num_minibatches": count},
            aggregation=aggregation,
            minibatch_of=kind,
        )
        after, info = jax.jit(grpo(ring(), table_policy(), sgd).step)(state, config)
        # each of the steps counts once
        change = np.asarray(after.params["actor"] - state.params["actor"]) / (1e-3 * count)
        whole = changes.setdefault(aggregation, change)
        np.testing.assert_allclose(change, whole, atol=1e-2 * np.abs(whole).max())
        entropy = changes.setdefault("entropy", float(info["entropy"]))
        np.testing.assert_allclose(info["entropy"], entropy, rtol=1e-3)


def rows_of(rewards, done):
    """Columns of a rollout from lists of rewards and of flags, a list a column."""
    reward, flags = jnp.asarray(rewards, jnp.float32).T, jnp.asarray(done, bool).T
    empty = jnp.zeros_like(reward)
    return Transition(empty, empty, empty, empty, empty, reward, flags, flags & False, flags)


def test_advantages_by_hand():
    # two groups of three; column 0 goes on with a second episode after its first
    rows = rows_of(
        [[1, 1, 9], [2, 0, 0], [1, 1, 4], [5, 0, 0], [5, 0, 0], [3, 2, 0]],
        [[0, 1, 1], [1, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 0], [0, 1, 0]],
    )
    live = first_episode_mask(rows)
    assert live.T.tolist() == [
        [True, True, False],
        [True, False, False],
        [True, True, True],
        [True, False, False],
        [True, False, False],
        [True, True, False],
    ]
    outcome = GRPOConfig(gamma=1.0, group_size=3, normalize_std=False)
    # returns 2, 2, 6 and 5, 5, 5: a group of identical returns learns nothing
    a, b = -4 / 3, 8 / 3
    expected = [[a, a, 0], [a, 0, 0], [b, b, b], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    found = relative_advantages(rows, live, outcome)
    np.testing.assert_allclose(found.T, expected, atol=1e-6)
    # at step 1 columns 0 and 2 run, with 1 and 5 to go; at step 2 column 2 alone, and column 5
    # was alone in its group from step 1 on
    per_step = outcome.replace(form="per_step")
    expected = [[a, -2, 0], [a, 0, 0], [b, 2, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    found = relative_advantages(rows, live, per_step)
    np.testing.assert_allclose(found.T, expected, atol=1e-6)
    scaled = relative_advantages(rows, live, per_step.replace(normalize_std=True))
    np.testing.assert_allclose(scaled[1], [-(0.5**0.5), 0, 0.5**0.5, 0, 0, 0], rtol=1e-5)


def test_groups_of_identical_returns_make_no_step():
    """Not even by the momentum that Adam has left from groups that differed."""
    env, policy = ring(), table_policy()
    equal = grpo(ring(0 * np.asarray(policy.init(jax.random.key(0), None)["actor"])), policy)
    config = GRPOConfig(**SMALL | {"num_epochs": 3, "num_minibatches": 2})
    state = jax.jit(equal.init)(jax.random.key(0), config)
    state, _ = jax.jit(grpo(env, policy).step)(state, config)
    after, info = jax.jit(equal.step)(state, config)
    assert float(jnp.abs(state.opt_state[1][0].mu["actor"]).max()) > 0
    jax.tree.map(np.testing.assert_array_equal, state.params, after.params)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, after.opt_state)
    assert float(info["grad_norm"]) == 0.0 and float(info["live_steps"]) > 0


def test_penalty_pulls_to_a_reference_that_can_be_refreshed():
    env, policy = ring(), table_policy()
    config = GRPOConfig(**SMALL | {"num_epochs": 2}, kl_coef=0.5, ref_refresh_updates=3.0)
    algorithm = grpo(env, policy, sgd)
    step = jax.jit(algorithm.step)
    state = jax.jit(algorithm.init)(jax.random.key(0), config)
    history, kl_ref = [state], []
    for _ in range(7):
        state, info = step(state, config)
        history.append(state)
        kl_ref.append(float(info["kl_ref"]))
    for update, state in enumerate(history):
        of = 3 * (update // 3)
        np.testing.assert_array_equal(state.extra["actor"], history[of].params["actor"])
    # the second epoch of an update already differs from a fresh reference
    assert min(kl_ref) > 0

    # without anything to learn the penalty alone moves: a step of its gradient, in NumPy
    equal = grpo(ring(np.zeros((4, 3))), policy, sgd)
    once = config.replace(num_epochs=1, ref_refresh_updates=None)
    after, _ = jax.jit(equal.step)(state, once)
    rows = jax.jit(lambda state: collected(equal.env, policy, state, once))(state)
    live = np.argwhere(first_episode_mask(rows))
    actor, ref = (np.asarray(x["actor"], np.float64) for x in (state.params, state.extra))
    p, q, change = softmax(actor), softmax(ref), np.zeros_like(actor)
    for t, b in live:
        s, a = int(jnp.argmax(rows.obs[t, b])), int(rows.action[t, b])
        # d k3 / d log π = 1 − π_ref/π
        change[s] -= 0.5 / len(live) * (1 - q[s, a] / p[s, a]) * (np.eye(3)[a] - p[s])
    np.testing.assert_allclose(
        after.params["actor"] - state.params["actor"], 0.3 * change, atol=2e-6
    )


def test_settings_that_cannot_work_are_refused():
    env, policy = ring(), table_policy()
    algorithm, key = grpo(env, policy), jax.random.key(0)
    for changes, message in (
        ({"num_envs": 10, "group_size": 4}, "group_size=4 does not divide num_envs=10"),
        ({"group_size": 1}, "group_size must be at least 2, got 1"),
        ({"num_minibatches": 5}, "num_minibatches=5 does not divide num_envs × num_steps=256"),
        (
            {"minibatch_of": "groups", "num_minibatches": 3},
            "num_minibatches=3 does not divide number of groups=8",
        ),
        ({"aggregation": "sequence"}, "set minibatch_of='groups'"),
        ({"form": "process"}, "form 'process'"),
        ({"minibatch_of": "envs"}, "minibatch_of 'envs'"),
        ({"ref_refresh_updates": 3.0}, "give kl_coef too"),
        ({"dual_clip": 1.0}, r"dual_clip must lie in \(1, inf\], got 1"),
        ({"kl_coef": -0.1}, "kl_coef must lie"),
    ):
        with pytest.raises(ValueError, match=message):
            algorithm.init(key, GRPOConfig(**changes))
    with pytest.raises(ValueError, match="'ring' has no time limit: give num_steps"):
        grpo(env._replace(time_limit=None), policy).init(key, GRPOConfig())
    cue = probes.memory()
    with pytest.raises(ValueError, match="grpo needs a feed-forward policy"):
        grpo(cue, gru_policy(cue)).init(key, GRPOConfig())


@pytest.mark.parametrize(
    ("env", "settings", "at_least"),
    [
        (probes.observation_action_reward, {"kl_coef": 0.01, "ref_refresh_updates": 10.0}, 0.95),
        (probes.continuous_action, {"form": "per_step", "target_kl": 0.05}, -0.05),
        (probes.multi_discrete, {"aggregation": "sequence", "minibatch_of": "groups"}, 0.95),
        (probes.action_mask, {"clip_epsilon_high": 0.28, "dual_clip": 3.0}, 1.6),  # 5/3 is the best
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_it_learns_what_to_do(env, settings, at_least):
    env = env()
    algorithm = grpo(env, mlp_policy(env, hidden_sizes=(16,)))
    config = GRPOConfig(**{"num_envs": 64, "learning_rate": 0.01, **settings})
    run = jax.jit(train, static_argnums=(0, 3))
    _, infos = run(algorithm, jax.random.key(0), config, 100)
    late = jax.tree.map(lambda x: np.asarray(x[-10:]).sum(), infos)
    assert late["episode_return_sum"] / late["episode_count"] > at_least
