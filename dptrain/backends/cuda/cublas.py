"""Square matrix products of NVIDIA's cuBLAS, by CuPy: what a GPU's multiplication can do.

Nothing is trained with them; they are the roof that layers are held to.

Source: cuBLAS documentation, ``cublasGemmEx``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

FLOAT, BFLOAT16 = 0, 14
"""``cudaDataType_t``."""

KINDS = {"fp32": (FLOAT, 68), "tf32": (FLOAT, 77), "bf16": (BFLOAT16, 68)}
"""Of factors, and ``cublasComputeType_t``, by precision; sums are float32, and so are results but
those of bfloat16 factors."""

AS_THEY_ARE, DEFAULT = 0, -1
"""Neither factor transposed; the algorithm that cuBLAS chooses."""


def product(cupy: Any, stream: Any, a: Any, b: Any, c: Any, precision: str) -> Callable[[], None]:
    """What enqueues C = A B.

    Args:
        cupy: the module.
        stream: CuPy's, that work goes to.
        a, b, c: (n, n), column by column; float32, or under ``bf16`` the bits in uint16.
        precision: of the factors.

    Raises:
        ImportError, OSError, RuntimeError: there is no cuBLAS.
    """
    cublas, handle = cupy.cuda.cublas, cupy.cuda.device.get_cublas_handle()
    (kind, compute), n = KINDS[precision], len(a)
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)

    def run() -> None:
        # Whatever cuBLAS was told before, CuPy has it use the stream that is CuPy's at the call.
        with stream:
            cublas.gemmEx(
                handle, AS_THEY_ARE, AS_THEY_ARE, n, n, n, one.ctypes.data, a.data.ptr, kind, n,
                b.data.ptr, kind, n, zero.ctypes.data, c.data.ptr, kind, n, compute, DEFAULT,
            )  # fmt: skip

    return run
