"""What is left out of data is shown wherever data is opened, and each command shows it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dptrain.cli.main import run
from dptrain.data import open_data
from dptrain.data.inputs import open_inputs
from dptrain.data.sources.objects import dataset_from
from dptrain.network import Dense, MeanSquaredError, Network
from dptrain.notes import notes_shown, show_notes

MOST_TARGETS = 3


def network_of(outputs: int) -> Network:
    return Network((4,), [Dense(outputs)], MeanSquaredError(), name="tiny")


def opened(open_: Any, *arguments: Any, **named: Any) -> tuple[Any, list[str]]:
    """Return what a function returns, and the notes that it shows."""
    shown: list[str] = []
    with notes_shown(shown.append):
        found = open_(*arguments, **named)
    return found, shown


def random_arrays(random_: random.Random) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return arrays of a file, and the names of those that nothing reads."""
    count = random_.choice((6, 11))
    arrays = {"x": np.ones((count, 4), np.float32), "y": np.ones((count, 1), np.float32)}
    others = random_.sample(
        ("z", "classes", "x_test", "y_val", "id", "Y", "ŷ"), random_.randint(0, 3)
    )
    return {**arrays, **{name: np.zeros(2) for name in others}}, others


def test_arrays_that_nothing_reads_are_shown_by_all_that_open_data(tmp_path: Path) -> None:
    random_, network = random.Random(5), network_of(1)
    for number in range(200):
        arrays, others = random_arrays(random_)
        path = tmp_path / f"{number}.npz"
        np.savez(path, **arrays)
        note = [f"arrays are left out: {', '.join(sorted(others))}"] if others else []
        data, shown = opened(open_data, f"npz:{path}", network)
        assert shown == list(data.notes) == note
        assert opened(dataset_from, arrays, network)[1] == note
        assert opened(dataset_from, data, network)[1] == note
        inputs, shown = opened(open_inputs, path, data.preprocessing, outputs=1)
        assert shown == list(inputs.notes) == note


def test_targets_are_written_for_each_output_or_the_reason_is_shown(tmp_path: Path) -> None:
    """An array y of any shape and type next to x: its numbers, or a line; never neither."""
    random_, written = random.Random(6), 0
    path = tmp_path / "new.npz"
    preprocessing = dataset_from((np.ones((9, 4)), np.ones((9, 1))), network_of(1)).preprocessing
    for _ in range(300):
        outputs, count = random_.randint(1, MOST_TARGETS), random_.randint(1, 5)
        rows = random_.choice((count, count, count, count + 1))
        shape = random_.choice(
            ((rows,), (rows, outputs), (rows, outputs), (rows, outputs, 1), (rows, 1),
             (rows, random_.randint(0, MOST_TARGETS)), ()),
        )  # fmt: skip
        kind = random_.choice(("f4", "f8", "i8", "u1", "?", "U3"))
        y = np.array(random_.choices(range(100), k=int(np.prod(shape)))).reshape(shape).astype(kind)
        np.savez(path, x=np.zeros((count, 4), np.float32), y=y)
        inputs, shown = opened(open_inputs, path, preprocessing, outputs=outputs)
        fits = kind != "U3" and y.size == count * outputs and y.shape[:1] == (count,)
        assert fits == (inputs.targets is not None)
        assert fits != bool(shown), (shape, kind, outputs, count, shown)
        if fits:
            written += 1
            texts = np.array(inputs.targets)
            assert texts.shape == (count, outputs)
            assert texts.astype(float).tolist() == y.reshape(count, outputs).astype(float).tolist()
        else:
            assert shown[0].startswith("targets are left out, because y ")
    assert written > 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(6):
            image = Image.new("L", (8, 8), 40 * number + len(name) * (name == "dog"))
            image.save(tmp_path / "images" / name / f"{number}.png")
    (tmp_path / "images" / "list.md").write_text("no image")
    return tmp_path


NOTE = "data: 1 file is left out: no images: 1 (1 .md)"


@pytest.mark.parametrize(
    "command",
    ["data describe {data}", "data check {data}", "data show {data} --output {tmp}/a.png",
     "data convert {data} --output {tmp}/arrays", "describe model0 --data {data}"],
)  # fmt: skip
def test_commands_print_each_note_once(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"folder:{folder / 'images'}"
    assert run(command.format(data=data, tmp=folder).split(), is_rank_zero=True) == 0
    assert capsys.readouterr().out.splitlines().count(NOTE) == 1


@pytest.mark.parametrize(
    "command", ["data describe {data} --json", "describe model0 --json --data {data}"]
)
def test_notes_leave_output_for_programs_alone(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command.format(data=f"folder:{folder / 'images'}").split(), is_rank_zero=True) == 0
    printed = capsys.readouterr()
    json.loads(printed.out)
    assert printed.err.splitlines() == [f"dptrain: {NOTE}"]


def test_notes_are_shown_by_the_inner_block_and_only_there() -> None:
    outer: list[str] = []
    inner: list[str] = []
    show_notes(["unheard"])
    with notes_shown(outer.append):
        with notes_shown(inner.append):
            show_notes(["a", "b", "a"])
        show_notes(["a"])
    show_notes(["unheard"])
    assert (outer, inner) == (["a"], ["a", "b"])
