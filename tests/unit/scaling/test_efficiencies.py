"""The POP hierarchy over launches: computation scaling, tables, and the file."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dptrain.measure.machine.counters import Processor
from dptrain.measure.machine.energy import Energy
from dptrain.measure.profile.pop import pop_efficiencies
from dptrain.measure.profile.profile import Profile
from dptrain.measure.statistics import Estimate
from dptrain.scaling.analysis import analyse
from dptrain.scaling.efficiencies import find_efficiencies
from dptrain.scaling.files import POINTS, write_study
from dptrain.scaling.points import Measured
from dptrain.scaling.study import STRONG, WEAK, Study
from dptrain.scaling.tables import pop_table, study_report
from tests.unit.scaling.synthetic import Law, make_launches


def with_pop(profile: Profile) -> Profile:
    """The profile with the busy times of its ranks as if all steps were equal."""
    ranks = len(profile.ranks)
    if ranks == 1:
        return profile
    busy = np.tile([[rank.busy_ms] for rank in profile.ranks], (1, profile.steps))
    return replace(profile, pop=pop_efficiencies(busy, np.full(busy.shape[1], profile.parts.total),
                                                 {}))  # fmt: skip


def launches() -> list[Measured]:
    return [replace(m, profile=with_pop(m.profile)) for m in make_launches(Law())]


def test_the_efficiency_is_parallel_efficiency_times_computation_scaling() -> None:
    study = analyse(launches())
    for point in study.points:
        assert (point.pop is None) == (point.ranks == 1)
        if point.pop is None:
            continue
        pop = point.pop
        product = pop.load_balance.value * pop.serialisation.value * pop.transfer.value
        assert pop.parallel.value == pytest.approx(product)
        base = next(p for p in study.points if p.ranks == 1)
        waits = base.parts.transfer + base.parts.imbalance
        assert waits == 0
        expected = pop.parallel.value * pop.computation_scaling.value
        assert point.efficiency.value == pytest.approx(expected, rel=1e-9)


def test_computation_scaling_is_known_if_busy_times_double() -> None:
    found = [m.profile for m in launches() if m.profile.job["ranks"] == 2]
    slower = [
        replace(profile, step_ms=replace(profile.step_ms, mean=2 * profile.step_ms.mean))
        for profile in found
    ]
    efficiencies = find_efficiencies(slower, found, work=1.0)
    assert efficiencies is not None
    assert efficiencies.computation_scaling.value == pytest.approx(0.5)
    halved = find_efficiencies(slower, found, work=0.5)
    assert halved is not None
    assert halved.computation_scaling.value == pytest.approx(0.25)
    assert find_efficiencies([replace(found[0], pop=None)], found, work=1.0) is None


def test_tables_and_the_file_contain_them(tmp_path: Path) -> None:
    study = analyse(launches())
    study.write(tmp_path / "study.json")
    assert Study.read(tmp_path / "study.json") == study
    titles = [str(part.title) for part in study_report(study) if not isinstance(part, str)]
    assert any("POP efficiencies" in title for title in titles)
    for scaling in (WEAK, STRONG):
        table = pop_table(study, scaling)
        assert table is not None
        assert len(table.rows) == 2
    assert pop_table(analyse(make_launches(Law())), WEAK) is None


def test_the_table_of_points_has_them_for_several_ranks_only(tmp_path: Path) -> None:
    write_study(analyse(launches()), tmp_path)
    lines = list(csv.DictReader((tmp_path / POINTS).read_text().splitlines()))
    for line in lines:
        assert "pop" not in line
        assert (line["pop.parallel.value"] == "") == (line["ranks"] == "1")
        assert line["joules_per_sample"] == ""


def test_counters_are_medians_over_launches_or_have_a_reason(tmp_path: Path) -> None:
    energy = Energy(Estimate(0.5, 0.4, 0.6, 10), 100.0, ("package-0",), ())
    processor = Processor(1e6, 2.0, 3.0, "")
    found = [
        replace(m, profile=replace(m.profile, energy=energy, processor=processor))
        for m in launches()
    ]
    study = analyse(found)
    for point in study.points:
        assert point.joules_per_sample is not None
        assert point.joules_per_sample.value == 0.5
        if point.pop is not None:
            assert point.pop.ghz is not None
            assert point.pop.ghz.value == 3.0
    lines = [part for part in study_report(study) if not isinstance(part, str)]
    assert any("energy" in table.heads for table in lines)
    study.write(tmp_path / "study.json")
    assert Study.read(tmp_path / "study.json") == study
    missing = Energy(None, None, (), ("RAPL: no",))
    none = Processor(None, None, None, "no counters")
    study = analyse(
        [replace(m, profile=replace(m.profile, energy=missing, processor=none)) for m in launches()]
    )
    assert all(point.joules_per_sample is None for point in study.points)
    assert "energy not measured: RAPL: no" in study.notes
    assert "instructions and frequency not measured: no counters" in study.notes
