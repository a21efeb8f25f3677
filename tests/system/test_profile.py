"""`dptrain profile` as a user runs it, alone and under mpirun, to the files it leaves."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from dptrain.measure.profile.profile import Profile
from tests.system.launch import (
    command,
    descendants,
    environment,
    launch,
    succeed,
    wait_until_ended,
)
from tests.unit.measure.test_trace import check_trace

pytestmark = pytest.mark.more

SMALL = ("profile", "--network", "model-small", "--threads", 1)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_job_is_taken_apart(ranks: int, tmp_path: Path) -> None:
    text = succeed(
        *SMALL, "--bucket-kib", 8, "--output", "p", "--trace", "--steps", 20, ranks=ranks,
        cwd=tmp_path,
    )  # fmt: skip
    found = Profile.read(tmp_path / "p" / "profile.json")
    assert found.job["ranks"] == len(found.ranks) == ranks
    assert found.steps == found.step_ms.n == len(found.step_times_ms) == 20
    step = sum(rank.step_ms for rank in found.ranks) / ranks
    stages = sum(stage.typical_ms for stage in found.stages)
    parts = found.parts
    assert parts.total == pytest.approx(step, rel=1e-9)
    # Stages contain what their thread lacked of a core, and the part does not.
    most = parts.compute + (parts.without_core or 0.0)
    assert parts.compute * (1 - 1e-9) <= stages <= most * (1 + 1e-9)
    assert min(parts.known.values()) >= 0
    assert found.step_ms.q1 <= step <= found.step_ms.q3
    assert sum(s.buckets for s in found.sums) == (found.job["buckets"] if ranks > 1 else 0)
    assert all(s.time_ms.n >= 10 and s.time_ms.median > 0 for s in found.sums)
    total = sum(s.bucket_bytes * s.buckets for s in found.sums)
    assert total == (found.memory["gradients"] if ranks > 1 else 0)
    # Minibatches of 32: 11, 11 and 10 samples on three ranks.
    assert sum(rank.samples for rank in found.ranks) == pytest.approx(32)
    for words in (
        "A step:",
        "Layers, slowest first",
        "Kinds of operation",
        "roofline:",
        "written: p",
    ):
        assert words in text
    assert ("stragglers" in text) == (ranks > 1)
    assert {path.name for path in (tmp_path / "p").iterdir()} == {
        "profile.json", "profile.csv", "kinds.csv", "ranks.csv", "trace.json",
    }  # fmt: skip
    check_ranks(tmp_path / "p" / "trace.json", found)


def check_ranks(path: Path, found: Profile) -> None:
    """The trace opens in viewers, has every step of every rank, and says how clocks are apart."""
    trace = json.loads(path.read_text())
    threads = check_trace(trace)
    clocks = trace["otherData"]["clocks"]
    for rank, clock in enumerate(clocks):
        events = threads[rank, 0]
        assert sum(event["name"] == "step" for event in events) == found.steps
        for stage in found.stages:
            # An update in several pieces has an event for each piece.
            count = sum(event["name"] == stage.name for event in events)
            assert count >= found.steps if stage.phase == "update" else count == found.steps
        # A single rank sums nothing.
        sums = found.job["buckets"] if found.job["ranks"] > 1 else 0
        assert len(threads[rank, 1]) == found.steps * sums
        for moment in ("before", "after"):
            # One machine has one clock: the offset is wrong by half of the round trip at most.
            offset = clock[moment]["offset_ns"]
            assert abs(offset) <= clock[moment]["round_trip_ns"] / 2 + 1
    for stage in found.stages:
        own = [threads[rank, 0] for rank in range(len(clocks))]
        total_us = sum(e["dur"] for events in own for e in events if e["name"] == stage.name)
        mean_ms = total_us / found.steps / len(clocks) / 1e3
        assert mean_ms == pytest.approx(stage.time_ms.mean, rel=1e-3, abs=1e-5), stage.name
    # On a busy machine, clocks are compared with a larger error.
    error_us = max(clock[m]["round_trip_ns"] for clock in clocks for m in ("before", "after")) / 1e3
    steps = [e for events in threads.values() for e in events if e["name"] == "step"]
    for number in {e["args"]["step"] for e in steps}:
        # All ranks are in the same step together, since none passes a sum without the others.
        same = [e for e in steps if e["args"]["step"] == number]
        assert max(e["ts"] for e in same) < min(e["ts"] + e["dur"] for e in same) + error_us


def test_without_output_nothing_is_left_behind(tmp_path: Path) -> None:
    text = succeed(*SMALL, "--steps", 5, "--no-roofs", "--json", cwd=tmp_path)
    assert json.loads(text)["steps"] == 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--steps", 0), "--steps is 0"),
        (("--steps", "many"), "--steps"),
        (("--trace",), "try --output"),
        (("--output", "taken"), "contains a profile"),
        (("--output", "file/p"), "cannot write"),
        (("--network", "modle0"), "did you mean 'model0'"),
        (("--run-dir", "x"), "No such option"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    flags: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "profile.json").write_text("{}")
    (tmp_path / "file").write_text("")
    done = launch("profile", *flags, ranks=2, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("dptrain:")]) == 1
    assert "Traceback" not in done.stderr


def test_a_killed_rank_ends_the_job_and_leaves_no_profile(tmp_path: Path) -> None:
    line = command(*map(str, (*SMALL, "--steps", 10**5, "--output", "p")), ranks=2)
    job = subprocess.Popen(
        line, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        encoding="utf-8",
    )  # fmt: skip
    assert job.stdout is not None
    while "ranks ×" not in (text := job.stdout.readline()):
        assert text, "the job ended before it began"
    ranks = descendants(job.pid, "dptrain")
    assert len(ranks) == 2
    subprocess.run(["kill", "-9", str(ranks[1])], check=True)
    assert job.wait(timeout=300) != 0
    job.stdout.close()
    wait_until_ended(ranks)
    assert not list((tmp_path / "p").iterdir())
