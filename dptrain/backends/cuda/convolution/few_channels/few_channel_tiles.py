"""Tile configuration of forward convolutions of few input channels.

See ``conv2d_forward_few_channels.cu``: weights stay in registers, and a block iterates over
strips of output lines whose input rows are prefetched.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from dptrain.backends.cuda.convolution import gather_convolution
from dptrain.backends.cuda.convolution.bound_convolution import BoundConvolution, Case
from dptrain.backends.cuda.convolution.halo.halo_tiles import InputView
from dptrain.backends.cuda.dense.gemm_tiles import GemmConfig, SplitK, ceil_div
from dptrain.backends.cuda.device.device import Extent
from dptrain.backends.cuda.device.hardware import (
    DEFAULT_LIMITS,
    DEFAULT_SHARED_BYTES,
    ELEMENT_BYTES,
    MAX_THREAD_REGISTERS,
    WARP_SIZE,
)
from dptrain.backends.replica import Kernel
from dptrain.plan.limits import DeviceLimits
from dptrain.plan.lowering import Phase

WORD_BYTES = 4
"""Bytes of a register of a tensor-core operand."""

STEP_WORDS = 8
"""Words along K of one tensor-core instruction."""

MAX_WEIGHT_WORDS = 80
"""Words of weights that a thread keeps in registers."""

OTHER_REGISTERS = 40
"""Registers of a thread in addition to weights, accumulators and prefetched words."""

BLOCK_FILTERS, BLOCK_WARPS = 64, 4
"""Largest number of filters of a block, and its warps.

With these and the constants below, the selected tiles took 1.07 times as long as the fastest of
about thirty, at worst 1.33 times (geometric mean over seven layers, 32 to 2048 samples, tf32 and
bf16, H200, 2026-11).
"""

MAX_OCTETS, STRIP_UNITS = 4, (4, 2, 1)
"""Groups of eight pixels that a warp computes at once, and candidates for how often in a strip."""

MAX_PREFETCH_WORDS = 32
"""Words that a thread prefetches; with more, strips are shorter."""

MIN_BLOCKS_PER_SM = 0.7
"""Blocks per multiprocessor that a tile should at least yield."""

MAX_CHANNELS, ALWAYS_CHANNELS = 16, 3
"""Largest number of input channels, and the number up to which gathering is never faster."""

GAIN, STRIDED_GAIN = 0.75, 0.89
"""Time as a part of that of gathering, without strides and with them
(benchmarks/results/log/kernels-2026-11.md). With strides: the 7×7 convolution of ResNet-18, 32
samples in tf32, which halo tiles compute in 0.65 of the time (H200, 2026-11-29)."""

MIN_PIXELS = 1 << 16
"""Output pixels of all samples, above which more than `ALWAYS_CHANNELS` channels are faster than
with gathering."""


@dataclass(frozen=True)
class FewChannelTile:
    """Tile configuration of a block.

    Attributes:
        view: the input.
        strides: of the convolution.
        element_bytes: of an activation.
        pooled: whether the epilogue pools windows of 2 × 2 outputs.
        warp_filters: filters of a warp.
        filter_warps: warps that compute different filters of the same pixels.
        pixel_warps: warps that compute different pixels.
        strip_lines: output lines of a strip.
        octets: groups of eight pixels of a line that a warp computes at once.
        limits: of the GPU.
    """

    view: InputView
    strides: tuple[int, int]
    element_bytes: int
    pooled: bool
    warp_filters: int
    filter_warps: int
    pixel_warps: int
    strip_lines: int
    octets: int
    limits: DeviceLimits = DEFAULT_LIMITS

    ALGORITHM: ClassVar[str] = "few-channel implicit GEMM"

    @property
    def unit_lines(self) -> int:
        """Lines that a warp computes at once: both lines of a pooling window."""
        return 2 if self.pooled else 1

    @property
    def units_across(self) -> int:
        """Units of a warp next to each other in a line."""
        width = self.view.out_width // self.unit_lines * self.unit_lines
        return ceil_div(width, 8 * self.octets)

    @property
    def strips_per_sample(self) -> int:
        """Strips of a sample."""
        height = self.view.out_height // self.unit_lines * self.unit_lines
        return ceil_div(height, self.strip_lines)

    @property
    def filter_tiles(self) -> int:
        """Blocks that compute different filters of the same pixels."""
        return self.view.filters // (self.warp_filters * self.filter_warps)

    @property
    def input_rows(self) -> int:
        """Input rows that the filter windows of a strip reach."""
        return (self.strip_lines - 1) * self.strides[0] + self.view.r

    @property
    def patch_row_words(self) -> int:
        """Words of a row of a patch, padded such that the sum has the fewest steps.

        If the number of steps is equal, a multiple of four is used: four lanes read four
        neighbouring words, which then are in the same row at offsets known at compile time.
        """
        words = ceil_div(self.view.s * self.view.channels * self.element_bytes, WORD_BYTES)
        padded = ceil_div(words, 4) * 4
        return min(padded, words, key=lambda n: ceil_div(self.view.r * n, STEP_WORDS))

    @property
    def k_steps(self) -> int:
        """Tensor-core instructions along K."""
        return ceil_div(self.view.r * self.patch_row_words, STEP_WORDS)

    @property
    def pixel_pitch(self) -> int:
        """Elements from a pixel to the next, padded so that eight pixels are in different banks."""
        elements = WORD_BYTES // self.element_bytes
        conflict = self.view.channels % (8 * elements) == 0
        return self.view.channels + (4 * elements if conflict else 0)

    @property
    def row_copies(self) -> int:
        """Copies of each row: two if a pixel can start in the middle of a word."""
        return 2 if self.pixel_pitch * self.element_bytes * self.strides[1] % WORD_BYTES else 1

    @property
    def row_pitch(self) -> int:
        """Words from a row to the next."""
        last = (self.units_across * self.octets * 8 - 1) * self.strides[1]
        padding = (self.view.s - 1) * (self.pixel_pitch - self.view.channels)
        words = (last * self.pixel_pitch + padding) * self.element_bytes // WORD_BYTES
        return words + self.patch_row_words

    @property
    def strip_bytes(self) -> int:
        """Static shared memory of a block: the input rows of a strip, in bytes."""
        return self.input_rows * self.row_pitch * WORD_BYTES * self.row_copies

    @property
    def prefetch_words(self) -> int:
        """Words of the next strip that a thread holds in registers."""
        rows = ceil_div(self.input_rows, self.pixel_warps * self.filter_warps)
        return rows * ceil_div(self.row_pitch, WARP_SIZE) * self.row_copies

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        m_tiles = self.warp_filters // 16
        weights = 4 * m_tiles * self.k_steps
        accumulators = 4 * m_tiles * self.unit_lines * self.octets
        return weights + accumulators + self.prefetch_words + OTHER_REGISTERS

    @property
    def feasible(self) -> bool:
        """Whether registers and shared memory suffice."""
        weights = self.warp_filters // 4 * self.k_steps
        return (
            weights <= MAX_WEIGHT_WORDS
            and self.registers <= MAX_THREAD_REGISTERS
            and self.strip_bytes <= DEFAULT_SHARED_BYTES
            and self.blocks_per_sm > 0
        )

    @cached_property
    def blocks_per_sm(self) -> int:
        """Resident blocks of a multiprocessor (occupancy)."""
        return self.limits.blocks_per_sm(self.block[0], self.registers, self.strip_bytes)

    @property
    def block(self) -> Extent:
        """Threads of a block."""
        return WARP_SIZE * self.filter_warps * self.pixel_warps, 1, 1

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: none."""
        return 0

    @property
    def defines(self) -> dict[str, int]:
        """Macros of ``conv2d_forward_few_channels.cu``."""
        return {
            "TILE_M": self.warp_filters * self.filter_warps, "WARP_M": self.warp_filters,
            "TILE_N": 16 * self.pixel_warps, "WARP_N": 16, "TILE_K_WORDS": 16,
            "STRIP_LINES": self.strip_lines, "UNIT_OCTETS": self.octets,
            "UNITS_ACROSS": self.units_across, "K_STEPS": self.k_steps,
            "PATCH_ROW_WORDS": self.patch_row_words, "STRIP_INPUT_ROWS": self.input_rows,
            "ROW_PITCH": self.row_pitch, "PIXEL_PITCH": self.pixel_pitch,
            "ROW_COPIES": self.row_copies, "MIN_BLOCKS": self.blocks_per_sm,
        }  # fmt: skip

    def __str__(self) -> str:
        warps = f"{self.filter_warps}x{self.warp_filters} filters, {self.pixel_warps} pixel warps"
        return f"{warps}, strips of {self.strip_lines} lines, {8 * self.octets} pixels"

    def grid(self, rows: int, columns: int, parts: int = 1) -> Extent:
        """Return the blocks for `rows` strips: at most one wave, with balanced strips per block."""
        resident = self.limits.multiprocessors * self.blocks_per_sm
        strips = ceil_div(rows, max(resident // self.filter_tiles, 1))
        return ceil_div(rows, strips), self.filter_tiles, parts


def is_worthwhile(view: InputView, precision: str, samples: int) -> bool:
    """Return whether the kernel exists for a layer and no other kernel is faster."""
    pixels = samples * view.out_height * view.out_width
    faster = view.channels <= ALWAYS_CHANNELS or (
        view.channels <= MAX_CHANNELS and pixels > MIN_PIXELS
    )
    return faster and precision in ELEMENT_BYTES and view.filters % 16 == 0


def few_channel_candidates(
    view: InputView, strides: tuple[int, int], precision: str, limits: DeviceLimits, *,
    pooled: bool = False,
) -> Iterator[FewChannelTile]:  # fmt: skip
    """Yield the feasible tile configurations, the fastest for many samples first.

    Args:
        view: the input.
        strides: of the convolution.
        precision: ``tf32`` or ``bf16``.
        limits: of the GPU.
        pooled: whether the epilogue pools windows of 2 × 2 outputs.
    """
    element_bytes, unit_lines = ELEMENT_BYTES[precision], 2 if pooled else 1
    height = view.out_height // unit_lines * unit_lines
    width = view.out_width // unit_lines * unit_lines
    # The lanes of 32 filters store 16 bytes in float32. In bf16, more warps were faster.
    filter_choices = (32, 16) if element_bytes == WORD_BYTES else (16,)
    octet_choices = range(MAX_OCTETS, 0, -1)
    for filters, octets, units in itertools.product(filter_choices, octet_choices, STRIP_UNITS):
        units_across, rest = divmod(ceil_div(width, 8), octets)
        if rest or view.filters % filters:
            continue
        filter_warps = math.gcd(view.filters // filters, BLOCK_FILTERS // filters)
        pixel_warps = BLOCK_WARPS // filter_warps
        lines = min(ceil_div(pixel_warps * units, units_across) * unit_lines, height)
        tile = FewChannelTile(
            view, strides, element_bytes, pooled, filters, filter_warps, pixel_warps, lines, octets,
            limits,
        )  # fmt: skip
        if tile.feasible and (units == 1 or tile.prefetch_words <= MAX_PREFETCH_WORDS):
            yield tile


@functools.cache
def select_few_channel_tile(
    view: InputView, strides: tuple[int, int], precision: str, samples: int,
    limits: DeviceLimits, *, pooled: bool = False,
) -> FewChannelTile | None:  # fmt: skip
    """Return the first candidate that occupies the GPU, or the candidate with the smallest strips.

    Returns:
        None if the gathering kernel is faster.
    """
    if not is_worthwhile(view, precision, samples):
        return None
    tiles = list(few_channel_candidates(view, strides, precision, limits, pooled=pooled))
    wanted = MIN_BLOCKS_PER_SM * limits.multiprocessors
    filling = (
        tile for tile in tiles if tile.filter_tiles * samples * tile.strips_per_sample >= wanted
    )
    return next(filling, tiles[-1] if tiles else None)


def supports(case: Case) -> bool:
    """Return whether the kernel exists for a case and no other kernel is faster."""
    return not case.is_dilated and is_worthwhile(case.view, case.precision, case.samples)


def estimate(case: Case) -> Sequence[tuple[float, FewChannelTile]]:
    """Return the estimated µs of the tile configurations.

    They have no estimates of their own: the first that occupies the GPU is selected.
    """
    product = case.view, case.strides, case.precision
    best = select_few_channel_tile(*product, case.samples, case.limits, pooled=case.pools)
    if best is None:
        return ()
    gain = GAIN if case.strides == (1, 1) else STRIDED_GAIN
    time = gain * min(time for time, _ in gather_convolution.estimate(case))
    tiles = few_channel_candidates(*product, case.limits, pooled=case.pools)
    return [(time, best), *((1.1 * time, tile) for tile in tiles if tile != best)]


def config_of(case: Case, tile: FewChannelTile) -> GemmConfig:
    """Return the configuration of a product, which is not split."""
    return GemmConfig(tile, SplitK(1, 1))


def bind(operation: BoundConvolution, phase: Phase, tile: FewChannelTile) -> Kernel:
    """Return the stage of a forward product."""
    config = GemmConfig(tile, SplitK(1, 1))
    return operation.forward_product("conv2d_forward_few_channels", config, tile.strips_per_sample)
