"""How parameters start: descriptions, and the pure function that turns them into numbers."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dptrain.network.network import Network


@dataclass(frozen=True)
class He:
    """Normal(0, sqrt(2 / fan_in)).

    Source: He et al., "Delving deep into rectifiers", 2015, equation 10.
    """

    def deviation(self, fan_in: int) -> float:
        """Standard deviation for a unit with `fan_in` inputs."""
        return math.sqrt(2.0 / fan_in)


@dataclass(frozen=True)
class Normal:
    """Normal(0, std) with a given standard deviation."""

    std: float

    def deviation(self, fan_in: int) -> float:
        """Standard deviation, whatever the fan-in."""
        return self.std


@dataclass(frozen=True)
class Constant:
    """Every element equals `value`."""

    value: float = 0.0


Initializer = He | Normal | Constant


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
