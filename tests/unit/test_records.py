"""Records that are read from JSON: equal to those that were written."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.errors import UserError
from dptrain.files import dump_json, parse_json
from dptrain.records import Form, from_values
from dptrain.scaling.study import Study


@dataclass(frozen=True)
class Inner:
    value: float
    names: tuple[str, ...]


@dataclass(frozen=True)
class Outer:
    inner: Inner
    maybe: Inner | None
    several: tuple[Inner, ...]
    named: dict[str, Inner]
    pairs: tuple[tuple[int, float], ...]
    plain: dict[str, int]
    missing_in_older_files: Inner | None = None


_numbers = st.floats(allow_nan=False, allow_infinity=False)
_inner = st.builds(Inner, _numbers, st.lists(st.text(), max_size=3).map(tuple))
_outer = st.builds(
    Outer,
    inner=_inner,
    maybe=st.none() | _inner,
    several=st.lists(_inner, max_size=3).map(tuple),
    named=st.dictionaries(st.text(), _inner, max_size=3),
    pairs=st.lists(st.tuples(st.integers(0, 2**53), _numbers), max_size=3).map(tuple),
    plain=st.dictionaries(st.text(), st.integers(0, 2**53), max_size=3),
)


@given(_outer)
def test_a_record_is_read_as_it_was_written(record: Outer) -> None:
    values = parse_json(dump_json(asdict(record)))
    assert from_values(Outer, values) == record
    del values["missing_in_older_files"]
    assert from_values(Outer, values) == record


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("inner", None),
        ("inner", 3),
        ("inner", {"value": 1.0}),
        ("several", [{"value": 1.0, "names": [], "other": 2}]),
        ("pairs", [[1]]),
        ("pairs", 1),
        ("unknown", 1),
        ("inner", {"value": "1", "names": []}),
        ("inner", {"value": None, "names": []}),
        ("inner", {"value": 1.0, "names": "ab"}),
        ("plain", {"a": 1.5}),
        ("plain", {"a": [1]}),
        ("plain", "a"),
    ],
)
def test_values_of_another_form_are_refused(name: str, value: object) -> None:
    inner = {"value": 1.0, "names": ["a"]}
    values = {"inner": inner, "maybe": None, "several": [], "named": {}, "pairs": [], "plain": {}}
    assert from_values(Outer, values).inner == Inner(1.0, ("a",))
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        from_values(Outer, {**values, name: value})


def test_a_named_pipe_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "study.json")
    with pytest.raises(UserError, match="it is a named pipe"):
        Study.read(tmp_path / "study.json")


def test_a_field_that_a_record_had_once_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "inner.json"
    path.write_text('{"version": 1, "value": 2.0, "names": [], "old": 1}')
    assert Form("inner", "", "", dropped=("old",)).read(path, Inner) == Inner(2.0, ())
    with pytest.raises(UserError, match="is not an inner"):
        Form("inner", "", "").read(path, Inner)
