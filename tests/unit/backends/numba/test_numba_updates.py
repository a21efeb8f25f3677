"""Update kernels, whose ranges of equal rates end within blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.backends.numba import updates
from dptrain.native.jit import Kernel

SIZE = 3 * 512 + 48
SEGMENTS = updates.Segments(
    np.array([0, 16, 528, 1200, SIZE], np.int64),
    np.array([0.0, 0.1, 0.0, 0.3], np.float32),
    np.array([1.0, 0.5, 3.0, 1.0], np.float32),
)
RATE = 0.25


def arrays(count: int) -> list[NDArray[np.float32]]:
    random = np.random.default_rng(7)
    return [random.random(SIZE, np.float32) for _ in range(count)]


def operands(found: list[NDArray[np.float32]]) -> list[Any]:
    """Return parameters, gradients and state, of which Adam's are a pair."""
    return found if len(found) < 4 else [*found[:2], tuple(found[2:])]


def test_every_element_has_the_rates_of_its_range() -> None:
    w, g = arrays(2)
    sizes = np.diff(SEGMENTS.bounds)
    decay, factor = np.repeat(SEGMENTS.decays, sizes), np.repeat(SEGMENTS.factors, sizes)
    expected = w - np.float32(RATE) * factor * (g + decay * w)
    updates.sgd(0, SIZE, 0, w, g, SEGMENTS, RATE)
    np.testing.assert_allclose(w, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kernel", "count", "settings"),
    [
        (updates.sgd, 2, (RATE,)),
        (updates.sgd_momentum, 3, (0.9, True, RATE)),
        (updates.adam, 4, ((0.9, 0.999, 1e-8), RATE, 3)),
        (updates.adamw, 4, ((0.9, 0.999, 1e-8), RATE, 3)),
        (updates.rmsprop, 4, ((0.9, 1e-8, 0.5), RATE)),
        (updates.lamb_direction, 4, ((0.9, 0.999, 1e-8), 3)),
        (updates.scale_layers, 2, ()),
    ],
)
def test_chunks_have_the_bits_of_one_range(
    kernel: Kernel, count: int, settings: tuple[Any, ...]
) -> None:
    """Elements outside of a chunk do not change."""
    whole, chunks = arrays(count), arrays(count)
    kernel(0, SIZE, 0, *operands(whole), SEGMENTS, *settings)
    for start, stop in ((528, 1040), (0, 528), (1040, SIZE)):
        before = chunks[0].copy()
        kernel(start, stop, 0, *operands(chunks), SEGMENTS, *settings)
        outside = np.ones(SIZE, bool)
        outside[start:stop] = False
        np.testing.assert_array_equal(chunks[0][outside], before[outside])
    for one, other in zip(whole, chunks, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("cuts", [(32,), (1,), (3, 7, 50, 51)])
def test_squares_have_the_bits_of_one_range(cuts: tuple[int, ...]) -> None:
    """Slices of ranks and chunks of threads are divided elsewhere; each sum has 16 elements."""
    (g,) = arrays(1)
    rows = SIZE // 16
    whole, chunks = np.zeros(rows), np.zeros(rows)
    updates.add_squares(0, rows, 0, g, whole)
    for start, stop in zip((0, *cuts), (*cuts, rows), strict=True):
        # A rank has arrays of its slice only.
        mine = chunks[start:stop]
        middle = (stop - start) // 3
        updates.add_squares(middle, stop - start, 0, g[16 * start : 16 * stop], mine)
        updates.add_squares(0, middle, 0, g[16 * start : 16 * stop], mine)
    np.testing.assert_array_equal(chunks, whole)
    expected = np.square(g, dtype=np.float64).reshape(rows, 16).sum(1)
    np.testing.assert_allclose(whole, expected, rtol=1e-14)


def test_gradients_are_scaled() -> None:
    (g,) = arrays(1)
    before = g.copy()
    updates.scale(16, SIZE, 0, g, 0.3)
    np.testing.assert_array_equal(g[:16], before[:16])
    np.testing.assert_array_equal(g[16:], np.float32(0.3) * before[16:])
