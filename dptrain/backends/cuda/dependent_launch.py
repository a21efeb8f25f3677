"""Launches whose blocks take their places while the kernel before still runs.

A kernel in a graph that waits for the one before costs about a microsecond on an H200, which a
launch of this kind hides in part; a step of model0 with 32 samples is some forty of them. Kernels
say themselves where they need what came before (``dependent_launch.cuh``). CuPy has no such
launches.

Source: CUDA C++ Programming Guide, section "Programmatic Dependent Launch and Synchronization";
CUDA Driver API, ``cuLaunchKernelEx``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dptrain.backends.cuda.device import Array, Extent

CAPABILITY = 90
"""Of the first GPUs that can."""

EARLY = 6
"""``CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION``."""


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute`` with a number as its value."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


Launch = Callable[[int, Extent, Extent, Sequence[Any], int, int], None]
"""Enqueues a kernel: its handle, grid, block, arguments, bytes of shared memory, stream."""


def find_launch(capability: int) -> Launch | None:
    """A way of launching early; None where GPU or driver has none.

    Args:
        capability: the GPU's, such as 90.
    """
    if capability < CAPABILITY:
        return None
    try:
        start = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    start.argtypes = [ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    attribute = _Attribute(EARLY, b"", 1, b"")

    def launch(
        kernel: int,
        grid: Extent,
        block: Extent,
        args: Sequence[Array | np.generic],
        shared_bytes: int,
        stream: int,
    ) -> None:
        values = [_value(arg) for arg in args]
        places = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        config = _Config(
            (*map(int, grid),),
            (*map(int, block),),
            shared_bytes,
            stream,
            ctypes.pointer(attribute),
            1,
        )
        error = start(ctypes.byref(config), kernel, places, None)
        if error:
            raise RuntimeError(f"cuLaunchKernelEx refused a kernel with CUDA error {error}")

    return launch


def _value(arg: Array | np.generic) -> np.ndarray:
    """The bytes of a kernel's argument: a number, or where an array begins."""
    return np.array(arg if isinstance(arg, np.generic) else np.uint64(arg.data.ptr))
