"""Comparison of halo tiles with gathering kernels by estimated times.

Layers that do not fill halo tiles (`halo_tiles.fills`, `wgrad_tiles.fills_wgrad_tiles`) multiply
zeros in part, so their stages use halo tiles only if that is estimated to be faster.
"""

from __future__ import annotations

import math

from dptrain.backends.cuda.dense.gemm_tiles import select_gemm_cost
from dptrain.plan.limits import DeviceLimits

HALO_MARGIN = 1.0
"""Stages of layers that do not fill halo tiles use them if their estimated time, multiplied by
this, is lower than that of gathering. With 0 all such stages do, with `math.inf` none. On an H100,
41 stages of such layers take 1.33 ms in sum with the selected kernels, 3.27 ms if all are gathered,
and 1.31 ms with the fastest kernels (``benchmarks.gpu_kernels.gpu_halo``, November 2026)."""

CYCLES_PER_US = 1790
"""Of the H200 that estimates of halo tiles were fitted to (2026-11)."""

GATHER_COST_US, GATHER_LAUNCH_US = 2.5e-6, 1.5
"""Microseconds of gathering kernels per unit of `gemm_tiles.rank_gemm_configs`, and of a launch.
The 16 forward products and input gradients of "Halo tiles, 32 samples" in
docs/developers/kernels.md (H200, 2026-11-21) took 0.8 to 1.6 times as long, 1.17 times in the
median; ``tests/unit/cuda/test_gather_cost.py`` computes that."""

WGRAD_GATHER = {"fp32": 1.0, "tf32": 1.4, "bf16": 2.0}
"""Factor of weight gradients, whose operands are both gathered. On an H100, four took 1.2 to 1.6
times as long in tf32, and six 1.5 to 9 times in bf16."""

WIDE_GATHER = {"fp32": 1.0, "tf32": 1.0, "bf16": 1.4}
"""Factor of forward products and input gradients of layers with strides whose channels and filters
are multiples of `halo_tiles.CHANNEL_MULTIPLE`. On an H100, seven forward products of ResNet-18
(32×32) and ResNet-50 took 0.9 to 1.3 times as long as estimated in tf32, six 1.2 to 1.7 times in
bf16."""

UNPOOL_IN_KERNEL, UNPOOL_BYTES_PER_US = 1.6, 2.5e6
"""Factor of a gathering input-gradient kernel that undoes pooling for each tap (64 channels, 2048
samples, H200, 2026-11), and the rate of a separate pass that does it before. The rate is assumed,
half of the memory bandwidth of an H200; it was not measured."""

HALO_LAUNCH_US = 1.5
"""Microseconds that halo-tile kernels take in addition to their estimated cycles."""

FEW_CHANNEL_GAIN = 0.75
"""Time of the kernel for few channels, as a part of that of gathering; see kernels.md."""


def gather_us(
    precision: str, rows: int, columns: int, terms: int, limits: DeviceLimits, *,
    split: bool = False,
) -> float:  # fmt: skip
    """Return the estimated microseconds of a gathering product.

    Args:
        precision, rows, columns, terms, limits: as for `gemm_tiles.rank_gemm_configs`.
        split: whether it is a weight gradient, which can be split along K.
    """
    cost = select_gemm_cost(precision, rows, columns, terms, limits, split=split)
    return GATHER_LAUNCH_US + GATHER_COST_US * cost * (WGRAD_GATHER[precision] if split else 1.0)


def halo_us(cycles: float) -> float:
    """Return the estimated microseconds of a halo-tile kernel from its estimated cycles."""
    return HALO_LAUNCH_US + cycles / CYCLES_PER_US


def compares_with_gathering() -> bool:
    """Return whether layers that do not fill halo tiles can use them."""
    return math.isfinite(HALO_MARGIN)


def is_faster(halo: float, gather: float) -> bool:
    """Return whether halo tiles are selected, given both estimated times in µs."""
    return HALO_MARGIN * halo < gather
