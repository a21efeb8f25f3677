"""Run delays: the core that a rank lacks is neither computation nor communication."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.measure.machine.scheduling import RunDelays, run_delay_ns
from dptrain.measure.profile.analysis import Measured
from dptrain.measure.profile.tables import parts_table
from dptrain.measure.recorder import StepRecorder
from dptrain.measure.step_record import (
    CHECKPOINT,
    DATA_DELAY,
    DATA_WAIT,
    DELAYS,
    EXPOSED,
    RUN_DELAY,
    SPANS,
    STEP,
    SUM_DELAY,
    UNKNOWN_NS,
    UPDATE_DELAY,
)

OWN = Path("/proc/thread-self/schedstat")
COUNTS = run_delay_ns(OWN.read_bytes()) if OWN.exists() else None
"""Run delay of this thread; None if the kernel counts none."""
NAMES = ("compute", *SPANS, *DELAYS)


def table(*steps: dict[str, float]) -> NDArray[np.float64]:
    """Return times (ranks, 1, names) of one step, by rank."""
    return np.array([[[step.get(name, 0.0) for name in NAMES]] for step in steps])


def measure(*steps: dict[str, float]) -> Measured:
    times = table(*steps)
    return Measured(NAMES, times, times, (1.0,) * len(steps))


@pytest.mark.skipif(COUNTS is None, reason="the kernel counts no run delays")
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be bound")
def test_what_a_program_takes_from_the_core_is_without_a_core() -> None:
    """A busy loop shares the core of the steps. What the thread lacks is wall minus CPU time.

    Other programs may take more, which changes both alike.
    """
    cores = os.sched_getaffinity(0)
    core = min(cores)
    script = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    other = subprocess.Popen([sys.executable, "-c", script])
    try:
        os.sched_setaffinity(0, {core})
        recorder = StepRecorder([], capacity=1000)
        recorder.watch()
        time.sleep(0.2)  # The loop begins.
        begin, used = time.perf_counter_ns(), time.thread_time_ns()
        for _ in range(40):
            with recorder.step as step:
                end = time.thread_time_ns() + 10_000_000
                while time.thread_time_ns() < end:
                    pass
                step.end(samples=1, global_count=1)
        taken = time.perf_counter_ns() - begin - (time.thread_time_ns() - used)
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.wait()
    rows = recorder.rows()
    attributed = rows[:, recorder.names.index(RUN_DELAY)].sum()
    assert taken > 0.1 * rows[:, recorder.names.index(STEP)].sum(), "nothing was taken"
    assert attributed == pytest.approx(taken, rel=0.1)
    counts = recorder.mean_counts(0)
    assert counts is not None
    assert counts[0] > 0


def test_a_kernel_without_counters_is_unknown_and_not_zero(tmp_path: Path) -> None:
    delays = RunDelays(tasks=tmp_path)
    delays.follow_caller()
    assert run_delay_ns(delays.read()) is None
    measured = measure(
        {"compute": 4.0, STEP: 4.0, **dict.fromkeys(DELAYS, UNKNOWN_NS)},
    )
    parts = measured.parts
    assert parts.without_core is None
    assert parts.compute == 4.0
    assert parts.total == 4.0
    step = measured.step_parts.median["compute"]
    rows = parts_table(step, measured.step_parts, several=False).texts
    (row,) = (row for row in rows if row and row[0] == "without a core")
    assert row[1] == "unknown"


def test_a_rank_that_lacks_its_core_in_a_sum_is_no_communication() -> None:
    """Both ranks compute 4 ms. The sum takes 1 ms, and rank 1 has no core for 3 ms of it."""
    measured = measure(
        {"compute": 4.0, EXPOSED: 4.0, STEP: 8.0},
        {"compute": 4.0, EXPOSED: 4.0, STEP: 8.0, SUM_DELAY: 3.0},
    )
    parts = measured.parts
    assert parts.transfer == pytest.approx(1.0)
    assert parts.without_core == pytest.approx(1.5)  # Rank 1: 3 ms.
    assert parts.imbalance == pytest.approx(1.5)  # Rank 0 waits for it.
    assert parts.compute == pytest.approx(4.0)
    assert parts.total == pytest.approx(8.0)


def test_the_ranks_may_lack_a_core_before_the_update_and_after_it() -> None:
    measured = measure(
        {"compute": 4.0, EXPOSED: 6.0, STEP: 10.0, SUM_DELAY: 2.0},
        {"compute": 4.0, EXPOSED: 6.0, STEP: 10.0, UPDATE_DELAY: 3.0},
    )
    assert measured.parts.transfer == pytest.approx(1.0)
    assert measured.parts.without_core == pytest.approx(2.5)
    assert measured.parts.imbalance == pytest.approx(2.5)


def test_a_rank_that_waits_for_one_without_a_core_is_waiting() -> None:
    """Rank 1 has no core for 5 ms of its stages; rank 0 waits in the sum, which takes 1 ms.

    What rank 0 lacks of its core while it waits costs nothing.
    """
    measured = measure(
        {"compute": 4.0, EXPOSED: 6.0, STEP: 10.0, SUM_DELAY: 0.0},
        {"compute": 9.0, EXPOSED: 1.0, STEP: 10.0, RUN_DELAY: 5.0},
    )
    parts = measured.parts
    assert parts.compute == pytest.approx(4.0)
    assert parts.without_core == pytest.approx(2.5)
    assert parts.imbalance == pytest.approx(2.5)
    assert parts.transfer == pytest.approx(1.0)


def test_data_that_arrived_is_not_waited_for() -> None:
    parts = measure({"compute": 4.0, DATA_WAIT: 3.0, STEP: 7.5, DATA_DELAY: 2.0}).parts
    assert (parts.data_wait, parts.without_core) == pytest.approx((1.0, 2.0))
    assert parts.other == pytest.approx(0.5)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_parts_with_delays_add_up_to_the_step(ranks: int) -> None:
    random = np.random.default_rng(ranks)
    times = np.zeros((ranks, 50, len(NAMES)))

    def column(name: str) -> NDArray[np.float64]:
        return times[:, :, NAMES.index(name)]

    for name in ("compute", DATA_WAIT, EXPOSED):
        column(name)[:] = random.uniform(1, 2, (ranks, 50))
    column(CHECKPOINT)[0, ::10] = 3.0
    column(STEP)[:] = times.sum(axis=2) + 0.5
    for name, most in ((RUN_DELAY, 3.0), (DATA_DELAY, 1.0), (SUM_DELAY, 2.0), (UPDATE_DELAY, 2.0)):
        column(name)[:] = random.uniform(0, most, (ranks, 50))
    measured = Measured(NAMES, times, times, (1.0,) * ranks)
    for parts in (measured.parts, measured.step_parts.all_steps):
        assert min(parts.known.values()) >= 0
        assert parts.without_core is not None
    assert parts.total == pytest.approx(measured.steps.mean(), rel=1e-12)
    assert math.isclose(parts.without_core or 0.0, measured.without_core.mean())
