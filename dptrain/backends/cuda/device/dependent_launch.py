"""Programmatic dependent launch: start a kernel's blocks while the previous kernel still runs.

In a CUDA graph, a dependency between two kernels costs about 1 µs on an H200, and a step of model0
with 32 samples has 17 kernels. A dependent launch hides part of that time: a kernel
prefetches what does not depend on the previous kernel and then waits for it
(``headers/dependent_launch.cuh``). CuPy does not offer such launches.

Source: CUDA C++ Programming Guide, section "Programmatic Dependent Launch and Synchronization";
CUDA Driver API, ``cuLaunchKernelEx``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dptrain.backends.cuda.device.device import Array, Extent

MIN_ARCHITECTURE = 90
"""First GPU architecture with programmatic dependent launch."""

PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""``CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION``."""


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute`` with an integer value."""

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


WORD = 8
"""Bytes of an address, to which all arguments are aligned."""

Launch = Callable[[int, Extent, Extent, Sequence[Any], int, int], None]
"""Function that enqueues a kernel: handle, grid, block, arguments, shared memory in bytes,
stream."""


def find_dependent_launch(architecture: int) -> Launch | None:
    """Return a function for dependent launches; None if GPU or driver does not support them.

    Args:
        architecture: what kernels are compiled for, such as 90.
    """
    if architecture < MIN_ARCHITECTURE:
        return None
    try:
        launch_kernel = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    launch_kernel.argtypes = [ctypes.POINTER(_Config), *[ctypes.c_void_p] * 3]
    attribute = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1, b"")

    def launch(
        kernel: int,
        grid: Extent,
        block: Extent,
        args: Sequence[Array | np.generic],
        shared_bytes: int,
        stream: int,
    ) -> None:
        count, size = len(args), max((_size(arg) for arg in args), default=WORD)
        values = ctypes.create_string_buffer(b"".join(_value(arg, size) for arg in args))
        first = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * count)(*range(first, first + count * size, size))
        config = _Config(
            (*map(int, grid),),
            (*map(int, block),),
            shared_bytes,
            stream,
            ctypes.pointer(attribute),
            1,
        )
        error = launch_kernel(ctypes.byref(config), kernel, pointers, None)
        if error:
            raise RuntimeError(f"cuLaunchKernelEx failed with CUDA error {error}")

    return launch


def _size(arg: Array | np.generic) -> int:
    """Return the bytes that are reserved for a kernel argument: whole words."""
    return -(-arg.itemsize // WORD) * WORD if isinstance(arg, np.generic) else WORD


def _value(arg: Array | np.generic, size: int) -> bytes:
    """Return a kernel argument, a scalar or the address of an array, in `size` bytes."""
    if isinstance(arg, np.generic):
        return arg.tobytes().ljust(size, b"\0")
    address: int = arg.data.ptr
    return address.to_bytes(size, "little")
