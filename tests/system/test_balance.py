"""Ranks with settings of their own, started as one job: threads, backends, and shares."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dptrain.training.persistence.persistence import load_checkpoint
from tests.system.launch import SCRIPTS, command, environment, launch, succeed

pytestmark = pytest.mark.more

SMALL = (
    "train", "--network", "mlp-5", "--data", "irradiance?samples=200", "--batch-size", 16,
    "--schedule", "constant", "--baseline-steps", 0, "--seed", 2,
)  # fmt: skip


def start_together(*ranks: tuple[Any, ...], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run one job in which each rank has arguments of its own."""
    mpirun = shutil.which("mpirun", path=os.pathsep.join([str(SCRIPTS), os.environ["PATH"]]))
    assert mpirun is not None, "no mpirun next to Python or on PATH"
    line = [mpirun]
    for number, arguments in enumerate(ranks):
        line += [*([":"] if number else []), "-n", "1", *command(*map(str, arguments))]
    return subprocess.run(
        line, capture_output=True, text=True, check=False, timeout=300, cwd=cwd, env=environment()
    )


def test_different_backends_train_and_continue_as_one_rank(tmp_path: Path) -> None:
    run = (*SMALL, "--precision", "fp32")
    mixed = (
        *run,
        "--balance",
        "2,1",
        "--steps",
        12,
        "--run-dir",
        "mixed",
        "--verbose",
        "--threads",
    )
    done = start_together(
        (*mixed, 1, "--backend", "reference"), (*mixed, 2, "--backend", "numba"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reference fp32 (rank 0), numba fp32 (rank 1)" in done.stdout
    assert "2 ranks (1 thread, 2 threads), mirrored, transport host" in done.stdout
    assert "shares of a minibatch: rank 0: 69%, rank 1: 31%" in done.stdout
    ranks = json.loads((tmp_path / "mixed/spec.json").read_text())["ranks"]
    assert [(rank["backend"], rank["threads"]) for rank in ranks] == [
        ("reference", 1), ("numba", 2),
    ]  # fmt: skip
    again = ("train", "--resume", "mixed", "--steps", 30, "--balance", "measured")
    done = start_together((*again, "--backend", "numba"), (*again, "--backend", "reference"),
                          cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    succeed(*run, "--steps", 30, "--run-dir", "one", cwd=tmp_path)
    found, expected = (load_checkpoint(tmp_path / name, 30).arrays for name in ("mixed", "one"))
    for name, values in expected.items():
        # Errors of rounding of 30 steps; see test_resume_at_another_number_of_ranks.
        bound = 2 * 30 * 2.0**-24 * np.linalg.norm(values)
        assert np.linalg.norm(found[name] - values) <= max(bound, 1e-6), name
    text = succeed("evaluate", "mixed", cwd=tmp_path)
    assert "mlp-5" in text
    succeed("report", "mixed", cwd=tmp_path)
    lines = (tmp_path / "mixed/metrics.jsonl").read_text().splitlines()
    shares = [json.loads(line)["shares"] for line in lines if "shares" in line]
    assert shares[0] == [11 / 16, 5 / 16]


def test_ranks_of_equal_speed_keep_shares_on_a_busy_machine(tmp_path: Path) -> None:
    """Four other programs compute all the time."""
    run = ("train", "--network", "model0", "--shards", 16, "--threads", 1, "--seed", 2,
           "--schedule", "constant", "--baseline-steps", 0, "--steps", 300)  # fmt: skip
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        busy = (*run, "--balance", "measured", "--run-dir", "busy")
        done = start_together(busy, busy, cwd=tmp_path)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    records = (tmp_path / "busy/metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in records]
    starts = [(line["step"], line["shares"]) for line in lines if "shares" in line]
    assert min(min(shares) for _, shares in starts) > 0
    steps = np.diff([step for step, _ in starts], append=300)
    mean = np.average([shares for _, shares in starts], axis=0, weights=steps)
    assert mean.min() > 0.3, starts
    succeed(*run, "--run-dir", "one", cwd=tmp_path)
    found, expected = (load_checkpoint(tmp_path / name, 300).arrays for name in ("busy", "one"))
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    cases = {
        ("--balance", "1,2,3"): "--balance 1,2,3 has 3 shares, but the number of ranks is 2; use",
        ("--balance", "fast"): "balance is 'fast'; expected off, measured, or one share for each",
        ("--balance", "0,0"): "balance is '0,0'; expected off, measured, or one share for each",
    }
    for flags, message in cases.items():
        done = launch(*SMALL, *flags, ranks=2, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
    ranks = [(*SMALL, "--balance", "measured", *flags)
             for flags in (("--backend", "reference"), ("--backend", "numba"))]  # fmt: skip
    done = start_together(*ranks, cwd=tmp_path)
    assert done.returncode == 2
    assert "rank 0 has float64 parameters (backend reference, fp64), but rank 1" in done.stderr
    profile = launch("profile", "--steps", 3, "--balance", "1,1", ranks=2, cwd=tmp_path)
    assert profile.returncode == 2
    assert "this command has equal shares for all ranks; remove it" in profile.stderr
