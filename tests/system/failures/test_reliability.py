"""Runs that lose their directory or checkpoints, and damaged files, from the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dptrain.toml import read_toml
from tests.system.launch import command, environment, launch, succeed, without_notice

pytestmark = pytest.mark.more

SMALL = ("train", "--network", "mlp-5", "--data", "irradiance?samples=64", "--backend",
         "reference", "--baseline-steps", 0)  # fmt: skip


def one_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    """Return the one line on standard error of a command that ended with `code`."""
    assert done.returncode == code, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("dptrain: ")
    return line


def train(cwd: Path, *arguments: Any, steps: int = 8) -> Path:
    """Train a run in `cwd`/run with checkpoints after every second step."""
    constant = ("--schedule", "constant", "--checkpoint-every", 2)
    succeed(*SMALL, *constant, "--steps", steps, "--run-dir", "run", *arguments, cwd=cwd)
    return cwd / "run"


def test_a_run_without_its_checkpoints_is_not_begun_again(tmp_path: Path) -> None:
    run = train(tmp_path)
    (run / "summary.json").unlink()  # As if the run had been killed.
    metrics = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints")
    line = one_line(launch("train", "--resume", "run", cwd=tmp_path), 2)
    assert "saved a checkpoint of step 8, but run/checkpoints is missing" in line
    assert "start a new run with: dptrain train --config run/config.toml" in line
    (run / "checkpoints").symlink_to("/mnt/unmounted/disk")
    line = one_line(launch("train", "--resume", "run", cwd=tmp_path), 2)
    assert "cannot read run/checkpoints" in line
    assert (run / "metrics.jsonl").read_bytes() == metrics


def test_evaluate_and_predict_name_the_step_that_replaces_a_damaged_one(tmp_path: Path) -> None:
    run = train(tmp_path)
    (run / "checkpoints/step-00000008/state.safetensors").write_bytes(b"half")
    done = launch("evaluate", "run", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["step"] == 6
    assert "step-00000008 is damaged: state.safetensors has 4 bytes" in one_line(done, 0)
    assert one_line(done, 0).endswith("using the checkpoint of step 6")
    np.save(tmp_path / "new.npy", np.zeros((3, *input_shape(run)), np.float32))
    done = launch("predict", "run", "-i", "new.npy", "-o", "new.csv", cwd=tmp_path)
    assert one_line(done, 0).endswith("using the checkpoint of step 6")
    assert "step 6" in done.stdout


def input_shape(run: Path) -> tuple[int, ...]:
    from dptrain.network import get_network

    return get_network(read_toml(run / "config.toml")["network"]).input_shape


@pytest.mark.parametrize("how", ["moved", "deleted"])
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_directory_that_is_lost_during_training_ends_the_job(
    tmp_path: Path, how: str, ranks: int
) -> None:
    endless = (*SMALL, "--schedule", "constant", "--steps", 10**7, "--log-every", 1)
    line = command(*map(str, endless), "--run-dir", "run", "--checkpoint-every", "20", ranks=ranks)
    run, moved = tmp_path / "run", tmp_path / "moved"
    with subprocess.Popen(
        line,
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 300  # Kernels may have to be compiled.
        while not list(run.glob("checkpoints/step-*")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        run.rename(moved)
        if how == "deleted":
            shutil.rmtree(moved)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 1, errors
    lines = without_notice(errors).splitlines()
    (line,) = (line for line in lines if line.startswith("dptrain: "))
    assert "Traceback" not in errors
    assert not run.exists()
    if how == "deleted":
        # The job may notice the move before the deletion.
        assert re.search(r"was (deleted or )?moved (to .* )?during training", line)
        assert not moved.exists()
        return
    assert f"was moved to {moved} during training" in line
    step = max(int(path.name[5:]) for path in moved.glob("checkpoints/step-*"))
    text = succeed("train", "--resume", moved, "--steps", step + 2)
    assert f"resumed after step {step}" in text
    assert json.loads(succeed("evaluate", moved, "--json"))["step"] == step + 2


def test_a_resumed_run_uses_the_cores_of_its_machine(tmp_path: Path) -> None:
    run = train(tmp_path)
    assert "threads" not in read_toml(run / "config.toml")
    cores = len(os.sched_getaffinity(0))
    text = succeed("train", "--resume", "run", "--steps", 10, cwd=tmp_path)
    assert re.search(rf"\b{cores} threads?\b", text)
    text = succeed("train", "--resume", "run", "--steps", 12, "--threads", 1, cwd=tmp_path)
    assert re.search(r"\b1 thread\b", text)


def test_a_cosine_schedule_begins_anew_with_further_steps(tmp_path: Path) -> None:
    cosine = (*SMALL, "--schedule", "cosine", "--log-every", 1, "--run-dir", "run")
    succeed(*cosine, "--steps", 4, cwd=tmp_path)
    text = succeed("train", "--resume", "run", cwd=tmp_path)
    assert "continue with more --epochs or --steps" in text
    longer = ("--steps", 8, "--stop-after", 6)
    stopped = launch("train", "--resume", "run", *longer, cwd=tmp_path)
    assert stopped.returncode == 75
    assert "changed settings: steps 8 (so far 4)\n" in stopped.stdout
    assert "the cosine schedule begins anew with step 5\n" in stopped.stdout
    succeed("train", "--resume", "run", cwd=tmp_path)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    rates = {r["step"]: r["learning_rate"] for r in records if "learning_rate" in r}
    assert [rates[step] for step in range(5, 9)] == [rates[step] for step in range(1, 5)]


def test_parameters_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    sgd = ("--optimizer", "sgd", "--momentum", 0, "--backend", "numba")
    run = train(tmp_path, *sgd, steps=2)
    # The loss before the update is finite, the updated parameters are not.
    flags = (
        "--learning-rate", "1e38", "--weight-decay", "1e6", "--checkpoint-every", 1,
        "--evaluate-every", 0,
    )  # fmt: skip
    line = one_line(launch("train", "--resume", "run", "--steps", 4, *flags, cwd=tmp_path), 2)
    assert "after step 3 " in line
    assert "are not finite, so no checkpoint was saved" in line
    assert "the newest checkpoint is that of step 2" in line
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]


DAMAGE = {
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "brackets": lambda path: path.write_text("[" * 200_000 + "\n"),
    "digits": lambda path: path.write_text('{"step": ' + "9" * 5000 + "}\n"),
    "text": lambda path: path.write_text('{"step": "x"}\n'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_line(tmp_path: Path, damage: str) -> None:
    run = train(tmp_path, "--keep-checkpoints", 1, steps=2)
    np.save(tmp_path / "new.npy", np.zeros((3, *input_shape(run)), np.float32))
    commands = {
        "resume": ("train", "--resume", "run", "--steps", 4),
        "evaluate": ("evaluate", "run"),
        "predict": ("predict", "run", "-i", "new.npy", "-o", "new.csv"),
    }
    shutil.copytree(run, tmp_path / "whole")
    for file, affected in {
        "checkpoints/step-00000002/manifest.json": list(commands),
        "config.toml": ["resume"],
        "metrics.jsonl": ["resume"],
    }.items():
        for name in affected:
            shutil.rmtree(run)
            shutil.copytree(tmp_path / "whole", run)
            DAMAGE[damage](run / file)
            line = one_line(launch(*commands[name], cwd=tmp_path), 2)
            assert len(line) < 500
            assert line.isprintable()
