"""How the gradients of weights of convolutions of stride 1 are cut.

See ``kernels/conv2d_backward_weight_halo.cu``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from dptrain.backends.cuda.device import Extent
from dptrain.backends.cuda.gemm_tiles import WARP, GemmConfig, SplitK, ceil_div
from dptrain.backends.cuda.halo_tiles import (
    MULTIPROCESSORS,
    PIECE,
    RESERVED_BYTES,
    SHARED_BYTES,
    SIZES,
    View,
)

ROWS = 64
"""Filters of a tile: rows of an instruction of four warps."""

MOST_COLUMNS = 320
"""Of a tile: as many sums as threads have registers for, half as many each."""


@dataclass(frozen=True)
class Costs:
    """Cycles, fitted to what was timed: see `estimate`.

    Attributes:
        turn: that four warps take for a turn at least.
        issue: of instructions of a turn that others have to wait for.
        handing, arrival: between two strips, where one has come before, and where it has yet to.
        together: for each further group that waits there.
        besides, alone: bytes a cycle that four warps bring then.
        feed: of a multiprocessor for a byte of a strip.
    """

    turn: float
    issue: float
    handing: float
    arrival: float
    together: float
    besides: float
    alone: float
    feed: float


WIDE = Costs(
    turn=290, issue=51, handing=1600, arrival=850, together=660, besides=48, alone=7.4, feed=0.015
)
NARROW = Costs(
    turn=530, issue=190, handing=4600, arrival=3600, together=0, besides=math.inf,
    alone=11, feed=0.016,
)  # fmt: skip
"""Of maps of many channels, and of few."""

SHARED = 1.09
"""How many times as long as their instructions products of several blocks take."""

ADDING, JOINING = 4.2e-3, 3.3
"""Cycles for a number of a part of a sum, which is written, read and added, and for a column that
groups of a block join."""

START = 3500
"""Cycles that both kernels take to begin and to end."""

FEWEST_COLUMNS = 160
"""Of a row of taps by itself, where more would have room."""

SHORT = 16
"""Pixels of a line from which on positions are made of quarters of a line, not of several lines."""

MANY_PARTS, AT_A_TIME, TURN_OF_PARTS = 256, 64, 1000
"""SplitK of a number beyond which so many more, which come to their sum at a time, cost cycles of
their own: a guess from a layer of 448 weights, which took 12.4 µs in 640 parts and 9.9 in 224."""

FEWEST_PIXELS = 1 << 17
"""Of pooled maps with few channels, below which products that gather are faster in tf32: with 32
samples of model0 and model1 they took 6.3 and 9.1 µs on an H200, windows 7.3 and 9.9 at best."""

MOST_NARROW = 32
"""Channels that the pixels of a row of taps have together where maps are narrow."""


@dataclass(frozen=True)
class WgradTile:
    """What a block sums up, and of what it has a window at a time: macros of the kernel.

    Attributes:
        precision: of the products.
        behind: what is undone of what follows the convolution.
        narrow: whether a row of taps is one tap.
        channels, tap_rows, tap_columns: of the columns of the tile.
        all_channels, all_rows: of the product.
        filters: of the tile.
        lines, segment, width, across: of a strip.
        apart_down, apart_across: pixels of a position.
        strips: of a sample.
        groups: of four warps that share a window, each with steps of its own.
        buffers: two where a strip comes while the one before is multiplied.
    """

    precision: str
    behind: int
    narrow: bool
    channels: int
    tap_rows: int
    tap_columns: int
    all_channels: int
    all_rows: int
    filters: int
    lines: int
    segment: int
    width: int
    across: int
    apart_down: int
    apart_across: int
    strips: int
    groups: int = 1
    buffers: int = 1

    @property
    def columns(self) -> int:
        """Of the tile."""
        return self.tap_rows * self.tap_columns * self.channels

    @property
    def run(self) -> int:
        """Numbers of a piece."""
        return PIECE // SIZES[self.precision]

    @property
    def turns(self) -> int:
        """Pairs of instructions' depths of a strip."""
        return ceil_div(self._all_halves, 4)

    @property
    def _half(self) -> int:
        """Positions of half a step."""
        return 1 if self.precision == "tf32" else 8

    @property
    def _halves(self) -> int:
        return ceil_div((self.segment - 1) * self.across + self.width, self._half)

    @property
    def _all_halves(self) -> int:
        return self.lines // self.segment * self._halves

    @property
    def _window(self) -> tuple[int, int]:
        """Rows, and columns as far as anyone reads."""
        reach = self._halves * self._half + self.tap_columns - 1
        if self.segment == 1:
            return self.lines + self.tap_rows - 1, reach
        reach += (self.lines - self.segment + self.tap_rows - 1) * self.across
        return ceil_div(reach, self.across), self.across

    @property
    def _pieces(self) -> int:
        """Of a window."""
        rows, columns = self._window
        if self.precision == "tf32":
            return columns * (rows * self.channels + 1)
        each = self.channels // self.run
        rest = max(8 // each, 1)
        if self.segment == 1:
            return rows * each * _more_than_eights(columns, rest)
        return each * _more_than_eights(rows * columns, rest)

    @property
    def _raw_pieces(self) -> int:
        """Of pixels that are put together to positions."""
        rows, columns = self._window
        rows, columns = rows + 3 * self.apart_down, columns + 3 * self.apart_across
        return rows * columns * (self.channels // self.run + 2)

    @property
    def _dz_bytes(self) -> int:
        four, size, pooled = self.precision == "tf32", SIZES[self.precision], self.behind == 2
        rows = self.turns * ((4 if four else 8) if pooled else 4 * PIECE // size)
        more = 2 if four else 1 if not pooled else 2 if self.filters > 16 else 0
        pitch = (self.filters + more * self.run) * size
        marks = self.filters + 16 if pooled else pitch if self.behind else 0
        return rows * (pitch + marks)

    @property
    def shared_bytes(self) -> int:
        """Of windows and dz, and of the sums that groups join."""
        later = self.precision == "tf32" and not self.narrow and self.buffers == 2
        pieces = self._pieces + self._raw_pieces if later else self.buffers * self._pieces
        sums = 4 * 128 * max((self.groups - 1) * self.columns // 2, 2 * self.groups)
        places = ceil_div(self.turns, 2) * PIECE
        windows = pieces * PIECE + self.buffers * self._dz_bytes
        return max(places + windows, sums * (self.groups > 1))

    @property
    def strip_bytes(self) -> int:
        """Of a window and its dz."""
        return self._pieces * PIECE + self._dz_bytes

    @property
    def block(self) -> Extent:
        """Threads: four warps a group."""
        return 4 * WARP, self.groups, 1

    @property
    def blocks(self) -> int:
        """That a multiprocessor runs at a time."""
        registers = min(self.columns // 2 + 72, 255)
        room = SHARED_BYTES // (self.shared_bytes + RESERVED_BYTES)
        threads = math.prod(self.block)
        return min(room, (1 << 16) // (threads * (-(-registers // 8) * 8)), 16)

    @property
    def defines(self) -> dict[str, int]:
        """Macros of ``conv2d_backward_weight_halo.cu``."""
        return {
            "TILE_M": ROWS, "TILE_N": self.columns, "WARP_M": 16, "WARP_N": self.columns,
            "TILE_K_WORDS": 16, "PREFETCH_STEPS": 1, "K_GROUPS": self.groups,
            "MIN_BLOCKS": self.blocks,
            "FEW_CHANNELS": int(self.narrow), "TILE_CHANNELS": self.channels,
            "TILE_FILTERS": self.filters,
            "TAP_ROWS": self.tap_rows, "TAP_COLUMNS": self.tap_columns, "STRIP_LINES": self.lines,
            "CONTIGUOUS_LINES": self.segment, "LINE_POSITIONS": self.width,
            "LINE_PITCH": self.across,
            "QUAD_ROWS_APART": self.apart_down, "QUAD_COLUMNS_APART": self.apart_across,
            "BUFFERS": self.buffers,
        }  # fmt: skip

    def grid(self, rows: int, columns: int, parts: int = 1) -> Extent:
        """Blocks of the sums, cut into `parts`; rows of taps and runs of channels come first."""
        kinds = ceil_div(self.all_rows, self.tap_rows) * ceil_div(self.all_channels, self.channels)
        return kinds, ceil_div(columns, ROWS), parts

    def tiling(self, filters: int, samples: int) -> GemmConfig:
        """With parts of all strips that all multiprocessors work on."""
        tiles = math.prod(self.grid(0, filters))
        wanted = max(MULTIPROCESSORS * self.blocks // tiles, 1)
        part = max(ceil_div(samples * self.strips, wanted), 1)
        return GemmConfig(self, SplitK(max(ceil_div(samples * self.strips, part), 1), part))


def _more_than_eights(least: int, rest: int) -> int:
    """The least number from `least` on that is `rest` more than a multiple of eight."""
    return (least + 7 - rest) // 8 * 8 + rest


def suits(view: View, precision: str, strides: tuple[int, int]) -> bool:
    """Whether there are kernels for a layer."""
    return precision in SIZES and strides == (1, 1) and any(True for _ in _columns(view))


def _columns(view: View) -> Iterator[tuple[bool, int, int, int]]:
    """Columns of a tile: whether they are narrow, channels, rows and columns of taps."""
    if view.filters % 16:
        return
    if view.channels % 16:
        together = view.s * view.channels
        if together <= MOST_NARROW:
            yield True, 16 if together <= 16 else 32, view.r, 1
        return
    for channels in (16,) if view.channels % 32 else (32, 64):
        if view.channels % channels == 0 and view.s * channels <= MOST_COLUMNS:
            # As many rows as there is room for, cut evenly.
            groups = ceil_div(view.r, MOST_COLUMNS // (view.s * channels))
            for count in (groups, view.r):
                yield False, channels, ceil_div(view.r, count), view.s
                if groups == view.r or channels * view.s < FEWEST_COLUMNS:
                    break


def wgrad_candidates(view: View, precision: str, behind: int) -> Iterator[WgradTile]:
    """Ways to compute the gradient of weights."""
    pooled = behind == 2
    unit = 2 if pooled else 1
    height = view.out_height // unit * unit
    filters = next(n for n in (16, 32, ROWS) if n >= min(view.filters, ROWS))
    for narrow, channels, tap_rows, tap_columns in _columns(view):
        for lines, segment, wide, across, down, beside in _strips(view, precision, unit):
            tall = lines * 4 if down else lines
            for groups, buffers in itertools.product((1, 2, 4) if narrow else (1, 2), (1, 2)):
                way = WgradTile(
                    precision, behind, narrow, channels, tap_rows, tap_columns,
                    channels if narrow else view.channels, view.r, filters, lines, segment, wide,
                    across, down, beside, ceil_div(height, tall), groups, buffers,
                )  # fmt: skip
                if way.blocks:
                    yield way


def _strips(view: View, precision: str, unit: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    height, width = (n // unit * unit for n in (view.out_height, view.out_width))
    for lines in range(unit, height + unit, unit):
        if precision == "bf16":
            for segment in range(1, 2 if unit == 2 else lines + 1):
                if lines % segment == 0:
                    yield lines, segment, width, max(view.across, width), 0, 0
            continue
        quarter = ceil_div(ceil_div(width, 4), unit) * unit
        yield lines, 1, quarter, quarter, 0, quarter
        if width < SHORT and 4 * (lines - unit) < height:
            yield lines, 1, width, width, lines, 0


def estimate(way: WgradTile, view: View, samples: int) -> float:
    """Cycles that the gradient of weights takes.

    Blocks of a multiprocessor share its tensor cores; what one does besides, others hide. Fitted to
    40 products timed on an H200 (mostly 32 and 2048 samples; solar, cifar, model0 to model2 and
    model-large), of each 20 to 30 ways: what it chooses of these took 1.03 times as long as the
    fastest in the geometric mean, 1.19 times at worst. It was not tried on others.
    """
    parts = way.tiling(view.filters, samples).parts
    blocks = math.prod(way.grid(0, view.filters, parts.count))
    beside = min(way.blocks, ceil_div(blocks, MULTIPROCESSORS))
    rounds = ceil_div(blocks, MULTIPROCESSORS * way.blocks)
    costs, products = NARROW if way.narrow else WIDE, way.turns * way.columns
    own = max(products, costs.turn * way.turns / way.groups)
    ahead = way.buffers == 2
    waiting, rate = (costs.handing, costs.besides) if ahead else (costs.arrival, costs.alone)
    waiting += costs.together * (way.groups - 1)
    strip = own + waiting + way.strip_bytes / (rate * way.groups)
    busy = products * SHARED + way.turns * costs.issue + way.strip_bytes * costs.feed
    elements = view.r * view.s * view.channels * view.filters
    more = max(ceil_div(parts.count - MANY_PARTS, AT_A_TIME), 0)
    adding = ADDING * parts.count * elements + TURN_OF_PARTS * more
    joining = JOINING * (way.groups - 1) * way.columns
    return START + parts.terms * rounds * max(beside * busy, strip) + adding + joining


@functools.cache
def select_wgrad_tile(
    view: View, precision: str, strides: tuple[int, int], behind: int, samples: int
) -> WgradTile | None:
    """The way that the gradient of weights takes the least time with, by an estimate of cycles.

    Returns:
        None where there are no kernels for the layer.
    """
    pixels = samples * view.out_height * view.out_width
    narrow = view.channels % 16 > 0
    if precision == "tf32" and behind == 2 and narrow and pixels < FEWEST_PIXELS:
        return None
    if not suits(view, precision, strides):
        return None

    ways = wgrad_candidates(view, precision, behind)
    return min(ways, key=lambda way: estimate(way, view, samples), default=None)
