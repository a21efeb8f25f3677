"""The largest rate at which threads read and write data of a given size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dptrain.aligned import aligned_zeros
from dptrain.native.jit import Kernel, kernel

RUN_NS = 1_000_000
"""Time of a run, so that its start is negligible."""
RUNS = 3
"""Runs of each kernel, of which the fastest counts."""
LINE = 64
"""Bytes of a cache line."""


@kernel
def _read(items, source, other, target, times):
    x = source[items.start : items.stop]
    count = np.uintp(x.size)
    for _ in range(times):
        total = 0
        for i in range(count):
            total += x[i]
        # A pass that changes what the next one reads cannot be omitted.
        x[0] = total


@kernel
def _copy(items, source, other, target, times):
    x, y = source[items.start : items.stop], target[items.start : items.stop]
    count = np.uintp(x.size)
    for _ in range(times):
        for i in range(count):
            y[i] = x[i]


@kernel
def _add(items, source, other, target, times):
    a, b = source[items.start : items.stop], other[items.start : items.stop]
    y = target[items.start : items.stop]
    count = np.uintp(y.size)
    for _ in range(times):
        for i in range(count):
            y[i] = a[i] + b[i]


KERNELS: tuple[tuple[Kernel, int], ...] = ((_read, 1), (_copy, 2), (_add, 3))
"""Kernels, and the number of arrays that each reads or writes. Which one is fastest depends on the
level of the memory: caches load and store at the same time, and main memory reads a line before it
is overwritten."""


def bandwidths(sizes: Sequence[int], threads: int) -> tuple[tuple[int, float], ...]:
    """Measure the largest bandwidth of data of several sizes, each byte counted once.

    Each thread makes repeated passes over its part of the data, in compiled code. Of reading,
    copying and adding arrays the fastest counts, as in STREAM (McCalpin, "Memory bandwidth and
    machine balance in current high performance computers", 1995).

    Args:
        sizes: bytes of all arrays of a kernel together.
        threads: number of threads.

    Returns:
        Pairs (bytes, 10⁹ bytes per second), in the order of `sizes`.

    Example:
        >>> ((size, rate),) = bandwidths([1 << 16], threads=1)
        >>> size, rate > 0.1
        (65536, True)
    """
    data = aligned_zeros(max(sizes) // 8 + 8 * LINE, "int64")
    with ThreadPoolExecutor(threads) as pool:
        return tuple((size, _bandwidth(pool, data, size, threads)) for size in sizes)


def _bandwidth(pool: ThreadPoolExecutor, data: NDArray[np.int64], size: int, threads: int) -> float:
    best = 0.0
    for function, num_arrays in KERNELS:
        count = max(size // (8 * num_arrays), threads)
        # Arrays at equal distances from a page would compete for the same sets of a cache.
        starts = [number * (count + 5 * LINE // 8) for number in range(num_arrays)]
        parts = [data[start : start + count] for start in starts]
        arrays = parts[0], parts[len(parts) // 2], parts[-1]
        bounds = list(pairwise(count * i // threads for i in range(threads + 1)))
        moved, times, elapsed_ns = 8 * num_arrays * count, 1, 0
        while elapsed_ns < RUN_NS // 2:
            times *= 2
            elapsed_ns = _run(pool, function, bounds, (*arrays, times))
        for _ in range(RUNS):
            elapsed_ns = _run(pool, function, bounds, (*arrays, times))
            best = max(best, moved * times / elapsed_ns)
    return best


def _run(
    pool: ThreadPoolExecutor,
    function: Kernel,
    bounds: Sequence[tuple[int, int]],
    arguments: tuple[NDArray[np.int64] | int, ...],
) -> int:
    """Run a kernel on all threads; return the longest time of a thread in ns."""
    run = function.bound_to(*arguments)

    def part(number: int) -> int:
        begin = time.perf_counter_ns()
        run(*bounds[number], number)
        return time.perf_counter_ns() - begin

    return max(pool.map(part, range(len(bounds))))
