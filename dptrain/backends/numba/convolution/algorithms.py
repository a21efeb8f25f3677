"""Select the algorithm of each stage of a convolution by its shape and the processor.

- `direct_convolution`: implicit GEMM. All shapes.
- `pointwise_convolution`: GEMM over the pixels of all samples. 1 × 1 filters.
- `gathered_convolution`: GEMM over gathered pixels of several samples. Many weights, small maps.
- `winograd_convolution`: Winograd F(4×4, 3×3) and F(2×2, 5×5).
- `winograd_rgb_convolution`: Winograd F(4×4, 3×3) for three input channels, with fused pooling.
- `folded_rgb_convolution`: direct convolution for three input channels and 8 filters, with fused
  pooling, on AVX-512. Without it, a step of `model-small` takes 1.32 times as long (batch size 32,
  one thread of an Intel Xeon, 71 pairs, 29 November 2026).

The modules define kernels of the same names with the same arguments, except for the type of the
geometry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

from dptrain.backends.numba.convolution import (
    direct_convolution,
    folded_rgb_convolution,
    gathered_convolution,
    pointwise_convolution,
    winograd_convolution,
    winograd_cost,
    winograd_geometry,
    winograd_rgb_convolution,
)
from dptrain.backends.numba.convolution.planning import (
    MIN_INFERENCE_MULTIPLY_ADDS,
    MIN_MULTIPLY_ADDS,
    Algorithm,
    Shape,
    Work,
)
from dptrain.backends.numba.convolution.winograd_transforms import SIDE, SIDES
from dptrain.plan.lowering import Phase

__all__ = ["Algorithm", "Shape", "Work", "select_algorithms", "work_of_layer"]

Plan = Callable[[Shape, Phase, Work], Algorithm]
"""Function `plan` of an algorithm's module."""
PHASES = Phase.FORWARD, Phase.BACKWARD_WEIGHT, Phase.BACKWARD_INPUT

MOST_SELECTIONS = 4096
"""Selections that are kept; most layers of a deep network have the shape of another one."""

SAVED: Mapping[type, int] = {
    winograd_geometry.WinogradGeometry: 8,
    winograd_rgb_convolution.WinogradRgbGeometry: 4,
}
"""How many times more multiply-adds of a Winograd convolution are worth one more thread: it
computes a quarter as many products, and each thread fetches all transformed weights. Measured
without this limit on 2 cores of an Intel Xeon (AVX-512), 16 → 32 channels, 16 × 16, one sample:
18.6 µs on two threads, 12.4 µs on one."""
SAVED_IN_INFERENCE = 2
"""The same in inference, in which each thread's cache keeps the weights that it reads."""
MIN_RGB_FILTERS = 12
"""Smallest number of filters for which colour images are transformed. With 8 filters it would save
a third of the time (Intel Xeon, AVX-512), but rounding makes outputs that are exactly 0 positive,
so that ReLU passes their gradients (docs/explanation/numerics.md)."""
FEWEST_TILES = 12
"""Smallest number of tiles in a batch for which transforming the weights of colour images pays."""


@lru_cache(MOST_SELECTIONS)
def select_algorithms(
    shape: Shape, work: Work | None = None, *, winograd: bool = True
) -> Mapping[Phase, Algorithm]:
    """Select the algorithm of each stage of a convolution.

    Args:
        shape: the convolution. With `Work.by_shape`, the algorithm and the order of its sums follow
            from the shape alone.
        work: the samples and threads, from which the number of units follows.
        winograd: False excludes the Winograd algorithms, whose rounding errors are larger.
    """
    work = work or Work()
    winograd = winograd and (work.by_shape or has_enough_tiles(shape, work))
    plans = {phase: _select_plan(shape, phase, winograd) for phase in PHASES}
    return {
        phase: _with_worthwhile_ranges(plan(shape, phase, work), shape, phase, work)
        for phase, plan in plans.items()
    }


def work_of_layer(shape: Shape, work: Work, *, winograd: bool = True) -> Work:
    """Return the work of a convolution, whose gradient may have fewer rows of partial sums.

    Micro-shards fix the number of rows.
    """
    if work.by_shape or work.rows == 1:
        return work
    plan = _select_plan(shape, Phase.BACKWARD_WEIGHT, winograd and has_enough_tiles(shape, work))
    if plan is not winograd_convolution.plan:
        return work
    side, width = SIDES[shape.window[0]], winograd_cost.WIDTH
    tiles = work.batch_size * math.prod(-(-n // side) for n in shape.out[:2])
    k = -(-shape.out[2] // width) * width
    rows = winograd_cost.rows_of_gradient(work.rows, tiles, shape.maps[2], k, work.threads)
    return replace(work, rows=rows)


def _with_worthwhile_ranges(
    algorithm: Algorithm, shape: Shape, phase: Phase, work: Work
) -> Algorithm:
    """Return the algorithm with fewer ranges if the whole stage takes only a few microseconds."""
    saved = SAVED.get(type(algorithm.geometry), 1)
    least = MIN_MULTIPLY_ADDS * saved
    if work.keeps_weights:
        least = MIN_INFERENCE_MULTIPLY_ADDS * min(saved, SAVED_IN_INFERENCE)
    units = work.worthwhile_units(shape, phase, algorithm.units, least)
    return replace(algorithm, grain=max(algorithm.grain, units))


def has_enough_tiles(shape: Shape, work: Work) -> bool:
    """Return whether the samples have so many Winograd tiles that transforming the weights pays,
    or reading the transformed weights if they are kept. It does not depend on the threads.
    """
    side = SIDES.get(shape.window[0], SIDE)
    tiles = work.batch_size * -(-shape.out[0] // side) * -(-shape.out[1] // side)
    c, k = shape.maps[2], shape.out[2]
    if not winograd_geometry.supports(shape.window, shape.strides, c, k):
        return tiles >= FEWEST_TILES
    k = -(-k // winograd_cost.WIDTH) * winograd_cost.WIDTH
    pixels, positions = work.batch_size * math.prod(shape.out[:2]), math.prod(shape.window)
    estimate = winograd_cost.winograd_ns(tiles, c, k, keeps_weights=work.keeps_weights)
    return estimate < winograd_cost.ACCEPTED * winograd_cost.direct_ns(pixels, positions, c, k)


def _select_plan(shape: Shape, phase: Phase, winograd: bool) -> Plan:
    """Return the function that plans the fastest algorithm of a phase."""
    c, k = shape.maps[2], shape.out[2]
    if (
        winograd
        and shape.is_plain
        and winograd_geometry.supports(shape.window, shape.strides, c, k)
    ):
        return winograd_convolution.plan
    if pointwise_convolution.supports(shape, phase):
        return pointwise_convolution.plan
    if gathered_convolution.supports(shape, phase):
        return gathered_convolution.plan
    if folded_rgb_convolution.supports(shape, phase):
        return folded_rgb_convolution.plan
    if winograd and phase is not Phase.BACKWARD_INPUT and _use_winograd_rgb(shape):
        return winograd_rgb_convolution.plan
    return direct_convolution.plan


def _use_winograd_rgb(shape: Shape) -> bool:
    """Return whether at least two thirds of the outputs that 4 × 4 tiles compute are needed.

    Measured with 16 filters, 32 × 32 maps, batch 32: forward 157 instead of 276 µs, weight
    gradient 180 instead of 306 µs.
    """
    c, k = shape.maps[2], shape.out[2]
    if k < MIN_RGB_FILTERS:
        return False
    if not (winograd_rgb_convolution.supports(shape.window, shape.strides, c, k) and shape.halved):
        return False
    needed, computed = 1, 1
    for n in shape.out[:2]:
        needed, computed = needed * (n - n % 2), computed * -(-(n - n % 2) // 4) * 4
    return 3 * needed >= 2 * computed
