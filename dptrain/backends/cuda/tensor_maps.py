"""Tensor maps: what the engine for bulk copies of sm_90 knows of maps (``kernels/tma.cuh``).

Source: CUDA Driver API, ``cuTensorMapEncodeTiled``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

ARCHITECTURE = 90
"""That kernels take them for, beside ``wgmma``."""

MAP_BYTES, ALIGNMENT = 128, 64
"""Of a tensor map, and of where it is made."""

NUMBERS = {"tf32": (11, 7, 4), "bf16": (9, 9, 2), "marks": (0, 0, 1)}
"""``CU_TENSOR_MAP_DATA_TYPE_TFLOAT32``, which rounds, ``_BFLOAT16`` or ``_UINT8``; the same of what
comes as it is, where ``_FLOAT32`` is for the first; and bytes of a number."""

SWIZZLES = {32: 1, 64: 2, 128: 3}
"""``CU_TENSOR_MAP_SWIZZLE_32B`` and so on, by bytes of a box's innermost dimension."""

PROMOTION = 2
"""``CU_TENSOR_MAP_L2_PROMOTION_L2_128B``: what the cache of the second level fetches at once."""

Encode = Callable[[int, Sequence[int], Sequence[int], str, bool], np.void]
"""Makes a tensor map: of an address and of what `Device.tensor_map` is told."""


def find_encoder(architecture: int) -> Encode | None:
    """A way of making tensor maps; None where GPU or driver has none.

    Args:
        architecture: what kernels are compiled for, such as 90.
    """
    if architecture != ARCHITECTURE:
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError):
        return None

    def encode(
        address: int, shape: Sequence[int], box: Sequence[int], kind: str, as_factors: bool
    ) -> np.void:
        rounded, plain, size = NUMBERS[kind]
        number, rank = rounded if as_factors else plain, len(shape)
        swizzle = SWIZZLES[box[-1] * size] if as_factors else 0
        memory = np.zeros(MAP_BYTES + ALIGNMENT, np.uint8)
        offset = -memory.ctypes.data % ALIGNMENT
        # The innermost dimension is the first here, and its numbers lie side by side.
        sizes = [int(length) for length in reversed(shape)]
        strides = np.cumprod(sizes[:-1]) * size
        error = driver(
            ctypes.c_void_p(memory.ctypes.data + offset),
            ctypes.c_int(number), ctypes.c_uint(rank), ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * rank)(*(int(stride) for stride in strides)),
            (ctypes.c_uint * rank)(*reversed(box)),
            (ctypes.c_uint * rank)(*[1] * rank),
            ctypes.c_int(0), ctypes.c_int(swizzle), ctypes.c_int(PROMOTION),
            ctypes.c_int(0),
        )  # fmt: skip
        if error:
            raise RuntimeError(f"cuTensorMapEncodeTiled refused a map with CUDA error {error}")
        known: np.void = np.void(memory[offset : offset + MAP_BYTES].tobytes())
        return known

    return encode
