"""Tables as people read them."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from dptrain.measure.profile.profile import Spread, StageProfile
from dptrain.measure.profile.tables import layers_table, stages_table
from dptrain.tables import Number, Table


@pytest.mark.parametrize("words", [8, 30])
def test_a_title_is_whole_and_a_short_one_stands_in_one_line(words: int) -> None:
    title = " ".join(["title"] * words)
    written = io.StringIO()
    console = Console(width=60, file=written)
    console.print(Table.of_rows(title, ("a", "b"), [("1", "2")], text=("a",)))
    lines = written.getvalue().splitlines()
    assert written.getvalue().split().count("title") == words
    assert words > 8 or lines[0].strip() == title
    assert max(map(len, lines)) <= 60


def profiled(name: str, share: float | None, note: str = "") -> StageProfile:
    """Return a stage of 1 ms with a share of the roofline."""
    time = Spread(1.0, 0.9, 1.1, 1.0, 30)
    return StageProfile(
        name, name, name, "forward", 1, time, 1.0, 1.0, 0, 0.2, 0.2, 1e6, 1e6, 8, 1.0, 1.0, share,
        note,
    )  # fmt: skip


def test_shares_of_less_than_a_third_of_the_roofline_are_marked() -> None:
    """In the table of layers of the terminal, and in that of stages, which the report has, too."""
    winograd = "Winograd F(4×4, 3×3)"
    stages = [
        profiled("low", 0.3), profiled("enough", 0.34), profiled("none", None),
        profiled("both", 0.1, winograd),
    ]  # fmt: skip
    for table in (
        layers_table(stages, "Layers", several=False),
        stages_table(stages, "stages", several=False),
    ):
        (cells,) = (column.cells for column in table.columns if column.head == "roofline")
        marked = [[part for part in cell if isinstance(part, str)] for cell in cells]
        assert marked[0] == [" !"]
        assert " !" not in marked[1] + marked[2]
        assert marked[3] == [" *", " !"]
        assert "! marks times of more than three times the roofline" in table.note
        assert '>30</data><span class="range"> !</span>' in table.to_page()
    enough = layers_table(stages[1:3], "Layers", several=False)
    assert "!" not in enough.note
    assert "!" not in str(enough.texts)


@pytest.mark.parametrize("count", [24, 60])
def test_the_fastest_of_many_layers_share_a_row(count: int) -> None:
    stages: list[Any] = [
        SimpleNamespace(
            group=f"layer{number}", phase=phase, typical_ms=float(number), slowest_ms=1.0,
            slowest_rank=0, share=0.5 / count, flops=1e9, bytes_moved=1e6, roofline_share=None,
        )
        for phase in ("forward", "backward_weight")
        for number in range(1, count + 1)
    ]  # fmt: skip
    written = io.StringIO()
    table = layers_table(stages, "Computation by layer", several=False, most=24)
    Console(width=80, file=written).print(table)
    rows = [line.split() for line in written.getvalue().partition("─\n")[2].splitlines()]
    rows = [row for row in rows if row]
    assert len(rows) == len(table.rows) == 24
    (shares,) = (column.cells for column in table.columns if column.head == "share")
    values = [part.value for cell in shares for part in cell if isinstance(part, Number)]
    assert sum(values) == pytest.approx(1)
    if count == 60:
        assert [row[0] for row in rows[:-1]] == [f"layer{n}" for n in range(38, 61)]
        total = sum(range(1, 38))
        assert rows[-1][:4] == ["37", "others", f"{total:.3f}", f"{total:.3f}"]
