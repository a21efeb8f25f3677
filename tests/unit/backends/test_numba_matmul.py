"""Fully connected kernels against float64."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.backends.numba import matmul

EPSILON = float(np.finfo(np.float32).eps)


def close(actual, expected, length):
    """Sums of `length` products of normal numbers: their rounding errors add up like a walk."""
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=8 * EPSILON * (length + 1) ** 0.5 * 4)


@pytest.fixture(
    params=[
        (1, 1, 1), (3, 5, 17), (2, 1, 33), (13, 37, 10), (32, 129, 100), (251, 300, 31),
        (9, 800, 390), (780, 30, 33), (400, 420, 40),
    ],
    ids=str,
)  # fmt: skip
def arrays(request):
    n, inputs, outputs = request.param
    rng = np.random.default_rng(0)
    return tuple(
        rng.standard_normal(shape, np.float32)
        for shape in ((n, inputs), (inputs, outputs), (outputs,), (n, outputs))
    )


@pytest.mark.parametrize("relu", [False, True])
def test_forward(arrays, relu):
    x, w, b, dy = arrays
    y, n = np.full_like(dy, np.nan), len(x)
    for start, stop, thread in ((0, 0, 0), (0, n // 2, 0), (n // 2, n, 1)):
        matmul.dense_forward(start, stop, thread, x, w, b, y, relu)
    expected = x.astype(float) @ w + b
    close(y, np.maximum(expected, 0) if relu else expected, len(w))


def test_backward_input(arrays):
    x, w, _, dy = arrays
    dx, n = np.full_like(x, np.nan), len(x)
    scratch = np.full((2, matmul.dense_scratch(n, *w.shape)), np.nan, np.float32)
    for start, stop, thread in ((0, 0, 0), (0, n // 2, 0), (n // 2, n, 1)):
        matmul.dense_backward_input(start, stop, thread, dy, w, dx, scratch)
    close(dx, dy.astype(float) @ w.T, w.shape[1])


@pytest.mark.parametrize("n", [None, 0])
def test_backward_weight(arrays, n):
    x, w, b, dy = arrays
    dw, db, inputs = np.full_like(w, np.nan), np.full_like(b, np.nan), len(w)
    scratch = np.full((2, matmul.dense_scratch(len(x), *w.shape)), np.nan, np.float32)
    samples = len(x[:n])
    for start, stop, thread in ((0, inputs // 2, 0), (inputs // 2, inputs, 1)):
        matmul.dense_backward_weight(start, stop, thread, x, dy, dw, db, scratch, samples)
    close(dw, x[:n].astype(float).T @ dy[:n], len(x))
    close(db, dy[:n].astype(float).sum(axis=0), len(x))
