"""Image files that are decoded once: the same samples, in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dptrain.data import open_data
from dptrain.data.base import Dataset
from dptrain.data.decoding import keep_decoded
from dptrain.data.sources.folder import ImageSamples
from dptrain.data.stored import CachedSamples
from dptrain.errors import UserError
from dptrain.training.trainer import Trainer

SHAPE = 3, 12, 11


def kept(dataset: Dataset) -> list[CachedSamples]:
    splits = dataset.train, dataset.test
    return [split for split in splits if isinstance(split, CachedSamples)]


def test_decoded_images_are_those_that_are_read(net: Any, read: Any, images: Path) -> None:
    """Images of unequal sizes are resized."""
    files = open_data(f"folder:{images}", net(SHAPE, 2))
    decoded = keep_decoded(files, ranks_per_node=1)
    assert [split.x.dtype for split in kept(decoded)] == ["float32"] * 2
    for split in ("train", "test"):
        for expected, found in zip(read(files, split), read(decoded, split), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_images_of_the_networks_size_stay_8_bit_pixels(
    net: Any, read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(100):
            Image.fromarray(np.full((4, 5), i, np.uint8)).save(tmp_path / name / f"{i:03}.png")
    data = open_data(f"folder:{tmp_path}", net((1, 4, 5), 2))
    monkeypatch.setattr("dptrain.data.stored.free_memory", lambda: 4 * 200 * 4 * 5)
    decoded = keep_decoded(data, ranks_per_node=1)
    assert [split.x.dtype for split in kept(decoded)] == ["uint8"] * 2
    for expected, found in zip(read(data), read(decoded), strict=True):
        np.testing.assert_array_equal(found, expected)
    # One image of another size, among the last ones, is resized.
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "b" / "099.png")
    assert keep_decoded(data, 1) is data  # As float32, the images do not fit in memory.
    monkeypatch.undo()
    assert [split.x.dtype for split in kept(keep_decoded(data, 1))] == ["float32"] * 2


def test_a_damaged_file_is_named(net: Any, images: Path) -> None:
    data = open_data(f"folder:{images}", net(SHAPE, 2))
    assert isinstance(data.train, ImageSamples)
    for path in data.train.paths[2:4]:
        path.write_bytes(b"damaged")
    with pytest.raises(UserError, match=f"{data.train.paths[2]} cannot be read as an image"):
        keep_decoded(data, 1)


def test_training_decodes_once_if_it_reads_images_again(
    net: Any, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(epochs: int, backend: str, *, is_kept: bool) -> Any:
        trainer = Trainer(
            net(SHAPE, 2), f"folder:{images}", epochs=epochs, batch_size=3, crop=2, flip=True,
            contrast=0.3, backend=backend, progress=False,
        )  # fmt: skip
        assert len(kept(trainer.data)) == 2 * is_kept
        assert (trainer.job.cached_samples is not None) == is_kept
        trainer.fit()
        return trainer.parameters["dense1.weight"]

    train(1, "numba", is_kept=False)
    decoded, on_device = train(3, "numba", is_kept=True), train(3, "cuda", is_kept=True)
    np.testing.assert_allclose(on_device, decoded, rtol=1e-3, atol=1e-5)
    monkeypatch.setattr("dptrain.data.stored.free_memory", lambda: 0)
    np.testing.assert_array_equal(train(3, "numba", is_kept=False), decoded)
