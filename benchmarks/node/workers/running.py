"""What a worker process runs: a program whose steps are timed on request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from numpy.typing import NDArray

SPIN_NS = 50_000_000
"""A process sleeps until this long before the common start, and then polls the clock. While it
sleeps, its core slows down and other programs take its caches."""

Results = dict[str, NDArray[Any]]


class MissingError(Exception):
    """A program cannot run here: a library, a compiler, an MPI or a setting is missing."""


@dataclass(frozen=True)
class Timed:
    """Timed steps of one process.

    Attributes:
        begins, ends: readings of the monotonic clock in ns, which all processes share, before and
            after each step.
        cpus: CPU time of the process in each step in ns, over all its threads, without that of
            reading the clocks.
    """

    begins: list[int]
    ends: list[int]
    cpus: list[int]


@dataclass(frozen=True)
class Runner:
    """A program.

    Attributes:
        step: runs a step.
        check: returns results that must agree with those of the other programs; it may change
            parameters. None for programs without results.
        prepare: runs before each step and is not timed; None runs nothing.
        facts: what the report states about the program.
        details: returns further measurements since its last call; None if there are none.
        close: releases what it holds.
    """

    step: Callable[[], object]
    check: Callable[[], Results] | None = None
    prepare: Callable[[], object] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    details: Callable[[], dict[str, Any]] | None = None
    close: Callable[[], object] = lambda: None


def run_steps(runner: Runner, steps: int, warm_up: int, at: int, period_ns: int) -> Timed:
    """Run steps and time them.

    Args:
        runner: the program.
        steps: number of timed steps.
        warm_up: steps before them.
        at: reading of the clock at which the first step starts.
        period_ns: 0 runs the steps one after the other. Otherwise the preparation of step i starts
            at `at` + i · `period_ns`, so that processes start the step together.
    """
    clock = time.monotonic_ns
    begins, ends, cpus = list[int](), list[int](), list[int]()
    clock_cost_ns()
    wait_until(at)
    for number in range(warm_up + steps):
        if period_ns:
            wait_until(at + (number + 1) * period_ns)
        # What it writes is still in the core's caches when the step begins, as in training.
        if runner.prepare is not None:
            runner.prepare()
        cpu = time.process_time_ns()
        begins.append(clock())
        runner.step()
        ends.append(clock())
        cpus.append(max(time.process_time_ns() - cpu - clock_cost_ns(), 0))
    return Timed(begins[warm_up:], ends[warm_up:], cpus[warm_up:])


@cache
def clock_cost_ns() -> int:
    """Return the CPU time between the readings around a step that does nothing.

    It is about 0.6 µs, while a pass of a small network takes 14.
    """
    times, found = list[int](), list[int]()
    for _ in range(101):
        cpu = time.process_time_ns()
        times.append(time.monotonic_ns())
        times.append(time.monotonic_ns())
        found.append(time.process_time_ns() - cpu)
    return sorted(found)[len(found) // 2]


def wait_until(at: int) -> None:
    """Wait until the clock reads `at`; return at once if it is later."""
    clock = time.monotonic_ns
    left = at - clock() - SPIN_NS
    if left > 0:
        time.sleep(left / 1e9)
    while clock() < at:
        pass
