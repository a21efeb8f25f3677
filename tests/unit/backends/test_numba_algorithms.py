"""Convolution by other ways than the direct one, against PyTorch in float64, at awkward shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dptrain.backends.numba import algorithms as choice
from dptrain.backends.numba import amx, amx_convolution, winograd_convolution
from dptrain.backends.numba.algorithms import Shape, select_algorithms
from dptrain.backends.numba.pooling_windows import NO_GRADIENT
from dptrain.plan.lowering import Phase
from tests.unit.backends import test_numba_convolution as vectors

needs_tiles = pytest.mark.skipif(
    not amx.available(),
    reason="this processor has no tile unit (Intel AMX), or it is not granted",
)

TILED = {
    name: case
    for name, case in vectors.CASES.items()
    if case[4] == (1, 1) and all(max(case[5][i]) < case[3][i] for i in range(2))
}
"""Those of stride 1 whose padding no filter can be wholly in."""
TILED |= {
    "runs with padding": (2, (20, 20, 16), 32, (3, 3), (1, 1), ((1, 1), (1, 1))),
    "many channels": (1, (12, 12, 64), 80, (5, 5), (1, 1), ((2, 2), (2, 2))),
    "filter rows that fit": (2, (9, 10, 3), 40, (5, 5), (1, 1), ((2, 2), (2, 2))),
}
FEW = {
    name: case
    for name, case in TILED.items()
    if winograd_convolution.supports(case[3], case[4], case[1][2], case[2])
}
FEW |= {
    "one tile": (5, (4, 4, 16), 16, (3, 3), (1, 1), ((1, 1), (1, 1))),
    "samples that do not come out even": (7, (8, 8, 32), 16, (3, 3), (1, 1), ((1, 1), (1, 1))),
    "five": (3, (12, 12, 32), 16, (5, 5), (1, 1), ((2, 2), (2, 2))),
    "five, odd maps": (2, (9, 7, 16), 48, (5, 5), (1, 1), ((1, 3), (0, 2))),
    "samples larger than a block": (2, (37, 41, 16), 48, (3, 3), (1, 1), ((1, 1), (0, 2))),
}
CASES = [
    *(pytest.param(("tiles", name), marks=needs_tiles) for name in TILED),
    *(("few", name) for name in FEW),
]


class Case(vectors.Case):
    """With walks instead of geometry."""

    def __init__(self, way, name, pool=None):
        case = (TILED if way == "tiles" else FEW)[name]
        super().__init__(case, pool=pool)
        n, maps, k, window, _, pads = case
        out = *(maps[i] + sum(pads[i]) - window[i] + 1 for i in range(2)), k
        corner = (pads[0][0], pads[1][0])
        around = tuple(window[i] - 1 - corner[i] for i in range(2))
        taps, pixels = window[0] * window[1], n * out[0] * out[1]
        self.lengths = {"y": taps * maps[2], "dx": taps * k, "dw": pixels}
        if way == "tiles":
            self.kernels = amx_convolution
            self.forward = amx_convolution.make_correlation_geometry(maps, out, window, corner)
            self.weight = amx_convolution.make_weight_gradient_geometry(maps, out, window, corner)
            self.input = amx_convolution.make_correlation_geometry(out, maps, window, around)
        else:
            self.kernels = winograd_convolution
            self.forward = self.weight = winograd_convolution.make_geometry(
                maps, out, corner, window[0]
            )
            self.input = winograd_convolution.make_geometry(out, maps, around, window[0])
            # Both forms are 3 times as far off as a direct sum (docs/kernels.md): as far as one
            # of 9 times as many products.
            self.lengths = {name: 9 * length for name, length in self.lengths.items()}
        sizes = [walk.scratch_size for walk in (self.forward, self.weight, self.input)]
        self.memory = [np.full(2 * size + 64, np.nan, np.float32) for size in sizes]
        self.scratch = [
            m[: 2 * size].reshape(2, size) for m, size in zip(self.memory, sizes, strict=True)
        ]

    def halves(self):
        """Ranges of two threads, in turn."""
        n = len(self.x)
        return ((0, n // 2, 0), (n // 2, n, 1))


@pytest.fixture(params=CASES, ids=str)
def case(request):
    case = Case(*request.param)
    yield case
    assert case.memory_behind_scratch_is_untouched()


@pytest.mark.parametrize("relu", [False, True])
def test_forward(case, relu):
    y = np.full(case.dy.shape, np.nan, np.float32)
    for part in case.halves():
        operands = case.x, case.w, case.b, y, case.forward, relu, case.scratch[0]
        case.kernels.conv2d_forward(*part, *operands)
    expected = vectors.nhwc(case.ty.relu() if relu else case.ty)
    vectors.close(y, expected, case.lengths["y"])


def test_backward_input(case):
    dx = np.full(case.x.shape, np.nan, np.float32)
    for part in case.halves():
        case.kernels.conv2d_backward_input(*part, case.dy, case.w, dx, case.input, case.scratch[2])
    vectors.close(dx, vectors.nhwc(case.tx.grad), case.lengths["dx"])


def test_backward_weight(case):
    partial = case.partial()
    for part in case.halves():
        case.kernels.conv2d_backward_weight(
            *part, case.x, case.dy, partial, case.weight, case.scratch[1]
        )
    dw, db = vectors.weight_gradients(case, partial)
    vectors.close(dw, case.tw.grad.numpy().transpose(2, 3, 1, 0), case.lengths["dw"])
    vectors.close(db, case.tb.grad.numpy(), case.lengths["dw"])


@pytest.mark.parametrize("pool", vectors.POOLS)
@pytest.mark.parametrize(
    "case",
    [
        *(
            pytest.param(("tiles", name), marks=needs_tiles)
            for name in ("first layer", "wide", "runs with padding", "long rows")
        ),
        *(("few", name) for name in ("wide", "odd maps", "samples that do not come out even")),
        ("few", "five, odd maps"),
        ("few", "samples larger than a block"),
    ],
    ids=str,
)
def test_pooled(case, pool):
    case = Case(*case, pool=vectors.POOLS[pool])
    y = np.full(case.dy.shape, np.nan, np.float32)
    argmax = np.full(y.shape, 77, np.uint8)
    dx, partial, geometry = np.full_like(case.x, np.nan), case.partial(), case.pool_geometry
    for part in case.halves():
        operands = case.x, case.w, case.b, y, argmax, case.forward, geometry, case.scratch[0]
        case.kernels.conv2d_relu_pool_forward(*part, *operands)
        operands = case.x, case.dy, argmax, partial, case.weight, geometry, case.scratch[1]
        case.kernels.conv2d_relu_pool_backward_weight(*part, *operands)
        operands = case.dy, argmax, case.w, dx, case.input, geometry, case.scratch[2]
        case.kernels.conv2d_relu_pool_backward_input(*part, *operands)
    vectors.close(y, vectors.nhwc(case.ty), case.lengths["y"])
    np.testing.assert_array_equal(argmax == NO_GRADIENT, y == 0)
    vectors.close(dx, vectors.nhwc(case.tx.grad), case.lengths["dx"])
    dw, db = vectors.weight_gradients(case, partial)
    vectors.close(dw, case.tw.grad.numpy().transpose(2, 3, 1, 0), case.lengths["dw"])
    vectors.close(db, case.tb.grad.numpy(), case.lengths["dw"])
    assert case.memory_behind_scratch_is_untouched()


def errors(case, padding):
    """Root mean square errors of forward, and of PyTorch in float32."""
    y = np.zeros(case.dy.shape, np.float32)
    operands = case.x, case.w, case.b, y, case.forward, False, case.scratch[0]
    case.kernels.conv2d_forward(0, len(y), 0, *operands)
    exact = vectors.nhwc(case.ty)
    x, w, b = (t.float() for t in (case.tx, case.tw, case.tb))
    usual = vectors.nhwc(vectors.functional.conv2d(x, w, b, padding=padding))
    return [np.sqrt(np.mean((a - exact) ** 2)) for a in (y, usual)]


@needs_tiles
def test_errors_of_tiles_are_those_of_float32():
    """Not only within bounds: no larger than a usual sum's of 1600 products."""
    error, usual = errors(Case("tiles", "many channels"), 2)
    assert error < 1.5 * usual


@pytest.mark.parametrize(("name", "padding"), [("runs with padding", 1), ("five", 2)])
def test_errors_of_fewer_multiplications_are_as_documented(name, padding):
    error, usual = errors(Case("few", name), padding)
    assert error < 4 * usual


@needs_tiles
def test_not_a_number_passes():
    case = Case("tiles", "wide", pool=vectors.POOLS["2/2"])
    case.x[0, 4, 3, 1] = np.nan
    y, argmax = np.zeros(case.dy.shape, np.float32), np.zeros(case.dy.shape, np.uint8)
    operands = case.x, case.w, case.b, y, argmax, case.forward, case.pool_geometry
    case.kernels.conv2d_relu_pool_forward(0, 2, 0, *operands, case.scratch[0])
    assert np.isnan(y[0, 1:3, 1:2]).all()
    assert not np.isnan(y[1:]).any()


def chosen(shape):
    """Names of the modules that compute forward, by the weights, by the input."""
    found = select_algorithms(shape)
    modules = (found[phase].kernel.py_func.__module__.rpartition(".")[2] for phase in found)
    return [name.removesuffix("convolution").rstrip("_") for name in modules]


IMAGES = Shape((32, 32, 3), (32, 32, 16), (3, 3), (1, 1), (1, 1), 2, halved=True)
WIDE = Shape((16, 16, 16), (16, 16, 32), (5, 5), (1, 1), (2, 2))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (WIDE, ["tile"] * 3),
        (Shape((16, 16, 16), (16, 16, 32), (3, 3), (1, 1), (1, 1)), ["winograd"] * 3),
        (
            Shape((48, 48, 32), (46, 46, 64), (3, 3), (1, 1), (0, 0), 2),
            ["tile", "winograd", "winograd"],
        ),
        (Shape((10, 10, 32), (10, 10, 32), (3, 3), (1, 1), (1, 1)), ["tile"] * 3),
        (Shape((24, 24, 3), (24, 24, 64), (5, 5), (1, 1), (2, 2), 3), ["narrow", "tile", "pooled"]),
        (Shape((32, 32, 3), (32, 32, 16), (3, 3), (1, 1), (1, 1), 2), ["pooled"] * 3),
        (IMAGES, ["colour", "colour", "pooled"]),
        (replace(IMAGES, out=(32, 32, 24)), ["pooled"] * 3),
        (replace(IMAGES, maps=(2, 32, 3), out=(2, 32, 16)), ["pooled"] * 3),
        (Shape((16, 16, 16), (8, 8, 32), (3, 3), (2, 2), (1, 1)), [""] * 3),
        (Shape((16, 4, 16), (16, 4, 32), (5, 5), (1, 1), (2, 2)), ["winograd"] * 3),
        (Shape((16, 4, 16), (16, 4, 32), (7, 7), (1, 1), (3, 3)), [""] * 3),
        (Shape((16, 16, 16), (22, 22, 32), (3, 3), (1, 1), (4, 4)), [""] * 3),
    ],
    ids=str,
)
def test_each_shape_is_computed_by_what_was_measured_to_be_fastest(shape, expected, monkeypatch):
    monkeypatch.setattr(choice, "available", lambda: True)
    assert chosen(shape) == expected


def test_vectors_where_there_is_no_tile_unit(monkeypatch):
    monkeypatch.setattr(choice, "available", lambda: False)
    assert chosen(WIDE) == ["winograd"] * 3
    assert chosen(replace(WIDE, window=(7, 7), pads=(3, 3))) == [""] * 3
    assert chosen(IMAGES) == ["colour", "colour", "pooled"]
    assert chosen(Shape((10, 10, 32), (10, 10, 32), (3, 3), (1, 1), (1, 1))) == ["winograd"] * 3


def test_scratch_is_as_long_as_the_walk_says():
    found = select_algorithms(Shape((16, 16, 16), (16, 16, 32), (3, 3), (1, 1), (1, 1)))
    assert found[Phase.FORWARD].scratch == found[Phase.FORWARD].geometry.scratch_size
