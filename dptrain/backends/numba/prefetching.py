"""Prefetching of maps while other data is computed.

Convolutions load, transform, multiply and store one block of rows after another. Without prefetches
they would compute nothing while they wait for the memory, and read nothing while they compute. So
they prefetch the next block in *shares*, one for each step of a loop: a processor core has few
outstanding reads, and more prefetches at a time than these would wait.

A *part* of an array is a tuple (array, first, stop) of a contiguous array and the range of its
elements, which may be empty; None is no part.
"""

from __future__ import annotations

from dptrain.backends.numba.vector import LINE, prefetch, prefetch_for_writing
from dptrain.native.jit import inlined


@inlined
def _share(first, stop, share, shares):
    count = max(0, stop - first)
    return range(first + count * share // shares, first + count * (share + 1) // shares, LINE)


@inlined
def prefetch_share(part, share, shares):
    """Prefetch one of the shares of a part that will be read, into the L2 cache."""
    if part is not None:
        for i in _share(part[1], part[2], share, shares):
            prefetch(part[0], i)


@inlined
def prefetch_share_for_writing(part, share, shares):
    """Prefetch one of the shares of a part that will be written."""
    if part is not None:
        for i in _share(part[1], part[2], share, shares):
            prefetch_for_writing(part[0], i)


@inlined
def tile_rows_part(maps, shape, tiles, rows, shifts):
    """Return the part of maps that some rows of tiles cover.

    Args:
        maps: array of samples.
        shape: rows of a sample, and elements of a row.
        tiles: rows of tiles of a sample, and rows of maps from one row of tiles to the next.
        rows: (first, stop) of the rows of tiles. Those of all samples are numbered consecutively.
        shifts: how many rows of maps later the part begins and ends, within its samples.
    """
    height, pitch = shape
    down, side = tiles
    first = rows[0] // down * height + _row_of_map(rows[0] % down, height, side, shifts[0])
    stop = rows[1] // down * height + _row_of_map(rows[1] % down, height, side, shifts[1])
    return maps, first * pitch, stop * pitch


@inlined
def _row_of_map(row, height, side, shift):
    """Return the row of a map at which a row of tiles begins; 0 for the first one."""
    return max(0, min(height, row * side + shift)) if row > 0 else 0
