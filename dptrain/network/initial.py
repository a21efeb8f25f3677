"""Initial parameters: a pure function of network and seed."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from dptrain.network.initializers import Constant
from dptrain.network.network import Network


def initial_parameters(network: Network, seed: int) -> dict[str, NDArray[np.float64]]:
    """Draw every parameter of `network` in its canonical shape.

    Each parameter has a random stream of its own, keyed by `seed` and the parameter's name, so
    the values depend neither on the backend nor on what other layers the network has.

    Args:
        network: the network.
        seed: any non-negative integer.

    Returns:
        Name (``"conv1.weight"``) to float64 array in canonical shape, (K, C, R, S) or (out, in).
    """
    values: dict[str, NDArray[np.float64]] = {}
    for node in network.nodes:
        for parameter in node.parameters:
            init = parameter.init
            if isinstance(init, Constant):
                values[parameter.name] = np.full(parameter.shape, init.value, dtype=np.float64)
                continue
            key = (seed, zlib.crc32(parameter.name.encode()))
            generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
            std = init.deviation(parameter.fan_in)
            values[parameter.name] = std * generator.standard_normal(parameter.shape)
    return values
