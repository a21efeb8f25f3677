"""Tile configurations of large dense layers on Hopper; see ``headers/wgmma_gemm.cuh``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dptrain.backends.cuda.dense.gemm_tiles import GemmConfig, SplitK, ceil_div
from dptrain.backends.cuda.device.device import Extent
from dptrain.backends.cuda.device.hardware import ELEMENT_BYTES, VECTOR_BYTES, WARP_SIZE
from dptrain.backends.cuda.device.tensor_maps import ARCHITECTURE
from dptrain.plan.limits import DeviceLimits
from dptrain.plan.lowering import Phase

ROW_BYTES = 128
"""Bytes of a row of a slice, the swizzle of TMA: 64 terms in bf16, 32 in tf32."""

WARP_ROWS = 16
"""Rows of the tile that a warp computes."""

MIN_PRODUCTS = 5 * 10**7
"""Multiply-adds of a layer's product from which the kernels are used: the cost of the separate
backward phase and of rounding weights, about 3 µs, divided by the gain per multiply-add of all
phases. This is 3·10⁻⁸ to 10⁻⁷ µs in products of 10⁸ to 3·10⁸ (H100, 784 × 2048 and 2048 × 2048
weights with 77 samples, 2048 × 100 with 512), and nearly 0 at 1.6·10⁷ (2048 × 100 with 77)."""

MIN_EXTENT = 64
"""The least samples, inputs and outputs of such a layer."""

MMA_RATE, LOAD_RATE, STEP_LATENCY = 34, 48, 390
"""Elements of a tile for which tensor cores multiply a slice in a cycle; bytes of slices that a
multiprocessor loads in a cycle; cycles of a step at least. These and the following were fitted to
36 products with five tiles each (H100, CUDA 13, November 2026)."""

LATENCY, STORE_RATE = 1000, 12
"""Cycles to start and end a kernel; bytes of the result that a multiprocessor stores in a cycle."""

SECOND_PASS, ADD_RATE = 3500, 1200
"""Split-K reduction: fixed cycles, and bytes of parts per cycle that the GPU writes and reads.
Estimates."""

MIN_SPLIT_STEPS = 8
"""Least steps of a split-K part."""


@dataclass(frozen=True)
class WgmmaTile:
    """Tile of a block.

    Attributes:
        rows, columns: of the tile of the product. Each 64 rows have a warp group.
        stages: slices of both operands in shared memory.
        blocks_per_sm: resident blocks of a multiprocessor, which limits registers.
        transposed: whether the kernel stores the transposed product (forward in tf32).
    """

    rows: int
    columns: int
    stages: int
    blocks_per_sm: int
    transposed: bool = False

    ALGORITHM: ClassVar[str] = "wgmma GEMM"

    @property
    def defines(self) -> dict[str, int]:
        """Macros of ``wgmma_gemm.cuh``."""
        return {
            "TILE_M": self.rows, "TILE_N": self.columns, "WARP_M": WARP_ROWS,
            "WARP_N": self.columns, "TILE_K_WORDS": ROW_BYTES // 4, "PREFETCH_STEPS": 1,
            "K_GROUPS": 1, "STAGES": self.stages, "MIN_BLOCKS": self.blocks_per_sm,
            "BARRIERS_OFFSET": self._barriers_offset,
        }  # fmt: skip

    @property
    def block(self) -> Extent:
        """Threads of a block: its consumer warps and the producer warp."""
        return (self.rows // WARP_ROWS + 1) * WARP_SIZE, 1, 1

    @property
    def stage_bytes(self) -> int:
        """Slices of both operands, in bytes."""
        return (self.rows + self.columns) * ROW_BYTES

    @property
    def _barriers_offset(self) -> int:
        """Bytes of the stages, or of the accumulators that are exchanged, as in `store_tile`."""
        exchanged = 5 * self.columns if self.transposed else 4 * (self.columns + 8)
        return max(self.stages * self.stage_bytes, self.rows * exchanged)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes."""
        return self._barriers_offset + 16 * self.stages

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}, stages {self.stages}"

    def grid(self, rows: int, columns: int, parts: int = 1) -> Extent:
        """Return the blocks of a product of rows × columns whose sum is split into `parts`."""
        if self.transposed:
            rows, columns = columns, rows
        return ceil_div(rows, self.rows), ceil_div(columns, self.columns), parts


def step_terms(precision: str) -> int:
    """Return the terms of a slice."""
    return ROW_BYTES // ELEMENT_BYTES[precision]


TILES = (
    (128, 128, 3, 2),
    (128, 64, 4, 2),
    (128, 256, 4, 1),
    (64, 128, 4, 2),
    (64, 64, 4, 3),
)
"""Rows, columns, stages and resident blocks of the tiles."""


def is_worthwhile(
    precision: str, samples: int, inputs: int, outputs: int, limits: DeviceLimits
) -> bool:
    """Return whether the kernels exist for a layer and are faster."""
    if precision not in ELEMENT_BYTES or limits.capability != ARCHITECTURE:
        return False
    vector = VECTOR_BYTES // ELEMENT_BYTES[precision]
    aligned = inputs % vector == outputs % vector == 0
    large = samples * inputs * outputs >= MIN_PRODUCTS
    return aligned and large and min(samples, inputs, outputs) >= MIN_EXTENT


def rank_configs(
    precision: str, rows: int, columns: int, terms: int, limits: DeviceLimits, phase: Phase
) -> Iterator[tuple[float, GemmConfig]]:
    """Yield the configurations of a product with their estimated cycles.

    Among the tiles, the selected one took 1.01 times as long as the fastest (geometric mean of
    the products that the constants were fitted to), at worst 1.07 times.

    Args:
        precision: ``tf32`` or ``bf16``.
        rows, columns: of the result.
        terms: of each sum.
        limits: of the GPU.
        phase: only the forward product can be split along K, and its kernel in tf32 computes the
            transposed result. Weight gradients are float32.
    """
    step, forward = step_terms(precision), phase is Phase.FORWARD
    output_bytes = 4 if phase is Phase.BACKWARD_WEIGHT else ELEMENT_BYTES[precision]
    for shape in TILES:
        tile = WgmmaTile(*shape, transposed=forward and precision == "tf32")
        blocks = math.prod(tile.grid(rows, columns))
        wanted = limits.multiprocessors * tile.blocks_per_sm // blocks
        most = max(ceil_div(terms, step) // MIN_SPLIT_STEPS, 1)
        for wanted_parts in {1, min(max(wanted, 1), most)} if forward else {1}:
            part = ceil_div(ceil_div(terms, wanted_parts), step) * step
            split_k = SplitK(ceil_div(terms, part), part)
            nbytes = 4 if split_k.count > 1 else output_bytes
            cycles = _cycles(tile, split_k, precision, rows, columns, nbytes, limits)
            yield cycles, GemmConfig(tile, split_k)


def _cycles(
    tile: WgmmaTile, split_k: SplitK, precision: str, rows: int, columns: int, output_bytes: int,
    limits: DeviceLimits,
) -> float:  # fmt: skip
    """Return the estimated cycles of a product whose elements have `output_bytes` bytes."""
    blocks = math.prod(tile.grid(rows, columns, split_k.count))
    steps = ceil_div(split_k.terms, step_terms(precision))
    area = tile.rows * tile.columns
    per_sm = ceil_div(blocks, limits.multiprocessors)
    resident = min(per_sm, tile.blocks_per_sm)
    step = max(
        resident * area / MMA_RATE, resident * tile.stage_bytes / LOAD_RATE, STEP_LATENCY
    )  # fmt: skip
    store = per_sm * area * output_bytes / STORE_RATE
    time = LATENCY + per_sm / resident * steps * step + store
    if split_k.count > 1:
        time += SECOND_PASS + 8 * split_k.count * rows * columns / ADD_RATE
    return time
