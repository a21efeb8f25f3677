"""Every way of writing parameters changes the predictions of a replica for inference."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.api import make_replica
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


@pytest.mark.parametrize("write", [assign, fill, upload, write_flat])
def test_every_write_to_parameters_changes_predictions(write):
    model, expected = replica(), replica()
    before = np.array(model.forward(X))
    value = expected.parameters[NAME]
    value[7, 3, 2, 1] += 1
    write(model, value)
    expected.parameters[NAME] = value
    np.testing.assert_array_equal(model.forward(X), expected.forward(X))
    assert not np.array_equal(model.forward(X), before)
