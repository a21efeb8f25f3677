"""How a matrix product is cut into tiles and parts; see ``kernels/gemm.cuh``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dptrain.backends.cuda.device import Extent

WARP = 32
"""Threads of a warp."""

WANTED_BLOCKS = 264
"""Blocks that keep a large GPU busy: two on each of 132 multiprocessors."""

SMALLEST_PART = 256
"""Terms of a sum below which another block would cost more than it saves."""


def ceil_div(a: int, b: int) -> int:
    """A / b, rounded up."""
    return -(-a // b)


def _slice_bytes(width: int, words: int) -> int:
    """Of a slice, padded, whichever way it lies: `words` of each row, or that many words of rows."""
    return 4 * max(width * (words + 4), words * (width + 8))


@dataclass(frozen=True)
class Tile:
    """What one block computes, rows × columns, and what one of its workers does of that.

    Attributes:
        rows, columns: of the tile.
        own_rows, own_columns: of a worker: a thread, or a warp where tensor cores multiply.
        tensor: whether they do.
        ahead: steps along the sum for which a block has fetched its slices already.
        groups: of threads that share the tile, each with steps of its own.
        words: of 4 bytes of a row in a slice, where tensor cores multiply.
    """

    rows: int
    columns: int
    own_rows: int
    own_columns: int
    tensor: bool = False
    ahead: int = 1
    groups: int = 1
    words: int = 16

    @property
    def defines(self) -> dict[str, int]:
        """Macros of ``gemm.cuh``."""
        worker = "WARP" if self.tensor else "THREAD"
        words = {"WORDS": self.words} if self.tensor else {}
        return {
            **words,
            "TILE_M": self.rows,
            "TILE_N": self.columns,
            f"{worker}_M": self.own_rows,
            f"{worker}_N": self.own_columns,
            "AHEAD": self.ahead,
            "GROUPS": self.groups,
        }

    @property
    def block(self) -> Extent:
        """Threads of a block."""
        workers = self.rows * self.columns // (self.own_rows * self.own_columns)
        return workers * (WARP if self.tensor else 1), self.groups, 1

    @property
    def shared_bytes(self) -> int:
        """Two slices of both operands for each group, or sums of all groups but the first."""
        slices = (
            2 * self.groups * sum(_slice_bytes(n, self.words) for n in (self.rows, self.columns))
        )
        return max(slices, 4 * (self.groups - 1) * self.rows * self.columns)

    def grid(self, rows: int, columns: int, parts: int = 1) -> Extent:
        """Blocks of a product of rows × columns whose sum is cut into `parts`."""
        return ceil_div(rows, self.rows), ceil_div(columns, self.columns), parts

    def blocks(self, rows: int, columns: int) -> int:
        """Tiles of a product of rows × columns."""
        return ceil_div(rows, self.rows) * ceil_div(columns, self.columns)

    def __str__(self) -> str:
        own = f"{self.own_rows}x{self.own_columns}"
        return f"{self.rows}x{self.columns}/{own}/{self.ahead}x{self.groups}x{self.words}"


THREAD_TILES = (
    Tile(128, 16, 4, 4),
    Tile(128, 32, 8, 4),
    Tile(64, 64, 4, 4),
    Tile(128, 64, 8, 4),
)
"""For float32."""

TENSOR_TILES = (
    Tile(64, 16, 32, 16, tensor=True),
    Tile(128, 16, 32, 16, tensor=True),
    Tile(32, 32, 32, 16, tensor=True),
    Tile(64, 32, 32, 16, tensor=True),
    Tile(128, 32, 32, 32, tensor=True),
    Tile(256, 32, 64, 32, tensor=True),
    Tile(32, 64, 32, 16, tensor=True),
    Tile(64, 64, 32, 32, tensor=True),
    Tile(128, 64, 32, 32, tensor=True),
    Tile(128, 64, 64, 32, tensor=True),
    Tile(256, 64, 64, 32, tensor=True),
    Tile(128, 128, 64, 32, tensor=True),
)
"""For tf32 and bf16."""


def tiles(precision: str) -> Sequence[Tile]:
    """Those that compute products in `precision`."""
    return THREAD_TILES if precision == "fp32" else TENSOR_TILES


def choose_tile(precision: str, rows: int, columns: int) -> Tile:
    """The tile that a product of rows × columns takes the least time with.

    A block reads rows and columns of the operands for rows × columns products, so large tiles read
    less; but small products fill a GPU only with small tiles, and what a tile covers beyond the
    product is computed in vain.
    """

    def cost(tile: Tile) -> float:
        waves = max(tile.blocks(rows, columns) / WANTED_BLOCKS, 1.0)
        return waves * (tile.rows * tile.columns + 32 * (tile.rows + tile.columns))

    return min(tiles(precision), key=cost)


@dataclass(frozen=True)
class Parts:
    """A long sum, cut so that enough blocks work on it.

    Attributes:
        count: largest number of parts.
        terms: of each part but the last.
    """

    count: int
    terms: int

    def used(self, terms: int) -> int:
        """Parts that a sum of so many terms has; a sum of none still has one, which is 0."""
        return max(ceil_div(terms, self.terms), 1)


def cut(terms: int, blocks: int) -> Parts:
    """Parts for a sum of at most `terms` terms in a product of so many tiles.

    No more blocks than run at a time: a last few that wait for the others cost as much as all.
    """
    wanted = max(WANTED_BLOCKS // blocks, 1)
    part = max(ceil_div(ceil_div(terms, wanted), DEPTH) * DEPTH, SMALLEST_PART)
    return Parts(ceil_div(terms, part), part)


DEPTH = 64
"""Terms that a group of threads takes at a time, at most: what `TILE_K` divides."""


def step(length: int, itemsize: int) -> int:
    """Elements of rows of this length that are read at once, of 16 bytes at the most."""
    return math.gcd(length, 16 // itemsize)
