"""Conversion of images to the network's input shape."""

import numpy as np
import pytest
from PIL import Image

from dptrain.backends.resizing import bilinear_weights
from dptrain.data.preprocessing.images import Adapter
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.errors import UserError


def pixels(source, target, dtype):
    scale, offset = (2 / 255, -1.0) if dtype == np.uint8 else (1.0, 0.0)
    kind = Preprocessing("image", target, source, str(dtype), scale, offset)
    return kind.adapter(source, dtype)


def adapt(adapter, stored, shape=None):
    x = np.full((len(stored), *(shape or adapter.target)), np.nan, np.float32)
    adapter(stored, x)
    return x


@pytest.mark.parametrize(
    ("source", "target"),
    [((8, 8), (32, 32)), ((32, 32), (24, 40)), ((50, 7), (7, 50)), ((1, 1), (3, 2))],
)
def test_resizing_is_pillows_bilinear(source, target):
    image = np.random.default_rng(0).random(source, dtype=np.float32)
    ours = adapt(Adapter((1, *source), (1, *target)), image[None, None])[0, 0]
    size = (target[1], target[0])
    theirs = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))
    # Two float32 sums of a few terms below 1 against Pillow's in double.
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(("source", "target"), [(8, 32), (32, 8), (5, 7), (7, 5), (1, 4), (4, 1)])
def test_resizing_keeps_constants_and_mirrors(source, target):
    weights = bilinear_weights(source, target)
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(weights[::-1, ::-1], weights, atol=1e-6)


def test_same_size_is_left_alone():
    stored = np.arange(2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4)
    np.testing.assert_array_equal(adapt(Adapter((3, 4, 4), (3, 4, 4)), stored), stored)


def test_bytes_become_minus_one_to_one_and_floats_stay():
    stored = np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)
    x = adapt(pixels((1, 1, 1), (1, 1, 1), dtype=stored.dtype), stored)
    np.testing.assert_allclose(x.ravel(), [-1, 1], rtol=1e-6)
    stored = np.array([0.0, 255.0]).reshape(2, 1, 1, 1)
    x = adapt(pixels((1, 1, 1), (1, 1, 1), dtype=stored.dtype), stored)
    np.testing.assert_array_equal(x.ravel(), [0, 255])


def test_grey_is_repeated():
    stored = np.random.default_rng(0).random((2, 1, 4, 4), dtype=np.float32)
    x = adapt(Adapter((1, 4, 4), (3, 4, 4)), stored)
    for channel in range(3):
        np.testing.assert_array_equal(x[:, channel], stored[:, 0])


def test_colour_becomes_grey_as_pillow_does_it():
    stored = np.random.default_rng(0).integers(0, 256, (1, 3, 5, 5), dtype=np.uint8)
    grey = np.asarray(Image.fromarray(stored[0].transpose(1, 2, 0)).convert("L"))
    x = adapt(Adapter((3, 5, 5), (1, 5, 5)), stored)
    # Pillow rounds to whole numbers.
    np.testing.assert_allclose(x[0, 0], grey, atol=0.51)


def test_the_crop_is_central_and_may_be_asked_for_larger():
    stored = np.arange(36, dtype=np.uint8).reshape(1, 1, 6, 6)
    adapter = Adapter((1, 6, 6), (1, 2, 2), crop=True)
    np.testing.assert_array_equal(adapt(adapter, stored)[0, 0], [[14, 15], [20, 21]])
    assert adapter.readable_shape == (1, 6, 6)
    np.testing.assert_array_equal(adapt(adapter, stored, (1, 6, 6)), stored)
    np.testing.assert_array_equal(adapt(adapter, stored, (1, 4, 4))[0, 0], stored[0, 0, 1:5, 1:5])


@pytest.mark.parametrize("target", [(3, 40, 40), (1, 24, 24), (3, 32, 32)])
def test_a_sample_does_not_depend_on_the_batch_it_is_read_in(target):
    stored = np.random.default_rng(0).integers(0, 256, (37, 3, 32, 32), dtype=np.uint8)
    adapter = pixels((3, 32, 32), target, dtype=stored.dtype)
    together = adapt(adapter, stored)
    alone = np.concatenate([adapt(adapter, stored[i : i + 1]) for i in range(37)])
    np.testing.assert_array_equal(together, alone)


def test_what_is_written_may_be_part_of_something_larger():
    stored = np.random.default_rng(0).integers(0, 256, (2, 1, 8, 8), dtype=np.uint8)
    adapter = pixels((1, 8, 8), (3, 12, 12), dtype=stored.dtype)
    around = np.zeros((2, 3, 16, 16), np.float32)
    adapter(stored, around[..., 2:14, 2:14])
    np.testing.assert_array_equal(around[..., 2:14, 2:14], adapt(adapter, stored))
    assert not around[..., :2, :].any()
    assert not around[..., 14:].any()


def test_maps_of_the_right_count_are_flattened():
    stored = np.arange(18, dtype=np.float32).reshape(2, 1, 3, 3)
    np.testing.assert_array_equal(adapt(Adapter((1, 3, 3), (9,)), stored), stored.reshape(2, 9))


@pytest.mark.parametrize(
    ("source", "target", "crop"),
    [
        ((50,), (1, 50, 50), False),
        ((4,), (1, 2, 2), False),
        ((1, 8, 8), (50,), False),
        ((51,), (50,), False),
        ((4, 8, 8), (3, 8, 8), False),
        ((3, 8, 8), (2, 8, 8), False),
        ((1, 8, 8), (1, 8, 9), True),
    ],
)
def test_what_does_not_fit_is_refused_with_both_shapes(source, target, crop):
    with pytest.raises(UserError) as error:
        Adapter(source, target, crop).check("things.npz")
    assert all(word in str(error.value) for word in ("things.npz", str(source), str(target)))
