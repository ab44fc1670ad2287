"""A state comes back from disk bit for bit, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpg.checkpoints import load_checkpoint, save_checkpoint


class State(NamedTuple):
    params: dict[str, Any]
    opt_state: Any
    statistics: Any
    key: jax.Array
    update: jax.Array


def make_state(key: jax.Array) -> State:
    params = {
        "actor": {"kernel": jax.random.normal(key, (3, 2)), "bias": jnp.zeros(2, jnp.bfloat16)},
        "critic": (jnp.full((), 0.1, jnp.float32), jnp.ones((0, 4))),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))
    return State(
        params=params,
        opt_state=optimizer.init(params),
        statistics=(),
        key=jax.random.fold_in(key, 1),
        update=jnp.asarray(7, jnp.int32),
    )


def words(tree: Any) -> list[np.ndarray]:
    def raw(x: jax.Array) -> np.ndarray:
        typed = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if typed else x)

    return [raw(x) for x in jax.tree.leaves(tree)]


def assert_same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert not getattr(a, "weak_type", False)
    for a, b in zip(words(one), words(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("num_seeds", [None, 3])
def test_round_trip(tmp_path: Path, key: jax.Array, num_seeds: int | None) -> None:
    init = make_state
    if num_seeds is not None:
        init, key = jax.vmap(make_state), jax.random.split(key, num_seeds)
    state = init(key)
    save_checkpoint(tmp_path / "checkpoint", state)
    abstract = jax.eval_shape(init, key)
    assert_same(load_checkpoint(tmp_path / "checkpoint", abstract), state)
    assert_same(load_checkpoint(tmp_path / "checkpoint", state), state)
    # the loaded key draws what the saved one would have drawn
    loaded = load_checkpoint(tmp_path / "checkpoint", abstract)
    draw = jax.random.normal if num_seeds is None else jax.vmap(jax.random.normal)
    np.testing.assert_array_equal(draw(loaded.key), draw(state.key))


def test_another_kind_of_key(tmp_path: Path) -> None:
    state = {"key": jax.random.key(3, impl="rbg"), "legacy": jax.random.PRNGKey(4)}
    save_checkpoint(tmp_path / "checkpoint", state)
    loaded = load_checkpoint(tmp_path / "checkpoint", state)
    assert jax.random.key_impl(loaded["key"]) == jax.random.key_impl(state["key"])
    assert_same(loaded, state)


def test_never_overwrites_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save_checkpoint(path, {"w": jnp.ones(2)})
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_checkpoint(path, {"w": jnp.zeros(2)})
    np.testing.assert_array_equal(load_checkpoint(path, {"w": jnp.ones(2)})["w"], [1.0, 1.0])
    save_checkpoint(path, {"w": jnp.zeros(2)}, overwrite=True)
    np.testing.assert_array_equal(load_checkpoint(path, {"w": jnp.ones(2)})["w"], [0.0, 0.0])
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"w": jnp.ones(3)}, r"w is float32\(2,\) there, float32\(3,\) expected"),
        ({"w": jnp.ones(2, jnp.int32)}, r"w is float32\(2,\) there, int32\(2,\) expected"),
        ({"v": jnp.ones(2)}, r"v is absent there, float32\(2,\) expected \(and 1 more\)"),
        ({"w": jnp.ones(2), "v": jnp.ones(1)}, "v is absent there"),
        ({}, r"w is float32\(2,\) there, absent expected"),
    ],
)
def test_refuses_what_does_not_fit(tmp_path: Path, like: Any, message: str) -> None:
    save_checkpoint(tmp_path / "checkpoint", {"w": jnp.ones(2)})
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "checkpoint", like)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load_checkpoint(tmp_path / "nothing", {"w": jnp.ones(2)})
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load_checkpoint(tmp_path / "empty", {"w": jnp.ones(2)})
