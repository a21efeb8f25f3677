"""Every figure of a study is defined in docs/reference/study.md."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from dptrain.scaling.study import Forecast, Launch, Point, TimeToAccuracy

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "study.md"


@pytest.mark.parametrize("record", [Point, Launch, Forecast, TimeToAccuracy])
def test_every_field_has_a_definition(record: type) -> None:
    text = PAGE.read_text(encoding="utf-8")
    missing = [field.name for field in fields(record) if f"`{field.name}`" not in text]
    assert missing == []
