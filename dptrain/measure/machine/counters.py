"""Hardware counters of this process by perf_event_open: instructions and cycles in user mode.

All threads are counted. The counters of a thread continue when it is interrupted, so cycles divided
by wall time is below the frequency if threads wait for a core.

Source: Linux, perf_event_open(2).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SYSCALLS = {"x86_64": 298, "aarch64": 241}
"""Number of the system call by the architecture."""
_HARDWARE, _CYCLES, _INSTRUCTIONS = 0, 0, 1
_ATTRIBUTE_BYTES = 112
_EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 5, 1 << 6
_TIMES = 3
"""Read format: the times for which the counter was enabled and in fact counted."""
NO_CYCLES = "a hardware counter did not run; another program, such as perf, may use it"
PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")


@dataclass(frozen=True)
class Counts:
    """Instructions and cycles of all threads."""

    instructions: float
    cycles: float

    def since(self, before: Counts) -> Counts:
        """Return the difference."""
        return Counts(self.instructions - before.instructions, self.cycles - before.cycles)


class CounterError(OSError):
    """Counters cannot be read; the message states the reason."""


Opener = Callable[[int, int], int]
"""Opens the counter of an event for a thread; returns a file descriptor or raises `OSError`."""


def open_event(config: int, thread: int) -> int:
    """Open a hardware counter in user mode for one thread.

    Raises:
        OSError: the counter cannot be opened.
    """
    number = SYSCALLS.get(platform.machine())
    if number is None or not PARANOID.exists():
        raise CounterError("this system has no perf_event_open")
    attribute = bytearray(_ATTRIBUTE_BYTES)
    struct.pack_into("IIQ", attribute, 0, _HARDWARE, _ATTRIBUTE_BYTES, config)
    struct.pack_into("Q", attribute, 32, _TIMES)
    struct.pack_into("Q", attribute, 40, _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR)
    system = ctypes.CDLL(None, use_errno=True)
    descriptor = int(system.syscall(number, bytes(attribute), thread, -1, -1, 0))
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return descriptor


class HardwareCounters:
    """Counters of all present threads of this process.

    Args:
        threads: numbers of the threads; None for those of this process.
        open_counter: opens one counter.

    Raises:
        CounterError: they cannot be read.
    """

    def __init__(
        self, threads: Sequence[int] | None = None, open_counter: Opener = open_event
    ) -> None:
        self._descriptors: list[tuple[int, int]] = []
        chosen = _own_threads() if threads is None else threads
        try:
            for thread in chosen:
                for config in (_INSTRUCTIONS, _CYCLES):
                    self._descriptors.append((config, open_counter(config, thread)))
        except OSError as error:
            self.close()
            raise CounterError(_reason(error)) from None

    def read(self) -> Counts:
        """Return the counts since the counters were opened."""
        totals = {_INSTRUCTIONS: 0.0, _CYCLES: 0.0}
        for config, descriptor in self._descriptors:
            value, enabled, running = struct.unpack("QQQ", os.read(descriptor, 24))
            # If there are more events than counters, the kernel counts a part of the time.
            totals[config] += value * (enabled / running if running else 0.0)
        return Counts(totals[_INSTRUCTIONS], totals[_CYCLES])

    def close(self) -> None:
        """Close the counters."""
        for _, descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


@dataclass(frozen=True)
class Processor:
    """Counts of the measured steps, means over ranks.

    Attributes:
        instructions: in user mode per step and rank, those of waiting ranks included; None if they
            cannot be read.
        instructions_per_cycle: their ratio to cycles; None as above.
        ghz: cycles per wall time of a rank and thread that computes; None as above.
        missing: the reason if they cannot be read, else "".
    """

    instructions: float | None
    instructions_per_cycle: float | None
    ghz: float | None
    missing: str


class StepCounter:
    """Counts the instructions of a range of steps of this rank."""

    def __init__(self) -> None:
        self._counters: HardwareCounters | None = None
        self._facts: dict[str, Any] = {"missing": "no step was counted"}

    def start(self) -> None:
        """Open the counters of the threads that exist now."""
        self._counters, missing = open_counters()
        self._facts = {"missing": missing}
        self._begin = time.monotonic()

    def stop(self, steps: int, threads: int) -> None:
        """Read the counters after a number of steps with so many compute threads."""
        if self._counters is not None:
            counts, seconds = self._counters.read(), time.monotonic() - self._begin
            self._counters.close()
            if not counts.cycles:
                self._facts = {"missing": NO_CYCLES}
                return
            self._facts |= {
                "instructions": counts.instructions / steps,
                "cycles": counts.cycles / steps,
                "ghz": counts.cycles / seconds / threads / 1e9,
            }

    def facts(self) -> dict[str, Any]:
        """Return the counts as values for JSON."""
        return self._facts


def processor_of(facts: Sequence[Mapping[str, Any]]) -> Processor:
    """Return the mean of the facts of all ranks; the first reason if a rank has no counters."""
    missing = next((str(fact["missing"]) for fact in facts if fact["missing"]), "")
    if missing:
        return Processor(None, None, None, missing)

    def mean(name: str) -> float:
        return sum(float(fact[name]) for fact in facts) / len(facts)

    instructions = mean("instructions")
    return Processor(instructions, instructions / mean("cycles"), mean("ghz"), "")


def processor_line(processor: Processor) -> str:
    """Return a line for the terminal and the report."""
    if processor.instructions is None:
        return f"instructions and frequency not measured: {processor.missing}"
    return (
        f"instructions: {processor.instructions / 1e6:,.1f} million per step and rank, "
        f"{processor.instructions_per_cycle:.2f} per cycle, {processor.ghz:.2f} GHz, waiting "
        "included"
    )


def open_counters() -> tuple[HardwareCounters | None, str]:
    """Return the counters of this process, or None and the reason."""
    try:
        return HardwareCounters(), ""
    except CounterError as error:
        return None, str(error)


def _own_threads() -> list[int]:
    try:
        return sorted(int(entry.name) for entry in Path("/proc/self/task").iterdir())
    except OSError:
        return [0]


def _reason(error: OSError) -> str:
    if isinstance(error, CounterError):
        return str(error)
    text = (error.strerror or str(error)).lower()
    if isinstance(error, FileNotFoundError):
        return "the processor offers no hardware counters here, as in most virtual machines"
    if isinstance(error, PermissionError):
        level = PARANOID.read_text().strip() if PARANOID.exists() else "unknown"
        return f"{text}: perf_event_paranoid is {level}, expected at most 2"
    return text
