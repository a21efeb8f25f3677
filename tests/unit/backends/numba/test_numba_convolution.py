"""Convolution kernels against PyTorch in float64, at awkward shapes."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.backends.numba.convolution import direct_convolution
from dptrain.backends.numba.convolution.algorithms import PHASES
from dptrain.backends.numba.convolution.fused_pooling import NoPool, Pool
from dptrain.backends.numba.convolution.planning import Shape, Work
from dptrain.backends.numba.pooling.pooling_windows import NO_GRADIENT
from dptrain.backends.numba.reduction import GradientSlots, sum_partials
from dptrain.backends.numba.vector import compiled_registers
from dptrain.native.caches import cache_bytes
from dptrain.plan.lowering import Phase
from dptrain.plan.shards import addition_steps
from tests.lazy import LazyModule

torch = LazyModule("torch")
functional = LazyModule("torch.nn.functional")

EPSILON = float(np.finfo(np.float32).eps)

# n, (H, W, C), K, (R, S), strides, ((top, bottom), (left, right)), dilations if not 1
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
    "12 filters": (2, (9, 14, 8), 12, (3, 3), (1, 1), ((1, 1), (1, 1))),
    "20 filters": (2, (14, 13, 4), 20, (3, 3), (1, 1), ((1, 1), (1, 1))),
    "40 filters": (2, (9, 14, 20), 40, (5, 5), (1, 1), ((2, 2), (2, 2))),
    "4 x 4": (2, (12, 12, 6), 24, (4, 4), (2, 2), ((1, 1), (1, 1))),
    "1 x 1": (2, (7, 9, 20), 44, (1, 1), (1, 1), ((0, 0), (0, 0))),
    "1 x 1, stride 2": (2, (7, 9, 16), 60, (1, 1), (2, 2), ((0, 0), (0, 0))),
    "7 x 7": (2, (13, 15, 1), 6, (7, 7), (2, 2), ((3, 3), (3, 3))),
    "many channels": (2, (5, 27, 120), 40, (3, 3), (1, 1), ((1, 1), (1, 1))),
    "rows never met": (1, (8, 8, 3), 6, (3, 3), (3, 3), ((0, 0), (0, 0))),
    "dilation 2": (2, (9, 8, 16), 24, (3, 3), (1, 1), ((2, 2), (2, 2)), (2, 2)),
    "dilation 3 and 1": (2, (11, 7, 5), 17, (3, 3), (1, 1), ((3, 3), (1, 1)), (3, 1)),
    "dilation 1 and 2, one channel": (2, (6, 9, 1), 7, (3, 5), (1, 1), ((0, 2), (4, 3)), (1, 2)),
    "dilation beyond the map": (1, (3, 4, 6), 9, (3, 3), (1, 1), ((5, 5), (5, 6)), (5, 6)),
    "dilation 2, stride 2": (2, (11, 12, 4), 12, (3, 3), (2, 2), ((2, 2), (2, 1)), (2, 2)),
    "dilation 3, stride 2": (2, (13, 12, 8), 20, (3, 4), (2, 2), ((2, 3), (0, 1)), (3, 3)),
    "dilation 2 and 4, stride 3 and 6": (
        1,
        (14, 19, 3),
        5,
        (4, 3),
        (3, 6),
        ((1, 4), (3, 2)),
        (2, 4),
    ),
    "dilation 6, stride 4": (1, (17, 16, 3), 33, (3, 2), (4, 4), ((1, 0), (4, 2)), (6, 6)),
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


WEIGHT = Phase.BACKWARD_WEIGHT


class Case:
    """Arrays of a case, and float64 results of PyTorch from them."""

    plan = staticmethod(direct_convolution.plan)

    def __init__(self, case, seed=0, pool=None, positive=False):
        n, (h, w, c), k, (r, s), strides, pads, *rest = case
        dilations = rest[0] if rest else (1, 1)
        rng = np.random.default_rng(seed)
        self.x = rng.standard_normal((n, h, w, c), np.float32)
        if positive:
            self.x = np.maximum(self.x, np.float32(0))
        self.w = rng.standard_normal((r, s, c, k), np.float32)
        self.b = rng.standard_normal(k, np.float32)
        ho = (h + sum(pads[0]) - (r - 1) * dilations[0] - 1) // strides[0] + 1
        wo = (w + sum(pads[1]) - (s - 1) * dilations[1] - 1) // strides[1] + 1
        corner = (pads[0][0], pads[1][0])
        pooled = {"pool_height": pool[0][0], "pool_stride": pool[1][0]} if pool else {}
        self.shape = Shape(
            (h, w, c), (ho, wo, k), (r, s), strides, corner, dilations=dilations, **pooled
        )
        self.pool = None
        self.tx = nchw(self.x).requires_grad_()
        self.tw = torch.from_numpy(self.w.transpose(3, 2, 0, 1).copy()).double().requires_grad_()
        self.tb = torch.from_numpy(self.b).double().requires_grad_()
        padded = functional.pad(self.tx, (*pads[1], *pads[0]))
        self.ty = functional.conv2d(padded, self.tw, self.tb, strides, dilation=dilations)
        if pool:
            window, pool_strides, pool_pads = pool
            corner = pool_pads[0][0], pool_pads[1][0]
            self.pool = Pool(*corner, *pool_strides, *window, ho, wo)
            z = functional.pad(torch.relu(self.ty), (*pool_pads[1], *pool_pads[0]))
            self.ty = functional.max_pool2d(z, window, pool_strides)
        self.dy = rng.standard_normal(nhwc(self.ty).shape, np.float32)
        self.ty.backward(nchw(self.dy))
        self.lengths = {"y": r * s * c, "dx": r * s * k, "dw": n * ho * wo}

    def run(self, phase, work, *arrays, argmax=None, relu=False, adds=False):
        """Run a phase as the threads of `work` do one after another. An array None stands for the
        weights.

        Kernels must not rely on the content of scratch, nor write beyond its end.
        """
        planned = self.plan(self.shape, phase, work)
        memory = np.full(work.threads * planned.scratch + 64, np.nan, np.float32)
        scratch = memory[:-64].reshape(work.threads, planned.scratch)
        shared = np.full(planned.shared + 1, np.nan, np.float32)
        if planned.prepare is not None:
            for item in range(planned.prepare_items):
                planned.prepare(item, item + 1, 0, self.w, planned.geometry, shared)
            weights = shared
        else:
            weights = self.w.reshape(-1)
        arrays = [weights if array is None else array for array in arrays]
        pool = NoPool(*self.shape.out[:2], int(relu), int(adds))
        if self.pool is not None:
            pool = self.pool._replace(argmax=argmax)
        items = planned.units * (len(arrays[-1]) - 1 if phase is WEIGHT else len(self.x))
        for t in range(work.threads):
            planned.kernel(
                items * t // work.threads, items * (t + 1) // work.threads, t,
                *arrays, planned.geometry, pool, scratch,
            )  # fmt: skip
        assert np.isnan(memory[-64:]).all()
        assert np.isnan(shared[planned.shared :]).all()
        return planned

    def forward(self, work, relu=False):
        """Return y and argmax."""
        y = np.full(self.dy.shape, np.nan, np.float32)
        argmax = np.full(y.shape, 77, np.uint8)
        self.run(Phase.FORWARD, work, self.x, None, self.b, y, argmax=argmax, relu=relu)
        return y, argmax

    def backward_input(self, work, argmax=None, before=None):
        """Return dx, which is added to `before` unless that is None."""
        dx = np.full(self.x.shape, np.nan, np.float32) if before is None else before.copy()
        adds = before is not None
        self.run(Phase.BACKWARD_INPUT, work, self.dy, None, dx, argmax=argmax, adds=adds)
        return dx

    def backward_weight(self, work, argmax=None, bounds=None):
        """Return the rows of partial sums."""
        n = len(self.x)
        partial = np.full((work.rows, self.w.size + self.b.size), np.nan, np.float32)
        bounds = n * np.arange(work.rows + 1) // work.rows if bounds is None else bounds
        self.run(WEIGHT, work, self.x, self.dy, partial, bounds, argmax=argmax)
        return partial

    def partial(self):
        return np.full((2, self.w.size + self.b.size), np.nan, np.float32)


def close(actual, expected, length):
    """Sums of `length` products of normal numbers: their rounding errors add up like a walk."""
    assert actual.shape == expected.shape
    bound = 32 * EPSILON * (length + 1) ** 0.5
    np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)


@pytest.fixture(params=CASES)
def case(request):
    return Case(CASES[request.param])


WORKS = {threads: Work(2, threads, 2) for threads in (2, 7)}
"""Two threads with one sample each, and threads with less than a sample."""


def test_forward(case):
    for work, relu in ((WORKS[2], False), (WORKS[7], True)):
        y, _ = case.forward(work, relu)
        close(y, nhwc(torch.relu(case.ty) if relu else case.ty), case.lengths["y"])


def test_backward_input(case):
    for work in WORKS.values():
        dx = case.backward_input(work)
        close(dx, nhwc(case.tx.grad), case.lengths["dx"])


def _weight_gradients(case, partial):
    dw, db = np.full_like(case.w, np.nan), np.full_like(case.b, np.nan)
    half = partial.shape[1] // 2
    steps = addition_steps(np.minimum(np.arange(len(partial)), 1))
    gradients = GradientSlots(dw.reshape(-1), db, dw.size, partial.shape[1], 1)
    for part in ((0, half), (half, partial.shape[1])):
        sum_partials(*part, 0, partial, *steps, gradients)
    return dw, db


def test_backward_weight(case):
    for work in WORKS.values():
        check_weight_gradients(case, case.backward_weight(work))


def check_weight_gradients(case, partial):
    dw, db = _weight_gradients(case, partial)
    close(dw, case.tw.grad.numpy().transpose(2, 3, 1, 0), case.lengths["dw"])
    close(db, case.tb.grad.numpy(), case.lengths["dw"])


def test_no_samples_give_no_gradient():
    case = Case(CASES["first layer"])
    assert not case.backward_weight(Work(2, 2, 2), bounds=np.zeros(3, np.int64)).any()


POOLED = [
    "first layer", "wide", "odd maps", "long rows", "stride 2", "uneven pads", "20 filters",
    "many channels", "dilation 2", "dilation 3, stride 2",
]  # fmt: skip


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", POOLED)
def test_pooled(name, pool):
    case = Case(CASES[name], pool=POOLS[pool])
    for work in WORKS.values():
        y, argmax = case.forward(work)
        close(y, nhwc(case.ty), case.lengths["y"])
        np.testing.assert_array_equal(argmax == NO_GRADIENT, y == 0)
        close(case.backward_input(work, argmax), nhwc(case.tx.grad), case.lengths["dx"])
        check_weight_gradients(case, case.backward_weight(work, argmax))


@pytest.mark.parametrize("pool", ["2/2", "2/3"])
def test_the_first_of_equals_is_the_maximum(pool):
    case = Case(CASES["20 filters"], pool=POOLS[pool])
    case.w[:] = 0
    case.b[:] = 1
    y, argmax = case.forward(WORKS[2])
    assert (y == 1).all()
    assert not argmax.any()


@pytest.mark.parametrize(
    ("name", "pool"),
    [
        ("40 filters", None), ("40 filters", "2/2"), ("stride 3", None), ("stride 3", "3/2 same"),
        ("uneven pads", "3/1"), ("uneven pads", "1/1"), ("many channels", "2/3"),
        ("many channels", None), ("dilation 2", None), ("dilation 3, stride 2", "3/2 same"),
    ],
)  # fmt: skip
def test_bits_depend_on_the_shape_only(name, pool, monkeypatch):
    """Samples, threads, bands, blocks and the size of the cache do not change a result."""
    case = Case(CASES[name], pool=pool and POOLS[pool])
    n = len(case.x)

    def results(work):
        y, argmax = case.forward(work)
        return y, argmax, case.backward_input(work, argmax), case.backward_weight(work, argmax)

    expected = results(Work(n, 1, 1))
    for work in (Work(n, 2, 1), Work(n, 3, 1), Work(1, 8, 1), Work(5, 8, 1), Work(32, 24, 1)):
        for actual, wanted in zip(results(work), expected, strict=True):
            np.testing.assert_array_equal(actual, wanted)
    monkeypatch.setattr(direct_convolution, "cache_bytes", lambda level: 1)
    for actual, wanted in zip(results(Work(n, 3, 1)), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)


def test_one_sample_is_divided_among_all_threads():
    maps, out = (32, 32, 16), (32, 32, 40)
    shape, one_row = Shape(maps, out, (3, 3), (1, 1), (1, 1)), Work(1, 24, 1)
    units = {phase: direct_convolution.plan(shape, phase, one_row).units for phase in PHASES}
    assert units[Phase.FORWARD] == units[Phase.BACKWARD_INPUT] == 24
    # Vectors of filters, and rows of the filters.
    assert units[WEIGHT] == -(-40 // compiled_registers().width) * 3
    many = direct_convolution.plan(shape, Phase.FORWARD, Work(240, 24, 24))
    assert many.units == 1


def test_a_band_loads_only_the_rows_that_it_needs():
    maps, out = (224, 224, 64), (224, 224, 64)
    shape = Shape(maps, out, (3, 3), (1, 1), (1, 1), 2)
    for phase in PHASES:
        planned = direct_convolution.plan(shape, phase, Work(2, 1, 1))
        assert 4 * planned.scratch < 2 * cache_bytes(2) < 4 * 224 * 224 * 64


def test_not_a_number_passes():
    case = Case(CASES["first layer"], pool=POOLS["2/2"])
    case.x[0, 4, 4, 1] = np.nan
    y, _ = case.forward(Work(3, 1, 1))
    assert np.isnan(y[0, 1:3, 1:3]).all()
    assert not np.isnan(y[1:]).any()
