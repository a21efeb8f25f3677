"""The factors of sums of windows, in every backend."""

from __future__ import annotations

import math

from dptrain.network.layers import AveragePool2d, Pool2d


def sum_factor(layer: Pool2d) -> float:
    """Return the factor of the sum of each window; 0 for 1 / (its elements inside the map)."""
    if not isinstance(layer, AveragePool2d):
        return 1.0
    return 1.0 / math.prod(layer.windows) if layer.count_padding else 0.0
