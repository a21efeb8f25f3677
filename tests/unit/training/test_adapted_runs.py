"""Runs of networks that were adapted to their data: first lines, resume, evaluation, export."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import dptrain
from dptrain import Trainer, UserError, get_network
from dptrain.cli.main import run
from dptrain.cli.scale import _data_lines, _design
from dptrain.experiments.sweep_cases import Design, list_cases
from dptrain.training.job import open_network
from dptrain.training.settings import load_settings

SETTINGS: dict[str, Any] = {
    "backend": "reference", "progress": False, "steps": 2, "batch_size": 4, "crop": 0,
    "schedule": "constant", "baseline_steps": 0,
}  # fmt: skip


def write_folder(folder: Path, names: tuple[str, ...], mode: str = "L", count: int = 5) -> Path:
    """Write images of a grey level for each class."""
    for index, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            level = 30 + 200 * index // len(names) + number
            Image.new("L", (9, 8), level).convert(mode).save(folder / name / f"{number}.png")
    return folder


def arrays(names: tuple[str, ...], count: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Return the images of `write_folder` with the integers that their names are."""
    levels = [
        30 + 200 * i // len(names) + number for i in range(len(names)) for number in range(count)
    ]
    x = np.ones((len(levels), 8, 9), np.uint8) * np.array(levels, np.uint8)[:, None, None]
    return x, np.repeat([int(name) for name in names], count)


@pytest.mark.parametrize(("count", "mode", "channels"), [(2, "L", 1), (5, "RGB", 3), (12, "L", 1)])
def test_a_folder_decides_on_classes_and_channels(
    tmp_path: Path, count: int, mode: str, channels: int
) -> None:
    folder = write_folder(tmp_path / "photos", tuple(f"k{i}" for i in range(count)), mode)
    trainer = Trainer("model-small", f"folder:{folder}", **SETTINGS)
    assert trainer.network.input_shape == (channels, 16, 16)
    assert trainer.network.num_outputs == count
    assert trainer.predict(np.zeros((1, 8, 9), np.uint8)).shape == (1, count)


@pytest.mark.parametrize(
    ("command", "trains"),
    [
        (("find-rate", "--steps", "12"), True),
        pytest.param(
            ("study", "sweep", "--set", "momentum=0.5,0.9", "--steps", "2", "--output", "out"),
            True, marks=pytest.mark.more,
        ),
        pytest.param(
            ("study", "variants", "--filters", "2,4", "--steps", "3", "--output", "out"), True,
            marks=pytest.mark.more,
        ),
        (("train", "--dry-run"), True),
        pytest.param(("profile", "--steps", "2"), True, marks=pytest.mark.more),
        pytest.param(("layers",), False, marks=pytest.mark.more),
        (("bench", "--batch-sizes", "2", "--samples", "none", "--output", "out",
          "--seconds-per-case", "0.01"), False),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_every_command_states_the_network_and_the_files_that_it_leaves_out(
    command: tuple[str, ...], trains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (write_folder(tmp_path / "photos", ("a", "b", "c")) / "a" / "notes.txt").write_text("no image")
    network = ("--network", "model-small") if trains else ("model-small",)
    arguments = (*network, "--data", "folder:photos", "--backend", "reference")
    split = 1 + (command[0] == "study")
    words = [*command[:split], *arguments, *command[split:]]
    assert run(words, is_rank_zero=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("network: model-small adapted to the data: ") for line in lines) == 1
    left_out = "data: 1 file is left out: no images: 1 (1 .txt)"
    assert sum(line.startswith(left_out) for line in lines) == 1


def test_a_study_of_scaling_states_them_before_it_writes_anything(tmp_path: Path) -> None:
    (write_folder(tmp_path / "photos", ("a", "b", "c")) / "a" / "notes.txt").write_text("no image")
    flags = {"network": "model-small", "data": f"folder:{tmp_path / 'photos'}", "ranks": "1"}
    _, design = _design(None, tmp_path / "out", flags)
    network, *data = _data_lines(design)
    assert network.endswith("layer dense2 with 3 outputs (published: 10)")
    assert data[0].startswith("data: images of ")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="does not exist; expected a directory"):
        _data_lines(replace(design, settings={**design.settings, "data": "folder:nowhere"}))


def test_one_image_with_colours_makes_three_channels(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "photos", ("a", "b"))
    Image.new("RGB", (9, 8), (200, 0, 0)).save(folder / "b" / "red.png")
    assert Trainer("model-small", f"folder:{folder}", **SETTINGS).network.input_shape[0] == 3


def test_the_first_lines_say_what_was_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "photos", ("a", "b", "c"))
    command = ["train", "--network", "model-small", "--data", f"folder:{folder}", "--dry-run"]
    assert run([*command, "--backend", "reference"], is_rank_zero=True) == 0
    expected = (
        "network: model-small adapted to the data: 1 input channel (published: 3), layer dense2 "
        "with 3 outputs (published: 10)"
    )
    assert expected in capsys.readouterr().out.splitlines()


def test_a_run_is_resumed_and_loaded_with_the_same_network(tmp_path: Path) -> None:
    data = f"folder:{write_folder(tmp_path / 'photos', ('a', 'b', 'c'))}"
    trainer = Trainer("model-small", data, run_dir=tmp_path / "run", **SETTINGS)
    trainer.fit()
    assert not (tmp_path / "run" / "network.toml").exists()
    assert 'network = "model-small"' in (tmp_path / "run" / "config.toml").read_text()
    resumed = Trainer.resume(tmp_path / "run", steps=3, progress=False)
    assert resumed.network == trainer.network
    resumed.fit()
    model = dptrain.load(tmp_path / "run", backend="reference")
    assert model.network == trainer.network
    assert model.classes == ("a", "b", "c")


def test_a_run_of_an_earlier_version_keeps_its_network(tmp_path: Path) -> None:
    data = f"folder:{write_folder(tmp_path / 'photos', ('a', 'b', 'c'))}"
    # Earlier versions read grey images with the three channels of the published network.
    network = get_network("model-small", outputs=3)
    network = replace(network, layers=network.layers)
    trainer = Trainer(network, data, run_dir=tmp_path / "run", **SETTINGS)
    trainer.fit()
    assert 'network = "model-small"' in (tmp_path / "run" / "config.toml").read_text()
    assert Trainer("model-small", data, **SETTINGS).network.input_shape == (1, 16, 16)
    resumed = Trainer.resume(tmp_path / "run", steps=3, progress=False)
    assert resumed.network == network
    assert resumed.step == 2


def test_a_run_whose_data_has_more_classes_names_the_data(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "photos", ("a", "b", "c"))
    Trainer("model-small", f"folder:{folder}", run_dir=tmp_path / "run", **SETTINGS).fit()
    write_folder(folder, ("d",))
    with pytest.raises(UserError, match=r"has 4 classes .* restore the data of the run"):
        Trainer.resume(tmp_path / "run", steps=3, progress=False)


def test_sweeps_change_the_adapted_network(tmp_path: Path) -> None:
    data = f"folder:{write_folder(tmp_path / 'photos', ('a', 'b', 'c'))}"

    def make(replaced: Any) -> Any:
        return load_settings({"network": "model-small", "data": data, **replaced}, {})

    assert open_network(make({})).num_outputs == 3
    for case in list_cases(make, Design({"kernel": ["3", "5"]}, [0])):
        assert case.network is not None
        assert (case.network.input_shape, case.network.num_outputs) == ((1, 16, 16), 3)


def test_describe_shows_the_network_for_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"folder:{write_folder(tmp_path / 'photos', ('a', 'b', 'c'))}"
    assert run(["describe", "model-small", "--json"], is_rank_zero=True) == 0
    assert json.loads(capsys.readouterr().out)["output_shape"] == [10]
    assert run(["describe", "model-small", "--data", data, "--toml"], is_rank_zero=True) == 0
    (tmp_path / "mine.toml").write_text(capsys.readouterr().out, encoding="utf-8")
    assert get_network(tmp_path / "mine.toml").output_shape == (3,)


def test_labels_that_are_integers_meet_folders(tmp_path: Path) -> None:
    names = tuple(str(i) for i in range(12))
    folder = write_folder(tmp_path / "photos", names)
    trainer = Trainer(
        "model-small", f"folder:{folder}", **{**SETTINGS, "steps": 40, "learning_rate": 0.02}
    )
    trainer.fit()
    trainer.save(tmp_path / "model")
    model = dptrain.load(tmp_path / "model", backend="reference")
    x, y = arrays(names)
    np.savez(tmp_path / "new.npz", x=x, y=y)
    # Of other data than that of training, all samples are evaluated.
    by_name = model.evaluate(f"folder:{write_folder(tmp_path / 'same', names)}")
    for data in ((x, y), (x, np.eye(12)[y]), f"npz:{tmp_path / 'new.npz'}"):
        by_value = model.evaluate(data)
        assert by_value["confusion"] == by_name["confusion"]
        for found in (by_value, trainer.evaluate(data)):
            assert found["loss"] == pytest.approx(by_name["loss"], rel=1e-6)
    command = ["predict", str(tmp_path / "model"), "-i", str(tmp_path / "new.npz")]
    assert run([*command, "-o", str(tmp_path / "new.csv")], is_rank_zero=True) == 0
    with (tmp_path / "new.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["target"] for row in rows] == [str(label) for label in y]
    hits = [row["class"] == row["target"] for row in rows]
    assert np.mean(hits) == pytest.approx(by_name["accuracy"])


def test_integers_do_not_meet_names_without_a_mapping(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "photos", ("cat", "dog"))
    x, y = arrays(("1", "0"))  # The first images are cats.
    trainer = Trainer("model-small", f"folder:{folder}", **SETTINGS)
    trainer.save(tmp_path / "model")
    model = dptrain.load(tmp_path / "model", backend="reference")
    expected = model.evaluate(f"folder:{write_folder(tmp_path / 'same', ('cat', 'dog'))}")
    for owner in (trainer, model):
        with pytest.raises(UserError, match=r"classes=\['cat', 'dog'\]"):
            owner.evaluate((x, y))
        for classes in (["dog", "cat"], {0: "dog", 1: "cat"}):
            found = owner.evaluate((x, y), classes=classes)
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    with pytest.raises(UserError, match="in its specification"):
        model.evaluate(f"folder:{folder}", classes=["dog", "cat"])


def test_arrays_may_have_names_in_training(tmp_path: Path) -> None:
    x, y = arrays(("1", "0"))
    trainer = Trainer("model-small", (x, y), classes=["dog", "cat"], **SETTINGS)
    assert trainer.data.classes == ("dog", "cat")
    folder = write_folder(tmp_path / "photos", ("cat", "dog"))
    on_folder = trainer.evaluate(f"folder:{folder}")
    on_arrays = trainer.evaluate((x, y), classes=["dog", "cat"])
    assert on_arrays["loss"] == pytest.approx(on_folder["loss"], rel=1e-6)
