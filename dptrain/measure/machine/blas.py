"""Matrix products of NumPy's BLAS with a given number of threads, as a limit for our own kernels.

NumPy from PyPI contains OpenBLAS, whose kernels are written in assembly, so they share no code with
the backends `numba` and `cuda`. The number of its threads can be set only through its C interface.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

_MAPS = Path("/proc/self/maps")
_NAMES = tuple(
    (f"{prefix}openblas_get_num_threads{suffix}", f"{prefix}openblas_set_num_threads{suffix}")
    for prefix in ("scipy_", "")
    for suffix in ("64_", "", "_64")
)
"""Functions that return and set the number of threads, by the names of different builds."""

REPEAT_S, MIN_REPEATS = 0.1, 5
"""Time and smallest number of the products of a size."""


class OpenBlas:
    """The OpenBLAS that this process has loaded."""

    def __init__(self, library: ctypes.CDLL, get: str, change: str) -> None:
        self._get, self._set = getattr(library, get), getattr(library, change)
        self._get.restype, self._get.argtypes = ctypes.c_int, []
        self._set.restype, self._set.argtypes = None, [ctypes.c_int]

    @classmethod
    def find(cls) -> OpenBlas | None:
        """Return the library; None if NumPy uses another one, or the system does not list it."""
        np.dot(np.zeros(1), np.zeros(1))  # Loads the library, if that did not happen yet.
        try:
            lines = _MAPS.read_text().splitlines()
        except OSError:
            return None
        for path in sorted({line.split(maxsplit=5)[-1] for line in lines if "openblas" in line}):
            library = ctypes.CDLL(path)
            for get, change in _NAMES:
                if hasattr(library, get) and hasattr(library, change):
                    return cls(library, get, change)
        return None

    @property
    def threads(self) -> int:
        """Number of threads of a product."""
        return int(self._get())

    @contextmanager
    def with_threads(self, threads: int) -> Iterator[None]:
        """Use so many threads within the block."""
        before = self.threads
        self._set(threads)
        try:
            yield
        finally:
            self._set(before)


def product_rate(size: int, dtype: Any, threads: int) -> float | None:
    """Return the rate of a product of square matrices by OpenBLAS in GFLOP/s.

    The shortest of several runs counts, because other programs interrupt some of them.

    Args:
        size: number of rows and columns.
        dtype: of the numbers, float32 or float64.
        threads: number of threads.

    Returns:
        None if NumPy does not use OpenBLAS, or it does not accept the number of threads.
    """
    library = OpenBlas.find()
    if library is None:
        return None
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((size, size)).astype(dtype) for _ in range(2))
    c, times = np.empty_like(a), list[int]()
    with library.with_threads(threads):
        if library.threads != threads:
            return None
        end = time.perf_counter() + REPEAT_S
        while len(times) < MIN_REPEATS or time.perf_counter() < end:
            begin = time.perf_counter_ns()
            np.matmul(a, b, out=c)
            times.append(time.perf_counter_ns() - begin)
    return 2 * size**3 / min(times)
