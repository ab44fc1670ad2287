"""Reference cases of the policy and group losses: loading them and comparing with them."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

NONFINITE = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


def _finite(x: object) -> object:
    if isinstance(x, list):
        return [_finite(item) for item in x]
    return NONFINITE.get(x, x) if isinstance(x, str) else x


def load_cases(name: str, *functions: str) -> list[dict]:
    """The cases of ``cases/<name>.json``, or those of some of its functions."""
    cases = json.loads((Path(__file__).parent / "cases" / f"{name}.json").read_text())["cases"]
    for case in cases:
        case["inputs"] = {k: _finite(v) for k, v in case["inputs"].items()}
        case["expected"] = {k: _finite(v) for k, v in case["expected"].items()}
    found = [case for case in cases if not functions or case["fn"] in functions]
    assert found, f"no case of {functions} in {name}"
    return found


def arrays(case: dict, *names: str) -> list[jnp.ndarray]:
    """Inputs of a case in the default float of the moment (float32, or float64 under x64)."""
    return [jnp.asarray(np.asarray(case["inputs"][name], np.float64), float) for name in names]


def assert_close(actual: object, expected: object, what: str = "") -> None:
    """To 1e-8 in float64 (expected values are rounded to 1e-9), else to float32's 1e-5."""
    actual, expected = np.asarray(actual), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    largest = np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected))
    tolerance = 1e-8 if actual.dtype == np.float64 else 1e-5 * max(1.0, largest)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance, err_msg=what)
