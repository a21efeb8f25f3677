"""Minibatches that the numba backend cuts from images in memory, bit for bit as the host does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.api import make_replica
from dptrain.backends.pixels import PixelFormat
from dptrain.backends.replica import CropWindowReplica
from dptrain.batch import Batch
from dptrain.data.loading.augmentation import Augmentation, centred_windows
from dptrain.data.loading.loader import Loader
from dptrain.data.loading.sharding import Sampler
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.data.stored import CachedSamples, StoredSamples
from dptrain.network import Conv2d, Flatten, MeanSquaredError, Network
from dptrain.plan.plan import INPUT

BYTES = PixelFormat("uint8", 2 / 255, -1.0)
CHANGES = [
    Augmentation(crop=4, flip=True),
    Augmentation(crop=4, brightness=0.3),
    Augmentation(crop=2, flip=True, brightness=0.2, contrast=0.7),
    Augmentation(crop=2, cutout=5),
    Augmentation(crop=3, flip=True, brightness=0.2, contrast=0.7, cutout=4),
]
NAMES = ["moved", "brightness", "all", "cut", "all and cut"]


def network_for(shape: tuple[int, ...]) -> Network:
    layers: list[Any] = [Conv2d(1, 1)] if len(shape) == 3 else []
    return Network(shape, [*layers, Flatten()], MeanSquaredError())


def loaded(
    replica: CropWindowReplica, windows: NDArray[np.int64], recolourings: Any = None
) -> NDArray[Any]:
    """Load windows and return the input, (N, C, H, W)."""
    replica.load(Batch.of_windows(windows, recolourings=recolourings))
    return replica._views[replica.plan.resolve(INPUT)][: len(windows)].transpose(0, 3, 1, 2)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("change", CHANGES, ids=NAMES)
@pytest.mark.parametrize("canvas", [(3, 9, 11), (3, 17, 20), (1, 9, 11), (2, 9, 11), (20, 9, 33)])
def test_windows_are_what_augmentation_computes(
    canvas: tuple[int, int, int], change: Augmentation, threads: int
) -> None:
    random = np.random.default_rng(0)
    pictures = random.standard_normal((5, *canvas), dtype=np.float32)
    shape, rows = (canvas[0], 9, min(canvas[2], 19)), random.integers(0, 5, 16)
    draws = change.draw(1, 2, np.arange(16))
    expected = np.empty((16, *shape), np.float32)
    change.change(expected, draws, pictures, rows)
    replica = make_replica(network_for(shape), batch_size=16, threads=threads)
    assert isinstance(replica, CropWindowReplica)
    replica.cache_images(pictures)
    windows = change.crop_windows(shape, draws, canvas, rows)
    colours = change.recolourings(draws, shape[0]) if change.recolours else None
    found = loaded(replica, windows, colours)
    if change.recolours:
        # Sums of doubles have another order, so a mean may be rounded differently.
        np.testing.assert_allclose(found, expected, rtol=0, atol=2**-21)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 8, 8), (7,), (5, 1, 1)])
def test_centred_windows_are_the_samples(shape: tuple[int, ...]) -> None:
    pictures = np.random.default_rng(0).standard_normal((5, *shape), dtype=np.float32)
    rows = np.array([4, 0, 0, 3])
    expected = np.empty((4, *shape), np.float32)
    CachedSamples(pictures, np.zeros(5, np.float32)).read(rows, expected, np.zeros(4, np.float32))
    replica = make_replica(network_for(shape), batch_size=4)
    assert isinstance(replica, CropWindowReplica)
    replica.cache_images(pictures)
    other = make_replica(network_for(shape), batch_size=4)
    assert isinstance(other, CropWindowReplica)
    other.share_cached_images(replica)
    for each in (replica, other):
        found = loaded(each, centred_windows(shape, shape, rows))
        np.testing.assert_array_equal(found.reshape(expected.shape), expected)


def test_changes_of_colours_are_rounded_as_in_numpy() -> None:
    """Sums are exact, so the bits are equal; a fused multiply-add would change some."""
    pictures = np.random.default_rng(0).integers(-128, 129, (4, 3, 8, 8)).astype(np.float32) / 128
    change, rows = Augmentation(brightness=0.2, contrast=0.7), np.arange(4)
    draws = change.draw(1, 2, rows)
    expected = pictures.copy()
    change.change(expected, draws, pictures, rows)
    replica = make_replica(network_for((3, 8, 8)), batch_size=4)
    assert isinstance(replica, CropWindowReplica)
    replica.cache_images(pictures)
    windows = centred_windows((3, 8, 8), (3, 8, 8), rows)
    found = loaded(replica, windows, change.recolourings(draws, 3))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("pixels", [BYTES, PixelFormat("uint8", 2 / 16, -1.0)], ids=["255", "16"])
@pytest.mark.parametrize("change", [*CHANGES, Augmentation()], ids=[*NAMES, "none"])
@pytest.mark.parametrize("canvas", [(3, 9, 11), (3, 17, 20), (1, 9, 11), (20, 9, 33)])
def test_8_bit_pixels_are_converted_as_on_the_host(
    canvas: tuple[int, int, int], change: Augmentation, pixels: PixelFormat
) -> None:
    """Bit for bit: converted pixels are multiples of 2⁻²⁴, so sums of doubles are exact."""
    random = np.random.default_rng(0)
    pictures = random.integers(0, 17 if pixels.scale == 1 / 8 else 256, (5, *canvas), np.uint8)
    converted = np.empty(pictures.shape, np.float32)
    pixels.convert(pictures, converted)
    shape, rows = (canvas[0], 9, min(canvas[2], 19)), random.integers(0, 5, 16)
    draws = change.draw(1, 2, np.arange(16))
    expected = np.empty((16, *shape), np.float32)
    windows = centred_windows(shape, canvas, rows)
    if change.moves:
        windows = change.crop_windows(shape, draws, canvas, rows)
        change.change(expected, draws, converted, rows)
    else:
        CachedSamples(pictures, rows[:5], pixels=pixels).read(rows, expected, rows.copy())
    replica = make_replica(network_for(shape), batch_size=16, threads=2)
    assert isinstance(replica, CropWindowReplica)
    replica.cache_images(pictures, pixels)
    colours = change.recolourings(draws, shape[0]) if change.recolours else None
    np.testing.assert_array_equal(loaded(replica, windows, colours), expected)


@pytest.mark.parametrize("warps", [False, True])
@pytest.mark.parametrize("canvas", [(3, 9, 11), (1, 12, 14), (30,)])
def test_streamed_pixels_are_the_inputs_of_the_other_loader(
    canvas: tuple[int, ...], warps: bool
) -> None:
    """A minibatch of images with windows equals one that the host converts, bit for bit unless
    pixels are interpolated.
    """
    random = np.random.default_rng(0)
    shape = (canvas[0], 9, 11) if len(canvas) == 3 else canvas
    pictures = random.integers(0, 256, (30, *canvas), np.uint8)
    preprocessing = Preprocessing("image", shape, canvas, "uint8", 2 / 255, -1.0, fit="crop")
    rows = random.permutation(30)[:25]
    samples = StoredSamples(pictures, np.arange(30, dtype=np.int32), rows, preprocessing, "x.npy")
    assert samples.pixels == BYTES
    images = len(shape) == 3
    everything = {"brightness": 0.1, "contrast": 0.5, "cutout": 4}
    moves: Any = {"resized_crop": 0.3, "rotate": 20.0} if warps else {"crop": 2}
    change = Augmentation(flip=True, **moves, **everything) if images else None
    replica = make_replica(network_for(shape), batch_size=4, threads=2)
    assert isinstance(replica, CropWindowReplica)
    assert replica.prepare_images(canvas, samples.pixels)
    settings: Any = {"augmentation": change, "depth": 2}
    steps, sampler = range(2, 14), Sampler(25, 7, seed=1, rank=1, size=2)
    with (
        Loader(samples, sampler, steps, shape, **settings) as converted,
        Loader(samples, sampler, steps, shape, keeps_pixels=True, **settings) as kept,
    ):
        for one, other in zip(converted, kept, strict=True):
            assert one.x is not None
            assert other.x is not None
            assert other.x.dtype == np.uint8
            np.testing.assert_array_equal(one.y, other.y)
            replica.load(other._replace(y=None))
            found = replica._views[replica.plan.resolve(INPUT)][: len(one.x)]
            found = found.transpose(0, 3, 1, 2).reshape(one.x.shape)
            np.testing.assert_allclose(found, one.x, rtol=0, atol=2e-6 if warps else 0)
