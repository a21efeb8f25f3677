"""Cost model that selects the tile configuration of an implicit GEMM over halo tiles.

All costs are cycles of a multiprocessor, fitted to products that were timed on an H200 (CUDA 13,
2026-11, 1790 cycles per microsecond).
"""

from __future__ import annotations

import functools
import math

from dptrain.backends.cuda.convolution.halo.halo_tiles import CHANNEL_MULTIPLE, InputView
from dptrain.backends.cuda.convolution.halo.implicit_gemm_candidates import implicit_gemm_candidates
from dptrain.backends.cuda.convolution.halo.implicit_gemm_tiles import (
    SLAB_PACKS,
    TILE_M,
    ImplicitGemmTile,
)
from dptrain.backends.cuda.dense.gemm_tiles import ceil_div
from dptrain.backends.cuda.device.hardware import CYCLES_PER_US, VECTOR_BYTES, WARP_GROUP_SIZE
from dptrain.plan.limits import DeviceLimits

# One wave of blocks or a few; see `one_wave_cycles`.
MULTIPLY, LOAD_WEIGHTS, LOAD_HALO, STORE = 0.66, 0.18, 0.72, 0.54
"""Per column of a step, per 16 bytes of weights, per 16 bytes of the halo tile and per byte of an
output column."""

INSTRUCTION_COLUMNS = 4
"""Fixed cost of an instruction, in columns."""

LOAD_ELEMENTS = 8.0
"""Additional cost per 16 bytes of a halo tile whose pixels have fewer bytes in memory, so that
elements are loaded one by one (H100; first layers of 1 and 3 channels)."""

LOAD_FOLDED = {4: 1.4, 2: 0.6}
"""Additional cycles per 16 bytes of a folded halo tile of many channels, which threads load and, in
tf32, round: by bytes of an element. Ten forward products of ResNet-50 with stride 2 and 64 samples
took 1.0 to 1.8 cycles longer than estimated without it in tf32, and 0 to 0.95 in bf16 (H100)."""

CHUNK_LATENCY, TILE_LATENCY, STEP_LATENCY = 810, 1030, 256
"""Latency per chunk of channels, at the start and end of a tile, and of a step that nothing else
hides."""

SINGLE_BLOCK_SLOWDOWN = 2.0
"""Factor of the latencies if only one block fits on a multiprocessor."""

# Many waves of blocks; see `steady_cycles`.
STEADY_MULTIPLY, STEADY_LOAD_HALO, STEADY_UNPOOL = 0.61, 0.44, 0.48
STEADY_CHUNK_LATENCY, STEADY_TILE_LATENCY = 1540, 3110
"""Per column of a step, per 16 bytes of a halo tile that TMA loads or that is unpooled, per chunk
and per tile."""

# Persistent kernels; see `_persistent_cycles`.
MIN_PERSISTENT_TILES = 5
"""Tiles per warp group from which a kernel can be persistent."""

PERSISTENT_INSTRUCTION_COLUMNS = 12
PERSISTENT_LOAD_HALO, PERSISTENT_UNPOOL, SMALL_SLAB = 0.17, 0.22, 0.4
PERSISTENT_STORE, UNPOOL_LATENCY, PERSISTENT_CHUNK, PERSISTENT_TILE = 1.1, 0.69, 340, 1800
"""Fixed cost of an instruction in columns; shared-memory cycles per 16 bytes of a halo tile, loaded
or unpooled, and the relative increase for a slab of half the size; per byte of outputs; latency per
16 bytes to unpool, per chunk and per tile."""

TF32X3_MULTIPLY = 6.3
"""Factor of the time of products with 3xTF32 by ``mma.sync``: three products and splitting. Fitted
to 24 products of a VGG-like network and cifar, batch sizes 64 and 256 (H100)."""

TF32X3_STEP_COLUMNS = 1
"""`INSTRUCTION_COLUMNS` with 3xTF32 by ``mma.sync``, whose instructions have eight columns for any
pixel tile: four pixel tiles took 0.95 to 1.04 of the time of two of twice the size (as below)."""

TF32X3_SINGLE_BLOCK = 1.05
"""Factor with 3xTF32 by ``mma.sync`` if only one block fits on a multiprocessor: two blocks of one
warp group took 0.91 to 1.0 of the time of one block of two (H100, 14 pairs of tiles of a VGG-like
network, 256 samples)."""

SPLIT_MULTIPLY, PROMOTE = 3.0, 0.5
"""The same with ``wgmma``: three products, and the promotion of sums, divided by the warp groups of
the multiprocessor, which hide it. Fitted to the same products, which took 0.8 to 1.4 times as long
as estimated."""

HALO_LAUNCH_US = 1.5
"""Microseconds that kernels take in addition to their estimated cycles."""

FEW_WAVES = 3.0
"""Waves up to which `one_wave_cycles` is the better estimate of the time."""

WEIGHT_RING_SLOWDOWN = 1.2
"""Factor if weights are reloaded through a ring buffer."""


@functools.cache
def rank_implicit_gemm_tiles(
    view: InputView, precision: str, samples: int, limits: DeviceLimits, *,
    pooled: bool = False, epilogue: int = 0,
) -> tuple[tuple[float, ImplicitGemmTile], ...]:  # fmt: skip
    """Return the tile configurations with their estimated times in µs.

    `one_wave_cycles` compares the configurations that are not persistent with each other, and
    `steady_cycles` the best of them with the persistent ones. The time of the fastest is that by
    the formula for its number of waves.

    Args:
        view, precision, limits, pooled, epilogue: as for `implicit_gemm_candidates`.
        samples: largest number of samples.
    """
    candidates = implicit_gemm_candidates(view, precision, limits, pooled=pooled, epilogue=epilogue)
    plain = [(one_wave_cycles(tile, samples), tile) for tile in candidates if not tile.persistent]
    found = [
        (steady_cycles(tile, samples), tile)
        for tile in candidates if tile.persistent and _can_be_persistent(tile, samples)
    ]  # fmt: skip
    if plain:
        least, best = min(plain, key=lambda pair: pair[0])
        scale = steady_cycles(best, samples) / least
        # The best comes first, so that it is selected if estimates are equal.
        others = [(cycles * scale, tile) for cycles, tile in plain if tile is not best]
        found = [(least * scale, best), *others, *found]
    if not found:
        return ()
    lowest, fastest = min(found, key=lambda pair: pair[0])
    factor = (HALO_LAUNCH_US + estimated_cycles(fastest, samples) / CYCLES_PER_US) / lowest
    return tuple((cycles * factor, tile) for cycles, tile in found)


def _can_be_persistent(tile: ImplicitGemmTile, samples: int) -> bool:
    """Return whether there are enough tiles, and other warp groups hide the latency of one."""
    return tile.tiles_in_flight > 1 and waves(tile, samples) >= MIN_PERSISTENT_TILES


def waves(tile: ImplicitGemmTile, samples: int) -> float:
    """Return the tiles divided by the tiles that the GPU works on at the same time."""
    tiles = ceil_div(tile.tiles(samples), tile.warp_groups * tile.pixel_tiles)
    tiles *= ceil_div(tile.view.filters * tile.lines_in_m, TILE_M)
    return tiles / (tile.limits.multiprocessors * tile.tiles_in_flight)


def estimated_cycles(tile: ImplicitGemmTile, samples: int) -> float:
    """Return the estimated cycles by the formula for the number of waves."""
    few = not tile.persistent and waves(tile, samples) <= FEW_WAVES
    return one_wave_cycles(tile, samples) if few else steady_cycles(tile, samples)


def steady_cycles(tile: ImplicitGemmTile, samples: int) -> float:
    """Return the estimated cycles of a product with many waves, or of a persistent kernel.

    Fitted to 1491 products of 2048 samples (solar, cifar and model-large). The selected
    configurations took 1.02 times as long as the fastest (geometric mean), at worst 1.07 times.
    """
    if tile.persistent:
        return _persistent_cycles(tile, samples)
    columns = tile.warp_groups * tile.pixel_tiles * _columns(tile)
    packs = tile.channel_chunks * tile.chunk_packs * tile.slab_pixels
    cycles = STEADY_MULTIPLY * columns * tile.k_steps * _products(tile)
    cycles += (STEADY_UNPOOL if tile.unpools else STEADY_LOAD_HALO) * packs + _element_loads(tile)
    latency = STEADY_CHUNK_LATENCY * tile.channel_chunks + STEADY_TILE_LATENCY
    num_waves = waves(tile, samples)
    # The last of many waves is half full on average.
    num_waves = num_waves + 0.5 if num_waves > 3.0 else float(math.ceil(num_waves))
    return num_waves * (tile.tiles_in_flight * cycles + latency)


def _columns(tile: ImplicitGemmTile) -> int:
    """Return the columns of a pixel tile that take as long as its products of one step."""
    mma_sync = tile.tf32x3 and not tile.tf32x3_wgmma
    fixed = TF32X3_STEP_COLUMNS if mma_sync else INSTRUCTION_COLUMNS
    return tile.pixel_tile.columns + fixed


def _element_loads(tile: ImplicitGemmTile) -> float:
    """Return the additional cycles to load pixels of few bytes, or of wide folded maps."""
    pixel_bytes = tile.view.memory_channels * tile.element_bytes
    wide = tile.view.memory_channels % CHANNEL_MULTIPLE == 0
    if tile.view.fold > 1 and wide and not tile.num_tensor_maps:
        packs = tile.channel_chunks * tile.chunk_packs * tile.slab_pixels
        return LOAD_FOLDED[tile.element_bytes] * packs
    if pixel_bytes >= VECTOR_BYTES:
        return 0.0
    return LOAD_ELEMENTS * ceil_div(tile.view.fold * pixel_bytes, VECTOR_BYTES) * tile.slab_pixels


def _products(tile: ImplicitGemmTile) -> float:
    if tile.tf32x3_wgmma:
        groups = tile.blocks_per_sm * tile.warp_groups * tile.k_warp_groups
        return SPLIT_MULTIPLY + PROMOTE / groups
    return TF32X3_MULTIPLY if tile.tf32x3 else 1.0


def _persistent_cycles(tile: ImplicitGemmTile, samples: int) -> float:
    columns, instructions = tile.pixel_tile.columns, tile.pixel_tiles * tile.k_steps
    packs = tile.channel_chunks * tile.chunk_packs * tile.slab_pixels
    # Tensor cores multiply two columns per cycle; shared memory delivers 128 bytes.
    multiply = instructions * (columns + PERSISTENT_INSTRUCTION_COLUMNS) / 2
    reads = instructions * (TILE_M + columns) * 2 * VECTOR_BYTES / 128
    fills = packs * (PERSISTENT_UNPOOL if tile.unpools else PERSISTENT_LOAD_HALO)
    fills *= 1 + SMALL_SLAB * (SLAB_PACKS[0] / tile.slab_packs - 1)
    cycles = max(multiply, reads + fills) + _element_loads(tile)
    store = PERSISTENT_STORE * tile.pixel_tiles * columns * tile.element_bytes
    cycles += store / (4 if tile.pooled else 1)
    latency: float = PERSISTENT_CHUNK * tile.channel_chunks + PERSISTENT_TILE
    latency += UNPOOL_LATENCY * packs if tile.unpools else 0.0
    slowdown = WEIGHT_RING_SLOWDOWN if tile.weight_stages else 1.0
    return math.ceil(waves(tile, samples)) * (tile.tiles_in_flight * cycles * slowdown + latency)


def one_wave_cycles(tile: ImplicitGemmTile, samples: int) -> float:
    """Return the estimated cycles of a product with few waves.

    Resident blocks start together, so they load, multiply and store at the same time, and the times
    of these phases add up.
    """
    columns = tile.warp_groups * tile.pixel_tiles * _columns(tile)
    multiply = MULTIPLY * columns * tile.k_steps * _products(tile)
    multiply += LOAD_WEIGHTS * tile.warp_groups * WARP_GROUP_SIZE * tile.k_steps
    load = LOAD_HALO * tile.channel_chunks * tile.chunk_packs * tile.slab_pixels
    load += _element_loads(tile)
    store = STORE * columns * tile.element_bytes / (4 if tile.pooled else 1)
    latency: float = CHUNK_LATENCY * tile.channel_chunks + TILE_LATENCY
    alone = load + store + latency + max(multiply, STEP_LATENCY * tile.k_steps / tile.k_warp_groups)
    grid = tile.grid(tile.tiles(samples), tile.view.filters)
    blocks = math.prod(grid) / tile.limits.multiprocessors
    resident = min(max(blocks, 1.0), tile.blocks_per_sm)
    # No other block hides the latency of a single resident block.
    latency *= SINGLE_BLOCK_SLOWDOWN if tile.blocks_per_sm == 1 and blocks > 1.0 else 1.0
    num_waves = blocks / tile.blocks_per_sm
    # The last of many waves is half full on average.
    num_waves = float(math.ceil(num_waves)) if num_waves <= 3.0 else num_waves + 0.5
    cycles = max(num_waves, 1.0) * max(alone, resident * (multiply + load + store) + latency)
    mma_sync = tile.tf32x3 and not tile.tf32x3_wgmma
    single = tile.blocks_per_sm == 1 and blocks > 1.0
    return cycles * TF32X3_SINGLE_BLOCK if mma_sync and single else cycles
