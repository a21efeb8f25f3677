"""Winograd convolution of 4 × 4 filters with stride 2: results against PyTorch in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dptrain.backends.numba import winograd_strided_convolution as winograd
from dptrain.backends.numba.algorithms import select_algorithms
from dptrain.backends.numba.planning import Shape, Work
from dptrain.plan.lowering import Phase
from tests.unit.backends import test_numba_convolution as vectors
from tests.unit.backends.test_numba_winograd import equal, work

# n, (H, W, C), K, (R, S), strides, ((top, bottom), (left, right))
CASES = {
    "one tile": (3, (8, 8, 32), 32, (4, 4), (2, 2), ((1, 1), (1, 1))),
    "blocks of several samples": (7, (16, 16, 32), 48, (4, 4), (2, 2), ((1, 1), (1, 1))),
    "blocks within samples": (2, (70, 34, 32), 32, (4, 4), (2, 2), ((1, 1), (1, 1))),
    "no pads": (2, (12, 18, 48), 32, (4, 4), (2, 2), ((0, 0), (0, 0))),
    "odd maps": (2, (15, 11, 32), 64, (4, 4), (2, 2), ((1, 1), (1, 1))),
    "uneven pads": (2, (13, 10, 32), 32, (4, 4), (2, 2), ((2, 1), (0, 3))),
    "wide pads": (2, (9, 8, 32), 32, (4, 4), (2, 2), ((3, 3), (3, 2))),
}


class Case(vectors.Case):
    """A case of the Winograd algorithm."""

    plan = staticmethod(winograd.plan)

    def __init__(self, case, **options):
        super().__init__(CASES[case] if isinstance(case, str) else case, **options)
        self.lengths = {name: 16 * length for name, length in self.lengths.items()}


@pytest.fixture(params=CASES)
def case(request):
    return Case(request.param)


def test_every_phase(case):
    for relu in (False, True):
        y, _ = case.forward(work(case), relu=relu)
        vectors.close(y, vectors.nhwc(case.ty.relu() if relu else case.ty), case.lengths["y"])
    vectors.close(case.backward_input(work(case)), vectors.nhwc(case.tx.grad), case.lengths["dx"])
    vectors.check_weight_gradients(case, case.backward_weight(work(case)))


@pytest.mark.parametrize(("batch_size", "threads"), [(1, 2), (1, 8), (9, 3)])
def test_bits_do_not_depend_on_threads_and_other_samples(batch_size, threads):
    shape = (9, *CASES["odd maps"][1:])
    whole = Case(shape)
    expected, _ = whole.forward(work(whole, threads=1))
    dx = whole.backward_input(work(whole, threads=1))
    case = Case((batch_size, *shape[1:]))
    case.x, case.dy, case.w, case.b = whole.x[:batch_size], whole.dy[:batch_size], whole.w, whole.b
    equal([case.forward(work(case, threads))[0]], [expected[:batch_size]])
    equal([case.backward_input(work(case, threads))], [dx[:batch_size]])
    bounds = np.array([0, 4, 9])
    partial = whole.backward_weight(work(whole, threads=1), bounds=bounds)
    equal([whole.backward_weight(work(whole, threads), bounds=bounds)], [partial])


def test_rms_error_is_as_documented():
    """The RMS error is at most 4 times that of PyTorch in float32."""
    case = Case("blocks of several samples")
    y, _ = case.forward(work(case))
    x, w, b = (t.float() for t in (case.tx, case.tw, case.tb))
    usual = vectors.nhwc(vectors.functional.conv2d(x, w, b, stride=2, padding=1))
    error, usual = (np.sqrt(np.mean((a - vectors.nhwc(case.ty)) ** 2)) for a in (y, usual))
    assert error < 4 * usual


def test_selection():
    shape = Shape((32, 32, 64), (16, 16, 64), (4, 4), (2, 2), (1, 1))
    found = select_algorithms(shape, Work(32))
    kernels = {algorithm.kernel.py_func.__module__ for algorithm in found.values()}
    assert kernels == {winograd.__name__}
    assert winograd.supports(shape)
    assert not winograd.supports(replace(shape, pool_height=2))
    assert not winograd.supports(replace(shape, strides=(1, 1)))
    assert not winograd.supports(replace(shape, maps=(32, 32, 3)))
    direct = select_algorithms(shape, Work(32), winograd=False)[Phase.FORWARD]
    assert direct.kernel.py_func.__module__ != winograd.__name__
