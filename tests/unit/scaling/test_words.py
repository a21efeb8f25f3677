"""Every figure of a study is defined in docs/explanation/measuring.md."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from dptrain.scaling.study import Forecast, Launch, Point, TimeToAccuracy

MEASURING = Path(__file__).parents[3] / "docs" / "explanation" / "measuring.md"


@pytest.mark.parametrize("record", [Point, Launch, Forecast, TimeToAccuracy])
def test_every_field_has_a_definition(record: type) -> None:
    text = MEASURING.read_text(encoding="utf-8")
    scaling = text[text.index("\n## Scaling\n") :]
    missing = [field.name for field in fields(record) if f"`{field.name}`" not in scaling]
    assert missing == []
