"""When ranks are started again, and when not, with a program in the place of the launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dptrain.errors import UserError
from dptrain.files import FULL_DISK_OF, write_whole
from dptrain.runs.incidents import RunProgress, read_incidents
from dptrain.runs.resizing import request_ranks, take_request
from dptrain.scaling.launching import Launcher
from dptrain.survival import MOST_REPAIRS, supervisor
from dptrain.survival.local_ranks import LocalRanks
from dptrain.survival.nodes import on_hosts, parse_hosts, usable, within_allocation
from dptrain.survival.rehearsal import (
    FULL_DISK,
    KILL,
    STOP,
    PlannedFault,
    Rehearsal,
    parse_fault,
)
from dptrain.survival.supervisor import Hang, Job, Supervisor

KILLED = "dptrain: rank 1 of 2: its process 7 on node3 was killed or exited in the middle"

PROGRAM = """
import json, os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(__file__).parent
run, count = folder / "run", folder / "count"
number = int(count.read_text()) if count.exists() else 0
count.write_text(str(number + 1))
with (folder / "ranks").open("a") as file:
    file.write(sys.argv[sys.argv.index("-n") + 1] + " ")
plan = json.loads((folder / "plan").read_text())
does = plan[min(number, len(plan) - 1)]
if "step" in does:
    (run / "config.toml").touch()
    lost = {"first_step": does["step"] - 1, "steps_lost": 2, "resumed_s": 1.5}
    (run / ".progress").write_text(json.dumps({"step": does["step"], **lost}))
    time.sleep(0.3)
print(does.get("says", ""), file=sys.stderr, flush=True)
time.sleep(does.get("sleeps", 0))
while does.get("computes"):
    pass
if does.get("stops"):
    rank = subprocess.Popen(["sleep", "60"], env={**os.environ, "PMI_RANK": "0"})
    os.kill(rank.pid, signal.SIGSTOP)
    rank.wait()
if not does["code"]:
    (run / "summary.json").write_text("{}")
sys.exit(does["code"])
"""
"""Does what the plan says for this start: reports a step, prints, waits or hangs, and ends with a
code.
"""


def job(folder: Path, *plan: dict[str, Any], **changes: Any) -> Job:
    """Return a job whose launcher follows a plan; the last entry is that of all later starts."""
    (folder / "run").mkdir()
    (folder / "launcher.py").write_text(PROGRAM)
    (folder / "plan").write_text(json.dumps(plan))
    launcher = Launcher((sys.executable, str(folder / "launcher.py")), False)
    values = {
        "launcher": launcher, "program": ("dptrain", "train"), "run_dir": folder / "run",
        "ranks": 4, "least_ranks": 1, "most_restarts": 20, "threads": 1, "timeout": 60.0,
    }  # fmt: skip
    return Job(**{**values, **changes})


def in_another_process(folder: Path, text: str) -> subprocess.Popen[bytes]:
    """Start a program that knows the run directory as `run`; a process conflicts with no lock of
    its own.
    """
    names = "import pathlib, time\nfrom dptrain.runs.locks import lock\n"
    names += "from dptrain.runs.resizing import request_ranks\n"
    names += f"run = pathlib.Path({str(folder / 'run')!r})\n"
    return subprocess.Popen([sys.executable, "-c", names + textwrap.dedent(text)])


def ranks_of(folder: Path) -> list[int]:
    """Return the number of ranks of each start."""
    return [int(n) for n in (folder / "ranks").read_text().split()]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_S", 0.0)


def test_a_killed_rank_is_started_again_and_recorded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    notice = "dptrain: compiling kernels; the first run takes longer\n"
    killed = {"step": 8, "says": notice + KILLED, "code": 9}
    assert Supervisor(job(tmp_path, killed, {"step": 9, "code": 0})).run() == 0
    assert ranks_of(tmp_path) == [4, 4]
    (found,) = read_incidents(tmp_path / "run")
    assert (found.rank, found.host, found.step, found.ranks_after) == (1, "node3", 8, 4)
    assert (found.steps_lost, found.seconds_lost) == (2, 1.5)
    printed = capfd.readouterr().err.splitlines()
    assert printed[1] == KILLED
    assert "rank 1 ended after step 8; starting 4 ranks (restart 1 of at most 20)" in printed[2]
    assert printed[-1] == "dptrain: 1 restart after a fault cost 2 steps and 1.5 s"


@pytest.mark.parametrize("code", [2, 3, 75, 130])
def test_ends_that_a_restart_cannot_change_are_final(tmp_path: Path, code: int) -> None:
    assert Supervisor(job(tmp_path, {"code": code})).run() == code
    assert ranks_of(tmp_path) == [4]


def test_a_code_0_without_results_is_a_fault(tmp_path: Path) -> None:
    # MPICH 4.0's mpirun returns 0 for some killed jobs. Code 2 after a restart may be a lock of a
    # rank on another node that has not ended.
    made = job(tmp_path, {"step": 3, "code": 9}, {"code": 2}, {"step": 5, "code": 0})
    (tmp_path / "launcher.py").write_text(PROGRAM.replace('if not does["code"]', "if number > 1"))
    assert Supervisor(made).run() == 0
    assert ranks_of(tmp_path) == [4, 4, 4]


def test_a_fault_that_repeats_at_the_same_step_ends_the_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    further = [{"step": step, "says": KILLED, "code": 9} for step in (3, 4, 9)]
    assert Supervisor(job(tmp_path, *further)).run() == 1
    assert len(ranks_of(tmp_path)) == 3 + supervisor.MOST_REPEATS - 1
    error = capfd.readouterr().err
    assert "rank 1 ended after step 9; this is fault 3 in a row without a further step" in error
    assert len(read_incidents(tmp_path / "run")) == 4


def test_restarts_are_limited(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    further = [{"step": step, "says": KILLED, "code": 9} for step in range(3, 9)]
    assert Supervisor(job(tmp_path, *further, most_restarts=2)).run() == 1
    assert len(ranks_of(tmp_path)) == 3
    assert "--max-restarts is 2; the same command continues" in capfd.readouterr().err


CORRUPT = "dptrain: silent corruption: after step 8, w (momentum) of rank 3 on n2 (EPYC) differs"


@pytest.mark.parametrize(
    ("repairs", "starts", "end"),
    [
        (False, 1, "the same command with --repair continues"),
        (True, 1 + MOST_REPAIRS, f"silent corruption number {MOST_REPAIRS + 1}"),
    ],
)
def test_silent_corruption_is_repaired_on_request(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], repairs: bool, starts: int, end: str
) -> None:
    further = [{"step": step, "says": CORRUPT, "code": 1} for step in range(3, 9)]
    assert Supervisor(job(tmp_path, *further, repairs=repairs)).run() == 1
    assert len(ranks_of(tmp_path)) == starts
    assert end in capfd.readouterr().err
    found = read_incidents(tmp_path / "run") if repairs else []
    assert all((each.rank, each.host) == (3, "n2") for each in found)


@pytest.mark.parametrize(
    ("says", "named"),
    [
        (CORRUPT.replace("differs", "and rank 1 on n1 (EPYC) differ"), (None, None)),
        ("dptrain: rank 1 of 2: silent corruption: w changed on n1 (host memory)", (1, "n1")),
        ("dptrain: rank 1: silent corruption: w changed on n1 (host memory)", (1, "n1")),
    ],
)
def test_a_repaired_job_is_complete(
    tmp_path: Path, says: str, named: tuple[int | None, str | None]
) -> None:
    plan = {"step": 3, "says": says, "code": 1}, {"step": 5, "code": 0}
    assert Supervisor(job(tmp_path, *plan, repairs=True)).run() == 0
    (found,) = read_incidents(tmp_path / "run")
    assert (found.rank, found.host, found.steps_lost) == (*named, 2)


def test_a_launcher_that_starts_no_rank_gets_fewer(tmp_path: Path) -> None:
    refuses = {"says": "mpirun: not enough slots", "code": 213}
    assert Supervisor(job(tmp_path, refuses, refuses, refuses, {"code": 0})).run() == 0
    assert ranks_of(tmp_path) == [4, 4, 3, 2]


def test_a_run_directory_that_is_not_released_is_waited_for(tmp_path: Path) -> None:
    """Code 2 after a restart: ranks on another node have not ended."""
    held = {"says": "dptrain: process 3 on node2 is training in run directory run", "code": 2}
    plan = [{"step": 3, "says": KILLED, "code": 9}, held, held, held, {"step": 5, "code": 0}]
    assert Supervisor(job(tmp_path, *plan)).run() == 0
    assert ranks_of(tmp_path) == [4] * 5


def test_the_smallest_number_of_ranks_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert Supervisor(job(tmp_path, {"code": 213}, least_ranks=4)).run() == 1
    assert ranks_of(tmp_path) == [4, 4]
    assert "3 ranks are left, and --min-ranks is more" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("hangs", "cause"),
    [
        ({"step": 3, "sleeps": 60}, "no step was completed for 1 s"),
        ({"step": 3, "computes": True}, "no step was completed for 1 s"),
        ({"stops": True}, "all ranks are stopped (SIGSTOP?), for 1 s"),
    ],
)
def test_a_job_that_hangs_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: dict[str, Any], cause: str
) -> None:
    monkeypatch.setattr(supervisor, "LEAST_HANG_S", 0.5)
    plan = [{**hangs, "code": 0}, {"step": 4, "code": 0}]
    begin = time.monotonic()
    assert Supervisor(job(tmp_path, *plan, timeout=0.5)).run() == 0
    assert time.monotonic() - begin < 50
    (found,) = read_incidents(tmp_path / "run")
    assert found.cause.startswith(cause)


def test_only_time_in_which_the_supervisor_runs_counts_as_a_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: clock[0])

    def passes(seconds: float, progress: RunProgress | None, *, stopped: bool = False) -> str:
        clock[0] += seconds
        hang.check(progress, all_stopped=stopped)
        return hang.cause

    hang = Hang(2.5)
    assert not any(passes(1.0, None) for _ in range(9)), "compilation may take any time"
    assert not passes(1.0, RunProgress(1, 0))
    assert not passes(1e6, RunProgress(1, 0)), "this process was stopped"
    assert not passes(1.0, RunProgress(1, 0))
    assert not passes(1.0, RunProgress(1, 0, batches=1)), "an evaluation"
    assert not passes(1e6, RunProgress(1, 0, batches=1), stopped=True)
    assert not passes(1.0, RunProgress(1, 0, batches=1), stopped=True)
    assert "all ranks are stopped" in passes(1.0, RunProgress(1, 0, batches=1), stopped=True)
    hang = Hang(2.5)
    assert [bool(passes(1.0, RunProgress(1, 0))) for _ in range(4)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("number", "does", "code"),
    [
        (signal.SIGTERM, {"step": 3}, 75),
        (signal.SIGINT, {"step": 3}, 75),
        (signal.SIGTERM, {}, 75),
        (signal.SIGINT, {}, 130),  # There is nothing to continue.
    ],
)
def test_a_signal_reaches_the_launcher_and_no_rank_is_started_again(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    does: dict[str, Any],
    code: int,
) -> None:
    made = job(tmp_path, {**does, "sleeps": 60, "code": 0})

    def stop() -> None:
        while not (tmp_path / ("run/.progress" if does else "ranks")).exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    before = signal.getsignal(number)
    thread.start()
    assert Supervisor(made).run() == code  # SIGUSR1 ends this launcher.
    thread.join()
    assert ranks_of(tmp_path) == [4]
    assert signal.getsignal(number) is before
    line = f"dptrain: {number.name} ended the ranks before they could stop in order"
    assert [text for text in capfd.readouterr().err.splitlines() if text] == [line]


def test_slurm_names_the_nodes_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    srun = Launcher(("/bin/srun", "--mpi=pmi2"), False)
    (tmp_path / "squeue").write_text("#!/bin/sh\necho 'n[1-3]'\n")
    (tmp_path / "sinfo").write_text("#!/bin/sh\nprintf 'n1 alloc\\nn2 down*\\nn3 drng\\n'\n")
    for name in ("squeue", "sinfo"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    job = {"SLURM_JOB_ID": "4", "SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS_PER_NODE": "2"}
    launcher, ranks = within_allocation(srun, 6, job)
    assert ranks == 4
    assert launcher.arguments == (*srun.arguments, "--nodelist=n1,n3", "--nodes=2")
    mpirun = Launcher(("/bin/mpirun",), False)
    assert within_allocation(mpirun, 6, job) == (mpirun, 6)
    assert within_allocation(srun, 6, {}) == (srun, 6)
    (tmp_path / "sinfo").write_text("#!/bin/sh\nexit 1\n")
    assert within_allocation(srun, 6, job) == (srun, 6)


def test_planned_faults_name_a_rank_and_a_step() -> None:
    assert parse_fault(STOP, "2@100", 3) == PlannedFault(STOP, 100, 2)
    assert parse_fault(FULL_DISK, "100", 3) == PlannedFault(FULL_DISK, 100)
    for text in ("2", "2@", "@1", "a@1", "-1@2", "1@1e9"):
        with pytest.raises(UserError, match="expected RANK@STEP, such as 1@100"):
            parse_fault(KILL, text, 3)
    for text in ("1@5", "x", "-1", ""):
        with pytest.raises(UserError, match=f"--full-disk is '{text}'; expected STEP"):
            parse_fault(FULL_DISK, text, 3)
    with pytest.raises(UserError, match="--kill is 3@5, but the ranks are 0 to 2"):
        parse_fault(KILL, "3@5", 3)


def test_a_rehearsed_full_disk_is_only_that_of_the_run_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    rehearsal = Rehearsal([PlannedFault(FULL_DISK, 5)], run)
    with rehearsal.environment(), LocalRanks(os.getpid()) as none:
        for step in (None, 4):
            rehearsal.act(none, step)
            assert rehearsal.left
        write_whole(run / "a", "1")
        rehearsal.act(none, 5)
        assert not rehearsal.left
        for path in (run / "a", run / "checkpoints" / "b"):
            with pytest.raises(UserError, match=f"cannot write {path}: No space left on device"):
                write_whole(path, "2")
        write_whole(tmp_path / "c", "3")
        assert rehearsal.free_disk()
        assert not rehearsal.free_disk()
        write_whole(run / "a", "4")
        rehearsal.act(none, 6)
        assert (run / "a").read_text() == "4"
    assert FULL_DISK_OF not in os.environ


ASKS_FOR_SEVEN_RANKS = """
while not (run / ".progress").exists():
    time.sleep(0.01)
request_ranks(run, 7)
"""
"""Code of another process: it waits for the first step, and asks for other ranks."""


def test_a_user_changes_the_number_of_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher stops on SIGUSR1 as ranks do, with code 75."""
    waits = {"step": 3, "sleeps": 60, "code": 0}
    made = job(tmp_path, waits, {"step": 5, "code": 0}, most_restarts=0)
    handler = "import signal; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))"
    (tmp_path / "launcher.py").write_text(PROGRAM.replace("folder =", f"{handler}\nfolder =", 1))

    asks = in_another_process(tmp_path, ASKS_FOR_SEVEN_RANKS)
    assert Supervisor(made).run() == 0
    assert asks.wait(60) == 0
    assert ranks_of(tmp_path) == [4, 7]
    (found,) = read_incidents(tmp_path / "run")
    assert (found.ranks, found.ranks_after) == (4, 7)
    assert "another number of ranks was requested; starting 7 ranks" in capfd.readouterr().err


@pytest.mark.parametrize("code", [0, 9])
def test_a_request_is_not_forgotten_if_the_ranks_end_by_themselves(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    """They complete training, or one is killed."""
    made = job(tmp_path, {"step": 3, "sleeps": 3, "code": code}, {"step": 5, "code": 0})
    ignore = "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)"
    (tmp_path / "launcher.py").write_text(PROGRAM.replace("folder =", f"{ignore}\nfolder =", 1))
    asks = in_another_process(tmp_path, ASKS_FOR_SEVEN_RANKS)
    assert Supervisor(made).run() == 0
    assert asks.wait(60) == 0
    assert ranks_of(tmp_path) == ([4, 7] if code else [4])
    is_late = "training ended before its number of ranks could change" in capfd.readouterr().err
    assert is_late == (code == 0)


def test_a_request_that_nobody_takes_is_withdrawn(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="so its number of ranks cannot change"):
        request_ranks(tmp_path, 3)
    assert take_request(tmp_path) is None


def test_a_request_from_before_the_start_is_withdrawn(tmp_path: Path) -> None:
    made = job(tmp_path, {"step": 3, "sleeps": 0.5, "code": 0})
    (tmp_path / "run" / ".resize").write_text("7")
    assert Supervisor(made).run() == 0
    assert ranks_of(tmp_path) == [4]


def test_a_second_job_in_the_same_folder_changes_nothing(tmp_path: Path) -> None:
    made = job(tmp_path, {"step": 3, "code": 0})
    run = tmp_path / "run"
    for name in (".progress", ".resize", "incidents.json", "config.toml"):
        (run / name).write_text("of the first job")
    (run / "is_held").unlink(missing_ok=True)
    holds = in_another_process(
        tmp_path,
        """
        descriptor = lock(run / ".supervisor")
        (run / "is_held").touch()
        while (run / "is_held").exists():
            time.sleep(0.01)
    """,
    )
    while not (run / "is_held").exists():
        time.sleep(0.01)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(UserError, match=rf"process {holds.pid} on .* is training in run directory"):
        Supervisor(made).run()
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    assert not (tmp_path / "ranks").exists()
    (run / "is_held").unlink()
    assert holds.wait(60) == 0


def test_a_mistake_leaves_no_folder(tmp_path: Path) -> None:
    made = job(tmp_path, {"code": 2})
    assert Supervisor(made).run() == 2
    assert not (tmp_path / "run").exists()


def test_snapshots_that_cannot_become_a_checkpoint_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(run: object) -> None:
        raise UserError("cannot write x: no space left")

    monkeypatch.setattr(supervisor, "promote", refuse)
    Supervisor(job(tmp_path, {"step": 3, "code": 2})).run()
    warning = f"the snapshots of {tmp_path / 'run'} stay in memory: cannot write x: no space left"
    assert f"dptrain: warning: {warning}" in capfd.readouterr().err.splitlines()


def test_hosts_that_start_nothing_are_left_out(tmp_path: Path) -> None:
    """The launcher reaches a and c."""
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\ncase $2 in b:*) exit 1 ;; *) echo here ;; esac\n")
    program.chmod(0o755)
    mpirun, hosts = Launcher((str(program),), False), parse_hosts("a:2,b:2,c:1")
    launcher, ranks = usable(mpirun, 5, hosts)
    assert launcher.arguments == (str(program), "-hosts", "a:2,c:1")
    assert ranks == 3
    open_mpi = on_hosts(Launcher((str(program),), True), hosts)
    assert open_mpi.arguments[1:] == ("--host", "a:2,b:2,c:1")
    assert parse_hosts(" a:2, b:2,c") == hosts
    for text in ("a:0", ":2", "a:b", ",", "a,,b", " "):
        with pytest.raises(UserError, match="expected NAME:RANKS"):
            parse_hosts(text)
