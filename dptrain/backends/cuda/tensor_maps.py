"""Tensor maps: descriptors of arrays for the Tensor Memory Accelerator (``kernels/tma.cuh``).

Source: CUDA Driver API, ``cuTensorMapEncodeTiled``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

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

Encode = Callable[[int, Sequence[int], Sequence[int], str, bool], np.void]
"""Function that encodes a tensor map: address, then the arguments of `Device.tensor_map`."""


def find_encoder(architecture: int) -> Encode | None:
    """Return a function that encodes tensor maps; None if GPU or driver does not support them.

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
        rounded, exact, size = ELEMENTS[kind]
        element, rank = rounded if as_factors else exact, len(shape)
        swizzle = SWIZZLES[box[-1] * size] if as_factors else 0
        memory = np.zeros(MAP_BYTES + ALIGNMENT, np.uint8)
        offset = -memory.ctypes.data % ALIGNMENT
        # The driver expects the innermost dimension first; its elements are contiguous.
        sizes = [int(length) for length in reversed(shape)]
        strides = np.cumprod(sizes[:-1]) * size
        error = driver(
            ctypes.c_void_p(memory.ctypes.data + offset),
            ctypes.c_int(element), ctypes.c_uint(rank), ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * rank)(*(int(stride) for stride in strides)),
            (ctypes.c_uint * rank)(*reversed(box)),
            (ctypes.c_uint * rank)(*[1] * rank),
            ctypes.c_int(0), ctypes.c_int(swizzle), ctypes.c_int(PROMOTION),
            ctypes.c_int(0),
        )  # fmt: skip
        if error:
            raise RuntimeError(
                f"cuTensorMapEncodeTiled failed with CUDA error {error} for an array of shape "
                f"{tuple(shape)} and box {tuple(box)}"
            )
        tensor_map: np.void = np.void(memory[offset : offset + MAP_BYTES].tobytes())
        return tensor_map

    return encode
