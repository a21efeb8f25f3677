"""Time programs against each other on a shared machine.

Programs alternate in blocks of several steps, so that disturbances affect all of them.
The clock is the CPU time of the process, summed over its threads. Nothing here waits, so on an
idle machine CPU time equals wall time; on a busy machine it excludes the time in which other
programs had the core. Wall time is recorded too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_NS = 20e6
"""Time of a block of steps, so long that the initial content of the caches is negligible."""
MIN_BLOCKS = 10

Program = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """CPU and wall time of each step in ns, and the number of steps of a block."""

    cpu: NDArray[np.int64]
    wall: NDArray[np.int64]
    block: int = 1

    @property
    def median_ms(self) -> float:
        """Median CPU time of a step in ms."""
        return float(np.median(self.cpu)) / 1e6

    @property
    def wall_median_ms(self) -> float:
        """Median wall time of a step in ms."""
        return float(np.median(self.wall)) / 1e6

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        """First and third quartile of the CPU times of a step in ms."""
        low, high = np.percentile(self.cpu, [25, 75]) / 1e6
        return float(low), float(high)

    @property
    def block_medians(self) -> NDArray[np.float64]:
        """Median of each block in ns."""
        return np.asarray(np.median(self.cpu.reshape(-1, self.block), axis=1))


@dataclass(frozen=True)
class Ratio:
    """Speedup of a program: median and quartiles of the ratios of alternating blocks."""

    value: float
    low: float
    high: float


def ratio(slower: Times, faster: Times) -> Ratio:
    """Return the speedup of `faster` over `slower`, timed in alternating blocks."""
    low, median, high = np.percentile(slower.block_medians / faster.block_medians, [25, 50, 75])
    return Ratio(float(median), float(low), float(high))


def take_turns(programs: Mapping[str, Program], steps: int, warm_up: int = 2) -> dict[str, Times]:
    """Time at least `steps` steps of each program in alternating blocks.

    The warm-up estimates the time of a step. Without it, a block has one step.
    """
    longest = max(_estimate(program, warm_up) for program in programs.values()) if warm_up else 0
    block = int(min(max(BLOCK_NS // longest, 1), 10)) if longest else 1
    blocks = max(-(-steps // block), min(MIN_BLOCKS, steps))
    records = {name: np.zeros((2, blocks * block), np.int64) for name in programs}
    for turn in range(blocks):
        for name, program in programs.items():
            for step in range(turn * block, (turn + 1) * block):
                records[name][:, step] = _time(program)
    return {name: Times(cpu, wall, block) for name, (cpu, wall) in records.items()}


def _estimate(program: Program, warm_up: int) -> int:
    return max(min(_time(program)[0] for _ in range(warm_up)), 1)


def _time(program: Program) -> tuple[int, int]:
    cpu, wall = time.process_time_ns(), time.perf_counter_ns()
    program()
    return time.process_time_ns() - cpu, time.perf_counter_ns() - wall


@contextmanager
def one_core() -> Iterator[None]:
    """Bind the calling thread to one core, if the system supports it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
