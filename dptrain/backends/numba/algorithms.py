"""Select the algorithm of each stage of a convolution by its shape and the processor.

- `direct_convolution`: implicit GEMM on vectors. All shapes.
- `winograd_convolution`: Winograd F(4×4, 3×3) and F(2×2, 5×5) on vectors.
- `winograd_strided_convolution`: Winograd F(4×4, 2×2) for 4 × 4 filters with stride 2, on vectors.
- `winograd_rgb_convolution`: Winograd F(4×4, 3×3) for three input channels, with fused pooling.
- `folded_rgb_convolution`: direct convolution for three input channels and 8 filters, with fused
  pooling, on AVX-512.
- `amx_convolution`: implicit GEMM on the AMX unit, if the processor has one, for shapes without
  Winograd algorithm.

The modules define kernels of the same names with the same arguments, except for the type of the
geometry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from dptrain.backends.numba import (
    amx_convolution,
    direct_convolution,
    folded_rgb_convolution,
    winograd_convolution,
    winograd_geometry,
    winograd_rgb_convolution,
    winograd_strided_convolution,
)
from dptrain.backends.numba.amx import SIDE, available
from dptrain.backends.numba.planning import (
    KERNELS,
    MIN_MULTIPLY_ADDS,
    Algorithm,
    Shape,
    Work,
    kernel_of,
)
from dptrain.backends.numba.winograd_transforms import SIDE as WINOGRAD_SIDE
from dptrain.backends.numba.winograd_transforms import SIDES
from dptrain.plan.lowering import Phase

__all__ = ["Algorithm", "Shape", "Work", "select_algorithms"]

Candidate = tuple[ModuleType, Any]
"""Module of an algorithm and its geometry, which contains `scratch_size`."""


SAVED: Mapping[type, int] = {
    winograd_geometry.WinogradGeometry: 8,
    winograd_rgb_convolution.WinogradRgbGeometry: 4,
}
"""How many times more multiply-adds of a Winograd convolution are worth one more thread: it
computes a quarter as many products, and each thread fetches all transformed weights. Measured
without this limit on 2 cores of an Intel Xeon (AVX-512), 16 → 32 channels, 16 × 16, one sample:
18.6 µs on two threads, 12.4 µs on one."""
MIN_RGB_FILTERS = 12
"""Smallest number of filters for which colour images are transformed. With 8 filters it would save
a third of the time (Intel Xeon, AVX-512), but rounding makes outputs that are exactly 0 positive,
so that ReLU passes their gradients (docs/numerics.md)."""
FEWEST_TILES, FEWEST_STRIDED_TILES = 12, 24
"""Smallest number of tiles in a batch for which transforming the weights pays, and with stride 2.
128 → 256 channels, 8 × 8 maps, one sample: 0.5 instead of 1.1 ms."""


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
    winograd = winograd and (work.by_shape or has_enough_tiles(shape, work.batch_size))
    return {
        phase: _with_worthwhile_ranges(_plan(shape, phase, work, winograd), shape, phase, work)
        for phase in KERNELS
    }


def _with_worthwhile_ranges(
    algorithm: Algorithm, shape: Shape, phase: Phase, work: Work
) -> Algorithm:
    """Return the algorithm with fewer ranges if the whole stage takes only a few microseconds."""
    least = MIN_MULTIPLY_ADDS * SAVED.get(type(algorithm.geometry), 1)
    units = work.worthwhile_units(shape, phase, algorithm.units, least)
    return replace(algorithm, grain=max(algorithm.grain, units))


def has_enough_tiles(shape: Shape, samples: int) -> bool:
    """Return whether the samples have so many Winograd tiles that transforming the weights pays."""
    side = SIDES.get(shape.window[0], WINOGRAD_SIDE)
    tiles = samples * -(-shape.out[0] // side) * -(-shape.out[1] // side)
    return tiles >= (FEWEST_TILES if shape.strides == (1, 1) else FEWEST_STRIDED_TILES)


def _plan(shape: Shape, phase: Phase, work: Work, winograd: bool) -> Algorithm:
    found = _find_faster_than_direct(shape, phase, winograd)
    if found is None:
        return direct_convolution.plan(shape, phase, work)
    module, geometry = found
    if hasattr(module, "plan"):
        planned: Algorithm = module.plan(shape, phase, work)
        return planned
    return Algorithm(kernel_of(module, shape, phase), geometry, int(geometry.scratch_size))


def _find_faster_than_direct(shape: Shape, phase: Phase, winograd: bool) -> Candidate | None:
    c, k = shape.maps[2], shape.out[2]
    maps, out, pads = shape.maps, shape.out, shape.pads
    if phase is Phase.BACKWARD_INPUT:
        maps, out, pads = shape.out, shape.maps, shape.dy_pads
    if (
        winograd
        and shape.is_plain
        and winograd_geometry.supports(shape.window, shape.strides, c, k)
    ):
        return winograd_convolution, winograd_geometry.make_geometry(
            maps, out, pads, shape.window[0]
        )
    if winograd and winograd_strided_convolution.supports(shape):
        return winograd_strided_convolution, None
    if folded_rgb_convolution.supports(shape, phase):
        return folded_rgb_convolution, None
    if winograd and phase is not Phase.BACKWARD_INPUT and _use_winograd_rgb(shape):
        return winograd_rgb_convolution, winograd_rgb_convolution.make_geometry(maps, out, pads)
    if not available() or not shape.is_plain:
        return None
    if c < SIDE:
        return _find_for_small_channels(shape, phase)
    if k < SIDE or min(maps[1], out[1]) < SIDE // 2:
        return None
    return amx_convolution, None


def _use_winograd_rgb(shape: Shape) -> bool:
    """Return whether at least two thirds of the outputs that 4 × 4 tiles compute are needed.

    Measured without AMX, 16 filters, 32 × 32 maps, batch 32: forward 157 instead of 276 µs, weight
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


def _find_for_small_channels(shape: Shape, phase: Phase) -> Candidate | None:
    """Return the AMX algorithm for fewer than 16 input channels; it pays from 64 filters on.

    Only the weight gradient fills tiles: a filter row of at most 16 elements is one column tile.
    """
    row = shape.window[1] * shape.maps[2]
    if phase is not Phase.BACKWARD_WEIGHT or shape.out[2] < 4 * SIDE:
        return None
    if not SIDE // 2 <= row <= SIDE:
        return None
    return amx_convolution, None
