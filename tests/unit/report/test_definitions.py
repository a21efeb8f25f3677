"""Definitions on the page are those of the documentation."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from dptrain.report.elements.definitions import (
    OF_PROFILES,
    OF_RUNS,
    OF_STUDIES,
    Definition,
    definitions,
)
from dptrain.scaling.study import Launch, Point
from dptrain.vocabulary import SECTIONS

GUIDE = Path(__file__).parents[3] / "docs" / "reference" / "study.md"


def test_words_of_a_study_are_its_fields_and_documented() -> None:
    known = {field.name for record in (Point, Launch) for field in fields(record)}
    text = GUIDE.read_text(encoding="utf-8")
    names = [word.name.removeprefix("points.") for word in SECTIONS["Scaling study"]]
    named = [name for name in names if name in known]
    assert {"step_ms", "efficiency", "karp_flatt", "loss"} <= set(named)
    for name in named:
        assert f"`{name}`" in text, name
    # A name with a unit is a field; anything else is a word of the page alone.
    assert not [name for name in names if name.endswith("_ms") and name not in known]


def test_a_profile_has_the_words_of_the_vocabulary_alone() -> None:
    own = dict(definitions(OF_PROFILES))
    assert set(own) < set(SECTIONS)
    assert dict(definitions(OF_STUDIES)).items() > own.items()
    waiting = Definition("waiting for data", "data_wait, ms", "Waiting for the minibatch.")
    assert waiting in own["Parts of a step"]


@pytest.mark.parametrize("titles", [OF_PROFILES, OF_STUDIES, OF_RUNS])
def test_a_term_begins_with_the_label_that_readers_see(titles: tuple[str, ...]) -> None:
    found = {d.name.partition(",")[0]: d.label for _, terms in definitions(titles) for d in terms}
    assert found["imbalance"] == "waiting"
    assert found["transfer"] == "communication"
    assert found["memory_bytes"] == "memory"
    assert not {"exposed", "hidden", "imbalance", "possible", "behind"} & set(found.values())
