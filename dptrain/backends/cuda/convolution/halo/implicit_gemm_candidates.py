"""Enumerate the tile configurations of an implicit GEMM over halo tiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache, partial

from dptrain.backends.cuda.convolution.halo.halo_tiles import InputView
from dptrain.backends.cuda.convolution.halo.implicit_gemm_tiles import (
    MAX_COLUMNS,
    MMA_OCTETS,
    SLAB_PACKS,
    STRIP_COLUMNS,
    ImplicitGemmTile,
    PixelTile,
    lines_in_m,
    slab_packs,
)
from dptrain.backends.cuda.dense.gemm_tiles import ceil_div
from dptrain.backends.cuda.device.hardware import (
    ELEMENT_BYTES,
    VECTOR_BYTES,
    splits_in_shared_memory,
)
from dptrain.plan.limits import DeviceLimits

MIN_COLUMNS = 32
"""Pixel tiles with fewer columns are not tried, unless all have fewer."""

MAX_WASTE = 1.1
"""Largest ratio of computed columns to the fewest that any pixel tile needs."""

BLOCK_SHAPES = [
    (warp_groups, k_warp_groups, channel_chunks)
    for warp_groups in (1, 2, 3, 4)
    for k_warp_groups in (1, 2, 4)
    for channel_chunks in (1, 2, 4)
    if warp_groups * k_warp_groups <= 4
]
"""Blocks that compute one tile each."""

PERSISTENT_SHAPES = [
    (1, 1, channel_chunks, persistent_groups, weight_stages)
    for channel_chunks in (1, 2, 4)
    for persistent_groups in (4, 3, 2, 1)
    for weight_stages in (0, 9, 6, 3)
]
"""Persistent kernels. If estimates are equal, the first is selected: with more stages the warp
groups can drift further apart."""


def samples_of_rows(view: InputView) -> Iterator[int]:
    """Yield the numbers of samples above 1 that can alternate in a row: those that fill a strip."""
    if view.out_width < STRIP_COLUMNS and STRIP_COLUMNS % view.out_width == 0:
        yield STRIP_COLUMNS // view.out_width


def pixel_tiles(view: InputView, *, pooled: bool) -> Iterator[PixelTile]:
    """Yield the pixel tiles that an output can be divided into."""
    unit, in_m = 2 if pooled else 1, lines_in_m(view, pooled=pooled)
    height, width = view.out_height // unit * unit, view.out_width // unit * unit
    width *= view.row_samples
    step = unit // in_m or 1
    pitch = view.row_pitch
    for lines in range(step, min(ceil_div(height, in_m), MAX_COLUMNS // 8) + 1, step):
        yield PixelTile(8 * lines, lines, strip=True)
        if lines == 1 or (in_m == 1 and not pooled):
            yield PixelTile(ceil_div((lines - 1) * pitch + width, 8) * 8, lines, strip=False)
        elif in_m == 1 and pitch % 8 == 0:
            # Both lines of a pooling window belong to the same thread.
            yield PixelTile(lines * pitch, lines, strip=False)


@lru_cache(maxsize=64)
def implicit_gemm_candidates(
    view: InputView, precision: str, limits: DeviceLimits, *, pooled: bool = False,
    epilogue: int = 0,
) -> tuple[ImplicitGemmTile, ...]:  # fmt: skip
    """Return the feasible tile configurations of a convolution.

    A plan needs them several times for each layer, and each time takes a few tenths of a second.

    Args:
        view: the input.
        precision: ``tf32``, ``bf16``, or ``fp32`` (by 3xTF32).
        limits: of the GPU.
        pooled: whether the epilogue pools windows of 2 × 2 outputs.
        epilogue: fused layers that are undone while the input is read, ``EPILOGUE`` of
            ``epilogue.cuh``.
    """
    return tuple(_candidates(view, precision, limits, pooled=pooled, epilogue=epilogue))


def _candidates(
    view: InputView, precision: str, limits: DeviceLimits, *, pooled: bool, epilogue: int
) -> Iterator[ImplicitGemmTile]:
    """Yield the configurations that `implicit_gemm_candidates` returns."""
    tf32x3 = precision == "fp32"
    element_bytes = ELEMENT_BYTES["tf32" if tf32x3 else precision]
    shapes = [(*shape, 0, 0) for shape in BLOCK_SHAPES]
    # TMA cannot undo a rectifier alone, so such a kernel is not persistent. With 3xTF32, weights in
    # registers leave none for a persistent kernel.
    shapes += PERSISTENT_SHAPES if epilogue != 1 and not tf32x3 else []
    row_samples = (1,) if pooled or epilogue == 2 else (1, *samples_of_rows(view))
    packs = view.channels * element_bytes // VECTOR_BYTES
    for count_in_row, shape in itertools.product(row_samples, shapes):
        warp_groups, k_warp_groups, channel_chunks, persistent_groups, weight_stages = shape
        if packs % (channel_chunks * SLAB_PACKS[-1]):
            continue
        align = SLAB_PACKS[0] // slab_packs(packs // channel_chunks)
        aligned = replace(view, align=align, row_samples=count_in_row)
        tile_of = partial(
            ImplicitGemmTile, aligned, element_bytes, pooled, warp_groups=warp_groups,
            k_warp_groups=k_warp_groups, channel_chunks=channel_chunks,
            persistent_groups=persistent_groups, weight_stages=weight_stages, epilogue=epilogue,
            limits=limits, tf32x3=tf32x3,
            tf32x3_wgmma=splits_in_shared_memory(precision, limits),
        )  # fmt: skip
        pixel_tiles = efficient_pixel_tiles(aligned, pooled=pooled)
        if not (pixel_tiles and tile_of(pixel_tiles[0], 1).weights_fit):
            continue
        for pixel_tile in pixel_tiles:
            for count in range(1, MAX_COLUMNS // pixel_tile.columns + 1):
                tile = tile_of(pixel_tile, count)
                if tile.pixels_fit:
                    yield tile


@cache
def efficient_pixel_tiles(view: InputView, *, pooled: bool) -> tuple[PixelTile, ...]:
    """Return the pixel tiles with enough columns, of which few are computed in vain."""
    found = [tile for tile in pixel_tiles(view, pooled=pooled) if tile.columns // 8 in MMA_OCTETS]
    widest = max((tile.columns for tile in found), default=0)
    wide = [tile for tile in found if tile.columns >= min(MIN_COLUMNS, widest)]
    columns = {
        tile: ImplicitGemmTile(view, 2, pooled, tile, 1, 1).tiles_per_sample * tile.columns
        for tile in wide
    }
    return tuple(tile for tile in wide if columns[tile] <= MAX_WASTE * min(columns.values()))
