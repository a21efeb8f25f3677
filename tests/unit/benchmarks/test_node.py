"""The parts of benchmarks.node: timing, checks, worker processes, results."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.coarse_check import WrongResultError, require_agreement
from benchmarks.node import mpi, ranks, rounds, stages, suite, sums, traffic
from benchmarks.node.report import Report
from benchmarks.node.rounds import Entry, combine, measure, quotient
from benchmarks.node.rows import Rows
from benchmarks.node.section_tables import stages_table
from benchmarks.node.session import Session, Settings
from benchmarks.node.suite import make_settings
from benchmarks.node.workers import programs
from benchmarks.node.workers.processes import Processes, Team, Worker, WorkerError
from benchmarks.node.workers.running import MissingError, Runner, Timed, run_steps
from benchmarks.node.workers.worker import Server, cores_of, launched_rank
from benchmarks.progress import Progress
from dptrain.errors import UserError
from dptrain.machine import own_cores

MS = 1_000_000


class FakeTeam(Team):
    """A team whose steps take a fixed time, without processes."""

    def __init__(self, step_ms: float, log: list[str]) -> None:
        super().__init__([])
        self.step_ms, self.log = step_ms, log

    def run(self, key: str, steps: int, warm_up: int = 1, period_ns: int = 0) -> list[Timed]:
        self.log.append(key)
        begins = [int(i * self.step_ms * MS) for i in range(steps)]
        return [Timed(begins, [b + int(self.step_ms * MS) for b in begins])]


def make_session() -> Session:
    settings = Settings(("threads",), (0,), (1,), None, (), 3, 0.01, 60.0, True)
    return Session(settings, Progress())


# Timing.


def test_ranks_share_a_step_and_copies_do_not() -> None:
    one = Timed([0, 10 * MS], [10 * MS, 20 * MS])
    late = Timed([4 * MS, 14 * MS], [12 * MS, 22 * MS])
    # A step lasts from the last begin to the last end: 8 ms. The two steps took 22 ms in all.
    assert combine([one, late], shares_steps=True) == pytest.approx((8.0, 11.0))
    # Copies make 2 steps in 20 and in 18 ms.
    median, wall = combine([one, late], shares_steps=False)
    assert median == pytest.approx(9.0)
    assert wall == pytest.approx(2 / (2 / 20 + 2 / 18))


def test_waiting_for_the_slowest_copy_by_stage_and_by_step() -> None:
    copies = np.array([[[1, 5], [2, 2]], [[3, 1], [4, 6]], [[2, 3], [3, 4]]])
    times = {kind: values.tolist() for kind, values in stages.stage_times(copies).items()}
    assert times == {
        "mean": [2.5, 3.5, 6.0],
        "slowest": [3.5, 5.5, 9.0],
        "slowest step": [8.0],  # 6 and 10
    }


@pytest.mark.more
def test_stages_of_threads_and_copies_are_timed() -> None:
    cores = tuple(sorted(own_cores()))
    counts = tuple(sorted({1, min(2, len(cores))}))
    settings = Settings(("stages",), cores, counts, ("model0",), (), 1, 0.01, 30.0, True)
    session = Session(settings, Progress())
    stages.measure_stages(session)
    rows = Rows(session.rows["stages"])
    for program in ("dptrain", "copies"):
        for count in counts:
            times = rows.where(program=program, threads=count, kind="mean")
            [step] = times.where(stage="step")
            parts = [row["median_ms"] for row in times if row is not step]
            assert len(parts) == 15
            assert step["median_ms"] > max(parts) > 0
    stages_of_table = {line[2] for line in stages_table(rows).texts}
    assert len(counts) == 1 or "conv1+relu1+pool1.forward" in stages_of_table


def test_a_ratio_is_the_median_of_the_rounds_that_both_have() -> None:
    ratio = quotient([2.0, 6.0, 100.0], [1.0, 2.0])
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.5, 2.25, 2.75))


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
    assert log[3:] == ["ours", "fast", "slow", "fast", "ours", "ours", "fast"]
    assert found["ours"].medians == pytest.approx((9.0, 9.0, 9.0))
    assert found["slow"].medians == pytest.approx((4.0,))


def test_steps_start_at_the_common_time() -> None:
    events: list[str] = []
    runner = Runner(lambda: events.append("step"), prepare=lambda: events.append("prepare"))
    at = time.monotonic_ns() + 5 * MS
    timed = run_steps(runner, steps=2, warm_up=1, at=at, period_ns=3 * MS)
    assert events == ["prepare", "step"] * 3
    assert len(timed.begins) == 2
    assert all(
        begin >= at + (i + 2) * 3 * MS for i, begin in enumerate(timed.begins)
    )  # The warm-up is the first step.


# Checks.


def test_a_wrong_result_is_refused() -> None:
    right = {"loss": np.array(2.0), "w": np.ones(4)}
    assert require_agreement("case", right, right) == 0.0
    for wrong in (
        {**right, "w": np.full(4, 1.01)},
        {**right, "w": np.full(4, np.nan)},
        {**right, "w": np.ones(3)},
        {"loss": np.array(2.0)},
    ):
        with pytest.raises(WrongResultError, match="case"):
            require_agreement("case", right, wrong, "JAX")


def test_a_program_with_wrong_results_is_noted_and_not_timed(tmp_path: Path) -> None:
    session, path = make_session(), tmp_path / "theirs.npz"
    np.savez(path, output=np.full(3, 2.0))
    assert session.compare("case", {"output": np.full(3, 2.0)}, path, "JAX")
    assert not session.compare("case", {"output": np.full(3, 2.1)}, path, "JAX")
    assert len(session.wrong) == 1
    assert "JAX" in session.wrong[0]


def test_a_wrong_sum_of_any_rank_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sum.npz"
    np.savez(path, wrong=np.array(0))
    np.savez(Path(f"{path}.rank1.npz"), wrong=np.array(0))
    sums.require_sum("case", path, 2)
    np.savez(Path(f"{path}.rank1.npz"), wrong=np.array(3))
    with pytest.raises(WrongResultError, match="rank 1 has 3 wrong elements"):
        sums.require_sum("case", path, 2)


def test_losses_of_ranks_must_be_those_of_one_rank(tmp_path: Path) -> None:
    one, same, other = (tmp_path / f"{name}.npz" for name in ("one", "same", "other"))
    np.savez(one, losses=np.array([2.3, 2.2]))
    np.savez(same, losses=np.array([2.3, 2.20001]))
    np.savez(other, losses=np.array([2.3, np.nan]))
    ranks.require_losses("case", one, same)
    with pytest.raises(WrongResultError, match="case: losses"):
        ranks.require_losses("case", one, other)


# traffic.c.

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@needs_compiler
@pytest.mark.parametrize(("threads", "elements"), [(1, 1), (2, 1000), (3, 4099)])
def test_traffic_sums_every_element(tmp_path: Path, threads: int, elements: int) -> None:
    # The program itself checks every parameter against sums in double precision.
    times = traffic.compile_traffic(tmp_path).run(
        threads, elements, 4, sorted(os.sched_getaffinity(0))
    )
    assert len(times) == 4
    assert min(times) > 0


@needs_compiler
def test_traffic_with_a_wrong_sum_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = traffic.SOURCE.read_text()
    changed = tmp_path / "traffic.c"
    changed.write_text(
        source.replace(
            "for (int p = 1; p < num_threads; p++) {\n            const",
            "for (int p = 2; p < num_threads; p++) {\n            const",
        )
    )
    assert changed.read_text() != source
    monkeypatch.setattr(traffic, "SOURCE", changed)
    with pytest.raises(WrongResultError, match="parameters are wrong"):
        traffic.compile_traffic(tmp_path).run(2, 100, 1, sorted(os.sched_getaffinity(0)))


def test_a_missing_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    session = make_session()
    assert not session.attempt("traffic.c", lambda: traffic.compile_traffic(tmp_path))
    assert "no C compiler" in session.missing["traffic.c"]


# Worker processes.


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker in a thread, which knows the programs `add`, `absent` and `broken`."""

    def build(program: str, spec: dict[str, Any], session: dict[str, Any]) -> Runner:
        if program == "absent":
            raise MissingError("no such library")
        if program == "broken":
            raise ValueError("unexpected")
        total = np.array(spec["number"] + spec["rank"])
        return Runner(lambda: None, lambda: {"total": total}, facts={"version": "1"})

    monkeypatch.setattr(programs, "build", build)
    here, there = socket.socketpair()
    there.sendall(json.dumps({"rank": 0}).encode() + b"\n")
    thread = threading.Thread(target=Server(there).serve)
    thread.start()
    found = Worker(here, tmp_path / "log")
    yield found
    found.stop()
    thread.join(10)


def test_a_worker_builds_checks_and_runs(worker: Worker, tmp_path: Path) -> None:
    team, path = Team([worker]), tmp_path / "results.npz"
    assert team.build("key", "add", {"number": 41}, path) == {"version": "1"}
    with np.load(path) as results:
        assert results["total"] == 41
    (timed,) = team.run("key", steps=3)
    assert len(timed.steps_ns) == 3
    team.drop("key")
    with pytest.raises(WorkerError, match="KeyError"):
        team.run("key", steps=1)


def test_a_missing_program_does_not_end_the_run(worker: Worker) -> None:
    session, team = make_session(), Team([worker])
    assert not session.build(team, "key", "absent", {})
    assert not session.build(team, "key", "broken", {})
    assert session.missing == {
        "absent": "MissingError: no such library",
        "broken": "ValueError: unexpected",
    }


@pytest.mark.more
def test_processes_are_bound_to_cores_and_end() -> None:
    cores = sorted(os.sched_getaffinity(0))
    with Processes(cores) as processes:
        team = processes.copies(2)
        assert [worker.hello["cores"] for worker in team.workers] == [
            [cores[i % len(cores)]] for i in range(2)
        ]
        with pytest.raises(WorkerError, match="no-such-program"):
            team.build("key", "no-such-program", {})
        pids = [worker.hello["pid"] for worker in team.workers]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ranks_take_their_own_cores_if_there_are_enough() -> None:
    assert cores_of(1, [4, 5, 6, 7], 2) == [6, 7]
    assert cores_of(3, [4, 5], 1) == [4, 5]
    assert launched_rank({}) == 0
    assert launched_rank({"OMPI_COMM_WORLD_RANK": "3"}) == 3


@pytest.mark.parametrize(
    ("text", "name"), [("HYDRA build details", "MPICH"), ("mpirun (Open MPI) 5.0", "Open MPI")]
)
def test_mpi_libraries_are_told_apart(tmp_path: Path, text: str, name: str) -> None:
    launcher = tmp_path / "mpirun"
    launcher.write_text(f"#!/bin/sh\necho '{text}'\n")
    launcher.chmod(0o755)
    found = mpi.identify(str(launcher))
    assert found is not None
    assert found.name == name
    assert found.command(3)[-2:] == ["-n", "3"]
    assert mpi.identify(str(tmp_path / "none")) is None


# Results.


def row(program: str, ms: float, **facts: Any) -> dict[str, Any]:
    series = rounds.Series((ms, ms, ms), (ms, ms, ms), 30)
    values = {"medians_ms": series.medians, "walls_ms": series.walls}
    return {**facts, "program": program, **series.as_dict(), **values}


def make_report() -> Report:
    case = {"network": "model0", "batch": 256}
    times = {1: (16.0, 80.0, 16.0), 16: (1.25, 4.0, 1.0)}
    threads = [
        row(program, ms, threads=count, **case)
        for count, values in times.items()
        for program, ms in zip(("dptrain", "PyTorch eager", "copies"), values, strict=True)
    ]
    sizes = {"network": "cifar", "bytes": 4_273_192, "ranks": 8}
    summed = [row(program, ms, **sizes) for program, ms in (
        ("dptrain", 0.6), ("traffic.c", 0.4), ("MPICH", 3.0), ("Open MPI", 4.0))]  # fmt: skip
    about = {"date": "2026-01-02T03:04", "cpu": "a processor", "sections": ["threads", "sums"]}
    return Report(
        about, {"threads": threads, "sums": summed}, {"JAX": "not installed"}, {"a": 1e-6}
    )


def test_targets_are_those_of_the_measured_cases() -> None:
    rows = [tuple(row[:4]) for row in make_report().tables()[-1].texts]
    size = "sum and update of 4.27 MB, 8 ranks"
    assert rows == [
        ("model0, 1 threads: times faster than the best peer", "5.00 (5.00–5.00)", "≥ 4",
         "reached"),
        ("model0, 16 threads: times faster than the best peer", "3.20 (3.20–3.20)", "≥ 4",
         "0.80 of target"),
        ("model0, 16 threads: efficiency relative to independent copies", "0.80 (0.80–0.80)",
         "≥ 0.9", "0.89 of target"),
        (f"{size}: time relative to traffic.c", "1.50 (1.50–1.50)", "≤ 1.5", "reached"),
        (f"{size}: times faster than the better MPI", "5.00 (5.00–5.00)", "≥ 4", "reached"),
    ]  # fmt: skip


def test_the_summary_names_the_case_that_is_farthest_from_its_target() -> None:
    first = make_report().tables()[0].texts[0]
    assert tuple(first) == (
        "threads: times faster than the best peer", "3.20–5.00", "≥ 4", "1 of 2",
        "model0, 16 threads (3.20)",
    )  # fmt: skip


@pytest.mark.more
def test_reports_are_written_read_and_combined(tmp_path: Path) -> None:
    first, second = make_report(), make_report()
    second.rows = {"sums": second.rows["sums"][:2]}
    second.about = {**second.about, "date": "2026-01-03T00:00", "sections": ["sums"]}
    paths = [report.write(tmp_path)[0] for report in (first, second)]
    assert (tmp_path / "node-2026-01-02.svg").stat().st_size > 1000
    assert "not measured: JAX: not installed" in (tmp_path / "node-2026-01-02.md").read_text()
    combined = Report.combine(paths)
    assert len(combined.rows["threads"]) == 6
    assert len(combined.rows["sums"]) == 2
    assert combined.about["date"] == ["2026-01-02T03:04", "2026-01-03T00:00"]


@pytest.mark.more
def test_a_case_of_a_later_report_replaces_all_programs_of_an_earlier_one(tmp_path: Path) -> None:
    one, two = make_report(), make_report()
    last = one.rows["threads"][-1]
    again = {**last, "program": "dptrain", "median_ms": 1.0}
    other = {**again, "network": "vgg"}
    two.rows = {"threads": [again, other]}
    combined = Report.combine([report.write(tmp_path)[0] for report in (one, two)])
    combined = Report.combine([combined.write(tmp_path)[0]])
    found = [(row["network"], row["threads"], row["program"]) for row in combined.rows["threads"]]
    assert found == [
        ("model0", 1, "dptrain"), ("model0", 1, "PyTorch eager"), ("model0", 1, "copies"),
        ("model0", 16, "dptrain"), ("vgg", 16, "dptrain"),
    ]  # fmt: skip
    assert combined.rows["threads"][3]["median_ms"] == 1.0
    assert combined.about["date"] == one.about["date"]


def test_settings_refuse_unknown_sections_and_networks() -> None:
    options: dict[str, Any] = {
        "networks": None, "counts": "1,2", "cores": 1, "mpirun": (), "rounds": None,
        "section_minutes": 1.0, "quick": True,
    }  # fmt: skip
    assert make_settings("threads,sums", **options).counts == (1, 2)
    with pytest.raises(UserError, match="section is 'thread'"):
        make_settings("thread", **options)
    with pytest.raises(UserError, match="model9"):
        make_settings("threads", **{**options, "networks": "lenet5,model9"})


def test_sigterm_ends_a_run_and_keeps_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(session: Session) -> None:
        session.begin("threads")
        session.rows["threads"].append({"network": "model0"})
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10.0)
        pytest.fail("SIGTERM did not end the section")

    def not_run(session: Session) -> None:
        pytest.fail("a section ran after SIGTERM")

    monkeypatch.setattr(suite, "SECTIONS", {"threads": interrupted, "sums": not_run})
    before = signal.getsignal(signal.SIGTERM)
    settings = make_settings(
        "threads,sums", networks=None, counts="1", cores=None, mpirun=(), rounds=1,
        section_minutes=1.0, quick=True,
    )  # fmt: skip
    report = suite.run(settings, Progress())
    assert report.rows == {"threads": [{"network": "model0"}]}
    assert "interrupted" in report.missing["threads"]
    assert signal.getsignal(signal.SIGTERM) is before
