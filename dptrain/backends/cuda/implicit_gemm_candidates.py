"""All ways that a convolution over the pixels of windows may be cut in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from dptrain.backends.cuda.gemm_tiles import ceil_div
from dptrain.backends.cuda.halo_tiles import PIECE, SIZES, View
from dptrain.backends.cuda.implicit_gemm_tiles import (
    EIGHTS,
    MOST_COLUMNS,
    ROWS,
    SLABS,
    ImplicitGemmTile,
    Segment,
    slab,
)

FEWEST_COLUMNS, WASTE = 32, 1.1
"""Of a segment that is worth trying, and times the fewest columns that it may take for a map."""


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


def implicit_gemm_candidates(
    view: View, precision: str, *, pooled: bool = False, behind: int = 0
) -> Iterator[ImplicitGemmTile]:
    """Ways to compute one product over pixels.

    Args:
        view: of what is read.
        precision: of the product.
        pooled: whether windows of two by two outputs are.
        behind: what is undone as pixels are read, `EPILOGUE` of ``epilogue.cuh``.
    """
    size, cuts = SIZES[precision], [(*cut, 0, 0) for cut in CUTS]
    # Where a rectifier alone follows, kernels have no way of asking early.
    cuts += HOLDINGS if behind != 1 else []
    for teams, shares, chunks, holders, ring in cuts:
        runs = view.channels * size // PIECE
        if runs % (chunks * SLABS[-1]):
            continue
        aligned = replace(view, align=SLABS[0] // slab(runs // chunks))
        for segment in good_segments(aligned, pooled=pooled):
            for count in range(1, MOST_COLUMNS // segment.columns + 1):
                way = ImplicitGemmTile(
                    aligned, size, pooled, segment, count, teams, shares, chunks, holders, ring,
                    behind,
                )  # fmt: skip
                if way.possible:
                    yield way


@cache
def good_segments(view: View, *, pooled: bool) -> tuple[Segment, ...]:
    """Those of enough columns, few of which are computed in vain."""
    found = [s for s in segments(view, pooled=pooled) if s.columns // 8 in EIGHTS]
    widest = max((s.columns for s in found), default=0)
    wide = [s for s in found if s.columns >= min(FEWEST_COLUMNS, widest)]
    columns = {s: ImplicitGemmTile(view, 2, pooled, s, 1, 1).each * s.columns for s in wide}
    return tuple(s for s in wide if columns[s] <= WASTE * min(columns.values()))


CUTS = [
    (teams, shares, chunks)
    for teams in (1, 2, 3, 4)
    for shares in (1, 2, 4)
    for chunks in (1, 2, 4)
    if teams * shares <= 4
]


HOLDINGS = [
    (1, 1, chunks, holders, ring)
    for chunks in (1, 2, 4)
    for holders in (4, 3, 2, 1)
    for ring in (0, 9, 6, 3)
]
"""The same where blocks go from tile to tile: how many have weights, and how many stages of them.

Of those that are estimated to be as fast the first is taken: with many stages groups may be far
apart."""
