"""The watchdog of a node, with processes that report to it as ranks do."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from dptrain.comm import job
from dptrain.comm.job import Job, start_job
from dptrain.comm.node.activity import Activity
from dptrain.comm.watchdog import watch
from tests.tiers import tiered

LIMIT_S = 60
"""Time limit of a wait on a busy machine; nothing here takes as long."""

pytestmark = pytest.mark.skipif(
    not hasattr(select, "epoll"), reason="the watchdog needs epoll, which this system lacks"
)

RANK = """
import os, sys
from pathlib import Path
from dptrain.comm.job import Job
job = Job(int(sys.argv[2]), 3, Path(sys.argv[1]))
job.register()
sys.stdout.write("\\n")
sys.stdout.flush()
"""
SILENT = RANK + "sys.stdin.read(); os._exit(0)"
SILENT_AFTER_MPI = (
    RANK
    + """
job.meet(sys.argv[1])
sys.stdin.read()
os._exit(0)
"""
)
GOOD = RANK + "sys.stdin.read()"
LEAVING = RANK + "job.leave(); sys.stdin.read()"
CONNECTING = (
    RANK
    + """
sys.stdin.readline()
with job.limit_call("MPI to start", 1.0):
    print("waiting", flush=True)
    while True:
        pass
"""
)


SECOND_CALL = (
    RANK
    + """
with job.limit_call("MPI to start", 60.0):
    pass
sys.stdin.readline()
with job.limit_call("NCCL to connect", 1.0):
    while True:
        pass
"""
)
FIRST_CALL = (
    RANK
    + """
with job.limit_call("MPI to start", 60.0):
    pass
print("arrived", flush=True)
sys.stdin.read()
"""
)


LATE = (
    """
import os, sys

def pause_if_absent(path, *arguments, open=os.open):
    try:
        return open(path, *arguments)
    except FileNotFoundError:
        os.open = open
        print("absent", flush=True)
        sys.stdin.readline()
        raise

os.open = pause_if_absent
"""
    + GOOD
)


KILLED = (
    RANK
    + """
from dptrain.comm import job as module
module._current = job
with module.kill_after(0.2, "dptrain: the data is missing\\n"):
    while True:
        pass
"""
)


ON_A_NODE = (
    RANK
    + """
if sys.argv[2] == "0":
    print(*job.listen(), flush=True)
else:
    port, token = sys.stdin.readline().split()
    job.connect(int(port), token, ["127.0.0.1"])
    print("connected", flush=True)
sys.stdin.read()
"""
)


@contextmanager
def ranks(folder: Path, *programs: str) -> Iterator[list[subprocess.Popen[str]]]:
    """A process for each rank; one whose stdin is closed leaves. The first starts the watchdog."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(started(folder, number, program))
            for number, program in enumerate(programs)
        ]


@contextmanager
def started(folder: Path, number: int, program: str) -> Iterator[subprocess.Popen[str]]:
    """A process for a rank, which has registered."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder), str(number)],
        stdin=pipe, stdout=pipe, stderr=pipe, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def connect(rank: subprocess.Popen[str]) -> None:
    """Let a rank begin the call whose limit is 1 s, now that all ranks have started."""
    assert rank.stdin is not None
    rank.stdin.write("\n")
    rank.stdin.flush()


def gone(folder: Path) -> bool:
    """Wait until the watchdog has tidied up."""
    end = time.monotonic() + LIMIT_S
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.02)
    return not folder.exists()


@pytest.mark.more
def test_ranks_that_a_launcher_leaves_alone_are_killed(tmp_path: Path) -> None:
    folder = tmp_path / "meeting"
    with ranks(folder, *[SILENT_AFTER_MPI] * 3) as processes:
        processes[1].communicate(timeout=LIMIT_S)
        assert [rank.wait(LIMIT_S) for rank in processes] == [-signal.SIGKILL, 0, -signal.SIGKILL]
        _, said = processes[0].communicate(timeout=LIMIT_S)
    assert said.startswith("dptrain: rank 1 of 3: its process ")
    assert "was killed or exited in the middle of the run" in said
    assert said.count("\n") == 1
    assert gone(folder)


SIGNALLED = (
    """
import ctypes, signal
signal.signal(signal.SIGTERM, lambda *_: None)
"""
    + RANK
    + """
job.meet(sys.argv[1])
if sys.argv[2] == "0":
    ctypes.PyDLL(None).usleep(60_000_000)  # Python calls no handler meanwhile.
sys.stdin.read()
"""
)


@pytest.mark.parametrize("age_s", [0.0, watch.AFTER_SIGNAL_S + 1.0])
@pytest.mark.parametrize("signalled", [(0,), (0, 1, 2)], ids=str)
def test_no_rank_is_named_if_a_launcher_kills_ranks_soon_after_a_signal(
    tmp_path: Path, age_s: float, signalled: tuple[int, ...]
) -> None:
    """Also if Python had no time to call the handler of the signal."""
    folder = tmp_path / "meeting"
    with ranks(folder, *[SIGNALLED] * 3) as processes:
        for rank in signalled:
            processes[rank].send_signal(signal.SIGTERM)
            file = folder / f"signals-{rank}-{processes[rank].pid}"
            end = time.monotonic() + LIMIT_S
            while not file.read_bytes() and time.monotonic() < end:
                time.sleep(0.01)
            os.utime(file, (time.time() - age_s,) * 2)
        for process in processes:
            process.kill()
            process.wait(LIMIT_S)
        said = "".join(process.communicate(timeout=LIMIT_S)[1] for process in processes)
    expected = "rank 0 of 3: its process " if age_s else "SIGTERM ended the job: ranks on "
    assert said.startswith(f"dptrain: {expected}")
    assert said.count("\n") == 1
    assert gone(folder)


def watchdog(folder: Path) -> int:
    """Return the process of the watchdog that watches the ranks of a folder."""
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if {b"ranks", str(folder).encode()} <= set(words):
                    return int(process.name)
    raise AssertionError("no watchdog runs")


@pytest.mark.more
@pytest.mark.parametrize("killed", [{0}, {1}, {0, 1}], ids=str)
def test_no_rank_is_blamed_if_ranks_of_two_nodes_are_killed_at_once(
    tmp_path: Path, killed: set[int]
) -> None:
    """Each watchdog notices its own rank before it learns of the other."""
    folders = [tmp_path / name for name in ("first", "second")]
    with ranks(folders[0], ON_A_NODE) as (first,), started(folders[1], 1, ON_A_NODE) as second:
        assert first.stdout is not None
        assert second.stdout is not None
        assert second.stdin is not None
        second.stdin.write(first.stdout.readline())
        second.stdin.flush()
        assert second.stdout.readline() == "connected\n"
        watchdogs = [watchdog(folder) for folder in folders]
        for pid in watchdogs:
            os.kill(pid, signal.SIGSTOP)
        for rank, process in enumerate((first, second)):
            if rank in killed:
                process.kill()
                process.wait()
        for pid in watchdogs:
            os.kill(pid, signal.SIGCONT)
        said = [process.communicate(timeout=LIMIT_S)[1] for process in (first, second)]
    printed = "".join(said)
    assert printed.count("dptrain: rank") == 1, said
    if len(killed) == 1:
        assert f"dptrain: rank {min(killed)} of 3: its process " in said[min(killed)]
    else:
        assert "dptrain: ranks 0, 1 of 3 ended at the same time on several nodes" in said[0]
    assert all(map(gone, folders))


@pytest.mark.more
def test_ranks_that_end_regularly_are_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "meeting"
    with ranks(folder, GOOD, GOOD) as (first, last):
        last.communicate(timeout=LIMIT_S)
        time.sleep(watch.LAUNCHER_S + 0.5)
        assert first.poll() is None
        _, said = first.communicate(timeout=LIMIT_S)
        assert (said, first.returncode, last.returncode) == ("", 0, 0)
    assert gone(folder)


def test_the_watchdog_ends_when_all_ranks_have_left(tmp_path: Path) -> None:
    """It does not wait for the end of their processes, one of which waits for the watchdog."""
    folder = tmp_path / "meeting"
    with ranks(folder, LEAVING, LEAVING) as processes:
        assert gone(folder)
        assert [rank.poll() for rank in processes] == [None, None]


@pytest.mark.more
def test_a_rank_that_is_stopped_while_mpi_starts_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "meeting"
    with ranks(folder, CONNECTING, SILENT) as (waiting, stopped):
        os.kill(stopped.pid, signal.SIGSTOP)
        connect(waiting)
        assert waiting.wait(LIMIT_S) == 1
        os.kill(stopped.pid, signal.SIGKILL)
        _, said = waiting.communicate(timeout=LIMIT_S)
    assert said.startswith(f"dptrain: rank 1 of 3: its process {stopped.pid} on ")
    assert "is stopped (SIGSTOP?); rank 0 waited 1 s for MPI to start" in said
    assert said.count("\n") == 1


def test_a_rank_that_does_not_arrive_at_a_later_call_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "meeting"
    with ranks(folder, SECOND_CALL, FIRST_CALL) as (waiting, late):
        assert late.stdout is not None
        assert late.stdout.readline() == "arrived\n"
        connect(waiting)
        assert waiting.wait(LIMIT_S) == 1
        late.kill()
        _, said = waiting.communicate(timeout=LIMIT_S)
    assert said.startswith(f"dptrain: rank 1 of 3: its process {late.pid} on ")
    assert said.endswith("has not arrived; rank 0 waited 1 s for NCCL to connect\n")
    assert said.count("\n") == 1


@pytest.mark.more
def test_a_wait_for_a_rank_of_another_node_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "meeting"
    with ranks(folder, CONNECTING) as (waiting,):
        connect(waiting)
        assert waiting.wait(LIMIT_S) == 1
        _, said = waiting.communicate(timeout=LIMIT_S)
    assert said.startswith(
        "dptrain: rank 0 of 3: waited 1 s for MPI to start; no process of rank 1, 2 "
    )
    assert said.count("\n") == 1


@pytest.mark.more
def test_time_in_which_a_rank_was_stopped_does_not_count(tmp_path: Path) -> None:
    """The limit of its call is 1 s, of which the watchdog counts up to 0.2 s too many."""
    folder = tmp_path / "meeting"
    with ranks(folder, CONNECTING) as (rank,):
        begin = time.monotonic()
        connect(rank)
        assert rank.stdout is not None
        assert rank.stdout.readline() == "waiting\n"
        os.kill(rank.pid, signal.SIGSTOP)
        ran_s = time.monotonic() - begin  # At most; a busy machine makes it longer.
        time.sleep(2.0)
        assert rank.poll() is None
        continued = time.monotonic()
        os.kill(rank.pid, signal.SIGCONT)
        assert rank.wait(LIMIT_S) == 1
        assert ran_s + time.monotonic() - continued > 1.0 - 0.2 - 0.1


def test_a_rank_that_is_killed_after_its_deadline_is_named_once(tmp_path: Path) -> None:
    folder = tmp_path / "meeting"
    with ranks(folder, KILLED) as (rank,):
        _, said = rank.communicate(timeout=LIMIT_S)
        assert rank.returncode == -signal.SIGKILL
    assert said == "dptrain: the data is missing\n"


def test_a_watchdog_that_cannot_start_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Job) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Job, "register", refuse)
    monkeypatch.setattr(job, "_current", None)
    monkeypatch.setattr(job, "meeting_folder", lambda: tmp_path / "none")
    assert start_job(1, 3).rank == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dptrain: warning: rank 1 runs without watchdog")
    assert "No space left on device" in line


def test_the_state_of_processes_is_read() -> None:
    assert watch.process_state(os.getpid()) == "R"
    assert watch.process_state(2**22 + 1) == ""
    assert watch.start_time(os.getpid()).isdecimal()


@pytest.mark.parametrize(
    ("ranks", "size", "text"),
    [
        ((0,), 1, "rank 0 of 1: its process 4194305 on host was killed"),
        ((0, 1), 2, "ranks 0, 1 of 2 ended on host during the start"),
        ((1,), 2, "rank 1 of 2 ended on host during the start"),
    ],
    ids=["the only one", "all", "one of two"],
)
def test_ranks_that_end_before_the_watchdog_has_opened_their_pipes(
    ranks: tuple[int, ...], size: int, text: str, tmp_path: Path
) -> None:
    """If the launcher has ended too, it is not known which rank was the first."""
    folder, pid = tmp_path / "job", 1 + (1 << 22)  # No process has such a number.
    folder.mkdir()
    os.mkfifo(folder / "register")
    reader = os.open(folder / "register", os.O_RDONLY | os.O_NONBLOCK)
    with (folder / "register").open("w") as register:
        for rank in ranks:
            os.mkfifo(folder / f"alive-{rank}-{pid}")
            register.write(f"{rank}-{pid}\n")
    with subprocess.Popen(
        [sys.executable, "-I", "-S", watch.__file__, "ranks", str(folder), "host", str(size)],
        stdin=reader, stderr=subprocess.PIPE, text=True,
    ) as helper:  # fmt: skip
        assert helper.stderr is not None
        os.close(reader)
        line = helper.stderr.readline()
        helper.kill()
    assert line.startswith(f"dptrain: {text}")


def test_ranks_that_register_at_once_start_one_watchdog(tmp_path: Path) -> None:
    """Rank 0 finds no folder, and creates one after rank 1 has registered."""
    folder = tmp_path / "meeting"
    with ranks(folder, LATE, GOOD) as (first, second):
        connect(first)
        assert first.stdout is not None
        assert first.stdout.readline() == "\n"
        commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
        assert sum(b"ranks\0" + os.fsencode(folder) in command for command in commands) == 1
        assert second.stderr is not None
        second.kill()
        assert second.stderr.readline().startswith("dptrain: rank 1 of 3: ")
        first.kill()
        assert second.stderr.read() == ""
        assert first.stderr is not None
        assert first.stderr.read() == ""


@pytest.mark.more
def test_a_rank_that_starts_after_all_others_have_failed_is_killed(tmp_path: Path) -> None:
    """It is not named as a second cause."""
    folder = tmp_path / "meeting"
    with ranks(folder, SILENT) as (first,):
        _, said = first.communicate(timeout=LIMIT_S)
    assert said.startswith("dptrain: rank 0 of 3: its process ")
    assert said.count("\n") == 1
    with ranks(folder, GOOD) as (late,):
        assert late.wait(LIMIT_S) == -signal.SIGKILL
        assert late.communicate() == ("", "")


def test_a_rank_that_registers_while_the_watchdog_ends_starts_another(tmp_path: Path) -> None:
    folder = tmp_path / "meeting"
    folder.mkdir()
    os.mkfifo(folder / "register")
    register = os.open(folder / "register", os.O_RDWR)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", GOOD, str(folder), "0"],
        stdin=pipe, stdout=pipe, stderr=pipe, text=True,
    ) as rank:  # fmt: skip
        assert os.read(register, 50) == f"0-{rank.pid}\n".encode()
        folder.rename(tmp_path / "ended")
        os.close(register)
        assert rank.stdout is not None
        assert rank.stdout.readline() == "\n"
        assert (folder / f"watched-0-{rank.pid}").exists()
        _, said = rank.communicate(timeout=LIMIT_S)
    assert said == ""
    assert gone(folder)


LAUNCHER = f"""#!{sys.executable}
import os, subprocess, sys
folder, how = sys.argv[1:]
registering = {RANK!r} + '''
with job.limit_call("MPI to start", 600.0):
    while True:
        pass
'''
programs = {{0: registering, 1: "import sys; print(); sys.stdin.read()", 2: registering}}
if how == "absent":
    del programs[1]
pipe, ranks = subprocess.PIPE, {{}}
for number, program in programs.items():
    variables = {{"PMI_RANK": str(number), "MPI_LOCALNRANKS": "3"}}
    ranks[number] = subprocess.Popen(
        [sys.executable, "-u", "-c", program, folder, str(number)],
        env={{**os.environ, **variables}}, stdin=pipe, stdout=pipe,
    )
for rank in ranks.values():
    rank.stdout.readline()
if how != "absent":
    print(ranks[1].pid, flush=True)
    ranks[1].stdin.close()
    ranks[1].wait()
for number in (0, 2):
    if how == "kills":
        ranks[number].kill()
    print(ranks[number].wait(), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the watchdog needs pidfd_open")
@pytest.mark.parametrize("how", tiered(["kills", "waits", "absent"], ["kills", "waits"]))
def test_a_rank_that_ends_before_it_registers_is_named(how: str, tmp_path: Path) -> None:
    """Also if the launcher kills the ranks that have registered."""
    launcher = tmp_path / "mpirun"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    done = subprocess.run(
        [launcher, str(tmp_path / "meeting"), how],
        capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    *pid, first, last = done.stdout.split()
    (line,) = done.stderr.splitlines()
    if how == "absent":
        assert line.startswith("dptrain: rank 1 of 3: it ended before it started MPI")
    else:
        assert line.startswith(f"dptrain: rank 1 of 3: its process {pid[0]} on ")
        assert "ended before it started MPI" in line
    # The watchdog ends a rank with code 1, the launcher with SIGKILL.
    assert {first, last} <= ({"-9", "1"} if how == "kills" else {"1"})
    assert gone(tmp_path / "meeting")


def test_a_launcher_that_nobody_waits_for_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = watch.start_time(process.pid)
    assert watch._is_running(process.pid, started)
    assert not watch._is_running(process.pid, started + "0")  # The number belongs to another one.
    process.kill()
    end = time.monotonic() + LIMIT_S
    while watch.process_state(process.pid) != "Z" and time.monotonic() < end:
        time.sleep(0.01)
    assert not watch._is_running(process.pid, started)
    process.communicate()


@pytest.mark.parametrize(
    ("states", "named"),
    [
        (["waits", "works", "left"], "rank 1 of 3: its process {pid} on n1 has not arrived"),
        (["left", "waits", "works"], "rank 2 of 3: its process {pid} on n1 has not arrived"),
        (["waits", "left", "waits"], "rank 1 of 3: its process {pid} on n1 has ended its program"),
        (["waits", "waits", ""], ""),
    ],
)
def test_the_rank_for_which_another_node_waited_is_named(
    states: list[str], named: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for rank, state in enumerate(states):
        if state:
            activity = Activity(rank, len(states), tmp_path)
            {"waits": activity.begin_wait, "left": activity.leave, "works": activity.end_wait}[
                state
            ]()
    watchdog = watch.Watchdog.__new__(watch.Watchdog)
    watchdog.folder, watchdog.host, watchdog.size, watchdog.links = str(tmp_path), "n1", "3", None
    watchdog._receive("late")
    printed = capfd.readouterr().err
    assert printed.startswith(f"dptrain: {named.format(pid=os.getpid())}" if named else "")
    assert printed.count("\n") == bool(named)
    assert (tmp_path / "failed").exists() == bool(named)


def test_folders_of_jobs_without_a_process_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm kills the watchdog with the ranks, so it cannot remove its folder."""
    monkeypatch.setattr(job.tempfile, "tempdir", str(tmp_path))
    own, host, uid = os.getpid(), os.uname().nodename, os.getuid()
    left, runs = f"dptrain-{uid}-{own}-1", f"dptrain-{uid}-{own}-{watch.start_time(own)}"
    names = {
        "left": f"{left}-{host}",
        "before its name": f"{left}-{host}~x1_y",
        "with a rank": f"{left}2-{host}",
        "with a watchdog": f"{left}3-{host}",
        "with a launcher": f"{runs}-{host}",
        "of another node": f"{left}-{host}2",
        "of another user": f"dptrain-{uid}1-{own}-1-{host}",
    }
    files = []
    for name in names.values():
        (tmp_path / name).mkdir()
        for pipe in ("register", "alive-0-7"):
            os.mkfifo(tmp_path / name / pipe)
        (tmp_path / name / "watched-0-7").touch()
    for name, pipe in (("with a rank", "alive-0-7"), ("with a watchdog", "register")):
        files.append(os.open(tmp_path / names[name] / pipe, os.O_RDONLY | os.O_NONBLOCK))
    job.remove_left_folders()
    found = {key for key, name in names.items() if (tmp_path / name).exists()}
    assert found == set(names) - {"left", "before its name"}
    for file in files:
        os.close(file)
    job.remove_left_folders()
    assert not (tmp_path / names["with a rank"]).exists()
