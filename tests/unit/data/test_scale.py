"""The scale of arrays: pixels of any type are the same pixels, and other scales are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dptrain.data import Preprocessing, open_data
from dptrain.data.inputs import open_inputs
from dptrain.data.sources.objects import dataset_from
from dptrain.errors import UserError
from dptrain.network import Dense, Flatten, Network, get_network
from tests.tiers import tiered

PIXEL_TYPES = ("uint8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64")


def inputs_of(data: Any, network: Network) -> np.ndarray:
    """Return all inputs in the order of the rows of a data set that was opened as a whole."""
    x = np.empty((len(data.test), *network.input_shape), np.float32)
    data.test.read(np.arange(len(x)), x, np.empty(len(x), np.int32))
    return x


def random_pixels(rng: np.random.Generator) -> np.ndarray:
    """Return uint8 (n, C, H, W) with at least one bright pixel."""
    n, c, h, w = rng.integers(5, 12), rng.choice([1, 3]), *rng.integers(4, 9, 2)
    x = rng.integers(0, 256, (n, c, h, w), dtype=np.uint8)
    x[:, 0, 0, 0] = rng.integers(128, 256, n)
    return x


def in_some_order(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the same images with channels first, last, or left out."""
    orders = [x, x.transpose(0, 2, 3, 1), *([x[:, 0]] if x.shape[1] == 1 else [])]
    return orders[rng.integers(len(orders))]


def network_of(shape: tuple[int, ...]) -> Network:
    return Network(shape, [Flatten(), Dense(2)], name="small")


@pytest.mark.parametrize("block", tiered(range(5), (0,)))
def test_the_same_pixels_of_any_type_are_the_same_inputs(tmp_path: Path, block: int) -> None:
    for seed in range(60 * block, 60 * block + 60):
        rng = np.random.default_rng(seed)
        pixels = random_pixels(rng)
        expected = pixels.astype(np.float64) * 2 / 255 - 1
        network, y = network_of(pixels.shape[1:]), np.arange(len(pixels)) % 2
        first, second = (str(name) for name in rng.choice(PIXEL_TYPES, 2))
        np.savez(tmp_path / "a.npz", x=in_some_order(pixels.astype(first), rng), y=y)
        data = open_data(f"npz:{tmp_path / 'a.npz'}", network, split=False)
        np.testing.assert_allclose(inputs_of(data, network), expected, atol=1e-6)
        assert data.preprocessing.has_pixels
        assert bool(data.notes) == (first != "uint8")
        if data.preprocessing.is_8bit and second.startswith("float"):
            second = "int64"  # Floats are expected from -1 to 1.
        np.save(tmp_path / "x.npy", in_some_order(pixels.astype(second), rng))
        found = open_inputs(tmp_path / "x.npy", data.preprocessing)
        x = np.empty(expected.shape, np.float32)
        found.samples.read(np.arange(len(x)), x, np.empty(len(x), np.int32))
        np.testing.assert_allclose(x, expected, atol=1e-6)
        raw = in_some_order(pixels.astype(second), rng)
        np.testing.assert_array_equal(data.preprocessing.apply(raw), x)
        scaled = dataset_from((pixels / 255, y), network, split=False)
        np.testing.assert_allclose(inputs_of(scaled, network), pixels / 255, atol=1e-6)
        assert scaled.notes == ()


@pytest.mark.parametrize("block", tiered(range(5), (0,)))
def test_images_of_another_scale_are_refused(block: int) -> None:
    for seed in range(40 * block, 40 * block + 40):
        rng = np.random.default_rng(seed)
        pixels = random_pixels(rng)
        y, network = np.arange(len(pixels)) % 2, network_of(pixels.shape[1:])
        deep = pixels.astype(np.int64)
        x, words = [
            (deep.astype(np.uint16) * 257, "uint16"),
            (deep * 16, "int64"),
            ((deep * 257).astype(np.float64), "float64"),
            ((deep - 128 * (deep < 255) - 255 * (deep == 255)).astype(np.int64) * 2, "int64"),
        ][rng.integers(4)]
        x[0].flat[0] = x.max() if x.max() > 255 else -200
        with pytest.raises(UserError, match=rf"whole numbers from .* \({words}\); .* their scale"):
            dataset_from((x, y), network)


@pytest.mark.parametrize(
    ("train", "test", "is_refused"),
    [
        (1 / 255, 1.0, True),
        (1.0, 1 / 255, True),
        (1 / 25, 1.0, True),
        (1.0, 1.0, False),
        (1 / 255, 2 / 255, False),
    ],
)
@pytest.mark.parametrize("flat", [False, True])
def test_splits_of_different_scales_are_refused(
    train: float, test: float, is_refused: bool, flat: bool
) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (30, 3, 4, 4)).astype(np.float32)
    x = x.reshape(30, -1) if flat else x
    network = Network(x.shape[1:], [*([] if flat else [Flatten()]), Dense(2)], name="small")
    y = np.arange(30) % 2
    arrays = (x[:20] * np.float32(train), y[:20], x[20:] * np.float32(test), y[20:])
    if not is_refused:
        assert len(dataset_from(arrays, network).train) == 20
        return
    with pytest.raises(UserError, match=r"x_train has numbers from 0 to .* and x_test from 0 to"):
        dataset_from(arrays, network)


def test_samples_of_different_scales_in_one_array_are_refused() -> None:
    x = np.random.default_rng(0).integers(0, 256, (30, 3, 4, 4)).astype(np.float64)
    x[::3] /= 255
    with pytest.raises(UserError, match="33% of the samples have numbers up to 1, others"):
        dataset_from((x, np.arange(30) % 2), network_of((3, 4, 4)))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.ones((9, 1, 4, 4), np.uint8), "reach only 1 of 255"),
        (np.full((9, 1, 4, 4), 900.5), "from 900.5 to 900.5 (float64), an unusual scale"),
        (np.full((9, 1, 4, 4), 1e-3), "an unusual scale"),
        (np.full((9, 7), 300), "from 300 to 300 (int64), an unusual scale"),
        (np.full((9, 1, 4, 4), 100, np.int8), "from 100 to 100 (int8), an unusual scale"),
    ],
)
def test_an_unusual_scale_is_mentioned(x: np.ndarray, words: str) -> None:
    flatten = [Flatten()] if x.ndim == 4 else []
    network = Network(x.shape[1:], [*flatten, Dense(2)], name="small")
    data = dataset_from((x, np.arange(9) % 2), network, split=False)
    assert words in data.notes[0]
    expected = x / 127.5 - 1 if x.dtype == np.uint8 else x
    np.testing.assert_allclose(inputs_of(data, network), expected, rtol=1e-6)


def test_another_normalisation_of_the_test_is_mentioned() -> None:
    x, y = np.random.default_rng(0).random((20, 1, 4, 4)), np.arange(20) % 2
    data = dataset_from((x, y, 2 * x - 1, y), network_of((1, 4, 4)))
    assert data.notes[0].endswith("are they on the same scale?")


def test_small_whole_numbers_are_no_pixels() -> None:
    """Masks, boards and counts."""
    x = np.random.default_rng(0).integers(-1, 17, (20, 2, 4, 4))
    network = network_of((2, 4, 4))
    data = dataset_from((x, np.arange(20) % 2), network, split=False)
    np.testing.assert_array_equal(inputs_of(data, network), x)
    assert data.notes == ()


@pytest.mark.parametrize("block", tiered(range(4), (0,)))
def test_labels_of_any_shape_give_the_same_split(block: int) -> None:
    for seed in range(60 * block, 60 * block + 60):
        rng = np.random.default_rng(seed)
        classes, count = int(rng.integers(2, 6)), int(rng.integers(10, 60))
        labels = rng.integers(0, classes, count)
        x = np.arange(count, dtype=np.float32)[:, None] / count
        network = Network((1,), [Dense(classes)], name="small")
        one_hot = np.eye(classes)[labels]
        forms = [
            labels, labels[:, None], labels.astype(rng.choice(["uint8", "float32"])),
            labels[:, None].astype(float), one_hot, one_hot.astype(bool), one_hot.astype(np.int8),
        ]  # fmt: skip
        splits = []
        for y in forms:
            data: Any = dataset_from((x, y), network)
            rows = []
            for split in (data.train, data.test):
                found, targets = (
                    np.empty((len(split), 1), np.float32),
                    np.empty(len(split), np.int32),
                )
                split.read(np.arange(len(split)), found, targets)
                rows.append(np.round(found[:, 0] * count).astype(int).tolist())
                np.testing.assert_array_equal(targets, labels[rows[-1]])
            splits.append(rows)
        assert all(rows == splits[0] for rows in splits)
        shares = np.bincount(labels[splits[0][1]], minlength=classes)
        assert (np.abs(shares - np.bincount(labels, minlength=classes) / 5) < 1.01).all()


def test_new_samples_of_a_far_larger_scale_are_refused(tmp_path: Path) -> None:
    """A model of numbers up to 1 gets pixels: other data of an evaluation, and predictions."""
    x, y = np.random.default_rng(0).random((20, 1, 4, 4)), np.arange(20) % 2
    network = network_of((1, 4, 4))
    preprocessing = dataset_from((x, y), network).preprocessing
    assert preprocessing.magnitude == x.max()
    preprocessing = Preprocessing.from_dict(preprocessing.to_dict())
    np.save(tmp_path / "x.npy", 255 * x)
    for read in (
        lambda: dataset_from((255 * x, y), network, preprocessing=preprocessing, split=False),
        lambda: open_inputs(tmp_path / "x.npy", preprocessing),
        lambda: preprocessing.apply(255 * x),
    ):
        with pytest.raises(UserError, match=r"trained on numbers up to 0\.99.* the same scale"):
            read()
    assert (
        len(dataset_from((3 * x, y), network, preprocessing=preprocessing, split=False).test) == 20
    )
    older = {k: v for k, v in preprocessing.to_dict().items() if k != "magnitude"}
    assert Preprocessing.from_dict(older) == preprocessing
    assert Preprocessing.from_dict(older).digest() == preprocessing.digest()


def test_arrays_that_are_not_used_are_named(tmp_path: Path) -> None:
    x, y, network = (
        np.zeros((6, 2), np.float32),
        np.arange(6) % 2,
        Network((2,), [Dense(2)], name="small"),
    )
    split = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    for arrays, names in (
        ({"x": x, "y": y, "ids": y}, "ids"),
        ({"x": x, "y": y}, ""),
        ({**split, "x": x, "y": y}, "x, y"),
        ({**split, "x_val": x, "y_val": y}, ""),
        ({**split, "x_val": x, "y_val": y, "x_valid": x, "y_valid": y}, "x_val, y_val"),
    ):
        notes = (f"arrays are left out: {names}",) if names else ()
        np.savez(tmp_path / "a.npz", **arrays)
        assert open_data(f"npz:{tmp_path / 'a.npz'}", network).notes == notes
        assert dataset_from(arrays, network).notes == notes
    for name, array in {**split, "more": x}.items():
        np.save(tmp_path / f"{name}.npy", array)
    assert open_data(f"npy:{tmp_path}", network).notes == ("arrays are left out: more",)


@pytest.mark.parametrize(("most", "proposed"), [(65535, 65535), (3900, 4095), (300, 511)])
def test_the_scale_of_as_many_bits_is_proposed(most: int, proposed: int) -> None:
    x = np.full((8, 1, 4, 4), most, np.uint16)
    with pytest.raises(UserError, match=f"for example x / {proposed}$"):
        dataset_from((x, np.arange(8) % 2), network_of((1, 4, 4)))


def test_rows_are_taken_as_they_are_and_every_use_says_so(tmp_path: Path) -> None:
    """Whole numbers and floats of any type and range, in training, evaluation and prediction."""
    draw, with_notes = np.random.default_rng(9), 0
    path, network = tmp_path / "x.npz", Network((5,), [Dense(2)], name="rows")
    for _ in range(250):
        dtype = str(draw.choice(["uint8", "int8", "int16", "uint16", "int64", "f4", "f8"]))
        high = draw.choice([1, 12, 100, 127, 255, 256, 4000])
        x = (draw.random((20, 5)) * high).astype(dtype)
        x[0, 0] = min(high, 100 if dtype == "int8" else 255 if dtype == "uint8" else high)
        y = np.arange(20) % 2
        data = dataset_from((x, y), network, split=False)
        expected = x / 127.5 - 1 if dtype == "uint8" else x
        np.testing.assert_allclose(inputs_of(data, network), expected, rtol=1e-6, atol=1e-6)
        saved = data.preprocessing
        np.savez(path, x=x, y=y)
        new = [
            dataset_from((x, y), network, preprocessing=saved, split=False).notes,
            open_data(f"npz:{path}", network, preprocessing=saved, split=False).notes,
            open_inputs(path, saved).notes,
        ]
        unusual = dtype != "uint8" and float(x.max()) > 16
        assert [bool(notes) for notes in new] == [unusual] * 3
        if not unusual:
            continue
        with_notes += 1
        as_they_are = "and are taken as they are"
        assert as_they_are in data.notes[0]
        assert all(f"({x.dtype}) {as_they_are}, as in training" in notes[0] for notes in new)
        is_whole = bool((x == np.floor(x)).all())
        assert ("if they are pixels, pass them as uint8" in data.notes[0]) == (
            is_whole and 127 < x.max() <= 255
        )
        # The same rows as uint8 are refused: the model was trained on other numbers.
        with pytest.raises(UserError, match="has 8-bit pixels, but the network was trained on"):
            dataset_from((x.astype("u1"), y), network, preprocessing=saved, split=False)
    assert with_notes > 80


@pytest.mark.parametrize("block", tiered(range(3), (0,)))
def test_networks_of_the_zoo_see_rows_without_their_units(tmp_path: Path, block: int) -> None:
    """Other units of the columns change no input, in training, files and prediction."""
    for seed in range(30 * block, 30 * block + 30):
        draw = np.random.default_rng(seed)
        count, width = draw.integers(10, 40), draw.integers(1, 6)
        rows = draw.normal(0, 1, (count, width))
        rows[:, 0] *= draw.integers(0, 2)  # Perhaps a constant column.
        unit = 10.0 ** draw.integers(2, 6, width) * draw.choice([-1, 1], width)
        origin = draw.normal(0, 1, width) * np.abs(unit)
        y = np.arange(count) % 2
        x = rows * unit + origin
        x[0, 0] += 20 * (np.abs(x).max() <= 16)
        data = dataset_from((x, y), get_network("classifier-4"))
        saved = data.preprocessing
        assert saved == Preprocessing.from_dict(saved.to_dict())
        assert "standardised" in data.notes[0]
        assert "standardised" in str(saved)
        train = np.empty((len(data.train), width), np.float32)
        data.train.read(np.arange(len(train)), train, np.empty(len(train), np.int32))
        np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-4)
        varies = train.std(axis=0) > 1e-3
        np.testing.assert_allclose(train.std(axis=0)[varies], 1, rtol=1e-4)
        assert varies[1:].all()
        found, whole = saved.apply(x), (x - saved.mean) / saved.deviation
        np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-5)
        np.save(tmp_path / "x.npy", x)
        new = np.empty((count, width), np.float32)
        open_inputs(tmp_path / "x.npy", saved).samples.read(
            np.arange(count), new, np.empty(count, np.int32)
        )
        np.testing.assert_array_equal(new, found)
