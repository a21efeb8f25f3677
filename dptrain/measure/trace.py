"""A trace of all ranks in Chrome's trace event format, which Perfetto and chrome://tracing open.

Each rank is a process with the threads `COMPUTE`, `COMMUNICATION` and `INPUT`. Every rank formats
its events, with times on rank 0's clock; rank 0 writes them to one file.

Source: "Trace Event Format", Google, the JSON object format with complete events (``"ph": "X"``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dptrain.comm.clocks import ClockOffset
from dptrain.files import write_whole
from dptrain.measure.step_record import DATA_WAIT, EXPOSED, RUN_DELAY, STEP, UNKNOWN, StepRecord
from dptrain.plan.buckets import Bucket
from dptrain.plan.plan import Plan

COMPUTE, COMMUNICATION, INPUT = "compute", "communication", "input"
THREADS = (COMPUTE, COMMUNICATION, INPUT)

SHORTEST_NS = 1000
"""Shorter calls, which only test for completion, are omitted."""


@dataclass(frozen=True)
class RankClock:
    """Converts times of a rank's clock to times of the trace, which are on rank 0's clock.

    The offset is interpolated linearly between two measurements.

    Attributes:
        before, after: the measured offsets.
        zero_ns: start of the trace on rank 0's clock.
    """

    before: ClockOffset
    after: ClockOffset
    zero_ns: int = 0

    def to_trace_ns(self, moment: int) -> int:
        """Return the nanoseconds since the start of the trace."""
        since = moment - self.before.at_ns
        span = max(self.after.at_ns - self.before.at_ns, 1)
        drift = (self.after.offset_ns - self.before.offset_ns) * since // span
        return moment + self.before.offset_ns + drift - self.zero_ns


def rank_events(
    plan: Plan,
    buckets: Sequence[Bucket],
    records: Iterable[StepRecord],
    clock: RankClock,
    *,
    rank: int,
    host: str,
) -> str:
    """Return the events of one rank as text, one per line, separated by commas.

    Args:
        plan: plan of the steps.
        buckets: gradient buckets.
        records: of the steps to show, with time stamps.
        clock: clock of the rank.
        rank: number of the rank.
        host: name of its node.
    """
    writer = _Writer(rank, clock)
    lines = writer.names(f"rank {rank} ({host})")
    stages = [
        writer.head(
            s.name, s.phase.value, COMPUTE, {"flops": s.flops, "bytes_moved": s.bytes_moved}
        )
        for s in plan.stages
    ]
    sums = [
        writer.head(
            f"sum.{number}",
            COMMUNICATION,
            COMMUNICATION,
            {"bucket_bytes": (bucket.stop - bucket.start) * plan.itemsize},
        )
        for number, bucket in enumerate(buckets)
    ]
    exposed = writer.head(EXPOSED, COMMUNICATION, COMPUTE, {})
    data_wait = writer.head(DATA_WAIT, INPUT, INPUT, {})
    for found in records:
        step = writer.head(STEP, STEP, COMPUTE, _step_arguments(found))
        lines.append(writer.event(step, found.begin, found.end))
        for part, begin, end in found.intervals():
            if part == DATA_WAIT:
                lines.append(writer.event(data_wait, begin, end))
            elif found.timed and isinstance(part, int):
                lines.append(writer.event(stages[part], begin, end))
            elif found.timed and end - begin >= SHORTEST_NS:
                lines.append(writer.event(exposed, begin, end))
        # A single rank sums nothing, so its sums have no times.
        if found.timed and any(end for _, end in found.sums):
            lines += [
                writer.event(head, begin, end)
                for head, (begin, end) in zip(sums, _one_after_another(found.sums), strict=True)
            ]
    return ",\n".join(lines)


def _step_arguments(record: StepRecord) -> dict[str, float]:
    """Return the number of a step, and what the system took from it if that is known."""
    delays = UNKNOWN if record.delays is None else record.delays.columns()
    if delays == UNKNOWN:
        return {STEP: record.step}
    return {
        STEP: record.step,
        RUN_DELAY: round(sum(delays) / 1e6, 6),
        "involuntary_switches": record.involuntary_switches,
        "page_faults": record.page_faults,
    }


def write_trace(
    path: Path,
    ranks: Sequence[str],
    clocks: Sequence[Mapping[str, Any]],
    job: Mapping[str, Any],
    flag: str,
) -> None:
    """Write the events of all ranks to one file.

    Args:
        path: path of the file.
        ranks: `rank_events` in rank order.
        clocks: `clock_facts` in rank order.
        job: facts about the job.
        flag: flag of the path, for error messages.

    Raises:
        UserError: the file cannot be written.
    """
    facts = json.dumps({"job": job, "clocks": clocks})
    events = ",\n".join(ranks)
    text = f'{{"displayTimeUnit":"ms","otherData":{facts},"traceEvents":[\n{events}\n]}}\n'
    write_whole(path, text, flag)


def clock_facts(rank: int, clock: RankClock) -> dict[str, Any]:
    """Return the clock offsets of a rank before and after the steps, with their errors."""
    return {"rank": rank, "before": asdict(clock.before), "after": asdict(clock.after)}


class _Writer:
    """Formats the events of one rank. Times are in µs with three decimals."""

    def __init__(self, rank: int, clock: RankClock) -> None:
        self._rank, self._clock = rank, clock

    def names(self, process: str) -> list[str]:
        """Return the events that name the process and its threads."""
        found = [
            self._meta("process_name", 0, {"name": process}),
            self._meta("process_sort_index", 0, {"sort_index": self._rank}),
        ]
        for number, thread in enumerate(THREADS):
            found.append(self._meta("thread_name", number, {"name": thread}))
            found.append(self._meta("thread_sort_index", number, {"sort_index": number}))
        return found

    def _meta(self, name: str, thread: int, arguments: Mapping[str, Any]) -> str:
        return _compact(
            {"name": name, "ph": "M", "pid": self._rank, "tid": thread, "args": arguments}
        )

    def head(self, name: str, category: str, thread: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of an event without its times."""
        values = {
            "name": name,
            "cat": category,
            "ph": "X",
            "pid": self._rank,
            "tid": THREADS.index(thread),
            "args": arguments,
        }
        return _compact(values)[:-1]

    def event(self, head: str, begin: int, end: int) -> str:
        """Return an event; begin and end are times of the rank's clock in ns."""
        start, stop = self._clock.to_trace_ns(begin), self._clock.to_trace_ns(end)
        return f'{head},"ts":{start / 1e3:.3f},"dur":{(stop - start) / 1e3:.3f}}}'


def _one_after_another(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the sums without overlap: each starts after the end of the one before."""
    found, before = [], 0
    for begin, end in spans:
        begin, before = max(begin, before), max(end, before)
        found.append((begin, before))
    return found


def _compact(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
