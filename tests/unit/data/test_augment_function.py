"""A function of the user that changes training samples, in the rank and in worker processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dptrain.data import Augmentation, Loader, Sampler
from dptrain.data.fingerprint import data_fingerprint
from dptrain.data.loading.augment_function import ChangedSamples, with_changed_samples
from dptrain.data.loading.workers import WorkerSamples, with_workers
from dptrain.data.sources.objects import dataset_from
from dptrain.errors import UserError

COUNT, BATCH, SEED = 20, 7, 3


def shift(image: Any, random: np.random.Generator) -> Any:
    image += random.integers(0, 100, dtype=image.dtype.type) if image.dtype == np.uint8 else 1
    return np.roll(image, random.integers(0, 4), axis=-1)


def fail(image: Any, random: np.random.Generator) -> Any:
    raise ValueError("no lamp")


def dataset(net: Any, function: Any, dtype: Any = np.uint8) -> Any:
    x = np.random.default_rng(0).integers(0, 100, (COUNT, 3, 6, 5)).astype(dtype)
    y = np.arange(COUNT) % 2
    made = dataset_from((x, y, x[:4], y[:4]), net((3, 6, 5), 2))
    return with_changed_samples(replace(made, augment=function), SEED)


def batches(data: Any, *, rank: int = 0, size: int = 1, keeps_pixels: bool = False) -> list[Any]:
    sampler, change = Sampler(COUNT, BATCH, SEED, rank, size), Augmentation(flip=True)
    with Loader(data.train, sampler, range(9), (3, 6, 5), augmentation=change,
                keeps_pixels=keeps_pixels) as loader:  # fmt: skip
        return [(b.x.copy(), b.samples, b.epoch) for b in loader]  # type: ignore[union-attr]


def test_samples_depend_on_seed_epoch_and_sample_alone(net: Any) -> None:
    data = dataset(net, shift)
    assert isinstance(data.train, ChangedSamples)
    assert not isinstance(data.test, ChangedSamples)
    stored = data.train.samples.x
    for x, samples, epoch in batches(data, keeps_pixels=True):
        for image, sample in zip(x, samples, strict=True):
            random = np.random.Generator(np.random.Philox(key=SEED, counter=[0, sample, epoch, 0]))
            np.testing.assert_array_equal(image, shift(stored[sample].copy(), random))
    whole = batches(data)
    ranks = [batches(data, rank=rank, size=2) for rank in range(2)]
    for step, (x, *_) in enumerate(whole):
        np.testing.assert_array_equal(x, np.concatenate([rank[step][0] for rank in ranks]))


def test_workers_call_the_function_and_name_its_lines(net: Any) -> None:
    data = dataset(net, shift)
    spread = with_workers(data, 2)
    assert isinstance(spread.train, WorkerSamples)
    assert spread.test is data.test
    for keeps_pixels in (False, True):
        pairs = zip(batches(data, keeps_pixels=keeps_pixels),
                    batches(spread, keeps_pixels=keeps_pixels), strict=True)  # fmt: skip
        for (one, *_), (other, *_) in pairs:
            np.testing.assert_array_equal(one, other)
    spread.train.workers.close()
    spread = with_workers(dataset(net, fail), 1)
    words = r"augment=fail failed for training sample \d+ in epoch 1 with ValueError: no lamp \("
    with pytest.raises(UserError, match=words + r".*: raise ValueError\(\"no lamp\"\)\)"):
        batches(spread)
    spread.train.workers.close()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda image, random: image[:, 1:], r"returned shape \(3, 5, 5\) and type uint8"),
        (lambda image, random: image / 255, r"returned shape \(3, 6, 5\) and type float64"),
        (lambda image, random: None, r"returned None .* expected an array of shape \(3, 6, 5\)"),
    ],
)
def test_what_a_function_may_return(net: Any, function: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        batches(dataset(net, function))


def test_float_images_are_inputs(net: Any) -> None:
    data = dataset(net, shift, np.float32)
    assert data.train.pixels.dtype == "float32"
    assert np.isfinite(batches(data)[0][0]).all()


def test_the_fingerprint_names_the_function(net: Any) -> None:
    made = dataset_from((np.zeros((9, 3, 6, 5), np.uint8), np.arange(9) % 2), net((3, 6, 5), 2))
    assert "augment" not in data_fingerprint(made)
    assert data_fingerprint(replace(made, augment=shift))["augment"] == "shift"
