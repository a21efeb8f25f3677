"""Convolution kernels against PyTorch in float64, at awkward shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from dptrain.backends.numba import direct_convolution as conv
from dptrain.backends.numba import direct_convolution_pool as pooled
from dptrain.backends.numba.im2col import conv_geometry, conv_scratch, pool_geometry
from dptrain.backends.numba.pooling_windows import NO_GRADIENT

EPSILON = float(np.finfo(np.float32).eps)

# n, (H, W, C), K, (R, S), strides, ((top, bottom), (left, right))
CASES = {
    "one pixel": (1, (1, 1, 1), 1, (1, 1), (1, 1), ((0, 0), (0, 0))),
    "one pixel padded": (2, (1, 1, 3), 17, (3, 3), (1, 1), ((1, 1), (1, 1))),
    "first layer": (3, (13, 11, 3), 16, (3, 3), (1, 1), ((1, 1), (1, 1))),
    "one channel": (2, (17, 19, 1), 33, (3, 3), (1, 1), ((0, 0), (0, 0))),
    "one filter": (2, (7, 5, 13), 1, (2, 2), (1, 1), ((0, 0), (0, 0))),
    "wide": (2, (8, 6, 16), 64, (3, 3), (1, 1), ((1, 1), (1, 1))),
    "long rows": (2, (4, 24, 16), 48, (3, 3), (1, 1), ((1, 1), (1, 1))),
    "odd maps": (2, (21, 23, 16), 32, (3, 3), (1, 1), ((1, 1), (1, 1))),
    "even maps without pads": (2, (8, 6, 32), 16, (3, 3), (1, 1), ((0, 0), (0, 0))),
    "odd maps without pads": (2, (9, 7, 16), 16, (3, 3), (1, 1), ((0, 0), (0, 0))),
    "vectors in uneven pads": (2, (6, 9, 32), 48, (3, 3), (1, 1), ((2, 1), (0, 3))),
    "five": (2, (11, 7, 5), 48, (5, 5), (1, 1), ((2, 2), (2, 2))),
    "uneven window": (2, (9, 13, 7), 31, (2, 5), (1, 1), ((1, 0), (2, 2))),
    "uneven pads": (2, (9, 13, 2), 5, (3, 2), (1, 1), ((2, 1), (0, 1))),
    "full": (1, (5, 7, 3), 19, (3, 5), (1, 1), ((2, 2), (4, 4))),
    "pads beyond the window": (1, (5, 4, 3), 7, (2, 1), (1, 1), ((3, 3), (2, 2))),
    "stride 2": (2, (11, 13, 5), 17, (3, 3), (2, 2), ((1, 1), (1, 1))),
    "stride 3": (2, (13, 17, 4), 9, (5, 5), (3, 3), ((2, 1), (2, 2))),
    "uneven strides": (2, (11, 13, 3), 33, (3, 2), (1, 2), ((0, 0), (1, 0))),
    "stride beyond the window": (2, (11, 13, 3), 6, (1, 2), (2, 3), ((0, 0), (0, 0))),
    "rows never met": (1, (8, 8, 3), 6, (3, 3), (3, 3), ((0, 0), (0, 0))),
}

# name, windows, strides, ((top, bottom), (left, right))
POOLS = {
    "2/2": ((2, 2), (2, 2), ((0, 0), (0, 0))),
    "3/2 same": ((3, 3), (2, 2), ((0, 1), (1, 1))),
    "3/1": ((3, 2), (1, 1), ((1, 1), (0, 0))),
    "1/1": ((1, 1), (1, 1), ((0, 0), (0, 0))),
    "2/3": ((2, 2), (3, 3), ((0, 0), (0, 0))),
}


def nchw(x):
    return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2))).double()


def nhwc(x):
    return x.detach().numpy().transpose(0, 2, 3, 1)


class Case:
    """Arrays of a case, and float64 results of PyTorch from them."""

    def __init__(self, case, seed=0, pool=None, positive=False):
        n, (h, w, c), k, (r, s), strides, pads = case
        rng = np.random.default_rng(seed)
        self.x = rng.standard_normal((n, h, w, c), np.float32)
        if positive:
            self.x = np.maximum(self.x, np.float32(0))
        self.w = rng.standard_normal((r, s, c, k), np.float32)
        self.b = rng.standard_normal(k, np.float32)
        ho = (h + sum(pads[0]) - r) // strides[0] + 1
        wo = (w + sum(pads[1]) - s) // strides[1] + 1
        corner = (pads[0][0], pads[1][0])
        self.geometry = conv_geometry(corner, strides, (r, s))
        pool_height = pool[0][0] if pool else 0
        sizes = conv_scratch(corner, strides, (r, s), (h, w, c), (ho, wo, k), pool_height)
        # Kernels must not count on what scratch holds, nor touch what lies behind it.
        self.memory = [np.full(2 * size + 64, np.nan, np.float32) for size in sizes]
        self.scratch = [
            m[: 2 * size].reshape(2, size) for m, size in zip(self.memory, sizes, strict=True)
        ]
        self.tx = nchw(self.x).requires_grad_()
        self.tw = torch.from_numpy(self.w.transpose(3, 2, 0, 1).copy()).double().requires_grad_()
        self.tb = torch.from_numpy(self.b).double().requires_grad_()
        padded = functional.pad(self.tx, (*pads[1], *pads[0]))
        self.ty = functional.conv2d(padded, self.tw, self.tb, strides)
        if pool:
            window, pool_strides, pool_pads = pool
            self.pool_geometry = pool_geometry(
                (pool_pads[0][0], pool_pads[1][0]), pool_strides, window, (ho, wo)
            )
            z = functional.pad(torch.relu(self.ty), (*pool_pads[1], *pool_pads[0]))
            self.ty = functional.max_pool2d(z, window, pool_strides)
        self.dy = rng.standard_normal(nhwc(self.ty).shape, np.float32)
        self.ty.backward(nchw(self.dy))
        self.lengths = {"y": r * s * c, "dx": r * s * k, "dw": n * ho * wo}

    def memory_behind_scratch_is_untouched(self):
        return all(np.isnan(memory[-64:]).all() for memory in self.memory)

    def partial(self):
        return np.full((2, self.w.size + self.b.size), np.nan, np.float32)


def close(actual, expected, length):
    """Sums of `length` products of normal numbers: their rounding errors add up like a walk."""
    assert actual.shape == expected.shape
    bound = 32 * EPSILON * (length + 1) ** 0.5
    np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)


@pytest.fixture(params=CASES)
def case(request):
    case = Case(CASES[request.param])
    yield case
    assert case.memory_behind_scratch_is_untouched()


@pytest.mark.parametrize("relu", [False, True])
def test_forward(case, relu):
    y = np.full(case.dy.shape, np.nan, np.float32)
    n = len(y)
    for start, stop, thread in ((0, 0, 0), (0, n // 2, 0), (n // 2, n, 1)):
        conv.conv2d_forward(
            start, stop, thread, case.x, case.w, case.b, y, case.geometry, relu, case.scratch[0]
        )
    expected = nhwc(torch.relu(case.ty) if relu else case.ty)
    close(y, expected, case.lengths["y"])


def test_backward_input(case):
    dx = np.full(case.x.shape, np.nan, np.float32)
    n = len(dx)
    for start, stop, thread in ((0, 0, 1), (0, n // 2, 0), (n // 2, n, 1)):
        conv.conv2d_backward_input(
            start, stop, thread, case.dy, case.w, dx, case.geometry, case.scratch[2]
        )
    close(dx, nhwc(case.tx.grad), case.lengths["dx"])


def weight_gradients(case, partial):
    dw, db = np.full_like(case.w, np.nan), np.full_like(case.b, np.nan)
    half = partial.shape[1] // 2
    conv.reduce_partials(0, half, 0, partial, dw.reshape(-1), db)
    conv.reduce_partials(half, partial.shape[1], 1, partial, dw.reshape(-1), db)
    return dw, db


def test_backward_weight(case):
    partial, n = case.partial(), len(case.x)
    for start, stop, thread in ((0, n // 2, 0), (n // 2, n, 1)):
        conv.conv2d_backward_weight(
            start, stop, thread, case.x, case.dy, partial, case.geometry, case.scratch[1]
        )
    dw, db = weight_gradients(case, partial)
    close(dw, case.tw.grad.numpy().transpose(2, 3, 1, 0), case.lengths["dw"])
    close(db, case.tb.grad.numpy(), case.lengths["dw"])


def test_no_samples_give_no_gradient():
    case = Case(CASES["first layer"])
    partial = case.partial()
    for thread in (0, 1):
        conv.conv2d_backward_weight(
            0, 0, thread, case.x, case.dy, partial, case.geometry, case.scratch[1]
        )
    assert not partial.any()


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    "name", ["first layer", "wide", "odd maps", "long rows", "stride 2", "uneven pads"]
)
def test_pooled(name, pool):
    case = Case(CASES[name], pool=POOLS[pool])
    n = len(case.x)
    y = np.full(case.dy.shape, np.nan, np.float32)
    argmax = np.full(y.shape, 77, np.uint8)
    dx, partial = np.full(case.x.shape, np.nan, np.float32), case.partial()
    for start, stop, thread in ((0, n // 2, 0), (n // 2, n, 1)):
        pooled.conv2d_relu_pool_forward(
            start,
            stop,
            thread,
            case.x,
            case.w,
            case.b,
            y,
            argmax,
            case.geometry,
            case.pool_geometry,
            case.scratch[0],
        )
        pooled.conv2d_relu_pool_backward_weight(
            start,
            stop,
            thread,
            case.x,
            case.dy,
            argmax,
            partial,
            case.geometry,
            case.pool_geometry,
            case.scratch[1],
        )
        pooled.conv2d_relu_pool_backward_input(
            start,
            stop,
            thread,
            case.dy,
            argmax,
            case.w,
            dx,
            case.geometry,
            case.pool_geometry,
            case.scratch[2],
        )
    close(y, nhwc(case.ty), case.lengths["y"])
    np.testing.assert_array_equal(argmax == NO_GRADIENT, y == 0)
    close(dx, nhwc(case.tx.grad), case.lengths["dx"])
    dw, db = weight_gradients(case, partial)
    close(dw, case.tw.grad.numpy().transpose(2, 3, 1, 0), case.lengths["dw"])
    close(db, case.tb.grad.numpy(), case.lengths["dw"])
    assert case.memory_behind_scratch_is_untouched()


def test_not_a_number_passes():
    case = Case(CASES["first layer"], pool=POOLS["2/2"])
    case.x[0, 4, 4, 1] = np.nan
    y, argmax = np.zeros(case.dy.shape, np.float32), np.zeros(case.dy.shape, np.uint8)
    pooled.conv2d_relu_pool_forward(
        0,
        3,
        0,
        case.x,
        case.w,
        case.b,
        y,
        argmax,
        case.geometry,
        case.pool_geometry,
        case.scratch[0],
    )
    assert np.isnan(y[0, 1:3, 1:3]).all()
    assert not np.isnan(y[1:]).any()
