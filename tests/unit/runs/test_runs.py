"""`dptrain runs` and `dptrain.list_runs`: finding, selecting, comparing, labelling, citing."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import dptrain
from dptrain.cli.main import cli
from dptrain.errors import UserError
from dptrain.runs.comparison import Comparison
from dptrain.runs.labels import Labels, parse_tags
from dptrain.runs.records import find_runs, read_record
from dptrain.runs.selection import parse_condition
from dptrain.runs.tables import comparison_tables
from dptrain.training.persistence.rundir import RunDirectory

TRAINING: dict[str, Any] = {"progress": False, "baseline_steps": 0, "steps": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of `model0` at different learning rates, and one of a perceptron."""
    folder = tmp_path_factory.mktemp("runs")
    for rate in (0.01, 0.03):
        with dptrain.Trainer(
            "model0", "digits", learning_rate=rate, run_dir=folder / f"rate-{rate}", tags="study",
            **TRAINING,
        ) as trainer:  # fmt: skip
            trainer.fit()
    data = "irradiance?samples=100"
    with dptrain.Trainer(
        "mlp-8", data, run_dir=folder / "deeper" / "regression", note="Figure 3", **TRAINING
    ) as trainer:
        trainer.fit()
    return folder


def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["runs", *map(str, arguments)])


def test_records_have_settings_and_results(folder: Path) -> None:
    third, first, second = sorted(dptrain.list_runs(folder), key=lambda record: record["run"])
    assert [r["learning_rate"] for r in (first, second)] == [0.01, 0.03]
    assert first["state"] == "ended"
    assert first["steps"] == first["planned_steps"] == 3
    summary = json.loads((folder / "rate-0.01" / "summary.json").read_text())
    assert first["test_accuracy"] == summary["test_accuracy"] > 0
    assert (first["tags"], third["tags"], third["note"]) == ("study", "", "Figure 3")
    assert third["test_accuracy"] is None
    assert third["run"] == str(folder / "deeper" / "regression")


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ((), 3),
        (("network=model0",), 2),
        (("network!=model0",), 1),
        (("learning_rate>0.01", "learning-rate<=0.03", "network = model0"), 1),
        (("data~irrad",), 1),
        (("test_accuracy>=0",), 2),
        (("nesterov=off",), 3),
        (("network=model7",), 0),
    ],
)
def test_selection(folder: Path, where: tuple[str, ...], count: int) -> None:
    assert len(dptrain.list_runs(folder, where=where)) == count


def test_selection_by_tag(folder: Path) -> None:
    assert len(dptrain.list_runs(folder, tags=["study"])) == 2
    assert not dptrain.list_runs(folder, tags=["study", "final"])


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("network", "is not a condition; expected NAME=VALUE"),
        ("netwrk=model0", "no value 'netwrk'; did you mean 'network'"),
        ("batch_size>many", "batch_size is a number; 'many' is not"),
    ],
)
def test_wrong_conditions(folder: Path, condition: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        dptrain.list_runs(folder, where=[condition])


def test_a_condition_on_a_missing_value() -> None:
    assert parse_condition("test_loss!=1", ())({"test_loss": None})
    assert not parse_condition("test_loss<1", ())({"test_loss": None})


def test_states(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "copy"
    run.mkdir()
    for name in ("config.toml", "spec.json"):
        (run / name).write_bytes((folder / "rate-0.01" / name).read_bytes())
    assert read_record(run)["state"] == "unfinished"
    (run / "failure.json").write_text('{"message": "training diverged"}')
    assert read_record(run)["state"] == "diverged"
    (run / "failure.json").unlink()
    (run / "summary.json").write_text('{"stopped": true}')
    assert read_record(run)["state"] == "stopped"
    (run / "summary.json").write_text('{"stopped": false}')
    assert read_record(run)["state"] == "ended"
    (run / "summary.json").write_text("{")
    assert read_record(run)["state"] == "unfinished"


def test_each_run_is_found_once(folder: Path) -> None:
    assert len(find_runs([folder, folder / "rate-0.01"])) == 3
    with pytest.raises(UserError, match="is not a folder"):
        find_runs([folder / "none"])


def test_comparison_shows_what_differs(folder: Path) -> None:
    runs = [str(folder / f"rate-{rate}") for rate in (0.01, 0.03)]
    found = Comparison.of([read_record(Path(run)) for run in runs])
    assert found.runs == tuple(runs)
    assert found.settings == {"learning_rate": (0.01, 0.03)}
    assert set(found.results) >= {"steps", "test_accuracy", "test_loss", "step_ms"}
    printed = command("compare", *runs)
    assert printed.exit_code == 0
    assert "learning rate  0.01" in printed.output
    assert json.loads(command("compare", *runs, "--json").output)["runs"] == runs


def test_what_a_run_lacks_is_no_empty_cell() -> None:
    found = Comparison(
        ("a", "b"), {"weight_decay": (0.5, None), "freeze": ("", "conv1")}, {"test_loss": (None, 1)}
    )
    rows = [row for table in comparison_tables(found) for row in table.texts]
    assert rows == [
        ["weight decay", "0.5", "not set"], ["freeze", "not set", "conv1"],
        ["test loss", "none", "1"],
    ]  # fmt: skip


def test_one_run_is_no_comparison(folder: Path) -> None:
    failed = command("compare", folder / "rate-0.01")
    assert "expected at least 2 runs to compare, found 1" in str(failed.exception)


def test_lists_as_table_csv_and_json(folder: Path) -> None:
    table = command("list", folder, "--sort", "test_loss", "--columns", "momentum").output
    assert table.startswith("3 runs")
    assert "momentum" in table.splitlines()[2]
    rows = list(csv.DictReader(io.StringIO(command("list", folder, "--csv").output)))
    assert [row["started"] for row in rows] == sorted(row["started"] for row in rows)
    options = ("--json", "--sort", "network", "--reverse", "--last", "1")
    last = json.loads(command("list", folder, *options).output)
    assert [row["network"] for row in last] == ["mlp-8"]
    refused = command("list", folder, "--csv", "--json")
    assert str(refused.exception) == "--csv and --json are both given; use one of them"


def test_labels(folder: Path) -> None:
    run = folder / "rate-0.03"
    done = command("label", run, "--add", "final,best", "--note", "Table 1")
    assert done.output == "tags  study, final, best\nnote  Table 1\n"
    command("label", run, "--remove", "best,final")
    assert Labels.read(run) == Labels(("study",), "Table 1")
    failed = command("label", run, "--remove", "other")
    assert "there is no tag 'other' to remove" in str(failed.exception)
    assert "is not a run directory" in str(command("label", folder).exception)


def test_a_resumed_run_keeps_its_labels(folder: Path) -> None:
    run = folder / "rate-0.01"
    with dptrain.Trainer.resume(run, tags="longer", progress=False):
        pass
    assert Labels.read(run) == Labels(("study", "longer"))
    with dptrain.Trainer.resume(run, progress=False):
        assert read_record(run)["tags"] == "study,longer"


def test_a_damaged_file_of_labels_is_named(tmp_path: Path) -> None:
    (tmp_path / "labels.toml").write_text("tags = 3")
    with pytest.raises(UserError, match=r"labels.toml: expected tags"):
        Labels.read(tmp_path)


def test_tags_have_no_spaces() -> None:
    with pytest.raises(UserError, match="'a b' is not a tag"):
        parse_tags(["a b"])


def test_citation(folder: Path) -> None:
    run = folder / "deeper" / "regression"
    found = json.loads(command("cite", run, "--json").output)
    assert found["dptrain"] == dptrain.__version__
    assert found["seed"] == 0
    assert found["SHA-256 of the data"] == read_record(run)["data_digest"]
    assert "test accuracy" not in found


def test_a_run_that_trains_is_running(folder: Path, tmp_path: Path) -> None:
    """Another process holds the lock: a process sees its own locks as free."""
    import subprocess
    import sys

    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.toml", "spec.json"):
        (run / name).write_bytes((folder / "rate-0.01" / name).read_bytes())
    program = (
        "import sys; from pathlib import Path; from dptrain.runs.records import read_record; "
        "print(read_record(Path(sys.argv[1]))['state'])"
    )
    holder = RunDirectory.open(run)
    holder.hold()
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, str(run)], capture_output=True, text=True, check=True
        )
    finally:
        holder.release()
    assert done.stdout.strip() == "running"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["."], "{folder} has no runs; dptrain train makes one"),
        ([".", "--where", "network=zz"], "no run in {folder} fulfils all conditions"),
        ([".", "--tag", "final"], "no run in {folder} fulfils all conditions"),
    ],
)
def test_a_list_without_runs_is_one_line(arguments: list[str], line: str, tmp_path: Path) -> None:
    found = CliRunner().invoke(cli, ["runs", "list", str(tmp_path), *arguments[1:]])
    assert found.exit_code == 0
    assert found.output.startswith(line.format(folder=tmp_path))
    assert found.output.count("\n") == 1
