"""What a GPU can do, measured: the library's product and the copy are right, then fast."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dptrain.backends import load_backend
from dptrain.backends.cuda import cublas
from dptrain.backends.memory import as_numbers


@pytest.fixture(scope="module")
def gpu() -> Any:
    """The first one."""
    return load_backend("cuda").device  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("precision", "rounding"), [("fp32", 1e-6), ("tf32", 1e-3), ("bf16", 1e-2)]
)
def test_the_librarys_product_is_one(gpu: Any, precision: str, rounding: float) -> None:
    """To the rounding of its factors, and under bf16 of its results."""
    n, bits = 96, precision == "bf16"
    random = np.random.default_rng(1).standard_normal((2, n, n), np.float32)
    values = (random.view("uint32") >> 16).astype("uint16") if bits else random
    a, b, c = (gpu.zeros((n, n), values.dtype) for _ in range(3))
    for array, value in zip((a, b), values, strict=True):
        gpu.upload(array, value)
    cublas.square_product(gpu.cupy, gpu.stream, a, b, c, precision)()
    x, y, z = (as_numbers(gpu.download(array)).astype(np.float64) for array in (a, b, c))
    # Column by column: what lies there row by row is the transposed product of both exchanged.
    expected = y @ x
    assert np.linalg.norm(z - expected) <= rounding * np.linalg.norm(expected)


def test_the_librarys_product_takes_as_long_as_it_is_large(gpu: Any) -> None:
    """Of 512 times the work; calls alone, which are not waited for, take about the same."""
    small, large = (min(gpu.product_ms(size, "tf32")) for size in (1024, 8192))
    assert large > 2 * small


def test_a_copy_is_the_same(gpu: Any) -> None:
    source, target = (gpu.zeros((1 << 20,), "uint8") for _ in range(2))
    bits = np.random.default_rng(2).integers(0, 256, 1 << 20).astype(np.uint8)
    gpu.upload(source, bits)
    gpu.copy(target, source)
    assert (gpu.download(target) == bits).all()
