"""Convolution on the AMX unit against PyTorch in float64, at awkward shapes; bits of any division.

Without the unit, its instructions are emulated.
"""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.backends.numba import amx_convolution, amx_weight_gradient
from dptrain.backends.numba.planning import Shape, Work
from dptrain.backends.numba.pooling_windows import NO_GRADIENT
from dptrain.plan.lowering import Phase
from tests.unit.backends import test_numba_convolution as vectors

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
    "no multiples": (3, (11, 10, 20), 44, (4, 3), (1, 1), ((1, 2), (1, 1))),
}
POOLED = ("first layer", "wide", "runs with padding", "long rows", "no multiples")
STAGES = Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT


class Case(vectors.Case):
    """A case that runs on the AMX unit."""

    plan = staticmethod(amx_convolution.plan)

    def __init__(self, name, pool=None):
        super().__init__(CASES[name], pool=pool and vectors.POOLS[pool])

    def weight_gradients(self, argmax=vectors.NO_ARGMAX):
        return vectors.weight_gradients(self, self.backward_weight(WORK, argmax))


WORK = Work(3, 2, 2)


@pytest.mark.parametrize("name", CASES)
def test_stages(name):
    case = Case(name)
    for relu in (False, True):
        y, _ = case.forward(WORK, relu)
        expected = vectors.nhwc(case.ty.relu() if relu else case.ty)
        vectors.close(y, expected, case.lengths["y"])
    vectors.close(case.backward_input(WORK), vectors.nhwc(case.tx.grad), case.lengths["dx"])
    dw, db = case.weight_gradients()
    vectors.close(dw, case.tw.grad.numpy().transpose(2, 3, 1, 0), case.lengths["dw"])
    vectors.close(db, case.tb.grad.numpy(), case.lengths["dw"])


@pytest.mark.parametrize("pool", vectors.POOLS)
@pytest.mark.parametrize("name", POOLED)
def test_pooled_stages(name, pool):
    case = Case(name, pool)
    y, argmax = case.forward(WORK)
    vectors.close(y, vectors.nhwc(case.ty), case.lengths["y"])
    np.testing.assert_array_equal(argmax == NO_GRADIENT, y == 0)
    dx = case.backward_input(WORK, argmax)
    vectors.close(dx, vectors.nhwc(case.tx.grad), case.lengths["dx"])
    dw, db = case.weight_gradients(argmax)
    vectors.close(dw, case.tw.grad.numpy().transpose(2, 3, 1, 0), case.lengths["dw"])
    vectors.close(db, case.tb.grad.numpy(), case.lengths["dw"])


@pytest.mark.parametrize("pool", [None, "2/2", "3/2 same", "3/1"])
@pytest.mark.parametrize("name", ["runs with padding", "no multiples", "long rows"])
def test_bits_do_not_depend_on_bands_and_blocks(name, pool, monkeypatch):
    case = Case(name, pool)
    n, one = len(case.x), Work(len(case.x), 1, 1)
    y, argmax = case.forward(one)
    dx, partial = case.backward_input(one, argmax), case.backward_weight(one, argmax)
    units = set()
    for threads in (2, 3, 7, 20):
        work = Work(n, threads, 1)
        units.add(tuple(case.plan(case.shape, phase, work).units for phase in STAGES))
        np.testing.assert_array_equal(case.backward_weight(work, argmax), partial)
        # Blocks of few rows too.
        for cache in (amx_convolution.CACHE, 1 << 15):
            monkeypatch.setattr(amx_convolution, "CACHE", cache)
            for expected, result in zip((y, argmax), case.forward(work), strict=True):
                np.testing.assert_array_equal(result, expected)
            np.testing.assert_array_equal(case.backward_input(work, argmax), dx)
    assert len(units) > 2


@pytest.mark.parametrize("pool", [None, "3/2 same"])
def test_rows_of_partial_sums_have_their_own_samples(pool):
    """Row r has the bits of samples bounds[r] to bounds[r + 1] alone; without samples it is 0."""
    case = Case("no multiples", pool)
    _, argmax = case.forward(WORK)
    rows = case.backward_weight(Work(3, 8, 3), argmax, np.array([0, 2, 2, 3]))
    assert not rows[1].any()
    for row, bounds in ((rows[0], [0, 2]), (rows[2], [2, 3])):
        alone = case.backward_weight(Work(3, 1, 1), argmax, np.array(bounds))
        np.testing.assert_array_equal(row, alone[0])


@pytest.mark.parametrize("pool", [None, "3/2 same"])
def test_sums_of_weight_gradients_in_blocks_of_rows(pool, monkeypatch):
    monkeypatch.setattr(amx_weight_gradient, "CACHE", 1 << 15)
    case = Case("runs with padding", pool)
    shape = case.shape
    geometry = amx_weight_gradient.make_weight_gradient_geometry(
        shape.maps, shape.out, shape.window, shape.pads
    )
    assert geometry.block_rows < shape.out[0] // 2
    dw, db = case.weight_gradients(case.forward(WORK)[1])
    vectors.close(dw, case.tw.grad.numpy().transpose(2, 3, 1, 0), case.lengths["dw"])
    vectors.close(db, case.tb.grad.numpy(), case.lengths["dw"])


def test_errors_are_those_of_float32():
    """Not only within bounds: no larger than those of a usual sum of 1600 products."""
    case = Case("many channels")
    exact = vectors.nhwc(case.ty)
    x, w, b = (t.float() for t in (case.tx, case.tw, case.tb))
    usual = vectors.nhwc(vectors.functional.conv2d(x, w, b, padding=2))
    errors = [np.sqrt(np.mean((y - exact) ** 2)) for y in (case.forward(WORK)[0], usual)]
    assert errors[0] < 1.5 * errors[1]


def test_not_a_number_passes():
    case = Case("wide", "2/2")
    case.x[0, 4, 3, 1] = np.nan
    y, _ = case.forward(WORK)
    assert np.isnan(y[0, 1:3, 1:2]).all()
    assert not np.isnan(y[1:]).any()


def test_large_maps_have_blocks_that_stay_in_the_cache():
    """Scratch of 224 × 224 maps does not grow with the number of rows."""
    scratch = []
    for height in (112, 224):
        shape = Shape((height, 224, 64), (height, 224, 64), (5, 5), (1, 1), (2, 2))
        plans = [amx_convolution.plan(shape, phase, Work()) for phase in STAGES]
        scratch.append([algorithm.scratch for algorithm in plans])
    assert scratch[0] == scratch[1]
