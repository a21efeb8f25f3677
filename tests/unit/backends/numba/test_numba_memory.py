"""Kernels that memory bounds: each element is what it should be, at sizes around a vector's."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numba import njit

from dptrain.backends.numba import dropout, elementwise, losses
from dptrain.network import MeanSquaredError, SigmoidBinaryCrossEntropy
from dptrain.philox import dropout_keep, threshold

SIZES = [1, 4, 7, 31, 64, 127, 128, 129, 300, 1000]
LARGE = 2**33 + 1
"""More than a word of a counter holds."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("in_place", [False, True])
def test_dropout(size, in_place):
    """Forward and backward keep what `dropout_keep` keeps, and write nothing else."""
    rng = np.random.default_rng(size)
    x, dy = rng.standard_normal((2, 3, size), np.float32)
    y, dx = np.full_like(x, np.nan), np.full_like(x, np.nan)
    if in_place:
        y, dx = x.copy(), dy.copy()
    seed, step, layer, rate = 2**40 + 17, 2**32 + 5, 3, 0.37
    samples = np.array([5, LARGE, 2**31])
    kept = dropout_keep(rate, size, seed=seed, step=step, layer=layer, samples=samples)
    bits = np.zeros((3, dropout.mask_bytes(size)), np.uint8)
    key = threshold(rate), layer, samples, seed & 0xFFFFFFFF, seed >> 32
    for start, stop in ((0, 0), (0, 1), (1, 3)):
        dropout.dropout_forward(start, stop, 0, y if in_place else x, y, bits, 2.5, key, step)
        dropout.dropout_backward(start, stop, 0, dx if in_place else dy, dx, bits, 2.5)
    np.testing.assert_array_equal(y, x * np.where(kept, np.float32(2.5), np.float32(0)))
    np.testing.assert_array_equal(dx, dy * np.where(kept, np.float32(2.5), np.float32(0)))
    read = np.unpackbits(bits, axis=1, bitorder="little")[:, :size]
    np.testing.assert_array_equal(read, kept)


def test_dropout_passes_not_a_number():
    """What is dropped is multiplied by 0, which NaN and infinity survive."""
    x = np.array([[np.nan, np.inf, -np.inf, 1.0]] * 8, np.float32)
    y, bits = np.zeros_like(x), np.zeros((8, dropout.mask_bytes(4)), np.uint8)
    samples = np.arange(8)
    dropout.dropout_forward(0, 8, 0, x, y, bits, 2.0, (threshold(0.5), 0, samples, 1, 2), 3)
    kept = dropout_keep(0.5, 4, seed=1 + (2 << 32), step=3, layer=0, samples=samples)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(y, x * np.where(kept, np.float32(2), np.float32(0)))
    assert not kept.all()


@pytest.mark.parametrize("pixels", [1, 3, 15, 16, 35, 64, 2 * elementwise.BAND + 35])
@pytest.mark.parametrize("channels", [1, 2, 3, 5, 17])
def test_channels_last(channels, pixels):
    """Every element of the samples asked for arrives; the others are left alone."""
    source = np.arange(4 * channels * pixels, dtype=np.float32).reshape(4, channels, pixels)
    target = np.full((4, pixels, channels), np.nan, np.float32)
    bands = elementwise.num_bands(pixels)
    elementwise.channels_last(bands, 3 * bands, 0, target, source)
    np.testing.assert_array_equal(target[1:3], source[1:3].transpose(0, 2, 1))
    assert np.isnan(target[[0, 3]]).all()


@njit
def _exponentials(x, y):
    for i in range(x.size):
        y[i] = losses._exp(x[i])


def test_exponentials():
    """Two units in the last place, all the way down to where float64 ends; NaN passes."""
    x = -np.concatenate([np.linspace(0, 2, 10_001), np.geomspace(1e-20, 708, 10_001)])
    y = np.empty_like(x)
    _exponentials(x, y)
    np.testing.assert_allclose(y, np.exp(x), rtol=2 * np.finfo(np.float64).eps)
    x, y = np.array([-709.0, -np.inf, np.nan]), np.empty(3)
    _exponentials(x, y)
    np.testing.assert_array_equal(y < 1e-300, [True, True, False])
    assert np.isnan(y[2])


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (32, 10), (51, 10), (7, 300)])
def test_softmax_cross_entropy(shape):
    """Loss, gradient and number of correct answers, in blocks of samples; equals count once."""
    n, classes = shape
    rng = np.random.default_rng(n)
    z = (5 * rng.standard_normal(shape)).astype(np.float32).round()
    labels = rng.integers(0, classes, n).astype(np.int32)
    gradient, found, sums = np.full_like(z, np.nan), np.full((n, 2), np.nan), np.zeros((2, 2))
    scratch, bounds = losses.softmax_scratch(classes, 1), np.array([0, n // 2, n])
    losses.softmax_cross_entropy(0, n, 0, z, labels, gradient, found, scratch, 0.25, True)
    losses.sum_losses(0, 2, 0, found, sums, bounds, 0.25)
    sums = sums.sum(axis=0)
    exact = z.astype(np.float64)
    shifted = exact - exact.max(axis=1, keepdims=True)
    share = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    rows = np.arange(n)
    loss = (np.log(np.exp(shifted).sum(axis=1)) - shifted[rows, labels]).sum()
    # Everything is in float64 until the gradient is stored.
    np.testing.assert_allclose(sums[0], 0.25 * loss, rtol=1e-13, atol=1e-15)
    assert sums[1] == (z.argmax(axis=1) == labels).sum()
    share[rows, labels] -= 1
    np.testing.assert_allclose(gradient, 0.25 * share, rtol=1e-7, atol=1e-15)


@pytest.mark.parametrize("outputs", [1, 3, 10, 17])
@pytest.mark.parametrize(
    "kernel",
    [
        losses.softmax_cross_entropy,
        losses.softmax_squared_error,
        *(losses.kernel_of(each()) for each in (SigmoidBinaryCrossEntropy, MeanSquaredError)),
    ],
    ids=lambda kernel: kernel.py_func.__name__,
)
def test_losses_have_the_same_bits_however_samples_are_divided(kernel, outputs):
    n, rng = 40, np.random.default_rng(outputs)
    z = 4 * rng.standard_normal((n, outputs), np.float32)
    target = rng.integers(0, 2, (n, outputs)).astype(np.float32)
    scratch: tuple = ()
    if "softmax" in kernel.py_func.__name__:
        target = rng.integers(0, outputs, n).astype(np.int32)
    if kernel is losses.softmax_cross_entropy:
        scratch = (losses.softmax_scratch(outputs, 2),)

    def compute(cuts):
        gradient, found = np.full_like(z, np.nan), np.full((n, 2), np.nan)
        for i, (start, stop) in enumerate(pairwise([0, *cuts, n])):
            kernel(start, stop, i % 2, z, target, gradient, found, *scratch, 0.125, True)
        return gradient.tobytes() + found.tobytes()

    expected = compute([])
    for size in range(1, n):
        assert compute(range(size, n, size)) == expected, size
