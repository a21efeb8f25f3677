"""Timing programs against each other on a GPU.

A program starts steps, which a GPU does one after the other; events at both ends of a block of
steps say how long the block took there. Programs take turns, block by block, so that whatever slows
the machine slows all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.timing import Ratio

BLOCK_US = 5000.0
"""Time of a block; the launch of its first step, some 5 µs, is then lost in it."""
BLOCKS = 12
LEAST, MOST = 3, 100
"""Steps of a block."""

Start = Callable[[], object]
"""Starts a step, and may return before it is done."""

Timer = Callable[[Start, int], float]
"""Starts so many steps and gives the microseconds from the first to the end of the last."""


@dataclass(frozen=True)
class Laps:
    """Microseconds of a step in each block, and the steps of a block."""

    us: NDArray[np.float64]
    steps: int

    @property
    def median(self) -> float:
        """Median over the blocks."""
        return float(np.median(self.us))

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile over the blocks."""
        low, high = np.percentile(self.us, [25, 75])
        return float(low), float(high)


@dataclass(frozen=True)
class Program:
    """Something that is timed."""

    start: Start
    timer: Timer

    def time(self, steps: int) -> float:
        """Microseconds of a step, over so many."""
        return self.timer(self.start, steps) / steps


def take_turns(programs: Mapping[str, Program], blocks: int = BLOCKS) -> dict[str, Laps]:
    """Time every program in `blocks` blocks, in turn."""
    sizes = {}
    for name, program in programs.items():
        program.time(LEAST)
        sizes[name] = int(np.clip(BLOCK_US / max(program.time(LEAST), 1e-3), LEAST, MOST))
    laps = {name: np.zeros(blocks) for name in programs}
    for turn in range(blocks):
        for name, program in programs.items():
            laps[name][turn] = program.time(sizes[name])
    return {name: Laps(laps[name], sizes[name]) for name in programs}


def ratio(slower: Laps, faster: Laps) -> Ratio:
    """How many times faster: ratio of medians, and quartiles over the turns."""
    low, high = np.percentile(slower.us / faster.us, [25, 75])
    return Ratio(slower.median / faster.median, float(low), float(high))


def host_timer(start: Start, steps: int) -> float:
    """Where a step is done when it returns."""
    begin = time.perf_counter_ns()
    for _ in range(steps):
        start()
    return (time.perf_counter_ns() - begin) / 1e3


def stream_timer(stream: Any) -> Timer:
    """Time on a stream of CuPy's."""
    import cupy

    begin, end = cupy.cuda.Event(), cupy.cuda.Event()

    def timer(start: Start, steps: int) -> float:
        begin.record(stream)
        for _ in range(steps):
            start()
        end.record(stream)
        end.synchronize()
        return 1e3 * float(cupy.cuda.get_elapsed_time(begin, end))

    return timer


def torch_timer(start: Start, steps: int) -> float:
    """Time on PyTorch's current stream."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        start()
    end.record()
    end.synchronize()
    return 1e3 * float(begin.elapsed_time(end))
