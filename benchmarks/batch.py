"""Random batches and dropout masks, the same for every program."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.network import Dropout, Network
from dptrain.philox import dropout_keep

SEED = 0
"""Seed of the parameters and of the dropout masks."""


def random_batch(
    network: Network, n: int, seed: int = 0
) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Return inputs of unit variance and targets for the network's loss."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, *network.input_shape), np.float32)
    width = network.num_outputs
    if network.loss.targets == "classes":
        return x, rng.integers(0, width, n)
    if network.loss.targets == "binary":
        return x, rng.integers(0, 2, (n, width)).astype(np.float32)
    return x, rng.standard_normal((n, width), np.float32)


def dropout_factors(network: Network, n: int) -> dict[str, NDArray[np.float64]]:
    """Return by layer what dropout multiplies its inputs with in dptrain's first step.

    The factors are 0 or 1 / (1 − rate). Other libraries cannot key random numbers by sample.
    """
    factors = {}
    for node in network.nodes:
        if isinstance(node.layer, Dropout):
            channels, height, width = node.output_maps
            keep = dropout_keep(
                node.layer.rate, channels * height * width, seed=SEED, step=0, layer=node.index,
                samples=np.arange(n, dtype=np.int64),
            )  # fmt: skip
            maps = keep.reshape(n, height, width, channels).transpose(0, 3, 1, 2)
            factors[node.name] = (maps / (1.0 - node.layer.rate)).reshape(n, *node.output_shape)
    return factors
