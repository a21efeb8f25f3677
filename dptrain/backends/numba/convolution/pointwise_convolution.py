"""Convolution with 1 × 1 filters: one matrix product over the pixels of all samples.

Arguments are those of `direct_convolution`, with a `GatheredGeometry`. The forward pass multiplies
x (pixels, C) with w (C, K), the input gradient dy (pixels, K) with the transpose of w
(`gathered_convolution`), and the weight gradient the transpose of x with dy.

ResNet-50 with 8 samples, 512 → 2048 channels on 7 × 7 maps: 70 instead of 33 multiply-adds per ns
of the direct convolution, which multiplies the pixels of one sample (Intel Xeon, AVX-512, one
thread).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dptrain.backends.numba.convolution import gathered_convolution
from dptrain.backends.numba.convolution.gathered_convolution import (
    AHEAD,
    PANEL,
    TILE,
    gather,
    geometry_of,
    prefetch_elements,
    tile_of,
)
from dptrain.backends.numba.convolution.im2col import maps_of, vector_part
from dptrain.backends.numba.convolution.microkernels import NO_LOWER_BOUND, multiply_spaced
from dptrain.backends.numba.convolution.planning import (
    Case,
    KernelPlan,
    Shape,
    Work,
    units_per_item,
)
from dptrain.backends.numba.dense.matmul import RAMP
from dptrain.backends.numba.vector import copy
from dptrain.native.jit import inlined, kernel
from dptrain.plan.lowering import Phase
from dptrain.plan.selection import alone

GRADIENT_STEPS, GRADIENT_COLUMNS, GRADIENT_ROWS = 256, 512, 144
"""Pixels, filters and channels that the weight gradient packs at a time, in at most 0.7 MB."""
RATE = 1.1
"""Multiply-adds in the time of one of a direct convolution: the median of 27 products of 1 × 1
convolutions with 64 to 2048 channels and 8 samples, from 0.84 to 1.6 (AMD EPYC, AVX2, one
thread)."""
COPY = 0.13
"""Time in ns to copy an element of a pixel, which strides make necessary. In resnet20 with 32
samples, products with 16 → 32 channels and a stride of 2 took 1.18 (forward) and 1.07 times (input
gradient) as long as direct ones, and those with 32 → 64 channels 1.06 and 1.01 times (AMD EPYC,
AVX2, one thread, 29 November 2026)."""
FEWEST = 16
"""Smallest number of channels and filters."""
FEWEST_OF_GRADIENT = 128
"""Smallest number of channels for which packing pays in the weight gradient."""


def supports(case: Case) -> bool:
    """Return whether the kernels compute a case, with enough channels to pack the weights."""
    shape, phase = case.shape, case.phase
    plain = shape.window == (1, 1) and shape.pads == (0, 0) and not shape.pool_height
    inside = all(
        (o - 1) * s < i for o, s, i in zip(shape.out, shape.strides, shape.maps, strict=False)
    )
    channels, filters = shape.maps[2], shape.out[2]
    if phase is Phase.BACKWARD_WEIGHT and channels < FEWEST_OF_GRADIENT:
        return False
    return plain and inside and min(channels, filters) >= FEWEST


def estimate(case: Case) -> Sequence[tuple[float, str]]:
    """Return the estimated time in ns."""
    shape = case.shape
    elements = 0
    if shape.strides != (1, 1):
        elements = case.samples * math.prod(shape.out[:2]) * shape.maps[2]
    return alone(case.direct_ns / RATE + COPY * elements)


def plan(shape: Shape, phase: Phase, work: Work) -> KernelPlan:
    """Return the algorithm of a phase."""
    if phase is not Phase.BACKWARD_WEIGHT:
        return gathered_convolution.plan(shape, phase, work)
    blocks = units_per_item(work.rows, work.threads, most=-(-shape.out[2] // PANEL))
    scratch = GRADIENT_STEPS * (GRADIENT_COLUMNS + GRADIENT_ROWS)
    geometry = geometry_of(shape, 0, 1, blocks)
    return KernelPlan(conv2d_backward_weight, geometry, scratch, tile_of(0))


@kernel
def conv2d_backward_weight(items, x, dy, partial, bounds, geo, pool, scratch):
    """Compute `direct_convolution.conv2d_backward_weight`; blocks are ranges of filters.

    Pixels are summed in parts of `GRADIENT_STEPS`, which begin at the first sample of a row of
    partial sums.
    """
    c, k, blocks = x.shape[3], dy.shape[3], geo.units
    pixels, mine = geo.h_out * geo.w_out, scratch[items.thread]
    for item in range(items.start, items.stop):
        index, block = item // blocks, item % blocks
        first, last = bounds[index] * pixels, bounds[index + 1] * pixels
        q, q_stop = vector_part(k, block, blocks, PANEL)
        sums = partial[index]
        if first == last:
            for i in range(c):
                sums[i * k + q : i * k + q_stop] = 0
        for p in range(q, q_stop, GRADIENT_COLUMNS):
            columns = p, min(q_stop, p + GRADIENT_COLUMNS)
            _sum_columns(geo, x, dy, (first, last), columns, sums, mine)
        if pool.bias:
            total, dy_flat = sums[c * k :], dy.reshape(-1)
            total[q:q_stop] = 0
            for m in range(first, last):
                for i in range(q, q_stop):
                    total[i] += dy_flat[m * k + i]


@inlined
def _sum_columns(geo, x, dy, pixels, columns, sums, mine):
    """Write some columns of the weight gradient of some pixels to sums."""
    (first, last), (q, q_stop) = pixels, columns
    c, k, width = x.shape[3], dy.shape[3], q_stop - q
    maps, dy_flat, block = maps_of(x), dy.reshape(-1), GRADIENT_STEPS * GRADIENT_COLUMNS
    grid = (geo.h_out, geo.w_out), (geo.stride_v, geo.stride_h), (0, 0)
    for m in range(first, last, GRADIENT_STEPS):
        steps = min(GRADIENT_STEPS, last - m)
        for p in range(0, width, PANEL):
            wide = min(PANEL, width - p)
            for r in range(steps):
                source = (m + r) * k + q + p
                prefetch_elements(dy_flat, source + AHEAD * k, wide)
                copy(dy_flat, source, mine, p * steps + r * wide, wide)
        for i in range(0, c, GRADIENT_ROWS):
            rows = min(GRADIENT_ROWS, c - i)
            gather(maps, grid, m, steps, (i, rows), (mine, block, rows))
            for p in range(0, width, PANEL):
                wide, target = min(PANEL, width - p), i * k + q + p
                multiply_spaced(
                    (mine, block),
                    (RAMP, 0, 1),
                    (RAMP, 0, rows),
                    (mine, p * steps, wide),
                    (sums, target, -1 if m == first else k),
                    (sums, target),
                    (RAMP, 0, k),
                    (rows, steps, wide),
                    NO_LOWER_BOUND,
                    TILE,
                )
