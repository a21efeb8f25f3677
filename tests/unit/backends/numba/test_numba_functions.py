"""Exponential functions that LLVM vectorises, compared with those of the C library in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from dptrain.backends.numba import activations

SQRT_HALF = math.sqrt(0.5)
FUNCTIONS: Mapping[str, Callable[[float], float]] = {
    "exp": lambda x: math.exp(min(x, 700.0)),
    "expm1": lambda x: math.expm1(min(x, 700.0)),
    "sigmoid": lambda x: 1.0 / (1.0 + math.exp(min(-x, 700.0))),
    "tanh": math.tanh,
    "softplus": lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
    "normal_cdf": lambda x: 0.5 * math.erfc(-SQRT_HALF * x),
    "normal_pdf": lambda x: math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi),
}
SPECIAL = (0.0, -0.0, 1e-38, -1e-38, 88.7, 88.8, -87.4, -103.9, 3e38, -3e38, math.inf, -math.inf)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_all_magnitudes_is_rounded_almost_correctly(name: str) -> None:
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 1 << 32, 100_000, np.uint64).astype(np.uint32)
    some = rng.uniform(-20.0, 20.0, 100_000).astype(np.float32)
    x = np.concatenate([some, bits.view(np.float32), np.array(SPECIAL, np.float32)])
    x = x[~np.isnan(x)]
    found = np.empty_like(x)
    activations.forward(f"only_{name}", f"{name}(x)")(0, len(x), 0, x, found)
    exact = np.array([FUNCTIONS[name](float(value)) for value in x])
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float32)
    finite = np.isfinite(rounded)
    np.testing.assert_array_equal(found[~finite], rounded[~finite])
    # Half of a unit in the last place, and the error of the float64 function; smaller numbers than
    # the least normal one have absolute errors.
    allowed = 8e-8 * np.abs(exact[finite]) + 1e-45
    assert (np.abs(found[finite] - exact[finite]) <= allowed).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_passes_through(name: str) -> None:
    x = np.full(17, np.nan, np.float32)
    found = np.zeros_like(x)
    activations.forward(f"only_{name}", f"{name}(x)")(0, len(x), 0, x, found)
    assert np.isnan(found).all()
