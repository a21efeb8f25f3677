"""Convolutions as products over the pixels of all samples: results against PyTorch in float64."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.backends.numba.convolution import gathered_convolution as gathered
from dptrain.backends.numba.convolution import planning
from dptrain.backends.numba.convolution import pointwise_convolution as pointwise
from dptrain.backends.numba.convolution.algorithms import choose
from dptrain.backends.numba.convolution.planning import Work
from dptrain.plan.lowering import Phase
from tests.unit.backends.numba import test_numba_convolution as vectors

NO_PADS = ((0, 0), (0, 0))
# n, (H, W, C), K, (R, S), strides, ((top, bottom), (left, right)), dilations if not 1
CASES = {
    "few": (3, (5, 7, 16), 20, (1, 1), (1, 1), NO_PADS),
    "several panels": (2, (7, 7, 24), 75, (1, 1), (1, 1), NO_PADS),
    "copied pixels": (2, (3, 5, 512), 48, (1, 1), (1, 1), NO_PADS),
    "several steps": (2, (3, 4, 528), 1024, (1, 1), (1, 1), NO_PADS),
    "stride 2": (3, (9, 13, 32), 40, (1, 1), (2, 2), NO_PADS),
    "stride 2, the last row is not read": (3, (8, 6, 20), 64, (1, 1), (2, 2), ((0, -1), (0, -1))),
    "uneven strides": (2, (7, 10, 16), 33, (1, 1), (2, 3), NO_PADS),
    "several parts of pixels": (2, (17, 19, 160), 40, (1, 1), (1, 1), NO_PADS),
    "one pixel": (5, (1, 1, 40), 64, (1, 1), (1, 1), NO_PADS),
}
GATHERED = {
    "3 × 3": (3, (5, 7, 256), 260, (3, 3), (2, 2), ((1, 1), (1, 1))),
    "several steps": (2, (4, 4, 260), 256, (3, 3), (2, 2), ((0, 1), (0, 1))),
    "stride 1": (2, (5, 6, 256), 256, (3, 3), (1, 1), ((1, 1), (1, 1))),
    "1 × 7": (2, (3, 9, 288), 272, (1, 7), (1, 1), ((0, 0), (3, 3))),
    "strides exceed the filters": (3, (7, 8, 272), 512, (2, 2), (3, 3), ((0, 0), (0, 1))),
    "uneven": (2, (9, 7, 256), 256, (4, 3), (3, 2), ((2, 1), (0, 2))),
    "several blocks": (17, (6, 8, 512), 128, (3, 3), (2, 2), ((1, 1), (1, 1))),
    "dilation 2": (2, (5, 7, 256), 256, (3, 3), (1, 1), ((2, 2), (2, 2)), (2, 2)),
    "dilation 2 and 3, stride 4 and 2": (
        2,
        (9, 7, 256),
        256,
        (3, 3),
        (4, 2),
        ((2, 1), (3, 4)),
        (2, 3),
    ),
}
"""Cases of `gathered_convolution`."""


class Case(vectors.Case):
    """A case of `pointwise_convolution`."""

    module = pointwise
    plan = staticmethod(pointwise.plan)


class Gathered(vectors.Case):
    """A case of `gathered_convolution`."""

    module = gathered
    plan = staticmethod(gathered.plan)


@pytest.fixture(params=[*CASES, *(f"gathered, {name}" for name in GATHERED)])
def case(request):
    _, is_gathered, name = request.param.rpartition("gathered, ")
    return Gathered(GATHERED[name]) if is_gathered else Case(CASES[name])


@pytest.fixture(params=CASES)
def pointwise_case(request):
    return Case(CASES[request.param])


def test_results_equal_pytorch_with_the_same_bits_for_all_threads(case):
    phases = Phase.FORWARD, Phase.BACKWARD_INPUT
    assert all(case.module.supports(planning.Case(case.shape, phase)) for phase in phases)
    alone = Work(len(case.x), 1)
    for relu in (False, True):
        y, _ = case.forward(alone, relu)
        vectors.close(y, vectors.nhwc(case.ty.relu() if relu else case.ty), case.lengths["y"])
    dx = case.backward_input(alone)
    vectors.close(dx, vectors.nhwc(case.tx.grad), case.lengths["dx"])
    for threads in (2, 40):
        work = Work(len(case.x), threads)
        assert dx.tobytes() == case.backward_input(work).tobytes()
        assert y.tobytes() == case.forward(work, True)[0].tobytes()


@pytest.mark.parametrize("threads", [1, 5])
def test_weight_gradients_equal_pytorch(pointwise_case, threads):
    work = Work(len(pointwise_case.x), threads, 2)
    vectors.check_weight_gradients(pointwise_case, pointwise_case.backward_weight(work))


def test_an_empty_row_of_partial_sums_is_zero(pointwise_case):
    n = len(pointwise_case.x)
    partial = pointwise_case.backward_weight(Work(n, 1, 2), bounds=np.array([0, 0, n]))
    assert not partial[0].any()
    assert partial[1].any()


def test_the_input_gradient_is_added(case):
    work = Work(len(case.x), 1)
    before = np.random.default_rng(5).standard_normal(case.x.shape, np.float32)
    dx = case.backward_input(work, before=before)
    vectors.close(dx - before, vectors.nhwc(case.tx.grad), 4 * case.lengths["dx"])


@pytest.mark.parametrize("by_shape", [True, False])
@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD_INPUT])
def test_strided_pixels_are_copied_only_if_the_product_is_worth_it(phase, by_shape):
    """The choice follows from the filters, which share a copy, and not from maps and samples."""

    def chosen(channels, filters, size, stride):
        maps, out = (stride * size, stride * size, channels), (size, size, filters)
        shape = planning.Shape(maps, out, (1, 1), (stride, stride), (0, 0))
        work = Work(8, 1, 8, by_shape)
        return choose(planning.Case(shape, phase, work)).algorithm.name

    for channels, size in ((16, 16), (32, 8), (64, 3)):
        assert chosen(channels, 32, size, 2) == chosen(channels, 64, size, 2) == "implicit GEMM"
        assert chosen(channels, 32, size, 1) == chosen(channels, 256, size, 2) == "GEMM"
