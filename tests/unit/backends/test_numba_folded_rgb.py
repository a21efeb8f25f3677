"""Direct convolution of colour images with 8 filters, pooled, against PyTorch in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dptrain.backends.numba import folded_rgb_convolution as folded
from dptrain.backends.numba.planning import Shape, Work
from dptrain.backends.numba.pooling_windows import NO_GRADIENT
from dptrain.backends.numba.vector import AVX512, PORTABLE
from dptrain.plan.lowering import Phase
from tests.unit.backends import test_numba_convolution as vectors

SAME, NONE = ((1, 1), (1, 1)), ((0, 0), (0, 0))

# n, (H, W, C), pads
CASES = {
    "whole tiles": (3, (16, 32, 3), SAME),
    "one tile": (2, (2, 8, 3), SAME),
    "tiles that overlap": (2, (8, 22, 3), SAME),
    "odd rows and columns": (3, (13, 11, 3), SAME),
    "no pads": (2, (10, 23, 3), NONE),
    "uneven pads": (2, (7, 9, 3), ((2, 1), (0, 3))),
    "several parts of rows": (1, (60, 130, 3), SAME),
}


class Case(vectors.Case):
    """Cases of this algorithm."""

    plan = staticmethod(folded.plan)

    def __init__(self, name):
        n, maps, pads = CASES[name]
        super().__init__((n, maps, 8, (3, 3), (1, 1), pads), pool=vectors.POOLS["2/2"])


def work(case, threads=2):
    return Work(len(case.x), threads, 2)


@pytest.mark.parametrize("name", CASES)
def test_forward_and_weight_gradient(name):
    case = Case(name)
    y, argmax = case.forward(work(case))
    dw, db = vectors.weight_gradients(case, case.backward_weight(work(case), argmax))
    vectors.close(y, vectors.nhwc(case.ty), case.lengths["y"])
    np.testing.assert_array_equal(argmax == NO_GRADIENT, y == 0)
    vectors.close(dw, case.tw.grad.numpy().transpose(2, 3, 1, 0), case.lengths["dw"])
    vectors.close(db, case.tb.grad.numpy(), case.lengths["dw"])


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_bits_do_not_depend_on_threads(threads):
    case = Case("odd rows and columns")
    y, argmax = case.forward(work(case))
    results = case.forward(work(case, threads))
    np.testing.assert_array_equal(results[0].view(np.int32), y.view(np.int32))
    np.testing.assert_array_equal(results[1], argmax)
    expected = case.backward_weight(work(case), argmax)
    partial = case.backward_weight(work(case, threads), argmax)
    np.testing.assert_array_equal(partial.view(np.int32), expected.view(np.int32))


def test_the_first_among_equals_is_the_maximum():
    case = Case("whole tiles")
    case.w[:] = 0
    case.b[:] = 1
    y, argmax = case.forward(work(case))
    assert (y == 1).all()
    assert not argmax.any()


def test_sums_that_are_zero_stay_zero():
    case = Case("whole tiles")
    case.x[:, :, 16:] = 0
    case.b[:] = 0
    y, argmax = case.forward(work(case))
    assert not y[:, :, 9:].any()
    assert (argmax[:, :, 9:] == NO_GRADIENT).all()


def test_not_a_number_passes():
    case = Case("whole tiles")
    case.x[1, 5, 6, 1] = np.nan
    y, _ = case.forward(work(case))
    lost = np.isnan(y).all(-1)
    assert lost[1, 2:4, 2:4].all()
    assert lost.sum() == 4


def test_only_eight_filters_of_wide_vectors_are_supported(monkeypatch):
    shape = Shape((32, 32, 3), (32, 32, 8), (3, 3), (1, 1), (1, 1), 2, halved=True)
    monkeypatch.setattr(folded, "compiled_registers", lambda: AVX512)
    assert folded.supports(shape, Phase.FORWARD)
    assert folded.supports(shape, Phase.BACKWARD_WEIGHT)
    assert not folded.supports(shape, Phase.BACKWARD_INPUT)
    assert not folded.supports(replace(shape, out=(32, 32, 16)), Phase.FORWARD)
    assert not folded.supports(replace(shape, out=(32, 6, 8)), Phase.FORWARD)
    assert not folded.supports(replace(shape, halved=False), Phase.FORWARD)
    monkeypatch.setattr(folded, "compiled_registers", lambda: PORTABLE)
    assert not folded.supports(shape, Phase.FORWARD)
