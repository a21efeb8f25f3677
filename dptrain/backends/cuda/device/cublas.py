"""Square matrix products by cuBLAS: the compute roof of the roofline model.

Training does not use them.

Source: cuBLAS documentation, ``cublasGemmEx``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

FLOAT, BFLOAT16 = 0, 14
"""``cudaDataType_t``."""

TYPES = {"fp32": (FLOAT, 68), "tf32": (FLOAT, 77), "bf16": (BFLOAT16, 68)}
"""Data type of the factors and ``cublasComputeType_t`` by precision. Sums are float32; the result
has the data type of the factors."""

NO_TRANSPOSE, DEFAULT_ALGORITHM = 0, -1
"""``CUBLAS_OP_N`` and ``CUBLAS_GEMM_DEFAULT``."""


def square_product(
    cupy: Any, stream: Any, a: Any, b: Any, c: Any, precision: str
) -> Callable[[], None]:
    """Return a function that enqueues C = A B.

    Args:
        cupy: the module.
        stream: CuPy stream.
        a, b, c: (n, n), column-major, float32; with ``bf16`` uint16 that stores bfloat16.
        precision: of the factors.

    Raises:
        ImportError, OSError, RuntimeError: cuBLAS is not available.
    """
    cublas, handle = cupy.cuda.cublas, cupy.cuda.device.get_cublas_handle()
    (dtype, compute), n = TYPES[precision], len(a)
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)

    def run() -> None:
        # CuPy passes its current stream to cuBLAS in every call.
        with stream:
            cublas.gemmEx(
                handle, NO_TRANSPOSE, NO_TRANSPOSE, n, n, n, one.ctypes.data, a.data.ptr, dtype, n,
                b.data.ptr, dtype, n, zero.ctypes.data, c.data.ptr, dtype, n, compute,
                DEFAULT_ALGORITHM,
            )  # fmt: skip

    return run
