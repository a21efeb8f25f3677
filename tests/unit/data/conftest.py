"""Small networks and small files in the real formats."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dptrain.network import LOSSES, Dense, Flatten, Network

KINDS = {loss.targets: loss for loss in reversed(LOSSES.values())}


@pytest.fixture
def net() -> Callable[..., Network]:
    def make(shape: tuple[int, ...], outputs: int = 10, targets: str = "classes") -> Network:
        layers = [Flatten(), Dense(outputs)]
        return Network(shape, layers, loss=KINDS[targets](), name="small")

    return make


@pytest.fixture
def read() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Read samples of a split of a data set, all of them where no indices are given.

    Values have the unit of the data.
    """

    def make(data, split="train", indices=None, shape=None):
        samples = getattr(data, split)
        indices = np.arange(len(samples)) if indices is None else np.asarray(indices)
        x = np.full((len(indices), *(shape or data.input_shape)), np.nan, np.float32)
        dtype = np.float32 if data.target_shape else np.int32
        y = np.full((len(indices), *data.target_shape), -1, dtype)
        samples.read(indices, x, y)
        unit = data.preprocessing
        return x, unit.to_values(y).astype(dtype) if unit.has_target_unit else y

    return make


@pytest.fixture
def cifar(tmp_path: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    """A directory in the binary format of CIFAR-10; training images and labels."""
    rng = np.random.default_rng(1)
    folder = tmp_path / "cifar"
    folder.mkdir()
    images, labels = [], []
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for count, name in zip((4, 3, 5, 2, 6, 7), names, strict=True):
        records = rng.integers(0, 256, (count, 3073), dtype=np.uint8)
        records[:, 0] = rng.integers(0, 10, count)
        (folder / name).write_bytes(records.tobytes())
        images.append(records[:, 1:].reshape(-1, 3, 32, 32))
        labels.append(records[:, 0])
    return folder, np.concatenate(images[:-1]), np.concatenate(labels[:-1])


def idx(array: np.ndarray) -> bytes:
    header = bytes((0, 0, 8, array.ndim))
    return header + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


@pytest.fixture
def mnist(tmp_path: Path) -> Callable[..., tuple[Path, np.ndarray, np.ndarray]]:
    """Writes IDX files, with a dash or a dot in their names, gzipped or not."""

    def make(mark: str = "-", packed: bool = False):
        rng = np.random.default_rng(2)
        folder = tmp_path / f"mnist{mark}{packed}"
        folder.mkdir()
        kept = []
        for split, count in (("train", 9), ("t10k", 4)):
            images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            labels = rng.integers(0, 10, count, dtype=np.uint8)
            kept += [images, labels]
            for what, array in (("images", images), ("labels", labels)):
                name = f"{split}-{what}{mark}idx{array.ndim}-ubyte" + (".gz" if packed else "")
                content = gzip.compress(idx(array)) if packed else idx(array)
                (folder / name).write_bytes(content)
        return folder, kept[0], kept[1]

    return make


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two folders of images of unequal sizes, in three formats."""
    from PIL import Image

    rng = np.random.default_rng(3)
    folder = tmp_path / "images"
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for i, suffix in enumerate(("png", "jpg", "bmp", "png", "png")):
            size = (9 + i, 12 - i, 3)
            array = rng.integers(0, 256, size, dtype=np.uint8)
            Image.fromarray(array).save(folder / name / f"{i}.{suffix}")
        (folder / name / "notes.txt").write_text("not an image")
    return folder
