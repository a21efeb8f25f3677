"""Every way of writing parameters changes the predictions of a replica for inference."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.api import make_replica
from dptrain.native.threads import ITEMS
from dptrain.network import Conv2d, Dense, Flatten, Network, ReLU

LAYERS = [Conv2d(16, 3, padding=1), ReLU(), Conv2d(40, 5, padding=2), Flatten(), Dense(10)]
X = np.random.default_rng(1).standard_normal((2, 16, 8, 8), np.float32)
NAME = "conv2.weight"


def replica(batch_size=2):
    network = Network((16, 8, 8), LAYERS)
    return make_replica(network, "numba", batch_size=batch_size, training=False, threads=2)


def assign(model, value):
    model.parameters[NAME] = value


def fill(model, value):
    model.parameters.fill(NAME, lambda target: np.copyto(target, value.reshape(target.shape)))


def upload(model, value):
    other = replica()
    other.parameters[NAME] = value
    model.memory.upload(model.flat_parameters, other.flat_parameters)


def write_flat(model, value):
    other = replica()
    other.parameters[NAME] = value
    model.flat_parameters[:] = other.flat_parameters


def write_in_block(model, value):
    other = replica()
    other.parameters[NAME] = value
    with model.parameters.write_flat() as flat:
        flat[:] = other.flat_parameters


@pytest.mark.parametrize("write", [assign, fill, upload, write_flat, write_in_block])
def test_every_write_to_parameters_changes_predictions(write):
    model, expected = replica(), replica()
    before = np.array(model.forward(X))
    value = np.array(expected.parameters[NAME])
    value[7, 3, 2, 1] += 1
    write(model, value)
    expected.parameters[NAME] = value
    np.testing.assert_array_equal(model.forward(X), expected.forward(X))
    assert not np.array_equal(model.forward(X), before)


def transformed_items(model):
    """Return the items of the launches that transform weights in each pass."""
    launches = model.programs["inference"]._launches
    records = [launch.record for launch in launches if "prepare_forward" in launch.failure]
    assert records
    return sum(words[at] for words, at in (record.slots[ITEMS // 8] for record in records))


@pytest.mark.parametrize("write", [assign, fill, write_in_block])
def test_weights_are_transformed_once_after_each_write(write):
    model, expected = replica(), replica()
    for value in (1.0, 2.0):
        weights = np.array(expected.parameters[NAME])
        weights[7, 3, 2, 1] += value
        write(model, weights)
        expected.parameters[NAME] = weights
        for count in (2, 1, 2):
            np.testing.assert_array_equal(model.forward(X[:count]), expected.forward(X[:count]))
            assert transformed_items(model) == 0


def test_weights_are_transformed_in_each_pass_if_anybody_may_write_them():
    model = replica()
    model.forward(X)
    flat = model.flat_parameters
    for _ in range(2):
        flat *= np.float32(1.5)
        expected = replica()
        expected.flat_parameters[:] = flat
        np.testing.assert_array_equal(model.forward(X), expected.forward(X))
        assert transformed_items(model) > 0
