"""Images that are sampled between their pixels, and mixed channels: on every backend, and compared
with PyTorch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.pixels import INPUTS, PixelFormat
from dptrain.backends.replica import CropWindowReplica
from dptrain.batch import Batch
from dptrain.data.loading import geometry
from dptrain.data.loading.augmentation import Augmentation
from dptrain.errors import UserError
from dptrain.network import Flatten, MeanSquaredError, Network
from dptrain.plan import make_plan
from dptrain.plan.plan import INPUT
from tests.emulator.emulator import Emulator
from tests.lazy import LazyModule
from tests.tiers import tiered

torch = LazyModule("torch")

PIXELS = PixelFormat("uint8", 2 / 255, -1.0)
EVERYTHING = Augmentation(
    flip=True, brightness=0.2, contrast=0.5, resized_crop=0.1, rotate=30.0, zoom=0.3,
    saturation=0.5, hue=0.2, erase=0.5, randaugment=2,
)  # fmt: skip
SIZE, CANVAS, COUNT = (3, 9, 8), (3, 20, 13), 6


def sampled(image, maps, factors, size):
    """Return the inputs (n, C, H, W) that maps of one image give."""
    windows = np.zeros((len(maps), 16), np.int64)
    windows[:, 8:] = geometry.fixed_point(maps, factors, size)
    x = np.empty((len(maps), image.shape[0], *size), np.float32)
    Augmentation(rotate=1.0)._warp(len(maps), image[None], windows, x)
    return x


def whole_image(image, size):
    """Return the map of an input of a size to a whole image, and its factors."""
    factors = np.array([[image.shape[1] / size[0], image.shape[2] / size[1]]])
    maps = geometry.scales(*factors.T)
    maps[:, :2, 2] = np.array(image.shape[1:]) / 2
    return maps, factors


@pytest.mark.parametrize("size", [(20, 13), (32, 24), (8, 5), (30, 6)], ids=str)
def test_a_resized_image_is_that_of_pytorch_with_antialiasing(size) -> None:
    """Larger, smaller, and larger in one direction only."""
    image = np.random.default_rng(0).random(CANVAS, dtype=np.float32)
    (found,) = sampled(image, *whole_image(image, size), size)
    (expected,) = torch.nn.functional.interpolate(
        torch.from_numpy(image)[None], size=size, mode="bilinear", antialias=True
    ).numpy()
    # Positions are multiples of 1/65,536 pixel.
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-4)


@pytest.mark.parametrize("degrees", [0.0, 25.0, -60.0, 180.0])
def test_a_turned_image_is_that_of_pytorch(degrees) -> None:
    image = np.random.default_rng(0).random(CANVAS, dtype=np.float32)
    maps, factors = whole_image(image, CANVAS[1:])
    maps = maps @ geometry.rotations(np.array([degrees]))
    (found,) = sampled(image, maps, factors, CANVAS[1:])
    sizes = np.array(CANVAS[1:])
    # PyTorch's coordinates are (column, row), from -1 to 1.
    linear = maps[0, :2, :2] * sizes / sizes[:, None]
    theta = torch.tensor(np.c_[linear[::-1, ::-1], [0.0, 0.0]][None])
    grid = torch.nn.functional.affine_grid(theta, (1, *CANVAS), align_corners=False)
    source = torch.from_numpy(image).double()[None]
    (expected,) = torch.nn.functional.grid_sample(
        source, grid, padding_mode="border", align_corners=False
    ).numpy()
    outside = (abs(grid[0].numpy()) > 1.0).any(axis=-1)
    assert outside.any() == (degrees in (25.0, -60.0))
    expected[:, outside] = 0.0
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-4)


def test_boxes_of_resized_crops_have_the_distribution_of_torchvision() -> None:
    """RandomResizedCrop takes the first of 10 boxes that fits; here with a plain loop."""
    size, count = (40, 60), 3000
    uniform, place = np.random.default_rng(0).random((20, count)), np.full((2, count), 0.5)
    boxes, centres = geometry.resized_crops(uniform, place, 0.2, size)
    for i in range(200):
        for area, aspect in zip(uniform[:10, i], uniform[10:, i], strict=True):
            pixels = (0.2 + 0.8 * area) * 2400
            ratio = np.exp(np.log(3 / 4) + (np.log(4 / 3) - np.log(3 / 4)) * aspect)
            height, width = np.sqrt(pixels / ratio), np.sqrt(pixels * ratio)
            if height <= 40 and width <= 60:
                np.testing.assert_allclose(boxes[i], [height, width])
                break
    assert (boxes <= size).all()
    np.testing.assert_allclose(centres, np.broadcast_to([20.0, 30.0], (count, 2)))
    never = np.full((20, 1), 0.999)
    np.testing.assert_allclose(geometry.resized_crops(never, place[:, :1], 0.99, (10, 40))[0],
                               [[10.0, 40 / 3]])  # fmt: skip


def test_saturation_and_hue_keep_greys_and_luma() -> None:
    x = np.random.default_rng(0).normal(size=(50, 3, 4, 4)).astype(np.float32)
    x[:, :, 0] = x[:, :1, 0]
    y = x.copy()
    change = Augmentation(saturation=0.5, hue=0.5)
    change.apply(y, seed=1, epoch=2, samples=np.arange(50))
    np.testing.assert_allclose(y[:, :, 0], x[:, :, 0], atol=1e-5)
    assert abs(y - x)[:, :, 1:].max(axis=(1, 2, 3)).min() > 0.01
    luma = np.array([0.299, 0.587, 0.114], np.float32)
    np.testing.assert_allclose(np.einsum("c,nchw->nhw", luma, y),
                               np.einsum("c,nchw->nhw", luma, x), atol=1e-5)  # fmt: skip


def test_without_saturation_images_are_grey() -> None:
    from dptrain.data.loading.colours import colour_matrices

    (matrix,) = colour_matrices(np.zeros(1), np.full(1, 0.3)).reshape(1, 3, 3)
    np.testing.assert_allclose(matrix, np.tile([0.299, 0.587, 0.114], (3, 1)), atol=1e-6)


def test_erased_boxes_are_inside_and_have_their_shares_and_frequency() -> None:
    x = np.ones((4000, 1, 32, 24), np.float32)
    Augmentation(erase=0.25).apply(x, seed=1, epoch=0, samples=np.arange(4000))
    erased = (x[:, 0] == 0).sum(axis=(1, 2))
    assert abs((erased > 0).mean() - 0.25) < 0.03
    shares = erased[erased > 0] / (32 * 24)
    assert 0.015 < shares.min() < 0.03
    assert 0.28 < shares.max() < 0.35
    whole = np.random.default_rng(0).random((20, 3)) * 0 + 0.5
    box = geometry.random_boxes(whole, (0.25, 0.25), (1.0, 1.0), (32, 32))
    np.testing.assert_allclose(box, 16.0)


def test_randaugment_makes_at_most_its_operations() -> None:
    x = np.random.default_rng(0).random((300, 3, 8, 8), dtype=np.float32)
    one, none = x.copy(), x.copy()
    Augmentation(randaugment=1).apply(one, seed=1, epoch=0, samples=np.arange(300))
    Augmentation(randaugment=10, randaugment_magnitude=0.0).apply(
        none, seed=1, epoch=0, samples=np.arange(300)
    )
    np.testing.assert_allclose(none, x, atol=1e-4)
    same = (abs(one - x) < 1e-4).all(axis=(1, 2, 3))
    assert 10 < same.sum() < 60  # One of nine operations is the identity.


RESIZED = replace(PIXELS, size=(25, 11))
CASES = [
    ("numba", PIXELS), ("numba", INPUTS), ("cuda", PIXELS), ("cuda", RESIZED),
    ("cuda-specialised", INPUTS), ("cuda-specialised", RESIZED),
]  # fmt: skip


@pytest.mark.parametrize(("backend", "pixels"), tiered(CASES, CASES[:3]))
def test_backends_load_what_the_host_computes(backend: str, pixels: PixelFormat) -> None:
    random = np.random.default_rng(0)
    pictures = random.integers(0, 256, (5, *CANVAS), np.uint8)
    kept = pictures.astype(np.float32) / 128 - 1 if pixels is INPUTS else pictures
    image_shape = pixels.converted_shape(CANVAS)
    source, rows = np.empty((5, *image_shape), np.float32), random.integers(0, 5, COUNT)
    pixels.convert(kept, source)
    draws = EVERYTHING.draw(1, 2, np.arange(COUNT))
    expected = np.empty((COUNT, *SIZE), np.float32)
    EVERYTHING.change(expected, draws, source, rows)
    replica = replica_of(backend, SIZE)
    replica.cache_images(kept, pixels)
    windows = EVERYTHING.crop_windows(SIZE, draws, image_shape, rows)
    assert windows.shape == (COUNT, 16)
    colours = EVERYTHING.recolourings(draws, 3)
    replica.load(Batch.of_windows(windows, recolourings=colours), training=False)
    found = np.asarray(replica.memory.download(replica._views[replica.plan.resolve(INPUT)]))
    np.testing.assert_allclose(found.transpose(0, 3, 1, 2), expected, rtol=0, atol=2e-6)


def replica_of(backend: str, shape) -> CropWindowReplica:
    if backend == "numba":
        from dptrain.api import make_replica

        found = make_replica(Network(shape, [Flatten()], MeanSquaredError()), batch_size=COUNT)
        assert isinstance(found, CropWindowReplica)
        return found
    cuda = CudaBackend(Emulator(seed=1, specializes=backend != "cuda"))
    cuda.choose_device(0)
    plan = make_plan(Network(shape, [Flatten()], MeanSquaredError()), cuda, COUNT, training=False)
    replica = cuda.make_replica(plan)
    assert isinstance(replica, CropWindowReplica)
    return replica


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rotate": 181.0}, "rotate is 181.0; expected 0 to 180 degrees"),
        ({"resized_crop": float("nan")}, "resized_crop is nan"),
        ({"crop": 2, "resized_crop": 0.5}, "crop and resized_crop are set"),
        ({"cutout": 2, "erase": 0.5}, "cutout and erase are set"),
        ({"mixup": 0.2, "cutmix": 1.0}, "mixup and cutmix are set"),
        ({"randaugment": 11}, "randaugment is 11; expected 0 to 10"),
    ],
)
def test_settings_that_are_refused(settings, words) -> None:
    with pytest.raises(UserError, match=words):
        Augmentation(**settings)


def test_hue_needs_three_channels() -> None:
    with pytest.raises(UserError, match=r"hue changes colours, .* 1 channels instead of 3"):
        Augmentation(hue=0.1).check((1, 8, 8))
