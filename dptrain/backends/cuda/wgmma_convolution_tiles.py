"""Tile configurations of convolutions by TMA and wgmma; see ``kernels/conv2d_wgmma.cu``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dptrain.backends.cuda.gather_cost import CYCLES_PER_US
from dptrain.backends.cuda.gemm_tiles import GemmConfig, SplitK, ceil_div
from dptrain.backends.cuda.hardware import ELEMENT_BYTES
from dptrain.backends.cuda.wgmma_gemm_tiles import (
    ADD_RATE,
    SECOND_PASS,
    WgmmaTile,
    step_terms,
    tile_cycles,
)
from dptrain.plan.limits import DeviceLimits

MARGIN = 1.0
"""Stages use these kernels if their estimated time, multiplied by this, is lower than that of the
others. With 0 all supported stages do, with `math.inf` none."""

LAUNCH_US = 1.5
"""Microseconds of a launch in addition to the estimated cycles."""

TILES = ((256, 128, 4, 1), (128, 256, 4, 1), (128, 128, 3, 2), (128, 64, 4, 2), (64, 64, 4, 3))
"""Rows, columns, stages and resident blocks of the tiles."""


@dataclass(frozen=True)
class ConvolutionProduct:
    """One of the products of a convolution.

    Attributes:
        precision: ``tf32`` or ``bf16``.
        rows, columns: of the result; rows of the largest class.
        terms: of the sums of each class of rows.
        output_bytes: of an element of the result.
        splits: whether the sum may be divided into parts (split-K).
    """

    precision: str
    rows: int
    columns: int
    terms: tuple[int, ...]
    output_bytes: int
    splits: bool = False


def select_config(product: ConvolutionProduct, limits: DeviceLimits) -> tuple[float, GemmConfig]:
    """Return the lowest estimated time in µs, and its configuration."""
    return min(rank_configs(product, limits), key=lambda pair: pair[0])


def rank_configs(
    product: ConvolutionProduct, limits: DeviceLimits
) -> Iterator[tuple[float, GemmConfig]]:
    """Yield the configurations with their estimated times in µs."""
    step, classes = step_terms(product.precision), len(product.terms)
    for shape in TILES:
        tile = WgmmaTile(*shape)
        blocks = math.prod(tile.grid(product.rows, product.columns)) * classes
        parts = 1
        if product.splits:
            parts = max(limits.multiprocessors * tile.blocks_per_sm // blocks, 1)
        terms = max(product.terms)
        part = ceil_div(ceil_div(terms, parts), step) * step
        split_k = SplitK(ceil_div(terms, part), part)
        steps = sum(product.terms) / classes / split_k.count / step
        nbytes = 4 if split_k.count > 1 else product.output_bytes
        cycles = tile_cycles(tile, blocks * split_k.count, steps, nbytes, limits)
        if split_k.count > 1:
            cycles += SECOND_PASS + 8 * split_k.count * product.rows * product.columns / ADD_RATE
        yield LAUNCH_US + cycles / CYCLES_PER_US, GemmConfig(tile, split_k)


def fills_slices(precision: str, channels: int, filters: int) -> bool:
    """Return whether channels and filters are multiples of the terms of a slice."""
    if precision not in ELEMENT_BYTES:
        return False
    step = step_terms(precision)
    return channels % step == filters % step == 0
