"""Which way a convolution over the pixels of windows is cut: estimates of cycles."""

from __future__ import annotations

import functools
import math

from dptrain.backends.cuda.slides import ROWS, TEAM, Slide, slides
from dptrain.backends.cuda.tiles import ceil_div
from dptrain.backends.cuda.windows import MULTIPROCESSORS, PIECE, SHARED_BYTES, View

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

MANY_PRODUCT, MANY_GIVE, MANY_FILL, MANY_UNDO = 0.46, 3.6, 1.82, 0.66
MANY_CHUNK, MANY_TILE = 446, 915
"""The same where there are many samples: of a step of a column, a byte of outputs, 16 bytes of a
window that comes as it is, or of one that is made of what was pooled; of a chunk and of a tile."""

EARLY_GIVE, EARLY_FILL, EARLY_FILL_MADE, EARLY_UNDO, RING = 0.9, 0.2, 0.13, 0.24, 1.23
EARLY_CHUNK, EARLY_TILE = 413, 1137
"""The same where blocks go from tile to tile; of 16 bytes of a window on their way to shared memory,
made of what was pooled or not; and times as long as products take where not all weights are held."""

@functools.cache
def choose_slide(
    view: View, precision: str, samples: int, *, pooled: bool = False, behind: int = 0,
    room: int = SHARED_BYTES,
) -> Slide | None:  # fmt: skip
    """The way that a product over the pixels of so many samples takes the least time with.

    Args:
        view, precision, pooled, behind: what `slides` is told.
        samples: at most.
        room: bytes of shared memory that a block may have.

    Returns:
        None where no window has room.
    """
    known = slides(view, precision, pooled=pooled, behind=behind)
    ways = [way for way in known if way.shared_bytes <= room]
    late = (way for way in ways if not way.early)
    found = min(late, key=lambda way: cycles(way, samples), default=None)
    early = [way for way in ways if way.early and _goes_on(way, samples)]
    best = [found] if found is not None else []
    return min([*best, *early], key=lambda way: cycles_of_many(way, samples), default=None)


def _goes_on(way: Slide, samples: int) -> bool:
    """Whether blocks go from tile to tile for long enough, and others work while one waits."""
    return way.together > 1 and rounds(way, samples) >= FEWEST_ROUNDS


def rounds(way: Slide, samples: int) -> float:
    """Tiles, one after the other, in the time that all multiprocessors take for them."""
    tiles = ceil_div(samples * way.each, way.teams * way.segments)
    tiles *= ceil_div(way.view.filters * way.tall, ROWS)
    return tiles / (MULTIPROCESSORS * way.together)


def cycles_of_many(way: Slide, samples: int) -> float:
    """An estimate for so many samples that blocks follow each other, or go from tile to tile.

    Fitted to 214 products of 2048 samples timed on an H200, of layers of solar, cifar, model2 and
    model-large: beside the fastest of all that were timed, those that it takes for the fastest take
    1.04 times as long in the geometric mean, 1.14 times at worst.
    """
    if way.early:
        return cycles_of_early(way, samples)
    columns = way.teams * way.segments * (way.segment.columns + INSTRUCTION)
    pieces, maps = way.chunks * way.planes * way.pixels, not way.undone
    cycles = MANY_PRODUCT * columns * way.steps
    cycles += MANY_GIVE * columns * way.size / (4 if way.pooled else 1)
    cycles += (MANY_FILL if maps else MANY_UNDO) * pieces
    alone = MANY_CHUNK * way.chunks + MANY_TILE
    full = rounds(way, samples)
    # Blocks that follow each other begin when one is done: half a round is left over on average.
    full = full + 0.5 if full > 3.0 else float(math.ceil(full))
    return full * (way.together * cycles + alone)


def cycles_of_early(way: Slide, samples: int) -> float:
    """The same where blocks go from tile to tile."""
    columns, instructions = way.segment.columns, way.segments * way.steps
    pieces = way.chunks * way.planes * way.pixels
    # Tensor cores multiply half a column a cycle; shared memory gives 128 bytes.
    reads = instructions * (ROWS * 2 * PIECE + columns * 2 * PIECE) / 128
    fills = pieces * (EARLY_FILL_MADE if way.undone else EARLY_FILL)
    cycles = max(instructions * columns / 2, reads + fills) * (RING if way.ring else 1.0)
    cycles += EARLY_GIVE * way.segments * columns * way.size / (4 if way.pooled else 1)
    cycles += EARLY_UNDO * pieces if way.undone else 0.0
    alone = EARLY_CHUNK * way.chunks + EARLY_TILE
    return math.ceil(rounds(way, samples)) * (way.together * cycles + alone)


def cycles(way: Slide, samples: int) -> float:
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
