"""Comparison of halo tiles with gathering kernels by estimated times.

Layers that do not fill halo tiles (`halo_tiles.fills`, `wgrad_tiles.fills_wgrad_tiles`) multiply
zeros in part, so their stages use halo tiles only if that is estimated to be faster.
"""

from __future__ import annotations

import math

from dptrain.backends.cuda.gemm_tiles import select_gemm_cost
from dptrain.plan.limits import DeviceLimits

HALO_MARGIN = math.inf
"""Stages of layers that do not fill halo tiles use them if their estimated time, multiplied by
this, is lower than that of gathering. With 0 all such stages do, with `math.inf` none.

The estimates agree with the measurements in docs/kernels.md, which are of layers that fill halo
tiles. No other layer has been measured on a GPU yet, so the default is infinity;
``benchmarks.gpu_halo`` measures 0 and infinity."""

CYCLES_PER_US = 1790
"""Of the H200 that estimates were fitted to."""

GATHER_COST_US, GATHER_LAUNCH_US = 2.5e-6, 1.5
"""Microseconds of gathering kernels per unit of `gemm_tiles.rank_gemm_configs`, and of a launch.
On an H200, 24 products took 2.3 to 3.3 times 1e-6 µs per unit plus the launch."""

UNPOOL_IN_KERNEL, UNPOOL_BYTES_PER_US = 1.6, 2.5e6
"""Factor of a gathering input-gradient kernel that undoes pooling for each tap, and the rate of a
separate pass that does it before."""

HALO_LAUNCH_US = 2.5
"""Microseconds that halo-tile kernels take in addition to their estimated cycles."""

FEW_CHANNEL_GAIN = 0.75
"""Time of the kernel for few channels, as a part of that of gathering (docs/kernels.md)."""


def gather_us(
    precision: str, rows: int, columns: int, terms: int, limits: DeviceLimits, *,
    split: bool = False,
) -> float:  # fmt: skip
    """Return the estimated microseconds of a gathering product.

    Args:
        precision, rows, columns, terms, limits, split: as for `gemm_tiles.rank_gemm_configs`.
    """
    cost = select_gemm_cost(precision, rows, columns, terms, limits, split=split)
    return GATHER_LAUNCH_US + GATHER_COST_US * cost


def halo_us(cycles: float) -> float:
    """Return the estimated microseconds of a halo-tile kernel from its estimated cycles."""
    return HALO_LAUNCH_US + cycles / CYCLES_PER_US


def compares_with_gathering() -> bool:
    """Return whether layers that do not fill halo tiles can use them."""
    return math.isfinite(HALO_MARGIN)


def is_faster(halo: float, gather: float) -> bool:
    """Return whether halo tiles are selected, given both estimated times in µs."""
    return HALO_MARGIN * halo < gather
