"""The parts of benchmarks.node: timing, checks, worker processes, results."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.coarse_check import WrongResultError, require_agreement
from benchmarks.node import mpi, ranks, steps, sums, traffic
from benchmarks.node.__main__ import SECTIONS, make_settings
from benchmarks.node.steps import StepSection
from benchmarks.node.workers import programs
from benchmarks.node.workers.processes import Processes, Team, Worker, WorkerError
from benchmarks.node.workers.running import MissingError, Runner, run_steps
from benchmarks.node.workers.worker import Server, cores_of, launched_rank
from benchmarks.progress import Progress
from benchmarks.session import Session, Settings, run_sections
from dptrain.errors import UserError

MS = 1_000_000


def make_session() -> Session:
    return Session(Settings(("threads",), cores=(0,), quick=True), Progress())


# Timing.


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


def test_cpu_times_are_those_of_the_steps_alone() -> None:
    nothing = run_steps(Runner(lambda: None), 101, 0, 0, 0)
    work = run_steps(Runner(lambda: sum(range(20_000))), 101, 0, 0, 0)
    idle = run_steps(Runner(lambda: time.sleep(0.001)), 11, 0, 0, 0)
    assert 5 * np.median(nothing.cpus) < np.median(work.cpus)
    assert np.median(idle.cpus) < 0.5 * MS
    assert np.median(work.cpus) <= 1.1 * np.median(np.subtract(work.ends, work.begins))


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


def test_a_program_with_wrong_results_is_noted_and_not_timed() -> None:
    session, theirs = make_session(), {"output": np.full(3, 2.0)}
    assert session.compare("case", {"output": np.full(3, 2.0)}, theirs, "JAX")
    assert not session.compare("case", {"output": np.full(3, 2.1)}, theirs, "JAX")
    assert len(session.report.wrong) == 1
    assert "JAX" in session.report.wrong[0]


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
    assert "no C compiler" in session.report.missing["traffic.c"]


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
    assert len(timed.begins) == len(timed.ends) == len(timed.cpus) == 3
    assert team.details("key") == [{}]
    team.drop("key")
    with pytest.raises(WorkerError, match="KeyError"):
        team.run("key", steps=1)


def test_a_missing_program_does_not_end_the_run(worker: Worker) -> None:
    session, team = make_session(), Team([worker])
    assert not session.build(team, "key", "absent", {})
    assert not session.build(team, "key", "broken", {})
    assert session.report.missing == {
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


# The whole.


OPTIONS: dict[str, Any] = {
    "sections": None, "networks": None, "batches": None, "compiled": None, "rounds": None,
    "cores": None, "counts": None, "mpirun": (), "section_minutes": 1.0,
}  # fmt: skip


def test_settings_refuse_unknown_sections_and_networks() -> None:
    found = make_settings(**{**OPTIONS, "sections": "threads,sums", "counts": "1,2"}, quick=True)
    assert (found.sections, found.counts) == (("threads", "sums"), (1, 2))
    for option, value, words in (
        ("sections", "thread", "section is 'thread'"), ("networks", "lenet5,model9", "model9"),
        ("batches", "0", "batch size is '0'"), ("counts", "x", "number of threads is 'x'"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            make_settings(**{**OPTIONS, option: value})


def test_without_options_every_section_has_its_own_cases() -> None:
    found = make_settings(**OPTIONS)
    assert found.sections == tuple(SECTIONS)
    assert (found.networks, found.batches, found.counts) == ((), (), ())
    session = Session(Settings((), cores=(0, 1, 2)), Progress())
    assert session.counts() == [1, 2, 3]
    assert session.counts((1, 8)) == [1, 3]


def test_sigterm_ends_a_run_and_keeps_its_results() -> None:
    def interrupted(session: Session) -> None:
        session.report.rows["threads"].append({"network": "model0"})
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10.0)
        pytest.fail("SIGTERM did not end the section")

    def not_run(session: Session) -> None:
        pytest.fail("a section ran after SIGTERM")

    saved: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    session = Session(
        Settings(("threads", "sums")),
        Progress(),
        save=lambda report: saved.append(len(report.rows)),
    )
    report = run_sections(session, {"threads": interrupted, "sums": not_run})
    assert report.rows == {"threads": [{"network": "model0"}]}
    assert "interrupted" in report.missing["threads"]
    assert saved == [1]
    assert signal.getsignal(signal.SIGTERM) is before


NETWORK = "model-small"


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    """A run of one network with two samples on one core."""
    section = StepSection("training", {NETWORK: (2,)}, with_copies=True)
    passes = StepSection("inference", {NETWORK: (2,)}, (1,), block_s=0.01)
    monkeypatch.setattr(steps, "SECTIONS", {"threads": section, "inference": passes})
    core = max(os.sched_getaffinity(0))
    return Session(
        Settings(("threads", "inference"), cores=(core,), rounds=2, block_s=0.01),
        Progress(),
    )


@pytest.mark.more
def test_steps_and_passes_are_checked_timed_and_compared(session: Session) -> None:
    report = run_sections(session, SECTIONS)
    assert not report.wrong
    programs = {name: [row["program"] for row in rows] for name, rows in report.rows.items()}
    modes = ["PyTorch eager", "PyTorch channels_last"]
    assert [p for p in programs["threads"] if p in ("dptrain", *modes, "copies")] == [
        "dptrain", *modes, "copies"
    ]  # fmt: skip
    assert [p for p in programs["inference"] if p in ("dptrain", *modes)] == ["dptrain", *modes]
    assert all(row["median_ms"] > 0 for row in report.rows["threads"])
    assert all("cpus_ms" in row for row in report.rows["threads"] if row["program"] != "copies")
    checked = {case.rpartition(", ")[2] for case in report.checks}
    assert {"float64", *modes} <= checked
    assert all(share <= 1.0 for share in report.checks.values())


@pytest.mark.more
def test_a_program_that_is_wrong_is_not_timed(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = Session.compare

    def spoiled(self: Session, case: str, ours: Any, theirs: Any, *rest: Any) -> bool:
        return compare(self, case, ours, {n: 1.01 * v for n, v in theirs.items()}, *rest)

    monkeypatch.setattr(Session, "compare", spoiled)
    report = run_sections(replace_sections(session, "inference"), SECTIONS)
    assert {row["program"] for row in report.rows["inference"]} == {"dptrain"}
    assert any("dptrain and PyTorch eager differ in output" in text for text in report.wrong)


def replace_sections(session: Session, *sections: str) -> Session:
    session.settings = replace(session.settings, sections=sections)
    return session


def test_a_network_of_no_section_is_measured_by_the_first_one() -> None:
    settings = Settings((), networks=("vgg", "wrn-28-10"))
    session = Session(settings, Progress())
    assert steps._networks("threads", session) == ("wrn-28-10",)
    assert steps._networks("outside", session) == ("vgg",)
    assert steps._networks("residual", session) == ()
