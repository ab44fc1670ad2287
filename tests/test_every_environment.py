"""Every gymnax environment runs under PPO for a few updates, or is refused with a reason."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxpg

NEEDS_DATA = "MNISTBandit-bsuite"


def test_there_are_twenty_six():
    assert len(jaxpg.list_environments()) == 26
    with pytest.raises(ValueError, match="downloads a data set"):
        jaxpg.from_gymnax(NEEDS_DATA)


@pytest.mark.parametrize("name", [n for n in jaxpg.list_environments() if n != NEEDS_DATA])
def test_ppo_runs(name):
    env = jaxpg.from_gymnax(name)
    algorithm = jaxpg.ppo(env, jaxpg.mlp_policy(env, hidden_sizes=()))
    config = jaxpg.PPOConfig(num_envs=2, num_steps=4, num_epochs=1, num_minibatches=1)
    state, infos = jax.jit(lambda key: jaxpg.train(algorithm, key, config, 3))(jax.random.key(0))
    assert int(state.update) == 3
    for field, values in infos.items():
        assert values.shape == (3,) and np.all(np.isfinite(values)), field
    assert float(infos["nonfinite"].sum()) == float(infos["unbootstrapped"].sum()) == 0.0
