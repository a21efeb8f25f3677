"""Tables as people read them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dptrain.measure.tables import fitted_table


@pytest.mark.parametrize("words", [8, 30])
def test_a_title_is_whole_and_a_short_one_stands_in_one_line(words: int) -> None:
    title = " ".join(["title"] * words)
    written = io.StringIO()
    console = Console(width=60, file=written)
    console.print(fitted_table(title, ("a", "b"), [("1", "2")], text=("a",)))
    lines = written.getvalue().splitlines()
    assert written.getvalue().split().count("title") == words
    assert words > 8 or lines[0].strip() == title
    assert max(map(len, lines)) <= 60
