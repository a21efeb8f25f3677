"""A rank that fails in any phase of a sum in shared memory ends the job with the cause."""

from __future__ import annotations

import functools
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from dptrain.training.persistence.checkpoints import CheckpointStore
from tests.system.launch import dptrain_lines, launch

pytestmark = pytest.mark.more

SCRIPT = str(Path(__file__).with_name("shared_sum_script.py"))
LIMIT_S = 180.0
"""Time limit from a failure to the end of the job on a busy machine. A job that hangs takes longer:
ranks wait for each other for 300 s."""

RANKS = 3
PHASES = (
    "before arriving", "after arriving", "after the sum", "during the update", "before the end",
    "after the end",
)  # fmt: skip


@pytest.fixture
def temporary() -> Path:
    """A folder with a short path, because MPI libraries put sockets there."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def train(folder: Path, phase: str, how: str, rank: int) -> subprocess.CompletedProcess[str]:
    done = launch(
        folder / "run", phase, how, rank, ranks=RANKS, program=(SCRIPT,), cwd=folder,
        TMPDIR=str(folder),
    )  # fmt: skip
    failed = folder / "failed"
    assert not failed.exists() or time.time() - failed.stat().st_mtime < LIMIT_S
    return done


@functools.cache
def parameters_after_step_6() -> dict[str, bytes]:
    """Return the checkpoint of step 6 of a run in which no rank fails."""
    with tempfile.TemporaryDirectory() as name:
        done = train(Path(name), "never", "bug", 0)
        assert sorted(done.stdout.splitlines()) == [f"done {rank}" for rank in range(RANKS)], done
        return checkpoint(Path(name))


def checkpoint(folder: Path) -> dict[str, bytes]:
    arrays = load_file(folder / "run" / "checkpoints" / "step-00000006" / "state.safetensors")
    return {name: values.tobytes() for name, values in arrays.items()}


def wait_until_gone(paths: list[str]) -> None:
    """Wait until the watchdog has removed the files of the MPI library; it ends after the ranks."""
    end = time.monotonic() + LIMIT_S
    while any(Path(path).exists() for path in paths):
        assert time.monotonic() < end, f"left: {paths}"
        time.sleep(0.05)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("how", "rank", "cause"),
    [
        ("SIGKILL", 1, "was killed or exited in the middle of the run"),
        ("bug", 0, "ZeroDivisionError: seven by nothing"),
    ],
)
def test_a_rank_fails_in_a_phase_of_the_sum(
    temporary: Path, phase: str, how: str, rank: int, cause: str
) -> None:
    done = train(temporary, phase, how, rank)
    output = done.stdout + done.stderr
    assert "done" not in done.stdout
    assert done.returncode != 0
    lines = [line for line in output.splitlines() if line.startswith("dptrain: ")]
    assert len(lines) == 1, output
    assert lines[0].startswith(f"dptrain: rank {rank} of {RANKS}: ")
    assert cause in lines[0]
    # Step 7 was not completed, so there is no later checkpoint, and nothing of step 7 is in this.
    assert CheckpointStore(temporary / "run" / "checkpoints").steps()[-1] == 6
    assert checkpoint(temporary) == parameters_after_step_6()
    wait_until_gone((temporary / "failed").read_text().splitlines())


@pytest.mark.parametrize("phase", ["after arriving", "during the update"])
def test_a_stopped_rank_ends_the_job_after_the_timeout(temporary: Path, phase: str) -> None:
    parameters_after_step_6()  # Compiles kernels, which may take longer than the timeout.
    done = train(temporary, phase, "SIGSTOP", 2)
    lines = [line for line in done.stderr.splitlines() if line.startswith("dptrain: ")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"dptrain: rank 2 of {RANKS}: its process ")
    assert "is stopped (SIGSTOP?)" in lines[0]
    assert "waited 5 s for the ranks of this node to update" in lines[0]


REFUSAL = """
import errno, os, sys
from dptrain.__main__ import main
from dptrain.comm.launching.launcher import find_launch

def refuse(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")

if find_launch().rank == 1:
    os.posix_fallocate = refuse
main()
"""
"""The command line, with too little memory on rank 1."""

TRAIN = (
    "train", "--network", "mlp-5", "--data", "irradiance?samples=64", "--backend", "reference",
    "--steps", "2", "--baseline-steps", "0", "--verbose",
)  # fmt: skip


def test_too_little_memory_is_found_before_it_is_used(tmp_path: Path) -> None:
    done = launch(*TRAIN, ranks=2, program=("-c", REFUSAL), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("dptrain: rank 1: ")]
    assert "cannot be shared by the ranks of a node (No space left on device)" in line
    assert line.endswith("; MPI sums the gradients instead")
    assert ", transport mpi, " in done.stdout

    done = launch(*TRAIN, "--transport", "shared", ranks=2, program=("-c", REFUSAL), cwd=tmp_path)
    assert done.returncode == 2
    [line] = dptrain_lines(done.stderr)
    assert line.startswith("dptrain: rank 1: ")
    assert line.endswith("(No space left on device); use --transport mpi")


def test_a_run_names_its_transport(tmp_path: Path) -> None:
    for options, transport in (((), "shared"), (("--strategy", "central"), "mpi")):
        done = launch(*TRAIN, *options, ranks=2, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert f", transport {transport}, " in done.stdout
    done = launch(*TRAIN, "--strategy", "central", "--transport", "shared", ranks=2, cwd=tmp_path)
    assert done.returncode == 2
    [line] = dptrain_lines(done.stderr)
    assert line.startswith("dptrain: --transport shared does not support --strategy central")
