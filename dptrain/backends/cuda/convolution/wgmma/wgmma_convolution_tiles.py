"""Tile configurations of convolutions by TMA and wgmma; see ``conv2d_wgmma.cu``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from dptrain.backends.cuda.dense.gemm_tiles import GemmConfig, SplitK, ceil_div
from dptrain.backends.cuda.dense.wgmma_gemm_tiles import WgmmaTile, step_terms
from dptrain.backends.cuda.device.hardware import CYCLES_PER_US, ELEMENT_BYTES
from dptrain.plan.limits import DeviceLimits

MAX_SPLIT_WAVES, MAX_FEW_PARTS = 6, 4
"""Split-K parts that are tried: as many as make up to so many waves of blocks for weight gradients,
and up to so many for other products."""

LAUNCH_US = 1.5
"""Microseconds of a launch in addition to the estimated cycles."""

MMA_RATE, LOAD_RATE, STEP_LATENCY = 28, 63, 640
"""Elements of a tile for which tensor cores multiply a slice in a cycle; bytes of slices that a
multiprocessor loads in a cycle; cycles of a step at least. These and the following were fitted to
190 products of ResNet-18 (32×32) with five tiles each, 128 and 1024 samples, tf32 and bf16 (H200,
CUDA 13, November 2026). The selected tiles took 1.02 times as long as the fastest (geometric mean),
at worst 1.37 times."""

TILE_CYCLES, STORE_RATE, CACHE_RATE = 2400, 11, 5260
"""Cycles of a tile in addition to its steps; bytes of the result that a multiprocessor stores, or
reads to add to it, in a cycle; bytes of slices that the L2 cache delivers in a cycle."""

SECOND_PASS, ADD_RATE = 1700, 7200
"""Split-K reduction: fixed cycles, and bytes of parts per cycle that the GPU writes and reads."""

REGISTER_OPERAND, WIDE = 1.2, 256
"""Factor if an operand is read into registers, unless tiles have so many columns."""

FEW_STAGES = 1.3
"""Factor of tiles with three stages in tf32. In ResNet-18 (32×32) on an H200, other tiles took 0.79
to 0.89 of their time, which other terms do not describe; a step with 128 samples became 7%
shorter."""

TRANSPOSE, TRANSPOSE_RATE = 3600, 1680
"""Transposition of an operand: fixed cycles, and bytes per cycle that the GPU reads and writes.
With `REGISTER_OPERAND` they describe 90 weight gradients of ResNet-18 (32×32) in tf32 within a
third (H200); those of one tap took up to twice as long."""

TILES = (
    WgmmaTile(256, 128, 4, 1),
    WgmmaTile(128, 256, 4, 1),
    WgmmaTile(128, 128, 3, 2),
    WgmmaTile(128, 64, 4, 2),
    WgmmaTile(64, 64, 4, 3),
)
"""The tiles of which one is selected. If estimates are equal, it is the first in bf16 and the last
in tf32: with the reverse order, a step of ResNet-18 (32×32, batch size 1024) takes 1.0% and 0.4%
longer (H200)."""


Splits = Literal["no", "few", "many"]
"""Numbers of split-K parts that are tried."""


@dataclass(frozen=True)
class ConvolutionProduct:
    """One of the products of a convolution.

    Attributes:
        precision: ``tf32`` or ``bf16``.
        rows, columns: of the result; rows of the largest class.
        terms: of the sums of each class of rows.
        output_bytes: of an element of the result; twice as many if it is added to what is stored.
        splits: whether the sums may be divided into parts (split-K), many for a weight gradient.
        transposed: elements of an operand that are transposed before. The other operand is read
            into registers.
    """

    precision: str
    rows: int
    columns: int
    terms: tuple[int, ...]
    output_bytes: int
    splits: Splits = "no"
    transposed: int = 0


def rank_configs(
    product: ConvolutionProduct, limits: DeviceLimits
) -> Iterator[tuple[float, GemmConfig]]:
    """Yield the configurations with their estimated times in µs."""
    for tile in TILES if product.precision == "bf16" else reversed(TILES):
        splits = _splits(product, tile, limits)
        yield min(
            (_estimate(product, tile, parts, limits) for parts in splits), key=lambda pair: pair[0]
        )


def _splits(product: ConvolutionProduct, tile: WgmmaTile, limits: DeviceLimits) -> Iterable[int]:
    """Return the numbers of split-K parts to try."""
    blocks = math.prod(tile.grid(product.rows, product.columns))
    resident = limits.multiprocessors * tile.blocks_per_sm
    if product.splits == "no" or (product.splits == "few" and blocks > resident // 2):
        return [1]
    if product.splits == "few":
        return range(1, MAX_FEW_PARTS + 1)
    return {1, *(max(waves * resident // blocks, 1) for waves in range(1, MAX_SPLIT_WAVES + 1))}


def _estimate(
    product: ConvolutionProduct, tile: WgmmaTile, parts: int, limits: DeviceLimits
) -> tuple[float, GemmConfig]:
    """Return the estimated µs of a tile with a number of split-K parts, and the configuration."""
    step, classes = step_terms(product.precision), len(product.terms)
    part = ceil_div(ceil_div(max(product.terms), parts), step) * step
    split_k = SplitK(ceil_div(max(product.terms), part), part)
    blocks = math.prod(tile.grid(product.rows, product.columns, split_k.count)) * classes
    per_sm = blocks / limits.multiprocessors
    # The class with the most terms decides if all blocks run at the same time.
    terms = max(product.terms) if per_sm <= tile.blocks_per_sm else sum(product.terms) / classes
    steps = terms / split_k.count / step
    cycles = _tile_cycles(product, tile, steps, per_sm, 4 if split_k.count > 1 else 0)
    cycles = max(cycles, blocks * steps * tile.stage_bytes / CACHE_RATE)
    if product.precision == "tf32" and tile.stages == 3:
        cycles *= FEW_STAGES
    if product.transposed:
        cycles *= 1.0 if tile.columns == WIDE else REGISTER_OPERAND
        cycles += TRANSPOSE + 8 * product.transposed / TRANSPOSE_RATE
    if split_k.count > 1:
        bytes_moved = 8 * split_k.count + (product.output_bytes if product.splits == "few" else 0)
        cycles += SECOND_PASS + bytes_moved * product.rows * product.columns / ADD_RATE
    return LAUNCH_US + cycles / CYCLES_PER_US, GemmConfig(tile, split_k)


def _tile_cycles(
    product: ConvolutionProduct, tile: WgmmaTile, steps: float, per_sm: float, part_bytes: int
) -> float:
    """Return the estimated cycles of the tiles of a multiprocessor."""
    resident = min(math.ceil(per_sm), tile.blocks_per_sm)
    waves = per_sm / tile.blocks_per_sm
    # The last of many waves is half full on average.
    waves = float(math.ceil(waves)) if waves <= 3.0 else waves + 0.5
    area = tile.rows * tile.columns
    step = max(
        resident * area / MMA_RATE, resident * tile.stage_bytes / LOAD_RATE, STEP_LATENCY
    )  # fmt: skip
    store = resident * area * (part_bytes or product.output_bytes) / STORE_RATE
    return waves * (steps * step + TILE_CYCLES + store)


def fit(limits: DeviceLimits) -> bool:
    """Return whether a multiprocessor has the shared memory for all tiles."""
    return all(tile.blocks_per_sm * tile.shared_bytes <= limits.shared_bytes for tile in TILES)


def fills_slices(precision: str, channels: int, filters: int) -> bool:
    """Return whether channels and filters are multiples of the terms of a slice."""
    if precision not in ELEMENT_BYTES:
        return False
    step = step_terms(precision)
    return channels % step == filters % step == 0
