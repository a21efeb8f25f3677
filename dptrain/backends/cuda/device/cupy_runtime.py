"""Find CuPy, the GPUs of the node, and the architecture to compile kernels for."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

from dptrain.errors import UserError

LAST_OF_CUDA_12 = 70, 72
"""Compute capabilities that CUDA 13 no longer supports and the kernels do (Volta)."""


def import_cupy() -> Any:
    """Return the module ``cupy``.

    Raises:
        UserError: CuPy is not installed or cannot be imported.
    """
    try:
        import cupy
    except ImportError as error:
        cause = "" if isinstance(error, ModuleNotFoundError) else f" ({first_line(error)})"
        raise UserError(
            f"training on a GPU needs CuPy, which cannot be imported{cause}; pip install "
            "'.[cuda13]' (or '.[cuda12]' if nvidia-smi shows CUDA 12)"
        ) from None
    return cupy


def start_context(local_rank: int) -> threading.Thread:
    """Create the primary context of a rank's GPU in a thread, for the time of the import of CuPy.

    One after the other, they take 0.55 s, at the same time 0.33 s (H100). Errors are left to CuPy,
    which uses the same context and explains them.

    Args:
        local_rank: rank within the node. GPUs are assigned in turn.
    """

    def create() -> None:
        count, context = ctypes.c_int(), ctypes.c_void_p()
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return
        failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
        if not failed and count.value:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), local_rank % count.value)

    thread = threading.Thread(target=create, name="dptrain-context", daemon=True)
    thread.start()
    return thread


def device_count(cupy: Any) -> int:
    """Return the number of GPUs of this node, at least 1.

    Raises:
        UserError: no GPU was found, or the driver reported an error.
    """
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise UserError(
            f"no GPU was found ({first_line(error)}); check GPU and driver with nvidia-smi, or use "
            "--backend numba to train on the CPU"
        ) from None
    if count == 0:
        raise UserError("no GPU was found; use --backend numba to train on the CPU")
    return count


def best_architecture(capability: int, architectures: Sequence[int]) -> int:
    """Return the architecture to compile for: the newest of the same generation the GPU can run.

    Args:
        capability: compute capability of the GPU, such as 90.
        architectures: supported by the compiler.

    Raises:
        UserError: the compiler supports no architecture that this GPU can run.
    """
    same = [a for a in architectures if a // 10 == capability // 10 and a <= capability]
    if not same:
        known = ", ".join(f"sm_{a}" for a in sorted(architectures))
        advice = (
            "use CUDA 12: pip install '.[cuda12]'"
            if LAST_OF_CUDA_12[0] <= capability <= LAST_OF_CUDA_12[1]
            else f"install libnvrtc of a CUDA version that supports sm_{capability}"
        )
        raise UserError(f"libnvrtc compiles for {known}, but the GPU is sm_{capability}; {advice}")
    return max(same)


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, or the error's type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
