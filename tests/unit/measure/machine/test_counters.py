"""Counters of instructions: what is read is what the kernel wrote, or there is a reason."""

from __future__ import annotations

import errno
import os
import struct

import pytest

from dptrain.measure.machine import counters as counters_module
from dptrain.measure.machine.counters import (
    NO_CYCLES,
    CounterError,
    Counts,
    HardwareCounters,
    Processor,
    StepCounter,
    open_counters,
    processor_line,
    processor_of,
)


def pipe_with(*values: int) -> int:
    """A descriptor from which the values can be read."""
    reader, writer = os.pipe()
    os.write(writer, struct.pack(f"{len(values)}Q", *values))
    os.close(writer)
    return reader


def test_counts_of_threads_are_added_and_scaled() -> None:
    # The second thread was counted half of the time.
    values = {(1, 7): (100, 10, 10), (0, 7): (50, 10, 10), (1, 8): (30, 10, 5), (0, 8): (0, 0, 0)}
    counters = HardwareCounters([7, 8], lambda config, thread: pipe_with(*values[config, thread]))
    assert counters.read() == Counts(160.0, 50.0)
    counters.close()
    counters.close()
    assert Counts(5, 3).since(Counts(1, 2)) == Counts(4, 1)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOENT, "offers no hardware counters"),
        (errno.EACCES, "perf_event_paranoid is"),
        (errno.EPERM, "perf_event_paranoid is"),
        (errno.EMFILE, "too many open files"),
    ],
)
def test_a_reason_is_given_and_nothing_stays_open(code: int, words: str) -> None:
    opened: list[int] = []

    def fail_at_the_second(config: int, thread: int) -> int:
        if opened:
            raise OSError(code, os.strerror(code))
        opened.append(pipe_with(1, 1, 1))
        return opened[0]

    with pytest.raises(CounterError, match=words):
        HardwareCounters([1], fail_at_the_second)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(opened[0])


def test_this_process_has_counters_or_a_reason() -> None:
    counters, reason = open_counters()
    assert (counters is None) == bool(reason)
    if counters is not None:
        before = counters.read()
        assert sum(range(100_000)) > 0
        assert counters.read().since(before).instructions > 100_000
        counters.close()


def test_a_counter_that_never_ran_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = HardwareCounters([7], lambda *_: pipe_with(0, 10, 0))
    monkeypatch.setattr(counters_module, "open_counters", lambda: (counters, ""))
    counter = StepCounter()
    counter.start()
    counter.stop(3, 1)
    assert processor_of([counter.facts()]) == Processor(None, None, None, NO_CYCLES)


def test_ranks_have_a_mean_or_the_first_reason() -> None:
    known = {"missing": "", "instructions": 4e6, "cycles": 2e6, "ghz": 3.0}
    found = processor_of([known, {**known, "instructions": 2e6, "ghz": 2.0}])
    assert found == Processor(3e6, 1.5, 2.5, "")
    assert "3.0 million per step and rank, 1.50 per cycle, 2.50 GHz" in processor_line(found)
    found = processor_of([known, {"missing": "no"}])
    assert found == Processor(None, None, None, "no")
    assert processor_line(found) == "instructions and frequency not measured: no"
