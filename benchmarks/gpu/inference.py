"""Inference by dptrain on a batch in GPU memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dptrain
from benchmarks.gpu.clock import Built, Program, timer_of
from dptrain.batch import Batch
from dptrain.network import Dropout, Network


def our_inference(network: Network, backend: str, precision: str, x: NDArray[np.float32]) -> Built:
    """Return the pass that `Replica.predict` runs, with the batch loaded."""
    replica = dptrain.make_replica(
        network, backend, len(x), precision=precision, training=False
    )  # fmt: skip
    replica.load(Batch.of(x), training=False)
    start = partial(replica.run_forward, loss=False)
    for _ in range(2):  # The second pass is captured.
        start()

    def output() -> NDArray[Any]:
        start()
        replica.memory.synchronize()
        return np.array(replica.output()).reshape(len(x), -1)

    return Built(Program(start, timer_of(replica)), wait=replica.memory.synchronize, output=output)


def without_dropout(network: Network) -> Network:
    """Return the network as inference computes it, with the names of its parameters."""
    layers = [node.layer for node in network.nodes if not isinstance(node.layer, Dropout)]
    name = f"{network.name} without dropout"
    return Network(network.input_shape, layers, network.loss, name)
