"""Every gymnax environment as an `Env`, the automatic reset, and the probe environments."""

from __future__ import annotations

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import probe_environments as probes
import pytest
from flax import struct
from gymnax.environments import environment as gymnax_environment
from gymnax.environments import spaces as gymnax_spaces

from jaxpg.environments import auto_reset, environment_notes, from_gymnax, list_environments
from jaxpg.types import Box, DictSpace, Discrete, EnvStep, MultiDiscrete

NAMES = [name for name in list_environments() if name != "MNISTBandit-bsuite"]
LIMIT = 5
NUM_ENVS = 3


def signature(tree):
    """Structure, and shape, dtype and weak type of every leaf."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, str(x.dtype), getattr(x, "weak_type", False)) for x in leaves]


def some_action(env, value=0):
    space = env.action_space
    return jnp.int32(value) if isinstance(space, Discrete) else jnp.full(space.shape, value, float)


def play(env, actions, *, key=None, num_envs=NUM_ENVS):
    """``(states before each step, actions, keys, EnvStep)``, every leaf ``[T, B, …]``."""
    key = jax.random.key(0) if key is None else key
    reset_key, step_key = jax.random.split(key)
    num_steps = actions.shape[0]

    def body(carry, row):
        state, obs = carry
        new_state, step = jax.vmap(env.step)(row[0], state, row[1])
        return (new_state, step.obs), (state, obs, step)

    def run(actions):
        first = jax.vmap(env.reset)(jax.random.split(reset_key, num_envs))
        keys = jax.random.split(step_key, (num_steps, num_envs))
        (states, obs, steps) = jax.lax.scan(body, first, (keys, actions))[1]
        return states, obs, keys, steps

    # most of the time goes into compiling these environments, not into running them
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})(actions)


def sample_actions(env, num_steps, *, seed=1, num_envs=NUM_ENVS):
    """Random actions of the right shape, ``[T, B, …]``."""
    rng = np.random.default_rng(seed)
    space = env.action_space
    if isinstance(space, Discrete):
        return jnp.asarray(rng.integers(0, space.n, (num_steps, num_envs)), jnp.int32)
    return jnp.asarray(rng.uniform(-1, 1, (num_steps, num_envs, *space.shape)), jnp.float32)


# Every environment


@pytest.mark.parametrize("name", NAMES)
def test_every_environment_steps_and_truncates_exactly_at_its_limit(name):
    env = from_gymnax(name, max_steps_in_episode=LIMIT)
    assert env.name == name
    assert env.time_limit == LIMIT
    states, obs, _, steps = play(env, sample_actions(env, 3 * LIMIT + 1))
    shape = env.observation_space.shape
    for observations in (obs, steps.obs, steps.final_obs):
        assert observations.shape == (3 * LIMIT + 1, NUM_ENVS, *shape)
        assert observations.dtype == jnp.float32
        assert np.all(np.isfinite(observations))
    assert (steps.reward.shape, steps.reward.dtype) == ((3 * LIMIT + 1, NUM_ENVS), jnp.float32)
    assert steps.terminated.dtype == steps.truncated.dtype == jnp.bool_
    # the state says how old the episode is before each step; so must the flags
    terminated, truncated = np.asarray(steps.terminated), np.asarray(steps.truncated)
    done = terminated | truncated
    age = np.zeros(NUM_ENVS, int)
    for t in range(3 * LIMIT + 1):
        np.testing.assert_array_equal(states.time[t], age)
        age += 1
        np.testing.assert_array_equal(truncated[t], age == LIMIT)
        age[done[t]] = 0
    assert done.any()
    kept = ~done
    np.testing.assert_allclose(steps.obs[kept], steps.final_obs[kept], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_every_environment_keeps_its_types_and_shows_what_its_note_says(name):
    def types():
        env = from_gymnax(name)
        key = jax.random.key(0)
        state, obs = jax.eval_shape(env.reset, key)
        new_state, step = jax.eval_shape(env.step, key, state, some_action(env))
        assert signature(state) == signature(new_state)
        assert signature(obs) == signature(step.obs) == signature(step.final_obs)
        assert not any(weak for _, _, weak in signature((new_state, step))[1])
        return env, signature((new_state, step))

    env, plain = types()
    with jax.enable_x64(True):
        assert types()[1] == plain
    note = environment_notes()[name]
    space = env.action_space
    actions = str(space.n) if isinstance(space, Discrete) else f"box {space.shape}"
    assert note[:3] == (env.observation_space.shape, actions, env.time_limit)
    constructor = getattr(type(gymnax.make(name)[0]).__init__, "__annotations__", {})
    assert note.arguments == tuple(constructor)


def test_listing_constructs_nothing(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("constructed or downloaded")

    monkeypatch.setattr(gymnax, "make", refuse)
    monkeypatch.setattr("gymnax.utils.load_mnist.load_mnist", refuse)
    names = list_environments()
    assert len(names) == len(set(names)) == 26
    assert tuple(environment_notes()) == names
    with pytest.raises(ValueError, match="MNISTBandit-bsuite downloads a data set"):
        from_gymnax("MNISTBandit-bsuite")


def test_an_environment_registered_at_run_time_is_listed(monkeypatch):
    monkeypatch.setattr(gymnax, "registered_envs", [*gymnax.registered_envs, "Mine-v0"])
    assert list_environments()[-1] == "Mine-v0"
    assert environment_notes()["Mine-v0"].observation_shape is None


def test_mnist_is_taken_as_an_object(monkeypatch):
    images = np.arange(4 * 28 * 28, dtype=np.int8).reshape(4, 28, 28)
    data = (images, np.arange(4, dtype=np.uint8))
    monkeypatch.setattr("gymnax.utils.load_mnist.load_mnist", lambda: (data, data))
    env = from_gymnax(gymnax.make("MNISTBandit-bsuite")[0])
    note = environment_notes()["MNISTBandit-bsuite"]
    assert note[:3] == (env.observation_space.shape, str(env.action_space.n), env.time_limit)
    state, _ = env.reset(jax.random.key(0))
    _, step = env.step(jax.random.key(1), state, state.correct_label.astype(jnp.int32))
    assert (step.reward, step.terminated, step.truncated) == (1.0, True, True)


# Agreement with gymnax, which splits the key as `auto_reset` does


@pytest.mark.parametrize("name, num_steps", [("CartPole-v1", 30), ("FrozenLake-misc", 30)])
def test_a_step_is_gymnax_s_own_step(name, num_steps):
    env = from_gymnax(name, max_steps_in_episode=12)
    gymnax_env, params = gymnax.make(name)
    params = params.replace(max_steps_in_episode=12)
    actions = sample_actions(env, num_steps)
    states, _, keys, steps = play(env, actions)
    both = jax.vmap(jax.vmap(gymnax_env.step, (0, 0, 0, None)), (0, 0, 0, None))
    obs, next_states, reward, terminated, truncated, info = both(keys, states, actions, params)
    assert np.any(terminated & ~truncated) and np.any(truncated & ~terminated)
    np.testing.assert_array_equal(steps.terminated, terminated)
    np.testing.assert_array_equal(steps.truncated, truncated)
    np.testing.assert_allclose(steps.reward, reward, rtol=1e-6)
    for mine, theirs in ((steps.obs, obs), (steps.final_obs, info["final_observation"])):
        if name == "FrozenLake-misc":
            np.testing.assert_array_equal(jnp.sum(mine, -1), jnp.ones(theirs.shape))
            mine = jnp.argmax(mine, -1)
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    following = jax.tree.map(lambda x: x[1:], states)
    for mine, theirs in zip(jax.tree.leaves(following), jax.tree.leaves(next_states), strict=True):
        np.testing.assert_allclose(mine, theirs[:-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["DiscountingChain-bsuite", "GaussianBandit-misc"])
def test_x64_changes_no_number(name):
    """Both raise inside gymnax's own step under x64."""
    env = from_gymnax(name, max_steps_in_episode=LIMIT)
    actions = sample_actions(env, 2 * LIMIT)
    expected = play(env, actions)[3]
    with jax.enable_x64(True):
        got = play(from_gymnax(name, max_steps_in_episode=LIMIT), actions)[3]
        made_in_x64, params = gymnax.make(name)
        of_object = from_gymnax(made_in_x64, params, max_steps_in_episode=LIMIT)
        got_of_object = play(of_object, actions)[3]
    for other in (got, got_of_object):
        for mine, theirs in zip(jax.tree.leaves(other), jax.tree.leaves(expected), strict=True):
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("name", ["FourRooms-misc", "MetaMaze-misc", "Acrobot-v1"])
def test_an_object_with_arrays_made_under_x64_is_narrowed(name):
    with jax.enable_x64(True):
        env = from_gymnax(gymnax.make(name)[0])
        key = jax.random.key(0)
        state, _ = jax.eval_shape(env.reset, key)
        new_state, _ = jax.eval_shape(env.step, key, state, some_action(env))
    assert signature(state) == signature(new_state)
    assert all(dtype in ("int32", "float32") for _, dtype, _ in signature(state)[1])


@pytest.mark.parametrize("name", ["MetaMaze-misc", "Pong-misc"])
def test_a_reset_shares_no_buffer(name):
    """The one keeps its start position as a constant, the other has one array in two fields."""
    env = from_gymnax(name)
    leaves = jax.tree.leaves([env.reset(jax.random.key(0)) for _ in range(2)])
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


def test_both_flags_at_once():
    """The chain ends by itself in the very step that reaches the limit."""
    env = from_gymnax("UmbrellaChain-bsuite", chain_length=4, max_steps_in_episode=4)
    steps = play(env, sample_actions(env, 8))[3]
    end = np.arange(8) % 4 == 3
    np.testing.assert_array_equal(steps.terminated, np.repeat(end[:, None], NUM_ENVS, 1))
    np.testing.assert_array_equal(steps.truncated, steps.terminated)


def test_legacy_and_typed_keys_agree():
    env = from_gymnax("CartPole-v1", max_steps_in_episode=1)

    def rollout(make_key):
        state, obs = env.reset(make_key(3))
        return obs, env.step(make_key(4), state, jnp.int32(1))

    typed, legacy = rollout(jax.random.key), rollout(jax.random.PRNGKey)
    for x, y in zip(jax.tree.leaves(typed), jax.tree.leaves(legacy), strict=True):
        np.testing.assert_array_equal(x, y)
    # the fresh observation does not come from the key that the step itself used
    assert not np.array_equal(typed[0], typed[1][1].obs)


# Settings


def test_settings_of_the_parameters_and_of_the_constructor():
    env = from_gymnax("DeepSea-bsuite", size=12, unscaled_move_cost=0)
    assert (env.observation_space.shape, env.time_limit) == ((12, 12), 12)
    env = from_gymnax("MemoryChain-bsuite", num_bits=3, memory_length=4)
    assert env.observation_space.shape == (5,)
    assert from_gymnax("FrozenLake-misc", map_name="8x8").time_limit == 200
    # a whole number where gymnax keeps a float, and the other way round
    assert from_gymnax("BernoulliBandit-misc", max_steps_in_episode=7).time_limit == 7
    env = from_gymnax("BernoulliBandit-misc", max_steps_in_episode=7.5, normalize_time=False)
    assert env.time_limit == 8
    assert env.observation_space.high[-1] == 7.5
    env = from_gymnax("DiscountingChain-bsuite", reward_timestep=[1, 2, 3, 4, 5])
    state, _ = env.reset(jax.random.key(0))
    state, step = env.step(jax.random.key(0), state, jnp.int32(0))
    assert step.reward == np.float32(1.1)


def test_parameters_and_objects():
    cartpole, params = gymnax.make("CartPole-v1")
    env = from_gymnax(cartpole, params.replace(max_steps_in_episode=9), gravity=5)
    assert (env.time_limit, env.name) == (9, "CartPole-v1")
    assert from_gymnax("CartPole-v1", params.replace(max_steps_in_episode=9)).time_limit == 9
    with pytest.raises(TypeError, match="params of Pendulum-v1 must be"):
        from_gymnax("Pendulum-v1", params)


def test_inside_a_trace_and_with_a_traced_setting():
    def angle(gravity):
        env = from_gymnax("CartPole-v1", gravity=gravity)
        state, _ = env.reset(jax.random.key(0))
        return env.step(jax.random.key(1), state, jnp.int32(1))[1].obs[3]

    light, heavy = jax.vmap(angle)(jnp.array([1.0, 100.0]))
    assert light != heavy
    assert jax.jit(lambda: angle(100.0))() == pytest.approx(float(heavy), rel=1e-5)


@pytest.mark.parametrize(
    "error, match, settings",
    [
        (ValueError, "setting of DeepSea-bsuite 'sizes': did you mean size", {"sizes": 3}),
        (ValueError, "'move_cost': did you mean unscaled_move_cost", {"move_cost": 3}),
        (ValueError, "at least 1, got 0", {"max_steps_in_episode": 0}),
        (TypeError, "deterministic must be True or False, got 1", {"deterministic": 1}),
        (TypeError, "must be a whole number, got 2.5", {"max_steps_in_episode": 2.5}),
        (TypeError, "must be a whole number, got True", {"max_steps_in_episode": True}),
        (TypeError, "unscaled_move_cost must be a number, got '1'", {"unscaled_move_cost": "1"}),
        (ValueError, "unknown box_actions 'cilp': did you mean clip", {"box_actions": "cilp"}),
        (ValueError, "box_actions='scale', but DeepSea-bsuite has", {"box_actions": "scale"}),
    ],
)
def test_bad_settings(error, match, settings):
    with pytest.raises(error, match=match):
        from_gymnax("DeepSea-bsuite", **settings)


def test_bad_environments():
    with pytest.raises(ValueError, match="unknown environment 'CartPol-v1': did you mean CartPole"):
        from_gymnax("CartPol-v1")
    with pytest.raises(TypeError, match="name of a gymnax environment or a gymnax Environment"):
        from_gymnax(3)


def test_constructor_arguments_are_refused_for_an_object():
    with pytest.raises(ValueError, match="unknown setting of DeepSea-bsuite 'size'"):
        from_gymnax(gymnax.make("DeepSea-bsuite")[0], size=3)


def test_what_would_be_ignored_is_refused():
    from gymnax.wrappers.purerl import FlattenObservationWrapper

    with pytest.raises(TypeError, match="wrappers act in gymnax's `step`"):
        from_gymnax(FlattenObservationWrapper(gymnax.make("Catch-bsuite")[0]))

    class OwnStep(Custom):
        def step(self, key, state, action, params=None):
            raise AssertionError

    with pytest.raises(ValueError, match="OwnStep overrides step"):
        from_gymnax(OwnStep())


# Spaces


@struct.dataclass
class CustomState(gymnax_environment.EnvState):
    last_action: jax.Array


class Custom(gymnax_environment.Environment):
    """A user's environment whose spaces, and what it shows, are given."""

    def __init__(self, action_space=None, observation_space=None, obs=0):
        self.spaces = action_space or gymnax_spaces.Discrete(2), observation_space
        self.obs = obs

    def action_space(self, params=None):
        return self.spaces[0]

    def observation_space(self, params):
        return self.spaces[1] or gymnax_spaces.Discrete(3)

    def reset_env(self, key, params):
        zeros = jax.tree.map(jnp.zeros_like, self.spaces[0].sample(key))
        return self.obs, CustomState(time=0, last_action=zeros)

    def step_env(self, key, state, action, params):
        state = CustomState(time=state.time + 1, last_action=action)
        return self.obs, state, 1, False, {}


def last_action(env, action):
    state, _ = env.reset(jax.random.key(0))
    # one step short of the default limit would reset, so the limit is far away
    return env.step(jax.random.key(0), state, action)[0].last_action


FAR = {"max_steps_in_episode": 10}
BOX = gymnax_spaces.Box(jnp.array([-1.0, 0.0]), jnp.array([3.0, 10.0]), (2,))


def test_box_actions_are_clipped():
    env = from_gymnax(Custom(BOX), **FAR)
    np.testing.assert_array_equal(env.action_space.low, [-1, 0])
    np.testing.assert_array_equal(env.action_space.high, [3, 10])
    np.testing.assert_array_equal(last_action(env, jnp.array([-2.0, 5.0])), [-1, 5])
    np.testing.assert_array_equal(last_action(env, jnp.array([4, 11], jnp.bfloat16)), [3, 10])
    # the reward of this one uses the raw action: unclipped it would be −0.9
    env = from_gymnax("MountainCarContinuous-v0")
    state, _ = env.reset(jax.random.key(0))
    assert env.step(jax.random.key(0), state, jnp.array([3.0]))[1].reward == np.float32(-0.1)


def test_box_actions_are_scaled():
    env = from_gymnax(Custom(BOX), box_actions="scale", **FAR)
    assert env.action_space == Box(-1.0, 1.0, (2,))
    np.testing.assert_array_equal(last_action(env, jnp.array([-1.0, 0.0])), [-1, 5])
    np.testing.assert_array_equal(last_action(env, jnp.array([0.5, 7.0])), [2, 10])
    env = from_gymnax("Pendulum-v1", box_actions="scale")
    state, _ = env.reset(jax.random.key(0))
    assert env.step(jax.random.key(0), state, jnp.array([0.25]))[0].last_u == 0.5
    with pytest.raises(ValueError, match="box_actions='scale' needs bounds"):
        from_gymnax(Custom(gymnax_spaces.Box(-jnp.inf, 1.0, (2,))), box_actions="scale")


def test_scalar_boxes_are_vectors_of_one_for_the_policy():
    space = gymnax_spaces.Box(-1.0, 3.0, ())
    env = from_gymnax(Custom(space, space, 2.0), **FAR)
    assert env.action_space == env.observation_space == Box(-1.0, 3.0, (1,))
    action = last_action(env, jnp.array([9.0]))
    assert (action.shape, action) == ((), 3.0)
    np.testing.assert_array_equal(env.reset(jax.random.key(0))[1], [2.0])


def test_actions_of_the_wrong_shape_or_type():
    discrete, box = from_gymnax(Custom(), **FAR), from_gymnax(Custom(BOX), **FAR)
    with pytest.raises(TypeError, match="action must be an integer, got dtype float32"):
        last_action(discrete, jnp.float32(1))
    with pytest.raises(ValueError, match=r"action has shape \(1,\), but the space has shape \(\)"):
        last_action(discrete, jnp.zeros(1, int))
    with pytest.raises(ValueError, match=r"action has shape \(\), but the space has shape \(2,\)"):
        last_action(box, jnp.float32(1))
    assert last_action(discrete, jnp.uint8(1)) == 1


def test_discrete_and_integer_observations():
    obs = from_gymnax(Custom(obs=2), **FAR).reset(jax.random.key(0))[1]
    np.testing.assert_array_equal(obs, np.float32([0, 0, 1]))
    image = gymnax_spaces.Box(0, 255, (2, 2), jnp.uint8)
    env = from_gymnax(Custom(None, image, jnp.full((2, 2), 255, jnp.uint8)), **FAR)
    obs = env.reset(jax.random.key(0))[1]
    assert (obs.dtype, obs.max(), env.observation_space) == (jnp.float32, 255, Box(0, 255, (2, 2)))
    wrong = from_gymnax(Custom(None, image, jnp.zeros((2, 3), jnp.uint8)), **FAR)
    with pytest.raises(ValueError, match=r"observation has shape \(2, 3\), but the space has"):
        wrong.reset(jax.random.key(0))


def test_dict_observations_and_several_discrete_actions():
    parts = {
        "where": gymnax_spaces.Discrete(2),
        "action_mask": gymnax_spaces.Box(0, 1, (3,), jnp.bool_),
    }
    actions = gymnax_spaces.Tuple((gymnax_spaces.Discrete(3), gymnax_spaces.Discrete(4)))
    seen = {"where": 1, "action_mask": jnp.array([True, False, True])}
    env = from_gymnax(Custom(actions, gymnax_spaces.Dict(parts), seen), **FAR)
    assert env.action_space == MultiDiscrete((3, 4))
    assert env.observation_space == DictSpace(
        {"where": Box(0.0, 1.0, (2,)), "action_mask": Box(0.0, 1.0, (3,))}
    )
    _, obs = env.reset(jax.random.key(0))
    np.testing.assert_array_equal(obs["where"], [0, 1])
    assert obs["action_mask"].dtype == jnp.bool_
    assert last_action(env, jnp.array([2, 3])) == (2, 3)
    with pytest.raises(ValueError, match="action space Tuple"):
        from_gymnax(Custom(gymnax_spaces.Tuple((BOX,))))
    with pytest.raises(ValueError, match="observation space Tuple"):
        from_gymnax(Custom(None, gymnax_spaces.Tuple((BOX,))))


def test_a_rule_of_its_own_promises_no_time_limit():
    class OwnRule(Custom):
        def is_truncated(self, state, params):
            return state.time % 2 == 1

    assert from_gymnax(Custom(), **FAR).time_limit == 10
    assert from_gymnax(OwnRule(), **FAR).time_limit is None


# The automatic reset


def tiny(reset=lambda key: (0, jnp.zeros(1)), step=None):
    def default(key, state, action):
        return state + 1, jnp.ones(1), 1, False, state == 1

    spaces = {"observation_space": Box(0, 1, (1,)), "action_space": Discrete(2)}
    return auto_reset(reset, step or default, **spaces)


@pytest.mark.parametrize("x64_on", [False, True])
def test_python_numbers_become_a_carry(x64_on):
    with jax.enable_x64(x64_on):
        env = tiny()
        state, _ = env.reset(jax.random.key(0))
        keys = jax.random.split(jax.random.key(1), 4)
        last, steps = jax.lax.scan(lambda s, k: env.step(k, s, jnp.int32(0)), state, keys)
    assert steps.reward.dtype == jnp.float32
    np.testing.assert_array_equal(steps.truncated, [False, True, False, True])
    np.testing.assert_array_equal(steps.obs[:, 0], [1, 0, 1, 0])
    np.testing.assert_array_equal(steps.final_obs[:, 0], [1, 1, 1, 1])
    assert last.item() == 0


OBS = jnp.zeros(1)


@pytest.mark.parametrize(
    "error, match, returned",
    [
        (TypeError, "state has dtype int32 after a reset but float32", (0.5, OBS, 1, 0, 0)),
        (ValueError, r"state has shape \(\) after a reset but \(1,\)", (OBS, OBS, 1, 0, 0)),
        (ValueError, r"observation has shape \(1,\) after a reset", (0, OBS[None], 1, 0, 0)),
        (ValueError, r"reward of .* must be a scalar, got shape \(1,\)", (0, OBS, OBS, 0, 0)),
        (TypeError, "terminated must be a bool or integer flag", (0, OBS, 1, 0.9, 0)),
        (ValueError, "truncated of .* must be a scalar", (0, OBS, 1, 0, OBS > 0)),
    ],
)
def test_steps_that_cannot_be_carried(error, match, returned):
    env = tiny(step=lambda key, state, action: returned)
    with pytest.raises(error, match=match):
        env.step(jax.random.key(0), env.reset(jax.random.key(0))[0], 0)


# The probes: each has the value that its docstring says


def returns_of(env, act, gamma=0.5, *, num_steps=12, num_envs=64):
    """First observation and discounted return of the first episode of each environment."""

    def body(state, key):
        env_state, obs = state
        env_state, step = jax.vmap(env.step)(jax.random.split(key, num_envs), env_state, act(obs))
        return (env_state, step.obs), step

    def run(key):
        first = jax.vmap(env.reset)(jax.random.split(key, num_envs))
        return first[1], jax.lax.scan(body, first, jax.random.split(key, num_steps))[1]

    obs, steps = jax.jit(run)(jax.random.key(0))
    ended = np.cumsum(steps.terminated, 0) - steps.terminated
    weight = gamma ** np.arange(num_steps)[:, None] * (ended == 0)
    return obs, np.sum(weight * steps.reward, axis=0)


def zeros(obs):
    return jnp.zeros(obs.shape[0], jnp.int32)


def follow(obs):
    return (obs[:, 0] > 0).astype(jnp.int32)


PROBES = {
    "constant reward": (probes.constant_reward, zeros, lambda obs: 1.0),
    "observation": (probes.observation_reward, zeros, lambda obs: obs[:, 0]),
    "delayed": (probes.delayed_reward, zeros, lambda obs: 0.5),
    "action": (probes.action_reward, lambda obs: zeros(obs) + 1, lambda obs: 1.0),
    "wrong action": (probes.action_reward, zeros, lambda obs: -1.0),
    "observation and action": (probes.observation_action_reward, follow, lambda obs: 1.0),
    "time limit": (probes.time_limit_only, zeros, lambda obs: 2.0 - 2.0**-11),  # 12 of ∞ steps
    "continuous": (
        probes.continuous_action,
        lambda obs: jnp.full((obs.shape[0], 1), 0.25),
        lambda obs: -0.0625,
    ),
    "memoryless": (probes.memory, zeros, lambda obs: -0.25 * obs[:, 0]),
    "multi-discrete": (
        probes.multi_discrete,
        lambda obs: jnp.stack([follow(obs), zeros(obs) + 2], -1),
        lambda obs: 1.0,
    ),
    "mask": (
        probes.action_mask,
        lambda obs: jnp.argmax(obs["action_mask"] * jnp.arange(3), -1),
        lambda obs: 2.0 - ~obs["action_mask"][:, 2],
    ),
    "broken mask": (
        probes.action_mask,
        lambda obs: jnp.argmin(obs["action_mask"], -1),
        lambda obs: -10.0,
    ),
}


@pytest.mark.parametrize("case", PROBES)
def test_a_probe_pays_what_it_says(case):
    build, act, value = PROBES[case]
    obs, returns = returns_of(build(), act)
    np.testing.assert_allclose(returns, np.broadcast_to(value(obs), returns.shape), atol=1e-6)


def test_the_memory_probe_pays_who_remembers():
    env = probes.memory(3)
    state, obs = env.reset(jax.random.key(0))
    action = (obs[0] > 0).astype(jnp.int32)
    rewards = []
    for t in range(3):
        assert (obs[0] != 0, obs[1] != 0) == (t == 0, t == 2)
        state, step = env.step(jax.random.key(t), state, action)
        obs = step.obs
        rewards.append(float(step.reward))
    assert rewards == [0, 0, 1]
    assert step.terminated and not step.truncated


def test_the_time_limit_probe_only_truncates():
    steps = play(probes.time_limit_only(5), jnp.zeros((12, 3), jnp.int32))[3]
    np.testing.assert_array_equal(steps.truncated[:, 0], np.arange(1, 13) % 5 == 0)
    assert not np.any(steps.terminated)


@pytest.mark.parametrize("limit", [2, 4])
def test_the_counter_counts(limit):
    num_envs = 8
    env = probes.counter(limit)
    _, obs, _, steps = play(env, jnp.zeros((40, num_envs), jnp.int32), num_envs=num_envs)
    kinds = np.asarray(obs[0, :, 0], int)
    assert set(kinds) == {0, 1, 2}
    for i, kind in enumerate(kinds):
        rows = probes.counter_rows(kind, 41, limit)
        truncations = [t for t, row in enumerate(rows[:40]) if row.truncated]
        assert min(np.diff(truncations)) >= limit
        for t, row in enumerate(rows[:40]):
            at = jax.tree.map(lambda x, t=t, i=i: np.asarray(x)[t, i], steps)
            expected = EnvStep(
                rows[t + 1].obs, row.reward, row.terminated, row.truncated, row.final_obs
            )
            np.testing.assert_array_equal(obs[t, i], row.obs)
            for mine, theirs in zip(at, expected, strict=True):
                np.testing.assert_array_equal(mine, theirs)
    flags = zip(steps.terminated.ravel().tolist(), steps.truncated.ravel().tolist(), strict=True)
    assert len(set(flags)) == 4
