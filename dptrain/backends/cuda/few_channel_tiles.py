"""Tile configurations of ``kernels/conv2d_forward_few_channels.cu``."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from dptrain.backends.cuda.device import Extent
from dptrain.backends.cuda.gemm_tiles import WARP, ceil_div
from dptrain.backends.cuda.halo_tiles import (
    MULTIPROCESSORS,
    RESERVED_BYTES,
    SHARED_BYTES,
    SIZES,
    View,
)

WORD = 4
"""Bytes that a lane multiplies by at once."""

STEP_WORDS = 8
"""Of the sum, that an instruction of tensor cores adds up."""

MOST_WEIGHTS = 80
"""Words of them that a thread keeps."""

REGISTERS = 40
"""Of a thread besides weights, sums and what is on its way."""

REGISTERS_OF_ALL, MOST_REGISTERS = 1 << 16, 255
"""Of the threads of a multiprocessor, and of one."""

FILTERS, WARPS = 64, 4
"""Of a block: filters at most, and warps. On an H200 cuts that follow from this and what is below
took 1.07 times as long as the fastest of some thirty in the geometric mean over seven layers, 32 to
2048 samples, tf32 and bf16, and 1.33 times at worst."""

MOST_EIGHTS, TIMES = 4, (4, 2, 1)
"""Of pixels of a line that a warp has at a time, and how often in a strip."""

MOST_COMING = 32
"""Words on their way to a thread, beyond which strips are cut shorter."""

FILLED = 0.7
"""Blocks for each multiprocessor that there should be."""

MOST_CHANNELS, FEW_CHANNELS = 16, 3
"""Of a map that this was measured for, and up to which products that gather were never faster."""

FEW_PIXELS = 1 << 16
"""Of all outputs, up to which they are as fast where there are 16 channels."""

MOST_BYTES = 48 << 10
"""Of shared memory, of a block, which asks for no more than every GPU has."""


@dataclass(frozen=True)
class FewChannelTile:
    """A product over pixels of narrow maps: what a block takes at a time.

    Attributes:
        view: of what is read.
        strides: of patches.
        size: bytes of a number.
        pooled: whether windows of two by two outputs are.
        filters: of a warp.
        sharing: warps that have filters of their own, but the same pixels.
        warps: that have pixels of their own.
        lines: of outputs, of a strip.
        eights: of pixels of a line that a warp has at a time.
    """

    view: View
    strides: tuple[int, int]
    size: int
    pooled: bool
    filters: int
    sharing: int
    warps: int
    lines: int
    eights: int

    @property
    def unit(self) -> int:
        """Lines that a warp has at a time."""
        return 2 if self.pooled else 1

    @property
    def across(self) -> int:
        """Times that a warp's pixels are side by side in a line."""
        width = self.view.out_width // self.unit * self.unit
        return ceil_div(width, 8 * self.eights)

    @property
    def strips(self) -> int:
        """Of a sample."""
        return ceil_div(self.view.out_height // self.unit * self.unit, self.lines)

    @property
    def tiles(self) -> int:
        """Blocks that have the same pixels, each with filters of its own."""
        return self.view.filters // (self.filters * self.sharing)

    @property
    def rows(self) -> int:
        """Of the map that patches of a strip are of."""
        return (self.lines - 1) * self.strides[0] + self.view.r

    @property
    def row_words(self) -> int:
        """Of a row of a patch: as few steps as can be, and of those ways the one of whole fours.

        Four lanes have four neighbours, which then lie in one row, at places that compilers know.
        """
        words = ceil_div(self.view.s * self.view.channels * self.size, WORD)
        fours = ceil_div(words, 4) * 4
        return min(fours, words, key=lambda n: ceil_div(self.view.r * n, STEP_WORDS))

    @property
    def steps(self) -> int:
        """Instructions that the sum is."""
        return ceil_div(self.view.r * self.row_words, STEP_WORDS)

    @property
    def pixel(self) -> int:
        """Numbers from a pixel to the next, such that eight lie in different banks."""
        unit = WORD // self.size
        return self.view.channels + (4 * unit if self.view.channels % (8 * unit) == 0 else 0)

    @property
    def copies(self) -> int:
        """Of rows: two where pixels may begin in the middle of a word."""
        return 2 if self.pixel * self.size * self.strides[1] % WORD else 1

    @property
    def pitch(self) -> int:
        """Words from a row to the next."""
        last = (self.across * self.eights * 8 - 1) * self.strides[1]
        between = (self.view.s - 1) * (self.pixel - self.view.channels)
        return (last * self.pixel + between) * self.size // WORD + self.row_words

    @property
    def bytes(self) -> int:
        """Of rows."""
        return self.rows * self.pitch * WORD * self.copies

    @property
    def coming(self) -> int:
        """Words of the next strip on their way to a thread."""
        rows = ceil_div(self.rows, self.warps * self.sharing)
        return rows * ceil_div(self.pitch, WARP) * self.copies

    @property
    def registers(self) -> int:
        """Of a thread."""
        sixteens = self.filters // 16
        weights, sums = 4 * sixteens * self.steps, 4 * sixteens * self.unit * self.eights
        return weights + sums + self.coming + REGISTERS

    @property
    def possible(self) -> bool:
        """Whether there is room for it."""
        weights = self.filters // 4 * self.steps
        return (
            weights <= MOST_WEIGHTS
            and self.registers <= MOST_REGISTERS
            and self.bytes <= MOST_BYTES
            and self.blocks > 0
        )

    @cached_property
    def blocks(self) -> int:
        """That a multiprocessor runs at a time."""
        threads = REGISTERS_OF_ALL // (self.block[0] * ceil_div(self.registers, 8) * 8)
        return min(threads, SHARED_BYTES // (self.bytes + RESERVED_BYTES))

    @property
    def block(self) -> Extent:
        """Threads."""
        return WARP * self.sharing * self.warps, 1, 1

    @property
    def shared_bytes(self) -> int:
        """Of dynamic shared memory: none."""
        return 0

    @property
    def defines(self) -> dict[str, int]:
        """Macros of ``conv2d_forward_few_channels.cu``."""
        return {
            "TILE_M": self.filters * self.sharing, "WARP_M": self.filters,
            "TILE_N": 16 * self.warps, "WARP_N": 16, "TILE_K_WORDS": 16, "STRIP_LINES": self.lines,
            "UNIT_OCTETS": self.eights, "UNITS_ACROSS": self.across, "K_STEPS": self.steps,
            "PATCH_ROW_WORDS": self.row_words, "STRIP_INPUT_ROWS": self.rows,
            "ROW_PITCH": self.pitch,
            "PIXEL_PITCH": self.pixel, "ROW_COPIES": self.copies, "MIN_BLOCKS": self.blocks,
        }  # fmt: skip

    def grid(self, rows: int, columns: int, parts: int = 1) -> Extent:
        """Blocks for so many strips and filters; each takes as many strips, as far as can be."""
        turns = ceil_div(rows, max(MULTIPROCESSORS * self.blocks // self.tiles, 1))
        return ceil_div(rows, turns), self.tiles, parts


def suits(view: View, precision: str, samples: int) -> bool:
    """Whether there are kernels for a layer, and none that are faster."""
    pixels = samples * view.out_height * view.out_width
    few = view.channels <= FEW_CHANNELS
    narrow = few or (view.channels <= MOST_CHANNELS and pixels > FEW_PIXELS)
    return narrow and precision in SIZES and view.filters % 16 == 0


def few_channel_candidates(
    view: View, strides: tuple[int, int], precision: str, *, pooled: bool = False
) -> Iterator[FewChannelTile]:
    """Ways to compute one product, the one that takes the least time with many samples first.

    Args:
        view: of what is read.
        strides: of patches.
        precision: of the product.
        pooled: whether windows of two by two outputs are.
    """
    size, unit = SIZES[precision], 2 if pooled else 1
    height, width = view.out_height // unit * unit, view.out_width // unit * unit
    # Lanes of 32 filters write 16 bytes of float32 at once; in bf16 more warps won instead.
    of_warp = (32, 16) if size == WORD else (16,)
    for filters, eights, times in itertools.product(of_warp, range(MOST_EIGHTS, 0, -1), TIMES):
        across, rest = divmod(ceil_div(width, 8), eights)
        if rest or view.filters % filters:
            continue
        sharing = math.gcd(view.filters // filters, FILTERS // filters)
        warps = WARPS // sharing
        lines = min(ceil_div(warps * times, across) * unit, height)
        way = FewChannelTile(view, strides, size, pooled, filters, sharing, warps, lines, eights)
        if way.possible and (times == 1 or way.coming <= MOST_COMING):
            yield way


@functools.cache
def select_few_channel_tile(
    view: View, strides: tuple[int, int], precision: str, samples: int, *, pooled: bool = False
) -> FewChannelTile | None:
    """The way that a product over the pixels of so many samples takes the least time with.

    Returns:
        None where products that gather are faster.
    """
    if not suits(view, precision, samples):
        return None
    ways = list(few_channel_candidates(view, strides, precision, pooled=pooled))
    wanted = FILLED * MULTIPROCESSORS
    filled = (way for way in ways if way.tiles * samples * way.strips >= wanted)
    return next(filled, ways[-1] if ways else None)
