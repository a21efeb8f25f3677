"""Commands that start ranks, causes of failures, and what other programs take."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from dptrain.errors import UserError
from dptrain.measure.machine.load import Clock
from dptrain.scaling.launching import Child, Launcher, cause, child_environment, find_launcher

PROGRAM = ["python", "-m", "dptrain", "profile"]


@pytest.mark.parametrize(
    ("launcher", "threads", "words"),
    [
        (Launcher(("/bin/mpirun",), False), 2, ["/bin/mpirun", "-n", "4"]),
        (Launcher(("/bin/mpirun",), True), 1, ["/bin/mpirun", "-n", "4", "--oversubscribe"]),
        (
            Launcher(("/bin/mpirun",), True, binds=False), 1,
            ["/bin/mpirun", "-n", "4", "--oversubscribe", "--bind-to", "none"],
        ),
        (
            Launcher(("/bin/mpirun", "--host", "a b"), True), 2,
            ["/bin/mpirun", "--host", "a b", "-n", "4", "--oversubscribe", "--bind-to", "none"],
        ),
        (
            Launcher(("/bin/mpirun", "--bind-to", "none"), True, binds=False), 1,
            ["/bin/mpirun", "--bind-to", "none", "-n", "4", "--oversubscribe"],
        ),
        (
            Launcher(("/bin/mpirun", "--map-by", "slot:PE=2"), True), 2,
            ["/bin/mpirun", "--map-by", "slot:PE=2", "-n", "4", "--oversubscribe"],
        ),
        (
            Launcher(("/bin/srun", "--mpi=pmi2"), False), 2,
            ["/bin/srun", "--mpi=pmi2", "--ntasks", "4", "--cpus-per-task", "2"],
        ),
    ],
)  # fmt: skip
def test_commands_are_lists_of_arguments(
    launcher: Launcher, threads: int, words: list[str]
) -> None:
    assert launcher.command(4, threads, PROGRAM) == [*words, *PROGRAM]


def program(folder: Path, name: str, says: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder with programs, beside an interpreter that has no launcher."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    monkeypatch.setenv("PATH", f"{folder}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return folder


def test_the_launcher_beside_python_comes_first(
    bin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="found neither mpirun nor srun"):
        find_launcher()
    srun = program(bin_folder, "srun", "slurm 22")
    assert find_launcher().arguments == (srun,)
    mpirun = program(bin_folder, "mpirun", "mpirun (Open MPI) 5.0.2")
    assert find_launcher() == Launcher((mpirun,), True)
    program(bin_folder, "mpirun", "mpirun.openmpi (OpenRTE) 4.1.4")  # Debian's, by another name.
    assert find_launcher() == Launcher((mpirun,), True)
    # Inside a job of Slurm its own launcher knows the nodes.
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert find_launcher().arguments == (srun,)
    (tmp_path / "elsewhere").mkdir()
    beside = program(tmp_path / "elsewhere", "mpirun", "HYDRA build details")
    assert find_launcher() == Launcher((beside,), False)
    assert find_launcher(["srun", "--mpi=pmi2"]).arguments == (srun, "--mpi=pmi2")


def test_settings_of_the_surroundings_do_not_reach_a_launch() -> None:
    environ = {"DPTRAIN_BATCH_SIZE": "7", "DPTRAIN_CACHE_DIR": "/there", "HOME": "/home"}
    assert child_environment(environ) == {"DPTRAIN_CACHE_DIR": "/there", "HOME": "/home"}


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("x\ndptrain: rank 1 of 2: no data\nmpirun: aborted\n", "rank 1 of 2: no data"),
        ("x\nsrun: error: no such partition\n\n", "srun: error: no such partition"),
        ("", "it printed nothing"),
    ],
)
def test_the_cause_is_what_the_job_said_last(tmp_path: Path, log: str, expected: str) -> None:
    (tmp_path / "log.txt").write_text(log)
    assert cause(tmp_path / "log.txt") == expected


def test_leaving_the_block_ends_a_child_that_does_not_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dptrain.scaling.launching._GRACE_S", 0.2)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print(1, flush=True); time.sleep(60)"
    )
    with (tmp_path / "log").open("wb") as log, Child([sys.executable, "-c", deaf], log) as child:
        while not (tmp_path / "log").read_text():
            assert child.wait(0.05) is None
    assert child.wait(0) == -9


@pytest.mark.more
def test_what_a_launcher_leaves_behind_goes_with_it(tmp_path: Path) -> None:
    # A rank in a process group of its own, as Open MPI's are, of a launcher that forgets it.
    rank = "import os, time; os.setpgid(0, 0); print(os.getpid(), flush=True); time.sleep(60)"
    launcher = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {rank!r}])"
    with (tmp_path / "log").open("wb") as log, Child([sys.executable, "-c", launcher], log) as it:
        while not (tmp_path / "log").read_text().strip() or it.wait(0.05) is None:
            pass
    rank_number = int((tmp_path / "log").read_text())
    deadline = time.monotonic() + 60
    while Path(f"/proc/{rank_number}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_others_take_is_all_that_is_busy_but_ours(tmp_path: Path) -> None:
    stat = tmp_path / "stat"

    def clock(user: int, steal: int) -> Clock:
        stat.write_text(f"cpu {user} 0 0 1000 50 0 0 {steal} 0 0\ncpu0 1 2\n")
        found = Clock.now(stat)
        assert found is not None
        return found

    before, after = clock(100, 0), clock(300, 100)
    # 3 core seconds at 100 ticks a second, in 2 s, of which 1 was ours.
    later = Clock(before.at_s + 2, after.all_s, before.ours_s + 1)
    assert later.others_since(before) == pytest.approx((after.all_s - before.all_s - 1) / 2)
    assert after.all_s > before.all_s
    stat.write_text("nothing")
    assert Clock.now(stat) is None


def test_our_own_work_is_not_anothers() -> None:
    before = Clock.now()
    if before is None:
        pytest.skip("the system does not say what its cores do")
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    after = Clock.now()
    assert after is not None
    assert after.ours_s - before.ours_s > 0.1
