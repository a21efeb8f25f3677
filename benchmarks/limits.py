"""Limits of one core: matrix products and memory bandwidth."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.machine import CACHES, cache_bytes
from benchmarks.timing import Program

MATRIX_SIZES = (512, 1024)
"""Size at which both libraries were fastest; 1536 and 2048 were equally fast."""
REPEATS = 3
COPY_NS = 1e6
"""Minimum time of a run of copies, so that the clock and the call are negligible."""

CACHE_BYTES = 2**20
"""Size of L2 if the system does not report it."""
MEMORY_BYTES = 2**26
"""Working set of copies beyond L2. Shared L3 caches can contain it and are hardly faster."""


@dataclass(frozen=True)
class Roofs:
    """Limits of stages, measured between steps of one network at one batch size.

    Attributes:
        network, batch_size: the case.
        peak: sgemm, FLOP/s.
        cache_bytes: size of L2.
        cache, memory: copying within half of L2, and far beyond it, bytes/s.
    """

    network: str
    batch_size: int
    peak: float
    cache_bytes: int
    cache: float
    memory: float

    def over(self, flops: float, bytes_moved: float) -> float:
        """Return the FLOP/s that the roofline model allows: min(peak, bandwidth · FLOPs / bytes).

        Source: Williams, Waterman and Patterson, "Roofline: an insightful visual performance
        model for multicore architectures", 2009.
        """
        bandwidth = self.cache if bytes_moved <= self.cache_bytes else self.memory
        return min(self.peak, bandwidth * flops / bytes_moved)


def l2_bytes() -> int:
    """Return the size of L2, which belongs to one core."""
    return cache_bytes(CACHES, "2") or CACHE_BYTES


def sgemm_peak() -> float:
    """Return the FLOP/s of the faster of NumPy's and PyTorch's matrix product on one thread."""
    rates = []
    for size in MATRIX_SIZES:
        a, b = np.random.default_rng(0).random((2, size, size), np.float32)
        c, ta, tb = np.empty_like(a), torch.from_numpy(a), torch.from_numpy(b)
        tc = torch.from_numpy(c)
        programs: tuple[Program, ...] = (
            partial(np.matmul, a, b, out=c),
            partial(torch.mm, ta, tb, out=tc),
        )
        for program in programs:
            program()
            rates.append(2.0 * size**3 / min(_seconds(program) for _ in range(REPEATS)))
    return max(rates)


def copy_rate(working_set: int) -> float:
    """Return the bytes/s, read and written, of copies; both arrays take `working_set` bytes."""
    size = max(working_set // 2, 64)
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    def once() -> None:
        np.copyto(target, source)

    once()
    count = max(int(COPY_NS / (1e9 * max(_seconds(once), 1e-9))), 1)

    def many() -> None:
        for _ in range(count):
            np.copyto(target, source)

    return 2.0 * size * count / float(np.median([_seconds(many) for _ in range(REPEATS)]))


def _seconds(program: Program) -> float:
    start = time.process_time_ns()
    program()
    return max(time.process_time_ns() - start, 1) / 1e9
