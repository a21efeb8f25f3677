"""Traces: what a viewer takes, on one clock, and small enough to open at once."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dptrain.backends import load_backend
from dptrain.comm.clocks import ClockOffset, clock_offset
from dptrain.comm.world import World
from dptrain.measure.step_record import DATA_WAIT, EXPOSED, Interval, StepRecord
from dptrain.measure.trace import THREADS, RankClock, clock_facts, rank_events, write_trace
from dptrain.network import get_network
from dptrain.plan.buckets import make_buckets
from dptrain.plan.plan import make_plan
from dptrain.vocabulary import find_term

PLAN = make_plan(get_network("cifar"), load_backend("numba"), 4, precision="fp32")
BUCKETS = make_buckets(PLAN, 2**18)
STILL = RankClock(ClockOffset(0, 0, 0), ClockOffset(0, 0, 1))


def check_trace(trace: Mapping[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Check a trace against Google's "Trace Event Format", and what Perfetto makes of it.

    Each event must have all that its phase needs, and no key that the format does not know. On a
    thread, complete events must lie within each other or apart: Perfetto drops those that overlap.
    Names and args must be words of the vocabulary, or names of stages.

    Returns:
        Complete events by process and thread, in the order of time.
    """
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named: dict[tuple[str, int, int], Any] = {}
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        if event["ph"] == "M":
            assert set(event) == {"name", "ph", "pid", "tid", "args"}
            assert event["name"] in (
                "process_name", "process_sort_index", "thread_name", "thread_sort_index",
            )  # fmt: skip
            (value,) = event["args"].values()
            named[event["name"], event["pid"], event["tid"]] = value
            continue
        assert event["ph"] == "X"
        assert set(event) == {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"}
        assert event["ts"] >= 0, event
        assert event["dur"] >= 0
        assert find_term(event["cat"]) is not None
        assert all(find_term(key) is not None for key in event["args"])
        threads[event["pid"], event["tid"]].append(event)
    for (process, thread), events in threads.items():
        assert str(named["process_name", process, 0]).startswith(f"rank {process} ")
        assert named["thread_name", process, thread] == THREADS[thread]
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        _check_nesting(events)
    return threads


def _check_nesting(events: list[dict[str, Any]]) -> None:
    open_until: list[int] = []
    for event in events:
        # Nanoseconds are behind the point: as whole numbers they compare exactly.
        begin = round(event["ts"] * 1000)
        end = begin + round(event["dur"] * 1000)
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1], f"{event} overlaps another"
        open_until.append(end)


def record(step: int, begin: int) -> StepRecord:
    """A step of 10 µs of data, 20 µs a stage, and sums of 1 ms beside the last of them."""
    data = begin + 10_000
    ends = [data + 20_000 * (index + 1) for index in range(len(PLAN.stages))]
    sums = tuple((ends[b.after], ends[b.after] + 1_000_000) for b in BUCKETS)
    last = max(end for _, end in sums)
    exposed = ((ends[-2], ends[-2] + 500), (ends[-2] + 500, ends[-2] + 999))
    found = StepRecord([19_000] * len(ends))
    found.step, found.begin, found.end, found.sums = step, begin, last, sums
    found.stamps = [
        Interval(DATA_WAIT, begin, data),
        *(Interval(stage, end - 19_000, end) for stage, end in enumerate(ends)),
        *(Interval(EXPOSED, *call) for call in exposed),
    ]
    return found


def written(path: Path, ranks: int, steps: int) -> Path:
    texts = [
        rank_events(
            PLAN, BUCKETS, [record(k, 10_000_000 * k) for k in range(steps)], STILL,
            rank=rank, host="a",
        )
        for rank in range(ranks)
    ]  # fmt: skip
    clocks = [clock_facts(rank, STILL) for rank in range(ranks)]
    write_trace(path, texts, clocks, {"network": "cifar", "ranks": ranks}, "--output")
    return path


def test_a_trace_is_what_viewers_take(tmp_path: Path) -> None:
    trace = json.loads(written(tmp_path / "trace.json", 2, 3).read_text())
    threads = check_trace(trace)
    assert len(threads) == 2 * len(THREADS)
    compute, sums, data = (threads[1, thread] for thread in range(3))
    assert [e["args"]["step"] for e in compute if e["name"] == "step"] == [0, 1, 2]
    stages = [e for e in compute if e["cat"] not in ("step", "communication")]
    assert [e["name"] for e in stages[: len(PLAN.stages)]] == [s.name for s in PLAN.stages]
    first = next(e for e in stages if e["name"] == PLAN.stages[1].name)
    assert first["args"] == {
        "flops": PLAN.stages[1].flops, "bytes_moved": PLAN.stages[1].bytes_moved,
    }  # fmt: skip
    assert (first["ts"], first["dur"]) == (10 + 20 + 1, 19)
    assert [e["name"] for e in data] == ["data_wait"] * 3
    assert len(sums) == 3 * len(BUCKETS)
    # One after another, though they were started while the one before was under way.
    assert sums[1]["ts"] >= sums[0]["ts"] + sums[0]["dur"]
    # Looks of half a microsecond are left out.
    assert not [e for e in compute if e["name"] == "communication.exposed"]


def test_a_checker_that_misses_overlap_is_none(tmp_path: Path) -> None:
    trace = json.loads(written(tmp_path / "trace.json", 1, 1).read_text())
    stage = next(e for e in trace["traceEvents"] if e["name"] == PLAN.stages[1].name)
    stage["dur"] += 2.0
    with pytest.raises(AssertionError, match="overlaps"):
        check_trace(trace)


def test_a_trace_of_eight_ranks_and_two_hundred_steps_is_small(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.json", 8, 200)
    # Perfetto reads about 50 MB of JSON a second.
    assert path.stat().st_size < 20e6
    trace = json.loads(path.read_text())
    events = 8 * (8 + 200 * (len(PLAN.stages) + len(BUCKETS) + 2))
    assert len(trace["traceEvents"]) == events


def test_times_are_placed_on_the_clock_of_rank_0() -> None:
    clock = RankClock(ClockOffset(1000, 50, 5_000), ClockOffset(1100, 40, 105_000), 2_000)
    assert clock.to_trace_ns(5_000) == 5_000 + 1000 - 2_000
    assert clock.to_trace_ns(105_000) == 105_000 + 1100 - 2_000
    assert clock.to_trace_ns(55_000) == 55_000 + 1050 - 2_000


def test_one_rank_has_the_right_time() -> None:
    found = clock_offset(World.single())
    assert (found.offset_ns, found.round_trip_ns) == (0, 0)
