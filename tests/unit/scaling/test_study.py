"""Points, losses and the conclusion of a study."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from pathlib import Path

import pytest

from dptrain.errors import UserError
from dptrain.measure.profile.known import Recovery
from dptrain.measure.statistics import Estimate
from dptrain.scaling.analysis import analyse
from dptrain.scaling.conclusion import conclude
from dptrain.scaling.files import write_study
from dptrain.scaling.points import Measured
from dptrain.scaling.study import Point, Study
from dptrain.scaling.tables import study_report
from dptrain.tables import Table
from tests.unit.scaling.synthetic import Law, make_launches, make_profile


@pytest.fixture(scope="module")
def study() -> Study:
    return analyse(make_launches(Law(noise=0.02, cores=8), (1, 2, 4, 8, 16)))


def point(study: Study, name: str) -> Point:
    return next(p for p in study.points if p.name == name)


def test_the_ideal_step_and_its_losses_add_up_to_the_step(study: Study) -> None:
    assert len(study.points) == 10
    for p in study.points:
        assert p.ideal.total + p.loss.total == pytest.approx(p.step_ms.value)
        assert p.parts.total == pytest.approx(p.step_ms.value)
        base = point(study, f"{p.scaling}-r1-t1")
        shrinks = p.total_threads if p.scaling == "strong" else 1
        assert p.ideal.total == pytest.approx(base.step_ms.value / shrinks)


def test_losses_are_the_ones_that_were_planted() -> None:
    law = Law()
    study = analyse(make_launches(law, (1, 2, 4), launches=3))
    weak, strong = point(study, "weak-r4-t1"), point(study, "strong-r4-t1")
    assert weak.loss.transfer == pytest.approx((1 - law.overlap) * law.sum_ms(4))
    assert weak.loss.imbalance == pytest.approx(law.imbalance * math.sqrt(2 * math.log(4)))
    assert weak.loss.compute == pytest.approx(0, abs=1e-9)
    # The update does not shrink with the batch: three quarters of it are lost.
    assert strong.loss.compute == pytest.approx(0.75 * law.update)
    assert strong.small_batch_ms == pytest.approx(0.75 * law.update)
    assert strong.contention_ms == pytest.approx(0, abs=1e-9)
    alone = analyse(
        [m for m in make_launches(law, (1, 2, 4)) if "strong" in m.folder or m.order == 0]
    )
    assert point(alone, "strong-r4-t1").small_batch_ms is None


def with_delays(measured: Measured, without_core: float) -> Measured:
    """Return a launch in which a part of the computation is time without a core."""
    steps = measured.profile.step_parts
    parts = replace(
        steps.all_steps, compute=steps.all_steps.compute - without_core, without_core=without_core
    )
    return replace(
        measured, profile=replace(measured.profile, step_parts=replace(steps, all_steps=parts))
    )


def test_in_weak_scaling_no_batch_is_smaller() -> None:
    # The base has launches that no other point has.
    launches = make_launches(Law(noise=0.05), (1, 2, 4), launches=6)
    study = analyse([m for m in launches if "r1-" in m.folder or m.folder[-1] in "123"])
    weak = [p for p in study.points if p.scaling == "weak"]
    assert [p.small_batch_ms for p in weak] == [0.0] * 3
    tables = [part for part in study_report(study) if isinstance(part, Table)]
    assert not any("−0%" in cell for table in tables for row in table.texts for cell in row)


def test_a_base_without_run_delays_does_not_look_like_contention() -> None:
    launches = make_launches(Law(), (1, 4), launches=3)
    known = [with_delays(m, 0.4) if "r4" in m.folder else m for m in launches]
    strong = point(analyse(known), "strong-r4-t1")
    assert strong.contention_ms == pytest.approx(0, abs=1e-9)


def test_launches_that_timed_other_sizes_of_all_reduces_are_forecast() -> None:
    law = Law(per_node=1, noise=0.005, sample=0.8, overlap=0.0)
    launches = make_launches(law, (1, 2, 4, 8), batch_size=64)
    older = [
        replace(m, profile=replace(m.profile, sweep=())) if m.folder.endswith("r8-t1-3") else m
        for m in launches
    ]
    assert len({len(m.profile.sweep) for m in older if "r8-" in m.folder}) == 2
    (forecast, _), (expected, _) = analyse(older).forecasts, analyse(launches).forecasts
    assert forecast.points
    assert forecast.points[0][2] == pytest.approx(expected.points[0][2], abs=0.05)


def test_efficiencies_follow_their_definitions() -> None:
    launches = [
        Measured(f"{ranks}-{batch}-{i}", i, make_profile(
            Law(), ranks=ranks, batch_size=batch, step_ms=step))
        for i, (ranks, batch, step) in enumerate(3 * [(1, 32, 10.0), (4, 128, 12.5), (4, 32, 4.0)])
    ]  # fmt: skip
    study = analyse(launches)
    weak, strong = point(study, "weak-r4-t1"), point(study, "strong-r4-t1")
    assert weak.efficiency.value == pytest.approx(10 / 12.5)
    assert weak.speed_up.value == pytest.approx(4 * 10 / 12.5)
    assert weak.karp_flatt is None
    assert strong.speed_up.value == pytest.approx(2.5)
    assert strong.efficiency.value == pytest.approx(10 / (4 * 4))
    # Karp and Flatt: (1 / 2.5 − 1 / 4) / (1 − 1 / 4).
    assert strong.karp_flatt is not None
    assert strong.karp_flatt.value == pytest.approx(0.2)
    assert strong.samples_per_s.value == pytest.approx(32 / 4e-3)


def test_serial_fractions_have_the_interval_of_the_speed_up(study: Study) -> None:
    found = point(study, "strong-r8-t1")
    assert found.karp_flatt is not None
    assert found.karp_flatt.low < found.karp_flatt.value < found.karp_flatt.high
    slow = (1 / found.speed_up.low - 1 / 8) / (1 - 1 / 8)
    assert found.karp_flatt.high == pytest.approx(slow)


def test_shared_cores_are_told_apart_from_other_losses(study: Study) -> None:
    crowded = point(study, "weak-r16-t1")
    assert crowded.possible == 0.5
    assert crowded.shared_ms == pytest.approx(crowded.ideal.compute, rel=0.1)
    assert abs(crowded.contention_ms or 0) < 0.1 * crowded.ideal.compute
    assert point(study, "weak-r8-t1").shared_ms == 0
    for p in study.points:
        parts = p.shared_ms + (p.contention_ms or 0) + (p.small_batch_ms or 0)
        assert parts == pytest.approx(p.loss.compute, abs=1e-9)
    assert any("16 ranks × 1 thread share cores" in note for note in study.notes)
    assert any("because ranks share cores" in sentence for sentence in study.conclusion)


def test_threads_and_ranks_are_one_study() -> None:
    study = analyse(make_launches(Law(), (1, 2), threads=(1, 2), launches=3))
    names = [p.name for p in study.points if p.scaling == "weak"]
    assert names == ["weak-r1-t1", "weak-r2-t1", "weak-r1-t2", "weak-r2-t2"]
    assert point(study, "weak-r2-t2").batch_size == 4 * 32
    assert point(study, "strong-r2-t2").efficiency.value == pytest.approx(
        point(study, "strong-r2-t2").speed_up.value / 4
    )


def test_a_study_is_read_as_it_was_written(study: Study, tmp_path: Path) -> None:
    study.write(tmp_path / "study.json")
    assert Study.read(tmp_path / "study.json") == study


def test_one_launch_is_a_study_without_efficiencies(tmp_path: Path) -> None:
    study = analyse(make_launches(Law(), (1, 2), launches=1))
    assert study.points[1].efficiency is None
    study.write(tmp_path / "study.json")
    assert Study.read(tmp_path / "study.json") == study
    assert any("too few for an efficiency" in note for note in study.notes)
    assert "no point above 1 rank is known to reach 80%" in study.conclusion[0]
    assert "is not known from fewer than 3 launches" in study.conclusion[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "is not a study"),
        ("nonsense", "is not a study"),
        ('{"version": 99}', "has version 99"),
    ],
)
def test_what_is_no_study_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "study.json"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        Study.read(path)


def test_a_minibatch_that_fits_no_way_of_scaling_is_refused() -> None:
    profiles = [(1, 32), (2, 48)]
    launches = [
        Measured(f"launch-{i}", i, make_profile(Law(), ranks=ranks, batch_size=batch))
        for i, (ranks, batch) in enumerate(profiles)
    ]
    with pytest.raises(UserError, match=r"launch-1 has a minibatch of 48.*32 \(strong.*64 \(weak"):
        analyse(launches)


def test_launches_of_other_jobs_are_refused() -> None:
    one, two = make_launches(Law(), (1, 2), launches=1)[:2]
    other = replace(two, profile=replace(two.profile, job={**two.profile.job, "network": "cifar"}))
    with pytest.raises(UserError, match=f"{two.folder} has network cifar"):
        analyse([one, other])


def test_other_machines_and_versions_are_pointed_out() -> None:
    launches = make_launches(Law(), (1, 2), launches=2)
    strange = {
        **launches[0].profile.environment, "cpu": "another processor",
        "versions": {"dptrain": "0.1.0", "numpy": "1.26.0"},
    }  # fmt: skip
    launches[-1] = replace(launches[-1], profile=replace(launches[-1].profile, environment=strange))
    notes = "\n".join(analyse(launches).notes)
    assert "launches differ in cpu: a processor in" in notes
    assert "numpy 2.0.0 in launches/weak-r1-t1-1, numpy 1.26.0 in launches/strong-r2-t1-2" in notes
    assert "launches differ" not in "\n".join(analyse(launches[:-1]).notes)


def test_outliers_are_named() -> None:
    launches = make_launches(Law(noise=0.01), (1, 2), launches=5)
    slow = make_profile(Law(), ranks=2, batch_size=64, step_ms=20.0)
    place = next(i for i, m in enumerate(launches) if m.folder == "launches/weak-r2-t1-3")
    launches[place] = replace(launches[place], profile=slow)
    study = analyse(launches)
    assert place in point(study, "weak-r2-t1").outliers
    assert any("launches/weak-r2-t1-3 deviates by +" in note for note in study.notes)


def test_the_conclusion_names_range_and_losses(study: Study) -> None:
    weak, limit, *_ = study.conclusion
    assert weak.startswith("Weak scaling: efficiency is at least 80% up to 8 ranks")
    assert "at 16 ranks" in weak
    assert "of at most 50% that the cores allow" in weak
    assert "slower computation" in limit


@pytest.mark.parametrize(
    ("efficiencies", "sentence"),
    [
        (
            {2: 0.6, 4: 0.85, 8: 0.5},
            "efficiency is at least 80% at 4 ranks (85%, 95% interval 83% to 87%), but it is 60% "
            "(95% interval 58% to 62%) at 2 ranks; the efficiency at 8 ranks is 50% (95% interval "
            "48% to 52%).",
        ),
        (
            {2: 0.9, 4: 0.6, 8: 0.85, 16: 0.5},
            "efficiency is at least 80% up to 2 ranks (90%, 95% interval 88% to 92%) and at 8 "
            "ranks (85%, 95% interval 83% to 87%), but it is 60% (95% interval 58% to 62%) at 4 "
            "ranks; the efficiency at 16 ranks is 50% (95% interval 48% to 52%).",
        ),
        (
            {2: 0.79, 4: 0.5},
            "no point above 1 rank is known to reach 80% efficiency; the efficiency at 4 ranks is "
            "50% (95% interval 48% to 52%). At 2 ranks the interval includes 80%, so the launches "
            "do not decide.",
        ),
        (
            {2: 0.79},
            "undecided; the efficiency at 2 ranks is 79% (95% interval 77% to 81%), and 80% is in "
            "the interval.",
        ),
        (
            {2: 0.7, 4: 0.5},
            "efficiency is below 80% at every point above 1 rank; the efficiency at 4 ranks is 50% "
            "(95% interval 48% to 52%).",
        ),
    ],
)
def test_the_conclusion_claims_no_range_that_a_point_contradicts(
    study: Study, efficiencies: dict[int, float], sentence: str
) -> None:
    points = [point(study, "weak-r1-t1")]
    for ranks, value in efficiencies.items():
        known = Estimate(value, value - 0.02, value + 0.02, 5)
        points.append(replace(point(study, f"weak-r{ranks}-t1"), efficiency=known, possible=1.0))
    assert conclude(points, [])[0] == f"Weak scaling: {sentence}"


def test_files_hold_a_line_an_item_and_replace_nothing_else(study: Study, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for _ in range(2):
        write_study(study, tmp_path)
    assert len((tmp_path / "points.csv").read_text().splitlines()) == 1 + len(study.points)
    launches = sum(len(p.launches) for p in study.points)
    assert len((tmp_path / "launches.csv").read_text().splitlines()) == 1 + launches
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_each_number_of_a_known_loss_has_a_column(study: Study, tmp_path: Path) -> None:
    found = Recovery("lost core", 5.0, Estimate(5.1, 4.9, 5.3, 8), True)
    first, *others = (replace(p, recoveries=(found,)) for p in study.points)
    write_study(replace(study, points=(replace(first, recoveries=()), *others)), tmp_path)
    with (tmp_path / "points.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = ("injected_ms", "recovered_ms.value", "recovered_ms.low", "is_recovered")
    cells = [[row[f"recoveries.lost_core.{name}"] for name in names] for row in rows]
    assert cells[:2] == [[""] * 4, ["5.0", "5.1", "4.9", "True"]]
    assert all("{" not in cell for row in rows for cell in row.values())


def test_a_foreign_file_is_not_replaced(study: Study, tmp_path: Path) -> None:
    (tmp_path / "points.csv").write_text("mine")
    with pytest.raises(UserError, match="is not overwritten"):
        write_study(study, tmp_path)
    assert (tmp_path / "points.csv").read_text() == "mine"


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_fits_the_terminal(study: Study, width: int) -> None:
    from rich.console import Console

    written = io.StringIO()
    console = Console(width=width, file=written, highlight=False, markup=False)
    for part in study_report(study):
        console.print(part)
    text = written.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert text.index(study.conclusion[0][:20]) < text.index("loss by part")
