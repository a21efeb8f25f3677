"""A closed pipe or a full disk on standard output costs text and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import tiered

TRAIN = ("train", "--network", "mlp-5", "--data", "irradiance?samples=64", "--backend",
         "reference", "--baseline-steps", "0", "--steps", "6", "--checkpoint-every", "2",
         "--schedule", "constant")  # fmt: skip


def start(*arguments: str, cwd: Path, output: int, errors: int) -> tuple[int, str]:
    """Run `dptrain` with these descriptors; return its exit code and standard error."""
    done = subprocess.run(
        [sys.executable, "-u", "-m", "dptrain", *arguments],
        cwd=cwd,
        stdout=output,
        stderr=errors,
        text=True,
    )
    return done.returncode, done.stderr or ""


def closed_pipe() -> int:
    """Return the writing end of a pipe without a reader."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def assert_complete(run: Path, steps: int) -> None:
    assert json.loads((run / "summary.json").read_text())["steps"] == steps
    assert (run / f"checkpoints/step-{steps:08d}").is_dir()
    assert (run / "metrics.jsonl").stat().st_size


@pytest.mark.more
def test_a_closed_pipe_does_not_end_training(tmp_path: Path) -> None:
    pipe, run = closed_pipe(), tmp_path / "run"
    code, errors = start(
        *TRAIN, "--run-dir", "run", cwd=tmp_path, output=pipe, errors=subprocess.PIPE
    )
    assert (code, errors.count("\n")) == (0, 1), errors
    assert "cannot write standard output: Broken pipe; continuing without it" in errors
    assert_complete(run, 6)
    # Standard error may be closed too. After a resume the summary describes the resumed run.
    code, _ = start(
        "train", "--resume", "run", "--steps", "9", cwd=tmp_path, output=pipe, errors=pipe
    )
    assert code == 0
    assert_complete(run, 9)
    os.close(pipe)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_on_standard_output_does_not_end_training(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    code, errors = start(
        *TRAIN, "--run-dir", "run", cwd=tmp_path, output=full, errors=subprocess.PIPE
    )
    os.close(full)
    assert (code, errors.count("\n")) == (2, 1), errors
    assert "cannot write standard output: No space left on device" in errors
    assert_complete(tmp_path / "run", 6)


@pytest.mark.more
def test_a_reader_that_ends_early_is_no_failure(tmp_path: Path) -> None:
    pipe = closed_pipe()
    code, errors = start("describe", cwd=tmp_path, output=pipe, errors=subprocess.PIPE)
    os.close(pipe)
    assert code == 0
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "closed",
    tiered(["<&-", ">&-", "2>&-", "<&- >&- 2>&-"], ["<&- >&- 2>&-"]),
)
def test_closed_standard_streams_do_not_end_training(tmp_path: Path, closed: str) -> None:
    program = [sys.executable, "-m", "dptrain", *TRAIN, "--run-dir", "run"]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {closed}', "bash", *program], cwd=tmp_path, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert_complete(tmp_path / "run", 6)


@pytest.mark.more
def test_a_locale_without_unicode_loses_characters_only(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dptrain", "describe", "model0"],
        cwd=tmp_path, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"conv1" in done.stdout
