"""Crop windows of 8-bit images by the kernel that GPUs compile for one size of images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.device_replica import DeviceReplica
from dptrain.backends.pixels import PixelFormat
from dptrain.batch import Batch
from dptrain.data.loading.augmentation import Augmentation, centred_windows
from dptrain.network import Dense, Flatten, MeanSquaredError, Network
from dptrain.plan import make_plan
from dptrain.plan.plan import INPUT
from tests.emulator.emulator import Emulator
from tests.tiers import tiered

PIXELS = PixelFormat("uint8", 2 / 255, -1.0)


@pytest.mark.parametrize(
    ("cutout", "recolours"),
    tiered([(0, False), (0, True), (3, False), (3, True)], [(3, True)]),
)
@pytest.mark.parametrize("shape", [(3, 9, 8), (6, 5, 4)], ids=str)
def test_the_kernel_for_one_size_loads_what_the_host_computes(
    shape: tuple[int, int, int], recolours: bool, cutout: int
) -> None:
    canvas, rows = (shape[0], shape[1] + 3, shape[2] + 2), np.array([3, 0, 4, 4, 1])
    pictures = np.random.default_rng(0).integers(0, 256, (5, *canvas), np.uint8)
    change = Augmentation(crop=3, flip=True, contrast=0.5 * recolours, cutout=cutout)
    draws = change.draw(1, 2, rows)
    converted = np.empty(pictures.shape, np.float32)
    PIXELS.convert(pictures, converted)
    expected = np.empty((5, *shape), np.float32)
    change.change(expected, draws, converted, rows)
    windows = change.crop_windows(shape, draws, canvas, rows)
    found = load(Network(shape, [Flatten()], MeanSquaredError()), pictures, windows,
                 change.recolourings(draws, shape[0]) if recolours else None)  # fmt: skip
    np.testing.assert_array_equal(found.transpose(0, 3, 1, 2), expected)


@pytest.mark.parametrize(
    ("specializes", "recolours"),
    tiered([(False, False), (False, True), (True, False), (True, True)], [(True, False)]),
)
@pytest.mark.parametrize("stored", [(5, 11), (12, 7), (9, 8), (9, 19)], ids=str)
def test_the_kernel_resizes_as_the_host_does(
    stored: tuple[int, int], recolours: bool, specializes: bool
) -> None:
    """Larger and smaller, and in one direction only."""
    shape, rows = (3, 9, 8), np.array([3, 0, 4, 4, 1])
    pictures = np.random.default_rng(0).integers(0, 256, (5, 3, *stored), np.uint8)
    pixels = replace(PIXELS, size=shape[1:])
    change = Augmentation(crop=3, flip=True, brightness=0.2, contrast=0.5 * recolours)
    change = change if recolours else replace(change, brightness=0.0)
    draws = change.draw(1, 2, rows)
    converted = np.empty((5, *shape), np.float32)
    pixels.convert(pictures, converted)
    expected = np.empty((5, *shape), np.float32)
    change.change(expected, draws, converted, rows)
    windows = change.crop_windows(shape, draws, shape, rows)
    found = load(Network(shape, [Flatten()], MeanSquaredError()), pictures, windows,
                 change.recolourings(draws, shape[0]) if recolours else None, pixels,
                 specializes=specializes)  # fmt: skip
    np.testing.assert_array_equal(found.transpose(0, 3, 1, 2), expected)


def test_the_kernel_for_one_size_of_vectors() -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (4, 200), np.uint8)
    rows, expected = np.array([2, 0, 3]), np.empty((3, 200), np.float32)
    PIXELS.convert(pictures[rows], expected)
    network = Network((200,), [Dense(1)], MeanSquaredError())
    found = load(network, pictures, centred_windows((200,), (200,), rows), None)
    np.testing.assert_array_equal(found.reshape(3, 200), expected)


def load(
    network: Network, pictures: np.ndarray, windows: np.ndarray, recolourings: np.ndarray | None,
    pixels: PixelFormat = PIXELS, *, specializes: bool = True,
) -> np.ndarray:  # fmt: skip
    """Return the input (n, H, W, C) after loading windows of cached pictures."""
    backend = CudaBackend(Emulator(seed=1, specializes=specializes))
    backend.choose_device(0)
    plan = make_plan(network, backend, len(windows), training=False)
    replica = backend.make_replica(plan)
    assert isinstance(replica, DeviceReplica)
    replica.cache_images(pictures, pixels)
    replica.load(Batch.of_windows(windows, recolourings=recolourings), training=False)
    return np.asarray(replica.memory.download(replica._views[INPUT]))
