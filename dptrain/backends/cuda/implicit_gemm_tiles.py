"""Tile configurations of implicit GEMM on halo tiles; see ``kernels/implicit_gemm.cuh``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from dptrain.backends.cuda.device import Extent
from dptrain.backends.cuda.gemm_tiles import ceil_div
from dptrain.backends.cuda.halo_tiles import (
    MULTIPROCESSORS,
    PIECE,
    RESERVED_BYTES,
    SHARED_BYTES,
    View,
)

TEAM = 128
"""Threads that multiply together: four warps."""

ROWS = 64
"""Filters, of one output line or two, that they have."""

MOST_COLUMNS = 256
"""Of a team's segments together, which take so many."""

EIGHTS = (*range(1, 17), 18, 20, 21, 22, 24, 26, 28, 30, 32)
"""Of columns, that an instruction may have: those that ``wgmma.cuh`` knows."""

MOST_DEPTH, LEAST_DEPTH = 5, 3
"""Steps that are made while weights for as many are on their way; as many as registers allow."""

MOST_TOGETHER = 6
"""Steps that are started together where weights are in shared memory."""

SLABS = (8, 4, 2)
"""Runs of a pixel that may lie side by side in shared memory."""

PATTERN = 1 << 10
"""Bytes after which the order of runs in shared memory repeats, from a multiple of as many on."""

BARRIER_BYTES = 512
"""Of shared memory, for barriers."""

MOST_BOX = 256
"""Of each extent of a box that the engine for bulk copies brings."""

Extents = tuple[int, int, int, int]
"""Samples, rows, columns and channels."""

FEWEST_REGISTERS, REGISTERS = 40, 44
"""Of a thread besides its sums and weights: that it can do with, and that it uses."""

REGISTERS_OF_ALL = 1 << 16
"""Of the threads of a multiprocessor."""


@dataclass(frozen=True)
class Segment:
    """Columns that one instruction multiplies with.

    Attributes:
        columns: of them.
        lines: of the map that they are part of.
        strip: whether they are eight pixels of each line.
    """

    columns: int
    lines: int
    strip: bool


@dataclass(frozen=True)
class ImplicitGemmTile:
    """A product over pixels: what a block takes at a time.

    Attributes:
        view: of what is read.
        size: bytes of a number.
        pooled: whether windows of two by two outputs are.
        segment: one of those of a block.
        segments: of a team.
        teams: with segments of their own.
        shares: teams that share the sum over the same segments.
        chunks: that the channels of a block's window come in.
        holders: of weights in shared memory, each with tiles of its own: blocks then go from tile
            to tile, and ask for what a window is made of before they need it. 0: they do not.
        ring: stages of weights that are there at a time, or 0 for all of them.
        behind: what is undone as windows come, ``EPILOGUE`` of ``epilogue.cuh``.
    """

    view: View
    size: int
    pooled: bool
    segment: Segment
    segments: int
    teams: int
    shares: int = 1
    chunks: int = 1
    holders: int = 0
    ring: int = 0
    behind: int = 0

    @property
    def possible(self) -> bool:
        """Whether there is room for it, and its parts are equal."""
        return (
            self.segment.columns // 8 in EIGHTS
            and self.segment.columns * self.segments <= MOST_COLUMNS
            and self.view.channels * self.size // PIECE // 2 % self.chunks == 0
            and self.steps % (self.chunks * self.shares) == 0
            and self.blocks > 0
            and self.depth > 0
            and self.ring * self.depth < self.steps
            # Strips lie side by side.
            and not (self.narrow and self.across % self.segments)
            # What comes of pooled maps is narrow, and 16 marks and more side by side.
            and not (self.early and self.undone and not self.narrow)
            and not (self.early and self.undone and self.planes * PIECE // self.size % PIECE)
        )

    @property
    def early(self) -> bool:
        """Whether blocks go from tile to tile."""
        return self.holders > 0

    @property
    def narrow(self) -> bool:
        """Whether windows have no more columns than a group's strips, side by side, look at."""
        return self.early and self.segment.strip

    @property
    def slab(self) -> int:
        """Runs of a pixel that lie side by side."""
        return slab(self.planes)

    @property
    def undone(self) -> bool:
        """Whether windows are made of what was pooled."""
        return self.behind == 2

    @property
    def mapped(self) -> int:
        """Tensor maps that windows may come by, or what they are made of."""
        if self.behind:
            return 2 if self.undone and self.early else 0
        return int(self.box[2] <= MOST_BOX)

    @property
    def box(self) -> Extents:
        """Samples, rows, columns and numbers that come at once: a window, or all of its row."""
        run = PIECE // self.size
        if self.undone:
            return 1, *self._pooled, self.planes * run
        if self.narrow:
            return 1, self.window_rows, self.window_across, self.slab * run
        return 1, 1, self.view.out_width + self.view.s - 1, self.slab * run

    @property
    def tall(self) -> int:
        """Output lines that are rows of A."""
        return 2 if self.view.filters <= ROWS // 2 else 1

    @property
    def lines(self) -> int:
        """Of `tall` output lines, of a sample."""
        height = self.view.out_height
        return ceil_div(height // 2 * 2 if self.pooled else height, self.tall)

    @property
    def across(self) -> int:
        """Segments side by side."""
        width = self.view.out_width
        return ceil_div(width // 2 * 2 if self.pooled else width, 8) if self.segment.strip else 1

    @property
    def each(self) -> int:
        """Segments of a sample."""
        return self.across * ceil_div(self.lines, self.segment.lines)

    @property
    def steps(self) -> int:
        """Instructions that the sum is, for each segment."""
        taps = (self.view.r + self.tall - 1) * self.view.s
        return self.view.channels * self.size // PIECE // 2 * taps

    @property
    def sums(self) -> int:
        """Of a thread."""
        return self.segments * self.segment.columns // 2

    @property
    def depth(self) -> int:
        """Steps whose weights are on their way, or that are started together.

        0 where no number divides those that are made.
        """
        own = self.steps // (self.chunks * self.shares)
        if self.early:
            return max(d for d in range(1, MOST_TOGETHER + 1) if own % d == 0)
        # Two sets of them take turns.
        left = REGISTERS_OF_ALL // max(self.blocks * self.threads, TEAM * 2) - self.sums
        most = (left - REGISTERS) // 8
        depths = range(2, min(max(most, LEAST_DEPTH), MOST_DEPTH, own // 2) + 1)
        return max((depth for depth in depths if own % depth == 0), default=0)

    @property
    def window_rows(self) -> int:
        """Of a window, wherever its segments begin."""
        if self.narrow:
            return self.segment.lines * self.tall + self.view.r - 1
        count = self.segments * self.teams
        taps = self.segment.lines * self.tall + self.view.r - 1
        down = ceil_div(self.lines, self.segment.lines)
        # What lies between the last lines of a map and the first of the next.
        between = self.view.down - down * self.segment.lines * self.tall
        lines, samples = _met(count, self.across), _met(count, self.each)
        return (lines - 1) * self.segment.lines * self.tall + (samples - 1) * max(between, 0) + taps

    @property
    def window_across(self) -> int:
        """Pixels from a row to the next."""
        return self.segments * 8 + self.view.s - 1 if self.narrow else self.view.across

    @property
    def pixels(self) -> int:
        """Of a slab of the window."""
        # The last eight columns may begin with the last pixel.
        behind = 0 if self.narrow else self.view.s - 1 + 8
        needed = self.window_rows * self.window_across + behind
        whole = PATTERN // (self.slab * PIECE)
        return ceil_div(needed, whole) * whole

    @property
    def planes(self) -> int:
        """Runs of a pixel of the window."""
        return self.view.channels * self.size // PIECE // self.chunks

    @property
    def window_bytes(self) -> int:
        """Of a window, and of the next one, or what that is made of, where it comes early."""
        window = self.planes * self.pixels * PIECE
        if not self.early:
            return window
        return window + (ceil_div(self._raw_bytes, PATTERN) * PATTERN if self.undone else window)

    @property
    def shared_bytes(self) -> int:
        """Of windows, or of the sums that are shared, of weights that are kept, and of barriers."""
        if self.early:
            steps = self.ring * self.depth or self.steps
            return steps * TEAM * PIECE + self.holders * self.window_bytes + BARRIER_BYTES
        return max(self.window_bytes, self.shared_sums) + BARRIER_BYTES

    @property
    def shared_sums(self) -> int:
        """Bytes of sums that teams share, which lie where windows were."""
        all_of_them = self.threads * self.segments * self.segment.columns // 8 * PIECE
        return all_of_them if self.shares > 1 else 0

    @property
    def _pooled(self) -> tuple[int, int]:
        """Lines and columns of pooled outputs that a narrow window is made of."""
        return self.window_rows // 2 + 1, self.window_across // 2 + 1

    @property
    def _raw_bytes(self) -> int:
        """Of what that is: pooled gradients, from a multiple of 128 on, and a byte for each."""
        runs = math.prod(self._pooled) * self.planes
        return ceil_div(runs * PIECE, 128) * 128 + runs * PIECE // self.size

    @property
    def lanes(self) -> int:
        """That read weights, each `PIECE` bytes of its own: of every team's step."""
        return ceil_div(self.view.filters * self.tall, ROWS) * self.steps * TEAM

    @property
    def packed(self) -> int:
        """Numbers of the weights as they are packed, and of steps behind, which lanes ask for."""
        return (self.lanes + 2 * MOST_TOGETHER * TEAM) * PIECE // self.size

    @cached_property
    def blocks(self) -> int:
        """That a multiprocessor runs at a time."""
        registers = self.sums + FEWEST_REGISTERS + (0 if self.early else 8 * LEAST_DEPTH)
        threads = REGISTERS_OF_ALL // (self.threads * ceil_div(registers, 8) * 8)
        return min(threads, SHARED_BYTES // (self.shared_bytes + RESERVED_BYTES))

    @property
    def together(self) -> int:
        """Tiles, or teams' tiles, that a multiprocessor works on at a time."""
        return self.blocks * max(self.holders, 1)

    @property
    def threads(self) -> int:
        """Of a block."""
        return math.prod(self.block)

    @property
    def block(self) -> Extent:
        """Threads."""
        return TEAM * self.teams * self.shares, max(self.holders, 1), 1

    @property
    def defines(self) -> dict[str, int]:
        """Macros of ``implicit_gemm_tile.cuh``."""
        segment = self.segment
        return {
            "MMA_N": segment.columns, "PIXEL_TILE_LINES": segment.lines,
            "PIXEL_TILE_STRIP": int(segment.strip),
            "PIXEL_TILES": self.segments, "WARP_GROUPS": self.teams, "K_WARP_GROUPS": self.shares,
            "CHANNEL_CHUNKS": self.chunks, "PERSISTENT": int(self.early),
            "PERSISTENT_GROUPS": self.holders,
            "WEIGHT_STAGES": self.ring, "CROPPED_WIDTH": self.window_across * self.narrow,
            "SLAB_PACKS": self.slab,
            "HALO_BYTES": self.window_bytes, "POOLED": int(self.pooled), "LINES_IN_M": self.tall,
            "STAGE_STEPS": self.depth, "SLAB_PIXELS": self.pixels, "MIN_BLOCKS": self.blocks,
        }  # fmt: skip

    def grid(self, rows: int, columns: int, parts: int = 1) -> Extent:
        """Blocks of a product of so many segments and filters."""
        down = ceil_div(columns * self.tall, ROWS)
        tiles = ceil_div(rows, max(self.holders, 1) * self.teams * self.segments)
        if self.early:
            tiles = min(tiles, max(MULTIPROCESSORS * self.blocks // (down * parts), 1))
        return tiles, down, parts


def _met(count: int, size: int) -> int:
    """Groups of so many neighbours that `count` of them are part of, beginning at a multiple."""
    if size % count == 0 or count % size == 0:
        return ceil_div(count, size)
    return (count - 2) // size + 2


def slab(runs: int) -> int:
    """Of so many runs of a pixel, those that lie side by side."""
    return next(count for count in SLABS if runs % count == 0)
