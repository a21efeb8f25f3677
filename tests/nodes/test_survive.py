"""`dptrain train --survive --hosts` outlives a node that is lost for good."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dptrain.runs.incidents import read_incidents, read_progress
from tests.nodes.machines import Nodes
from tests.system.launch import succeed

pytestmark = [pytest.mark.more, pytest.mark.timeout(900)]  # Two jobs, on a busy machine too.

LIMIT_S = 240
TRAINING = (
    "train", "--network", "mlp-5", "--data", "irradiance?samples=128", "--backend", "reference",
    "--batch-size", "16", "--shards", "2", "--epochs", "40", "--threads", "1",
    "--checkpoint-seconds", "1000", "--baseline-steps", "0",
)  # fmt: skip


def last_state(run: Path) -> bytes:
    *_, last = sorted(run.glob("checkpoints/step-*/state.safetensors"))
    return last.read_bytes()


@pytest.mark.usefixtures("nodes")
def test_a_job_goes_on_with_the_hosts_that_are_left(tmp_path: Path, mpi: str) -> None:
    succeed(*TRAINING, "--run-dir", "whole", cwd=tmp_path)
    run, log = tmp_path / "run", tmp_path / "log"
    with Nodes(2) as own:
        line, variables = own.mpirun([1, 1], "PROGRAM", mpi=mpi, folder=tmp_path)
        end = line.index("-n")
        start = next(i for i, word in enumerate(line) if Path(word).name == "mpirun")
        *mpirun, _, hosts = line[start:end]
        words = (
            sys.executable, "-m", "dptrain", *TRAINING, "--survive", "--hosts", hosts,
            "--launcher", shlex.join(mpirun), "--snapshot-every", "5", "--run-dir", "run",
        )  # fmt: skip
        with log.open("wb") as output:
            job = subprocess.Popen(
                [*line[:start], *words], env=variables, stdout=output, stderr=output,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        deadline = time.monotonic() + LIMIT_S
        while read_progress(run) is None:
            assert job.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
        for pid in (own.pids[1], *own.processes(1, "dptrain")):
            os.kill(pid, signal.SIGKILL)
        assert job.wait(LIMIT_S) == 0, log.read_text()
        left = own.run(0, "ls", "/dev/shm").split()
    assert last_state(run) == last_state(tmp_path / "whole")
    first = read_incidents(run)[0]
    assert (first.ranks, first.ranks_after) == (2, 1), log.read_text()
    assert first.steps_lost <= 5
    assert [name for name in left if name.startswith("dptrain")] == []
