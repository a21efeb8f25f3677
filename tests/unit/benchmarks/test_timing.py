"""Rounds of programs, and what follows from their times."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.clock import MAX_STEPS, MIN_STEPS, Program, host_timer, take_turns
from benchmarks.node import rounds
from benchmarks.node.rounds import Entry, combine
from benchmarks.node.workers.processes import Team
from benchmarks.node.workers.running import Timed
from benchmarks.report import speedup
from benchmarks.tables import time_of
from benchmarks.timing import HostProgram, Lap, measure, quotient

MS = 1_000_000


class FakeTeam(Team):
    """A team whose steps take a fixed time, without processes."""

    def __init__(self, step_ms: float, log: list[str]) -> None:
        super().__init__([])
        self.step_ms, self.log = step_ms, log

    def run(self, key: str, steps: int, warm_up: int = 1, period_ns: int = 0) -> list[Timed]:
        self.log.append(key)
        begins = [int(i * self.step_ms * MS) for i in range(steps)]
        return [Timed(begins, [b + int(self.step_ms * MS) for b in begins], [MS] * steps)]


def test_ranks_share_a_step_and_copies_do_not() -> None:
    one = Timed([0, 10 * MS], [10 * MS, 20 * MS], [MS, MS])
    late = Timed([4 * MS, 14 * MS], [12 * MS, 22 * MS], [MS, MS])
    # A step lasts from the last begin to the last end: 8 ms. The two steps took 22 ms in all.
    assert combine([one, late], shares_steps=True) == Lap(8.0, 11.0)
    # Copies make 2 steps in 20 and in 18 ms.
    found = combine([one, late], shares_steps=False)
    assert (found.median, found.wall) == pytest.approx((9.0, 2 / (2 / 20 + 2 / 18)))
    assert combine([one], shares_steps=False).cpu == 1.0


def test_a_ratio_is_the_median_of_the_rounds_that_both_have() -> None:
    ratio = quotient([2.0, 6.0, 100.0], [1.0, 2.0])
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.5, 2.25, 2.75))


def test_a_spike_in_one_round_changes_neither_ratio_nor_quartiles() -> None:
    assert quotient([*[30.0] * 7, 3000.0], [10.0] * 8) == quotient([30.0] * 8, [10.0] * 8)


def test_rounds_alternate_and_exclude_much_slower_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "GAP_S", 0.0)
    log: list[str] = []
    entries = {
        name: Entry(FakeTeam(ms, log), name, peer_of)
        for name, ms, peer_of in (
            ("ours", 9.0, ""), ("fast", 2.0, "peers"), ("slow", 4.0, "peers"),
        )
    }  # fmt: skip
    found = measure(entries, rounds=3, block_s=0.001)
    # Two runs of each estimate the time of a step.
    assert log[6:] == ["ours", "fast", "slow", "fast", "ours", "ours", "fast"]
    assert found["ours"].medians == pytest.approx((9.0, 9.0, 9.0))
    assert found["slow"].medians == pytest.approx((4.0,))


def test_no_round_starts_after_the_limit_but_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "GAP_S", 0.0)
    found = measure({"a": Entry(FakeTeam(1.0, []), "a")}, rounds=9, block_s=0.001, limit=0.0)
    assert len(found["a"].medians) == 2


def test_programs_on_a_gpu_have_blocks_of_their_own_size() -> None:
    calls: list[tuple[str, int]] = []

    def program(name: str, us: float) -> Program:
        def timer(start: Any, steps: int) -> float:
            calls.append((name, steps))
            return us * steps

        return Program(lambda: None, timer)

    found = take_turns({"slow": program("slow", 1e4), "fast": program("fast", 1.0)}, blocks=2)
    assert calls[4:] == [("slow", MIN_STEPS), ("fast", MAX_STEPS), ("fast", MAX_STEPS),
                         ("slow", MIN_STEPS)]  # fmt: skip
    assert found["slow"].median == pytest.approx(10.0)
    assert (found["fast"].steps, len(found["fast"].medians)) == (2 * MAX_STEPS, 2)


def test_the_host_timer_counts_every_step() -> None:
    calls: list[int] = []
    assert host_timer(lambda: calls.append(1), 7) > 0
    assert len(calls) == 7


def test_a_program_of_this_process_has_times_of_processor_and_wall() -> None:
    calls: list[int] = []
    for is_short in (False, True):
        lap = HostProgram(lambda: calls.append(sum(range(1000))), is_short).run(5)
        assert 0 < lap.median == lap.cpu
        assert lap.wall > 0
    assert len(calls) == 10


def test_on_one_thread_the_time_of_the_processor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "GAP_S", 0.0)
    for threads, expected, text in ((1, 1.0, "1 (1–1) ms"), (2, 4.5, "9 (9–9) ms")):
        # The CPU times of a fake team are 1 ms.
        programs = {
            f"{ms}": Entry(FakeTeam(ms, []), "", facts={"threads": threads}) for ms in (9.0, 2.0)
        }
        rows = [each.as_dict() for each in measure(programs, rounds=2, block_s=0.01).values()]
        found = speedup(*rows)
        assert found is not None
        assert found.value == expected
        # The table shows the times whose ratio it states.
        assert time_of(rows[0]) == text
    assert time_of(rows[0], wall=True) == "9 (9–9) ms"
    assert speedup(None, rows[0]) is None
    # A program with several threads and one with a single thread have wall times in common.
    found = speedup(rows[0], {**rows[1], "cpus_ms": [1.0, 1.0]})
    assert found is not None
    assert found.value == 4.5
