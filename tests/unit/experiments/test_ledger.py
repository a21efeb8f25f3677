"""What an interrupted experiment goes on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from dptrain.errors import UserError
from dptrain.experiments.ledger import Ledger, read_ledger

QUESTION = {"networks": ("model0", "cifar"), "seconds_per_case": 3.0, "memory": None}


def test_records_come_back_in_order(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "new", "bench", QUESTION)
    for key, value in (("b", 1.5), ("a", float("inf"))):
        ledger.append(key, {"value": value})
    again = Ledger.open(tmp_path / "new", "bench", QUESTION)
    assert list(again.records) == ["b", "a"]
    assert [record["value"] for record in again.records.values()] == [1.5, float("inf")]
    assert again.records == ledger.records


def test_a_record_torn_by_a_crash_is_made_again(tmp_path: Path) -> None:
    Ledger.open(tmp_path, "bench", QUESTION).append("a", {"value": 1})
    with (tmp_path / "bench.jsonl").open("a") as file:
        file.write('{"case": "b", "val')
    ledger = Ledger.open(tmp_path, "bench", QUESTION)
    assert list(ledger.records) == ["a"]
    ledger.append("b", {"value": 2})
    assert list(Ledger.open(tmp_path, "bench", QUESTION).records) == ["a", "b"]


def test_other_settings_are_refused_in_one_line(tmp_path: Path) -> None:
    Ledger.open(tmp_path, "bench", QUESTION)
    with pytest.raises(UserError) as caught:
        Ledger.open(tmp_path, "bench", {**QUESTION, "networks": ("model0",)})
    message = str(caught.value)
    assert "was measured with networks model0,cifar, but this command has model0;" in message
    assert "--output" in message
    assert "\n" not in message
    with pytest.raises(UserError, match="measured with memory None, but this command has 5;"):
        Ledger.open(tmp_path, "bench", {**QUESTION, "memory": 5})


def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "bench.csv").write_text("mine")
    with pytest.raises(UserError, match=r"not empty and contains no bench.json.* --output"):
        Ledger.open(tmp_path, "bench", QUESTION)
    assert [path.name for path in tmp_path.iterdir()] == ["bench.csv"]


def test_a_file_that_is_no_question_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text("[1]")
    with pytest.raises(UserError, match="restore it, or choose another --output"):
        Ledger.open(tmp_path, "bench", QUESTION)
    repeat = r"restore it, or repeat its `dptrain bench` command with another --output"
    with pytest.raises(UserError, match=repeat):
        read_ledger(tmp_path, "bench", dict, "benchmark", "dptrain bench")
