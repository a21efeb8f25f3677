"""Tile configurations of dense layers with few samples; see ``skinny_gemm.cu``.

With few samples the product is skinny (small M), and its time is that of reading the weights. A
block therefore loads all weights and samples of its part of the sum in one step and multiplies them
when they have arrived. The constants were measured on an H200 (CUDA 13, 2026-11).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dptrain.backends.cuda.dense.gemm_tiles import GemmConfig, SplitK, ceil_div
from dptrain.backends.cuda.device.device import Extent
from dptrain.backends.cuda.device.hardware import (
    ELEMENT_BYTES,
    MIN_TF32X3_TERMS,
    WARP_SIZE,
    allows_tf32x3,
)
from dptrain.plan.limits import DeviceLimits

TILE_SAMPLES = 32
"""Samples of a tile; with at most 16 samples, a tile has 16."""

MAX_SAMPLES = {"fp32": 32, "tf32": 16, "bf16": 32}
"""With more samples, weights are reused so often that the general kernels are faster."""

MIN_WEIGHTS, MAX_WEIGHTS, FEW_SAMPLES = 1 << 21, 1 << 23, 8
"""Weights of a layer between which these kernels are faster; in tf32 and bf16, the upper bound
holds with more than `FEW_SAMPLES` samples.

Step time without these kernels divided by the time with them, in fp32, tf32 and bf16 (H200,
2026-11-29, 9 to 15 pairs). solar (4.3 million weights): 1.21 with 8 samples, 1.09 with 32 and 1.01
with 64; 1.19 with 1, 1.12 with 16 and 1.00 with 32; 1.08 with 16 and 1.05 with 32. alexnet (38, 17
and 4 million): 1.12, 1.04 and 1.00; 1.03, 0.99 and 0.96; 0.97 and 0.98. cifar (0.9 million) and
model0 to model2, 32 samples: 0.93 to 1.00.
"""

MAX_SHARED_BYTES = 200 << 10
"""Shared memory of a block. GPUs whose blocks can have less use smaller tiles."""

K_MULTIPLE = 16
"""The terms of a block are a multiple of this."""

COLUMN_CHOICES = (16, 32, 64, 128)
"""Columns of a tile."""

BLOCK_WARPS = 8

LATENCY, BLOCK_BANDWIDTH, BANDWIDTH = 0.6, 8e4, 4.5e6
"""Latency of the first load in µs; bandwidth of one block and of all blocks in bytes per µs."""

STEP_TIME = 0.05
"""Time of a tensor-core step along K of 32 samples, in µs; 3xTF32 takes three times as long."""

SECOND_PASS, ADD_BANDWIDTH, ADD_PART = 1.2, 3e6, 0.006
"""Split-K reduction: fixed time in µs, bytes of parts written and read per µs, and the shortest
time of a part, because a thread adds an eighth of the parts one after another."""


@dataclass(frozen=True)
class SkinnyTile:
    """Tile configuration of the forward and backward-input products.

    Attributes:
        samples: of a tile.
        columns: of a tile.
        terms: of the sum that a block computes.
        precision: fp32 (by 3xTF32), tf32 or bf16.
        k_contiguous: whether consecutive terms of the weights are contiguous (backward-input).
    """

    samples: int
    columns: int
    terms: int
    precision: str
    k_contiguous: bool = False

    ALGORITHM: ClassVar[str] = "skinny GEMM"

    @property
    def tf32x3(self) -> bool:
        """Whether tensor cores compute products of float32 from TF32 parts (3xTF32)."""
        return self.precision == "fp32"

    @property
    def k_groups(self) -> int:
        """Groups of warps that split K between them."""
        return max(BLOCK_WARPS * 16 // self.columns, 1)

    @property
    def defines(self) -> dict[str, int]:
        """Macros of ``skinny_gemm.cu``."""
        return {
            "TILE_M": self.samples, "TILE_N": self.columns, "WARP_M": self.samples, "WARP_N": 16,
            "TILE_K_WORDS": 16, "PREFETCH_STEPS": 1, "K_GROUPS": self.k_groups,
            "BLOCK_K": self.terms, **({"TF32X3": 1} if self.tf32x3 else {}),
        }  # fmt: skip

    @property
    def block(self) -> Extent:
        """Threads of a block."""
        return self.columns // 16 * WARP_SIZE, self.k_groups, 1

    @property
    def shared_bytes(self) -> int:
        """Weights and samples, or the partial sums that groups exchange, in bytes."""
        padded = self.columns * (self.terms + 4) if self.k_contiguous else (
            self.terms * (self.columns + 8)
        )  # fmt: skip
        operands = 4 * padded + self.samples * (self.terms * _element_bytes(self.precision) + 16)
        return max(operands, 4 * (self.k_groups - 1) * self.samples * self.columns)

    def __str__(self) -> str:
        suffix = "/3xtf32" if self.tf32x3 else ""
        return f"{self.samples}x{self.columns}{suffix}, {self.terms} terms"

    def grid(self, rows: int, columns: int, parts: int = 1) -> Extent:
        """Return the blocks of a product of rows × columns whose sum is split into `parts`."""
        return ceil_div(rows, self.samples), ceil_div(columns, self.columns), parts

    def time_us(self, blocks: int, limits: DeviceLimits) -> float:
        """Return the estimated time of `blocks` blocks in µs."""
        blocks_per_sm = max(limits.shared_bytes // self.shared_bytes, 1)
        resident = limits.multiprocessors * blocks_per_sm
        waves, nbytes = max(blocks / resident, 1.0), self.shared_bytes
        load = max(nbytes / BLOCK_BANDWIDTH, min(blocks, resident) * nbytes / BANDWIDTH)
        steps = self.terms * _element_bytes(self.precision) / 32 / self.k_groups
        step_time = STEP_TIME * self.samples / TILE_SAMPLES * (3 if self.tf32x3 else 1)
        return LATENCY + waves * (load + step_time * steps)


@dataclass(frozen=True)
class SkinnyWgradTile:
    """Tile configuration of the weight gradient: a block sums over all samples at once.

    Attributes:
        columns: of the tile.
        samples: of a slice, padded.
        element_bytes: of an activation.
    """

    columns: int
    samples: int
    element_bytes: int

    ROWS: ClassVar[int] = 64
    """Rows of the tile."""

    WARP_EXTENT: ClassVar[int] = 32
    """Rows, and columns, of a warp."""

    ALGORITHM: ClassVar[str] = "skinny GEMM"

    @property
    def defines(self) -> dict[str, int]:
        """Macros of ``skinny_gemm_backward_weight.cu``."""
        return {
            "TILE_M": self.ROWS, "TILE_N": self.columns, "WARP_M": self.WARP_EXTENT,
            "WARP_N": self.WARP_EXTENT, "TILE_K_WORDS": self.samples * self.element_bytes // 4,
        }  # fmt: skip

    @property
    def block(self) -> Extent:
        """Threads of a block."""
        return self.ROWS * self.columns // self.WARP_EXTENT**2 * WARP_SIZE, 1, 1

    @property
    def shared_bytes(self) -> int:
        """Slices of both factors, or the result tile, in bytes."""
        slices = self.samples * (self.ROWS + self.columns + 16) * self.element_bytes
        return max(slices, 4 * self.ROWS * (self.columns + 8))

    def __str__(self) -> str:
        return f"{self.ROWS}x{self.columns}, {self.samples} samples"

    def grid(self, rows: int, columns: int, parts: int = 1) -> Extent:
        """Return the blocks of rows × columns. The last row, the bias gradient, needs no tile."""
        return ceil_div(rows - 1, self.ROWS), ceil_div(columns, self.columns), parts


def is_worthwhile(precision: str, batch_size: int, weights: int, limits: DeviceLimits) -> bool:
    """Return whether the kernels exist for a layer of `weights` weights and are faster."""
    exists = precision in ELEMENT_BYTES or allows_tf32x3(precision, limits)
    is_bounded = precision in ELEMENT_BYTES and batch_size > FEW_SAMPLES
    fits = weights >= MIN_WEIGHTS and not (is_bounded and weights > MAX_WEIGHTS)
    return exists and batch_size <= MAX_SAMPLES[precision] and fits


def rank_forward_configs(
    precision: str, batch_size: int, inputs: int, outputs: int, limits: DeviceLimits
) -> Iterator[tuple[float, GemmConfig]]:
    """Return the configurations of the forward product with their estimated times in µs."""

    def estimate(config: GemmConfig) -> float:
        tile, split_k = config.tile, config.split_k
        assert isinstance(tile, SkinnyTile)
        time = tile.time_us(math.prod(tile.grid(batch_size, outputs, split_k.count)), limits)
        if split_k.count > 1:
            part_time = max(8 * batch_size * outputs / ADD_BANDWIDTH, ADD_PART)
            time += SECOND_PASS + split_k.count * part_time
        return time

    configs = (
        GemmConfig(tile, SplitK(ceil_div(inputs, tile.terms), tile.terms))
        for columns in COLUMN_CHOICES
        for tile in _split_candidates(_tile_samples(batch_size), columns, inputs, precision)
        if tile.shared_bytes <= min(MAX_SHARED_BYTES, limits.shared_bytes)
    )
    return ((estimate(config), config) for config in configs)


def _split_candidates(
    samples: int, columns: int, terms: int, precision: str
) -> Iterator[SkinnyTile]:
    """Yield tiles from the whole sum down to `K_MULTIPLE` terms, in steps of about 4/5."""
    parts = 1
    while True:
        tile = SkinnyTile(samples, columns, _padded(ceil_div(terms, parts)), precision)
        yield tile
        if tile.terms == K_MULTIPLE:
            return
        parts += max(parts // 4, 1)


def select_backward_input_tile(
    precision: str, batch_size: int, inputs: int, outputs: int, limits: DeviceLimits
) -> SkinnyTile | None:
    """Return the tile of the input gradient.

    Returns:
        None if there are too many outputs for one pass, or too few for 3xTF32.
    """
    if precision == "fp32" and outputs < MIN_TF32X3_TERMS:
        return None
    samples = _tile_samples(batch_size)
    tiles = (
        SkinnyTile(samples, columns, _padded(outputs), precision, k_contiguous=True)
        for columns in COLUMN_CHOICES
    )
    most = min(MAX_SHARED_BYTES, limits.shared_bytes)
    return min(
        (tile for tile in tiles if tile.shared_bytes <= most),
        key=lambda tile: tile.time_us(math.prod(tile.grid(batch_size, inputs)), limits),
        default=None,
    )


def wgrad_config(precision: str, batch_size: int, outputs: int) -> GemmConfig:
    """Return the configuration of the weight gradient in tf32 or bf16."""
    warps = min(ceil_div(outputs, SkinnyWgradTile.WARP_EXTENT), 4)
    columns = SkinnyWgradTile.WARP_EXTENT << (warps - 1).bit_length()
    samples = ceil_div(batch_size, TILE_SAMPLES) * TILE_SAMPLES
    tile = SkinnyWgradTile(columns, samples, ELEMENT_BYTES[precision])
    return GemmConfig(tile, SplitK(1, batch_size))


def _tile_samples(batch_size: int) -> int:
    """Return the samples of a tile for so many samples."""
    return TILE_SAMPLES // 2 if batch_size <= TILE_SAMPLES // 2 else TILE_SAMPLES


def _element_bytes(precision: str) -> int:
    """Return the bytes of an activation."""
    return ELEMENT_BYTES["tf32" if precision == "fp32" else precision]


def _padded(terms: int) -> int:
    return ceil_div(terms, K_MULTIPLE) * K_MULTIPLE
