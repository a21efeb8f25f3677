"""Every figure of a study is defined in docs/reference/study.md, and nothing else is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from dptrain.audit.study import Audit
from dptrain.scaling.study import Forecast, Launch, Point, Score, TimeToAccuracy

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "study.md"
SECTIONS = {
    "Of a point": Point,
    "Of time to accuracy": TimeToAccuracy,
    "Of a forecast": Forecast,
    "Of a score": Score,
    "Of an audit": Audit,
}
"""Records by the section that defines their fields."""


def defined_in(section: str) -> set[str]:
    """Return the names in the first column of the tables of a section."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2]
    rows = re.findall(r"^\| (`.*?) \|", text.partition("\n## ")[0], re.MULTILINE)
    return {name for row in rows for name in re.findall("`([a-z0-9_]+)`", row)}


@pytest.mark.parametrize("section", SECTIONS)
def test_sections_define_the_fields_of_their_records(section: str) -> None:
    assert defined_in(section) == {field.name for field in fields(SECTIONS[section])}


def test_every_field_of_a_launch_is_named() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [field.name for field in fields(Launch) if f"`{field.name}`" not in text] == []
