"""How dense layers of few samples are cut; see ``kernels/skinny_gemm.cu``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dptrain.backends.cuda import halo_tiles
from dptrain.backends.cuda.device import Extent
from dptrain.backends.cuda.gemm_tiles import WARP, GemmConfig, SplitK, ceil_div
from dptrain.backends.cuda.halo_tiles import MULTIPROCESSORS, SIZES

SAMPLES = 32
"""Of a tile."""

MOST_SAMPLES = 64
"""Beyond, weights are used often enough that products which slice their sums are faster."""

MANY_WEIGHTS = 1 << 21
"""Below, products that slice their sums are faster within a step. One H200, batch 32, tf32 and
bf16, a step with them over one without: solar (4.3 million weights in a layer) 0.96 and 0.94; cifar
(0.9), model2, model1 and model0 1.00 to 1.07."""

SHARED_BYTES = 200 << 10
"""Of a block. GPUs whose multiprocessors have less slice their sums."""

STEP_TERMS = 16
"""That the terms of a block are a multiple of."""

COLUMNS = (16, 32, 64, 128)
"""Of a tile."""

WARPS = 8
"""Of a block."""

ARRIVAL, BLOCK_RATE, RATE = 0.6, 8e4, 4.5e6
"""Microseconds until what was asked for begins to come; bytes of a block that come in one, and of
all blocks."""

STEP = 0.05
"""Microseconds of an instruction along the sum, and what belongs to it."""

SECOND_PASS, ADDING = 1.2, 3e6
"""Microseconds of adding parts, and bytes of them that are written and read in one."""


@dataclass(frozen=True)
class SkinnyTile:
    """What a block computes: all terms of its part at once.

    Attributes:
        columns: of a tile.
        terms: of the sum.
        size: bytes of an activation.
        sum_first: whether weights lie with terms side by side.
    """

    columns: int
    terms: int
    size: int
    sum_first: bool = False

    @property
    def groups(self) -> int:
        """Of warps that share the columns."""
        return max(WARPS * 16 // self.columns, 1)

    @property
    def defines(self) -> dict[str, int]:
        """Macros of ``skinny_gemm.cu``."""
        return {
            "TILE_M": SAMPLES, "TILE_N": self.columns, "WARP_M": SAMPLES, "WARP_N": 16,
            "TILE_K_WORDS": 16, "PREFETCH_STEPS": 1, "K_GROUPS": self.groups, "BLOCK_K": self.terms,
        }  # fmt: skip

    @property
    def block(self) -> Extent:
        """Threads of a block."""
        return self.columns // 16 * WARP, self.groups, 1

    @property
    def shared_bytes(self) -> int:
        """Weights and samples, or sums of all groups but the first."""
        padded = self.columns * (self.terms + 4) if self.sum_first else (
            self.terms * (self.columns + 8)
        )  # fmt: skip
        held = 4 * padded + SAMPLES * (self.terms * self.size + 16)
        return max(held, 4 * (self.groups - 1) * SAMPLES * self.columns)

    def grid(self, rows: int, columns: int, parts: int = 1) -> Extent:
        """Blocks of a product of rows × columns whose sum is cut into `parts`."""
        return ceil_div(rows, SAMPLES), ceil_div(columns, self.columns), parts

    def microseconds(self, blocks: int) -> float:
        """That so many blocks take, by an estimate."""
        held = MULTIPROCESSORS * max(halo_tiles.SHARED_BYTES // self.shared_bytes, 1)
        rounds, nbytes = max(blocks / held, 1.0), self.shared_bytes
        arriving = max(nbytes / BLOCK_RATE, min(blocks, held) * nbytes / RATE)
        steps = self.terms * self.size / 32 / self.groups
        return ARRIVAL + rounds * (arriving + STEP * steps)


@dataclass(frozen=True)
class SkinnyWgradTile:
    """What a block computes of the gradient of weights: a tile, of all samples at once.

    Attributes:
        columns: of the tile.
        samples: as many as a slice has.
        size: bytes of an activation.
    """

    columns: int
    samples: int
    size: int

    ROWS: ClassVar[int] = 64
    """Of the tile."""

    OWN: ClassVar[int] = 32
    """Rows, and columns, of a warp."""

    @property
    def defines(self) -> dict[str, int]:
        """Macros of ``skinny_gemm_backward_weight.cu``."""
        return {
            "TILE_M": self.ROWS, "TILE_N": self.columns, "WARP_M": self.OWN, "WARP_N": self.OWN,
            "TILE_K_WORDS": self.samples * self.size // 4,
        }  # fmt: skip

    @property
    def block(self) -> Extent:
        """Threads of a block."""
        return self.ROWS * self.columns // self.OWN**2 * WARP, 1, 1

    @property
    def shared_bytes(self) -> int:
        """Slices of both factors, or the tile's sums."""
        slices = self.samples * (self.ROWS + self.columns + 16) * self.size
        return max(slices, 4 * self.ROWS * (self.columns + 8))

    def grid(self, rows: int, columns: int, parts: int = 1) -> Extent:
        """Blocks of a product of rows × columns; the last row, the bias's, needs no tile."""
        return ceil_div(rows - 1, self.ROWS), ceil_div(columns, self.columns), parts


def gradient_tiling(precision: str, batch_size: int, outputs: int) -> GemmConfig:
    """Of the product that is the gradient of weights."""
    columns = min(ceil_div(outputs, SkinnyWgradTile.OWN), 4)
    columns = SkinnyWgradTile.OWN << (columns - 1).bit_length()
    samples = ceil_div(batch_size, SAMPLES) * SAMPLES
    tile = SkinnyWgradTile(columns, samples, SIZES[precision])
    return GemmConfig(tile, SplitK(1, batch_size))


def _padded(terms: int) -> int:
    return ceil_div(terms, STEP_TERMS) * STEP_TERMS


def suits(precision: str, batch_size: int, weights: int) -> bool:
    """Whether there are such kernels for so many samples and weights, and they are faster."""
    return precision in SIZES and batch_size <= MOST_SAMPLES and weights >= MANY_WEIGHTS


def forward_tiling(precision: str, batch_size: int, inputs: int, outputs: int) -> GemmConfig:
    """Of the product that is the output, its sum perhaps in parts."""

    def estimate(tiling: GemmConfig) -> float:
        few, parts = tiling.tile, tiling.parts
        assert isinstance(few, SkinnyTile)
        time = few.microseconds(math.prod(few.grid(batch_size, outputs, parts.count)))
        if parts.count > 1:
            time += SECOND_PASS + 8 * parts.count * batch_size * outputs / ADDING
        return time

    ways = (
        GemmConfig(few, SplitK(ceil_div(inputs, few.terms), few.terms))
        for columns in COLUMNS
        for few in _cuts(columns, inputs, SIZES[precision])
    )
    return min(ways, key=estimate)


def _cuts(columns: int, terms: int, size: int) -> Iterator[SkinnyTile]:
    """SplitK of a sum, from whole to a step, each half as long as the one before or thereabouts."""
    parts = 1
    while True:
        few = SkinnyTile(columns, _padded(ceil_div(terms, parts)), size)
        if few.shared_bytes <= SHARED_BYTES:
            yield few
        if few.terms == STEP_TERMS:
            return
        parts += max(parts // 4, 1)


def backward_tile(precision: str, batch_size: int, inputs: int, outputs: int) -> SkinnyTile | None:
    """Of the product that is the gradient by the inputs; None where outputs are too many."""
    ways = (SkinnyTile(n, _padded(outputs), SIZES[precision], sum_first=True) for n in COLUMNS)
    return min(
        (few for few in ways if few.shared_bytes <= SHARED_BYTES),
        key=lambda few: few.microseconds(math.prod(few.grid(batch_size, inputs))), default=None,
    )  # fmt: skip
