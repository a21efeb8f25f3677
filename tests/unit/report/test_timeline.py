"""The step that a timeline shows, from a trace."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from dptrain.measure.step_record import DATA_WAIT, EXPOSED, STEP
from dptrain.report.profiles.timeline import (
    VISIBLE,
    Span,
    StepSpans,
    _sum_sentence,
    read_step,
    time_outside_sums,
    timeline,
)


def event(name: str, category: str, rank: int, thread: int, ts: float, dur: float,
          **args: Any) -> dict[str, Any]:  # fmt: skip
    return {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": thread, "ts": ts,
            "dur": dur, "args": args}  # fmt: skip


def write_trace(path: Path, lengths: list[float], *, untimed: tuple[int, ...] = ()) -> None:
    """Steps of two ranks, microseconds long, rank 1 beginning 10 µs later."""
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {}}]
    begin = 0.0
    for number, length in enumerate(lengths):
        for rank in (0, 1):
            at = begin + 10 * rank
            events.append(event(STEP, STEP, rank, 0, at, length - 10 * rank, **{STEP: number}))
            events.append(event(DATA_WAIT, "input", rank, 2, at, 5))
            if number in untimed:
                continue
            events += [
                event("conv1.forward", "forward", rank, 0, at + 5, 20),
                event("conv1.backward_weight", "backward_weight", rank, 0, at + 25, 30),
                event(EXPOSED, "communication", rank, 0, at + 55, 25),
                event("sum.0", "communication", rank, 1, at + 50, 30),
                event("update", "update", rank, 0, at + 80, 5),
            ]
        begin += length + 100
    path.write_text(json.dumps({"traceEvents": events}))


def test_waiting_is_the_busy_time_that_is_missing_to_the_slowest_rank(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, [200])
    record = json.loads(path.read_text())
    for one in record["traceEvents"]:
        if one["ph"] == "X" and one["pid"] == 1 and one["name"] == EXPOSED:
            one["dur"] = 10.0  # Rank 1 computes 25 µs − 10 µs longer, in a step shorter by 10 µs.
    path.write_text(json.dumps(record))
    found = read_step(path)
    assert found is not None
    lengths = {
        (s.rank, s.kind): s.end - s.begin
        for s in found.spans
        if s.kind in ("imbalance", "transfer")
    }
    assert lengths == pytest.approx(
        {(0, "imbalance"): 0.005, (0, "transfer"): 0.020, (1, "transfer"): 0.010}
    )


def test_a_step_with_a_late_rank_is_not_shown_if_others_have_none(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, [300, 310, 320, 330, 340])
    record = json.loads(path.read_text())
    begins = sorted({e["ts"] for e in record["traceEvents"] if e["ph"] == "X" and e["pid"] == 0
                     and e["name"] == STEP})  # fmt: skip
    for one in record["traceEvents"]:
        # In the step of median length, rank 1 starts 100 µs later than in the other steps.
        if one["ph"] == "X" and one["pid"] == 1 and begins[2] <= one["ts"] < begins[3]:
            one["ts"] += 100
    path.write_text(json.dumps(record))
    found = read_step(path)
    assert found is not None
    assert found.step in (1, 3)


def test_the_step_is_the_one_of_median_length(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", [300, 120, 150])
    found = read_step(tmp_path / "trace.json")
    assert found is not None
    assert found.step == 2
    assert abs(found.length - 0.150) < 1e-9
    assert found.bounds[0][0] == 0
    assert abs(found.bounds[1][0] - 0.010) < 1e-9
    of_rank_0 = [span.kind for span in found.spans if span.rank == 0]
    assert sorted(of_rank_0) == ["backward", "data wait", "forward", "rest", "sum", "transfer"]
    assert all(0 <= span.begin < span.end <= 0.150 + 1e-9 for span in found.spans)


def test_steps_whose_stages_were_not_timed_are_passed_over(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", [100, 110, 300], untimed=(0, 1))
    found = read_step(tmp_path / "trace.json")
    assert found is not None
    assert found.step == 2


def test_without_a_trace_there_is_no_timeline(tmp_path: Path) -> None:
    assert read_step(tmp_path / "trace.json") is None
    (tmp_path / "trace.json").write_text("no JSON")
    assert read_step(tmp_path / "trace.json") is None
    write_trace(tmp_path / "trace.json", [100, 110], untimed=(0, 1))
    assert read_step(tmp_path / "trace.json") is None


def test_the_plot_has_a_row_for_each_rank(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", [300, 120, 150])
    found = read_step(tmp_path / "trace.json")
    assert found is not None
    drawn = timeline(found, "", "")
    assert "Step 2" in drawn.caption
    words = ("forward", "backward", "communication", "waiting for data", "gradient sum in progress")
    for word in words:
        assert f">{word}</text>" in drawn.svg


@pytest.mark.more
def test_communication_after_the_sums_is_explained_if_there_is_any() -> None:
    """Random steps of ranks that sum in one or two intervals, with or without a rest after them."""
    explained = 0
    for seed in range(200):
        random_ = random.Random(seed)
        spans, bounds, longest = list[Span](), {}, 0.0
        has_sums, rest = random_.random() < 0.8, random_.choice((0.0, 0.3))
        for rank in range(random_.randint(2, 5)):
            moment = random_.random()
            begin = moment
            for _ in range(random_.randint(1, 2)):
                end = moment + random_.uniform(0.1, 1)
                spans.append(Span(rank, random_.choice(("transfer", "imbalance")), moment, end))
                spans += [Span(rank, "sum", moment, end)] * has_sums
                moment = end + random_.uniform(0.01, 0.1)
            left = rest * random_.random()
            spans.append(Span(rank, "transfer", moment, moment + left))
            longest = max(longest, left if has_sums else 0.0)
            bounds[rank] = (begin, moment + left)
        found = StepSpans(3, tuple(spans), bounds)
        assert time_outside_sums(found) == pytest.approx(longest), seed
        is_visible = longest > VISIBLE * found.length
        caption = timeline(found, "", "").caption if seed < 10 else _sum_sentence(found)
        assert ("exchanges the updated parameters" in caption) == is_visible, seed
        explained += is_visible
    assert 20 < explained < 180
