"""The benchmark's PyTorch network is ours, and its check lets nothing wrong pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import dptrain
from benchmarks.batch import random_batch
from benchmarks.check import Check, compare
from dptrain.network import (
    AveragePool2d,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    LocalResponseNorm,
    MaxPool2d,
    MeanSquaredError,
    Network,
    ReLU,
    Sigmoid,
    SigmoidBinaryCrossEntropy,
    SumPool2d,
)

pytestmark = pytest.mark.more

EVERY_LAYER = [
    Conv2d(5, 3), ReLU(), LocalResponseNorm(1, alpha=0.3), MaxPool2d(3, 2, "same"),
    Conv2d(4, 2), Sigmoid(), AveragePool2d(3, 2, "same"), Conv2d(3, (2, 3), padding="full"),
    SumPool2d(2), Dropout(0.3), MaxPool2d(3, 1, "same"), MaxPool2d(2, 1, "same"),
    Flatten(), Dense(7), ReLU(), Dense(3),
]  # fmt: skip
NETWORKS = [
    Network((2, 12, 11), EVERY_LAYER, name="every layer"),
    Network((2, 9, 12), EVERY_LAYER, SigmoidBinaryCrossEntropy(), "binary"),
    Network((5,), [Dense(6), ReLU(), Dense(2)], MeanSquaredError(), "values"),
]
N = 4


def gradients_of(network: Network, backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters, and what one step gives."""
    x, y = random_batch(network, N)
    replica = dptrain.make_replica(network, backend, batch_size=N)
    parameters = {name: np.asarray(p, np.float64) for name, p in replica.parameters.items()}
    loss = replica.forward_backward(x, y)
    ours = {"loss": np.array(loss), "output": replica.output(), **replica.gradients}
    return parameters, ours


def examine(network: Network, parameters: dict[str, Any], ours: dict[str, Any]) -> Check:
    x, y = random_batch(network, N)
    return compare(network, N, ours, parameters, x.astype(np.float64), y)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_exact_results_agree_to_float64(network: Network) -> None:
    found = examine(network, *gradients_of(network, "reference"))
    # Sums of a few hundred terms in float64, in another order.
    assert found.error < 1e-12


def _scaled(array: NDArray[Any]) -> NDArray[Any]:
    return array * 1.01


def _one_element(array: NDArray[Any]) -> NDArray[Any]:
    changed = np.array(array, np.float64)
    largest = np.abs(changed).argmax()
    changed.reshape(-1)[largest] *= 0.9
    return changed


def _not_a_number(array: NDArray[Any]) -> NDArray[Any]:
    return np.full_like(array, np.nan)


@pytest.mark.parametrize("spoil", [_scaled, _one_element, _not_a_number, np.zeros_like])
@pytest.mark.parametrize("name", ["loss", "output", "conv1.weight", "dense2.bias"])
def test_a_wrong_result_is_noticed(name: str, spoil: Any) -> None:
    network = NETWORKS[0]
    parameters, ours = gradients_of(network, "reference")
    assert examine(network, parameters, ours).passed
    found = examine(network, parameters, {**ours, name: spoil(np.asarray(ours[name]))})
    assert not found.passed
    assert found.quantity == name
