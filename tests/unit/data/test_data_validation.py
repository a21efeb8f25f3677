"""Validation data: shares of the training samples, and splits of the data set."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dptrain.data import Dataset, open_data
from dptrain.data.decoding import keep_decoded
from dptrain.data.fingerprint import data_fingerprint
from dptrain.data.loading.workers import with_workers
from dptrain.data.sources.objects import dataset_from
from dptrain.data.validation import validation_indices, with_validation
from dptrain.errors import UserError
from dptrain.network import Dense, Flatten, MeanSquaredError, Network
from dptrain.network.files import get_network

NETWORK = Network((1, 4, 4), [Flatten(), Dense(3)], name="linear")


def arrays(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).integers(0, 256, (count, 4, 4), dtype=np.uint8)
    return x, np.arange(count) % 3


def contents(dataset: Dataset, samples: Any) -> tuple[np.ndarray, np.ndarray]:
    x = np.zeros((len(samples), *dataset.input_shape), np.float32)
    y = np.zeros(len(samples), np.int32)
    samples.read(np.arange(len(samples)), x, y)
    return x, y


@pytest.mark.parametrize("share", [0.1, 0.2, 0.37, 0.5, 0.9])
def test_the_share_of_each_class_is_that_of_all_samples(share: float) -> None:
    labels = np.repeat([0, 1, 2], [500, 100, 30])
    chosen = validation_indices(len(labels), share, 4, labels)
    assert len(chosen) == round(share * len(labels))
    assert (np.diff(chosen) > 0).all()
    counts = np.bincount(labels[chosen], minlength=3)
    assert (np.abs(counts - share * np.array([500, 100, 30])) <= 1).all()


def test_the_share_is_a_function_of_the_seed() -> None:
    first, again, other = (validation_indices(100, 0.2, seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert set(first) != set(other)
    # The same on every machine and with every version of NumPy.
    assert validation_indices(20, 0.2, 0).tolist() == EXPECTED_OF_20


EXPECTED_OF_20 = [0, 6, 9, 11]


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_each_split_has_at_least_one_sample(share: float) -> None:
    assert 1 <= len(validation_indices(5, share, 0)) <= 4


@pytest.mark.parametrize("cached", [True, False])
def test_the_share_is_taken_from_the_training_samples(
    cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cached:
        monkeypatch.setattr("dptrain.data.stored.HOST_SHARE", 0.0)
    before = dataset_from((*arrays(60, 0), *arrays(12, 1)), NETWORK)
    found = with_validation(before, 0.25, 7)
    assert found.validation is not None
    assert (len(found.train), len(found.validation), len(found.test)) == (45, 15, 12)
    rows = [
        np.hstack([x.reshape(len(x), -1), y[:, None]])
        for x, y in (contents(found, s) for s in (found.train, found.validation))
    ]
    x, y = contents(before, before.train)
    everything = np.hstack([x.reshape(60, -1), y[:, None]])
    assert sorted(map(tuple, np.vstack(rows))) == sorted(map(tuple, everything))
    assert "15 of the training samples are for validation" in found.description
    assert "45 training, 15 validation and 12 test samples" in repr(found)
    assert data_fingerprint(found)["validation_samples"] == 15
    assert "validation_samples" not in data_fingerprint(before)
    assert data_fingerprint(found)["content"] != data_fingerprint(before)["content"]


def test_random_numbers_for_timing_have_validation_samples() -> None:
    found = with_validation(open_data("synthetic?samples=5000", NETWORK), 0.1, 0)
    assert found.validation is not None
    assert (len(found.train), len(found.validation)) == (4500, 500)


def test_a_time_series_ends_with_its_validation_data() -> None:
    before = open_data("irradiance?samples=200", get_network("mlp-8"))
    found = with_validation(before, 0.2, 0)
    assert found.validation is not None
    # A target is 10 s after the last of 50 rows.
    assert (len(found.train), len(found.validation)) == (200 - 40 - 59, 40)
    all_targets = before.train.known_targets()
    np.testing.assert_array_equal(found.train.known_targets(), all_targets[:101])
    np.testing.assert_array_equal(found.validation.known_targets(), all_targets[160:])
    with pytest.raises(UserError, match="200 training samples, and 59 must be left out"):
        with_validation(before, 0.8, 0)


@pytest.mark.parametrize(("tail", "gap"), [("", None), ("&horizon=2", 2), ("&window=4", 3)])
def test_rows_of_a_table_are_a_series_if_samples_share_rows(
    tmp_path: Path, tail: str, gap: int | None
) -> None:
    lines = [f"{row},{row}" for row in range(100)]
    (tmp_path / "t.csv").write_text("\n".join(["a,y", *lines]) + "\n")
    width = 4 if "window" in tail else 1
    network = Network((width,), [Dense(1)], MeanSquaredError())
    data = open_data(f"csv:{tmp_path / 't.csv'}?target=y{tail}", network)
    found = with_validation(data, 0.25, 3)
    assert data.gap == gap
    assert found.validation is not None
    train, validation = (
        np.sort(np.round(data.preprocessing.to_values(part.known_targets()[:, 0])))
        for part in (found.train, found.validation)
    )
    if gap is None:
        assert (np.diff(validation) > 1).any()
        assert len(train) + len(validation) == len(data.train)
    else:
        np.testing.assert_array_equal(np.diff(validation), 1)
        assert validation[0] - train[-1] == gap + 1


def named(ending: str) -> dict[str, np.ndarray]:
    sizes = {"_train": 30, ending: 9, "_test": 6}
    pairs = {tail: arrays(size, size) for tail, size in sizes.items()}
    return {f"{k}{tail}": pair[i] for tail, pair in pairs.items() for i, k in enumerate("xy")}


@pytest.mark.parametrize("ending", ["_val", "_valid", "_validation"])
def test_arrays_may_have_a_validation_split(ending: str, tmp_path: Path) -> None:
    given = named(ending)
    np.savez(tmp_path / "data.npz", **given)
    found = [dataset_from(given, NETWORK), open_data(f"npz:{tmp_path / 'data.npz'}", NETWORK)]
    pairs = [(given[f"x{tail}"], given[f"y{tail}"]) for tail in ("_train", ending, "_test")]
    found += [dataset_from(tuple(pairs), NETWORK), dataset_from(sum(pairs, ()), NETWORK)]
    parts = (list(zip(*pair, strict=True)) for pair in pairs)
    names = ("train", "validation", "test")
    objects = SimpleNamespace(**dict(zip(names, parts, strict=True)))
    found.append(dataset_from(objects, NETWORK))
    for dataset in found:
        assert dataset.validation is not None
        assert [len(split) for split in dataset.splits] == [30, 6, 9]
        x, _ = contents(dataset, dataset.validation)
        np.testing.assert_allclose(x[:, 0], given[f"x{ending}"] * 2.0 / 255 - 1, atol=1e-6)
        assert with_validation(dataset, None, 0) is dataset
        assert with_validation(dataset, 0.0, 0).validation is None
        with pytest.raises(UserError, match="has a validation split of 9 samples"):
            with_validation(dataset, 0.1, 0)


def make_folders(folder: Path, *splits: str) -> Path:
    for split in splits:
        for number, name in enumerate(("cat", "dog", "owl")):
            (folder / split / name).mkdir(parents=True)
            for i in range(2):
                grey = 40 * number + 10 * i + len(split)
                Image.new("L", (4, 4), grey).save(folder / split / name / f"{i}.png")
    return folder


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_folders_next_to_train_and_test_are_for_validation(name: str, tmp_path: Path) -> None:
    spec = f"folder:{make_folders(tmp_path, 'train', name, 'test')}"
    found = open_data(spec, NETWORK)
    assert [len(split) for split in found.splits] == [6, 6, 6]
    assert "6 training, 6 validation and 6 test samples" in found.description
    expected = contents(found, found.validation)
    for other in (keep_decoded(found, 1), with_workers(found, 1)):
        for mine, read in zip(contents(other, other.validation), expected, strict=True):
            np.testing.assert_array_equal(mine, read)


def test_a_folder_for_validation_without_one_for_the_test_is_the_test_split(
    tmp_path: Path,
) -> None:
    found = open_data(f"folder:{make_folders(tmp_path, 'train', 'val')}", NETWORK)
    assert found.validation is None
    assert [len(split) for split in found.splits] == [6, 6]
    split = with_validation(found, 0.5, 1)
    assert [len(part) for part in split.splits] == [3, 6, 3]
    _, labels = contents(split, split.validation)
    assert sorted(labels) == [0, 1, 2]
