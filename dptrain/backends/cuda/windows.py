"""How convolutions that read windows of maps are cut; see ``kernels/window.cuh``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dptrain.backends.cuda.device import Extent
from dptrain.backends.cuda.tiles import WARP, Parts, Tiling, ceil_div
from dptrain.network.network import Node

PIECE = 16
"""Bytes that are read and written at once."""

SIZES = {"tf32": 4, "bf16": 2}
"""Bytes of a number, by precision; there are no such kernels in float32."""

WIDTH = 32
"""What channels and filters are a multiple of: two steps of tensor cores in every precision."""

MULTIPROCESSORS = 132
"""That all tiles together should fill."""

FEWEST_PIXELS = {"tf32": 128 * 132, "bf16": 128 * 32}
"""Of a product over pixels that has a window; those that gather are faster below. A block that is
alone on its multiprocessor waits for every slice, of which tf32 has twice as many."""

FEWEST_TERMS = 4096
"""The same of a sum over pixels."""

STEP_BYTES, PRODUCTS = 32, 128
"""Of the sum that tensor cores take at a time, and of its products what they make in a cycle."""

WAIT, TILE, STEP = 300, 5000, 2000
"""Cycles that a block spends besides the products: on a slice of weights that does not stay, on a
tile, and on bringing the terms of a sum."""

SHARED = 0.4
"""Part of a tile's products in which other blocks cannot make any."""

ADDING = 1.2e-3
"""Cycles for a number of a part of a sum, which is written, read and added."""

PIXEL_SUMS = ((192, 64), (192, 128), (320, 64), (320, 128), (320, 256))
"""Rows of a tile, and terms at a time, of gradients of weights."""

SHARED_BYTES = 227 << 10
"""Of a multiprocessor."""

RESERVED_BYTES = 1 << 10
"""Of that, which each block costs besides its own."""


@dataclass(frozen=True)
class View:
    """A map as a convolution of stride 1 reads it: ``View`` of ``window.cuh``.

    Attributes:
        height, width, channels: of the map.
        top, left: zeros above and before it.
        out_height, out_width, filters: of the output.
        r, s: of the patches.
    """

    height: int
    width: int
    channels: int
    top: int
    left: int
    out_height: int
    out_width: int
    filters: int
    r: int
    s: int

    @classmethod
    def forward(cls, node: Node) -> View:
        """x, as a layer makes its output of it."""
        layer: Any = node.layer
        (c, h, w), (k, ho, wo) = node.input_shape, node.output_shape
        (top, _), (left, _) = layer.pads(node.input_shape)
        return cls(h, w, c, top, left, ho, wo, k, *layer.window)

    @property
    def backward(self) -> View:
        """dz, as dx is made of it."""
        return View(
            self.out_height, self.out_width, self.filters, self.r - 1 - self.top,
            self.s - 1 - self.left, self.height, self.width, self.channels, self.r, self.s,
        )  # fmt: skip

    @property
    def across(self) -> int:
        """Pixels from a row to the next."""
        return self.width + max(self.left, self.out_width + self.s - 1 - self.width - self.left)

    @property
    def down(self) -> int:
        """Rows from a sample to the next."""
        return self.height + max(self.top, self.out_height + self.r - 1 - self.height - self.top)

    def rows(self, count: int, unit: int, taps: int) -> int:
        """Rows of a window for so many pixels in a row.

        Args:
            count: of pixels.
            unit: rows and columns of a square of pixels that follow each other.
            taps: rows of a patch.
        """
        width, height = self.out_width // unit, self.out_height // unit
        lines = (count // unit**2 + width - 2) // width + 1
        between = ceil_div(lines - 1, height) * (self.down - height * unit)
        return lines * unit + between + taps - 1


@dataclass(frozen=True)
class Slide:
    """A product over pixels: what a block takes at a time.

    Attributes:
        rows, columns: of a tile.
        runs: pieces along the sum of a slice of weights.
        stages: slices that there is room for.
        shared_bytes: of the window and the slices.
        packed: numbers of the weights as they are packed.
    """

    rows: int
    columns: int
    runs: int
    stages: int
    shared_bytes: int
    packed: int

    @property
    def blocks(self) -> int:
        """That a multiprocessor runs at a time."""
        return _resident(self.shared_bytes, self.block[0], 128)

    @property
    def block(self) -> Extent:
        """Threads: a warp for every 32 rows."""
        return self.rows // 32 * WARP, 1, 1

    @property
    def defines(self) -> dict[str, int]:
        """Macros of ``window.cuh``."""
        return {
            **_tile_defines(self.rows, self.columns, 32), "RUNS": self.runs,
            "STAGES": self.stages, "BLOCKS": self.blocks,
        }  # fmt: skip

    def grid(self, rows: int, columns: int, parts: int = 1) -> Extent:
        """Blocks of a product of rows × columns; each takes tile after tile."""
        across = ceil_div(columns, self.columns)
        most = max(MULTIPROCESSORS * self.blocks // across, 1)
        return min(ceil_div(rows, self.rows), most), across, parts


def _tile_defines(rows: int, columns: int, own_rows: int) -> dict[str, int]:
    return {
        "TILE_M": rows, "TILE_N": columns, "WARP_M": own_rows, "WARP_N": columns, "WORDS": 16,
    }  # fmt: skip


def _resident(shared_bytes: int, threads: int, registers: int) -> int:
    """Blocks that a multiprocessor has room for."""
    return min(SHARED_BYTES // (shared_bytes + RESERVED_BYTES), (1 << 16) // (threads * registers))


def suits(view: View, precision: str, strides: tuple[int, int]) -> bool:
    """Whether there are kernels for a layer, and it is wide enough for them."""
    if precision not in SIZES or strides != (1, 1):
        return False
    bottom = view.out_height + view.r - 1 - view.height - view.top
    right = view.out_width + view.s - 1 - view.width - view.left
    # More zeros than a patch reaches would have no place between maps.
    padded = max(view.top, bottom) < view.r and max(view.left, right) < view.s
    return padded and view.channels % WIDTH == 0 and view.filters % WIDTH == 0


def slides(view: View, precision: str, *, pooled: bool = False) -> Iterator[Slide]:
    """Ways to compute one product over pixels.

    Args:
        view: of what is read.
        precision: of the product.
        pooled: whether pixels come by squares of two by two.
    """
    size, unit = SIZES[precision], 2 if pooled else 1
    pieces = view.channels * size // PIECE
    columns = 64 if view.filters > 32 else 32
    runs = math.gcd(pieces, 8)
    slices = view.r * view.s * pieces // runs
    packed = ceil_div(view.filters, columns) * columns * view.r * view.s * view.channels
    for rows in (128, 256):
        pixels = view.rows(rows, unit, view.r) * view.across + view.s - 1
        window = pixels * (pieces + 1) * PIECE
        for stages in (3, slices):
            if stages <= slices:
                shared = window + stages * runs * columns * PIECE
                way = Slide(rows, columns, runs, stages, shared, packed)
                if way.blocks:
                    yield way


@dataclass(frozen=True)
class PixelSum:
    """A tile of a product whose sum runs over pixels: the gradient of weights.

    Attributes:
        rows, columns: of the tile.
        terms: that a block takes at a time.
        shared_bytes: of window, dz and places of terms.
    """

    rows: int
    columns: int
    terms: int
    shared_bytes: int

    @property
    def block(self) -> Extent:
        """Threads: four warps."""
        return 4 * WARP, 1, 1

    @property
    def blocks(self) -> int:
        """That a multiprocessor runs at a time."""
        return _resident(self.shared_bytes, self.block[0], 255)

    @property
    def defines(self) -> dict[str, int]:
        """Macros of ``window_backward_weight.cu``."""
        return {
            **_tile_defines(self.rows, self.columns, self.rows // 4), "TERMS": self.terms,
            "RUNS": 4, "STAGES": 4, "BLOCKS": self.blocks,
        }  # fmt: skip

    def grid(self, rows: int, columns: int, parts: int = 1) -> Extent:
        """Blocks of a product of rows × columns whose sum is cut into `parts`.

        The last row is the bias's, which needs no tile: whoever reads dz adds it up.
        """
        return ceil_div(rows - 1, self.rows), ceil_div(columns, self.columns), parts

    def tiling(self, rows: int, columns: int, terms: int) -> Tiling:
        """With parts of a sum of so many terms that all multiprocessors work on."""
        tiles = math.prod(self.grid(rows, columns))
        wanted = max(MULTIPROCESSORS * self.blocks // tiles, 1)
        part = ceil_div(max(ceil_div(terms, wanted), 1), self.terms) * self.terms
        return Tiling(self, Parts(max(ceil_div(terms, part), 1), part))


def pixel_sums(view: View, precision: str, *, pooled: bool = False) -> Iterator[PixelSum]:
    """Ways to compute the gradient of weights."""
    size, unit = SIZES[precision], 2 if pooled else 1
    run, line = PIECE // size, view.s * view.channels
    columns = 64 if view.filters > 32 else 32
    across = view.across
    if pooled:
        across = (across + 1) // 4 * 4 + 2 if size == 4 else (across + 3) // 8 * 8 + 4
    pixel = (view.channels + (2 if size == 4 else 1) * run) * size
    for rows, terms in PIXEL_SUMS:
        # Rows of taps that a tile meets.
        taps = min(rows // line if rows % line == 0 else (rows - 2) // line + 2, view.r)
        pixels = view.rows(terms, unit, taps) * across + view.s - 1
        pieces = terms if size == 2 else columns
        planes = terms * columns // run // pieces
        shared = 4 * terms + planes * (pieces + 1) * PIECE + pixels * pixel
        way = PixelSum(rows, columns, terms, shared)
        if way.blocks > 1:
            yield way


def choose_slide(view: View, precision: str, samples: int, *, pooled: bool = False) -> Slide | None:
    """The way that a product over the pixels of so many samples takes the least time with.

    The estimate counts cycles. Of 60 products timed on an H200 (32, 256 and 2048 samples, layers of
    solar, cifar, model2 and model-large) its choice took 1.004 times as long as the fastest way in
    the geometric mean, 1.05 times at worst.

    Returns:
        None where tiles are so few that products that gather are faster, or no window has room.
    """
    size, unit = SIZES[precision], 2 if pooled else 1
    squares = samples * (view.out_height // unit) * (view.out_width // unit)
    pixels, sum_bytes = squares * unit**2, view.r * view.s * view.channels * size
    if pixels < FEWEST_PIXELS[precision]:
        return None

    def estimate(way: Slide) -> float:
        tiles = ceil_div(pixels, way.rows) * ceil_div(view.filters, way.columns)
        products = sum_bytes / STEP_BYTES * way.rows * way.columns / PRODUCTS
        slices = sum_bytes // (PIECE * way.runs)
        waits = 0 if way.stages == slices else slices
        tile = max(products + WAIT * waits + TILE, SHARED * products * way.blocks)
        # On average half a round of tiles is left over.
        rounds = tiles / (MULTIPROCESSORS * way.blocks)
        return tile * max(1.0, rounds + 0.5 if rounds > 1.0 else 1.0)

    return min(slides(view, precision, pooled=pooled), key=estimate, default=None)


def choose_pixel_sum(
    view: View, precision: str, terms: int, *, pooled: bool = False
) -> Tiling | None:
    """The way that the gradient of weights, a sum of so many terms, takes the least time with.

    As `choose_slide`: of 30 products its choice took 1.005 times as long as the fastest way in the
    geometric mean, 1.07 times at worst.
    """
    if terms < FEWEST_TERMS:
        return None
    size, rows, columns = SIZES[precision], view.r * view.s * view.channels + 1, view.filters

    def estimate(way: PixelSum) -> float:
        parts = way.tiling(rows, columns, terms).parts
        blocks = math.prod(way.grid(rows, columns, parts.count))
        products = way.terms * size / STEP_BYTES * way.rows * way.columns / PRODUCTS
        steps = parts.terms / way.terms * max(1.0, blocks / (MULTIPROCESSORS * way.blocks))
        return steps * (products + STEP) + ADDING * parts.count * rows * columns

    way = min(pixel_sums(view, precision, pooled=pooled), key=estimate, default=None)
    return None if way is None else way.tiling(rows, columns, terms)
