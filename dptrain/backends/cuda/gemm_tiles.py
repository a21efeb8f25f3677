"""How a matrix product is cut into tiles and parts; see ``kernels/gemm.cuh``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dptrain.backends.cuda.device import Extent

WARP = 32
"""Threads of a warp."""

WANTED_BLOCKS = 264
"""Blocks that keep a large GPU busy: two on each of 132 multiprocessors."""

WANTED_THREADS = 132 * 512
"""Threads that do: sixteen warps on each multiprocessor hide each other's waiting."""

MOST_THREADS = 512
"""Of a block; more would leave too few registers to each."""

GROUPS = (1, 2, 4)
"""Of threads, that may share a tile."""

SMALLEST_PARTS = 128, 256
"""Least terms of a part of a sum; fewer would cost more than they save."""

WASTE = 0.25
"""Power of what a tile covers over what is needed, by which it is slower where threads are few."""

SECOND_PASS, ADDING = 3e5, 1.5
"""What adding parts costs, in the estimate's unit (some 3·10⁵ to the microsecond): as such, and for
each element of a part."""


def ceil_div(a: int, b: int) -> int:
    """A / b, rounded up."""
    return -(-a // b)


def _slice_bytes(width: int, words: int) -> int:
    """Of a padded slice, whichever way it lies: `words` of each row, or so many words of rows."""
    return 4 * max(width * (words + 4), words * (width + 8))


class BlockTile(Protocol):
    """What one block of a product computes, as the stage that launches it sees it."""

    @property
    def defines(self) -> Mapping[str, int]:
        """Macros of the kernel."""

    @property
    def block(self) -> Extent:
        """Threads of a block."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""

    def grid(self, rows: int, columns: int, parts: int = 1) -> Extent:
        """Blocks of a product of rows × columns whose sum is cut into `parts`."""


@dataclass(frozen=True)
class GemmTile:
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
        words = {"TILE_K_WORDS": self.words} if self.tensor else {}
        return {
            **words,
            "TILE_M": self.rows,
            "TILE_N": self.columns,
            f"{worker}_M": self.own_rows,
            f"{worker}_N": self.own_columns,
            "PREFETCH_STEPS": self.ahead,
            "K_GROUPS": self.groups,
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

    @property
    def depth(self) -> int:
        """Terms that a group takes at a time, or half of them under bf16."""
        return self.words if self.tensor else 16

    @property
    def cost(self) -> float:
        """Instructions of a step of a block, by warps: what a step takes where nothing waits.

        Runs of 16 bytes on their way to shared memory, some 18 instructions each for four to a row;
        multiplications, of which one on tensor cores is worth two or so; reading their operands.
        """
        work, size = self.rows * self.columns, self.own_rows * self.own_columns
        load = 2.25 * (self.rows + self.columns)
        read = work * (self.own_rows + self.own_columns) / size
        step = load + work / 16 + read / 4 if self.tensor else load + work / 2 + read / 8
        return step * self.depth / 16

    def __str__(self) -> str:
        own = f"{self.own_rows}x{self.own_columns}"
        return f"{self.rows}x{self.columns}/{own}/{self.ahead}x{self.groups}x{self.words}"


THREAD_TILES = (
    GemmTile(128, 16, 4, 4),
    GemmTile(128, 32, 8, 4),
    GemmTile(64, 64, 4, 4),
    GemmTile(128, 64, 8, 4),
)
"""For float32."""

TENSOR_TILES = (
    GemmTile(32, 16, 32, 16, tensor=True, ahead=2),
    GemmTile(64, 16, 32, 16, tensor=True, ahead=2),
    GemmTile(128, 16, 32, 16, tensor=True),
    GemmTile(32, 32, 32, 16, tensor=True, ahead=2),
    GemmTile(64, 32, 32, 16, tensor=True, ahead=2),
    GemmTile(128, 32, 32, 32, tensor=True),
    GemmTile(32, 64, 32, 16, tensor=True, ahead=2),
    GemmTile(64, 64, 32, 32, tensor=True, ahead=2),
    GemmTile(128, 64, 32, 32, tensor=True, words=32),
    GemmTile(128, 128, 64, 32, tensor=True),
)
"""For tf32 and bf16. Steps ahead and length of slices are those that were mostly the fastest on an
H200."""


def tiles(precision: str) -> Sequence[GemmTile]:
    """Those that compute products in `precision`."""
    return THREAD_TILES if precision == "fp32" else TENSOR_TILES


@dataclass(frozen=True)
class SplitK:
    """A long sum, cut so that enough blocks work on it.

    Attributes:
        count: largest number of parts.
        terms: of each part but the last.
    """

    count: int
    terms: int

    def used(self, terms: int) -> int:
        """SplitK that a sum of so many terms has; a sum of none still has one, which is 0."""
        return max(ceil_div(terms, self.terms), 1)


def split_terms(terms: int, threads: int, least: int = SMALLEST_PARTS[0]) -> SplitK:
    """SplitK of at least `least` terms for a sum that so many threads compute together.

    No more than run at a time: a last few that wait for the others cost as much as all.
    """
    wanted = max(WANTED_THREADS // threads, 1)
    part = max(ceil_div(ceil_div(terms, wanted), DEPTH) * DEPTH, least)
    return SplitK(ceil_div(terms, part), part)


@dataclass(frozen=True)
class GemmConfig:
    """How a product is computed: by which tile, its sum in how many parts."""

    tile: BlockTile
    parts: SplitK


def select_gemm_config(
    precision: str, rows: int, columns: int, terms: int, *, split: bool = False
) -> GemmConfig:
    """The tiling that a product takes the least time with, by an estimate.

    Large tiles read less for each multiplication; but small products fill a GPU only with small
    ones, with groups of threads that share them and, if `split`, with parts of the sum; and what
    tiles cover beyond the product is computed in vain. The estimate counts instructions, with
    `WANTED_THREADS` running at a time. Beside the fastest of all tiles that were timed on an H200
    its choice takes 1.09 times as long in the geometric mean over products with 32 samples, and was
    1.8 times as long at worst with 2048 (the gradient of the weights of cifar's first convolution,
    bf16).
    """

    def estimate(tile: GemmTile, parts: SplitK) -> tuple[float, GemmConfig]:
        blocks = tile.blocks(rows, columns)
        covered = blocks * tile.rows * tile.columns / (rows * columns)
        blocks *= parts.count
        depth = tile.depth * (2 if precision == "bf16" else 1)
        steps = ceil_div(min(parts.terms, terms), depth)
        threads = blocks * tile.block[0]
        groups = max(
            n for n in GROUPS
            if n == 1 or (
                threads * n <= WANTED_THREADS and steps >= n
                and tile.block[0] * n <= MOST_THREADS
            )
        )  # fmt: skip
        filled = threads * groups / WANTED_THREADS
        # On average half a round of blocks is left over.
        waiting = max(1.0, filled + 0.5 if filled > 1.0 else 1.0) / filled
        time = blocks * tile.cost * (steps + 2 * groups) * waiting
        if filled < 1.0:
            time *= covered**WASTE
        if parts.count > 1:
            time += SECOND_PASS + ADDING * parts.count * rows * columns
        return time, GemmConfig(replace(tile, groups=groups), parts)

    def ways(tile: GemmTile) -> Iterator[SplitK]:
        yield SplitK(1, max(terms, 1))
        if split:
            threads = tile.blocks(rows, columns) * tile.block[0]
            yield from (split_terms(terms, threads, least) for least in SMALLEST_PARTS)

    estimates = (estimate(tile, parts) for tile in tiles(precision) for parts in ways(tile))
    return min(estimates, key=lambda pair: pair[0])[1]


DEPTH = 64
"""Terms that a group of threads takes at a time, at most: what `TILE_K` divides."""


def step(length: int, itemsize: int) -> int:
    """Elements of rows of this length that are read at once, of 16 bytes at the most."""
    return math.gcd(length, 16 // itemsize)
