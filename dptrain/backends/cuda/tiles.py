"""How a matrix product is cut into tiles and parts; see ``kernels/gemm.cuh``."""

from __future__ import annotations

from dataclasses import dataclass

from dptrain.backends.cuda.device import Extent

DEPTH = 16
"""Positions of the sum that a block takes at a time, `TILE_K`."""

WANTED_BLOCKS = 264
"""Blocks that keep a large GPU busy: two on each of 132 multiprocessors."""

SMALLEST_PART = 256
"""Terms of a sum below which another block would cost more than it saves."""


def ceil_div(a: int, b: int) -> int:
    """A / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class Tile:
    """What one block computes, rows × columns, and what one of its threads does."""

    rows: int
    columns: int
    thread_rows: int
    thread_columns: int

    @property
    def defines(self) -> dict[str, int]:
        """Macros of ``gemm.cuh``."""
        return {
            "TILE_M": self.rows,
            "TILE_N": self.columns,
            "THREAD_M": self.thread_rows,
            "THREAD_N": self.thread_columns,
        }

    @property
    def block(self) -> Extent:
        """Threads of a block."""
        per_thread = self.thread_rows * self.thread_columns
        return self.rows * self.columns // per_thread, 1, 1

    def grid(self, rows: int, columns: int, parts: int = 1) -> Extent:
        """Blocks of a product of rows × columns whose sum is cut into `parts`."""
        return ceil_div(rows, self.rows), ceil_div(columns, self.columns), parts

    def blocks(self, rows: int, columns: int) -> int:
        """Tiles of a product of rows × columns."""
        return ceil_div(rows, self.rows) * ceil_div(columns, self.columns)


NARROW = Tile(128, 16, 4, 4)
MEDIUM = Tile(128, 32, 8, 4)
SMALL = Tile(64, 64, 4, 4)
LARGE = Tile(128, 64, 8, 4)
TILES = (NARROW, MEDIUM, SMALL, LARGE)


def choose_tile(rows: int, columns: int) -> Tile:
    """The tile for a product of rows × columns: as wide as its columns, large if many fit."""
    if columns <= NARROW.columns:
        return NARROW
    if columns <= MEDIUM.columns:
        return MEDIUM
    return LARGE if LARGE.blocks(rows, columns) >= WANTED_BLOCKS else SMALL


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


def cut(terms: int, tiles: int) -> Parts:
    """Parts for a sum of at most `terms` terms in a product of so many tiles."""
    wanted = ceil_div(WANTED_BLOCKS, tiles)
    part = max(ceil_div(ceil_div(terms, wanted), DEPTH) * DEPTH, SMALLEST_PART)
    return Parts(ceil_div(terms, part), part)
