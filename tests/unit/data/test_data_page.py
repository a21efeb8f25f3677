"""The page about data shows the help text of the readers."""

from __future__ import annotations

from pathlib import Path

from dptrain.data import DATA_HELP

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "data.md"


def test_the_page_contains_every_form_of_a_specification() -> None:
    assert f"```text\n{DATA_HELP}\n```" in PAGE.read_text(encoding="utf-8")
