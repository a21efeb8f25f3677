"""Every row of the table of convolutions against PyTorch, also if another estimate is lower."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from dptrain.backends.numba.convolution import direct_convolution, planning
from dptrain.backends.numba.convolution.algorithms import CONVOLUTION
from dptrain.backends.numba.convolution.planning import Work
from dptrain.backends.numba.vector import AVX512, compiled_registers
from dptrain.plan.lowering import Phase
from tests.unit.backends.numba import test_numba_convolution as vectors
from tests.unit.backends.numba.test_numba_pointwise import GATHERED

pytestmark = pytest.mark.more

SAME, NO_PADS = ((1, 1), (1, 1)), ((0, 0), (0, 0))

# n, (H, W, C), K, (R, S), strides, ((top, bottom), (left, right)), dilations if not 1
SHAPES = {
    **vectors.CASES,
    "gathered": GATHERED["3 × 3"],
    "gathered, dilated": GATHERED["dilation 2 and 3, stride 4 and 2"],
    "Winograd, if it were not dilated": (
        2,
        (9, 8, 32),
        32,
        (3, 3),
        (1, 1),
        ((1, 1), (1, 1)),
        (2, 2),
    ),
    "1 × 1, several panels": (2, (7, 7, 24), 75, (1, 1), (1, 1), NO_PADS),
    "1 × 1, few channels": (2, (5, 7, 3), 4, (1, 1), (1, 1), NO_PADS),
    "1 × 1, padded": (2, (5, 7, 3), 4, (1, 1), (1, 1), SAME),
    "1 × 1, stride 2, few channels": (2, (5, 7, 3), 4, (1, 1), (2, 2), NO_PADS),
    "1 × 1, stride 2, padded": (2, (5, 7, 3), 4, (1, 1), (2, 2), SAME),
    "1 × 1, stride 2, last row not read": (2, (6, 8, 3), 4, (1, 1), (2, 2), ((0, -1), (0, -1))),
    "1 × 1, stride 2, 20 channels": (2, (6, 8, 20), 17, (1, 1), (2, 2), ((0, -1), (0, -1))),
}
POOLED = {
    "8 filters of colours": (2, (8, 22, 3), 8, (3, 3), (1, 1), SAME),
    "20 filters of colours": (3, (13, 11, 3), 20, (3, 3), (1, 1), SAME),
    "first layer": vectors.CASES["first layer"],
    "wide": vectors.CASES["wide"],
    "dilated colours": (2, (8, 22, 3), 8, (3, 3), (1, 1), ((2, 2), (2, 2)), (2, 2)),
}
"""Shapes with fused pooling."""

WIDE_ROWS = {"implicit GEMM of colour images"}
"""Rows that exist with vectors of AVX-512 alone."""


@cache
def cases():
    """Return all cases with the results of PyTorch, by name."""
    found = {name: vectors.Case(shape) for name, shape in SHAPES.items()}
    for name, shape in POOLED.items():
        case = found[f"{name}, pooled"] = vectors.Case(shape, pool=vectors.POOLS["2/2"])
        case.shape = replace(case.shape, halved=True)
    return found


@pytest.mark.parametrize("row", CONVOLUTION, ids=lambda row: row.name)
def test_a_row_computes_all_shapes_that_it_supports(row):
    if row.name in WIDE_ROWS and compiled_registers().width < AVX512.width:
        pytest.skip(f"'{row.name}' needs AVX-512, which this processor does not have")
    found = [check(row, copy(case), name) for name, case in cases().items()]
    assert any(found), f"'{row.name}' supports no shape of this module; add one that it supports"


def check(row, case, name):
    """Compare the phases that a row supports with PyTorch; return whether there are any."""
    phases = [p for p in row.phases if row.supports(planning.Case(case.shape, p))]
    if not all(row.supports(planning.Case(case.shape, p, winograd=False)) for p in phases):
        # As in test_numba_rgb.py: Winograd algorithms have 3 times the rounding errors.
        case.lengths = {name: 9 * length for name, length in case.lengths.items()}
    work = Work(len(case.x), 2, 2)
    # Pooling stores in the forward pass which outputs have a gradient.
    argmax = None
    if case.pool:
        case.plan = direct_convolution.plan
        argmax = case.forward(work)[1]
    case.plan = row.bind
    for phase in phases:
        print(f"{row.name}: {phase.name} of {name}")  # Shown if the test fails.
        if phase is Phase.FORWARD:
            for relu in (False,) if case.pool else (False, True):
                y, _ = case.forward(work, relu)
                expected = case.ty.relu() if relu else case.ty
                vectors.close(y, vectors.nhwc(expected), case.lengths["y"])
        elif phase is Phase.BACKWARD_WEIGHT:
            vectors.check_weight_gradients(case, case.backward_weight(work, argmax))
        else:
            expected = vectors.nhwc(case.tx.grad)
            vectors.close(case.backward_input(work, argmax), expected, case.lengths["dx"])
            if not case.pool:
                before = np.ones_like(case.x)
                dx = case.backward_input(work, before=before)
                vectors.close(dx - before, expected, 4 * case.lengths["dx"])
    return bool(phases)
