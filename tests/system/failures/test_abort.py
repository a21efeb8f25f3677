"""Whatever happens to a rank, the job ends, and the first cause is named once with its rank."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dptrain.comm.watchdog.mpi_files import sees_all_processes
from dptrain.comm.watchdog.watch import process_state
from tests.system.launch import under_launcher

HERE = Path(__file__).parent
LIMIT_S = 180.0
"""Time limit for a whole job on a busy machine. A job that hangs takes longer: ranks wait for each
other for 300 s."""


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    code: int
    output: str
    temporary: Path

    @property
    def said(self) -> list[str]:
        """The lines that are the project's own."""
        return [line for line in self.output.splitlines() if line.startswith("dptrain: ")]


def _mpirun() -> str:
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    assert found, "these tests need mpirun"
    return found


def _command(ranks: int, script: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    root = HERE.parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    command = [_mpirun(), "-n", str(ranks), sys.executable, str(HERE / script), *arguments]
    return command, {**os.environ, "PYTHONPATH": path}


def _run(temporary: Path, how: str, ranks: str) -> Ended:
    command, environment = _command(3, "abort_script.py", how, ranks)
    job = subprocess.run(
        command,
        env={**environment, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return Ended(job.returncode, job.stdout, temporary)


@pytest.fixture
def temporary() -> Path:
    """A short path: MPI libraries put sockets there, whose names are short."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)


ZERO = "ZeroDivisionError: seven by nothing"
MISSING = "the data is missing"
EXIT = "sys.exit(0) in the middle of the run"
SILENT = "was killed or exited in the middle of the run"


@pytest.mark.parametrize(
    ("how", "rank", "cause", "code"),
    [
        ("SIGKILL", 2, SILENT, None),
        *(
            pytest.param(*values, marks=pytest.mark.more)
            for values in (
                ("bug", 1, ZERO, 1),
                ("thread", 2, ZERO, 1),
                ("user", 2, MISSING, 2),
                ("stuck", 1, ZERO, None),
                ("exit", 0, EXIT, 1),
                ("before.bug", 1, ZERO, 1),
                ("before.exit", 2, EXIT, 1),
                ("SIGKILL", 0, SILENT, None),
                ("os_exit", 1, SILENT, None),
                ("before.SIGKILL", 1, SILENT, None),
            )
        ),
    ],
)
def test_one_rank_fails(temporary: Path, how: str, rank: int, cause: str, code: int | None) -> None:
    ended = _run(temporary, how, str(rank))
    assert "done" not in ended.output
    assert len(ended.said) == 1, ended.output
    assert ended.said[0].startswith(f"dptrain: rank {rank} of 3: ")
    assert cause in ended.said[0]
    assert ended.output.count(cause) == 1
    # The launcher chooses the code of a job that it ends itself.
    assert ended.code == code or code is None
    assert ended.output.count("Traceback") == (cause == ZERO)
    end = time.monotonic() + LIMIT_S
    while left := list(temporary.glob("dptrain-*")):
        assert time.monotonic() < end, f"left: {left}"
        time.sleep(0.05)


@pytest.mark.more
@pytest.mark.parametrize(
    ("how", "cause", "code"),
    [("bug", ZERO, 1), ("before.bug", ZERO, 1), ("user", MISSING, 2)],
)
def test_all_ranks_fail_at_once(temporary: Path, how: str, cause: str, code: int) -> None:
    ended = _run(temporary, how, "0,1,2")
    assert ended.output.count(cause) == 1, ended.output
    assert len(ended.said) == 1
    assert " of 3: " in ended.said[0]
    assert ended.code == code


@pytest.mark.more
@pytest.mark.parametrize(
    ("how", "ranks", "line"),
    [
        ("agree", "0,1,2", f"dptrain: {MISSING}"),
        ("agree", "1", f"dptrain: rank 1: {MISSING}"),
        ("before.user", "0,1,2", f"dptrain: {MISSING}"),
        ("before.user", "2", f"dptrain: rank 2: {MISSING}"),
    ],
)
def test_a_mistake_that_all_know_of_ends_in_good_order(
    temporary: Path, how: str, ranks: str, line: str
) -> None:
    ended = _run(temporary, how, ranks)
    assert _without_notices(ended.output).strip() == line
    assert ended.code == 2


def _without_notices(output: str) -> str:
    """Remove what Open MPI's mpirun prints of its own between lines of dashes."""
    return re.sub(r"^-{60,}\n.*?^-{60,}\n", "", output, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.more
def test_a_job_that_is_suspended_and_continued_goes_on(temporary: Path) -> None:
    command, environment = _command(2, "stop_script.py", "3")
    job = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert job.stdout is not None
    with job:
        assert job.stdout.readline() == "training\n"
        ranks = _ranks(job.pid)
        assert len(ranks) == 2
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for rank in ranks:
                os.kill(rank, number)
            time.sleep(4.0)  # The timeout is 3 s.
        job.send_signal(signal.SIGUSR1)  # All launchers pass it on.
        output, _ = job.communicate(timeout=LIMIT_S)
    assert output.count("by SIGUSR1") == 2, output
    assert job.returncode == 0


@pytest.mark.more
def test_ranks_end_if_the_launcher_on_their_node_is_killed(temporary: Path) -> None:
    command, environment = _command(2, "stop_script.py")
    job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    with job:
        assert job.stdout.readline() == "training\n"
        ranks = _ranks(job.pid)
        (proxy,) = {_parent(rank) for rank in ranks}
        os.kill(proxy, signal.SIGKILL)
        end = time.monotonic() + LIMIT_S
        while any(map(_is_running, ranks)) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(map(_is_running, ranks))
        job.communicate(timeout=LIMIT_S)


def _ranks(pid: int) -> list[int]:
    """The processes below `pid` that run the script."""
    found = []
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        if b"stop_script.py" in Path(f"/proc/{child}/cmdline").read_bytes():
            found.append(child)
        found += _ranks(child)
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _is_running(pid: int) -> bool:
    return process_state(pid) not in ("", "Z")


@pytest.mark.more
def test_a_good_run_says_nothing_and_leaves_nothing(temporary: Path) -> None:
    ended = _run(temporary, "nothing", "0")
    assert sorted(ended.output.split("\n")) == ["", "done 0", "done 1", "done 2"]
    assert ended.code == 0
    # At once: batch systems kill whatever is still tidying up when the ranks have ended.
    assert not list(temporary.glob("dptrain-*")), "the meeting place stays behind"


EARLY = """
import os
from pathlib import Path
from dptrain.comm.abort import end_start, fail
from dptrain.comm.watchdog.mpi_files import own_files
from dptrain.comm.launching.start import start_mpi

start_mpi(60.0)
Path(f"files-{os.getpid()}").write_text("\\n".join(own_files()))
END
"""


@pytest.mark.more
@pytest.mark.parametrize(
    ("end", "code"),
    [("end_start(130)", 130), ("fail(KeyboardInterrupt())", 130), ("os.kill(os.getpid(), 9)", 9)],
)
def test_the_end_of_a_job_that_starts_leaves_no_file_of_mpi(
    end: str, code: int, tmp_path: Path
) -> None:
    script = tmp_path / "early.py"
    script.write_text(EARLY.replace("END", end))
    command, environment = _command(2, str(script))
    job = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, timeout=LIMIT_S, check=False
    )
    # Open MPI's mpirun adds 128 to the number of a signal.
    assert job.returncode in ((code, 128 + code) if code == signal.SIGKILL else (code,))
    listed = {line for file in tmp_path.glob("files-*") for line in file.read_text().splitlines()}
    assert list(tmp_path.glob("files-*"))
    _wait_until_removed(listed)


def _wait_until_removed(paths: Iterable[str]) -> None:
    """Wait until the watchdog has removed files."""
    end_s = time.monotonic() + LIMIT_S
    while left := [path for path in paths if Path(path).exists()]:
        assert time.monotonic() < end_s, left
        time.sleep(0.02)


KILLED_IN_START = """
import os
from pathlib import Path
from dptrain.comm.job import start_job
from dptrain.comm.launching.launcher import find_launch

launch = find_launch()
start_job(launch.rank, launch.size)
name = f"/dev/shm/mpich_shm_of_a_test_{os.getpid()}_0"
Path(f"files-{os.getpid()}").write_text(name)
Path(name).touch()  # As MPI does, before dptrain knows the name.
os.kill(os.getpid(), 9)
"""


@pytest.mark.more
@pytest.mark.skipif(not sees_all_processes(), reason="in a container, no file is removed")
def test_a_kill_while_mpi_starts_leaves_no_file_of_mpi(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED_IN_START)
    command, environment = _command(2, str(script))
    job = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, timeout=LIMIT_S, check=False
    )
    assert job.returncode
    assert b" was killed " in job.stderr + job.stdout
    listed = [file.read_text() for file in tmp_path.glob("files-*")]
    assert listed
    _wait_until_removed(listed)


@pytest.mark.more
def test_one_rank_where_the_launcher_meant_many_is_refused(temporary: Path) -> None:
    # The two ranks are on different nodes: each is the first one that prints there.
    script = [sys.executable, str(HERE / "abort_script.py"), "nothing", "0"]
    command = under_launcher(temporary, "slurmstepd", script)
    environment = _command(1, "")[1]
    for rank in (0, 1):
        job = subprocess.run(
            command,
            env={**environment, "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": str(rank)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert job.returncode == 2
        assert job.stderr.count("the launcher started 4 (SLURM_STEP_NUM_TASKS=4)") == 1
        assert len(job.stderr.splitlines()) == 1
