"""Select the algorithm of each stage of a convolution by its shape and the processor.

- `direct_convolution`, `direct_convolution_pool`: implicit GEMM on vectors. All shapes.
- `winograd_convolution`: Winograd F(4×4, 3×3) and F(2×2, 5×5) on vectors.
- `winograd_rgb_convolution`: Winograd F(4×4, 3×3) for three input channels, with fused pooling.
- `amx_convolution`: implicit GEMM on the AMX unit, if the processor has one.
- `amx_small_channel_convolution`: the same for few input channels, forward only.

The modules define kernels of the same names with the same arguments, except for the type of the
geometry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dptrain.backends.numba import (
    amx_convolution,
    amx_small_channel_convolution,
    direct_convolution,
    direct_convolution_pool,
    im2col,
    winograd_convolution,
    winograd_rgb_convolution,
)
from dptrain.backends.numba.amx import SIDE, available
from dptrain.plan.lowering import Phase

KERNELS = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD_WEIGHT: "backward_weight",
    Phase.BACKWARD_INPUT: "backward_input",
}


@dataclass(frozen=True)
class Shape:
    """The properties of a convolution on which the selection depends.

    Attributes:
        maps: (H, W, C) of the input.
        out: (Ho, Wo, K) of the convolution's output, before pooling.
        window: (R, S), size of the filters.
        strides: (vertical, horizontal).
        pads: (top, left).
        pool_height: height of the windows of fused pooling; 0 without pooling.
        halved: True if the pooling windows are 2 × 2 with stride 2 and without padding.
    """

    maps: tuple[int, int, int]
    out: tuple[int, int, int]
    window: tuple[int, int]
    strides: tuple[int, int]
    pads: tuple[int, int]
    pool_height: int = 0
    halved: bool = False

    @property
    def dy_pads(self) -> tuple[int, int]:
        """Padding of dy (top, left) for the input gradient."""
        return self.window[0] - 1 - self.pads[0], self.window[1] - 1 - self.pads[1]

    @property
    def is_plain(self) -> bool:
        """True if strides are 1 and no filter position is entirely in the padding."""
        fits = (self.out[i] - self.maps[i] <= self.pads[i] for i in range(2))
        return self.strides == (1, 1) and min(self.dy_pads) >= 0 and all(fits)


@dataclass(frozen=True)
class Algorithm:
    """The kernel that computes a stage.

    Attributes:
        kernel: the kernel to bind.
        geometry: named tuple of integers, the kernel's geometry argument.
        scratch: float32 elements of scratch memory for each thread.
    """

    kernel: Any
    geometry: Any
    scratch: int


Candidate = tuple[ModuleType, Any]
"""Module of an algorithm and its geometry, which contains `scratch_size`."""


def select_algorithms(shape: Shape, *, winograd: bool = True) -> Mapping[Phase, Algorithm]:
    """Select the algorithm of each stage of a convolution.

    Args:
        shape: the convolution.
        winograd: False excludes the Winograd algorithms, whose rounding errors are larger.
    """
    geometry = im2col.conv_geometry(shape.pads, shape.strides, shape.window)
    counts = im2col.conv_scratch(
        shape.pads, shape.strides, shape.window, shape.maps, shape.out, shape.pool_height
    )
    direct = direct_convolution_pool if shape.pool_height else direct_convolution
    selected = {}
    for phase, count in zip(KERNELS, counts, strict=True):
        name = f"conv2d_{'relu_pool_' if shape.pool_height else ''}{KERNELS[phase]}"
        found = _find_faster_than_direct(shape, phase, winograd)
        if found is None:
            selected[phase] = Algorithm(getattr(direct, name), geometry, count)
        else:
            module, special = found
            selected[phase] = Algorithm(getattr(module, name), special, int(special.scratch_size))
    return selected


def _find_faster_than_direct(shape: Shape, phase: Phase, winograd: bool) -> Candidate | None:
    c, k = shape.maps[2], shape.out[2]
    maps, out, pads = shape.maps, shape.out, shape.pads
    if phase is Phase.BACKWARD_INPUT:
        maps, out, pads = shape.out, shape.maps, shape.dy_pads
    if (
        winograd
        and shape.is_plain
        and winograd_convolution.supports(shape.window, shape.strides, c, k)
        and not (available() and _amx_is_faster_than_winograd(shape, phase))
    ):
        return winograd_convolution, winograd_convolution.make_geometry(
            maps, out, pads, shape.window[0]
        )
    if winograd and phase is not Phase.BACKWARD_INPUT and _use_winograd_rgb(shape):
        return winograd_rgb_convolution, winograd_rgb_convolution.make_geometry(maps, out, pads)
    if not available() or not shape.is_plain:
        return None
    if c < SIDE:
        return _find_for_small_channels(shape, phase)
    if k < SIDE or min(maps[1], out[1]) < SIDE // 2:
        return None
    if phase is Phase.BACKWARD_WEIGHT:
        return amx_convolution, amx_convolution.make_weight_gradient_geometry(
            maps, out, shape.window, pads
        )
    return amx_convolution, amx_convolution.make_correlation_geometry(maps, out, shape.window, pads)


def _use_winograd_rgb(shape: Shape) -> bool:
    """Return whether at least two thirds of the outputs that 4 × 4 tiles compute are needed.

    Measured without AMX, 16 filters, 32 × 32 maps, batch 32: forward 157 instead of 276 µs, weight
    gradient 180 instead of 306 µs.
    """
    c, k = shape.maps[2], shape.out[2]
    if not (winograd_rgb_convolution.supports(shape.window, shape.strides, c, k) and shape.halved):
        return False
    needed, computed = 1, 1
    for n in shape.out[:2]:
        needed, computed = needed * (n - n % 2), computed * -(-(n - n % 2) // 4) * 4
    return 3 * needed >= 2 * computed


def _amx_is_faster_than_winograd(shape: Shape, phase: Phase) -> bool:
    out = shape.maps if phase is Phase.BACKWARD_INPUT else shape.out
    channels, width = min(shape.maps[2], shape.out[2]), min(shape.maps[1], shape.out[1])
    slower = shape.window == (3, 3) and winograd_convolution.is_faster_than_amx(
        out[:2], channels, phase is Phase.FORWARD
    )
    return not slower and width >= SIDE // 2


def _find_for_small_channels(shape: Shape, phase: Phase) -> Candidate | None:
    """Return the AMX algorithm for fewer than 16 input channels; it pays from 64 filters on.

    Measured at batch 32: the forward pass of cifar's first layer takes 1.31 instead of 1.60 ms, but
    that of 16 filters of 3 × 3 on 40 × 40 maps 0.64 instead of 0.39 ms.
    """
    row = shape.window[1] * shape.maps[2]
    if shape.out[2] < 4 * SIDE or not SIDE // 2 <= row <= SIDE:
        return None
    if phase is Phase.BACKWARD_WEIGHT:
        return amx_convolution, amx_convolution.make_weight_gradient_geometry(
            shape.maps, shape.out, shape.window, shape.pads
        )
    if phase is Phase.BACKWARD_INPUT:
        return None
    geometry = amx_small_channel_convolution.make_geometry(
        shape.maps, shape.out, shape.window, shape.strides, shape.pads, shape.pool_height
    )
    return None if geometry is None else (amx_small_channel_convolution, geometry)
