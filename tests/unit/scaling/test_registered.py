"""Registered forecasts: they are stored once, cannot be changed, and only later launches count."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dptrain.cli.main import run
from dptrain.files import dump_json, parse_json
from dptrain.measure.statistics import Estimate
from dptrain.scaling.registered import ELSEWHERE, REGISTERED, Registered, calibration
from dptrain.scaling.study import Score, Study
from tests.unit.scaling.synthetic import Law, make_launches

LAW = Law(per_node=1, noise=0.005, sample=0.8, overlap=0.0)
LATER, EARLIER = "2999-01-01T00:00:00+00:00", "2020-01-01T00:00:00+00:00"


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dptrain.report.files.write_report", lambda folder: None)
    monkeypatch.chdir(tmp_path)


def make_study(folder: str, ranks: tuple[int, ...], started: str = EARLIER, law: Law = LAW) -> None:
    """Write the profiles of a study with weak scaling only."""
    for measured in make_launches(law, ranks, batch_size=64):
        if "strong" not in measured.folder:
            place = Path(folder) / measured.folder
            place.mkdir(parents=True)
            environment = {**measured.profile.environment, "started": started}
            replace(measured.profile, environment=environment).write(place / "profile.json")


def scale(*arguments: str) -> int:
    return run(["scale", *arguments], is_rank_zero=True)


@pytest.fixture
def registered(capsys: pytest.CaptureFixture[str]) -> Registered:
    """The forecast of 1 to 8 ranks, in the folder small."""
    make_study("small", (1, 2, 4, 8))
    assert scale("--collect", "small", "--register") == 0
    found = Registered.read(Path("small") / REGISTERED)
    assert found.sha256 in capsys.readouterr().out
    return found


def collect_both(started: str = LATER, law: Law = LAW) -> Study:
    """Return the study of the folder small and of 16 ranks."""
    make_study("large", (1, 16), started, law)
    assert scale("--collect", "small", "--collect", "large", "--output", "both") == 0
    return Study.read(Path("both/study.json"))


def test_a_registered_forecast_is_scored(
    registered: Registered, capsys: pytest.CaptureFixture[str]
) -> None:
    study = collect_both()
    (score,) = study.scores
    (point,) = (p for p in study.points if p.ranks == 16)
    assert (score.ranks, score.sha256, score.measured) == (16, registered.sha256, point.efficiency)
    assert (score.efficiency, score.low, score.high) == (
        registered.forecasts[0].points[0][2], *registered.forecasts[0].intervals[0]
    )  # fmt: skip
    assert score.verdict == "inside"
    assert "for 16 ranks, weak scaling: measured" in study.conclusion[-1]
    entries, remarks = calibration([Path()])
    by_ranks = {entry.facts()["ranks"]: entry.score for entry in entries}
    assert not remarks
    assert by_ranks == {16: score, 32: None, 64: None}
    assert run(["runs", "forecasts", "."], is_rank_zero=True) == 0
    assert "1 of 1 are inside" in capsys.readouterr().out


def test_a_larger_job_that_is_slower_is_below(registered: Registered) -> None:
    (score,) = collect_both(law=replace(LAW, imbalance=20.0)).scores
    assert score.verdict.startswith("below")


def test_launches_before_the_registration_do_not_count(registered: Registered) -> None:
    study = collect_both(EARLIER)
    assert study.scores == ()
    assert any("did not start after the registration" in note for note in study.notes)


@pytest.mark.parametrize(
    ("name", "value", "is_scored"),
    [
        ("bucket_kib", 512, False),
        ("transport", "host", False),
        ("seed", 7, True),
        ("cores", 1, True),
    ],
)
def test_a_job_with_other_settings_does_not_test_a_forecast(
    registered: Registered, name: str, value: Any, is_scored: bool
) -> None:
    make_study("large", (1, 16), LATER)
    for path in Path("large").rglob("profile.json"):
        values = parse_json(path.read_text())
        values["job"][name] = value
        path.write_text(dump_json(values, indent=1))
    assert scale("--collect", "small", "--collect", "large", "--output", "both") == 0
    study = Study.read(Path("both/study.json"))
    assert bool(study.scores) == is_scored
    said = [
        note
        for note in study.notes
        if f"for 16 ranks is not scored: it was made for {name}" in note
    ]
    assert bool(said) != is_scored
    assert is_scored or f"has {value}" in said[0]


def test_a_changed_file_is_refused(
    registered: Registered, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("small") / REGISTERED
    values = json.loads(path.read_text())
    values["forecasts"][0]["intervals"][0][0] -= 0.1
    path.write_text(json.dumps(values))
    capsys.readouterr()
    assert scale("--collect", "small") == 2
    assert run(["runs", "forecasts", "small"], is_rank_zero=True) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("was changed after it was registered" in line for line in lines)


def test_a_changed_launch_is_refused(
    registered: Registered, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("small") / next(iter(registered.launches)) / "profile.json"
    path.write_text(path.read_text() + "\n")
    capsys.readouterr()
    assert scale("--collect", "small") == 2
    assert "profile.json was changed after" in capsys.readouterr().err


def test_a_forecast_is_registered_once(
    registered: Registered, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (Path("small") / REGISTERED).read_bytes()
    assert scale("--collect", "small", "--register") == 2
    assert "is already registered" in capsys.readouterr().err
    assert (Path("small") / REGISTERED).read_bytes() == before


def test_of_two_registrations_at_the_same_time_one_counts(
    registered: Registered, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (Path("small") / REGISTERED).read_bytes()
    monkeypatch.setattr("dptrain.scaling.registered.refuse_second", lambda folder: None)
    assert scale("--collect", "small", "--register") == 2
    assert "File exists" in capsys.readouterr().err
    assert (Path("small") / REGISTERED).read_bytes() == before


def test_a_second_registration_is_refused_before_anything_is_launched(
    registered: Registered, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dptrain.cli.scale._launch", lambda *given, **more: 0)
    monkeypatch.setattr("dptrain.cli.scale._design", lambda file, output, flags: (output, None))
    assert scale("--output", "small", "--register") == 2
    assert "is already registered" in capsys.readouterr().err


def test_a_study_that_has_no_forecast_is_not_launched(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dptrain.cli.scale._launch", lambda *given, **more: 0)
    monkeypatch.setattr("dptrain.scaling.registered.available_cores", lambda: 8)
    for name in [name for name in os.environ if name.startswith(ELSEWHERE)]:
        monkeypatch.delenv(name)
    flags = ("--output", "new", "--network", "mlp-5", "--data", "synthetic", "--register")
    for more, words in (
        (("--ranks", "2"), "2 numbers of ranks or more, but --ranks has 1"),
        (("--ranks", "1,2", "--launches", "2"), "3 launches of each point or more"),
        (("--ranks", "2,4,8"), "the node has 8 cores and the largest point uses 8"),
    ):
        assert scale(*flags, *more) == 2
        assert words in capsys.readouterr().err
    assert scale(*flags, "--ranks", "1,2") == 0
    assert scale(*flags, "--ranks", "2,4,8", "--launcher", "mpirun -hosts a,b") == 0
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert scale(*flags, "--ranks", "2,4,8") == 0


@pytest.mark.parametrize(
    "flag", [("--ranks", "1,2"), ("--only", "weak-r1-t1"), ("--part", "1/2"), ("--batch-size", "4")]
)
def test_flags_of_launches_are_refused_with_collect(
    capsys: pytest.CaptureFixture[str], flag: tuple[str, str]
) -> None:
    make_study("small", (1, 2))
    assert scale("--collect", "small", *flag) == 2
    assert f"so {flag[0]} has no effect" in capsys.readouterr().err


def test_a_copy_counts_once(registered: Registered) -> None:
    shutil.copytree("small", "copy")
    make_study("large", (1, 16), LATER)
    folders = ("--collect", "small", "--collect", "copy", "--collect", "large")
    assert scale(*folders, "--output", "both") == 0
    study = Study.read(Path("both/study.json"))
    assert len(study.scores) == 1
    assert {p.ranks: len(p.launches) for p in study.points} == {1: 10, 2: 5, 4: 5, 8: 5, 16: 5}
    assert any("copies of launches do not count" in note for note in study.notes)
    entries, _ = calibration([Path()])
    assert [entry.facts()["ranks"] for entry in entries] == [16, 32, 64]


def test_a_field_that_another_version_lacks_is_no_change(registered: Registered) -> None:
    path = Path("small") / REGISTERED
    values = {**parse_json(path.read_text()), "sha256": ""}
    del values["forecasts"][0]["unknown"]
    values["sha256"] = hashlib.sha256(dump_json(values, indent=1).encode()).hexdigest()
    path.write_text(dump_json(values, indent=2))
    assert Registered.read(path).forecasts == (replace(registered.forecasts[0], unknown=""),)


@pytest.mark.parametrize(
    "content", ['{"version": 2, "points": [], "forecasts": []}', '{"version"', ""]
)
def test_a_study_that_cannot_be_read_hides_no_forecast(
    registered: Registered, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    Path("old").mkdir()
    Path("old/study.json").write_text(content)
    capsys.readouterr()
    assert run(["runs", "forecasts", ".", "--json"], is_rank_zero=True) == 0
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)) == 3
    assert "old/study.json" in printed.err


@pytest.mark.parametrize("folder", ["missing", "small/registered-forecast.json"])
def test_forecasts_of_what_is_no_folder(
    registered: Registered, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    assert run(["runs", "forecasts", folder], is_rank_zero=True) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_nothing_to_register_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    make_study("small", (1, 2))
    assert scale("--collect", "small", "--register") == 2
    assert "nothing to register: No forecast of weak scaling" in capsys.readouterr().err
    assert not (Path("small") / REGISTERED).exists()


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        ((0.66, 0.60, 0.72), "inside"),
        ((0.58, 0.55, 0.60), "below"),
        ((0.78, 0.76, 0.80), "above"),
        ((0.60, 0.57, 0.63), "below, but the intervals overlap"),
    ],
)
def test_the_verdict(measured: tuple[float, float, float], verdict: str) -> None:
    score = Score("", "weak", 1, 32, 0.68, 0.61, 0.74, Estimate(*measured, 5))
    assert score.verdict == verdict
