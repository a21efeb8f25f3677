"""Data sets as people have them train without a further flag, and the model can be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.system.launch import launch, succeed_together
from tests.system.own_data import DATA_SETS, OwnData
from tests.tiers import tiered

QUICK = ("umlauts and spaces", "table, 3 columns, text")
LEARNED = {
    "table, 3 columns, text": 0.8,
    "table, whole numbers": 0.6,
    "table, one value of 20 columns": 0.9,
    "npz, one value": 0.9,
    "npz, text labels": 0.8,
    "HDF5, one value, groups": 0.9,
    "npy, three values": 0.9,
}
"""Data sets of rows, and the least accuracy or R² after the default number of epochs."""


def train(data: OwnData, folder: Path, *more: str) -> dict[str, Any]:
    """Train on a data set; the summary. The first lines say what was done."""
    done = launch("train", "--data", data.spec, *more, "--run-dir", "run", cwd=folder)
    printed = done.stdout
    assert done.returncode == 0, printed + done.stderr
    for words in data.says:
        assert words in printed, printed
    found: dict[str, Any] = json.loads((folder / "run/summary.json").read_text())
    return found


@pytest.mark.parametrize("name", tiered(DATA_SETS, QUICK))
def test_data_needs_no_flag(name: str, tmp_path: Path) -> None:
    data = DATA_SETS[name](tmp_path)
    summary = train(data, tmp_path, "--epochs", "2")
    result = {"accuracy": "test_accuracy", "labels": "test_label_accuracy", "values": "test_r2"}
    assert summary[result[data.result]] is not None
    # One process: starting takes longer than all commands.
    succeed_together(
        ["predict", "run", data.sample, "--output", "predicted.csv"],
        ["evaluate", "run", "--output", "results"],
        ["report", "run"],
        ranks=0, cwd=tmp_path,
    )  # fmt: skip
    header, sample = (tmp_path / "predicted.csv").read_text().splitlines()
    assert ("class" in header.split(",")) == (data.result == "accuracy")
    assert len(sample) > 3
    metrics = json.loads((tmp_path / "results/metrics.json").read_text())
    assert metrics["samples"] > 0
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in page
    assert ('id="labels"' in page) == (data.result == "labels")


@pytest.mark.more
@pytest.mark.parametrize("name", LEARNED)
def test_rows_of_any_scale_are_learned(name: str, tmp_path: Path) -> None:
    data = DATA_SETS[name](tmp_path)
    summary = train(data, tmp_path)
    key = {"accuracy": "test_accuracy", "values": "test_r2"}[data.result]
    assert summary[key] > LEARNED[name]


def test_a_network_of_the_user_gets_numbers_as_they_are(tmp_path: Path) -> None:
    data = DATA_SETS["npz, one value"](tmp_path)
    (tmp_path / "own.toml").write_text(
        'input = [12]\nloss = "mean_squared_error"\n\n[[layer]]\ntype = "dense"\nunits = 1\n'
    )
    done = launch(
        "train", "--data", data.spec, "--network", "own.toml", "--epochs", "1", "--learning-rate",
        "1e-12", cwd=tmp_path,
    )  # fmt: skip
    assert "are taken as they are" in done.stdout, done.stdout + done.stderr
