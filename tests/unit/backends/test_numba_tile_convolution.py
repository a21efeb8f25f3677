"""Convolution on the tile unit against PyTorch in float64, at awkward shapes."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.backends.numba import tile_convolution as conv
from dptrain.backends.numba import tiles
from dptrain.backends.numba.windows import NO_GRADIENT
from tests.unit.backends import test_numba_convolution as vectors

pytestmark = pytest.mark.skipif(
    not tiles.available(),
    reason="this processor has no tile unit (Intel AMX), or it is not granted",
)

CASES = {
    name: case
    for name, case in vectors.CASES.items()
    if case[4] == (1, 1) and all(max(case[5][i]) < case[3][i] for i in range(2))
}
"""Those of stride 1 whose padding no filter can be wholly in."""
CASES |= {
    "runs with padding": (2, (20, 20, 16), 32, (3, 3), (1, 1), ((1, 1), (1, 1))),
    "many channels": (1, (12, 12, 64), 80, (5, 5), (1, 1), ((2, 2), (2, 2))),
    "filter rows that fit": (2, (9, 10, 3), 40, (5, 5), (1, 1), ((2, 2), (2, 2))),
}


class Case(vectors.Case):
    """With walks instead of geometry."""

    def __init__(self, case, pool=None):
        super().__init__(case, pool=pool)
        n, maps, k, window, _, pads = case
        out = [vectors.nhwc(self.ty).shape[1 + i] for i in range(2)]
        if pool:
            out = [maps[i] + sum(pads[i]) - window[i] + 1 for i in range(2)]
        out, corner = (*out, k), (pads[0][0], pads[1][0])
        around = tuple(window[i] - 1 - corner[i] for i in range(2))
        self.forward = conv.correlation(maps, out, window, corner)
        self.weight = conv.accumulation(maps, out, window, corner)
        self.input = conv.correlation(out, maps, window, around)
        sizes = [int(walk[-1]) for walk in (self.forward, self.weight, self.input)]
        self.memory = [np.full(2 * size + 64, np.nan, np.float32) for size in sizes]
        self.scratch = [
            m[: 2 * size].reshape(2, size) for m, size in zip(self.memory, sizes, strict=True)
        ]

        taps, pixels = window[0] * window[1], n * out[0] * out[1]
        self.lengths = {"y": taps * maps[2], "dx": taps * k, "dw": pixels}

    def halves(self):
        """Ranges of two threads, in turn."""
        n = len(self.x)
        return ((0, n // 2, 0), (n // 2, n, 1))


@pytest.fixture(params=CASES)
def case(request):
    case = Case(CASES[request.param])
    yield case
    assert case.memory_behind_scratch_is_untouched()


@pytest.mark.parametrize("relu", [False, True])
def test_forward(case, relu):
    y = np.full(case.dy.shape, np.nan, np.float32)
    for part in case.halves():
        operands = case.x, case.w, case.b, y, case.forward, relu, case.scratch[0]
        conv.conv2d_forward(*part, *operands)
    expected = vectors.nhwc(case.ty.relu() if relu else case.ty)
    vectors.close(y, expected, case.lengths["y"])


def test_backward_input(case):
    dx = np.full(case.x.shape, np.nan, np.float32)
    for part in case.halves():
        conv.conv2d_backward_input(*part, case.dy, case.w, dx, case.input, case.scratch[2])
    vectors.close(dx, vectors.nhwc(case.tx.grad), case.lengths["dx"])


def test_backward_weight(case):
    partial = case.partial()
    for part in case.halves():
        conv.conv2d_backward_weight(*part, case.x, case.dy, partial, case.weight, case.scratch[1])
    dw, db = vectors.weight_gradients(case, partial)
    vectors.close(dw, case.tw.grad.numpy().transpose(2, 3, 1, 0), case.lengths["dw"])
    vectors.close(db, case.tb.grad.numpy(), case.lengths["dw"])


@pytest.mark.parametrize("pool", vectors.POOLS)
@pytest.mark.parametrize("name", ["first layer", "wide", "runs with padding", "long rows"])
def test_pooled(name, pool):
    case = Case(CASES[name], pool=vectors.POOLS[pool])
    y = np.full(case.dy.shape, np.nan, np.float32)
    argmax = np.full(y.shape, 77, np.uint8)
    dx, partial, geometry = np.full_like(case.x, np.nan), case.partial(), case.pool_geometry
    for part in case.halves():
        operands = case.x, case.w, case.b, y, argmax, case.forward, geometry, case.scratch[0]
        conv.conv2d_relu_pool_forward(*part, *operands)
        operands = case.x, case.dy, argmax, partial, case.weight, geometry, case.scratch[1]
        conv.conv2d_relu_pool_backward_weight(*part, *operands)
        operands = case.dy, argmax, case.w, dx, case.input, geometry, case.scratch[2]
        conv.conv2d_relu_pool_backward_input(*part, *operands)
    vectors.close(y, vectors.nhwc(case.ty), case.lengths["y"])
    np.testing.assert_array_equal(argmax == NO_GRADIENT, y == 0)
    vectors.close(dx, vectors.nhwc(case.tx.grad), case.lengths["dx"])
    dw, db = vectors.weight_gradients(case, partial)
    vectors.close(dw, case.tw.grad.numpy().transpose(2, 3, 1, 0), case.lengths["dw"])
    vectors.close(db, case.tb.grad.numpy(), case.lengths["dw"])
    assert case.memory_behind_scratch_is_untouched()


def test_errors_are_like_those_of_float32():
    """Not only within bounds: as small as float32's own, for sums of a few hundred products."""
    case = Case(CASES["many channels"])
    y = np.zeros(case.dy.shape, np.float32)
    conv.conv2d_forward(0, 1, 0, case.x, case.w, case.b, y, case.forward, False, case.scratch[0])
    exact = vectors.nhwc(case.ty)
    float32 = vectors.nhwc(
        vectors.functional.conv2d(case.tx.float(), case.tw.float(), case.tb.float(), padding=2)
    )
    error, usual = (np.sqrt(np.mean((a - exact) ** 2)) for a in (y, float32))
    assert error < 1.5 * usual


def test_not_a_number_passes():
    case = Case(CASES["wide"], pool=vectors.POOLS["2/2"])
    case.x[0, 4, 3, 1] = np.nan
    y, argmax = np.zeros(case.dy.shape, np.float32), np.zeros(case.dy.shape, np.uint8)
    operands = case.x, case.w, case.b, y, argmax, case.forward, case.pool_geometry
    conv.conv2d_relu_pool_forward(0, 2, 0, *operands, case.scratch[0])
    assert np.isnan(y[0, 1:3, 1:2]).all()
    assert not np.isnan(y[1:]).any()


def test_strides_and_narrow_maps_are_left_to_vectors():
    wide = (16, 16, 16), (16, 16, 32), (5, 5), (1, 1), (2, 2)
    chosen = conv.choose(*wide)
    assert all(walk is not None for walk in (chosen.forward, chosen.weight, chosen.input))
    for change in (
        {1: (6, 6, 32), 3: (2, 2)},
        {0: (16, 4, 16), 1: (16, 4, 32)},
        {4: (5, 5), 1: (22, 22, 32)},
    ):
        shapes = [change.get(i, shape) for i, shape in enumerate(wide)]
        assert conv.choose(*shapes) == conv.NO_WALKS


def test_fewer_multiplications_win_where_they_cover_the_maps():
    few = conv.choose((16, 16, 16), (16, 16, 32), (3, 3), (1, 1), (1, 1))
    assert few == conv.NO_WALKS
    many = conv.choose((48, 48, 32), (46, 46, 64), (3, 3), (1, 1), (0, 0))
    assert [many.forward is None, many.weight is None, many.input is None] == [False, True, True]
    uncovered = conv.choose((10, 10, 32), (10, 10, 32), (3, 3), (1, 1), (1, 1))
    assert uncovered.forward is not None
    assert uncovered.weight is not None


def test_vectors_where_there_is_no_tile_unit(monkeypatch):
    monkeypatch.setattr(conv, "available", lambda: False)
    chosen = conv.choose((16, 16, 16), (16, 16, 32), (5, 5), (1, 1), (2, 2))
    assert chosen == conv.NO_WALKS
