"""Direct convolution of RGB images with 8 filters, fused with ReLU and 2 × 2 max pooling.

Arguments are those of `direct_convolution` with pooling, with a `FoldedRgbGeometry`. Eight filters
fill only half a vector. A vector of this module contains two adjacent elements of a filter row, in
lanes ``2 k + s`` for filter k and element s of the pair (`folded_rgb_microkernels`). Bands are
ranges of rows of windows; the weight gradient is not divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dptrain.backends.numba.convolution.folded_rgb_microkernels import (
    CHANNELS,
    FILTERS,
    LANES,
    PAIRS,
    ROW,
    SIDE,
    WINDOWS,
    add_folded_gradients,
    multiply_folded,
)
from dptrain.backends.numba.convolution.im2col import copy_rows, part
from dptrain.backends.numba.convolution.planning import (
    Case,
    KernelPlan,
    Shape,
    Work,
    units_per_item,
)
from dptrain.backends.numba.vector import compiled_registers
from dptrain.native.jit import inlined, kernel
from dptrain.plan.lowering import Phase
from dptrain.plan.selection import alone

WEIGHTS = SIDE * PAIRS * LANES
"""Elements of folded weights, or of their gradient."""
BIAS, PADDED = WEIGHTS, WEIGHTS + LANES
"""Start of the folded bias and of the padded rows in scratch."""
RATE = 2.0
"""Multiply-adds in the time of one of a direct convolution, whose vectors are half empty."""
CACHED = 8192
"""Elements of padded rows that are loaded at a time, so that they stay in the L1 cache."""


def supports(case: Case) -> bool:
    """Return whether this module computes a case."""
    shape = case.shape
    return (
        compiled_registers().width == LANES
        and (shape.window, shape.maps[2]) == ((SIDE, SIDE), CHANNELS)
        and shape.strides == shape.dilations == (1, 1)
        and shape.halved
        and shape.out[2] == FILTERS
        and shape.out[1] // 2 >= WINDOWS
    )


def estimate(case: Case) -> Sequence[tuple[float, str]]:
    """Return the estimated time in ns."""
    return alone(case.direct_ns / RATE)


class FoldedRgbGeometry(NamedTuple):
    """Padding of the convolution, and the padded rows that are in scratch at the same time.

    Attributes:
        rows: rows of windows whose inputs are in scratch.
        columns: pixels of a padded row.
        units: see `planning.KernelPlan`.
    """

    pad_top: int
    pad_left: int
    rows: int
    columns: int
    units: int


@inlined
def _load_rows(x, n, first, rows, geo, mine):
    """Load the inputs of some rows of windows from row `first` on of sample n."""
    _, height, width, c = x.shape
    copy_rows(
        x.reshape(-1), n * height * width * c, (height, width, c), 2 * first - geo.pad_top,
        2 * rows + SIDE - 1, mine[PADDED:], geo.columns, geo.pad_left,
    )  # fmt: skip


@inlined
def _element(pair):
    """Return the first element of a pair of a filter row; the last pair overlaps the one before."""
    return min(2 * pair, ROW - 2)


@inlined
def _fold(w, k, folded):
    """Fold flat weights w (3, 3, 3, K); each element is in one pair, other lanes are 0."""
    folded[:WEIGHTS] = 0
    for r in range(SIDE):
        for pair in range(PAIRS):
            e = _element(pair)
            for s in range(2 * pair - e, 2):
                for q in range(k):
                    folded[(r * PAIRS + pair) * LANES + 2 * q + s] = w[(r * ROW + e + s) * k + q]


@inlined
def _unfold(folded, k, dw):
    """Write the gradient dw (3, 3, 3, K) of flat weights from folded sums."""
    for r in range(SIDE):
        for pair in range(PAIRS):
            e = _element(pair)
            for s in range(2):
                for q in range(k):
                    dw[(r * ROW + e + s) * k + q] = folded[(r * PAIRS + pair) * LANES + 2 * q + s]


@kernel
def conv2d_forward(items, x, w, b, y, geo, pool, scratch):
    """Compute `direct_convolution.conv2d_forward` with pooling."""
    mine, row = scratch[items.thread], geo.columns * CHANNELS
    (_, h_pool, w_pool, k), y_flat, bands = y.shape, y.reshape(-1), geo.units
    mine[:] = 0
    _fold(w, k, mine)
    for q in range(k):
        mine[BIAS + 2 * q] = b[q]
    for item in range(items.start, items.stop):
        n = item // bands
        first, last = part(h_pool, item % bands, bands)
        for p in range(first, last, geo.rows):
            rows = min(geo.rows, last - p)
            _load_rows(x, n, p, rows, geo, mine)
            for i in range(rows):
                target = (n * h_pool + p + i) * w_pool * k
                multiply_folded(
                    mine, PADDED + 2 * i * row, row, mine, 0, y_flat, target, pool.argmax, target,
                    w_pool,
                )  # fmt: skip


@kernel
def conv2d_backward_weight(items, x, dy, partial, bounds, geo, pool, scratch):
    """Compute `direct_convolution.conv2d_backward_weight` with pooling."""
    mine, row = scratch[items.thread], geo.columns * CHANNELS
    (_, h_pool, w_pool, k), dy_flat = dy.shape, dy.reshape(-1)
    mine[PADDED:] = 0
    for item in range(items.start, items.stop):
        mine[:PADDED] = 0
        for n in range(bounds[item], bounds[item + 1]):
            for p in range(0, h_pool, geo.rows):
                rows = min(geo.rows, h_pool - p)
                _load_rows(x, n, p, rows, geo, mine)
                for i in range(rows):
                    source = (n * h_pool + p + i) * w_pool * k
                    add_folded_gradients(
                        mine, PADDED + 2 * i * row, row, mine, 0, dy_flat, source, pool.argmax,
                        source, w_pool,
                    )  # fmt: skip
        sums = partial[item]
        _unfold(mine, k, sums)
        for q in range(k):
            sums[SIDE * ROW * k + q] = mine[BIAS + 2 * q]


def plan(shape: Shape, phase: Phase, work: Work) -> KernelPlan:
    """Return the algorithm of a phase of a convolution that `supports` accepts."""
    windows_down, columns = shape.out[0] // 2, 2 * (shape.out[1] // 2) + SIDE - 1
    rows = max(1, min(windows_down, CACHED // (2 * columns * CHANNELS)))
    is_gradient = phase is Phase.BACKWARD_WEIGHT
    bands = 1 if is_gradient else units_per_item(work.batch_size, work.threads, windows_down)
    geometry = FoldedRgbGeometry(*shape.pads, rows, columns, bands)
    scratch = PADDED + (2 * rows + SIDE - 1) * columns * CHANNELS
    if is_gradient:
        return KernelPlan(conv2d_backward_weight, geometry, scratch, f"{SIDE * ROW}×{FILTERS}")
    return KernelPlan(conv2d_forward, geometry, scratch, f"{WINDOWS} windows×{FILTERS}")
