"""Sizes and memory of a Winograd convolution.

Outputs are divided into tiles, and tiles into *blocks* of a few rows of tiles, also of several
samples. All tiles of a block are transformed and multiplied together.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from dptrain.backends.numba.convolution.microkernels import ROW_GROUP
from dptrain.backends.numba.convolution.winograd_transforms import INTEGERS, MATRICES, SIDES
from dptrain.backends.numba.vector import LINE, compiled_registers

CHANNELS_PER_ITEM = 16
"""Input channels that one item of the kernels that transform weights processes."""
WIDEST = 64
"""Tiles of a row that are processed together; wider rows are divided into panels."""
TILE_HEIGHT = 12
"""Rows of the register tiles of the matrix products."""
LARGE_BLOCK = 144
"""Tiles of a block of a weight gradient whose sums exceed the caches. Each block reads and writes
all of them: with 512 → 512 channels on 7 × 7 maps, 48 tiles take 1.5 times as long (AMD EPYC,
AVX-512, one and two threads)."""
IN_PLACE_TILES = 16, 12
"""About how many tiles a block has if products replace the transformed inputs, with one and with
two vectors of channels: V, 37 and 55 KB, mostly stays in an L1 cache of 48 KB. A row of more
vectors does not fit a register tile."""


class WinogradGeometry(NamedTuple):
    """Sizes of a Winograd convolution from x (N, H, W, C) to y (N, Ho, Wo, K).

    Attributes:
        height: rows of x.
        width: columns of x.
        c: channels of x.
        h_out: rows of y.
        w_out: columns of y.
        k: channels of y.
        pad_top: rows of zeros above x.
        pad_left: columns of zeros to the left of x.
        taps: rows and columns of a filter, in a type of `INTEGERS`.
        tile_side: rows and columns of an output tile.
        padded_width: columns of padded x.
        c_vectors: C rounded up to whole vectors.
        k_vectors: K rounded up to whole vectors.
        tiles_down: rows of tiles of a sample.
        tiles_across: tiles in a row.
        block_rows: rows of tiles of a block.
        panels: parts of a row of tiles, each of which is processed alone.
        parts: parts of the filters, which are separate items of the forward pass.
        v_stride: distance of the matrices of V.
        m_stride: distance of the matrices of M.
        u_stride: distance of the matrices of U, and of those of the sums of the weight gradient.
        ramp_size: number of integers 0, 1, 2, … in scratch.
        v_offset: start of V (transformed inputs) in scratch.
        m_offset: start of M (products, or transformed gradients) in scratch, which is that of V if
            products replace the inputs.
        padded_offset: start of rows of padded x in scratch.
        band_offset: start of rows of dz or, before pooling, of y in scratch.
        sums_offset: start of the sums of the transformed weight gradient in scratch.
        tile_offset: start of one filter in scratch, if K does not fill vectors.
        bias_offset: start of the bias, or of its gradient, in scratch.
        rest_offset: start of sums of K that are not used.
        ramp_offset: start of 0, 1, 2, … in scratch.
        scratch_size: float32 elements of scratch that a thread needs.
        units: see `planning.KernelPlan`.
    """

    height: int
    width: int
    c: int
    h_out: int
    w_out: int
    k: int
    pad_top: int
    pad_left: int
    taps: np.signedinteger[Any]
    tile_side: int
    padded_width: int
    c_vectors: int
    k_vectors: int
    tiles_down: int
    tiles_across: int
    block_rows: int
    panels: int
    parts: int
    v_stride: int
    m_stride: int
    u_stride: int
    ramp_size: int
    v_offset: int
    m_offset: int
    padded_offset: int
    band_offset: int
    sums_offset: int
    tile_offset: int
    bias_offset: int
    rest_offset: int
    ramp_offset: int
    scratch_size: int
    units: int = 1


class Tiles(NamedTuple):
    """Tiles of some rows of a sample.

    Attributes:
        n: the sample.
        row: the first row of tiles.
        rows: number of rows.
        first, num: number of the first tile, counted from that row, and how many.
        at: position of the first tile in V and M.
    """

    n: int
    row: int
    rows: int
    first: int
    num: int
    at: int


def make_geometry(
    maps: tuple[int, int, int],
    out: tuple[int, int, int],
    pads: tuple[int, int],
    taps: int = 3,
    *,
    pool_height: int = 0,
    gradient: bool = False,
    large_blocks: bool = False,
    parts: int = 1,
) -> WinogradGeometry:
    """Return the geometry of a convolution from `maps` (H, W, C) to `out` (Ho, Wo, K).

    For the input gradient, `maps` are those of dy and `out` those of dx. No result depends on the
    sizes that are chosen here, except for the order of the sums of the weight gradient.

    Args:
        maps, out: as above.
        pads: rows of zeros above and columns of zeros to the left of the maps.
        taps: rows and columns of the filters.
        pool_height: height of the windows of fused pooling; 0 without pooling.
        gradient: True for the weight gradient.
        large_blocks: True for blocks of about `LARGE_BLOCK` tiles.
        parts: see `WinogradGeometry`.
    """
    (_, width, c), (h_out, w_out, k) = maps, out
    side, vector = SIDES[taps], compiled_registers().width
    down, across = (-(-n // side) for n in (h_out, w_out))
    c_vectors, k_vectors = (-(-n // vector) * vector for n in (c, k))
    vectors = c_vectors // vector
    in_place = not gradient and c_vectors == k_vectors and vectors <= len(IN_PLACE_TILES)
    if in_place:
        rows = block_rows(across, IN_PLACE_TILES[vectors - 1], ROW_GROUP)
    else:
        tiles = LARGE_BLOCK if large_blocks else _tiles_of_a_block(c, k, gradient)
        rows = block_rows(across, tiles)
    panels = -(-across // WIDEST)
    tiles = -(-rows * -(-across // panels) // ROW_GROUP) * ROW_GROUP
    padded_width = across * side + taps - 1
    height = min(rows, down) * side
    # One additional cache line; otherwise all matrices would map to the same sets of the cache.
    v_stride, m_stride = tiles * c_vectors + LINE, tiles * k_vectors + LINE
    u_stride = c * k_vectors + LINE
    ramp_size = max(c, k, tiles, 256)
    regions = (
        MATRICES * v_stride,
        0 if in_place else MATRICES * m_stride,
        (height + taps - 1) * padded_width * c + c_vectors,
        (height + max(pool_height, taps - 1)) * max(width * c, w_out * k) if pool_height else 0,
        MATRICES * u_stride if gradient else 0,
        taps**2 * max(c_vectors, k_vectors),
        k_vectors,
        max(c_vectors, k_vectors),
        ramp_size,
    )
    first, *offsets = accumulate((-(-size // LINE) * LINE for size in regions), initial=0)
    if in_place:
        offsets[0] = first
    return WinogradGeometry(
        *maps, *out, *pads, INTEGERS[taps](taps), side, padded_width, c_vectors, k_vectors,
        down, across, rows, panels, parts, v_stride, m_stride, u_stride, ramp_size, first, *offsets,
    )  # fmt: skip


def _tiles_of_a_block(c: int, k: int, gradient: bool) -> int:
    """Return about how many tiles a block should have.

    With few channels, more tiles fill the register tiles better. With 96 to 256 channels in total,
    V and M of half as many tiles leave more of the L2 cache to the weights (64 → 64, 32 × 32: 3 to
    7% less time); the weight gradient sums over tiles and prefers more of them.
    """
    if c + k <= 48:
        return 96
    return 24 if 96 <= c + k <= 256 and not gradient else 48


def block_rows(across: int, tiles: int, height: int = TILE_HEIGHT) -> int:
    """Return the rows of a block with about `tiles` tiles that fill register tiles of `height` rows
    best.

    With 48 tiles, and with 96 of few channels, data between two transforms stays in an L2 cache of
    1 MB.
    """
    lowest, highest = max(1, 3 * tiles // 4 // across), max(1, 5 * tiles // 4 // across)

    def filled(rows: int) -> tuple[float, int]:
        count = rows * across
        return count / (-(-count // height) * height), -abs(count - tiles)

    return max(range(lowest, highest + 1), key=filled)
