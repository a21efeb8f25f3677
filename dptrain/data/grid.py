"""A grid of samples of a data set, as a network sees them: one tile for each image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data.base import Dataset, Samples
from dptrain.data.loading.augmentation import Augmentation
from dptrain.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

TILE = 96
"""Least width and height of a tile in pixels; smaller images are enlarged by a whole factor."""
CAPTION = 14
"""Pixels below a tile for the name of its class."""
GAP = 4
INK, PAPER = (28, 33, 40), (255, 255, 255)


def sample_grid(
    dataset: Dataset,
    samples: Samples,
    count: int,
    *,
    augmentation: Augmentation | None = None,
    epochs: int = 5,
    seed: int = 0,
) -> Image:
    """Return a grid of evenly spaced samples as one image.

    Without augmentation, the tiles are different samples. With it, each row is a sample: first
    unchanged, then as training sees it in the first epochs.

    Args:
        dataset: the data set.
        samples: one of its splits.
        count: number of samples.
        augmentation: random changes of training images.
        epochs: epochs that are shown with augmentation.
        seed: of the run, on which the changes depend.

    Raises:
        UserError: the samples are not images.
    """
    if len(dataset.input_shape) != 3:
        raise UserError(
            f"for this network, samples of {dataset.name} are {dataset.input_shape[0]} numbers and "
            "no images; choose another --network"
        )
    count = min(count, len(samples))
    indices = (np.arange(count, dtype=np.int64) * len(samples)) // max(count, 1)
    x, labels = _read(dataset, samples, indices)
    if augmentation is None:
        columns = max(1, round((2 * count) ** 0.5))
        rows = [range(i, min(i + columns, count)) for i in range(0, count, columns)]
        return _draw(
            [[x[i] for i in row] for row in rows], [[labels[i] for i in row] for row in rows]
        )
    augmentation.check(dataset.input_shape)
    changed = [x]
    for epoch in range(epochs):
        images = x.copy()
        augmentation.apply(images, seed=seed, epoch=epoch, samples=indices)
        changed.append(images)
    captions = [[label, *(f"epoch {e + 1}" for e in range(epochs))] for label in labels]
    return _draw([[images[i] for images in changed] for i in range(count)], captions)


def image_grid(
    dataset: Dataset, samples: Samples, indices: Sequence[int], captions: Sequence[str]
) -> Image:
    """Return a grid of some images, with a caption of one or several lines below each.

    Raises:
        UserError: a file is missing or damaged.
    """
    x, _ = _read(dataset, samples, np.array(indices, np.int64))
    columns = max(1, round((2 * len(x)) ** 0.5))
    starts = range(0, len(x), columns)
    return _draw(
        [[*x[i : i + columns]] for i in starts], [captions[i : i + columns] for i in starts]
    )


def _read(
    dataset: Dataset, samples: Samples, indices: NDArray[np.int64]
) -> tuple[NDArray[np.float32], list[str]]:
    """Return the inputs, and for each sample the name of its class, or its value."""
    is_class = dataset.targets == "classes"
    x = np.empty((len(indices), *dataset.input_shape), np.float32)
    y: NDArray[Any] = np.empty(
        (len(indices), *dataset.target_shape), np.int32 if is_class else np.float32
    )
    samples.read(indices, x, y)
    if (classes := dataset.class_list) is not None:
        return x, [classes.name(int(index)) for index in y.reshape(-1)]
    values = dataset.preprocessing.to_values(y).reshape(len(y), -1)
    return x, [f"{value:.3g}" if len(row) == 1 else "" for row in values for value in row[:1]]


def _draw(
    tiles: Sequence[Sequence[NDArray[np.float32]]], captions: Sequence[Sequence[str]]
) -> Image:
    from PIL import Image, ImageDraw

    height, width = tiles[0][0].shape[1:]
    factor = max(1, -(-TILE // max(height, width)))
    low, high = _range(tiles)
    lines = max(caption.count("\n") + 1 for row in captions for caption in row)
    step_x, step_y = width * factor + GAP, height * factor + lines * CAPTION + GAP
    size = max(map(len, tiles)) * step_x + GAP, len(tiles) * step_y + GAP
    grid = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(grid)
    for row, (images, names) in enumerate(zip(tiles, captions, strict=True)):
        for column, (image, name) in enumerate(zip(images, names, strict=True)):
            left, top = GAP + column * step_x, GAP + row * step_y
            tile = Image.fromarray(_pixels(image, low, high))
            tile = tile.resize((width * factor, height * factor), Image.Resampling.NEAREST)
            grid.paste(tile, (left, top))
            for number, line in enumerate(name.split("\n")):
                below = top + height * factor + 1 + number * CAPTION
                pen.text((left, below), _fitting(line, width * factor), fill=INK)
    return grid


def _range(tiles: Sequence[Sequence[NDArray[np.float32]]]) -> tuple[float, float]:
    """Return the numbers that become black and white: −1 and 1 unless some are outside."""
    low = min(float(image.min()) for row in tiles for image in row)
    high = max(float(image.max()) for row in tiles for image in row)
    return min(low, -1.0), max(high, 1.0)


def _pixels(image: NDArray[np.float32], low: float, high: float) -> NDArray[np.uint8]:
    """Return (H, W, 3) of an image with any number of channels: one is grey, more than three are
    averaged.
    """
    channels = image if image.shape[0] == 3 else image.mean(axis=0, keepdims=True).repeat(3, axis=0)
    scaled = (channels - low) / (high - low)
    pixels = np.round(255 * np.clip(scaled, 0, 1)).astype(np.uint8)
    return np.asarray(pixels.transpose(1, 2, 0))


def _fitting(name: str, width: int) -> str:
    """Return the beginning of a name that fits below a tile; a letter has about 6 pixels."""
    most = max(width // 6, 1)
    return name if len(name) <= most else f"{name[: most - 1]}…"
