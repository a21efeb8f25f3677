"""Pages of sweeps: the numbers of their files, whatever these are."""

from __future__ import annotations

import csv
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dptrain.cli.main import run
from dptrain.errors import UserError
from dptrain.experiments.ledger import write_csv
from dptrain.experiments.sweep_cases import Design
from dptrain.experiments.sweep_results import MEASURED, PointResult, read_results, record
from dptrain.experiments.sweep_tables import best_points
from dptrain.measure.statistics import Estimate
from dptrain.report.files import write_comparison, write_report
from dptrain.report.studies.experiment_page import (
    Sweep,
    best_sentence,
    experiment_page,
    read_experiment,
)
from tests.unit.report.test_files import HOSTILE, Reader

FACTS = {"network": "net", "data": "digits", "ranks": 2, "processor": "CPU", "cores": 2,
         "dptrain": "1.0", "flip": False}  # fmt: skip


def random_point(random_: random.Random, point: dict[str, str], scored: str) -> PointResult:
    """Return the results of a point; some have no score, no interval or no times."""
    runs, failed = random_.randint(0, 5), random_.choice((0, 0, 1))
    value, half = random_.random(), random_.random()
    interval = (value - half, value + half) if runs > 2 else (-math.inf, math.inf)
    numbers: dict[str, Any] = {
        name: random_.randint(1, 10**9) if name in ("memory_bytes", "parameters")
        else random_.uniform(0.1, 10)
        for name in MEASURED
        if runs and random_.random() < 0.9
    }  # fmt: skip
    return PointResult(
        point, runs, failed, Estimate(value, *interval, runs) if runs else None,
        scored if runs else "", why=HOSTILE if failed else "", **numbers,
    )  # fmt: skip


def random_sweep(random_: random.Random) -> Sweep:
    names = random_.sample(
        ["learning_rate", "batch_size", "network", "data", "stride", "first-pool"],
        random_.randint(1, 3),
    )
    axes = {name: random_.sample([HOSTILE, r"$\x{$", "0.1", "1", "16"], random_.randint(1, 3))
            for name in names}  # fmt: skip
    design = Design(axes, list(range(random_.randint(1, 5))), *random_.choices((True, False), k=2))
    scored = random_.choice(("validation accuracy", "test accuracy", "test loss"))
    points = tuple(random_point(random_, point, scored) for point in design.points())
    return Sweep({**FACTS, **design.facts()}, points)


def write_sweep(found: Sweep, folder: Path) -> None:
    (folder / "sweep.json").write_text(json.dumps(found.settings))
    write_csv(
        folder / "sweep.csv",
        [record(point, list(found.settings["axes"])) for point in found.points],
    )


def test_a_sweep_is_read_as_it_was_written(tmp_path: Path) -> None:
    for seed in range(200):
        found = random_sweep(random.Random(seed))
        write_sweep(found, tmp_path)
        facts, points = read_results(tmp_path)
        assert facts == found.settings, seed
        assert tuple(points) == found.points, seed


@pytest.mark.parametrize("seed", range(6))
def test_each_number_of_the_page_is_in_the_file(seed: int, tmp_path: Path) -> None:
    found = random_sweep(random.Random(seed))
    write_sweep(found, tmp_path)
    page = Reader(write_report(tmp_path))
    rows = list(csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines()))
    numbers = [attributes for tag, attributes in page.elements if tag == "data"]
    for attributes in numbers:
        row, _, name = str(attributes["data-from"]).partition(".")
        value, written = float(str(attributes["value"])), float(rows[int(row)][name])
        # An interval of an accuracy ends at 0% and 100%.
        assert value == written or (name in ("low", "high") and value in (0.0, 1.0))
    count = sum(bool(text) for row in rows for name, text in row.items()
                if name in ("score", "step_ms", "training_s", "memory_bytes", "runs"))  # fmt: skip
    assert len(numbers) >= count
    assert not [tag for tag, _ in page.elements if tag == "script"]


def test_the_headline_is_the_best_point() -> None:
    for seed in range(200):
        found = random_sweep(random.Random(seed))
        scores = [p.score.value for p in found.points if p.score is not None]
        found_best = best_points(found.points)
        head = best_sentence(found_best) if found_best else "No run has a score."
        if not scores:
            assert head == "No run has a score."
            continue
        scored = next(p.scored for p in found.points if p.scored)
        best = max(scores) if scored.endswith("accuracy") else min(scores)
        [point] = [p for p in found.points if p.score is not None and p.score.value == best]
        assert all(value in head for value in point.point.values()), seed


def test_equal_scores_are_all_the_best() -> None:
    for seed in range(200):
        found = random_sweep(random.Random(seed))
        scored = [p for p in found.points if p.score is not None]
        points = [replace(p, score=scored[0].score) for p in scored]
        assert best_points(points) == points
        if not 1 < len(points) < 4:
            continue
        head = best_sentence(points)
        assert "equally with " in head
        assert all(value in head for point in points for value in point.point.values()), seed


def test_a_sweep_of_an_earlier_version_has_a_page(tmp_path: Path) -> None:
    """Its file has fewer columns; what it does not have is shown as missing."""
    found = random_sweep(random.Random(1))
    write_sweep(found, tmp_path)
    added = {"why", "step_q1_ms", "step_q3_ms", *(n for n in MEASURED if n.startswith("conv_"))}
    rows = list(csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines()))
    former = [{name: text for name, text in row.items() if name not in added} for row in rows]
    write_csv(tmp_path / "sweep.csv", former)
    points = read_results(tmp_path)[1]
    assert [point.score for point in points] == [point.score for point in found.points]
    assert all(getattr(point, name) is None for point in points for name in added - {"why"})
    write_report(tmp_path)


def test_changes_of_a_network_have_a_page(tmp_path: Path) -> None:
    def point(values: dict[str, str], step_ms: float) -> PointResult:
        score = Estimate(0.5, -math.inf, math.inf, 1)
        return PointResult(values, 1, 0, score, "test accuracy", step_ms=step_ms,
                           step_q1_ms=step_ms * 0.9, step_q3_ms=step_ms * 1.1)  # fmt: skip

    refused = PointResult({"kernel": "99"}, 0, 0, None, "", why="kernel 99 is too large")
    points = (point({}, 2.0), point({"kernel": "3"}, 1.0), refused)
    design = Design({"kernel": ("3", "99")}, (0,), one_at_a_time=True, has_unchanged=True)
    write_sweep(Sweep({**FACTS, **design.facts()}, points), tmp_path)
    assert tuple(read_results(tmp_path)[1]) == points
    page = Reader(write_report(tmp_path))
    assert "kernel 99: kernel 99 is too large" in page.text
    assert "shortest step takes 1.00 ms, with kernel 3" in page.text
    assert "unchanged" in page.text
    assert (tmp_path / "plots" / "accuracy-by-time.png").exists()


def test_what_has_no_page_names_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = {}
    for name in ("sweep", "variants", "bench"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"{name}.json").write_text(json.dumps(FACTS))
        assert run(["report", str(folder)], is_rank_zero=True) == 2
        messages[name] = capsys.readouterr().err
        assert len(messages[name].splitlines()) == 1
    assert "repeat its `dptrain study` command" in messages["sweep"]
    assert "repeat its `dptrain study variants` command" in messages["variants"]
    assert "`dptrain bench`" in messages["bench"]
    assert read_experiment(tmp_path) is None


def test_damaged_files_are_one_error(tmp_path: Path) -> None:
    found = random_sweep(random.Random(1))
    write_sweep(found, tmp_path)
    table = (tmp_path / "sweep.csv").read_text()
    for text in ("", "a,b\n1,2\n", table.replace("runs", "walks"), table + "x\n"):
        (tmp_path / "sweep.csv").write_text(text)
        with pytest.raises(UserError, match=r"sweep\.csv"):
            write_report(tmp_path)
    (tmp_path / "sweep.csv").write_text(table)
    for settings in ("[]", "{", json.dumps({"axes": 5}), json.dumps({"axes": {}, "ranks": "2"})):
        (tmp_path / "sweep.json").write_text(settings)
        with pytest.raises(UserError, match="sweep"):
            write_report(tmp_path)


def test_sweeps_are_not_compared(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        write_sweep(random_sweep(random.Random(1)), folder)
    with pytest.raises(UserError, match="cannot be compared on a page"):
        write_comparison(folders, tmp_path)


def test_a_point_without_times_has_a_page() -> None:
    found = random_sweep(random.Random(1))
    points = tuple(replace(point, score=None, step_ms=None) for point in found.points)
    page: Any = experiment_page(Sweep(found.settings, points))
    assert page.headline == "No run has a score."
