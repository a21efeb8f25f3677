"""Which kernels compute a convolution: of five ways the fastest that fits its shape and processor.

- directly, with vectors (`convolution`, `pooled_convolution`): whatever there is;
- by F(4×4, 3×3) or F(2×2, 5×5), with vectors (`winograd_convolution`);
- by F(4×4, 3×3) from three channels to maps that are pooled (`colour_convolution`);
- on the processor's tile unit, if it has one (`tile_convolution`);
- forward for few input channels, on that unit (`narrow_convolution`).

All have kernels of the same names, with the same arguments but for their geometry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba import (
    colour_convolution,
    convolution,
    narrow_convolution,
    patches,
    pooled_convolution,
    tile_convolution,
    winograd_convolution,
)
from dptrain.backends.numba.tiles import SIDE, available
from dptrain.plan.lowering import Phase

Walk = NDArray[np.integer]

KERNELS = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD_WEIGHT: "backward_weight",
    Phase.BACKWARD_INPUT: "backward_input",
}


@dataclass(frozen=True)
class Shape:
    """What the choice depends on.

    Attributes:
        maps, out: (H, W, C) and (Ho, Wo, K), before pooling.
        window: (R, S).
        strides: vertical, horizontal.
        pads: top, left.
        pool_height: height of the windows of fused pooling; 0 where there is none.
        halved: whether these windows are 2 by 2, side by side and whole.
    """

    maps: tuple[int, int, int]
    out: tuple[int, int, int]
    window: tuple[int, int]
    strides: tuple[int, int]
    pads: tuple[int, int]
    pool_height: int = 0
    halved: bool = False

    @property
    def around(self) -> tuple[int, int]:
        """Pads of dy, top and left, for backward by the input."""
        return self.window[0] - 1 - self.pads[0], self.window[1] - 1 - self.pads[1]

    @property
    def met(self) -> bool:
        """Whether strides are 1 and no filter is wholly in the padding, on any side."""
        fits = (self.out[i] - self.maps[i] <= self.pads[i] for i in range(2))
        return self.strides == (1, 1) and min(self.around) >= 0 and all(fits)


@dataclass(frozen=True)
class Way:
    """How a stage is computed.

    Attributes:
        kernel: what to bind.
        geometry: int64, what the kernel asks of the shape.
        scratch: float32 elements for each thread.
    """

    kernel: Any
    geometry: Walk
    scratch: int


def ways(shape: Shape) -> Mapping[Phase, Way]:
    """Choose for each stage of a convolution."""
    geometry = patches.conv_geometry(shape.pads, shape.strides, shape.window)
    counts = patches.conv_scratch(
        shape.pads, shape.strides, shape.window, shape.maps, shape.out, shape.pool_height
    )
    direct = pooled_convolution if shape.pool_height else convolution
    chosen = {}
    for phase, count in zip(KERNELS, counts, strict=True):
        found = _better(shape, phase)
        module, walk, scratch = (direct, geometry, count) if found is None else found
        name = f"conv2d_{'relu_pool_' if shape.pool_height else ''}{KERNELS[phase]}"
        chosen[phase] = Way(getattr(module, name), walk, scratch)
    return chosen


def _better(shape: Shape, phase: Phase) -> tuple[ModuleType, Walk, int] | None:
    """A way that is faster than the direct one."""
    c, k = shape.maps[2], shape.out[2]
    maps, out, pads = shape.maps, shape.out, shape.pads
    if phase is Phase.BACKWARD_INPUT:
        maps, out, pads = shape.out, shape.maps, shape.around
    few = shape.met and winograd_convolution.suits(shape.window, shape.strides, c, k)
    if few and not (available() and _tiles_win(shape, phase)):
        walk = winograd_convolution.walk(maps, out, pads, shape.window[0])
        return winograd_convolution, walk, int(walk[-1])
    if phase is not Phase.BACKWARD_INPUT and _colour(shape):
        walk = colour_convolution.walk(maps, out, pads)
        return colour_convolution, walk, int(walk[-1])
    if not available() or not shape.met:
        return None
    if c < SIDE:
        return _first_layer(shape, phase)
    if k < SIDE or min(maps[1], out[1]) < SIDE // 2:
        return None
    make = (
        tile_convolution.accumulation
        if phase is Phase.BACKWARD_WEIGHT
        else tile_convolution.correlation
    )
    walk = make(maps, out, shape.window, pads)
    return tile_convolution, walk, int(walk[-1])


def _colour(shape: Shape) -> bool:
    """Tiles of 4 by 4 win unless a third of what they compute is not wanted.

    157 against 276 µs forward, 180 against 306 by the weights: 16 filters, 32×32 maps, batch 32, no
    tile unit.
    """
    fits = colour_convolution.suits(shape.window, shape.strides, shape.maps[2], shape.out[2])
    if not (fits and shape.halved):
        return False
    wanted, computed = 1, 1
    for n in shape.out[:2]:
        wanted, computed = wanted * (n - n % 2), computed * -(-(n - n % 2) // 4) * 4
    return 3 * wanted >= 2 * computed


def _tiles_win(shape: Shape, phase: Phase) -> bool:
    out = shape.maps if phase is Phase.BACKWARD_INPUT else shape.out
    fewest, wide = min(shape.maps[2], shape.out[2]), min(shape.maps[1], shape.out[1])
    wins = winograd_convolution.wins(out[:2], fewest, phase is Phase.FORWARD)
    wins = wins and shape.window == (3, 3)
    return not wins and wide >= SIDE // 2


def _first_layer(shape: Shape, phase: Phase) -> tuple[ModuleType, Walk, int] | None:
    """Laying patches out, or turning dy around, pays for 64 filters.

    1.31 against 1.60 ms forward for cifar's first layer, batch 32, but 0.64 against 0.39 ms for 16
    filters of 3 by 3 on 40 by 40.
    """
    row = shape.window[1] * shape.maps[2]
    if shape.out[2] < 4 * SIDE or not SIDE // 2 <= row <= SIDE:
        return None
    if phase is Phase.BACKWARD_WEIGHT:
        walk = tile_convolution.accumulation(shape.maps, shape.out, shape.window, shape.pads)
        return tile_convolution, walk, int(walk[-1])
    if phase is Phase.BACKWARD_INPUT:
        return None
    found = narrow_convolution.forward_walk(
        shape.maps, shape.out, shape.window, shape.strides, shape.pads, shape.pool_height
    )
    return None if found is None else (narrow_convolution, found, int(found[-1]))
