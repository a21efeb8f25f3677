"""Tensor maps: descriptors of arrays for the Tensor Memory Accelerator (``headers/tma.cuh``).

Source: CUDA Driver API, ``cuTensorMapEncodeTiled`` and ``cuTensorMapEncodeIm2col``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ARCHITECTURE = 90
"""The GPU architecture whose kernels use TMA, together with ``wgmma``."""

MAP_BYTES, ALIGNMENT = 128, 64
"""Size of a tensor map and alignment that its encoder requires, in bytes."""

ELEMENTS = {"tf32": (11, 7, 4), "bf16": (9, 9, 2), "marks": (0, 0, 1)}
"""By kind of array: data type of tensor-core operands (``CU_TENSOR_MAP_DATA_TYPE_TFLOAT32``, which
rounds, ``_BFLOAT16``, ``_UINT8``), data type without rounding, and bytes of an element."""

SWIZZLES = {32: 1, 64: 2, 128: 3}
"""``CU_TENSOR_MAP_SWIZZLE_32B``, ``_64B`` and ``_128B`` by bytes of a box's innermost dimension."""

PROMOTION = 2
"""``CU_TENSOR_MAP_L2_PROMOTION_L2_128B``: the L2 cache fetches 128 bytes at once."""

MAX_PIXEL_STRIDE, MIN_CORNER, MAX_CORNER = 8, -128, 127
"""Limits of a tensor map of patches: strides, and the corners of the box of first pixels."""


@dataclass(frozen=True)
class PatchGrid:
    """Positions of patches in a map; see ``Patches`` of ``conv2d_wgmma.cu``.

    Attributes:
        counts: positions of a sample, down and across.
        first: row and column of the pixel where the first patch begins.
        strides: pixels between positions, down and across.
    """

    counts: tuple[int, int]
    first: tuple[int, int]
    strides: tuple[int, int]

    def corners(self, sizes: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the box of first pixels as the driver expects it, for a map of these sizes.

        The lower corner is relative to the first pixel of the map, the upper one to its last.
        """
        steps = zip(self.counts, self.first, self.strides, sizes, strict=True)
        down, across = (
            first + (count - 1) * stride + 1 - size for count, first, stride, size in steps
        )
        return self.first, (down, across)

    def is_encodable(self, sizes: tuple[int, int]) -> bool:
        """Return whether a tensor map can describe the patches of a map of these sizes."""
        lower, upper = self.corners(sizes)
        within = all(MIN_CORNER <= corner <= MAX_CORNER for corner in (*lower, *upper))
        return within and max(self.strides) <= MAX_PIXEL_STRIDE and min(self.counts) > 0


@dataclass(frozen=True)
class Encoder:
    """The driver's functions that encode tensor maps."""

    tiled: Callable[..., int]
    im2col: Callable[..., int]

    def box(
        self, address: int, shape: Sequence[int], box: Sequence[int], kind: str, as_factors: bool
    ) -> np.void:
        """Return a map for copies of boxes; see `Device.tensor_map`."""
        swizzle = SWIZZLES[box[-1] * ELEMENTS[kind][2]] if as_factors else 0
        ones = (ctypes.c_uint * len(shape))(*[1] * len(shape))
        tile = ((ctypes.c_uint * len(shape))(*reversed(box)), ones)
        return _encoded(self.tiled, address, shape, tile, kind, as_factors, swizzle)

    def patches(
        self, address: int, shape: Sequence[int], grid: PatchGrid, box: tuple[int, int], kind: str
    ) -> np.void:
        """Return a map for copies of a tap of several patches; see `Device.patch_map`."""
        corners = (
            (ctypes.c_int * 2)(*reversed(corner))
            for corner in grid.corners((int(shape[1]), int(shape[2])))
        )
        positions, channels = box
        steps = (ctypes.c_uint * 4)(1, *reversed(grid.strides), 1)
        tile = (*corners, ctypes.c_uint(channels), ctypes.c_uint(positions), steps)
        swizzle = SWIZZLES[channels * ELEMENTS[kind][2]]
        return _encoded(self.im2col, address, shape, tile, kind, True, swizzle)


def _encoded(
    function: Callable[..., int],
    address: int,
    shape: Sequence[int],
    tile: Sequence[Any],
    kind: str,
    as_factors: bool,
    swizzle: int,
) -> np.void:
    """Return the map that a function of the driver encodes, given its arguments for the tile."""
    rounded, exact, size = ELEMENTS[kind]
    element, rank = rounded if as_factors else exact, len(shape)
    memory = np.zeros(MAP_BYTES + ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT
    # The driver expects the innermost dimension first; its elements are contiguous.
    sizes = [int(length) for length in reversed(shape)]
    strides = np.cumprod(sizes[:-1]) * size
    error = function(
        ctypes.c_void_p(memory.ctypes.data + offset),
        ctypes.c_int(element),
        ctypes.c_uint(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * rank)(*(int(stride) for stride in strides)),
        *tile,
        ctypes.c_int(0),
        ctypes.c_int(swizzle),
        ctypes.c_int(PROMOTION),
        ctypes.c_int(0),
    )
    if error:
        raise RuntimeError(
            f"the CUDA driver refused a tensor map with error {error}: array of shape "
            f"{tuple(shape)}, kind {kind}"
        )
    tensor_map: np.void = np.void(memory[offset : offset + MAP_BYTES].tobytes())
    return tensor_map


def find_encoder(architecture: int) -> Encoder | None:
    """Return the functions that encode tensor maps; None if GPU or driver does not support them.

    Args:
        architecture: what kernels are compiled for, such as 90.
    """
    if architecture != ARCHITECTURE:
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        return Encoder(driver.cuTensorMapEncodeTiled, driver.cuTensorMapEncodeIm2col)
    except (OSError, AttributeError):
        return None
