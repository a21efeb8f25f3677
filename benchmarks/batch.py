"""Random batches, the same for every program."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.network import Network


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
