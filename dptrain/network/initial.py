"""Initial parameters, a pure function of network and seed."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.network.initializers import Constant, Uniform
from dptrain.network.layers import Parameter
from dptrain.network.network import Network

BLOCK = 1 << 16
"""Approximate number of values drawn at once: they fit into the L2 cache, and no copy of a whole
layer in float64 is needed."""


def initial_parameters(network: Network, seed: int) -> dict[str, NDArray[np.float64]]:
    """Draw every parameter of `network` in its canonical shape.

    Each parameter has its own random stream, keyed by `seed` and the name of the parameter, so the
    values depend neither on the backend nor on the other layers.

    Args:
        network: the network.
        seed: any non-negative integer.

    Returns:
        Float64 arrays of canonical shape, (K, C, R, S), (out, in) or (out,), by name
        (``"conv1.weight"``).
    """
    values = {}
    for parameter in network.parameters:
        values[parameter.name] = np.empty(parameter.shape)
        draw(parameter, seed, values[parameter.name])
    return values


def draw(parameter: Parameter, seed: int, target: NDArray[Any]) -> None:
    """Draw one parameter, in double precision, into memory of any dtype and layout.

    Args:
        parameter: the parameter.
        seed: any non-negative integer.
        target: array that receives the values; its elements are in canonical order, (K, C, R, S)
            or (out, in), in any shape.
    """
    init = parameter.init
    if isinstance(init, Constant):
        target[...] = init.value
        return
    key = (seed, zlib.crc32(parameter.name.encode()))
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
    std = init.deviation(parameter.fan_in)
    rows = max(BLOCK // math.prod(target.shape[1:]), 1)
    for start in range(0, len(target), rows):
        block = target[start : start + rows]
        if isinstance(init, Uniform):
            block[...] = std * math.sqrt(3.0) * generator.uniform(-1.0, 1.0, block.shape)
        else:
            block[...] = std * generator.standard_normal(block.shape)
