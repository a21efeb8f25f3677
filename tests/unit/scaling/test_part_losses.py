"""Losses by part: their intervals, and which of them the conclusion names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dptrain.measure.profile.profile import Parts, StepParts
from dptrain.scaling.analysis import analyse
from dptrain.scaling.losses import loss_intervals, uniform
from dptrain.scaling.points import Measured
from dptrain.scaling.study import Point, Study
from dptrain.scaling.tables import study_report
from dptrain.tables import Table
from tests.unit.scaling.synthetic import Law, make_profile

BUSY = 2.0
"""Cores of other programs, on a machine of two cores."""


def measured(
    ranks: int, number: int, parts: Parts, *, other_cores: float | None = 0.0, rounds: bool = True
) -> Measured:
    """A launch with given parts of its mean step."""
    profile = make_profile(Law(), ranks=ranks, batch_size=32 * ranks, step_ms=parts.total)
    profile = replace(profile, parts=parts, step_parts=StepParts({}, parts, parts, 0.5, 0.5))
    folder = f"launches/weak-r{ranks}-t1-{number}" if rounds else f"single-{ranks}-{number}"
    return Measured(folder, 2 * number + ranks, profile, other_cores=other_cores)


def study_of(
    loss: dict[str, float], *, scatter: float, launches: int = 5, other_cores: float | None = 0.0,
    knows: bool = True, seed: int = 0,
) -> Study:  # fmt: skip
    """A study of one and two ranks; a step of 5 ms, and losses with a relative scatter."""
    random, found = np.random.default_rng(seed), list[Measured]()
    for number in range(1, launches + 1):
        noise = {name: ms * (1 + scatter * random.standard_normal()) for name, ms in loss.items()}
        base = Parts(4.9, 0.05, 0.0, 0.0, 0.05, without_core=0.0 if knows else None)
        lost = {**base.known, **{name: base.known.get(name, 0.0) + noise[name] for name in noise}}
        for ranks, parts in ((1, base), (2, Parts(**lost))):
            found.append(measured(ranks, number, parts, other_cores=other_cores))
    return analyse(found)


def largest(study: Study) -> Point:
    return next(point for point in study.points if point.ranks == 2)


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)


def test_communication_is_named_if_it_is_certain_and_nothing_else_ran() -> None:
    study = study_of({"transfer": 2.0}, scatter=0.1)
    limit = study.conclusion[1]
    assert "the main loss is exposed communication (" in limit
    found = largest(study).loss_intervals["transfer"]
    assert f"95% interval {found.low:.3g} to {found.high:.3g} ms" in limit
    assert found.low < 2.0 < found.high


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        (
            {"scatter": 1.0, "launches": 3, "seed": 2},
            "the cause is not known, because the interval of no large",
        ),
        ({"launches": 2}, "fewer than 3 launches do not show the cause."),
        ({"other_cores": BUSY}, "the cause is not known, because other programs used up to 2.0"),
        ({"other_cores": BUSY, "knows": False}, "the cause is not known, because other programs"),
    ],
)
def test_communication_is_not_named_without_evidence(changes: dict[str, Any], end: str) -> None:
    limit = study_of({"transfer": 2.0}, **{"scatter": 0.1, **changes}).conclusion[1]
    assert end in limit
    assert "communication" not in limit


def test_what_other_programs_took_is_named_as_that() -> None:
    study = study_of({"transfer": 1.0, "without_core": 4.0}, scatter=0.1, other_cores=BUSY)
    limit = study.conclusion[1]
    assert "the main loss is time without a core (" in limit
    assert "other programs used up to 2.0 cores, which may cause all other losses, too." in limit
    assert "communication" not in limit


@pytest.mark.parametrize("paired", [True, False])
def test_intervals_of_losses_contain_the_truth(paired: bool) -> None:
    """Normal losses: the coverage of 400 studies of five launches is at least 92%."""
    random, held = np.random.default_rng(1), 0
    for _ in range(400):
        shared = random.standard_normal(5) if paired else np.zeros(5)
        one, two = random.standard_normal((2, 5)) * 0.3
        own = [Parts(8.0 + a + b, 0.0, 1.0, 0.0, 0.0) for a, b in zip(shared, one, strict=True)]
        ideal = [Parts(5.0 + a + b, 0.0, 1.0, 0.0, 0.0) for a, b in zip(shared, two, strict=True)]
        value = np.mean([a.compute - b.compute for a, b in zip(own, ideal, strict=True)])
        loss = Parts(float(value), 0.0, 0.0, 0.0, 0.0)
        found = loss_intervals(loss, own, ideal, paired=paired)["compute"]
        held += found.low <= 3.0 <= found.high
    assert held >= 0.92 * 400


def test_losses_add_up_and_unknown_is_not_zero() -> None:
    for knows in (True, False):
        study = study_of({"transfer": 2.0, "compute": 1.0}, scatter=0.1, knows=knows)
        point = largest(study)
        assert point.ideal.total + point.loss.total == pytest.approx(point.step_ms.value)
        assert (point.loss.without_core is None) != knows
        tables = [part for part in study_report(study) if isinstance(part, Table)]
        (table,) = (each for each in tables if "loss by part" in str(each.title))
        (row,) = (row for row in table.texts if row[1] == "without a core")
        assert row[2] == ("0.000 (0.000–0.000)" if knows else "unknown")


def test_launches_that_do_not_know_delays_are_compared_without_them() -> None:
    known, unknown = (
        Parts(4.0, 0.0, 1.0, 0.0, 0.0, without_core=2.0),
        Parts(5.0, 0.0, 1.0, 0.0, 0.0),
    )
    assert uniform([known]) == [known]
    (found,) = uniform([known], [unknown])
    assert found.without_core is None
    assert found.compute == 6.0
    assert found.total == known.total
