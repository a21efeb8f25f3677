"""A training step of dptrain: the whole step, its stages, and its results."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import dptrain
from benchmarks.batch import random_batch
from benchmarks.gpu.clock import Program, timer_of
from dptrain.backends.device_replica import DeviceReplica
from dptrain.batch import Batch
from dptrain.network import Network

LEARNING_RATE = 1e-12
"""So small that thousands of steps on one batch do not change the parameters."""


class Step:
    """A replica that repeats the same step, with its batch in memory.

    Attributes:
        replica: the replica.
        x, y: the batch.
        start: function that starts forward, loss, backward and update; a GPU launches one graph.
        memory_bytes: allocated memory.
    """

    def __init__(self, network: Network, backend: str, precision: str, batch_size: int) -> None:
        self.x, self.y = random_batch(network, batch_size)
        self.replica = dptrain.make_replica(
            network, backend, batch_size, precision=precision, optimizer=dptrain.SGD(momentum=0.0)
        )
        self.start = self.replica.memory.program(self._enqueue)
        self.memory_bytes = sum(self.replica.plan.memory.values())
        self.load()

    def load(self) -> None:
        """Load the batch and the learning rate into the replica."""
        self.replica.load(Batch.of(self.x, self.y))
        self.set_rate(LEARNING_RATE)

    def set_rate(self, learning_rate: float) -> None:
        """Set the learning rate of all following steps."""
        self.replica.context.learning_rate = learning_rate
        if isinstance(self.replica, DeviceReplica):
            self.replica.upload_hyperparameters()

    def _enqueue(self) -> None:
        if isinstance(self.replica, DeviceReplica):
            self.replica.run(early=True)
            self.replica.enqueue_update(rest=True)
        else:
            self.replica.run()
            self.replica.update_kernel()(self.replica.context)

    @property
    def program(self) -> Program:
        """The step as a timed program."""
        return Program(self.start, timer_of(self.replica))

    @property
    def parameters(self) -> dict[str, NDArray[Any]]:
        """Copies of the parameters by name, in canonical layout."""
        return {name: np.array(value) for name, value in self.replica.parameters.items()}

    def results(self) -> dict[str, NDArray[Any]]:
        """Return loss, output and gradients of the last step."""
        replica = self.replica
        replica.memory.synchronize()
        return {
            "loss": np.array(float(replica.loss_sums()[0])),
            "output": replica.output(),
            **replica.gradients,
        }
