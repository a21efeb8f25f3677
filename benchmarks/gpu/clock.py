"""Time programs against each other on a GPU.

A program enqueues steps, which a GPU executes one after the other. Events before and after a block
of steps measure its time. Programs alternate block by block, so that disturbances of the machine
affect all of them.
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
"""Target time of a block in µs; the launch of its first step (about 5 µs) is then negligible."""
BLOCKS = 12
MIN_STEPS, MAX_STEPS = 3, 100
"""Limits of the steps of a block."""

Start = Callable[[], object]
"""Function that starts a step and can return before the step has finished."""

Timer = Callable[[Start, int], float]
"""Function that runs a number of steps and returns their total time in µs."""


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
    """A program that is timed: a step, and the clock that measures it."""

    start: Start
    timer: Timer

    def time(self, steps: int) -> float:
        """Return the mean time of a step in µs over `steps` steps."""
        return self.timer(self.start, steps) / steps


def take_turns(programs: Mapping[str, Program], blocks: int = BLOCKS) -> dict[str, Laps]:
    """Time every program in `blocks` blocks, alternating between programs."""
    sizes = {}
    for name, program in programs.items():
        program.time(MIN_STEPS)
        sizes[name] = int(
            np.clip(BLOCK_US / max(program.time(MIN_STEPS), 1e-3), MIN_STEPS, MAX_STEPS)
        )
    laps = {name: np.zeros(blocks) for name in programs}
    for block in range(blocks):
        for name, program in programs.items():
            laps[name][block] = program.time(sizes[name])
    return {name: Laps(laps[name], sizes[name]) for name in programs}


def ratio(slower: Laps, faster: Laps) -> Ratio:
    """Return the speedup: median and quartiles of the ratios of alternating blocks."""
    low, median, high = np.percentile(slower.us / faster.us, [25, 50, 75])
    return Ratio(float(median), float(low), float(high))


def host_timer(start: Start, steps: int) -> float:
    """Time synchronous steps with the host's clock."""
    begin = time.perf_counter_ns()
    for _ in range(steps):
        start()
    return (time.perf_counter_ns() - begin) / 1e3


def stream_timer(stream: Any) -> Timer:
    """Return a timer that measures a CuPy stream."""
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
    """Time steps on PyTorch's current stream."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        start()
    end.record()
    end.synchronize()
    return 1e3 * float(begin.elapsed_time(end))
