"""What is appended is read back, and a crash costs at most the line being written."""

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.errors import UserError
from dptrain.files import dump_json, parse_json
from dptrain.measure.metrics import MetricsFile

NOT_NUMBERS = {"NaN", "Infinity", "-Infinity"}
texts = st.text().filter(lambda text: text not in NOT_NUMBERS)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no strict JSON")


@given(values)
def test_json_is_strict_and_gives_back_every_value(value: object) -> None:
    text = dump_json(value)
    json.loads(text, parse_constant=refuse_constant)
    assert repr(parse_json(text)) == repr(value)


def test_not_finite_numbers_are_strings_that_float_understands() -> None:
    text = dump_json({"loss": math.nan, "rate": math.inf, "z": [-math.inf]})
    assert json.loads(text) == {"loss": "NaN", "rate": "Infinity", "z": ["-Infinity"]}
    assert math.isnan(float("NaN"))
    assert float("-Infinity") == -math.inf


@pytest.fixture
def metrics(tmp_path: Path) -> MetricsFile:
    return MetricsFile(tmp_path / "metrics.jsonl")


def test_every_line_is_on_disk_as_soon_as_it_is_appended(metrics: MetricsFile) -> None:
    assert metrics.read() == []
    for step in range(1, 4):
        metrics.append({"step": step, "loss": 1 / step})
        assert metrics.read()[-1] == {"step": step, "loss": 1 / step}
    assert metrics.path.read_text().count("\n") == 3


@pytest.mark.parametrize("cut", range(1, 24))
def test_a_torn_last_line_is_ignored_and_does_not_spoil_the_next(
    metrics: MetricsFile, cut: int
) -> None:
    metrics.append({"step": 1})
    metrics.append({"step": 2, "loss": 0.25})
    metrics.close()
    metrics.path.write_bytes(metrics.path.read_bytes()[:-cut])
    again = MetricsFile(metrics.path)
    assert again.read() == [{"step": 1}]
    again.append({"step": 3})
    assert again.read() == [{"step": 1}, {"step": 3}]


@given(last=st.integers(0, 8), torn=st.booleans())
def test_truncation_keeps_what_came_up_to_the_step(
    tmp_path_factory: pytest.TempPathFactory, last: int, torn: bool
) -> None:
    metrics = MetricsFile(tmp_path_factory.mktemp("run") / "metrics.jsonl")
    records: list[dict[str, object]] = [{"event": "start"}]
    records += [{"step": step, "text": "é\n"} for step in range(1, 7)]
    for record in records:
        metrics.append(record)
    if torn:
        with metrics.path.open("a") as file:
            file.write('{"step": 1')
    metrics.truncate_after(last)
    expected = records[: last + 1]
    assert metrics.read() == expected
    metrics.append({"step": last + 1})
    assert metrics.read() == [*expected, {"step": last + 1}]


def test_a_damaged_line_in_the_middle_is_named(metrics: MetricsFile) -> None:
    metrics.path.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: expected a JSON object") as info:
        metrics.read()
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"step": "x"}', r"line 2: step is 'x'; expected a whole number"),
        (b'{"step": "NaN"}', r"line 2: step is nan; expected a whole number"),
        (b'{"step": true}', r"line 2: step is True"),
        (b"[" * 200_000, r"line 2: expected a JSON object, found '\[+… \(200 characters\)'"),
        (b'{"step": ' + b"9" * 5000 + b"}", r"line 2: expected a JSON object"),
        (b"\x1b[2J\x00", r"line 2: expected a JSON object, found '\\x1b\[2J\\x00'"),
    ],
)
def test_a_senseless_line_is_named(metrics: MetricsFile, line: bytes, message: str) -> None:
    metrics.path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    for read in (metrics.read, lambda: metrics.truncate_after(1)):
        with pytest.raises(UserError, match=message) as info:
            read()
        assert str(info.value).isprintable()
        assert len(str(info.value)) < 400


def test_every_write_may_be_refused_before_it_begins(tmp_path: Path) -> None:
    def refuse() -> None:
        raise UserError("no")

    MetricsFile(tmp_path / "metrics.jsonl").append({"step": 5})
    metrics = MetricsFile(tmp_path / "metrics.jsonl", refuse)
    for write in (lambda: metrics.append({"step": 6}), lambda: metrics.truncate_after(1)):
        with pytest.raises(UserError, match=r"^no$"):
            write()
    assert metrics.read() == [{"step": 5}]


def test_a_full_disk_costs_the_line_that_did_not_fit(
    metrics: MetricsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics.append({"step": 1})
    write, room = os.write, [3]

    def write_what_fits(descriptor: int, line: bytes) -> int:
        if not room:
            raise OSError(28, "No space left on device")
        return write(descriptor, line[: room.pop()])

    with monkeypatch.context() as patch:
        patch.setattr("os.write", write_what_fits)
        with pytest.raises(UserError, match=r"cannot write .*No space left on device"):
            metrics.append({"step": 2})
    metrics.append({"step": 3})
    assert metrics.read() == [{"step": 1}, {"step": 3}]


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*No such file or directory") as info:
        MetricsFile(tmp_path / "gone" / "metrics.jsonl").append({"step": 1})
    assert "\n" not in str(info.value)
