"""The generated curves: deterministic, balanced, and impossible for a linear classifier."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from dptrain.data import open_data
from dptrain.data.sources.shapes import CLASSES, NUM_TEST, NUM_TRAIN, generate


def test_images_depend_on_seed_stream_and_number_only():
    images, labels = generate(700, 0, 1)
    assert (images.shape, images.dtype) == ((700, 3, 32, 32), np.uint8)
    again, same = generate(510, 0, 1)
    np.testing.assert_array_equal(again, images[:510])
    np.testing.assert_array_equal(same, labels[:510])
    for seed, stream in ((1, 1), (0, 2)):
        assert not np.array_equal(generate(10, seed, stream)[0], images[:10])


def test_the_images_of_a_seed_are_fixed():
    images, labels = generate(500, 0, 1)
    assert (zlib.crc32(images.tobytes()), zlib.crc32(labels.tobytes())) == (64994470, 803573007)


def test_classes_are_equally_frequent():
    labels = generate(1000, 3, 1)[1]
    assert np.bincount(labels).tolist() == [100] * 10


@pytest.mark.more
def test_a_linear_classifier_learns_nothing():
    (x, y), (x_test, y_test) = generate(6000, 0, 1), generate(2000, 0, 2)
    x, x_test = (a.reshape(len(a), 3, 16, 2, 16, 2).mean((3, 5)) for a in (x, x_test))
    x, x_test = ((a.reshape(len(a), -1) - 128) / 64 for a in (x, x_test))
    weights = np.linalg.solve(x.T @ x + 100 * np.eye(x.shape[1]), x.T @ (np.eye(10)[y] - 0.1))
    assert np.mean((x_test @ weights).argmax(axis=1) == y_test) < 0.15


def test_the_mean_image_of_each_class_is_grey():
    images, labels = generate(2000, 0, 1)
    for label in range(10):
        assert np.ptp(images[labels == label].mean(axis=(0, 1))) < 40, label


def test_the_data_set_has_names_and_a_fifth_as_many_test_images(net, read):
    data = open_data("shapes?samples=60", net((3, 32, 32)))
    assert (len(data.train), len(data.test)) == (60, 12)
    assert data.classes == CLASSES
    assert data.has_split
    x, y = read(data)
    images, labels = generate(60, 0, 0x7368_7472)
    np.testing.assert_allclose(x, images / 127.5 - 1.0, atol=1e-6)
    np.testing.assert_array_equal(y, labels)
    assert (NUM_TRAIN, NUM_TEST) == (50_000, 10_000)


def test_the_seed_of_the_images_is_not_that_of_the_run(net, read):
    network = net((3, 32, 32))
    first = read(open_data("shapes?samples=20", network, seed=1))[0]
    np.testing.assert_array_equal(read(open_data("shapes?samples=20", network, seed=2))[0], first)
    other = read(open_data("shapes?samples=20&seed=5", network))[0]
    assert not np.array_equal(other, first)
