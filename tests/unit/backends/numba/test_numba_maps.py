"""Kernels that work on maps without parameters: response normalisation and max pooling."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.backends.numba.convolution.fused_pooling import Pool
from dptrain.backends.numba.normalization import normalization
from dptrain.backends.numba.pooling import pooling

EPSILON = float(np.finfo(np.float32).eps)
PIXELS, FIRST, LAST = 37, 3, 35


def _windows(a, radius):
    padded = np.pad(a, ((0, 0), (radius, radius)))
    return sum(padded[:, i : i + a.shape[1]] for i in range(2 * radius + 1))


def _normalise(x, dy, radius, bias, alpha, beta, threads=2):
    """What the kernels make of pixels FIRST to LAST, in memory that held NaN."""
    x, dy = np.float32(x), np.float32(dy)
    y, dx = np.full_like(x, 7.0), np.full_like(x, 7.0)
    shape = normalization.scratch_shape(threads, x.shape[1], radius)
    for kernel, arrays in (
        (normalization.lrn_forward, (x, y)),
        (normalization.lrn_backward, (x, dy, dx)),
    ):
        scratch = np.full(shape, np.nan, np.float32)
        kernel(FIRST, LAST, threads - 1, *arrays, scratch, (radius, bias, alpha, beta))
    return y, dx


def _exact(x, dy, radius, bias, alpha, beta):
    x, dy = np.float64(np.float32(x)), np.float64(np.float32(dy))
    s = bias + alpha * _windows(x * x, radius)
    sums = _windows(dy * x * s ** (-beta - 1.0), radius)
    return x * s**-beta, dy * s**-beta - 2.0 * alpha * beta * x * sums


@pytest.mark.parametrize("beta", [0.75, 0.6])
@pytest.mark.parametrize("radius", [0, 2, 4, 19])
@pytest.mark.parametrize("channels", [1, 7, 33, 64])
def test_response_norm_is_right(channels, radius, beta):
    """Whatever fills vectors or does not; other pixels stay as they are."""
    rng = np.random.default_rng(channels)
    x, dy = rng.standard_normal((2, PIXELS, channels))
    y, dx = _normalise(x, dy, radius, 1.0, 0.1, beta)
    exact_y, exact_dx = _exact(x, dy, radius, 1.0, 0.1, beta)
    inside = slice(FIRST, LAST)
    # s is a sum of some 2 · radius terms, each added with an error of ε / 2, and raised to −beta.
    bound = (4.0 + radius) * EPSILON
    np.testing.assert_allclose(y[inside], exact_y[inside], rtol=bound, atol=0)
    np.testing.assert_allclose(dx[inside], exact_dx[inside], rtol=0, atol=2 * bound * abs(dy).max())
    for result in (y, dx):
        assert (np.delete(result, np.r_[inside], axis=0) == 7.0).all()


@pytest.mark.parametrize("radius", [2, 4])
def test_powers_are_rounded_alone(radius):
    """s^−¾ over all magnitudes of s: three products of factors that are exact to ε / 2."""
    bias = np.float32(np.logspace(-37, 38, PIXELS))
    for b in bias[FIRST:LAST]:
        x = np.zeros((PIXELS, 64), np.float32)
        x[:, 5] = 1.0
        y, _ = _normalise(x, x, radius, float(b), 0.0, 0.75)
        np.testing.assert_allclose(y[FIRST, 5], float(b) ** -0.75, rtol=2.5 * EPSILON)


@pytest.mark.parametrize("channels", [20, 64])
def test_response_norm_passes_on_what_is_no_number(channels):
    """A NaN reaches its window in y and twice that in dx; a square beyond float32 gives zeros."""
    x = np.ones((PIXELS, channels))
    x[8, 10], x[9, 10] = np.nan, 1e20
    y, dx = _normalise(x, np.ones_like(x), 4, 1.0, 0.1, 0.75)
    assert (np.flatnonzero(np.isnan(y[8])) == np.arange(6, 15)).all()
    assert (np.flatnonzero(np.isnan(dx[8])) == np.arange(2, 19)).all()
    assert (y[9, 6:15] == 0.0).all()
    assert not np.isnan(np.delete(y[FIRST:LAST], 8 - FIRST, axis=0)).any()


POOLS = {
    "3/2, same": ((3, 3), (2, 2), (0, 0), (12, 12), (6, 6)),
    "3/2, odd, zeros around": ((3, 3), (2, 2), (1, 1), (7, 9), (4, 5)),
    "3/1": ((3, 3), (1, 1), (1, 1), (5, 4), (5, 4)),
    "2x3/2x1": ((2, 3), (2, 1), (0, 1), (6, 5), (3, 5)),
    "5x4/3x2": ((5, 4), (3, 2), (2, 1), (9, 8), (3, 4)),
    "2/3, gaps": ((2, 2), (3, 3), (0, 0), (8, 7), (2, 2)),
}


@pytest.mark.parametrize("channels", [3, 37, 64])
@pytest.mark.parametrize("pool", POOLS)
def test_max_pooling_is_right(pool, channels):
    """Equal elements, infinities and NaN: the first of the largest, and a NaN before all."""
    windows, strides, pads, maps, pooled = POOLS[pool]
    rng = np.random.default_rng(channels)
    x = np.float32(rng.integers(-4, 5, (2, *maps, channels)))
    for value in (-np.inf, np.nan):
        x[rng.random(x.shape) < 0.1] = value
    dy = np.float32(rng.integers(-9, 10, (2, *pooled, channels)))
    y, dx = np.full_like(dy, 7.0), np.full_like(x, 7.0)
    argmax, expected = np.full(dy.shape, -7, np.int32), np.zeros_like(x)
    pool = Pool(*pads, *strides, *windows, *maps, argmax)
    pooling.max_forward(0, 2 * y.shape[1], 0, x, y, pool)
    pooling.max_backward(0, 2 * dx.shape[1], 0, dy, dx, pool)
    for n, i, j, c in np.ndindex(dy.shape):
        row, column = i * strides[0] - pads[0], j * strides[1] - pads[1]
        places = [
            (p * windows[1] + q, (n, row + p, column + q, c))
            for p, q in np.ndindex(windows)
            if 0 <= row + p < maps[0] and 0 <= column + q < maps[1]
        ]
        chosen = int(np.argmax([x[place] for _, place in places]))
        position, place = places[chosen]
        assert argmax[n, i, j, c] == position
        np.testing.assert_equal(y[n, i, j, c], x[place])
        expected[place] += dy[n, i, j, c]
    np.testing.assert_array_equal(dx, expected)
