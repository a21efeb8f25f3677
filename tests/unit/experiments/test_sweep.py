"""Sweeps over settings: their cases, their results, and what a second command does."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dptrain.cli.parsing import parse_axis, parse_part
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.experiments.case_runs import finished_run
from dptrain.experiments.ledger import Ledger
from dptrain.experiments.sweep import run_sweep
from dptrain.experiments.sweep_cases import Case, Design, list_cases, part_of
from dptrain.experiments.sweep_results import mean_over_seeds, point_result
from dptrain.experiments.sweep_tables import best_points, sweep_table
from dptrain.network import Conv2d, Dense
from dptrain.training import binding
from dptrain.training.settings import Settings, load_settings

FLAGS = {"network": "model-small", "data": "digits", "steps": "4", "batch_size": "8",
         "baseline_steps": "0"}  # fmt: skip


def make(replaced: Mapping[str, str]) -> Settings:
    return load_settings({**FLAGS, **replaced}, {})


def sweep(axes: Mapping[str, tuple[str, ...]], seeds: int, folder: Path, **options: Any) -> Any:
    design = Design(axes, range(seeds))
    return run_sweep(make, design, folder, World.single(), verbose=False, **options)


def test_cases_are_all_combinations() -> None:
    cases = list_cases(
        make, Design({"learning_rate": ("0.01", "0.1"), "width": ("0.5", "1")}, (3, 4))
    )
    assert len(cases) == len({case.slug for case in cases}) == 8
    first = cases[0]
    assert first.name == "learning rate 0.01, width 0.5, seed 3"
    assert (first.settings.learning_rate, first.settings.seed) == (0.01, 3)
    assert first.network is not None
    whole = first.settings.load_network()
    pairs = list(zip(first.network.layers, whole.layers, strict=True))
    filters = [(a.filters, b.filters) for a, b in pairs
               if isinstance(a, Conv2d) and isinstance(b, Conv2d)]  # fmt: skip
    units = [(a.units, b.units) for a, b in pairs if isinstance(a, Dense) and isinstance(b, Dense)]
    assert filters
    assert all(2 * half == full for half, full in (*filters, *units[:-1]))
    # The targets determine the last layer.
    assert units[-1] == (10, 10)


def test_a_network_brings_its_recipe() -> None:
    one, other = list_cases(lambda r: load_settings(dict(r), {}),
                            Design({"network": ("model0", "mlp-8")}, (0,)))  # fmt: skip
    assert (one.settings.data, other.settings.data) == ("digits", "irradiance")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"batchsize": ("1",)}, "--set batchsize: expected a setting.*did you mean 'batch_size'"),
        ({"seed": ("1", "2")}, "use --seeds"),
        ({"run_dir": ("a",)}, "expected a setting"),
        ({"batch_size": ("0",)}, "--batch-size is 0"),
        ({"width": ("-1",)}, "expected a number above 0"),
    ],
)
def test_wrong_axes(axes: Mapping[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        list_cases(make, Design(axes, (0,)))


def test_parts_divide_the_cases() -> None:
    cases = list_cases(make, Design({"batch_size": ("2", "4", "8")}, (0, 1)))
    parts = [part_of(cases, (i, 4)) for i in (1, 2, 3, 4)]
    assert sorted(c.slug for part in parts for c in part) == sorted(c.slug for c in cases)
    assert parse_part("2/4") == (2, 4)
    for text in ("0/4", "5/4", "x", "1"):
        with pytest.raises(UserError, match="expected I/N"):
            parse_part(text)


def test_an_axis_is_parsed() -> None:
    assert parse_axis("batch-size = 2, 4") == ("batch_size", ("2", "4"))
    with pytest.raises(UserError, match="expected NAME=VALUE"):
        parse_axis("batch-size")


@pytest.mark.more
def test_threads_that_share_a_core_are_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(binding, "own_cores", lambda: {0})
    axes = {"threads": ("2",), "learning_rate": ("0.01", "0.1")}
    perceptron = {"network": "mlp-5", "data": "irradiance?samples=64", "steps": "2"}
    run_sweep(
        lambda r: load_settings({**perceptron, **r}, {}),
        Design(axes, (0,)),
        tmp_path,
        World.single(),
    )
    assert capsys.readouterr().out.count("rank 0 computes with 2 threads on 1 core of ") == 1


@pytest.mark.more
def test_a_sweep_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {"learning_rate": ("0.01", "0.1")}
    found = sweep(axes, 3, tmp_path)
    first, second = found["results"]
    assert [r["runs"] for r in (first, second)] == [3, 3]
    assert first["low"] <= first["score"] <= first["high"]
    assert first["parameters"] == make({}).load_network().num_parameters
    scores = [
        json.loads(path.read_text())["validation_accuracy"]
        for path in tmp_path.glob("runs/learning_rate=0.1*/summary.json")
    ]
    assert second["score"] == pytest.approx(sum(scores) / 3)
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["learning_rate"] for row in rows] == ["0.01", "0.1"]
    assert float(rows[1]["score"]) == second["score"]
    assert (tmp_path / "sweep.svg").exists()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a finished case was trained again")

    monkeypatch.setattr("dptrain.experiments.case_runs.Trainer.from_settings", refuse)
    assert sweep(axes, 3, tmp_path)["results"] == found["results"]


@pytest.mark.more
def test_another_sweep_needs_another_folder(tmp_path: Path) -> None:
    sweep({"batch_size": ("4",)}, 1, tmp_path)
    with pytest.raises(UserError, match="was measured with axes"):
        sweep({"batch_size": ("8",)}, 1, tmp_path)


@pytest.mark.more
def test_parts_train_what_a_whole_sweep_trains(tmp_path: Path) -> None:
    axes = {"batch_size": ("4", "8")}
    for index in (2, 1):
        sweep(axes, 1, tmp_path, part=(index, 2))
        assert not (tmp_path / "sweep.csv").exists()
    assert [r["runs"] for r in sweep(axes, 1, tmp_path)["results"]] == [1, 1]


@pytest.mark.more
def test_a_run_that_diverges_is_a_result(tmp_path: Path) -> None:
    axes = {"learning_rate": ("0.01", "1e30")}
    good, bad = sweep(axes, 1, tmp_path)["results"]
    assert (good["runs"], good["failed"], bad["runs"], bad["failed"]) == (1, 0, 0, 1)
    (reason,) = tmp_path.glob("runs/*.failed")
    assert "training diverged" in reason.read_text()
    # A second command does not train it again.
    assert sweep(axes, 1, tmp_path)["results"] == [good, bad]


def test_only_a_finished_run_counts(tmp_path: Path) -> None:
    case = list_cases(make, Design({"batch_size": ("4",)}, (0,)))[0]
    run = tmp_path / "runs" / case.slug
    run.mkdir(parents=True)
    assert finished_run(tmp_path, case.slug) is None
    (run / "summary.json").write_text('{"stopped": true}')
    assert finished_run(tmp_path, case.slug) is None
    (run / "summary.json").write_text('{"stopped": false}')
    assert finished_run(tmp_path, case.slug) == run
    # The run of seed 10 is not one of seed 1.
    assert finished_run(tmp_path, case.slug[:-1]) is None


def test_two_processes_may_begin_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file appears after a process has seen that there is none."""
    path = tmp_path / "sweep.json"
    original = Ledger.open.__globals__["_refuse_foreign"]

    def slow(folder: Path, name: str) -> None:
        original(folder, name)
        path.write_text('{"a": 1}')

    monkeypatch.setitem(Ledger.open.__globals__, "_refuse_foreign", slow)
    Ledger.open(tmp_path, "sweep", {"a": 1})
    path.unlink()
    with pytest.raises(UserError, match="was measured with b None"):
        Ledger.open(tmp_path, "sweep", {"a": 1, "b": 2})


def test_an_interval_needs_three_seeds() -> None:
    assert mean_over_seeds([0.5, 0.7]).high == float("inf")
    found = mean_over_seeds([1.0, 2.0, 3.0])
    # Student's quantile for two degrees of freedom is 4.303.
    assert found.high - found.value == pytest.approx(4.303 / 3**0.5)


@pytest.mark.more
def test_the_table_marks_the_best_point(tmp_path: Path) -> None:
    from rich.console import Console

    axes = {"learning_rate": ("1e-9", "0.05"), "steps": ("60",)}
    sweep(axes, 1, tmp_path)
    groups = [[case] for case in list_cases(make, Design(axes, (0,)))]
    results = [point_result(tmp_path, group) for group in groups]
    [best] = best_points(results)
    assert best.point["learning_rate"] == "0.05"
    console = Console(width=120)
    with console.capture() as printed:
        console.print(sweep_table(results))
    marked = [line for line in printed.get().splitlines() if re.search(r"\* \d", line)]
    assert len(marked) == 1
    assert "0.05" in marked[0]


def test_names_of_runs_are_names_of_files() -> None:
    case = Case({"data": "npz:/some where/x.npz"}, 0, make({}), None)
    assert case.slug == "data=npz-some-where-x.npz,seed=0"
