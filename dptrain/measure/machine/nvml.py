"""Calls of NVIDIA's management library, NVML."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any


def open_gpu(nvml: Any, identity: str) -> ctypes.c_void_p:
    """Return the handle of a GPU.

    Args:
        nvml: the library.
        identity: UUID of the GPU in 32 hexadecimal digits.

    Raises:
        OSError: there is no such GPU.
    """
    device, cuts = ctypes.c_void_p(), (0, 8, 12, 16, 20, 32)
    uuid = "-".join(identity[a:b] for a, b in itertools.pairwise(cuts))
    check_nvml(nvml, nvml.nvmlInit_v2())
    found = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(device))
    check_nvml(nvml, found)
    return device


def check_nvml(nvml: Any, code: int) -> None:
    """Raise an `OSError` with NVML's text of an error code; 0 is no error."""
    if code:
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        raise OSError(f"NVML: {nvml.nvmlErrorString(code).decode()}")
