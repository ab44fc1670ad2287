"""Forward views in NumPy: explicit sums over later rows, no recursion, one number at a time.

They share no code and no idea with the library, so they cannot share its mistakes. Everything is
float64; arrays are ``[T, ...]`` and settings broadcast to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

CASES = Path(__file__).parent / "cases"


def load_cases(file: str, section: str, *functions: str) -> list[dict]:
    """The cases of some functions, with the strings "nan", "inf", "-inf" as floats."""
    cases = json.loads((CASES / file).read_text())[section]
    return [_floats(case) for case in cases if case["fn"] in functions]


def _floats(x: object) -> object:
    if isinstance(x, dict):
        return {key: value if key == "id" else _floats(value) for key, value in x.items()}
    if isinstance(x, list):
        return [_floats(value) for value in x]
    return float(x) if x in ("nan", "inf", "-inf") else x


def case_ids(cases: list[dict]) -> dict:
    """Arguments for ``parametrize``: the cases, under their own names."""
    return {"argvalues": cases, "ids": [case["id"] for case in cases]}


def settings(case: dict) -> dict:
    """The keyword arguments of a case, lists as arrays."""
    return {k: np.asarray(v) if isinstance(v, list) else v for k, v in case["params"].items()}


def close(actual: object, expected: object, tol: float, context: str = "") -> None:
    """Within `tol` on the scale of the largest expected number, and of the same shape."""
    actual, expected = np.asarray(actual), np.asarray(expected, dtype=np.float64)
    assert actual.shape == expected.shape, f"{context}: {actual.shape} is not {expected.shape}"
    scale = max(1.0, np.max(np.abs(expected), initial=0.0))
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, rtol=0, atol=tol * scale, err_msg=context
    )


def rollout(seed: int, shape: tuple[int, ...], *, flag_rate: float = 0.2) -> dict[str, np.ndarray]:
    """A random rollout. Next values belong to another network, so no two fields determine a third;
    some rows carry both flags, and next values are NaN behind every termination."""
    rng = np.random.default_rng(seed)
    terminated = rng.random(shape) < flag_rate
    truncated = rng.random(shape) < flag_rate
    return {
        "rewards": rng.normal(size=shape),
        "values": rng.normal(size=shape) * 3,
        "next_values": np.where(terminated, np.nan, rng.normal(size=shape) * 3),
        "terminated": terminated,
        "truncated": truncated,
        "log_ratios": rng.normal(size=shape) * 0.7,
        "gamma": rng.uniform(0.5, 1.0, size=shape),
        "lambda_": rng.uniform(0.0, 1.0, size=shape),
    }


def _rows(
    terminated: np.ndarray, truncated: np.ndarray
) -> Iterator[tuple[tuple[int, ...], tuple, list[int]]]:
    """Every index with its column and the rows from it to the end of its piece of episode."""
    flags = terminated | truncated
    for index in np.ndindex(flags.shape):
        t, column = index[0], index[1:]
        rows = [t]
        while not flags[(rows[-1], *column)] and rows[-1] + 1 < flags.shape[0]:
            rows.append(rows[-1] + 1)
        yield index, column, rows


def _stretch(
    rewards: np.ndarray,
    next_values: np.ndarray,
    terminated: np.ndarray,
    gamma: np.ndarray,
    column: tuple,
    rows: list[int],
) -> float:
    """The rewards of some rows, discounted, and the value behind the last of them."""
    total, discount = 0.0, 1.0
    for k in rows:
        total += discount * rewards[(k, *column)]
        discount *= gamma[(k, *column)]
    last = (rows[-1], *column)
    return total if terminated[last] else total + discount * next_values[last]


def td_errors(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    terminated: np.ndarray,
    gamma: np.ndarray,
) -> np.ndarray:
    """δ, row by row."""
    out = np.zeros(rewards.shape)
    for index in np.ndindex(rewards.shape):
        following = 0.0 if terminated[index] else next_values[index]
        out[index] = rewards[index] + gamma[index] * following - values[index]
    return out


def n_step_returns(
    rewards: np.ndarray,
    next_values: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    gamma: np.ndarray,
    n: int,
) -> np.ndarray:
    """Sums over at most n rows; n = T gives bootstrapped Monte Carlo returns."""
    out = np.zeros(rewards.shape)
    for index, column, rows in _rows(terminated, truncated):
        out[index] = _stretch(rewards, next_values, terminated, gamma, column, rows[:n])
    return out


def lambda_returns(
    rewards: np.ndarray,
    next_values: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    gamma: np.ndarray,
    lambda_: np.ndarray,
) -> np.ndarray:
    """The mean of all n-step returns with weights (1 − λ)·λ···λ, the rest on the longest."""
    out = np.zeros(rewards.shape)
    for index, column, rows in _rows(terminated, truncated):
        weight = 1.0
        for n in range(1, len(rows) + 1):
            link = lambda_[(rows[n - 1], *column)]
            share = weight if n == len(rows) else weight * (1 - link)
            stretch = _stretch(rewards, next_values, terminated, gamma, column, rows[:n])
            out[index] += share * stretch
            weight *= link
    return out


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    gamma: np.ndarray,
    lambda_: np.ndarray,
) -> np.ndarray:
    """Σ (γλ)···(γλ)·δ up to the end of the piece."""
    delta = td_errors(rewards, values, next_values, terminated, gamma)
    out = np.zeros(rewards.shape)
    for index, column, rows in _rows(terminated, truncated):
        weight = 1.0
        for k in rows:
            out[index] += weight * delta[(k, *column)]
            weight *= gamma[(k, *column)] * lambda_[(k, *column)]
    return out


def per_decision_returns(
    log_ratios: np.ndarray,
    rewards: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    next_values: np.ndarray,
    gamma: np.ndarray,
    ratio_clip: float,
) -> np.ndarray:
    """Σ γ···γ·ρ···ρ·r, every ρ up to and with the one of the reward."""
    ratios = np.minimum(np.exp(log_ratios), ratio_clip)
    out = np.zeros(rewards.shape)
    for index, column, rows in _rows(terminated, truncated):
        weight = 1.0
        for k in rows:
            weight *= ratios[(k, *column)]
            out[index] += weight * rewards[(k, *column)]
            weight *= gamma[(k, *column)]
        last = (rows[-1], *column)
        if not terminated[last]:
            out[index] += weight * next_values[last]
    return out


def vtrace(
    log_ratios: np.ndarray,
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    gamma: np.ndarray,
    lambda_: np.ndarray,
    rho_clip: float,
    c_clip: float,
    pg_rho_clip: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The sum of equation 1 of the paper, and the bracket of its policy gradient."""
    ratios = np.exp(log_ratios)
    delta = td_errors(rewards, values, next_values, terminated, gamma)
    targets, advantages = np.array(values), np.zeros(rewards.shape)
    for index, column, rows in _rows(terminated, truncated):
        weight = 1.0
        for k in rows:
            here = (k, *column)
            targets[index] += weight * min(rho_clip, ratios[here]) * delta[here]
            weight *= gamma[here] * lambda_[here] * min(c_clip, ratios[here])
    for index, column, rows in _rows(terminated, truncated):
        if terminated[index]:
            following = 0.0
        elif len(rows) == 1:
            following = next_values[index]
        else:
            following = targets[(index[0] + 1, *column)]
        bracket = rewards[index] + gamma[index] * following - values[index]
        advantages[index] = min(pg_rho_clip, ratios[index]) * bracket
    return targets, advantages


def standardize(
    x: np.ndarray, valid: np.ndarray, *, ddof: float = 1, eps: float = 0.0
) -> np.ndarray:
    """(x − mean)/(std + eps) of the valid entries of one group, 0 elsewhere and without spread."""
    out = np.zeros(x.shape)
    kept = [x[i] for i in np.ndindex(x.shape) if valid[i]]
    if len(kept) <= ddof or max(kept) == min(kept):
        return out
    mean = sum(kept) / len(kept)
    std = np.sqrt(sum((one - mean) ** 2 for one in kept) / (len(kept) - ddof))
    for i in np.ndindex(x.shape):
        if valid[i]:
            out[i] = (x[i] - mean) / (std + eps)
    return out


def leave_one_out(x: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """One group: each valid entry minus the mean of the other valid ones."""
    out = np.zeros(x.shape)
    for i in range(len(x)):
        others = [x[j] for j in range(len(x)) if j != i and valid[j]]
        if valid[i] and others:
            out[i] = x[i] - sum(others) / len(others)
    return out


def rewards_to_go(rewards: np.ndarray, valid: np.ndarray, gamma: float) -> np.ndarray:
    """``[N, T]``: sums over the later valid tokens of a row, discounted per valid token."""
    out = np.zeros(rewards.shape)
    for i, t in np.ndindex(rewards.shape):
        if valid[i, t]:
            later = [k for k in range(t, rewards.shape[1]) if valid[i, k]]
            out[i, t] = sum(gamma**steps * rewards[i, k] for steps, k in enumerate(later))
    return out
