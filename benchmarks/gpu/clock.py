"""Clocks of programs on a GPU.

A program enqueues steps, which a GPU executes one after the other. Events before and after a block
of steps measure its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from benchmarks.timing import Lap, Series, Step, measure

BLOCK_S = 5e-3
"""Time of a block; the launch of its first step (about 5 µs) is then negligible."""
BLOCKS = 12
MIN_STEPS, MAX_STEPS = 3, 100
"""Limits of the steps of a block."""

Start = Step
"""Function that starts a step and can return before the step has finished."""

Timer = Callable[[Start, int], float]
"""Function that runs a number of steps and returns their total time in µs."""


@dataclass(frozen=True)
class Program:
    """A program that is timed: a step, and the clock that measures it."""

    start: Start
    timer: Timer
    peer_of: str = ""
    steps: int = 0

    def time(self, steps: int) -> float:
        """Return the mean time of a step in µs over `steps` steps."""
        return self.timer(self.start, steps) / steps

    def run(self, steps: int) -> Lap:
        """Run steps and return the mean time of one."""
        mean_ms = self.time(steps) / 1e3
        return Lap(mean_ms, mean_ms)


@dataclass(frozen=True)
class Built:
    """A program that is ready to be timed.

    Attributes:
        program: enqueues one step or pass after the other.
        facts: of its row, such as ``precision`` and ``memory_bytes``.
        wait: waits until all passes have run; None for training, which has no latencies.
        output: returns the outputs (N, F) of a pass.
    """

    program: Program
    facts: dict[str, Any] = field(default_factory=dict)
    wait: Callable[[], object] | None = None
    output: Callable[[], NDArray[Any]] | None = None


Build = Callable[[], Built]


def take_turns(programs: Mapping[str, Program], blocks: int = BLOCKS) -> dict[str, Series]:
    """Time every program in `blocks` blocks, alternating between programs."""
    return measure(
        programs, rounds=blocks, block_s=BLOCK_S, min_steps=MIN_STEPS, max_steps=MAX_STEPS
    )


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


def timer_of(replica: Any) -> Timer:
    """Return the clock of a replica's device."""
    stream = getattr(getattr(replica, "device", None), "stream", None)
    return host_timer if stream is None else stream_timer(stream)


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
