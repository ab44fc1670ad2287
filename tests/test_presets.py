"""Every preset builds, and names lead where they should. Nothing is compiled here."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from jaxpg.presets import PRESETS, Preset, has_preset, preset
from jaxpg.registry import (
    ALGORITHMS,
    EnvironmentOptions,
    NetworkOptions,
    make_environment,
    make_policy,
)
from jaxpg.runs import abstract_states, check_evaluation, make_spec


@pytest.mark.parametrize("pair", PRESETS, ids="-".join)
def test_every_preset_builds(pair: tuple[str, str]) -> None:
    name, environment = pair
    if environment == "*":
        environment = "Catch-bsuite"
    settings = preset(name, environment)
    assert settings is PRESETS[pair]
    assert type(settings.config) is ALGORITHMS[name].config
    spec, algorithm = make_spec(name, environment, settings, num_seeds=2)
    check_evaluation(spec, algorithm, 3)
    states = abstract_states(algorithm, spec)
    assert states.update.shape == (2,)
    assert settings.anneal == (spec.config.anneal_updates is not None)
    # a traced field that is no float would compile anew when it changes
    assert all(isinstance(x, float) for x in jax.tree.leaves(settings.config))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_general_settings_for_both_kinds_of_actions(name: str) -> None:
    assert (name, "*") in PRESETS
    spec, _ = make_spec(name, "Pendulum-v1", PRESETS[name, "*"])
    assert spec.num_updates >= 1


def test_names_are_lenient_and_mistakes_are_named() -> None:
    assert preset("Actor-Critic", "CartPole-v1") is preset("actor_critic", "CartPole-v1")
    assert has_preset("ppo", "CartPole-v1") and not has_preset("ppo", "Catch-bsuite")
    with pytest.raises(ValueError, match="unknown algorithm 'tppo': did you mean"):
        preset("tppo", "CartPole-v1")
    with pytest.raises(ValueError, match="unknown environment 'Cartpole': did you mean CartPole"):
        preset("ppo", "Cartpole")


def test_steps_are_rounded_up_to_whole_updates() -> None:
    settings = preset("ppo", "CartPole-v1")
    config = settings.config.replace(num_envs=4, num_steps=8)
    settings = dataclasses.replace(settings, config=config, anneal=True)
    for steps, updates in ((1, 1), (32, 1), (33, 2), (320, 10)):
        spec, _ = make_spec("ppo", "CartPole-v1", settings, total_steps=steps)
        assert spec.num_updates == updates
        assert spec.config.anneal_updates == float(updates)
    # num_steps=None is the environment's time limit
    options = EnvironmentOptions(env_params={"max_steps_in_episode": 50})
    settings = Preset(
        ALGORITHMS["reinforce"].config(num_envs=2), total_steps=101, environment=options
    )
    spec, _ = make_spec("reinforce", "CartPole-v1", settings)
    assert spec.num_updates == 2


def test_network_options_reach_the_network() -> None:
    env = make_environment("CartPole-v1")
    options = NetworkOptions(hidden_sizes=(7,), shared=True)
    obs = jax.ShapeDtypeStruct((3, 4), "float32")
    params = jax.eval_shape(make_policy(env, options).init, jax.random.key(0), obs)
    assert "trunk" in params and (4, 7) in {x.shape for x in jax.tree.leaves(params)}
    recurrent = make_policy(env, NetworkOptions("gru", hidden_sizes=(), recurrent_size=5))
    assert recurrent.initial_carry is not None
    assert {x.shape for x in jax.tree.leaves(recurrent.initial_carry(3))} == {(3, 5)}
    with pytest.raises(ValueError, match="unknown network 'lstm'"):
        make_policy(env, NetworkOptions("lstm"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a network of kind 'gru' has no channels"):
        make_policy(env, NetworkOptions("gru", channels=(4,)))


def test_environment_options_reach_the_environment() -> None:
    env = make_environment(
        "Pendulum-v1", EnvironmentOptions("scale", env_params={"max_steps_in_episode": 33})
    )
    assert env.time_limit == 33
    with pytest.raises(ValueError, match="max_step'"):
        make_environment("Pendulum-v1", EnvironmentOptions(env_params={"max_step": 1}))
