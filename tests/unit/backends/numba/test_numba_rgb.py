"""Convolutions of colour images, pooled, against PyTorch in float64, at awkward shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dptrain.backends.numba.convolution import folded_rgb_convolution as folded
from dptrain.backends.numba.convolution import winograd_rgb_convolution as winograd
from dptrain.backends.numba.convolution.planning import Case as Selected
from dptrain.backends.numba.convolution.planning import Shape, Work
from dptrain.backends.numba.pooling.pooling_windows import NO_GRADIENT
from dptrain.backends.numba.vector import AVX512, PORTABLE
from dptrain.plan.lowering import Phase
from tests.unit.backends.numba import test_numba_convolution as vectors

SAME, NONE, UNEVEN = ((1, 1), (1, 1)), ((0, 0), (0, 0)), ((2, 1), (0, 3))

# n, (H, W, C), K, pads
WINOGRAD = {
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
FOLDED = {
    "whole tiles": (3, (16, 32, 3), 8, SAME),
    "one tile": (2, (2, 8, 3), 8, SAME),
    "tiles that overlap": (2, (8, 22, 3), 8, SAME),
    "odd rows and columns": (3, (13, 11, 3), 8, SAME),
    "no pads": (2, (10, 23, 3), 8, NONE),
    "uneven pads": (2, (7, 9, 3), 8, UNEVEN),
    "several parts of rows": (1, (60, 130, 3), 8, SAME),
}
ALGORITHMS = {winograd: WINOGRAD, folded: FOLDED}

every_algorithm = pytest.mark.parametrize("module", ALGORITHMS, ids=["winograd", "folded"])


class Case(vectors.Case):
    """A case of one of the algorithms."""

    def __init__(self, module, name):
        self.plan = module.plan
        n, maps, k, pads = ALGORITHMS[module][name]
        super().__init__((n, maps, k, (3, 3), (1, 1), pads), pool=vectors.POOLS["2/2"])
        # F(4×4, 3×3) has about 3 times the error of a direct sum (numerics.md), as a sum of 9
        # times as many products has.
        more_products = 9 if module is winograd else 1
        self.lengths = {name: more_products * length for name, length in self.lengths.items()}


def work(case, threads=2):
    return Work(len(case.x), threads, 2)


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in ALGORITHMS.items() for name in names]
)
def test_forward_and_weight_gradient(module, name):
    case = Case(module, name)
    y, argmax = case.forward(work(case))
    vectors.close(y, vectors.nhwc(case.ty), case.lengths["y"])
    np.testing.assert_array_equal(argmax == NO_GRADIENT, y == 0)
    vectors.check_weight_gradients(case, case.backward_weight(work(case), argmax))


@every_algorithm
def test_bits_do_not_depend_on_threads(module):
    case = Case(module, "39 filters" if module is winograd else "odd rows and columns")
    y, argmax = case.forward(work(case))
    expected = case.backward_weight(work(case), argmax)
    for threads in (1, 3, 8):
        results = case.forward(work(case, threads))
        np.testing.assert_array_equal(results[0].view(np.int32), y.view(np.int32))
        np.testing.assert_array_equal(results[1], argmax)
        partial = case.backward_weight(work(case, threads), argmax)
        np.testing.assert_array_equal(partial.view(np.int32), expected.view(np.int32))


@every_algorithm
def test_the_first_among_equals_is_the_maximum(module):
    case = Case(module, "whole tiles")
    case.w[:] = 0
    case.b[:] = 1
    y, argmax = case.forward(work(case))
    assert (y == 1).all()
    assert not argmax.any()


def test_sums_that_are_zero_stay_zero():
    case = Case(folded, "whole tiles")
    case.x[:, :, 16:] = 0
    case.b[:] = 0
    y, argmax = case.forward(work(case))
    assert not y[:, :, 9:].any()
    assert (argmax[:, :, 9:] == NO_GRADIENT).all()


@every_algorithm
def test_not_a_number_passes(module):
    case = Case(module, "odd rows and columns")
    case.x[0, 4, 4, 1] = np.nan
    y, _ = case.forward(work(case))
    assert np.isnan(y[0, 1:3, 1:3]).all()
    assert not np.isnan(y[1:]).any()


def test_only_eight_filters_of_wide_vectors_are_folded(monkeypatch):
    shape = Shape((32, 32, 3), (32, 32, 8), (3, 3), (1, 1), (1, 1), 2, halved=True)
    monkeypatch.setattr(folded, "compiled_registers", lambda: AVX512)
    case = Selected(shape, Phase.FORWARD)
    assert folded.supports(case)
    for other in (
        replace(shape, out=(32, 32, 16)), replace(shape, out=(32, 6, 8)),
        replace(shape, halved=False),
    ):  # fmt: skip
        assert not folded.supports(replace(case, shape=other))
    monkeypatch.setattr(folded, "compiled_registers", lambda: PORTABLE)
    assert not folded.supports(case)
