r"""Generated images of closed curves, with the sizes and the number of classes of CIFAR-10.

A curve has 2 to 6 lobes and is filled or an outline, which makes 10 classes:

ρ(θ) = R (1 + a cos(m (θ − φ))),   m = 2 … 6.

Size, rotation, position, depth of the lobes, colours, a background of plane waves and noise are
random. The curve may be lighter or darker than the background, so that the mean image of a class
contains nothing and a linear classifier stays at chance. Mirrored images belong to the same class.

An image depends on the seed and on its number only. Cosines are computed in float64 and rounded to
float32; all operations on pixels are single ones that IEEE 754 rounds exactly. Machines therefore
generate the same images.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.data.adaptation import adapt_request
from dptrain.data.assembly import RawSplit, make_dataset, preprocessing_for
from dptrain.data.base import Dataset
from dptrain.data.spec import Request
from dptrain.memory import require_memory

SIZE = 32
SHAPE = (3, SIZE, SIZE)
CLASSES = tuple(f"{m}-{kind}" for kind in ("filled", "outlined") for m in (2, 3, 4, 5, 6))
NUM_TRAIN, NUM_TEST = 50_000, 10_000

RADIUS, MAX_SHIFT = (6.5, 11.0), 4.5
LOBE_DEPTH, OUTLINE_WIDTH = (0.16, 0.32), (1.6, 3.0)
CONTRAST, NUM_WAVES, WAVE_HEIGHT, NOISE = (35.0, 110.0), 3, (8.0, 30.0), 75.0
"""Of 255. A wave rises by WAVE_HEIGHT above the mean; noise is uniform from -NOISE to NOISE."""

_CHUNK = 500
"""Images generated at a time: a multiple of the number of classes, whose arrays fit into caches."""
_TRAIN, _TEST = 0x7368_7472, 0x7368_7465


class _Curves(NamedTuple):
    """Random parameters of the curves of n images, float32 (n, 1, 1) each; labels int64 (n,)."""

    labels: NDArray[np.int64]
    x: NDArray[np.float32]
    y: NDArray[np.float32]
    radius: NDArray[np.float32]
    depth: NDArray[np.float32]
    width: NDArray[np.float32]
    cosine: NDArray[np.float32]
    sine: NDArray[np.float32]


def generate(count: int, seed: int, stream: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images, uint8 (count, 3, 32, 32), and labels; every class is equally frequent."""
    images = np.empty((count, *SHAPE), np.uint8)
    labels = np.empty(count, np.int64)
    for start in range(0, count, _CHUNK):
        key = np.array([seed % 2**64, (stream << 32) + start // _CHUNK], dtype=np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key))
        chunk, chunk_labels = _chunk(generator)
        stop = min(start + _CHUNK, count)
        images[start:stop] = chunk[: stop - start]
        labels[start:stop] = chunk_labels[: stop - start]
    return images, labels


def _chunk(generator: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    curves = _draw_curves(generator)
    n = len(curves.labels)
    inside = _coverage(curves)[:, None]
    background = _waves(generator, n)[:, None]
    # Curve and background differ by a random colour; the waves have another random colour.
    base = generator.uniform(90.0, 165.0, (n, 3, 1, 1)).astype(np.float32)
    difference = _colours(generator, n, CONTRAST)
    pixels = base + inside * difference
    pixels += background * _colours(generator, n, (1.0, 1.0))
    noise = generator.integers(0, 256, (n, *SHAPE), dtype=np.uint8)
    pixels += noise * np.float32(2.0 * NOISE / 255.0)
    pixels += np.float32(0.5 - NOISE)
    return np.clip(pixels, 0.0, 255.0, out=pixels).astype(np.uint8), curves.labels


def _draw_curves(generator: np.random.Generator) -> _Curves:
    labels = generator.permutation(np.arange(_CHUNK) % len(CLASSES))

    def draw(low: float, high: float) -> NDArray[np.float32]:
        return generator.uniform(low, high, (_CHUNK, 1, 1)).astype(np.float32)

    centre = (SIZE - 1) / 2
    angle = generator.uniform(0.0, 2.0 * np.pi, (_CHUNK, 1, 1))
    return _Curves(
        labels,
        draw(centre - MAX_SHIFT, centre + MAX_SHIFT),
        draw(centre - MAX_SHIFT, centre + MAX_SHIFT),
        draw(*RADIUS),
        draw(*LOBE_DEPTH),
        draw(*OUTLINE_WIDTH),
        np.cos(angle).astype(np.float32),
        np.sin(angle).astype(np.float32),
    )


def _coverage(curves: _Curves) -> NDArray[np.float32]:
    """Return the share of each pixel that the curve covers, float32 (n, 32, 32)."""
    axis = np.arange(SIZE, dtype=np.float32)
    dx, dy = axis - curves.x, axis[:, None] - curves.y
    radius = np.sqrt(dx * dx + dy * dy)
    safe = np.maximum(radius, np.float32(1e-3))
    # cos(m (θ − φ)) is the real part of the m-th power of a unit vector, turned by −m φ.
    real, imaginary = dx / safe, dy / safe
    lobes = np.ones_like(radius)
    power_real, power_imaginary = real * real - imaginary * imaginary, 2 * real * imaginary
    count = 2 + curves.labels % 5
    for m in range(2, 7):
        chosen = np.flatnonzero(count == m)
        turned = power_real * curves.cosine + power_imaginary * curves.sine
        lobes[chosen] = turned[chosen]
        power_real, power_imaginary = (
            power_real * real - power_imaginary * imaginary,
            power_real * imaginary + power_imaginary * real,
        )
    inside = curves.radius * (1 + curves.depth * lobes) - radius
    outlined = (curves.labels >= 5)[:, None, None]
    inside = np.where(outlined, curves.width / 2 - np.abs(inside), inside)
    covered: NDArray[np.float32] = np.clip(inside + np.float32(0.5), 0, 1)
    return covered


def _waves(generator: np.random.Generator, n: int) -> NDArray[np.float32]:
    """Return sums of plane waves with random directions, float32 (n, 32, 32)."""
    total = np.zeros((n, SIZE, SIZE), np.float32)
    axis = np.arange(SIZE)
    for _ in range(NUM_WAVES):
        length = generator.uniform(5.0, 30.0, (n, 1))
        angle = generator.uniform(0.0, 2.0 * np.pi, (n, 1))
        phase = generator.uniform(0.0, 2.0 * np.pi, (n, 1))
        height = generator.uniform(*WAVE_HEIGHT, (n, 1)) / NUM_WAVES**0.5
        # cos(u + v) = cos u cos v − sin u sin v needs few cosines.
        u = 2.0 * np.pi / length * np.cos(angle) * axis + phase
        v = 2.0 * np.pi / length * np.sin(angle) * axis
        for x, y in ((np.cos(u), np.cos(v)), (-np.sin(u), np.sin(v))):
            total += (height * x).astype(np.float32)[:, None, :] * y.astype(np.float32)[:, :, None]
    return total


def _colours(
    generator: np.random.Generator, n: int, length: tuple[float, float]
) -> NDArray[np.float32]:
    """Return random directions in the space of colours, of random length, float32 (n, 3, 1, 1)."""
    direction = generator.standard_normal((n, 3, 1, 1))
    direction /= np.sqrt(np.mean(direction * direction, axis=1, keepdims=True))
    size = generator.uniform(*length, (n, 1, 1, 1))
    return np.asarray(direction * size, np.float32)


def open_shapes(request: Request) -> Dataset:
    """Open ``samples`` training images, and a fifth as many test images."""
    count = request.number("samples", NUM_TRAIN, minimum=10)
    seed = request.number("seed", 0, minimum=0)
    num_test = max(10, count // 5)
    require_memory((count + num_test) * math.prod(SHAPE), f"shapes: samples={count:,}")
    # Each split has all classes. A network that they do not fit is refused before they are made.
    names, targets = dict(enumerate(CLASSES)), [np.arange(len(CLASSES))] * 2
    request = adapt_request(request, SHAPE, targets, "shapes", names=names, are_labels=True)
    splits = []
    for number, stream in ((count, _TRAIN), (num_test, _TEST)):
        images, labels = generate(number, seed, stream)
        splits.append(RawSplit(images, labels, np.arange(number)))
    return make_dataset(
        request,
        *splits,
        preprocessing=preprocessing_for(request, SHAPE, np.dtype(np.uint8)),
        origin="generated curves with 2 to 6 lobes",
        where="shapes",
        has_split=True,
        white=255,
    )
