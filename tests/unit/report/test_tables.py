"""Tables of a report: what stands beside each other belongs together."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from dptrain.measure.profile.profile import Parts, Profile, StageProfile, StepParts
from dptrain.measure.profile.tables import parts_table, stages_table
from dptrain.tables import Number, Table
from tests.unit.scaling.synthetic import Law, make_profile


def lopsided() -> Profile:
    """A profile in which some steps took long, so that means lie above medians."""
    profile = make_profile(Law(), ranks=2, batch_size=64)

    def late(stage: StageProfile) -> StageProfile:
        time = 1.5 * stage.time_ms.median
        return replace(stage, typical_ms=time, share=time / profile.parts.total)

    return replace(
        profile,
        stages=tuple(map(late, profile.stages)),
        kinds=tuple(map(late, profile.kinds)),
    )


def numbers(table: Table, head: str) -> list[float]:
    """The first number of each cell of a column."""
    (column,) = (column for column in table.columns if column.head == head)
    return [next(part.value for part in cell if isinstance(part, Number)) for cell in column.cells]


@pytest.mark.parametrize("where", ["stages", "kinds"])
def test_the_time_of_a_stage_is_the_one_that_its_share_is_of(where: str) -> None:
    profile = lopsided()
    table = stages_table(getattr(profile, where), where, several=True)
    step = profile.parts.total
    assert numbers(table, "share") == pytest.approx(
        [time / step for time in numbers(table, "typical")]
    )


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("absent", [field.name for field in fields(Parts)])
def test_the_parts_of_a_step_add_up(several: bool, absent: str) -> None:
    """No part that takes time is omitted, also not those that one rank should not have."""
    values = {field.name: 0.5 + i for i, field in enumerate(fields(Parts))}
    parts = Parts(**{**values, absent: None if absent == "without_core" else 0.0})
    step = make_profile(Law(), ranks=1, batch_size=64).step_ms
    table = parts_table(step, StepParts({}, parts, parts, 0.5, 0.5), several=several)
    names = [row[0] for row in table.texts]
    for head, total in (("mean", parts.total), ("share", 1.0)):
        (column,) = (column for column in table.columns if column.head == head)
        pairs = zip(names, column.cells, strict=True)
        cells = [cell for name, cell in pairs if "of which" not in name]
        found = [part.value for cell in cells for part in cell if isinstance(part, Number)]
        assert found[-1] == pytest.approx(total)
        assert sum(found[:-1]) == pytest.approx(total)
