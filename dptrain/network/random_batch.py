"""Random minibatches for measurements."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.network.network import Network

POOL = 256
"""Number of different samples in a batch; a larger batch repeats them."""


def random_batch(network: Network, n: int) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Return inputs of unit variance and targets for the loss, at most `POOL` different samples.

    Args:
        network: the network.
        n: number of samples.

    Returns:
        x (n, C, H, W) or (n, F), and y, int32 (n,) or float32 (n, outputs).
    """
    random, pool, width = np.random.default_rng(0), min(n, POOL), network.num_outputs
    x = random.standard_normal((pool, *network.input_shape), np.float32)
    y: NDArray[Any]
    if network.loss.targets == "classes":
        y = random.integers(0, width, pool).astype(np.int32)
    else:
        y = random.integers(0, 2, (pool, width)).astype(np.float32)
    order = np.arange(n) % pool
    return x[order], y[order]
