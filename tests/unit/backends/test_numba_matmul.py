"""Fully connected kernels against float64."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.backends.numba import amx_matmul, matmul
from dptrain.backends.numba.amx import available
from dptrain.plan.lowering import Phase

EPSILON = float(np.finfo(np.float32).eps)


def close(actual, expected, length):
    """Sums of `length` products of normal numbers: their rounding errors add up like a walk."""
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=8 * EPSILON * (length + 1) ** 0.5 * 4)


SHAPES = [
    (1, 1, 1), (3, 5, 17), (2, 1, 33), (13, 37, 10), (32, 129, 100), (251, 300, 31),
    (9, 800, 390), (780, 30, 33), (400, 420, 40), (17, 33, 47), (70, 290, 530), (33, 64, 672),
    (33, 512, 20), (390, 1024, 30), (3, 37, 100), (1, 20, 128),
]  # fmt: skip
"""Samples, inputs, outputs; beyond what any kernel takes as one block."""


@pytest.fixture(params=SHAPES, ids=str)
def arrays(request):
    n, inputs, outputs = request.param
    rng = np.random.default_rng(0)
    return tuple(
        rng.standard_normal(shape, np.float32)
        for shape in ((n, inputs), (inputs, outputs), (outputs,), (n, outputs))
    )


class Vectors:
    """Kernels of `matmul`, and what scratch they need."""

    forward, backward_input = matmul.dense_forward, matmul.dense_backward_input
    backward_weight = matmul.dense_backward_weight

    @staticmethod
    def sizes(*shape):
        return matmul.dense_scratch(*shape)


class Tiles:
    """Kernels of `amx_matmul`."""

    forward, backward_input = amx_matmul.dense_forward, amx_matmul.dense_backward_input
    backward_weight = amx_matmul.dense_backward_weight

    @staticmethod
    def sizes(*shape):
        return amx_matmul.scratch(*shape)


@pytest.fixture(params=[Vectors, Tiles], ids=["vectors", "tiles"])
def kernels(request):
    if request.param is Tiles and not available():
        pytest.skip("this processor has no tile unit (Intel AMX), or it is not granted")
    return request.param


class Scratch:
    """Memory of two threads that holds no numbers, and more of it behind."""

    def __init__(self, size):
        # From a line of 64 bytes on, as a plan's buffers are.
        memory = np.full(2 * size + 64, np.nan, np.float32)
        first = -memory.ctypes.data // 4 % 16
        self.rows = memory[first : first + 2 * size].reshape(2, size)
        self.behind = memory[first + 2 * size :]

    def intact(self):
        return np.isnan(self.behind).all()


def halves(count):
    """Ranges of threads; one is empty."""
    return (0, 0, 0), (0, count // 2, 0), (count // 2, count, 1)


@pytest.mark.parametrize("relu", [False, True])
def test_forward(kernels, arrays, relu):
    x, w, b, dy = arrays
    y, n = np.full_like(dy, np.nan), len(x)
    scratch = Scratch(kernels.sizes(n, *w.shape)[0])
    for start, stop, thread in halves(n):
        kernels.forward(start, stop, thread, x, w, b, y, relu, scratch.rows)
    expected = x.astype(float) @ w + b
    close(y, np.maximum(expected, 0) if relu else expected, len(w))
    assert scratch.intact()


def test_backward_input(kernels, arrays):
    x, w, _, dy = arrays
    dx, n = np.full_like(x, np.nan), len(x)
    scratch = Scratch(kernels.sizes(n, *w.shape)[2])
    for start, stop, thread in halves(n):
        kernels.backward_input(start, stop, thread, dy, w, dx, scratch.rows)
    close(dx, dy.astype(float) @ w.T, w.shape[1])
    assert scratch.intact()


@pytest.mark.parametrize("n", [None, 0])
def test_backward_weight(kernels, arrays, n):
    x, w, b, dy = arrays
    dw, db = np.full_like(w, np.nan), np.full_like(b, np.nan)
    scratch = Scratch(kernels.sizes(len(x), *w.shape)[1])
    samples = len(x[:n])
    for start, stop, thread in halves(len(w)):
        kernels.backward_weight(start, stop, thread, x, dy, dw, db, scratch.rows, samples)
        # Of ranges that start at the first input, which run side by side, the one that has it.
        assert np.isnan(db).all() == (stop == 0)
    close(dw, x[:n].astype(float).T @ dy[:n], len(x))
    close(db, dy[:n].astype(float).sum(axis=0), len(x))
    assert scratch.intact()


@pytest.mark.parametrize("n", range(1, 71))
def test_every_number_of_samples(kernels, n):
    """Rows that fill tiles, and every rest of them."""
    rng = np.random.default_rng(n)
    inputs, outputs = 32 + n, 107 - n
    x, w, dy = (
        rng.standard_normal(shape, np.float32)
        for shape in ((n, inputs), (inputs, outputs), (n, outputs))
    )
    b = rng.standard_normal(outputs, np.float32)
    forward, weight, backward = (Scratch(size).rows for size in kernels.sizes(n, *w.shape))
    y, dx, dw, db = (np.full_like(array, np.nan) for array in (dy, x, w, b))
    kernels.forward(0, n, 1, x, w, b, y, False, *((forward,) if forward.size else ()))
    kernels.backward_input(0, n, 1, dy, w, dx, backward)
    kernels.backward_weight(0, inputs, 1, x, dy, dw, db, weight, n)
    close(y, x.astype(float) @ w + b, inputs)
    close(dx, dy.astype(float) @ w.T, outputs)
    close(dw, x.astype(float).T @ dy, n)
    close(db, dy.astype(float).sum(axis=0), n)


def test_not_a_number_passes(kernels):
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape, np.float32) for shape in ((64, 70), (70, 40), (64, 40)))
    b, y, dx = np.zeros(40, np.float32), np.zeros_like(dy), np.zeros_like(x)
    x[5, 69] = dy[33, 2] = np.nan
    forward, _, backward = (Scratch(size).rows for size in kernels.sizes(64, *w.shape))
    kernels.forward(0, 64, 0, x, w, b, y, True, *((forward,) if forward.size else ()))
    kernels.backward_input(0, 64, 0, dy, w, dx, backward)
    for result, row in ((y, 5), (dx, 33)):
        assert np.isnan(result[row]).all()
        assert np.isfinite(np.delete(result, row, axis=0)).all()


@pytest.mark.parametrize(
    ("shape", "phases"),
    [
        ((63, 1, 800, 400), set()),
        ((64, 1, 800, 400), {Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT}),
        ((64, 2, 800, 400), {Phase.BACKWARD_WEIGHT}),
        ((64, 1, 100, 400), {Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT}),
        ((1024, 1, 800, 10), set()),
    ],
)
def test_tiles_take_what_has_enough_samples_a_thread(shape, phases, monkeypatch):
    """Weights are split for every thread that multiplies with them: few samples do not pay it."""
    monkeypatch.setattr(amx_matmul, "available", lambda: True)
    assert set(amx_matmul.choose(*shape)) == phases
