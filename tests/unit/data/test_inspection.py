"""`dptrain data`: descriptions, problems, grids and conversions of data sets."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import dptrain
from dptrain.cli.main import cli, run
from dptrain.data import SOURCES, Augmentation, network_for, open_data
from dptrain.data.conversion import convert_data
from dptrain.data.decoding import keep_decoded
from dptrain.data.grid import GAP, sample_grid
from dptrain.data.inspection import describe_data, find_problems
from dptrain.errors import UserError
from dptrain.network import Dense, Flatten, Network

TINY = Network((3, 8, 8), [Flatten(), Dense(3)], name="tiny")


def write_npz(path: Path, **changes: Any) -> str:
    numbers = np.random.default_rng(0)
    arrays = {
        "x_train": numbers.integers(0, 256, (12, 3, 8, 8), np.uint8),
        "y_train": np.arange(12) % 3,
        "x_test": numbers.integers(0, 256, (6, 3, 8, 8), np.uint8),
        "y_test": np.arange(6) % 3,
        **changes,
    }
    np.savez(path, **arrays)
    return f"npz:{path}"


def command(*arguments: object) -> Any:
    return CliRunner().invoke(cli, ["data", *map(str, arguments)])


def test_every_kind_of_data_is_listed() -> None:
    printed = command("list").output
    assert all(source.form(name) in printed for name, source in SOURCES.items())
    assert set(json.loads(command("list", "--json").output)) == set(SOURCES)


def test_a_description_has_counts_and_ranges(tmp_path: Path) -> None:
    found = describe_data(open_data(write_npz(tmp_path / "a.npz"), TINY))
    training, test = found["splits"]
    assert (training["samples"], test["samples"]) == (12, 6)
    assert training["classes"] == {"0": 4, "1": 4, "2": 4}
    assert -1 <= training["inputs"]["low"] < training["inputs"]["high"] <= 1
    assert found["stored_type"] == "uint8"
    x = np.load(tmp_path / "a.npz")["x_train"] / 127.5 - 1
    assert training["inputs"]["mean"] == pytest.approx(x.mean(), abs=1e-6)
    assert training["inputs"]["deviation"] == pytest.approx(x.std(), rel=1e-6)


def test_values_are_described_in_their_unit() -> None:
    data = open_data("irradiance?samples=200", dptrain.get_network("mlp-8"))
    low, high = describe_data(data)["splits"][0]["targets"]
    assert 0 < low < high < 1.5
    printed = command("describe", "irradiance?samples=200", "--network", "mlp-8").output
    assert f"{low:.4g} to {high:.4g}" in printed


def test_the_network_of_a_data_set_has_its_shape(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (5, 6)).save(tmp_path / "images" / name / "1.png")
    x, y = np.zeros((12, 7, 6), np.uint8), np.arange(12) % 3
    np.savez(tmp_path / "a.npz", x=x, y=y)
    np.save(tmp_path / "x.npy", np.zeros((12, 4)))
    np.save(tmp_path / "y.npy", np.full((12, 2), 0.5))
    (tmp_path / "t.csv").write_text("a,b,y\n" + "1,2,3\n" * 20)
    expected = {
        f"folder:{tmp_path / 'images'}": ((3, 32, 32), 3, "classes"),
        f"npz:{tmp_path / 'a.npz'}": ((1, 7, 6), 3, "classes"),
        f"npy:{tmp_path / 'x.npy'},{tmp_path / 'y.npy'}": ((4,), 2, "values"),
        f"csv:{tmp_path / 't.csv'}?target=y&window=3": ((6,), 1, "values"),
    }
    for spec, (shape, outputs, targets) in expected.items():
        network = network_for(spec)
        assert network is not None
        data = open_data(spec, network)
        assert (data.input_shape, data.num_outputs) == (shape, outputs)
        assert network.loss.targets == targets
        if not spec.startswith("folder"):
            assert open_data(spec, network).input_shape == shape
    assert network_for("digits") is None
    with pytest.raises(UserError, match=r"missing\.npz does not exist"):
        network_for(f"npz:{tmp_path / 'missing.npz'}")


def test_good_data_has_no_problems(tmp_path: Path) -> None:
    spec = write_npz(tmp_path / "a.npz")
    assert not find_problems(open_data(spec, TINY))
    done = command("check", "digits")
    assert (done.exit_code, "no problem found" in done.output) == (0, True)


def test_problems_are_found(tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=(12, 3, 8, 8)).astype(np.float32)
    spec = write_npz(
        tmp_path / "a.npz", x_train=x, x_test=x[[2, 9]], y_train=np.arange(12) % 2,
        y_test=np.array([0, 2]),
    )  # fmt: skip
    missing, repeated = find_problems(open_data(spec, TINY))
    assert missing == "no training sample has the class 2"
    assert repeated.startswith("2 of 2 test samples are also training samples")


def test_constant_inputs_are_a_problem(tmp_path: Path) -> None:
    zeros = np.zeros((12, 3, 8, 8), np.uint8)
    problems = find_problems(open_data(write_npz(tmp_path / "a.npz", x_train=zeros), TINY))
    assert problems == ["all inputs of the training samples are -1"]


def test_a_problem_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.random.default_rng(3).normal(size=(20, 3, 32, 32)).astype(np.float32)
    arrays = {"x_train": x, "y_train": np.arange(20) % 9, "x_test": x / 2, "y_test": np.full(20, 9)}
    np.savez(tmp_path / "a.npz", **arrays)
    assert run(["data", "check", f"npz:{tmp_path / 'a.npz'}"], is_rank_zero=True) == 2
    assert capsys.readouterr().err == "dptrain: npz: no training sample has the class 9\n"
    x[3, 0, 0, 0] = np.nan
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(20) % 10)
    assert run(["data", "check", f"npz:{tmp_path / 'a.npz'}"], is_rank_zero=True) == 2
    assert "a.npz" in capsys.readouterr().err


def test_a_grid_shows_the_samples(tmp_path: Path) -> None:
    data = open_data(write_npz(tmp_path / "a.npz"), TINY)
    pixels = np.asarray(sample_grid(data, data.train, 12))
    first = np.load(tmp_path / "a.npz")["x_train"][0].transpose(1, 2, 0)
    tile = pixels[GAP : GAP + 96, GAP : GAP + 96]
    # Each pixel is enlarged 12 times.
    np.testing.assert_allclose(tile[::12, ::12].astype(int), first, atol=1)


def test_a_grid_shows_what_augmentation_makes_of_samples(tmp_path: Path) -> None:
    data = open_data(write_npz(tmp_path / "a.npz"), TINY)
    change = Augmentation(crop=2, flip=True)
    pixels = np.asarray(sample_grid(data, data.train, 2, augmentation=change, epochs=3, seed=5))
    x = np.empty((1, 3, 8, 8), np.float32)
    data.train.read(np.array([6]), x, np.empty(1, np.int32))
    change.apply(x, seed=5, epoch=2, samples=np.array([6]))
    left, top = GAP + 3 * (96 + GAP), GAP + 96 + 14 + GAP
    tile = pixels[top : top + 96, left : left + 96][::12, ::12]
    np.testing.assert_allclose(tile, (x[0].transpose(1, 2, 0) + 1) * 127.5, atol=0.51)


def test_vectors_have_no_grid() -> None:
    data = open_data("irradiance?samples=200", dptrain.get_network("mlp-8"))
    with pytest.raises(UserError, match="samples of irradiance are 50 numbers and no images"):
        sample_grid(data, data.train, 4)


def test_show_writes_an_image(tmp_path: Path) -> None:
    done = command("show", "digits", "--samples", 6, "--crop", 2, "--output", tmp_path / "a.png")
    assert done.output == f"written: {tmp_path / 'a.png'}\n"
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (6 * 100 + GAP, 6 * 114 + GAP)


@pytest.mark.parametrize("source", ["npz", "folder", "mixed folder", "digits"])
def test_converted_data_has_the_same_samples(tmp_path: Path, source: str) -> None:
    spec, network = "digits", dptrain.get_network("model0")
    if source == "npz":
        spec, network = write_npz(tmp_path / "a.npz"), TINY
    elif source != "digits":
        numbers = np.random.default_rng(2)
        for name in ("ash", "birch", "cedar"):
            (tmp_path / "trees" / name).mkdir(parents=True)
            for i in range(6):
                size = 8 + i % 2 * (source == "mixed folder")
                pixels = numbers.integers(0, 256, (size, 8, 3), np.uint8)
                Image.fromarray(pixels).save(tmp_path / "trees" / name / f"{i}.png")
        spec, network = f"folder:{tmp_path / 'trees'}", TINY
    before = keep_decoded(open_data(spec, network), 1)
    written = convert_data(before, tmp_path / "arrays")
    after = open_data(f"npy:{tmp_path / 'arrays'}", network)
    assert after.classes == before.classes
    assert (tmp_path / "arrays" / "classes.txt") in written
    for one, other in ((before.train, after.train), (before.test, after.test)):
        assert len(one) == len(other)
        indices = np.arange(len(one))
        pairs = [np.empty((len(one), *network.input_shape), np.float32) for _ in range(2)]
        labels = [np.empty(len(one), np.int32) for _ in range(2)]
        one.read(indices, pairs[0], labels[0])
        other.read(indices, pairs[1], labels[1])
        np.testing.assert_array_equal(*pairs)
        np.testing.assert_array_equal(*labels)
    if source in ("npz", "folder"):
        assert np.load(tmp_path / "arrays" / "x_train.npy", mmap_mode="r").dtype == np.uint8


def test_conversion_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    data = open_data("digits", dptrain.get_network("model0"))
    with pytest.raises(UserError, match="is not empty; choose another --output"):
        convert_data(data, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left")])
def test_a_conversion_that_ends_early_leaves_no_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    data = open_data(write_npz(tmp_path / "a.npz"), TINY)

    def fail(*_: object) -> None:
        raise error

    if isinstance(error, OSError):
        monkeypatch.setattr(os, "posix_fallocate", fail)
    expected = UserError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match="choose another --output" if error.args else None):
        convert_data(data, tmp_path / "arrays", lambda count: None if count == 12 else fail())
    assert not list((tmp_path / "arrays").iterdir())


def test_show_overwrites_a_file_only_if_it_may(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_text("mine")
    done = command("show", "digits", "--samples", 6, "--output", path)
    assert isinstance(done.exception, UserError)
    assert f"{path} exists already" in str(done.exception)
    assert path.read_text() == "mine"
    assert command("show", "digits", "--samples", 6, "--output", path, "--replace").exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_tables_are_not_converted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n" + "".join(f"{i},{2 * i}\n" for i in range(40)))
    network = Network((1,), [Dense(1)], dptrain.MeanSquaredError(), "line")
    data = open_data(f"csv:{tmp_path / 'a.csv'}?target=b", network)
    with pytest.raises(UserError, match="has columns, which arrays cannot describe"):
        convert_data(data, tmp_path / "b")
