"""How convolutions over the pixels of windows may be cut; see ``kernels/columns.cuh``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from dptrain.backends.cuda.device import Extent
from dptrain.backends.cuda.tiles import ceil_div
from dptrain.backends.cuda.windows import (
    MULTIPROCESSORS,
    PIECE,
    RESERVED_BYTES,
    SHARED_BYTES,
    SIZES,
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

FEWEST_REGISTERS, REGISTERS = 40, 44
"""Of a thread besides its sums and weights: that it can do with, and that it uses."""

REGISTERS_OF_ALL = 1 << 16
"""Of the threads of a multiprocessor."""

FEWEST_COLUMNS, WASTE = 32, 1.1
"""Of a segment that is worth trying, and times the fewest columns that it may take for a map."""


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
class Slide:
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
        early: whether blocks go from tile to tile, and ask for what a window is made of before they
            need it.
        undone: whether that is pooled, and a window's pixels are made of it.
        holders: of the weights in shared memory, each with tiles of its own, or 0.
    """

    view: View
    size: int
    pooled: bool
    segment: Segment
    segments: int
    teams: int
    shares: int = 1
    chunks: int = 1
    early: bool = False
    undone: bool = False
    holders: int = 0

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
        )

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
        """Steps whose weights are on their way; 0 where no number divides those that are made."""
        own = self.steps // (self.chunks * self.shares)
        # Two sets of them take turns.
        left = REGISTERS_OF_ALL // max(self.blocks * self.threads, TEAM * 2) - self.sums
        most = (left - REGISTERS) // 8
        depths = range(2, min(max(most, LEAST_DEPTH), MOST_DEPTH, own // 2) + 1)
        return max((depth for depth in depths if own % depth == 0), default=0)

    @property
    def window_rows(self) -> int:
        """Of a window, wherever its segments begin."""
        count = self.segments * self.teams
        taps = self.segment.lines * self.tall + self.view.r - 1
        down = ceil_div(self.lines, self.segment.lines)
        # What lies between the last lines of a map and the first of the next.
        between = self.view.down - down * self.segment.lines * self.tall
        lines, samples = _met(count, self.across), _met(count, self.each)
        return (lines - 1) * self.segment.lines * self.tall + (samples - 1) * max(between, 0) + taps

    @property
    def pixels(self) -> int:
        """Of a plane of the window; such that threads write to different banks."""
        planes = min(8, self.planes)
        # The last eight columns may begin with the last pixel.
        needed = self.window_rows * self.view.across + self.view.s - 1 + 8
        return needed + (8 // planes - needed) % 8

    @property
    def planes(self) -> int:
        """Of the window."""
        return self.view.channels * self.size // PIECE // self.chunks

    @property
    def window_bytes(self) -> int:
        """Of a window, and of the next one, or what that is made of, where it comes early."""
        window = self.planes * self.pixels * PIECE
        if not self.early:
            return window
        return window + (self._raw_bytes if self.undone else window)

    @property
    def shared_bytes(self) -> int:
        """Of windows, of weights that are kept, or of the sums that are shared."""
        if self.holders:
            return self.steps * TEAM * PIECE + self.holders * self.window_bytes
        sums = self.threads * self.segments * self.segment.columns // 8 * PIECE
        return self.window_bytes if self.shares == 1 else max(self.window_bytes, sums)

    @property
    def _raw_bytes(self) -> int:
        """Of what the pixels of a window are made of: pooled gradients, and a byte for each."""
        runs = (self.window_rows // 2 + 1) * (self.view.width // 2) * self.planes
        return ceil_div(runs * (PIECE + PIECE // self.size), PIECE) * PIECE

    @property
    def lanes(self) -> int:
        """That read weights, each `PIECE` bytes of its own: of every team's step."""
        return ceil_div(self.view.filters * self.tall, ROWS) * self.steps * TEAM

    @property
    def packed(self) -> int:
        """Numbers of the weights as they are packed, and of steps behind, which lanes ask for."""
        return (self.lanes + 2 * MOST_DEPTH * TEAM) * PIECE // self.size

    @cached_property
    def blocks(self) -> int:
        """That a multiprocessor runs at a time."""
        registers = self.sums + 8 * LEAST_DEPTH + FEWEST_REGISTERS
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
        """Macros of ``segments.cuh``."""
        segment = self.segment
        return {
            "COLUMNS": segment.columns, "LINES": segment.lines, "STRIP": int(segment.strip),
            "SEGMENTS": self.segments, "TEAMS": self.teams, "SHARES": self.shares,
            "CHUNKS": self.chunks, "LATER": int(self.early), "HOLDERS": self.holders,
            "WINDOW_BYTES": self.window_bytes, "POOLED": int(self.pooled), "TALL": self.tall,
            "DEPTH": self.depth, "PIXELS": self.pixels, "BLOCKS": self.blocks,
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


def segments(view: View, *, pooled: bool) -> Iterator[Segment]:
    """Those that a map can be cut into."""
    unit, tall = 2 if pooled else 1, 2 if view.filters <= ROWS // 2 else 1
    height, width = view.out_height // unit * unit, view.out_width // unit * unit
    step = unit // tall or 1
    for lines in range(step, min(ceil_div(height, tall), MOST_COLUMNS // 8) + 1, step):
        yield Segment(8 * lines, lines, strip=True)
        if lines == 1 or (tall == 1 and not pooled):
            yield Segment(ceil_div((lines - 1) * view.across + width, 8) * 8, lines, strip=False)
        elif tall == 1 and view.across % 8 == 0:
            # The second line of a window of pooling is below the first in the same thread.
            yield Segment(lines * view.across, lines, strip=False)


def slides(view: View, precision: str, *, pooled: bool = False, behind: int = 0) -> Iterator[Slide]:
    """Ways to compute one product over pixels.

    Args:
        view: of what is read.
        precision: of the product.
        pooled: whether windows of two by two outputs are.
        behind: what is undone as pixels are read, `BEHIND` of ``fused.cuh``.
    """
    size, cuts = SIZES[precision], [(*cut, False, 0) for cut in CUTS]
    # Where a rectifier alone follows, kernels have no way of asking early.
    cuts += HOLDINGS if behind != 1 else []
    for segment in good_segments(view, pooled=pooled):
        for count in range(1, MOST_COLUMNS // segment.columns + 1):
            for teams, shares, chunks, early, holders in cuts:
                way = Slide(
                    view, size, pooled, segment, count, teams, shares, chunks, early, behind == 2,
                    holders,
                )  # fmt: skip
                if way.possible:
                    yield way


def good_segments(view: View, *, pooled: bool) -> list[Segment]:
    """Those of enough columns, few of which are computed in vain."""
    found = [s for s in segments(view, pooled=pooled) if s.columns // 8 in EIGHTS]
    widest = max((s.columns for s in found), default=0)
    wide = [s for s in found if s.columns >= min(FEWEST_COLUMNS, widest)]
    columns = {s: Slide(view, 2, pooled, s, 1, 1).each * s.columns for s in wide}
    return [s for s in wide if columns[s] <= WASTE * min(columns.values())]


CUTS = [
    (teams, shares, chunks)
    for teams in (1, 2, 3, 4)
    for shares in (1, 2, 4)
    for chunks in (1, 2, 4)
    if teams * shares <= 4
]


HOLDINGS = [(1, 1, chunks, True, holders) for chunks in (1, 2, 4) for holders in (0, 1, 2, 3, 4)]
"""The same where blocks ask early, and how many hold the weights."""
