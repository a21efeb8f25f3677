"""Which way a convolution over the pixels of windows is cut: estimates of cycles."""

from __future__ import annotations

import functools
import math

from dptrain.backends.cuda.gemm_tiles import ceil_div
from dptrain.backends.cuda.halo_tiles import MULTIPROCESSORS, PIECE, SHARED_BYTES, View
from dptrain.backends.cuda.implicit_gemm_candidates import implicit_gemm_candidates
from dptrain.backends.cuda.implicit_gemm_tiles import ROWS, SLABS, TEAM, ImplicitGemmTile

PRODUCT, WEIGHTS, FILL, GIVE = 0.66, 0.18, 0.72, 0.54
"""Cycles of a multiprocessor for a step of a column, 16 bytes of weights, 16 bytes of a window and
a byte of a column of outputs. These and what follows fit products that were timed on an H200."""

INSTRUCTION = 4
"""Columns that would take as long as an instruction takes besides its own."""

CHUNK, TILE, STEP, LONELY = 810, 1030, 256, 2.0
"""Cycles that a block waits for a window, at the beginning and the end, and in a step that no other
covers; and how many times as long it takes where it is the only one of a multiprocessor."""

FEWEST_ROUNDS = 5
"""Tiles of a block from which on it may go from one to the next."""

MANY_PRODUCT, MANY_FILL, MANY_UNDO = 0.61, 0.44, 0.48
MANY_CHUNK, MANY_TILE = 1540, 3110
"""The same where there are many samples: of a step of a column, of 16 bytes of a window that comes
by bulk copies, or is made of what was pooled; of a chunk and of a tile."""

EARLY_INSTRUCTION, EARLY_FILL, EARLY_UNDO, SMALL_SLAB = 12, 0.17, 0.22, 0.4
EARLY_GIVE, EARLY_WAIT, EARLY_CHUNK, EARLY_TILE = 1.1, 0.69, 340, 1800
"""The same where blocks go from tile to tile: columns of an instruction besides its own; cycles of
shared memory for 16 bytes of a window, brought or made, and how much more with half a slab; of a
byte of outputs; and what a group waits for 16 bytes to be made, a chunk and a tile."""

RING = 1.2
"""Times as long as it takes where weights come again and again."""


@functools.cache
def select_implicit_gemm_tile(
    view: View, precision: str, samples: int, *, pooled: bool = False, behind: int = 0,
    room: int = SHARED_BYTES,
) -> ImplicitGemmTile | None:  # fmt: skip
    """The way that a product over the pixels of so many samples takes the least time with.

    Args:
        view, precision, pooled, behind: what `slides` is told.
        samples: at most.
        room: bytes of shared memory that a block may have.

    Returns:
        None where no window has room.
    """
    known = implicit_gemm_candidates(view, precision, pooled=pooled, behind=behind)
    ways = [way for way in known if way.shared_bytes <= room]
    late = (way for way in ways if not way.early)
    found = min(late, key=lambda way: cycles(way, samples), default=None)
    early = [way for way in ways if way.early and _goes_on(way, samples)]
    best = [found] if found is not None else []
    return min([*best, *early], key=lambda way: cycles_of_many(way, samples), default=None)


def _goes_on(way: ImplicitGemmTile, samples: int) -> bool:
    """Whether blocks go from tile to tile for long enough, and others work while one waits."""
    return way.together > 1 and rounds(way, samples) >= FEWEST_ROUNDS


def rounds(way: ImplicitGemmTile, samples: int) -> float:
    """Tiles, one after the other, in the time that all multiprocessors take for them."""
    tiles = ceil_div(samples * way.each, way.teams * way.segments)
    tiles *= ceil_div(way.view.filters * way.tall, ROWS)
    return tiles / (MULTIPROCESSORS * way.together)


def cycles_of_many(way: ImplicitGemmTile, samples: int) -> float:
    """An estimate for so many samples that blocks follow each other, or go from tile to tile.

    Fitted to 1491 products of 2048 samples timed on an H200, of layers of solar, cifar and
    model-large, 1790 cycles a microsecond: beside the fastest of all that were timed, those that it
    takes for the fastest take 1.02 times as long in the geometric mean, 1.07 times at worst.
    """
    if way.early:
        return _cycles_of_early(way, samples)
    columns = way.teams * way.segments * (way.segment.columns + INSTRUCTION)
    pieces = way.chunks * way.planes * way.pixels
    cycles = MANY_PRODUCT * columns * way.steps
    cycles += (MANY_UNDO if way.undone else MANY_FILL) * pieces
    alone = MANY_CHUNK * way.chunks + MANY_TILE
    full = rounds(way, samples)
    # Blocks that follow each other begin when one is done: half a round is left over on average.
    full = full + 0.5 if full > 3.0 else float(math.ceil(full))
    return full * (way.together * cycles + alone)


def _cycles_of_early(way: ImplicitGemmTile, samples: int) -> float:
    columns, instructions = way.segment.columns, way.segments * way.steps
    pieces = way.chunks * way.planes * way.pixels
    # Tensor cores multiply half a column a cycle; shared memory gives 128 bytes.
    product = instructions * (columns + EARLY_INSTRUCTION) / 2
    reads = instructions * (ROWS + columns) * 2 * PIECE / 128
    fills = pieces * (EARLY_UNDO if way.undone else EARLY_FILL)
    fills *= 1 + SMALL_SLAB * (SLABS[0] / way.slab - 1)
    cycles = max(product, reads + fills)
    cycles += EARLY_GIVE * way.segments * columns * way.size / (4 if way.pooled else 1)
    alone: float = EARLY_CHUNK * way.chunks + EARLY_TILE
    alone += EARLY_WAIT * pieces if way.undone else 0.0
    together = way.together * cycles * (RING if way.ring else 1.0)
    return math.ceil(rounds(way, samples)) * (together + alone)


def cycles(way: ImplicitGemmTile, samples: int) -> float:
    """An estimate of what a product over the pixels of so many samples takes.

    Blocks that a multiprocessor runs at a time begin together and so do the same at the same time:
    what they do adds up.
    """
    columns = way.teams * way.segments * (way.segment.columns + INSTRUCTION)
    product = PRODUCT * columns * way.steps + WEIGHTS * way.teams * TEAM * way.steps
    window = FILL * way.chunks * way.planes * way.pixels
    sums = GIVE * columns * way.size / (4 if way.pooled else 1)
    waiting: float = CHUNK * way.chunks + TILE
    alone = window + sums + waiting + max(product, STEP * way.steps / way.shares)
    blocks = math.prod(way.grid(samples * way.each, way.view.filters)) / MULTIPROCESSORS
    together = min(max(blocks, 1.0), way.blocks)
    # A block that is alone has nobody who works while it waits.
    waiting *= LONELY if way.blocks == 1 and blocks > 1.0 else 1.0
    full = blocks / way.blocks
    # On average half a round is left over where there are many.
    rounds = float(math.ceil(full)) if full <= 3.0 else full + 0.5
    return max(rounds, 1.0) * max(alone, together * (product + window + sums) + waiting)
