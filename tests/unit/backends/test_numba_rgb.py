"""Convolutions of colour images, pooled, against PyTorch in float64, at awkward shapes."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.backends.numba import winograd_rgb_convolution as winograd
from dptrain.backends.numba.planning import Work
from dptrain.backends.numba.pooling_windows import NO_GRADIENT
from tests.unit.backends import test_numba_convolution as vectors

SAME, NONE, UNEVEN = ((1, 1), (1, 1)), ((0, 0), (0, 0)), ((2, 1), (0, 3))

# n, (H, W, C), K, pads
CASES = {
    "one tile": (2, (4, 4, 3), 16, SAME),
    "one window": (3, (4, 5, 3), 16, NONE),
    "whole tiles": (2, (16, 32, 3), 16, SAME),
    "groups of tiles that do not fill vectors": (2, (8, 21, 3), 32, SAME),
    "odd rows and columns": (3, (13, 11, 3), 16, SAME),
    "a row and a column of windows more": (2, (10, 22, 3), 48, SAME),
    "8 filters": (2, (8, 21, 3), 8, SAME),
    "12 filters": (2, (9, 12, 3), 12, SAME),
    "20 filters": (3, (13, 11, 3), 20, SAME),
    "39 filters": (2, (10, 22, 3), 39, NONE),
    "uneven pads": (2, (7, 9, 3), 32, UNEVEN),
}


class Case(vectors.Case):
    """A case of the algorithm."""

    def __init__(self, name):
        self.plan = winograd.plan
        n, maps, k, pads = CASES[name]
        super().__init__((n, maps, k, (3, 3), (1, 1), pads), pool=vectors.POOLS["2/2"])
        # F(4×4, 3×3) has about 3 times the error of a direct sum (kernels.md), as a sum of 9
        # times as many products has.
        self.lengths = {name: 9 * length for name, length in self.lengths.items()}


def work(case, threads=2):
    return Work(len(case.x), threads, 2)


@pytest.mark.parametrize("name", CASES)
def test_forward_and_weight_gradient(name):
    case = Case(name)
    y, argmax = case.forward(work(case))
    vectors.close(y, vectors.nhwc(case.ty), case.lengths["y"])
    np.testing.assert_array_equal(argmax == NO_GRADIENT, y == 0)
    vectors.check_weight_gradients(case, case.backward_weight(work(case), argmax))


def test_bits_do_not_depend_on_threads():
    case = Case("39 filters")
    y, argmax = case.forward(work(case))
    expected = case.backward_weight(work(case), argmax)
    for threads in (1, 3, 8):
        results = case.forward(work(case, threads))
        np.testing.assert_array_equal(results[0].view(np.int32), y.view(np.int32))
        np.testing.assert_array_equal(results[1], argmax)
        partial = case.backward_weight(work(case, threads), argmax)
        np.testing.assert_array_equal(partial.view(np.int32), expected.view(np.int32))


def test_the_first_among_equals_is_the_maximum():
    case = Case("whole tiles")
    case.w[:] = 0
    case.b[:] = 1
    y, argmax = case.forward(work(case))
    assert (y == 1).all()
    assert not argmax.any()


def test_not_a_number_passes():
    case = Case("odd rows and columns")
    case.x[0, 4, 4, 1] = np.nan
    y, _ = case.forward(work(case))
    assert np.isnan(y[0, 1:3, 1:3]).all()
    assert not np.isnan(y[1:]).any()
