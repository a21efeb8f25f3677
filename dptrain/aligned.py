"""Arrays that start on a cache line."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def aligned_zeros(size: int, dtype: str) -> NDArray[Any]:
    """Return zeros that start on a cache line, for vector kernels; NumPy aligns to 16 bytes."""
    nbytes = size * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes].view(dtype)
