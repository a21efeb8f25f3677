"""Training steps and inference passes of dptrain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dptrain
from dptrain.batch import Batch
from dptrain.network import Network
from dptrain.network.initial import initial_parameters

LEARNING_RATE = 1e-8
"""So small that hundreds of steps on one batch hardly change the parameters."""


@dataclass(frozen=True)
class Training:
    """A program that trains.

    Attributes:
        step: runs a step with a learning rate, and returns the loss before the update.
        parameters: returns copies of all parameters by name, in canonical layout.
    """

    step: Callable[[float], Any]
    parameters: Callable[[], dict[str, NDArray[Any]]]


CHECKED_RATE = 0.1
"""Learning rate of the one step whose update is compared."""


def first_step(training: Training) -> dict[str, NDArray[Any]]:
    """Return the loss and the change of each parameter in a step."""
    before = training.parameters()
    loss = np.array(float(training.step(CHECKED_RATE)))
    return {"loss": loss, **{k: v - before[k] for k, v in training.parameters().items()}}


def dptrain_training(
    network: Network, x: NDArray[Any], y: NDArray[Any], threads: int = 1
) -> Training:
    """Return a step: copy the batch, forward, loss, backward, update."""
    replica = dptrain.make_replica(network, batch_size=len(x), threads=threads)
    batch = Batch.of(x, y)

    def step(learning_rate: float) -> float:
        replica.load(batch)
        replica.run()
        replica.update(learning_rate)
        return float(replica.loss_sums()[0])

    def parameters() -> dict[str, NDArray[Any]]:
        return {name: np.array(value) for name, value in replica.parameters.items()}

    return Training(step, parameters)


def dptrain_inference(
    network: Network, x: NDArray[Any], threads: int = 1
) -> Callable[[], NDArray[Any]]:
    """Return a function that computes the outputs of a batch."""
    replica = dptrain.make_replica(network, batch_size=len(x), threads=threads, training=False)
    return lambda: replica.forward(x)


def initial(network: Network) -> Mapping[str, NDArray[np.float32]]:
    """Return dptrain's initial parameters with seed 0."""
    parameters = initial_parameters(network, 0)
    return {name: np.asarray(value, np.float32) for name, value in parameters.items()}
