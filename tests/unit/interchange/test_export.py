"""`dptrain export` and `TrainedModel.export`: files, metadata, and one line for every mistake."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import dptrain
from dptrain import Trainer, make_replica
from dptrain.cli.main import run
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.interchange.contents import without_folders
from dptrain.network import BatchNorm2d, Conv2d, Dense, Flatten, Network
from dptrain.training.persistence.weights import load_weights

NETWORK = Network(
    (3, 8, 8), [Conv2d(4, bias=False), BatchNorm2d(), Flatten(), Dense(3)], name="small"
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained network."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (20, 3, 8, 8), dtype=np.uint8)
    data = (images, rng.integers(0, 3, 20), images[:5], np.arange(5) % 3)
    trainer = Trainer(NETWORK, data, steps=3, seed=5, backend="reference", progress=False)
    trainer.fit()
    return trainer.save(tmp_path_factory.mktemp("run") / "saved")


def test_safetensors_has_arrays_and_facts(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.safetensors"
    assert run(["export", str(saved), "--output", str(path)], is_rank_zero=True) == 0
    assert capsys.readouterr().out == f"small, model of step 3, in {path}\n"
    model = dptrain.load(saved, backend="reference")
    with safe_open(path, "np") as file:
        facts = file.metadata()
        names = {"conv1.weight", "batchnorm1.weight", "batchnorm1.bias", "dense1.weight"}
        names |= {"batchnorm1.running_mean", "batchnorm1.running_var", "dense1.bias"}
        assert set(file.keys()) == names
        for name in names:
            expected = {**model.parameters, **model.statistics}[name]
            np.testing.assert_array_equal(file.get_tensor(name), expected.astype(np.float32))
    assert facts["dptrain.version"] == dptrain.__version__
    assert facts["dptrain.network"] == "small"
    assert (facts["dptrain.seed"], facts["dptrain.step"]) == ("5", "3")
    assert len(json.loads(facts["dptrain.outputs"])) == 3
    found = Preprocessing.from_dict(json.loads(facts["dptrain.preprocessing"]))
    assert found == model.preprocessing
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("suffix", [".onnx", ".py", ".safetensors"])
def test_two_exports_have_the_same_bytes(saved: Path, tmp_path: Path, suffix: str) -> None:
    contents = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        files = dptrain.load(saved, backend="reference").export(tmp_path / name / f"model{suffix}")
        contents.append([file.read_bytes() for file in files])
    assert contents[0] == contents[1]


@pytest.mark.parametrize("suffix", ["", ".csv", ".npz", ".npy", ".png", ".txt"])
def test_a_named_pipe_is_not_opened_for_predictions(
    saved: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / f"pipe{suffix}"
    os.mkfifo(pipe)
    arguments = ["predict", str(saved), "-i", str(pipe), "-o", str(tmp_path / "out.csv")]
    assert run(arguments, is_rank_zero=True) == 2
    assert "it is a named pipe; expected a regular file" in capsys.readouterr().err


def test_the_file_is_read_as_weights(saved: Path, tmp_path: Path) -> None:
    model = dptrain.load(saved, backend="reference")
    assert model.export(tmp_path / "w.safetensors") == (tmp_path / "w.safetensors",)
    replica = make_replica(NETWORK, "reference", seed=9, training=False)
    load_weights(replica, tmp_path / "w.safetensors")
    for name, values in model.parameters.items():
        stored = values.astype(np.float32)
        np.testing.assert_array_equal(replica.parameters[name], stored)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("digits", "digits"),
        ("folder:/a/b c/images/", "folder:images/"),
        ("npy:/a/x.npy,/b/y.npy?fit=crop", "npy:x.npy,y.npy?fit=crop"),
        ("csv:t.csv?target=u/v", "csv:t.csv?target=u/v"),
    ],
)
def test_files_contain_no_folders_of_the_data(data: str, expected: str) -> None:
    assert without_folders(data) == expected


def test_the_digest_is_that_of_the_arrays(saved: Path, tmp_path: Path) -> None:
    digests = []
    for number, factor in enumerate((1.0, 1.0, 2.0)):
        model = dptrain.load(saved, backend="reference")
        model.replica.parameters["dense1.bias"] = factor * model.parameters["dense1.bias"]
        (path,) = model.export(tmp_path / f"{number}.safetensors")
        with safe_open(path, "np") as file:
            digests.append(file.metadata()["dptrain.digest"])
    assert digests[0] == digests[1] != digests[2]


def test_mistakes_are_one_line(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken.safetensors"
    taken.write_text("mine")
    for output, message in (
        (taken, "taken.safetensors exists already; choose another --output, or overwrite it with"),
        (tmp_path / "m.safetensor", "has the type '.safetensor'; expected .onnx,"),
        (tmp_path / "m", "has the type 'none'; expected"),
        (tmp_path / "no" / "m.safetensors", "No such file or directory; choose another --output"),
    ):
        assert run(["export", str(saved), "-o", str(output)], is_rank_zero=True) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert taken.read_text() == "mine"
    assert run(["export", str(saved), "-o", str(taken), "--replace"], is_rank_zero=True) == 0
    assert taken.read_bytes() != b"mine"
    absent = ["export", str(tmp_path / "absent"), "-o", str(tmp_path / "x.safetensors")]
    assert run(absent, is_rank_zero=True) == 2
