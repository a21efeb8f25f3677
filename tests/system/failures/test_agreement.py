"""Ranks that run different commands or settings end the job with one line and exit code 2."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.system.launch import (
    dptrain_lines,
    environment,
    find_mpirun,
    kills_after_signals,
    loses_code,
)

LIMIT_S = 180.0
"""Time limit for a whole job on a busy machine. A job that hangs takes longer: ranks wait for each
other for 300 s."""


forwarded = pytest.mark.skipif(
    kills_after_signals(), reason="Open MPI's mpirun kills ranks after this signal"
)


def launch_two(
    first: str, second: str, tmp_path: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command on rank 0 and another on rank 1; `variables` are those of rank 1."""
    program = [sys.executable, "-m", "dptrain"]
    setting = ["env", *(f"{name}={value}" for name, value in variables.items())]
    ranks = [
        ["-n", "1", *program, *first.split()],
        ["-n", "1", *setting, *program, *second.split()],
    ]
    return subprocess.run(
        [find_mpirun(), *ranks[0], ":", *ranks[1]],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        cwd=tmp_path,
        env=environment(),
    )


TRAIN = "train --steps 3 --run-dir RUN"


@pytest.mark.parametrize(
    ("first", "second", "variables", "line"),
    [
        (TRAIN, TRAIN, {"DPTRAIN_SEED": "4"}, "the ranks differ in seed: 0 on rank 0; 4 on rank 1"),
        *(
            pytest.param(*values, marks=pytest.mark.more)
            for values in (
                (TRAIN, f"{TRAIN} --wrong", {}, "rank 1: No such option '--wrong'"),
                ("train --steps x", TRAIN, {}, "rank 0: --steps is 'x'"),
                (TRAIN, TRAIN, {"DPTRAIN_SEED": "x"}, "rank 1: DPTRAIN_SEED is 'x'"),
                (TRAIN, f"{TRAIN} --learning-rate 0.5", {}, "0.5 on rank 1"),
                (TRAIN, "train --steps 3 --run-dir OTHER", {}, "run_dir: RUN on rank 0; OTHER on"),
                (TRAIN, TRAIN, {"DPTRAIN_TIMEOUT": "20"}, "timeout: 300.0 on rank 0; 20.0 on"),
                (TRAIN, "evaluate RUN", {}, "in command: train on rank 0; evaluate on rank 1"),
                (TRAIN, "describe", {}, "in command: train on rank 0; describe on rank 1"),
            )
        ),
    ],
)
def test_a_difference_is_named_with_its_rank(
    first: str, second: str, variables: dict[str, str], line: str, tmp_path: Path
) -> None:
    done = launch_two(first, second, tmp_path, **variables)
    assert done.returncode == 2, done.stderr
    (said,) = dptrain_lines(done.stderr)
    assert line in said
    assert not (tmp_path / "RUN").exists()


@pytest.mark.more
def test_a_program_on_standard_input_ends_with_one_line(tmp_path: Path) -> None:
    """MPICH leaves the other ranks waiting for it; for Open MPI's they have an empty program."""
    done = subprocess.run(
        [find_mpirun(), "-n", "2", sys.executable, "-"],
        input="from dptrain.comm.world import World\nWorld.connect()\n",
        capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=tmp_path,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    (line,) = dptrain_lines(done.stderr)
    assert line.startswith("dptrain: rank 1 of 2: it")
    assert "mpirun passes standard input to rank 0 only" in line


@contextmanager
def starting(
    *arguments: str, cwd: Path, program: Sequence[str] = ("-m", "dptrain", "train")
) -> Iterator[subprocess.Popen[str]]:
    """Two ranks of a training job that have reached the watchdog, but not MPI."""
    with (
        # A short path: MPI libraries put sockets there, whose names are short.
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        subprocess.Popen(
            [find_mpirun(), "-n", "2", sys.executable, *program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=environment(TMPDIR=folder),
        ) as job,
    ):
        end = time.monotonic() + LIMIT_S
        while len(list(Path(folder).glob("dptrain-*/watched-*"))) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        yield job


@forwarded
@pytest.mark.more
def test_ctrl_c_before_training_ends_the_job_with_one_line(tmp_path: Path) -> None:
    with starting("--steps", "1000", cwd=tmp_path) as job:
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=LIMIT_S)
    assert "Traceback" not in errors
    assert errors.count("dptrain: interrupted") == errors.count("dptrain: ") == 1, errors
    assert job.returncode == 130


LATE = """
import os, time
from dptrain.comm.job import exit_on_interrupt, start_job
from dptrain.comm.launching.launcher import find_launch
from dptrain.comm.world import World

launch = find_launch()
exit_on_interrupt(launch.rank, launch.size)
start_job(launch.rank, launch.size)
if launch.rank == 1:
    time.sleep(600)
print(os.getpid(), flush=True)
World.connect()
"""


@forwarded
@pytest.mark.more
def test_ctrl_c_ends_a_rank_that_waits_in_the_start_of_mpi(tmp_path: Path) -> None:
    with starting(cwd=tmp_path, program=("-c", LATE)) as job:
        assert job.stdout is not None
        status = Path("/proc", job.stdout.readline().strip(), "status")
        end = time.monotonic() + LIMIT_S
        # A rank handles SIGHUP, which is signal 1, while it starts MPI.
        while not int(status.read_text().partition("SigCgt:")[2].split()[0], 16) & 1:
            assert time.monotonic() < end
            time.sleep(0.01)
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=LIMIT_S)
    assert errors.count("dptrain: interrupted") == errors.count("dptrain: ") == 1, errors
    assert job.returncode == 130


@pytest.mark.more
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=forwarded), signal.SIGUSR1])
def test_a_request_before_training_is_followed_after_the_first_step(
    number: signal.Signals, tmp_path: Path
) -> None:
    # This backend compiles nothing, so the first step comes soon.
    options = ("--network", "model-small", "--backend", "reference", "--steps", "900")
    with starting(*options, "--run-dir", "RUN", cwd=tmp_path) as job:
        job.send_signal(number)
        output, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 75 or (job.returncode == 0 and loses_code()), errors
    assert "stopped on request after step 1;" in output
    assert list((tmp_path / "RUN" / "checkpoints").iterdir())
