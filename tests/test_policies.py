"""Networks: forward passes against NumPy, initialisation, masks, recurrence, other libraries."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxpg.distributions import (
    categorical,
    diagonal_gaussian,
    multi_categorical,
    tanh_gaussian,
)
from jaxpg.policies import (
    cnn_policy,
    default_distribution,
    from_linen,
    gru_policy,
    mlp_policy,
    reset_carry,
)
from jaxpg.types import Box, DictSpace, Discrete, Env, MultiDiscrete, Policy

N = 5
VECTOR = Box(-1.0, 1.0, (4,))
THREE = Discrete(3)


def env_of(observation: Any = VECTOR, action: Any = THREE) -> Env:
    """Only the spaces of an environment."""
    return Env(None, None, observation, action)


def obs_of(space: Any = VECTOR, n: int = N) -> Any:
    rng = np.random.default_rng(0)
    if isinstance(space, DictSpace):
        return {name: obs_of(part, n) for name, part in space.spaces.items()}
    if isinstance(space, Discrete):
        return jnp.asarray(rng.integers(0, space.n, n), jnp.int32)
    if isinstance(space, MultiDiscrete):
        return jnp.asarray(rng.integers(0, space.nvec, (n, len(space.nvec))), jnp.int32)
    return jnp.asarray(rng.normal(size=(n, *space.shape)), jnp.float32)


def random_params(policy: Policy, obs: Any) -> Any:
    """Parameters of ordinary size everywhere, biases too, in the structure that init gives.

    Only traced: compiling the orthogonal initialisers would take most of these tests' time.
    """
    shapes = jax.eval_shape(policy.init, jax.random.key(0), obs)
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.4, x.shape), x.dtype), shapes)


def assert_orthogonal(kernel: jax.Array, gain: float) -> None:
    """Rows or columns, whichever are fewer, are orthogonal with norm `gain`."""
    flat = np.asarray(kernel, np.float64).reshape(-1, kernel.shape[-1])
    gram = flat.T @ flat if flat.shape[1] <= flat.shape[0] else flat @ flat.T
    np.testing.assert_allclose(gram, gain**2 * np.eye(len(gram)), atol=2e-6 * max(1, gain**2))


# --- dense networks --------------------------------------------------------------------------


def test_forward_pass_of_two_networks(key: jax.Array) -> None:
    policy = mlp_policy(env_of(), hidden_sizes=(8, 6))
    obs = obs_of()
    params = random_params(policy, obs)
    assert sorted(params) == ["actor", "critic"]

    def forward(branch: dict, head: str) -> np.ndarray:
        branch = jax.tree.map(lambda x: np.asarray(x, np.float64), branch)
        h = np.asarray(obs, np.float64)
        for name in ("dense_0", "dense_1"):
            h = np.tanh(h @ branch["torso"][name]["kernel"] + branch["torso"][name]["bias"])
        return h @ branch["head"][head]["kernel"] + branch["head"][head]["bias"]

    logits, value = jax.jit(policy.apply)(params, obs)
    assert logits.shape == (N, 3) and value.shape == (N,)
    np.testing.assert_allclose(logits, forward(params["actor"], "logits"), atol=2e-6)
    np.testing.assert_allclose(value, forward(params["critic"], "value")[:, 0], atol=2e-6)


def test_forward_pass_on_a_shared_trunk(key: jax.Array) -> None:
    policy = mlp_policy(env_of(), hidden_sizes=(8,), activation="relu", shared=True)
    obs = obs_of()
    params = random_params(policy, obs)
    assert sorted(params) == ["actor", "critic", "trunk"]
    h = np.maximum(
        obs @ params["trunk"]["dense_0"]["kernel"] + params["trunk"]["dense_0"]["bias"], 0
    )
    logits, value = policy.apply(params, obs)
    actor, critic = params["actor"]["logits"], params["critic"]["value"]
    np.testing.assert_allclose(logits, h @ actor["kernel"] + actor["bias"], atol=1e-6)
    np.testing.assert_allclose(value, (h @ critic["kernel"] + critic["bias"])[:, 0], atol=1e-6)


def test_initialisation(key: jax.Array) -> None:
    """Orthogonal: √2 in hidden layers, 0.01 and 1 in the heads, zero biases, float32."""
    policy = mlp_policy(env_of(), hidden_sizes=(16, 12))
    params = jax.jit(policy.init)(key, obs_of())
    for branch, head, gain in (("actor", "logits", 0.01), ("critic", "value", 1.0)):
        torso = params[branch]["torso"]
        assert torso["dense_0"]["kernel"].shape == (4, 16)
        assert_orthogonal(torso["dense_0"]["kernel"], np.sqrt(2))
        assert_orthogonal(torso["dense_1"]["kernel"], np.sqrt(2))
        assert_orthogonal(params[branch]["head"][head]["kernel"], gain)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert leaf.dtype == jnp.float32 and not leaf.weak_type
        if "bias" in jax.tree_util.keystr(path):
            np.testing.assert_array_equal(leaf, 0.0)
    first = [params[b]["torso"]["dense_0"]["kernel"] for b in ("actor", "critic")]
    assert not np.allclose(*first)  # each branch has its own key
    probs = jax.nn.softmax(policy.apply(params, obs_of())[0])
    np.testing.assert_allclose(probs, 1 / 3, atol=0.02)


def test_separate_networks_share_no_gradient(key: jax.Array) -> None:
    obs = obs_of()
    for shared in (False, True):
        policy = mlp_policy(env_of(), hidden_sizes=(8,), shared=shared)
        params = random_params(policy, obs)
        of_value = jax.grad(lambda p, policy=policy: jnp.sum(policy.apply(p, obs)[1]))(params)
        reaches = {
            name: any(np.any(leaf != 0) for leaf in jax.tree.leaves(of_value[name]))
            for name in params
        }
        assert reaches == {"actor": False, "critic": True} | ({"trunk": True} if shared else {})


@pytest.mark.parametrize("shared", [False, True])
def test_a_linear_policy_has_no_hidden_layer(key: jax.Array, shared: bool) -> None:
    policy = mlp_policy(env_of(), hidden_sizes=(), shared=shared)
    params = random_params(policy, obs_of())
    head = params["actor"]["logits"] if shared else params["actor"]["head"]["logits"]
    assert head["kernel"].shape == (4, 3)
    expected = obs_of() @ head["kernel"] + head["bias"]
    np.testing.assert_allclose(policy.apply(params, obs_of())[0], expected, atol=1e-6)


def equations(fn: Any, *args: Any) -> list[Any]:
    """The equations of `fn`, those inside of functions with derivatives of their own in place."""

    def inline(jaxpr: Any) -> list[Any]:
        return [
            inner
            for eqn in jaxpr.eqns
            for inner in (
                inline(eqn.params["call_jaxpr"].jaxpr)
                if eqn.primitive.name == "custom_jvp_call"
                else [eqn]
            )
        ]

    return inline(jax.make_jaxpr(fn)(*args).jaxpr)


def test_the_hot_loop_does_nothing_but_products_sums_and_activations(key: jax.Array) -> None:
    policy = mlp_policy(env_of(), hidden_sizes=(8, 8))
    params = random_params(policy, obs_of())
    used = [eqn.primitive.name for eqn in equations(policy.apply, params, obs_of())]
    assert used.count("dot_general") == 6 and used.count("tanh") == 4 and used.count("add") == 6
    assert set(used) <= {"dot_general", "reshape", "broadcast_in_dim", "add", "tanh", "squeeze"}


# --- action spaces ---------------------------------------------------------------------------


def test_default_distributions() -> None:
    assert default_distribution(Discrete(2)) is categorical
    assert default_distribution(MultiDiscrete((2, 3))) is multi_categorical
    assert default_distribution(Box(-1.0, 1.0, (2,))) is diagonal_gaussian


def test_several_discrete_actions(key: jax.Array) -> None:
    policy = mlp_policy(env_of(action=MultiDiscrete((2, 4))), hidden_sizes=(8,))
    assert policy.distribution is multi_categorical
    params = random_params(policy, obs_of())
    p, value = policy.apply(params, obs_of())
    assert [logits.shape for logits in p] == [(N, 2), (N, 4)] and value.shape == (N,)
    assert policy.distribution.sample(key, p).shape == (N, 2)


def test_box_actions(key: jax.Array) -> None:
    env = env_of(action=Box(-2.0, 2.0, (2,)))
    policy = mlp_policy(env, hidden_sizes=(8,), log_std_init=-0.5)
    assert policy.distribution is diagonal_gaussian
    params = jax.jit(policy.init)(key, obs_of())
    np.testing.assert_array_equal(params["actor"]["head"]["log_std"], [-0.5, -0.5])
    (mean, log_std), _ = policy.apply(params, obs_of())
    assert mean.shape == log_std.shape == (N, 2)  # rows of it, for rollouts and minibatches
    np.testing.assert_array_equal(log_std, -0.5)
    assert np.abs(mean).max() < 0.1
    grads = jax.grad(lambda p: jnp.sum(policy.apply(p, obs_of())[0][1]))(params)
    np.testing.assert_array_equal(grads["actor"]["head"]["log_std"], [N, N])

    squashed = mlp_policy(env, hidden_sizes=(8,), distribution=tanh_gaussian)
    assert squashed.distribution is tanh_gaussian
    state = mlp_policy(env, hidden_sizes=(8,), log_std_init=-0.5, state_dependent_std=True)
    params = random_params(state, obs_of())
    assert "log_std" not in params["actor"]["head"]
    (mean, log_std), _ = state.apply(params, obs_of())
    head = params["actor"]["head"]["mean"]
    torso = params["actor"]["torso"]["dense_0"]
    h = np.tanh(obs_of() @ torso["kernel"] + torso["bias"])
    both = h @ head["kernel"] + head["bias"]
    np.testing.assert_allclose(mean, both[:, :2], atol=1e-6)
    np.testing.assert_allclose(log_std, both[:, 2:] - 0.5, atol=1e-6)


# --- observations ----------------------------------------------------------------------------


def test_parts_of_an_observation_are_flattened_encoded_and_joined(key: jax.Array) -> None:
    space = DictSpace(
        {
            "pixels": Box(0, 255, (2, 3)),
            "mode": Discrete(3),
            "nested": DictSpace({"b": MultiDiscrete((2, 2)), "a": Box(0.0, 1.0, ())}),
        }
    )
    obs = obs_of(space)
    obs["pixels"] = jnp.arange(N * 6, dtype=jnp.uint8).reshape(N, 2, 3)
    b = np.asarray(obs["nested"]["b"])
    flat = np.concatenate(  # by name: mode, nested (a, b), pixels
        [
            np.eye(3)[np.asarray(obs["mode"])],
            np.asarray(obs["nested"]["a"])[:, None],
            np.eye(2)[b[:, 0]],
            np.eye(2)[b[:, 1]],
            np.asarray(obs["pixels"]).reshape(N, 6),
        ],
        axis=1,
    )
    parts = mlp_policy(env_of(space), hidden_sizes=(4,))
    joined = mlp_policy(env_of(Box(0.0, 1.0, (14,))), hidden_sizes=(4,))
    params = random_params(parts, obs)
    np.testing.assert_allclose(
        parts.apply(params, obs)[1], joined.apply(params, jnp.asarray(flat, jnp.float32))[1]
    )
    grads = jax.jit(jax.grad(lambda p: jnp.sum(parts.apply(p, obs)[1])))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_outputs_stay_float32_under_x64(key: jax.Array, x64: None) -> None:
    policy = gru_policy(env_of(), hidden_size=4, embed_sizes=(), shared=True)
    obs = obs_of().astype(jnp.float64)
    params = jax.jit(policy.init)(key, obs)
    carry = policy.initial_carry(N)
    after, (logits, value) = policy.apply(params, carry, obs, jnp.zeros(N, bool))
    for leaf in jax.tree.leaves((params, carry, after, logits, value)):
        assert leaf.dtype == jnp.float32


# --- action masks ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mlp_policy, gru_policy])
def test_masked_actions_have_probability_zero_and_finite_gradients(
    make: Any, key: jax.Array
) -> None:
    env = env_of(DictSpace({"x": VECTOR, "action_mask": Box(0, 1, (3,))}))
    policy = make(env)
    mask = jnp.array([[1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 0], [1, 1, 0]], bool)
    obs = {"x": obs_of(), "action_mask": mask}
    params = random_params(policy, obs)

    def logits_of(params: Any, obs: Any) -> jax.Array:
        if policy.initial_carry is None:
            return policy.apply(params, obs)[0]
        return policy.apply(params, policy.initial_carry(N), obs, jnp.ones(N, bool))[1][0]

    def loss(params: Any) -> jax.Array:
        logits = logits_of(params, obs)
        x = jnp.array([0, 1, 2, 0, 1])
        return jnp.sum(categorical.log_prob(logits, x) + categorical.entropy(logits))

    (value, grads), logits = jax.jit(lambda p: (jax.value_and_grad(loss)(p), logits_of(p, obs)))(
        params
    )
    probs = np.asarray(jax.nn.softmax(logits))
    allowed = np.asarray(mask) | ~np.asarray(mask).any(1, keepdims=True)
    np.testing.assert_array_equal(probs[~allowed], 0.0)
    np.testing.assert_allclose(probs[3], 1 / 3, rtol=1e-6)  # nothing allowed: uniform, no NaN
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    # the mask is no input: where everything is allowed the network is that of the vector alone
    plain = make(env_of())
    everything = {"x": obs_of(), "action_mask": jnp.ones((N, 3), jnp.int32)}
    if policy.initial_carry is None:
        expected = plain.apply(params, obs_of())[0]
    else:
        expected = plain.apply(params, plain.initial_carry(N), obs_of(), jnp.ones(N, bool))[1][0]
    np.testing.assert_array_equal(logits_of(params, everything), expected)


def test_masks_of_several_actions_lie_one_after_the_other(key: jax.Array) -> None:
    env = env_of(DictSpace({"x": VECTOR, "legal": Box(0, 1, (5,))}), MultiDiscrete((2, 3)))
    policy = mlp_policy(env, hidden_sizes=(4,), action_mask="legal")
    obs = {"x": obs_of(), "legal": jnp.tile(jnp.array([0, 1, 1, 0, 1]), (N, 1))}
    params = random_params(policy, obs)
    first, second = (np.asarray(jax.nn.softmax(z)) for z in policy.apply(params, obs)[0])
    np.testing.assert_array_equal(first[:, 0], 0.0)
    np.testing.assert_array_equal(second[:, 1], 0.0)
    assert (first[:, 1] == 1).all() and (second[:, [0, 2]] > 0).all()
    with pytest.raises(ValueError, match="needs 5 entries"):
        policy.apply(params, {**obs, "legal": jnp.ones((N, 4), bool)})
    # without the convention the same entry is an ordinary input
    plain = mlp_policy(env, hidden_sizes=(4,), action_mask=None)
    assert random_params(plain, obs)["actor"]["torso"]["dense_0"]["kernel"].shape == (9, 4)


# --- images ----------------------------------------------------------------------------------


def test_convolutions_against_xla(key: jax.Array) -> None:
    image = Box(0.0, 1.0, (6, 7, 2))
    policy = cnn_policy(env_of(image), channels=(3, 4), hidden_sizes=(8,), kernel=2)
    obs = obs_of(image)
    params = random_params(policy, obs)

    def reference(params: Any, obs: jax.Array) -> jax.Array:
        h = obs
        for name in ("conv_0", "conv_1"):
            layer = params["trunk"][name]
            h = jax.lax.conv_general_dilated(
                h, layer["kernel"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            h = jax.nn.relu(h + layer["bias"])
        dense = params["trunk"]["dense_0"]
        h = jax.nn.relu(h.reshape(N, -1) @ dense["kernel"] + dense["bias"])
        return (h @ params["critic"]["value"]["kernel"] + params["critic"]["value"]["bias"])[:, 0]

    def loss(fn: Any) -> Any:
        return jax.value_and_grad(lambda params: jnp.sum(fn(params, obs) ** 2))

    ours = loss(lambda params, obs: policy.apply(params, obs)[1])
    both = jax.jit(lambda params: (ours(params), loss(reference)(params)))
    (value, grads), (expected, expected_grads) = both(params)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_initialisation_of_convolutions(key: jax.Array) -> None:
    image = Box(0.0, 1.0, (3, 3, 2))
    policy = cnn_policy(env_of(image), channels=(3,), hidden_sizes=(4,), kernel=2)
    trunk = jax.jit(policy.init)(key, obs_of(image))["trunk"]
    assert trunk["conv_0"]["kernel"].shape == (2, 2, 2, 3)
    assert_orthogonal(trunk["conv_0"]["kernel"], np.sqrt(2))
    np.testing.assert_array_equal(trunk["conv_0"]["bias"], 0.0)


def test_image_policies_take_masks_bytes_and_separate_networks(key: jax.Array) -> None:
    space = DictSpace({"board": Box(0, 1, (4, 4, 1)), "action_mask": Box(0, 1, (3,))})
    policy = cnn_policy(env_of(space), channels=(2,), hidden_sizes=(4,), shared=False)
    obs = {
        "board": jnp.ones((N, 4, 4, 1), jnp.uint8),
        "action_mask": jnp.tile(jnp.array([True, False, True]), (N, 1)),
    }
    params = random_params(policy, obs)
    assert sorted(params) == ["actor", "critic"]
    logits, value = policy.apply(params, obs)
    assert logits.dtype == value.dtype == jnp.float32
    np.testing.assert_array_equal(jax.nn.softmax(logits)[:, 1], 0.0)


# --- recurrent networks ----------------------------------------------------------------------


@functools.cache
def recurrent(shared: bool = False) -> tuple[Policy, Any]:
    policy = gru_policy(env_of(), hidden_size=6, embed_sizes=(8,), shared=shared)
    return policy, random_params(policy, obs_of())


def steps(policy: Policy, params: Any, carry: Any, obs: jax.Array, reset: jax.Array) -> Any:
    return jax.lax.scan(lambda c, x: policy.apply(params, c, *x), carry, (obs, reset))


def test_recurrence_against_numpy() -> None:
    policy, params = recurrent()
    T = 3
    obs = jnp.stack([obs_of() * (t + 1) for t in range(T)])
    reset = jnp.zeros((T, N), bool).at[2, 1].set(True)
    carry, (logits, value) = jax.jit(functools.partial(steps, policy))(
        params, policy.initial_carry(N), obs, reset
    )

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    for branch, head, outputs in (("actor", "logits", logits), ("critic", "value", value)):
        p = jax.tree.map(lambda x: np.asarray(x, np.float64), params[branch])
        torso, h = p["torso"], np.zeros((N, 6))
        for t in range(T):
            h = np.where(np.asarray(reset[t])[:, None], 0, h)
            x = np.tanh(np.asarray(obs[t]) @ torso["dense_0"]["kernel"] + torso["dense_0"]["bias"])
            new = np.split(x @ torso["input"]["kernel"] + torso["input"]["bias"], 3, axis=1)
            old = np.split(h @ torso["recurrent"]["kernel"], 3, axis=1)
            r, z = sigmoid(new[0] + old[0]), sigmoid(new[1] + old[1])
            h = (1 - z) * np.tanh(new[2] + r * (old[2] + torso["candidate_bias"])) + z * h
            out = h @ p["head"][head]["kernel"] + p["head"][head]["bias"]
            np.testing.assert_allclose(
                outputs[t], out if branch == "actor" else out[:, 0], atol=2e-6
            )
        np.testing.assert_allclose(carry[branch], h, atol=2e-6)


def test_initialisation_of_gates(key: jax.Array) -> None:
    policy = gru_policy(env_of(), hidden_size=6, embed_sizes=(), shared=True)
    torso = jax.jit(policy.init)(key, obs_of())["trunk"]
    assert torso["recurrent"]["kernel"].shape == (6, 18)
    for name in ("input", "recurrent"):
        for block in jnp.split(torso[name]["kernel"], 3, axis=1):
            assert_orthogonal(block, 1.0)


@pytest.mark.parametrize("shared", [False, True])
def test_a_reset_forgets_exactly(shared: bool) -> None:
    """R13: also what is NaN. The reset comes before use, so this step is that of a fresh carry."""
    policy, params = recurrent(shared)
    apply = jax.jit(policy.apply)
    fresh = policy.initial_carry(N)
    assert sorted(fresh) == (["trunk"] if shared else ["actor", "critic"])
    used, _ = apply(params, fresh, obs_of(), jnp.ones(N, bool))
    used = jax.tree.map(lambda c: c.at[0].set(jnp.nan), used)
    after, outputs = apply(params, used, obs_of(), jnp.ones(N, bool))
    expected = apply(params, fresh, obs_of(), jnp.zeros(N, bool))
    jax.tree.map(np.testing.assert_array_equal, (after, outputs), expected)
    kept, _ = apply(params, used, obs_of(), jnp.arange(N) == 0)
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a[0], b[0])
        assert not np.allclose(a[1:], b[1:])


def test_permuting_environments_permutes_everything() -> None:
    """R55: no row's memory or flag reaches another row."""
    policy, params = recurrent()
    rng = np.random.default_rng(2)
    obs = jnp.asarray(rng.normal(size=(4, N, 4)), jnp.float32)
    reset = jnp.asarray(rng.random((4, N)) < 0.4)
    order = np.array([3, 0, 4, 1, 2])
    run = jax.jit(functools.partial(steps, policy))
    carry, outputs = run(params, policy.initial_carry(N), obs, reset)
    permuted, shuffled = run(params, policy.initial_carry(N), obs[:, order], reset[:, order])
    for a, b in zip(jax.tree.leaves(carry), jax.tree.leaves(permuted), strict=True):
        np.testing.assert_allclose(a[order], b, atol=1e-6)
    for a, b in zip(jax.tree.leaves(outputs), jax.tree.leaves(shuffled), strict=True):
        np.testing.assert_allclose(a[:, order], b, atol=1e-6)


def test_no_gradient_flows_across_a_reset() -> None:
    policy, params = recurrent()

    def last(carry: Any, reset: jax.Array) -> jax.Array:
        return jnp.sum(policy.apply(params, carry, obs_of(), reset)[1][1])

    carry = jax.tree.map(lambda c: c + 0.1, policy.initial_carry(N))
    grads = jax.grad(last)(carry, jnp.arange(N) < 2)["critic"]
    np.testing.assert_array_equal(grads[:2], 0.0)
    assert (np.abs(grads[2:]).max(axis=1) > 0).all()


def test_reset_carry_takes_any_tree_and_only_flags() -> None:
    carry = {"h": jnp.ones((2, 3)), "count": jnp.array([4, 5])}
    out = reset_carry(carry, jnp.array([0, 1]))
    np.testing.assert_array_equal(out["h"], [[1, 1, 1], [0, 0, 0]])
    np.testing.assert_array_equal(out["count"], [4, 0])
    assert out["count"].dtype == carry["count"].dtype
    with pytest.raises(TypeError, match="reset must be a bool or integer flag"):
        reset_carry(carry, jnp.zeros(2))


# --- short floats ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mlp_policy, gru_policy])
def test_bfloat16_products_keep_float32_everywhere_else(make: Any, key: jax.Array) -> None:
    obs = obs_of(n=64)
    exact, short = make(env_of()), make(env_of(), compute_dtype=jnp.bfloat16)
    params = random_params(exact, obs)

    def outputs(policy: Policy, params: Any) -> tuple[jax.Array, jax.Array]:
        if policy.initial_carry is None:
            return policy.apply(params, obs)
        carry = policy.initial_carry(64)
        carry, _ = policy.apply(params, carry, obs, jnp.ones(64, bool))
        return policy.apply(params, carry, obs, jnp.zeros(64, bool))[1]

    def loss(params: Any, policy: Policy) -> jax.Array:
        logits, value = outputs(policy, params)
        return jnp.mean(categorical.log_prob(logits, jnp.zeros(64, jnp.int32)) + value**2)

    inside = equations(lambda p: outputs(short, p), params)
    products = [e for e in inside if e.primitive.name == "dot_general"]
    kinds = {(str(e.invars[0].aval.dtype), str(e.outvars[0].aval.dtype)) for e in products}
    assert kinds == {("bfloat16", "float32"), ("float32", "float32")}  # hidden layers, heads

    initial = jax.eval_shape(short.init, key, obs)
    assert {leaf.dtype for leaf in jax.tree.leaves(initial)} == {jnp.dtype(jnp.float32)}
    grads = [jax.jit(jax.grad(loss), static_argnums=1)(params, p) for p in (exact, short)]
    flat = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(g)]) for g in grads]
    error = np.linalg.norm(flat[1] - flat[0]) / np.linalg.norm(flat[0])
    assert 1e-5 < error < 1e-2
    assert {leaf.dtype for leaf in jax.tree.leaves(grads[1])} == {jnp.dtype(jnp.float32)}


# --- other libraries -------------------------------------------------------------------------


class Plain(nn.Module):
    """A user's own linen network."""

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        return nn.Dense(3, name="actor")(obs), nn.Dense(1, name="critic")(obs)[:, 0]


class Cell(nn.Module):
    """A user's own recurrent linen network; its rows count the steps of their episode."""

    @nn.compact
    def __call__(self, carry: jax.Array, obs: jax.Array) -> tuple[jax.Array, Any]:
        carry = carry + 1.0
        x = jnp.concatenate([obs, carry[:, None]], axis=1)
        return carry, (nn.Dense(3)(x), carry)


class Batched(nn.Module):
    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.BatchNorm(use_running_average=False)(obs)
        return x, x[:, 0]


def linen() -> Policy:
    return from_linen(Plain(), categorical)


def dictionary() -> Policy:
    return Policy(
        init=lambda key, obs: {
            "actor": 0.1 * jax.random.normal(key, (obs.shape[-1], 3)),
            "critic": jnp.ones(obs.shape[-1]),
        },
        apply=lambda params, obs: (obs @ params["actor"], obs @ params["critic"]),
        distribution=categorical,
    )


def nnx_module() -> Policy:
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.actor = nnx.Linear(4, 3, rngs=rngs)
            self.critic = nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.actor(obs), self.critic(obs)[:, 0]

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Network(nnx.Rngs(0))))
    return Policy(
        init=lambda key, obs: nnx.to_pure_dict(nnx.state(Network(nnx.Rngs(key)), nnx.Param)),
        apply=lambda params, obs: nnx.merge(graphdef, nnx.State(params))(obs),
        distribution=categorical,
    )


@pytest.mark.parametrize("make", [linen, dictionary, nnx_module])
def test_any_library_plugs_in(make: Any, key: jax.Array) -> None:
    """init, apply and gradient under jit and vmap; ``{"actor": …, "critic": …}`` throughout."""
    policy, obs = make(), obs_of()
    params = jax.jit(policy.init)(key, obs)
    assert sorted(params) == ["actor", "critic"]
    logits, value = jax.jit(policy.apply)(params, obs)
    assert logits.shape == (N, 3) and value.shape == (N,)

    def loss(params: Any) -> jax.Array:
        logits, value = policy.apply(params, obs)
        return jnp.mean(categorical.log_prob(logits, jnp.zeros(N, jnp.int32))) + jnp.mean(value)

    before, grads = jax.jit(jax.value_and_grad(loss))(params)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    moved = jax.tree.map(lambda p, g: p + 1e-3 * g, params, grads)
    squared = sum(float(jnp.sum(g * g)) for g in jax.tree.leaves(grads))
    np.testing.assert_allclose((loss(moved) - before) / 1e-3, squared, rtol=0.02)

    seeds = jax.vmap(policy.init, in_axes=(0, None))(jax.random.split(key, 2), obs)
    stacked = jax.vmap(policy.apply, in_axes=(0, None))(seeds, obs)[0]
    assert stacked.shape == (2, N, 3)
    assert not np.allclose(stacked[0], stacked[1])


def test_linen_modules_may_be_recurrent(key: jax.Array) -> None:
    policy = from_linen(Cell(), categorical, initial_carry=lambda n: jnp.zeros(n))
    obs = jnp.stack([obs_of()] * 4)
    reset = jnp.zeros((4, N), bool).at[2, 0].set(True)
    params = policy.init(key, obs[0])
    carry, (logits, value) = jax.jit(functools.partial(steps, policy))(
        params, policy.initial_carry(N), obs, reset
    )
    np.testing.assert_array_equal(value[:, 0], [1, 2, 1, 2])
    np.testing.assert_array_equal(value[:, 1], [1, 2, 3, 4])
    assert logits.shape == (4, N, 3) and carry[0] == 2


def test_linen_modules_with_state_are_refused(key: jax.Array) -> None:
    with pytest.raises(ValueError, match=r"Batched keeps state in \['batch_stats'\]"):
        from_linen(Batched(), categorical).init(key, obs_of())


# --- vmap over parameters --------------------------------------------------------------------


def test_seeds_stacked_equal_seeds_apart(key: jax.Array) -> None:
    image = Box(0.0, 1.0, (4, 4, 2))
    policy, obs = cnn_policy(env_of(image), channels=(2,), hidden_sizes=()), obs_of(image)
    keys = jax.random.split(key, 3)
    init, apply = jax.jit(policy.init), jax.jit(policy.apply)
    params = jax.jit(jax.vmap(policy.init, in_axes=(0, None)))(keys, obs)
    together = jax.jit(jax.vmap(policy.apply, in_axes=(0, None)))(params, obs)
    for i in range(3):
        alone = init(keys[i], obs)
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(a[i], b, atol=1e-6)
        for a, b in zip(together, apply(alone, obs), strict=True):
            np.testing.assert_allclose(a[i], b, atol=2e-6)


# --- bad input -------------------------------------------------------------------------------


def test_spaces_and_settings_that_cannot_be_served_are_refused(key: jax.Array) -> None:
    def refuses(
        message: str, make: Any, *args: Any, error: type = ValueError, **kwargs: Any
    ) -> None:
        with pytest.raises(error, match=message) as info:
            make(*args, **kwargs)
        assert "\n" not in str(info.value)

    box, mask = Box(-1.0, 1.0, (2,)), DictSpace({"x": VECTOR, "action_mask": Box(0, 1, (2,))})
    bounds = np.ones((20, 20))
    refuses("not in Box", mlp_policy, env_of(action=Box(-bounds, bounds, (20, 20))))
    refuses("not in DictSpace", mlp_policy, env_of(action=DictSpace({"a": Discrete(2)})))
    refuses("not in MultiDiscrete", mlp_policy, env_of(action=MultiDiscrete(())))
    refuses(
        "Discrete actions cannot act in Box",
        mlp_policy,
        env_of(action=box),
        distribution=categorical,
    )
    refuses("Box actions cannot act in Discrete", mlp_policy, env_of(), distribution=tanh_gaussian)
    refuses("of Box actions, not of Discrete", mlp_policy, env_of(), log_std_init=1.0)
    refuses("of Box actions, not of Discrete", gru_policy, env_of(), state_dependent_std=True)
    refuses("mask needs discrete actions", mlp_policy, env_of(mask, box))
    refuses("cannot observe", mlp_policy, env_of(DictSpace({"action_mask": Box(0, 1, (3,))})))
    refuses(r"cannot observe observation\['a'\]", mlp_policy, env_of(DictSpace({"a": "text"})))
    refuses(r"needs observations \[H, W, C\]", cnn_policy, env_of())
    refuses(
        "2 convolutions with kernel=3 do not fit",
        cnn_policy,
        env_of(Box(0, 1, (4, 9, 1))),
        channels=(2, 2),
    )
    refuses("did you mean tanh", mlp_policy, env_of(), activation="tahn")
    refuses("hidden_sizes must be at least 1, got 0", mlp_policy, env_of(), hidden_sizes=(0,))
    refuses("sequence", mlp_policy, env_of(), hidden_sizes=64, error=TypeError)
    refuses("compute_dtype must be a float", mlp_policy, env_of(), compute_dtype=jnp.int8)

    policy = mlp_policy(env_of())
    refuses(r"N rows of shape \(4,\), got shape \(4,\)", policy.init, key, jnp.zeros(4))
    refuses(r"got shape \(5, 3\)", policy.init, key, jnp.zeros((5, 3)))
    parts = mlp_policy(env_of(DictSpace({"x": VECTOR})))
    refuses("dict with entries {'x'}, got {'y'}", parts.init, key, {"y": obs_of()})
    refuses("dict with entries {'x'}, got <class", parts.init, key, obs_of())
    coded = mlp_policy(env_of(Discrete(4)))
    refuses("integers of Discrete", coded.init, key, jnp.zeros(N), error=TypeError)
