"""Numbers at the edges of their range, on every backend."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

import dptrain.api
from dptrain.backends.replica import Replica
from dptrain.network import (
    Dense,
    Layer,
    Loss,
    MeanSquaredError,
    Network,
    Sigmoid,
    SigmoidBinaryCrossEntropy,
    SiLU,
    SoftmaxCrossEntropy,
    SoftmaxSquaredError,
)
from tests.unit.backends.cases import variants

BATCH_SIZE = 64
FLOAT32 = [variant for variant in variants() if variant[1] in ("fp64", "fp32")]
EXTREMES = [-1e4, -104.0, -87.0, -60.0, -30.0, -18.0, -17.3, -10.0, -1e-6, 0.0, 1e-6, 17.0, 88.0]

single_precision = pytest.mark.parametrize(("backend", "precision"), FLOAT32)
every_variant = pytest.mark.parametrize(("backend", "precision"), variants())


def identity(network: Network, backend: str, precision: str, *, training: bool = False) -> Replica:
    """Return a replica whose dense layer passes its input on."""
    replica = dptrain.api.make_replica(
        network, backend, BATCH_SIZE, precision=precision, training=training
    )
    width = network.input_shape[0]
    replica.parameters["dense1.weight"] = np.eye(width)
    replica.parameters["dense1.bias"] = np.zeros(width)
    return replica


def numbers() -> NDArray[np.float32]:
    """Return 256 and more numbers (n, 1) at which a sigmoid is neither 0 nor 1 in float64."""
    rng = np.random.default_rng(5)
    values = [*EXTREMES, *rng.uniform(-100.0, 40.0, 256)]
    return np.array(values, np.float32)[:, None]


def exact_sigmoid(z: NDArray[np.float32]) -> NDArray[np.float64]:
    powers = [math.exp(-abs(value)) for value in z[:, 0].tolist()]
    found = [
        (p if value < 0 else 1.0) / (1.0 + p) for p, value in zip(powers, z[:, 0], strict=True)
    ]
    return np.array(found)[:, None]


@single_precision
def test_small_probabilities_of_a_sigmoid_keep_their_precision(
    backend: str, precision: str
) -> None:
    network, z = Network((1,), [Dense(1)], SigmoidBinaryCrossEntropy()), numbers()
    found = identity(network, backend, precision).predict(z)
    np.testing.assert_allclose(found, exact_sigmoid(z), 1e-6, 1e-38)


@single_precision
@pytest.mark.parametrize("layer", [Sigmoid(), SiLU()])
def test_layers_with_a_sigmoid_keep_the_precision_of_small_numbers(
    layer: Layer, backend: str, precision: str
) -> None:
    if backend == "cudnn" and isinstance(layer, Sigmoid):
        pytest.skip("cuDNN computes this layer")
    z = numbers()
    network = Network((1,), [Dense(1), layer], MeanSquaredError())
    exact = exact_sigmoid(z) * (z if isinstance(layer, SiLU) else 1.0)
    found = identity(network, backend, precision).predict(z)
    np.testing.assert_allclose(found, exact, 1e-6, 1e-36)


@single_precision
def test_probabilities_of_classes_equal_those_in_float64(backend: str, precision: str) -> None:
    rng = np.random.default_rng(6)
    z = rng.uniform(-1.0, 1.0, (200, 4)) * 10.0 ** rng.integers(-3, 4, (200, 1))
    z = z.astype(np.float32)
    shifted = z.astype(np.float64) - z.max(axis=1, keepdims=True)
    exact = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    network = Network((4,), [Dense(4)], SoftmaxCrossEntropy())
    # Products on tensor cores round the outputs in the 22nd bit.
    tolerance = 1e-6 + 2.0**-21 * np.abs(z).max(axis=1, keepdims=True)
    found = identity(network, backend, precision).predict(z)
    assert (np.abs(found - exact) <= tolerance * exact + 1e-38).all()


@every_variant
@pytest.mark.parametrize(
    "loss", [SoftmaxCrossEntropy(), SigmoidBinaryCrossEntropy(), SoftmaxSquaredError()]
)
def test_outputs_with_nan_are_no_correct_prediction(
    loss: Loss, backend: str, precision: str
) -> None:
    """All targets are the first class, or 0; a comparison with NaN is false."""
    replica = identity(Network((3,), [Dense(3)], loss), backend, precision, training=True)
    x = np.tile(np.float32([2.0, 1.0, 0.5]) * (1 if loss.targets == "classes" else -1), (9, 1))
    y = np.zeros(9, np.int64) if loss.targets == "classes" else np.zeros((9, 3), np.float32)
    assert replica.evaluate(x, y)[1] == 9
    assert replica.evaluate_samples(x, y)[1].all()
    x[2], x[5, 1] = np.nan, np.nan
    wrong = [2, 5]
    # The products of a row with NaN are NaN.
    assert replica.evaluate(x, y)[1] == 7
    right = replica.evaluate_samples(x, y)[1]
    assert not right[wrong].any()
    assert right.sum() == 7
    # One output that is NaN, and not that of the predicted class.
    replica.parameters["dense1.bias"] = np.array([0.0, 0.0, np.nan])
    x = np.nan_to_num(x)
    assert replica.evaluate(x, y)[1] == 0
    assert not replica.evaluate_samples(x, y)[1].any()
