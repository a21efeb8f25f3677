"""Small data sets as people have them, in every form that dptrain reads.

Each function writes a data set into an empty folder. `DATA_SETS` has them by name. They are
synthetic, but learnable: the classes differ in colour or in their means.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[Any]


@dataclass(frozen=True)
class OwnData:
    """A data set that was written.

    Attributes:
        spec: of the data, as `--data` takes it.
        sample: arguments of `predict` for one sample.
        says: what the first lines of a run must contain.
        result: ``accuracy``, ``labels`` or ``values``.
    """

    spec: str
    sample: str
    says: tuple[str, ...]
    result: str = "accuracy"


Maker = Callable[[Path], OwnData]


def _pixels(random: np.random.Generator, label: int, shape: Sequence[int]) -> Array:
    """Return noise with stripes, whose direction, distance and colour depend on the label."""
    height, width, *channels = shape
    y, x = np.mgrid[:height, :width] * (32 / min(height, width))
    angle, period = label * 2.4, 4 + label % 5 * 2
    phase = random.uniform(0, 2 * np.pi)
    stripes = np.sin((x * np.cos(angle) + y * np.sin(angle)) * 2 * np.pi / period + phase)
    image = 128 + 60 * stripes
    if channels:
        colour = np.random.default_rng(label).uniform(0.5, 1.2, channels[0])
        image = image[..., None] * colour
    noise = random.normal(0, 15, image.shape).astype(np.float32)
    return np.clip(image + noise, 0, 255).astype(np.uint8)


def _images(classes: int, count: int, shape: Sequence[int], labels: int = 0) -> tuple[Array, Array]:
    random = np.random.default_rng(classes)
    y = np.arange(count) % classes
    return np.stack([_pixels(random, label, shape) for label in y]), y + labels


def _folder(
    classes: Sequence[str],
    count: int,
    sizes: Sequence[tuple[int, int]],
    mode: str,
    suffixes: Sequence[str],
    says: Sequence[str],
    name: str,
    folder: Path,
) -> OwnData:
    """Write a folder of images.

    Args:
        classes: their names; a name with a slash belongs to a split.
        count: images of each class.
        sizes: (width, height) of the images in turn.
        mode: of Pillow: ``L``, ``RGB`` or ``RGBA``.
        suffixes: of the files in turn, with what is before the dot.
        says: what the first lines of a run must contain.
        name: of the folder.
        folder: in which it is written.
    """
    random, path = np.random.default_rng(len(classes)), Path()
    different = sorted({text.split("/")[-1] for text in classes})
    for text in classes:
        (folder / name / text).mkdir(parents=True)
        for number in range(count):
            width, height = sizes[number % len(sizes)]
            channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
            label = different.index(text.split("/")[-1])
            pixels = _pixels(random, label, (height, width, *channels))
            path = folder / name / text / f"{number}{suffixes[number % len(suffixes)]}"
            Image.fromarray(pixels).save(path)
    (folder / name / "Thumbs.db").write_bytes(b"\xd0\xcf\x11\xe0")
    return OwnData(f"folder:{name}", str(path.relative_to(folder)), tuple(says))


def _rows(columns: int, rows: int) -> Array:
    random = np.random.default_rng(columns)
    scale = 10.0 ** random.integers(-2, 4, columns)
    return random.normal(0, 1, (rows, columns)) * scale + 3 * scale


def _standard(x: Array) -> Array:
    standard: Array = (x - x.mean(axis=0)) / x.std(axis=0)
    return standard


def _table(
    columns: int, rows: int, target: str, says: Sequence[str], result: str, folder: Path
) -> OwnData:
    """Write a table; `target` is the kind of its targets: text, labels, one or three values."""
    x = _rows(columns, rows)
    first = _standard(x)
    names = [f"column {number}" for number in range(columns)]
    if target == "text":
        texts = ("Löwe", "große Katze", "Hund")
        y = [[texts[int(value > -0.5) + int(value > 0.5)]] for value in first[:, 0]]
        targets = ["Tier"]
    elif target == "whole":
        y = [[str(int(value > -0.5) + int(value > 0.5))] for value in first[:, 0]]
        targets = ["quality"]
    elif target == "labels":
        y = [[str(int(value > 0)) for value in row] for row in first[:, :3]]
        targets = ["red", "round", "ripe"]
    else:
        count = int(target)
        y = [[f"{100 + 20 * value:.3f}" for value in row] for row in first[:, :count]]
        targets = [f"yield {number}" for number in range(count)]
    header, (one, *others) = [*names, *targets], zip(x.round(5).tolist(), y, strict=True)
    with (folder / "my table.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *([*a, *b] for a, b in (one, *others))])
    with (folder / "new.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([names, one[0]])
    return OwnData(f"csv:my table.csv?target={','.join(targets)}", "new.csv", tuple(says), result)


def _series(folder: Path) -> OwnData:
    noise = np.random.default_rng(0).normal(0, 1, 400)
    power = 50 + 20 * np.sin(np.arange(400) / 12) + noise
    lines = [f"2026-01-{1 + i // 24:02} {i % 24}:00,{p:.2f}" for i, p in enumerate(power)]
    (folder / "power.csv").write_text("time,power\n" + "\n".join(lines) + "\n")
    (folder / "new.csv").write_text("time,power\n" + "\n".join(lines[:8]) + "\n")
    spec = "csv:power.csv?target=power&columns=*&horizon=2&window=8"
    return OwnData(spec, "new.csv", ("mlp-64-32",), "values")


def _npz(folder: Path, arrays: dict[str, Array], says: Sequence[str], result: str) -> OwnData:
    np.savez(folder / "cells.npz", **arrays)  # type: ignore[arg-type]
    x = arrays.get("x_test", arrays.get("x"))
    assert x is not None
    np.save(folder / "one.npy", x[:1])
    return OwnData("npz:cells.npz", "one.npy", tuple(says), result)


def _npz_images(folder: Path) -> OwnData:
    x, y = _images(4, 120, (28, 28, 3))
    return _npz(folder, {"x": x, "y": y}, ["4 classes"], "accuracy")


def _npz_split(folder: Path) -> OwnData:
    x, y = _images(3, 120, (20, 24))
    x = (x / 255).astype(np.float32)
    arrays = {"x_train": x[:90], "y_train": y[:90], "x_test": x[90:], "y_test": y[90:]}
    return _npz(folder, arrays, ["3 classes"], "accuracy")


def _npz_values(folder: Path) -> OwnData:
    x = _rows(12, 300)
    return _npz(folder, {"x": x, "y": 7 + 40 * _standard(x)[:, 0]}, [], "values")


def _npz_texts(folder: Path) -> OwnData:
    x = _rows(12, 300)
    y = np.where(_standard(x)[:, 0] > 0, "sick", "well")
    return _npz(folder, {"x": x, "y": y}, ["2 classes"], "accuracy")


def _npz_labels(folder: Path) -> OwnData:
    x = _rows(12, 300)
    return _npz(folder, {"x": x, "y": (_standard(x)[:, :5] > 0).astype(np.uint8)}, [], "labels")


def _npy_images(folder: Path) -> OwnData:
    x, y = _images(3, 120, (32, 32, 3))
    np.save(folder / "x.npy", x.transpose(0, 3, 1, 2))
    np.save(folder / "y.npy", y)
    np.save(folder / "one.npy", x.transpose(0, 3, 1, 2)[:1])
    return OwnData("npy:x.npy,y.npy", "one.npy", ("3 classes",))


def _npz_image_values(folder: Path) -> OwnData:
    x, _ = _images(5, 60, (24, 24, 3))
    return _npz(folder, {"x": x, "y": x.mean(axis=(1, 2, 3))}, ["model0-values"], "values")


def _npz_image_labels(folder: Path) -> OwnData:
    x, y = _images(5, 60, (24, 24, 3))
    labels = np.stack([y % 2, y // 2 % 2, y > 1], axis=1)
    return _npz(folder, {"x": x, "y": labels}, ["model0-labels"], "labels")


def _npy_values(folder: Path) -> OwnData:
    x = _rows(6, 300)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", _standard(x)[:, :3] * 5)
    np.save(folder / "one.npy", x[:1])
    return OwnData("npy:x.npy,y.npy", "one.npy", (), "values")


def _idx(path: Path, array: Array) -> None:
    data = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    data += array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def _mnist(classes: int, suffix: str, folder: Path) -> OwnData:
    x, y = _images(classes, classes * 12, (28, 28))
    (folder / "idx").mkdir()
    for name, part in (("train", slice(0, -40)), ("t10k", slice(-40, None))):
        _idx(folder / f"idx/{name}-images-idx3-ubyte{suffix}", x[part])
        _idx(folder / f"idx/{name}-labels-idx1-ubyte{suffix}", y[part])
    np.save(folder / "one.npy", x[:1])
    return OwnData("mnist:idx", "one.npy", (f"{classes} classes",))


def _cifar10(folder: Path) -> OwnData:
    x, y = _images(10, 240, (32, 32, 3))
    (folder / "cifar-10-batches-bin").mkdir()
    rows = np.concatenate([y[:, None], x.transpose(0, 3, 1, 2).reshape(len(x), -1)], axis=1)
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    for name, part in zip(names, np.split(rows.astype(np.uint8), 6), strict=True):
        (folder / "cifar-10-batches-bin" / name).write_bytes(part.tobytes())
    Image.fromarray(x[0]).save(folder / "one.png")
    return OwnData("cifar10:cifar-10-batches-bin", "one.png", ("10 classes",))


def _tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def _shards(named: bool, folder: Path) -> OwnData:
    x, y = _images(4, 96, (40, 48, 3))
    (folder / "shards").mkdir()
    parts = ("train-0", "train-1", "test-0") if named else ("000", "001")
    for text, numbers in zip(parts, np.array_split(np.arange(96), len(parts)), strict=True):
        files: dict[str, bytes] = {}
        for number in numbers:
            buffer = io.BytesIO()
            Image.fromarray(x[number]).save(buffer, "JPEG")
            files[f"{number:04}.jpg"] = buffer.getvalue()
            if named:
                label = {"label": f"Art {y[number]}", "photographer": "me"}
                files[f"{number:04}.json"] = json.dumps(label).encode()
            else:
                files[f"{number:04}.cls"] = str(y[number]).encode()
        _tar(folder / f"shards/{text}.tar", files)
    Image.fromarray(x[0]).save(folder / "one.jpg")
    return OwnData("webdataset:shards", "one.jpg", ("4 classes",))


def _hdf5(folder: Path, arrays: dict[str, Array], says: Sequence[str], result: str) -> OwnData:
    import h5py

    with h5py.File(folder / "cells.h5", "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, compression="gzip")
    np.save(folder / "one.npy", next(iter(arrays.values()))[:1])
    return OwnData("hdf5:cells.h5", "one.npy", tuple(says), result)


def _hdf5_images(folder: Path) -> OwnData:
    x, y = _images(5, 100, (36, 36, 3))
    return _hdf5(folder, {"images": x, "labels": y}, ["5 classes"], "accuracy")


def _hdf5_values(folder: Path) -> OwnData:
    x = _rows(8, 300)
    y = _standard(x)[:, 0] * 3
    arrays = {"train/x": x[:240], "train/y": y[:240], "test/x": x[240:], "test/y": y[240:]}
    return _hdf5(folder, arrays, [], "values")


SPLIT = [f"{split}/{name}" for split in ("train", "val", "test") for name in ("katze", "hund")]
SPECIES = [f"species {number:03}" for number in range(102)]

DATA_SETS: dict[str, Maker] = {
    "2 classes, grey, 16×16": partial(
        _folder, ["no", "yes"], 40, [(16, 16)], "L", [".png"], ["2 classes"], "photos"
    ),
    "5 classes, mixed sizes": partial(
        _folder, ["daisy", "dandelion", "rose", "sunflower", "tulip"], 24,
        [(320, 240), (64, 200), (33, 47)], "RGB", [".jpg", ".JPG", ".webp"],
        ["5 classes"], "flowers",
    ),
    "102 classes": partial(
        _folder, SPECIES, 6, [(50, 40)], "RGB", [".jpg"], ["102 classes"], "flowers"
    ),
    "RGBA icons": partial(
        _folder, ["arrow", "disk", "folder"], 30, [(48, 48)], "RGBA", [".png"], ["3 classes"],
        "icons",
    ),
    "photographs, 4000×3000": partial(
        _folder, ["day", "night"], 6, [(4000, 3000), (3000, 4000)], "RGB", [".jpg"],
        ["2 classes"], "DCIM",
    ),
    "umlauts and spaces": partial(
        _folder, ["Apfel rot", "Öl & Essig", "Grüne Äpfel?"], 30, [(60, 40)], "RGB",
        [" größer.jpg", " (Kopie).png"], ["3 classes"], "Meine Fotos",
    ),
    "folders of splits": partial(
        _folder, SPLIT, 20, [(40, 40)], "RGB", [".png"], ["2 classes"], "pets"
    ),
    "three images of each class": partial(
        _folder, ["a", "b"], 3, [(40, 40)], "RGB", [".gif", ".bmp", ".tif"], ["2 classes"], "few"
    ),
    "table, 3 columns, text": partial(_table, 3, 150, "text", ["3 classes"], "accuracy"),
    "table, 20 columns, text": partial(_table, 20, 300, "text", ["3 classes"], "accuracy"),
    "table, 500 columns, text": partial(_table, 500, 300, "text", ["3 classes"], "accuracy"),
    "table, whole numbers": partial(_table, 11, 300, "whole", ["are classes"], "accuracy"),
    "table, several labels": partial(_table, 20, 300, "labels", [], "labels"),
    "table, one value": partial(_table, 3, 300, "1", [], "values"),
    "table, one value of 20 columns": partial(_table, 20, 400, "1", [], "values"),
    "table, three values": partial(_table, 20, 300, "3", [], "values"),
    "time series": _series,
    "npz, images": _npz_images,
    "npz, splits, numbers 0 to 1": _npz_split,
    "npz, one value": _npz_values,
    "npz, text labels": _npz_texts,
    "npz, several labels": _npz_labels,
    "npz, values of images": _npz_image_values,
    "npz, labels of images": _npz_image_labels,
    "npy, images": _npy_images,
    "npy, three values": _npy_values,
    "MNIST, 10 classes": partial(_mnist, 10, ".gz"),
    "MNIST, 62 classes": partial(_mnist, 62, ""),
    "CIFAR-10": _cifar10,
    "WebDataset, numbers": partial(_shards, False),
    "WebDataset, JSON, splits": partial(_shards, True),
    "HDF5, images": _hdf5_images,
    "HDF5, one value, groups": _hdf5_values,
}  # fmt: skip
"""Functions that write data sets, by what is special about them."""
