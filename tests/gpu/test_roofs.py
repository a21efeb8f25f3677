"""Roofs of the roofline model: products of cuBLAS and copies are right and timed correctly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dptrain.backends import load_backend
from dptrain.backends.cuda.device import cublas
from dptrain.backends.memory import as_numbers


@pytest.fixture(scope="module")
def gpu() -> Any:
    """The first GPU."""
    return load_backend("cuda").device  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("precision", "rounding"), [("fp32", 1e-6), ("tf32", 1e-3), ("bf16", 1e-2)]
)
def test_the_product_of_cublas_is_right(gpu: Any, precision: str, rounding: float) -> None:
    """Up to the rounding of the factors and, with bf16, of the result."""
    n, bits = 96, precision == "bf16"
    random = np.random.default_rng(1).standard_normal((2, n, n), np.float32)
    values = (random.view("uint32") >> 16).astype("uint16") if bits else random
    a, b, c = (gpu.zeros((n, n), values.dtype) for _ in range(3))
    for array, value in zip((a, b), values, strict=True):
        gpu.upload(array, value)
    cublas.square_product(gpu.cupy, gpu.stream, a, b, c, precision)()
    x, y, z = (as_numbers(gpu.download(array)).astype(np.float64) for array in (a, b, c))
    # Column-major: read as row-major, the result is the product of the exchanged factors.
    expected = y @ x
    assert np.linalg.norm(z - expected) <= rounding * np.linalg.norm(expected)


def test_the_time_of_a_product_grows_with_its_size(gpu: Any) -> None:
    """512 times the work. Without synchronization both calls would take about the same time."""
    small, large = (min(gpu.product_ms(size, "tf32")) for size in (1024, 8192))
    assert large > 2 * small


def test_a_copy_is_equal(gpu: Any) -> None:
    source, target = (gpu.zeros((1 << 20,), "uint8") for _ in range(2))
    bits = np.random.default_rng(2).integers(0, 256, 1 << 20).astype(np.uint8)
    gpu.upload(source, bits)
    gpu.copy(target, source)
    assert (gpu.download(target) == bits).all()
