"""Tables of a report: what stands beside each other belongs together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dptrain.measure.profile.profile import Profile, StageProfile
from dptrain.measure.profile.tables import stages_table
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
