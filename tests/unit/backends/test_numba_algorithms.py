"""Convolution with Winograd and AMX, against PyTorch in float64, at awkward shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dptrain.api import make_replica
from dptrain.backends.numba import algorithms as choice
from dptrain.backends.numba import amx, amx_convolution, winograd_convolution
from dptrain.backends.numba.algorithms import Shape, select_algorithms
from dptrain.backends.numba.pooling_windows import NO_GRADIENT
from dptrain.network import Conv2d, Dense, Flatten, Network
from dptrain.plan.lowering import Phase
from tests.unit.backends import test_numba_convolution as vectors

needs_amx = pytest.mark.skipif(
    not amx.available(),
    reason="this processor has no Intel AMX, or the kernel does not grant it",
)

AMX_CASES = {
    name: case
    for name, case in vectors.CASES.items()
    if case[4] == (1, 1) and all(max(case[5][i]) < case[3][i] for i in range(2))
}
"""Those of stride 1 whose padding no filter can be wholly in."""
AMX_CASES |= {
    "runs with padding": (2, (20, 20, 16), 32, (3, 3), (1, 1), ((1, 1), (1, 1))),
    "many channels": (1, (12, 12, 64), 80, (5, 5), (1, 1), ((2, 2), (2, 2))),
    "filter rows that fit": (2, (9, 10, 3), 40, (5, 5), (1, 1), ((2, 2), (2, 2))),
}
WINOGRAD_CASES = {
    name: case
    for name, case in AMX_CASES.items()
    if winograd_convolution.supports(case[3], case[4], case[1][2], case[2])
}
WINOGRAD_CASES |= {
    "one tile": (5, (4, 4, 16), 16, (3, 3), (1, 1), ((1, 1), (1, 1))),
    "samples that do not come out even": (7, (8, 8, 32), 16, (3, 3), (1, 1), ((1, 1), (1, 1))),
    "five": (3, (12, 12, 32), 16, (5, 5), (1, 1), ((2, 2), (2, 2))),
    "five, odd maps": (2, (9, 7, 16), 48, (5, 5), (1, 1), ((1, 3), (0, 2))),
    "samples larger than a block": (2, (37, 41, 16), 48, (3, 3), (1, 1), ((1, 1), (0, 2))),
}
CASES = [
    *(pytest.param(("amx", name), marks=needs_amx) for name in AMX_CASES),
    *(("winograd", name) for name in WINOGRAD_CASES),
]


class Case(vectors.Case):
    """A case with the geometries of an algorithm."""

    def __init__(self, algorithm, name, pool=None):
        case = (AMX_CASES if algorithm == "amx" else WINOGRAD_CASES)[name]
        super().__init__(case, pool=pool)
        n, maps, k, window, _, pads = case
        out = *(maps[i] + sum(pads[i]) - window[i] + 1 for i in range(2)), k
        corner = (pads[0][0], pads[1][0])
        around = tuple(window[i] - 1 - corner[i] for i in range(2))
        taps, pixels = window[0] * window[1], n * out[0] * out[1]
        self.lengths = {"y": taps * maps[2], "dx": taps * k, "dw": pixels}
        if algorithm == "amx":
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
        sizes = [geometry.scratch_size for geometry in (self.forward, self.weight, self.input)]
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
            pytest.param(("amx", name), marks=needs_amx)
            for name in ("first layer", "wide", "runs with padding", "long rows")
        ),
        *(("winograd", name) for name in ("wide", "odd maps", "samples that do not come out even")),
        ("winograd", "five, odd maps"),
        ("winograd", "samples larger than a block"),
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


@needs_amx
def test_errors_of_tiles_are_those_of_float32():
    """Not only within bounds: no larger than a usual sum's of 1600 products."""
    error, usual = errors(Case("amx", "many channels"), 2)
    assert error < 1.5 * usual


@pytest.mark.parametrize(("name", "padding"), [("runs with padding", 1), ("five", 2)])
def test_errors_of_fewer_multiplications_are_as_documented(name, padding):
    error, usual = errors(Case("winograd", name), padding)
    assert error < 4 * usual


@needs_amx
def test_not_a_number_passes():
    case = Case("amx", "wide", pool=vectors.POOLS["2/2"])
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
    return [name.replace("_convolution", "") for name in modules]


IMAGES = Shape((32, 32, 3), (32, 32, 16), (3, 3), (1, 1), (1, 1), 2, halved=True)
WIDE = Shape((16, 16, 16), (16, 16, 32), (5, 5), (1, 1), (2, 2))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (WIDE, ["amx"] * 3),
        (Shape((16, 16, 16), (16, 16, 32), (3, 3), (1, 1), (1, 1)), ["winograd"] * 3),
        (
            Shape((48, 48, 32), (46, 46, 64), (3, 3), (1, 1), (0, 0), 2),
            ["amx", "winograd", "winograd"],
        ),
        (Shape((10, 10, 32), (10, 10, 32), (3, 3), (1, 1), (1, 1)), ["amx"] * 3),
        (
            Shape((24, 24, 3), (24, 24, 64), (5, 5), (1, 1), (2, 2), 3),
            ["amx_small_channel", "amx", "direct_pool"],
        ),
        (Shape((32, 32, 3), (32, 32, 16), (3, 3), (1, 1), (1, 1), 2), ["direct_pool"] * 3),
        (IMAGES, ["winograd_rgb", "winograd_rgb", "direct_pool"]),
        (replace(IMAGES, out=(32, 32, 24)), ["direct_pool"] * 3),
        (replace(IMAGES, maps=(2, 32, 3), out=(2, 32, 16)), ["direct_pool"] * 3),
        (Shape((16, 16, 16), (8, 8, 32), (3, 3), (2, 2), (1, 1)), ["direct"] * 3),
        (Shape((16, 4, 16), (16, 4, 32), (5, 5), (1, 1), (2, 2)), ["winograd"] * 3),
        (Shape((16, 4, 16), (16, 4, 32), (7, 7), (1, 1), (3, 3)), ["direct"] * 3),
        (Shape((16, 16, 16), (22, 22, 32), (3, 3), (1, 1), (4, 4)), ["direct"] * 3),
    ],
    ids=str,
)
def test_each_shape_is_computed_by_what_was_measured_to_be_fastest(shape, expected, monkeypatch):
    monkeypatch.setattr(choice, "available", lambda: True)
    assert chosen(shape) == expected


def test_vectors_without_amx(monkeypatch):
    monkeypatch.setattr(choice, "available", lambda: False)
    assert chosen(WIDE) == ["winograd"] * 3
    assert chosen(replace(WIDE, window=(7, 7), pads=(3, 3))) == ["direct"] * 3
    assert chosen(IMAGES) == ["winograd_rgb", "winograd_rgb", "direct_pool"]
    assert chosen(Shape((10, 10, 32), (10, 10, 32), (3, 3), (1, 1), (1, 1))) == ["winograd"] * 3


def test_scratch_is_as_long_as_the_geometry_states():
    found = select_algorithms(Shape((16, 16, 16), (16, 16, 32), (3, 3), (1, 1), (1, 1)))
    assert found[Phase.FORWARD].scratch == found[Phase.FORWARD].geometry.scratch_size


UNIT = 2.0**-24
"""Unit roundoff of float32."""


@pytest.mark.parametrize("after_relu", [True, False])
@pytest.mark.parametrize("winograd", [True, False])
@pytest.mark.parametrize(("channels", "size"), [(16, 16), (64, 16), (512, 8)])
def test_rms_errors_are_bounded(channels, size, winograd, after_relu, monkeypatch):
    """RMS errors stay within √T u of the RMS result, and within 2.5 times that with Winograd.

    T is the number of channels (y, dx) or of output pixels (dw) of a sum. See docs/numerics.md.
    """
    monkeypatch.setattr(choice, "available", lambda: False)
    n, shape = 2, (size, size, channels)
    case = vectors.Case((n, shape, channels, (3, 3), (1, 1), ((1, 1), (1, 1))), positive=after_relu)
    found = select_algorithms(Shape(shape, shape, (3, 3), (1, 1), (1, 1)), winograd=winograd)
    modules = {each.kernel.py_func.__module__.rpartition(".")[2] for each in found.values()}
    assert modules == {"winograd_convolution" if winograd else "direct_convolution"}
    y, dx, partial = np.empty_like(case.dy), np.empty_like(case.x), case.partial()[:1]
    operands = {
        Phase.FORWARD: (case.x, case.w, case.b, y),
        Phase.BACKWARD_INPUT: (case.dy, case.w, dx),
        Phase.BACKWARD_WEIGHT: (case.x, case.dy, partial),
    }
    for phase, arrays in operands.items():
        relu = (False,) if phase is Phase.FORWARD else ()
        scratch = np.zeros((1, found[phase].scratch), np.float32)
        found[phase].kernel(0, n, 0, *arrays, found[phase].geometry, *relu, scratch)
    dw = partial[0, : case.w.size].reshape(case.w.shape)
    results = {
        "y": (y, vectors.nhwc(case.ty), channels),
        "dx": (dx, vectors.nhwc(case.tx.grad), channels),
        "dw": (dw, case.tw.grad.numpy().transpose(2, 3, 1, 0), n * size * size),
    }
    for name, (actual, expected, terms) in results.items():
        error = np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))
        assert error < (2.5 if winograd else 1) * np.sqrt(terms) * UNIT, (name, error / UNIT)


@needs_amx
def test_direct_precision_has_no_winograd_on_amx_either():
    shape = Shape((16, 16, 16), (16, 16, 32), (3, 3), (1, 1), (1, 1))
    modules = {
        algorithm.kernel.py_func.__module__.rpartition(".")[2]
        for algorithm in select_algorithms(shape, winograd=False).values()
    }
    assert "winograd_convolution" not in modules


def test_a_replica_without_winograd():
    """The precision ``fp32-direct`` changes the algorithms of a network."""
    network = Network((16, 16, 16), [Conv2d(16, 3, padding=1), Flatten(), Dense(10)])
    outputs = []
    for precision in ("fp32", "fp32-direct"):
        replica = make_replica(network, "numba", batch_size=2, precision=precision)
        x = np.random.default_rng(1).standard_normal((2, 16, 16, 16), np.float32)
        outputs.append(np.array(replica.predict(x)))
    assert not np.array_equal(*outputs)
    np.testing.assert_allclose(*outputs, rtol=1e-4, atol=1e-4)
