"""Training with validation data on several ranks, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.system.launch import launch, succeed

pytestmark = pytest.mark.more

TRAIN = (
    "train", "--network", "model-small", "--epochs", 5, "--learning-rate", 0.3, "--shards", 4,
    "--validation", 0.3, "--best-by", "loss", "--patience", 2, "--baseline-steps", 0,
)  # fmt: skip


def outcome(run: Path) -> tuple[dict[str, Any], str, bytes]:
    """Results, name and content of the best checkpoint."""
    summary = json.loads((run / "summary.json").read_text())
    names = ("selected_step", "validation_loss", "test_loss", "test_accuracy", "out_of_patience")
    (best,) = (run / "best").iterdir()
    content = (best / "state.safetensors").read_bytes()
    return {name: summary[name] for name in names}, best.name, content


def test_ranks_and_resumed_runs_select_the_same_epoch(tmp_path: Path) -> None:
    for ranks in (0, 2):
        succeed(*TRAIN, "--run-dir", f"run{ranks}", ranks=ranks, cwd=tmp_path)
    expected = outcome(tmp_path / "run0")
    assert outcome(tmp_path / "run2") == expected
    # One epoch on 2 ranks, the others on 1; a cosine schedule needs the same number of steps.
    stopped = launch(*TRAIN, "--run-dir", "part", "--until-accuracy", 1e-6, ranks=2, cwd=tmp_path)
    assert stopped.returncode == 0, stopped.stderr
    assert json.loads((tmp_path / "part" / "summary.json").read_text())["steps"] == 32
    text = succeed("train", "--resume", "part", "--until-accuracy", 1, ranks=0, cwd=tmp_path)
    assert "resumed after step 32" in text
    assert outcome(tmp_path / "part") == expected


def test_results_of_classes_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    succeed(*TRAIN, "--run-dir", "run", ranks=2, cwd=tmp_path)
    for ranks in (0, 3):
        succeed("evaluate", "run", "-o", f"out{ranks}", ranks=ranks, cwd=tmp_path)
    for name in ("metrics.json", "confusion.csv", "confusion.svg"):
        assert (tmp_path / "out0" / name).read_bytes() == (tmp_path / "out3" / name).read_bytes()
    found = json.loads((tmp_path / "out0" / "metrics.json").read_text())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["loss"] == summary["test_loss"]
    assert found["step"] == summary["selected_step"]
    right = sum(row[index] for index, row in enumerate(found["confusion"]))
    assert right / 360 == found["accuracy"] == summary["test_accuracy"]


def test_training_without_validation_data_names_the_flag(tmp_path: Path) -> None:
    given = ("train", "--data", "synthetic?samples=64", "--patience", 2, "--run-dir", "run")
    done = launch(*given, ranks=2, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("dptrain: "))
    assert line == "dptrain: --patience needs validation data, but synthetic has none; try " \
        "--validation 0.1"  # fmt: skip
    assert not (tmp_path / "run").exists()
