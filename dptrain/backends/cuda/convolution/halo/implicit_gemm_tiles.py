"""Tile configuration of the implicit GEMM over halo tiles; see ``implicit_gemm.cuh``.

The convolution is computed as the product z = W x with filters as rows and output pixels as
columns, summed over taps and channels. The operand x is never materialised (no im2col): a tap is a
constant distance between addresses of the halo tile in shared memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from dptrain.backends.cuda.convolution.halo.halo_tiles import InputView
from dptrain.backends.cuda.dense.gemm_tiles import ceil_div
from dptrain.backends.cuda.device.device import Extent
from dptrain.backends.cuda.device.hardware import DEFAULT_LIMITS, VECTOR_BYTES, WARP_GROUP_SIZE
from dptrain.plan.limits import REGISTERS, DeviceLimits

TILE_M = 64
"""Rows of a tile: filters of one output line, or fewer filters of several lines."""

MAX_LINES_IN_M = 8
"""Largest number of output lines in the rows of a tile: a lane has two filters of a line, and four
lanes of a quad have eight."""

MAX_COLUMNS = 256
"""Columns that the pixel tiles of a warp group have together."""

MMA_OCTETS = (*range(1, 17), 18, 20, 21, 22, 24, 26, 28, 30, 32)
"""Columns of an instruction, divided by eight, that ``wgmma.cuh`` has."""

MAX_PREFETCH_STEPS, MIN_PREFETCH_STEPS = 5, 3
"""Steps whose weights are prefetched into registers, as far as registers allow."""

MAX_STAGE_STEPS = 6
"""Steps of one pipeline stage if weights are in shared memory."""

SLAB_PACKS = (8, 4, 2)
"""Packs (16 bytes of channels) of a pixel that can be contiguous in shared memory."""

SWIZZLE_BYTES = 1 << 10
"""The swizzle pattern of shared memory repeats after this many bytes, and is aligned to them."""

BARRIER_BYTES = 512
"""Shared memory for mbarriers, in bytes."""

STRIP_COLUMNS = 8
"""Columns of a strip."""

MAX_BOX_EXTENT = 256
"""Largest extent of each dimension of a TMA box."""

BoxShape = tuple[int, int, int, int]
"""Samples, rows, columns and channels."""

MIN_OTHER_REGISTERS, OTHER_REGISTERS = 40, 44
"""Registers of a thread in addition to accumulators and weights: the minimum and the usual."""

TF32X3_REGISTERS = 80
"""Further registers with 3xTF32: split fragments, sums that are promoted, and what the compiler
moves ahead."""

TF32X3_COLUMNS = 128
"""`MAX_COLUMNS` with 3xTF32. With more, registers are spilled."""


SPLIT_WEIGHT_REGISTERS = 8
"""Registers of the two parts of the weights of a step, if ``wgmma`` multiplies them."""


@dataclass(frozen=True)
class PixelTile:
    """Output pixels that are the columns of one tensor-core instruction.

    Attributes:
        columns: N of the instruction.
        lines: output lines that the columns belong to.
        strip: whether the columns are eight pixels of each line. Otherwise they are consecutive in
            the halo tile, and columns in the padding between lines are computed in vain.
    """

    columns: int
    lines: int
    strip: bool


@dataclass(frozen=True)
class ImplicitGemmTile:
    """Tile configuration of the forward and backward-input kernels.

    Attributes:
        view: the input.
        element_bytes: of an activation.
        pooled: whether the epilogue pools windows of 2 × 2 outputs.
        pixel_tile: the columns of one instruction.
        pixel_tiles: pixel tiles of a warp group.
        warp_groups: warp groups of a block that have different pixel tiles.
        k_warp_groups: warp groups that share the same pixel tiles and split K between them.
        channel_chunks: chunks of channels that the halo tile is loaded in, one after the other.
        persistent_groups: 0 for one tile per block. Otherwise the kernel is persistent: this many
            warp groups share the weights in shared memory, each iterates over tiles of its own, and
            its halo tiles are double-buffered.
        weight_stages: stages of a ring buffer for weights in shared memory; 0 if they stay there.
        epilogue: fused layers that are undone while the input is read, ``EPILOGUE`` of
            ``epilogue.cuh``.
        limits: of the GPU.
        tf32x3: whether products of float32 are computed from TF32 parts (3xTF32).
        tf32x3_wgmma: whether ``wgmma`` multiplies them, which reads the parts of pixels from two
            planes of the halo tile.
    """

    view: InputView
    element_bytes: int
    pooled: bool
    pixel_tile: PixelTile
    pixel_tiles: int
    warp_groups: int
    k_warp_groups: int = 1
    channel_chunks: int = 1
    persistent_groups: int = 0
    weight_stages: int = 0
    epilogue: int = 0
    limits: DeviceLimits = DEFAULT_LIMITS
    tf32x3: bool = False
    tf32x3_wgmma: bool = False

    ALGORITHM: ClassVar[str] = "halo-tile implicit GEMM"

    @property
    def weights_fit(self) -> bool:
        """Whether weights divide evenly and leave shared memory for pixels.

        This does not depend on the pixel tiles.
        """
        packs = self.view.channels * self.element_bytes // VECTOR_BYTES
        return (
            packs // 2 % self.channel_chunks == 0
            and self.k_steps % (self.channel_chunks * self.k_warp_groups) == 0
            and not (self.persistent and self.weight_stages * self.stage_steps >= self.k_steps)
            and self.weight_bytes < self.limits.shared_bytes
        )

    @property
    def feasible(self) -> bool:
        """Whether shared memory and registers suffice and the work divides evenly."""
        return self.weights_fit and self.pixels_fit

    @property
    def pixels_fit(self) -> bool:
        """Whether shared memory and registers suffice for the pixels, provided that weights fit."""
        return (
            self.pixel_tile.columns // 8 in MMA_OCTETS
            and self.pixel_tile.columns * self.pixel_tiles
            <= (TF32X3_COLUMNS if self.tf32x3 else MAX_COLUMNS)
            and self.blocks_per_sm > 0
            and self.stage_steps > 0
            # The strips of a cropped halo tile are adjacent.
            and not (self.cropped and self.tiles_across % self.pixel_tiles)
            # An unpooled halo tile is cropped, and TMA loads its argmax in units of 16 bytes.
            and not (self.persistent and self.unpools and not self.cropped)
            and not (
                self.persistent
                and self.unpools
                and self.chunk_packs * VECTOR_BYTES // self.element_bytes % VECTOR_BYTES
            )
        )

    @property
    def persistent(self) -> bool:
        """Whether blocks iterate over tiles."""
        return self.persistent_groups > 0

    @property
    def cropped(self) -> bool:
        """Whether the halo tile contains only the columns of its strips, not whole rows."""
        return self.persistent and self.pixel_tile.strip

    @property
    def slab_packs(self) -> int:
        """Packs of a pixel that are contiguous in shared memory."""
        return slab_packs(self.chunk_packs)

    @property
    def unpools(self) -> bool:
        """Whether the input is the gradient of a pooled output and is unpooled while it is read."""
        return self.epilogue == 2

    @property
    def num_tensor_maps(self) -> int:
        """Tensor maps of the kernel if the device has TMA."""
        if self.tf32x3 or self.view.row_samples > 1:
            return 0
        # The strides of a tensor that TMA copies are multiples of 16 bytes.
        size = 1 if self.unpools else self.element_bytes
        if self.view.fold > 1 or self.view.memory_channels * size % VECTOR_BYTES:
            return 0
        if self.epilogue:
            return 2 if self.unpools and self.persistent else 0
        return int(self.box[2] <= MAX_BOX_EXTENT)

    @property
    def box(self) -> BoxShape:
        """TMA box: the cropped halo tile, or one of its rows."""
        pack = VECTOR_BYTES // self.element_bytes
        if self.unpools:
            return 1, *self._pooled_extent, self.chunk_packs * pack
        if self.cropped:
            return 1, self.halo_rows, self.halo_pitch, self.slab_packs * pack
        return 1, 1, self.view.out_width + self.view.s - 1, self.slab_packs * pack

    @property
    def lines_in_m(self) -> int:
        """Output lines in the rows of a tile."""
        return lines_in_m(self.view, pooled=self.pooled)

    @property
    def line_groups(self) -> int:
        """Groups of `lines_in_m` output lines of a sample."""
        height = self.view.out_height
        return ceil_div(height // 2 * 2 if self.pooled else height, self.lines_in_m)

    @property
    def tiles_across(self) -> int:
        """Pixel tiles next to each other in a line."""
        width = self.view.out_width * self.view.row_samples
        width = width // 2 * 2 if self.pooled else width
        return ceil_div(width, STRIP_COLUMNS) if self.pixel_tile.strip else 1

    @property
    def tiles_per_sample(self) -> int:
        """Pixel tiles of a sample."""
        return self.tiles_across * ceil_div(self.line_groups, self.pixel_tile.lines)

    def tiles(self, samples: int) -> int:
        """Return the pixel tiles of so many samples."""
        return ceil_div(samples, self.view.row_samples) * self.tiles_per_sample

    @property
    def k_steps(self) -> int:
        """Instructions along K for each pixel tile."""
        taps = (self.view.r + self.lines_in_m - 1) * self.view.s
        return self.view.channels * self.element_bytes // VECTOR_BYTES // 2 * taps

    @property
    def accumulators(self) -> int:
        """Accumulator registers of a thread."""
        return self.pixel_tiles * self.pixel_tile.columns // 2

    @property
    def stage_steps(self) -> int:
        """Steps of a pipeline stage, or steps whose weights are prefetched; 0 if none divides."""
        own = self.k_steps // (self.channel_chunks * self.k_warp_groups)
        if self.persistent:
            return max(d for d in range(1, MAX_STAGE_STEPS + 1) if own % d == 0)
        if self.tf32x3:
            return self._tf32x3_stage_steps
        # Weights are double-buffered in registers.
        threads = max(self.blocks_per_sm * self.threads, WARP_GROUP_SIZE * 2)
        most = (REGISTERS // threads - self.accumulators - OTHER_REGISTERS) // 8
        steps = range(2, min(max(most, MIN_PREFETCH_STEPS), MAX_PREFETCH_STEPS, own // 2) + 1)
        return max((step for step in steps if own % step == 0), default=0)

    @property
    def _tf32x3_stage_steps(self) -> int:
        # A step has so many instructions that it hides the latency of the next weights.
        own = self.k_steps // (self.channel_chunks * self.k_warp_groups)
        return 2 if self.tf32x3_wgmma and own % 2 == 0 else 1

    @property
    def halo_rows(self) -> int:
        """Rows of the halo tile, enough for any position of its pixel tiles."""
        taps = self.pixel_tile.lines * self.lines_in_m + self.view.r - 1
        if self.cropped:
            return taps
        count = self.pixel_tiles * self.warp_groups
        tile_lines = self.pixel_tile.lines * self.lines_in_m
        tiles_down = ceil_div(self.line_groups, self.pixel_tile.lines)
        # Rows between the last tile of a sample and the first tile of the next.
        between = self.view.sample_rows - tiles_down * tile_lines
        lines = _max_groups(count, self.tiles_across)
        samples = _max_groups(count, self.tiles_per_sample)
        return (lines - 1) * tile_lines + (samples - 1) * max(between, 0) + taps

    @property
    def halo_pitch(self) -> int:
        """Pixels from a row of the halo tile to the next."""
        if not self.cropped:
            return self.view.row_pitch
        return self.pixel_tiles * 8 + self.view.row_samples * (self.view.s - 1)

    @property
    def slab_pixels(self) -> int:
        """Pixels of a slab of the halo tile, rounded up to whole swizzle patterns."""
        # The last eight columns can start at the last pixel.
        overhang = 0 if self.cropped else self.view.row_samples * (self.view.s - 1) + 8
        needed = self.halo_rows * self.halo_pitch + overhang
        multiple = SWIZZLE_BYTES // (self.slab_packs * VECTOR_BYTES)
        return ceil_div(needed, multiple) * multiple

    @property
    def chunk_packs(self) -> int:
        """Packs of a pixel in a chunk of channels."""
        return self.view.channels * self.element_bytes // VECTOR_BYTES // self.channel_chunks

    @property
    def halo_bytes(self) -> int:
        """Halo tile in bytes; with a persistent kernel also the buffer for the next one."""
        halo = self.chunk_packs * self.slab_pixels * VECTOR_BYTES
        halo *= 2 if self.tf32x3_wgmma else 1
        if not self.persistent:
            return halo
        if not self.unpools:
            return 2 * halo
        return halo + ceil_div(self._pooled_bytes, SWIZZLE_BYTES) * SWIZZLE_BYTES

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block in bytes: halo tiles or exchanged sums, weights, barriers."""
        if self.persistent:
            return self.weight_bytes + self.persistent_groups * self.halo_bytes + BARRIER_BYTES
        return max(self.halo_bytes, self.exchanged_bytes) + BARRIER_BYTES

    @property
    def weight_bytes(self) -> int:
        """Weights in shared memory, in bytes; only persistent kernels have any there."""
        if not self.persistent:
            return 0
        steps = self.weight_stages * self.stage_steps or self.k_steps
        return steps * WARP_GROUP_SIZE * VECTOR_BYTES

    @property
    def exchanged_bytes(self) -> int:
        """Partial sums that warp groups exchange, in bytes; they overwrite the halo tile."""
        sums = self.threads * self.pixel_tiles * self.pixel_tile.columns // 8 * VECTOR_BYTES
        return sums if self.k_warp_groups > 1 else 0

    @property
    def _pooled_extent(self) -> tuple[int, int]:
        """Rows and columns of the pooled gradient that an unpooled halo tile is made from."""
        return self.halo_rows // 2 + 1, self.halo_pitch // 2 + 1

    @property
    def _pooled_bytes(self) -> int:
        """The pooled gradient, aligned to 128 bytes, and its argmax, one byte per element."""
        packs = math.prod(self._pooled_extent) * self.chunk_packs
        gradient = ceil_div(packs * VECTOR_BYTES, 128) * 128
        return gradient + packs * VECTOR_BYTES // self.element_bytes

    @property
    def packed_vectors(self) -> int:
        """Vectors of 16 bytes of the packed weights."""
        m_tiles = ceil_div(self.view.filters * self.lines_in_m, TILE_M)
        return m_tiles * self.k_steps * WARP_GROUP_SIZE

    @property
    def packed_elements(self) -> int:
        """Elements of the packed weights, with the steps that prefetching reads past the end."""
        overrun = 2 * MAX_STAGE_STEPS * WARP_GROUP_SIZE
        return (self.packed_vectors + overrun) * VECTOR_BYTES // self.element_bytes

    @cached_property
    def blocks_per_sm(self) -> int:
        """Resident blocks of a multiprocessor (occupancy)."""
        steps = self._tf32x3_stage_steps if self.tf32x3 else MIN_PREFETCH_STEPS
        weights = 0 if self.persistent else 8 * steps
        registers = self.accumulators + MIN_OTHER_REGISTERS + weights
        if self.tf32x3_wgmma:
            registers += self.accumulators + SPLIT_WEIGHT_REGISTERS * steps
        elif self.tf32x3:
            registers += TF32X3_REGISTERS
        return self.limits.blocks_per_sm(self.threads, registers, self.shared_bytes)

    @property
    def tiles_in_flight(self) -> int:
        """Tiles that a multiprocessor works on at the same time."""
        return self.blocks_per_sm * max(self.persistent_groups, 1)

    @property
    def block_groups(self) -> int:
        """Warp groups of a block."""
        return self.warp_groups * self.k_warp_groups * max(self.persistent_groups, 1)

    @property
    def stores_once(self) -> bool:
        """Whether no sum is repeated by scalar instructions, ``CHECKS_SUMS`` of the kernels."""
        return self.lines_in_m == 1 and self.view.fold == 1 and not self.tf32x3

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return math.prod(self.block)

    @property
    def block(self) -> Extent:
        """Extent of a block."""
        threads = WARP_GROUP_SIZE * self.warp_groups * self.k_warp_groups
        return threads, max(self.persistent_groups, 1), 1

    @property
    def defines(self) -> dict[str, int]:
        """Macros of ``implicit_gemm_tile.cuh``."""
        pixel_tile = self.pixel_tile
        return {
            "MMA_N": pixel_tile.columns, "PIXEL_TILE_LINES": pixel_tile.lines,
            "PIXEL_TILE_STRIP": int(pixel_tile.strip), "PIXEL_TILES": self.pixel_tiles,
            "WARP_GROUPS": self.warp_groups, "K_WARP_GROUPS": self.k_warp_groups,
            "CHANNEL_CHUNKS": self.channel_chunks, "PERSISTENT": int(self.persistent),
            "PERSISTENT_GROUPS": self.persistent_groups, "WEIGHT_STAGES": self.weight_stages,
            "CROPPED_WIDTH": self.halo_pitch * self.cropped, "SLAB_PACKS": self.slab_packs,
            "HALO_BYTES": self.halo_bytes, "POOLED": int(self.pooled),
            "LINES_IN_M": self.lines_in_m, "STAGE_STEPS": self.stage_steps,
            "SLAB_PIXELS": self.slab_pixels, "MIN_BLOCKS": self.blocks_per_sm,
            "PADDED_CHANNELS": int(self.view.channels != self.view.memory_channels),
            **({"ROW_SAMPLES": self.view.row_samples} if self.view.row_samples > 1 else {}),
            **({"TF32X3": 1} if self.tf32x3 else {}),
            **({"TF32X3_WGMMA": 1} if self.tf32x3_wgmma else {}),
        }  # fmt: skip

    def __str__(self) -> str:
        tile = self.pixel_tile
        pixels = f"{self.pixel_tiles}x{tile.lines} lines, {tile.columns} columns"
        strip = " in a strip" if tile.strip else ""
        if self.view.row_samples > 1:
            strip += f" of {self.view.row_samples} samples"
        groups = f"groups {self.warp_groups}x{self.k_warp_groups}, chunks {self.channel_chunks}"
        persistent = f", persistent {self.persistent_groups}, stages {self.weight_stages}"
        return f"{pixels}{strip}, {groups}{persistent if self.persistent else ''}"

    def grid(self, rows: int, columns: int, parts: int = 1) -> Extent:
        """Return the blocks for `rows` pixel tiles and `columns` filters.

        A persistent kernel has no more blocks than fit on the GPU at once.
        """
        filter_tiles = ceil_div(columns * self.lines_in_m, TILE_M)
        per_block = max(self.persistent_groups, 1) * self.warp_groups * self.pixel_tiles
        blocks = ceil_div(rows, per_block)
        if self.persistent:
            resident = self.limits.multiprocessors * self.blocks_per_sm
            blocks = min(blocks, max(resident // (filter_tiles * parts), 1))
        return blocks, filter_tiles, parts


def _max_groups(count: int, size: int) -> int:
    """Return how many groups of `size` neighbours `count` consecutive items can belong to.

    The first item is a multiple of `count`.
    """
    if size % count == 0 or count % size == 0:
        return ceil_div(count, size)
    return (count - 2) // size + 2


def lines_in_m(view: InputView, *, pooled: bool) -> int:
    """Return the output lines in the rows of a tile: several if there are few filters.

    If the epilogue pools, there are at most two, which a thread pools.
    """
    lines = 2 if view.filters <= TILE_M // 2 else 1
    while not pooled and lines < MAX_LINES_IN_M and 2 * lines * view.filters <= TILE_M:
        lines *= 2
    return lines


def slab_packs(packs: int) -> int:
    """Return how many of the packs of a pixel are contiguous in shared memory."""
    return next(count for count in SLAB_PACKS if packs % count == 0)
