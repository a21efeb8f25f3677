"""Tile configuration and cost model of the weight gradient of convolutions.

See ``conv2d_backward_weight_halo.cu``: rows of the product are filters, columns are the
channels of one or more rows of filter taps, and the sum runs over output pixels. A block sums over
strips of output lines, whose halo tile of x and whose dz are in shared memory.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from dptrain.backends.cuda.convolution.bound_convolution import BoundConvolution, Case
from dptrain.backends.cuda.convolution.halo.halo_tiles import InputView
from dptrain.backends.cuda.dense.gemm_tiles import GemmConfig, SplitK, ceil_div
from dptrain.backends.cuda.device.device import Extent
from dptrain.backends.cuda.device.hardware import (
    CYCLES_PER_US,
    DEFAULT_LIMITS,
    ELEMENT_BYTES,
    MAX_THREAD_REGISTERS,
    VECTOR_BYTES,
    WARP_GROUP_SIZE,
    WARP_SIZE,
    splits_in_shared_memory,
)
from dptrain.backends.cuda.weighted import RELU_POOL
from dptrain.backends.replica import Kernel
from dptrain.plan.limits import DeviceLimits
from dptrain.plan.lowering import Phase

TILE_M = 64
"""Filters of a tile: rows of a ``wgmma`` instruction."""

MAX_COLUMNS = 320
"""Columns of a tile. A thread has half as many accumulators."""

MIN_COLUMNS = 160
"""Tiles of a single row of taps are also tried if they have fewer columns than this."""

SMALL_WIDTH, LINE_SAMPLES = 4, {"bf16": (2, 4, 8), "tf32": (1, 2), "fp32": (1, 2)}
"""Tiles of maps that are at most this wide are also tried with so many samples that alternate in a
line. The strips of a single sample are short, and in bf16 half of the terms of an instruction are
zeros."""

QUAD_ROWS_WIDTH = 16
"""Only if lines are not longer, the four pixels of a position can come from different lines."""

SHORT_LINES = {2: 1.17, 4: 1.08}
"""Factor of the time in tf32 with many channels if a line of the strip has so few positions. On an
H200 and an H100, 12 weight gradients of ResNet-18 (32×32) with 2 positions in a line took 1.07 to
1.19 times as long as those with 8, which were estimated to be equal, and 8 with 4 positions 0.97 to
1.19 times (128 and 1024 samples)."""

ALONE = 0.85
"""Factor of the time in tf32 with many channels if a block is alone on its multiprocessor and
prefetches strips, without strides and with lines of up to `QUAD_ROWS_WIDTH` pixels. Seven tiles of
ResNet-18 (32×32) took 0.75 to 0.88 of their estimate (H100, 128 and 1024 samples)."""

MAX_FEW_CHANNELS = 32
"""Largest number of channels that the pixels of a row of taps have together if the input has few
channels."""

MIN_PIXELS = 1 << 17
"""With pooling, few channels and tf32, the gathering kernel is faster below this number of output
pixels of all samples (H200, 32 samples: 6.3 µs for model0 and 9.1 µs for model1, against 7.3 µs and
9.9 µs)."""


MAX_PROMOTED_COLUMNS = 64
"""Columns whose sums are promoted together with 3xTF32, unless one row of taps has more."""

TF32X3_REGISTERS = 72
"""Registers of a thread in addition to accumulators and promoted sums with 3xTF32."""

PROMOTE = 100
"""Estimated cycles to wait for sums and to start promoting them; not measured."""


@dataclass(frozen=True)
class CostModel:
    """Fitted costs of `estimate_cycles`, in cycles unless stated otherwise.

    Attributes:
        step: shortest time of a K step of a warp group.
        issue: of a K step, for instructions that no other warp group hides.
        prefetched_wait, load_wait: between two strips, if the next strip was prefetched or not.
        group_wait: additional wait for each further warp group.
        prefetch_rate, load_rate: bytes per cycle that a warp group loads meanwhile.
        load_cost: of a multiprocessor, per byte of a strip.
    """

    step: float
    issue: float
    prefetched_wait: float
    load_wait: float
    group_wait: float
    prefetch_rate: float
    load_rate: float
    load_cost: float


MANY_CHANNELS = CostModel(
    step=290, issue=51, prefetched_wait=1600, load_wait=850, group_wait=660, prefetch_rate=48,
    load_rate=7.4, load_cost=0.015,
)  # fmt: skip
FEW_CHANNELS = CostModel(
    step=530, issue=190, prefetched_wait=4600, load_wait=3600, group_wait=0,
    prefetch_rate=math.inf, load_rate=11, load_cost=0.016,
)  # fmt: skip

TF32X3_ISSUE, TF32X3_LOAD_COST = 200, 0.03
"""With 3xTF32, additional `CostModel.issue`, because operands are split, and `CostModel.load_cost`.
Fitted to 16 products of a VGG-like network and cifar with 64 and 256 samples, which took 0.8 to 1.3
times as long as estimated (H100)."""

SHARED_TENSOR_CORES = 1.09
"""Factor of the time of tensor cores if several blocks share them."""

ADD_ELEMENT, JOIN_COLUMN = 4.2e-3, 3.3
"""Cycles to write, read and add an element of a split-K part, and to add a column over the warp
groups of a block."""

LAUNCH = 3500
"""Cycles to start and end both kernels."""

MANY_PARTS, PARTS_STEP, PARTS_STEP_COST = 256, 64, 1000
"""Beyond `MANY_PARTS` split-K parts, each further `PARTS_STEP` cost this many cycles. This is an
estimate from one layer of 448 weights: 12.4 µs with 640 parts, 9.9 µs with 224."""


@dataclass(frozen=True)
class WgradTile:
    """Tile configuration of a block.

    A position is the unit of the sum: a pixel in bf16, four pixels (a quad) otherwise.

    Attributes:
        precision: ``tf32``, ``bf16``, or ``fp32`` by 3xTF32.
        epilogue: fused layers that are undone while dz is read, ``EPILOGUE`` of ``epilogue.cuh``.
        few_channels: whether the pixels of a row of taps count as one tap with S · C channels.
        channels, tap_rows, tap_columns: of the columns of the tile.
        all_channels, all_tap_rows: of the layer.
        filters: of the tile.
        strip_lines: lines of positions of a strip.
        contiguous_lines: lines that are summed without a gap; dz is 0 in the padding.
        line_positions: positions of a line.
        line_pitch: positions from a line to the next.
        quad_rows_apart, quad_columns_apart: distance between the pixels of a position in tf32.
        strips_per_sample: strips of a sample, or of `samples_across` samples.
        k_groups: warp groups that share a strip and split its positions between them.
        buffers: 2 if the next strip is prefetched.
        limits: of the GPU.
        pads_filters: whether the filters are no multiple of 16.
        samples_across: samples of a strip. In tf32, a position has pixels of four of them.
    """

    precision: str
    epilogue: int
    few_channels: bool
    channels: int
    tap_rows: int
    tap_columns: int
    all_channels: int
    all_tap_rows: int
    filters: int
    strip_lines: int
    contiguous_lines: int
    line_positions: int
    line_pitch: int
    quad_rows_apart: int
    quad_columns_apart: int
    strips_per_sample: int
    k_groups: int = 1
    buffers: int = 1
    limits: DeviceLimits = DEFAULT_LIMITS
    pads_filters: bool = False
    samples_across: int = 1

    ALGORITHM: ClassVar[str] = "halo-tile weight gradient"

    @property
    def columns(self) -> int:
        """Columns of the tile."""
        return self.tap_rows * self.tap_columns * self.channels

    @property
    def quads(self) -> bool:
        """Whether a position is four pixels."""
        return self.precision != "bf16"

    @property
    def tf32x3(self) -> bool:
        """Whether products of float32 are computed from TF32 parts (3xTF32)."""
        return self.precision == "fp32"

    @property
    def line_samples(self) -> int:
        """Samples whose pixels alternate in a line."""
        return max(self.samples_across // (4 if self.quads else 1), 1)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return ELEMENT_BYTES["tf32" if self.quads else "bf16"]

    @property
    def pack_elements(self) -> int:
        """Elements of a pack of 16 bytes."""
        return VECTOR_BYTES // self.element_bytes

    @property
    def promoted_columns(self) -> int:
        """Columns whose sums are promoted together (3xTF32); 0 if sums are not promoted."""
        columns = self.tap_rows * self.channels
        return (columns if columns <= MAX_PROMOTED_COLUMNS else self.channels) * self.tf32x3

    @property
    def double_steps(self) -> int:
        """Pairs of K steps of a strip: the kernel processes two instructions' depths at once."""
        return ceil_div(self._half_steps, 4)

    @property
    def _half_step_positions(self) -> int:
        return 1 if self.quads else 8

    @property
    def _segment_half_steps(self) -> int:
        """Half steps of `contiguous_lines` lines."""
        positions = (self.contiguous_lines - 1) * self.line_pitch + self.line_positions
        return ceil_div(positions, self._half_step_positions)

    @property
    def _half_steps(self) -> int:
        return self.strip_lines // self.contiguous_lines * self._segment_half_steps

    @property
    def _halo_extent(self) -> tuple[int, int]:
        """Rows and columns of positions of the halo tile, as far as the kernel reads."""
        reach = self._segment_half_steps * self._half_step_positions
        reach += (self.tap_columns - 1) * self.line_samples
        if self.contiguous_lines == 1:
            return self.strip_lines + self.tap_rows - 1, reach
        reach += (self.strip_lines - self.contiguous_lines + self.tap_rows - 1) * self.line_pitch
        return ceil_div(reach, self.line_pitch), self.line_pitch

    @property
    def _halo_packs(self) -> int:
        """Packs of the halo tile, padded against bank conflicts."""
        rows, columns = self._halo_extent
        if self.quads:
            return columns * (rows * self.channels + 1)
        channel_packs = self.channels // self.pack_elements
        remainder = max(8 // channel_packs, 1)
        if self.contiguous_lines == 1:
            return rows * channel_packs * _congruent_mod_8(columns, remainder)
        return channel_packs * _congruent_mod_8(rows * columns, remainder)

    @property
    def _raw_packs(self) -> int:
        """Packs of the pixels that tf32 positions are assembled from."""
        rows, columns = self._halo_extent
        rows, columns = rows + 3 * self.quad_rows_apart, columns + 3 * self.quad_columns_apart
        return rows * columns * (self.channels // self.pack_elements + 2)

    @property
    def _dz_bytes(self) -> int:
        size, pooled = self.element_bytes, self.epilogue == 2
        pooled_rows = 4 if self.quads else 8
        rows = self.double_steps * (pooled_rows if pooled else 4 * VECTOR_BYTES // size)
        padding = 2 if self.quads else 1 if not pooled else 2 if self.filters > 16 else 0
        pitch = (self.filters + padding * self.pack_elements) * size
        mask = self.filters + 16 if pooled else pitch if self.epilogue else 0
        return rows * (pitch + mask)

    @property
    def shared_bytes(self) -> int:
        """Halo tiles and dz, or the partial sums that warp groups exchange, in bytes."""
        assembled = self.quads and not self.few_channels and self.buffers == 2
        # The high and the low parts of 3xTF32 are two planes.
        halo = self._halo_packs * (2 if self.tf32x3 else 1)
        packs = halo + self._raw_packs if assembled else self.buffers * halo
        exchanged = (
            4 * WARP_GROUP_SIZE * max((self.k_groups - 1) * self.columns // 2, 2 * self.k_groups)
        )
        offsets = ceil_div(self.double_steps, 2) * VECTOR_BYTES
        strips = packs * VECTOR_BYTES + self.buffers * self._dz_bytes
        return max(offsets + strips, exchanged * (self.k_groups > 1))

    @property
    def strip_bytes(self) -> int:
        """Halo tile and dz of a strip, in bytes."""
        return self._halo_packs * VECTOR_BYTES + self._dz_bytes

    @property
    def block(self) -> Extent:
        """Threads of a block."""
        return 4 * WARP_SIZE, self.k_groups, 1

    @functools.cached_property
    def blocks_per_sm(self) -> int:
        """Resident blocks of a multiprocessor (occupancy)."""
        registers = self.columns // 2 + 72
        if self.tf32x3:
            registers = (self.columns + self.promoted_columns) // 2 + TF32X3_REGISTERS
            if registers > MAX_THREAD_REGISTERS:
                return 0
        registers = min(registers, MAX_THREAD_REGISTERS)
        threads = math.prod(self.block)
        return min(self.limits.blocks_per_sm(threads, registers, self.shared_bytes), 16)

    @property
    def defines(self) -> dict[str, int]:
        """Macros of ``conv2d_backward_weight_halo.cu``."""
        return {
            "TILE_M": TILE_M, "TILE_N": self.columns, "WARP_M": 16, "WARP_N": self.columns,
            "TILE_K_WORDS": 16, "PREFETCH_STEPS": 1, "K_GROUPS": self.k_groups,
            "MIN_BLOCKS": self.blocks_per_sm, "FEW_CHANNELS": int(self.few_channels),
            "TILE_CHANNELS": self.channels, "TILE_FILTERS": self.filters,
            "TAP_ROWS": self.tap_rows, "TAP_COLUMNS": self.tap_columns,
            "STRIP_LINES": self.strip_lines, "CONTIGUOUS_LINES": self.contiguous_lines,
            "LINE_POSITIONS": self.line_positions, "LINE_PITCH": self.line_pitch,
            "QUAD_ROWS_APART": self.quad_rows_apart,
            "QUAD_COLUMNS_APART": self.quad_columns_apart, "BUFFERS": self.buffers,
            **({"TF32X3": 1, "TF32X3_WGMMA": 1} if self.tf32x3 else {}),
            "PADDED_CHANNELS": int(self.all_channels % self.channels > 0),
            "PADDED_FILTERS": int(self.pads_filters),
            **({"SAMPLES_ACROSS": self.samples_across} if self.samples_across > 1 else {}),
        }  # fmt: skip

    def __str__(self) -> str:
        columns = f"{self.tap_rows}x{self.tap_columns} taps of {self.channels} channels"
        apart = f", {self.quad_rows_apart} rows apart" if self.quad_rows_apart else ""
        strip = f"strips of {self.strip_lines}/{self.contiguous_lines} lines{apart}"
        if self.samples_across > 1:
            strip += f" of {self.samples_across} samples"
        return f"{columns}, {strip}, groups {self.k_groups}, buffers {self.buffers}"

    def grid(self, rows: int, columns: int, parts: int = 1) -> Extent:
        """Return the blocks of a sum split into `parts`; x: rows of taps and chunks of channels."""
        tap_tiles = ceil_div(self.all_tap_rows, self.tap_rows)
        channel_tiles = ceil_div(self.all_channels, self.channels)
        return tap_tiles * channel_tiles, ceil_div(columns, TILE_M), parts

    def strips(self, samples: int) -> int:
        """Return the strips of so many samples."""
        return ceil_div(samples, self.samples_across) * self.strips_per_sample

    def config(self, filters: int, samples: int) -> GemmConfig:
        """Return this tile with the split-K that fills the GPU; its terms are strips."""
        tiles = math.prod(self.grid(0, filters))
        wanted = max(self.limits.multiprocessors * self.blocks_per_sm // tiles, 1)
        strips = self.strips(samples)
        part = max(ceil_div(strips, wanted), 1)
        return GemmConfig(self, SplitK(max(ceil_div(strips, part), 1), part))


def _congruent_mod_8(least: int, remainder: int) -> int:
    """Return the smallest number ≥ `least` that is `remainder` more than a multiple of eight."""
    return (least + 7 - remainder) // 8 * 8 + remainder


def supports_wgrad_tiles(view: InputView, precision: str, limits: DeviceLimits) -> bool:
    """Return whether the kernel exists for a layer. fp32 requires ``wgmma``.

    Args:
        view: the input, folded if the convolution has strides.
        precision: of the product.
        limits: of the GPU.
    """
    if precision not in ELEMENT_BYTES:
        return splits_in_shared_memory(precision, limits) and fills_wgrad_tiles(view)
    return any(True for _ in _columns(view))


def fills_wgrad_tiles(view: InputView) -> bool:
    """Return whether channels and filters fill tiles, or there are few channels; stride 1 only."""
    fits = any(True for _ in _columns(view))
    few = view.s * view.channels <= MAX_FEW_CHANNELS
    whole = view.channels % 16 == 0 or few
    return fits and view.fold == 1 and view.filters % 16 == 0 and whole


def _columns(view: InputView, *, tf32x3: bool = False) -> Iterator[tuple[bool, int, int, int]]:
    """Yield columns of a tile: few_channels, channels, tap rows, tap columns.

    With `tf32x3`, promoted sums take registers, so smaller tiles are tried as well.
    """
    if view.filters % 2:
        return
    row_channels = view.s * view.channels
    if view.fold == 1 and view.channels % 16 and row_channels <= MAX_FEW_CHANNELS:
        yield True, 16 if row_channels <= 16 else 32, view.r, 1
        return
    sizes = (16, 32, 64) if tf32x3 else (32, 64)
    whole = [n for n in sizes if view.channels % n == 0] if view.channels % 32 == 0 else []
    # Otherwise the last tile has further channels, which are zero.
    rest = (16,) if view.channels % 16 == 0 else (16, 32, 64)
    for channels in whole or rest:
        if view.s * channels <= MAX_COLUMNS:
            # As many tap rows as fit, divided evenly.
            tiles = ceil_div(view.r, MAX_COLUMNS // (view.s * channels))
            for count in (tiles, view.r):
                yield False, channels, ceil_div(view.r, count), view.s
                if tiles == view.r or (channels * view.s < MIN_COLUMNS and not tf32x3):
                    break


def wgrad_candidates(
    view: InputView, precision: str, epilogue: int, limits: DeviceLimits
) -> Iterator[WgradTile]:
    """Yield the tile configurations that fit a multiprocessor.

    Args:
        view: the input.
        precision: ``tf32``, ``bf16``, or ``fp32`` by 3xTF32.
        epilogue: fused layers that are undone while dz is read.
        limits: of the GPU.
    """
    unit = 2 if epilogue == 2 else 1
    height = view.out_height // unit * unit
    filters = next(n for n in (16, 32, TILE_M) if n >= min(view.filters, TILE_M))
    for few_channels, channels, tap_rows, tap_columns in _columns(view, tf32x3=precision == "fp32"):
        is_small = unit == 1 and not few_channels and view.out_width <= SMALL_WIDTH
        strips = _strips(view, precision, unit)
        further = _strips_of_samples(view, precision) if is_small else ()
        for strip in itertools.chain(strips, further):
            lines, contiguous, positions, pitch, rows_apart, columns_apart, samples = strip
            height_of_strip = lines * 4 if rows_apart else lines
            group_choices = (1, 2, 4) if few_channels else (1, 2)
            for k_groups, buffers in itertools.product(group_choices, (1, 2)):
                tile = WgradTile(
                    precision, epilogue, few_channels, channels, tap_rows, tap_columns,
                    channels if few_channels else view.channels, view.r, filters, lines,
                    contiguous, positions, pitch, rows_apart, columns_apart,
                    ceil_div(height, height_of_strip), k_groups, buffers, limits,
                    view.filters % 16 > 0, samples,
                )  # fmt: skip
                if tile.blocks_per_sm:
                    yield tile


_Strip = tuple[int, int, int, int, int, int, int]
"""Lines, contiguous lines, positions, pitch, row and column distance of quads, and samples."""


def _strips(view: InputView, precision: str, unit: int) -> Iterator[_Strip]:
    """Yield strips of one sample."""
    height, width = (n // unit * unit for n in (view.out_height, view.out_width))
    for lines in range(unit, height + unit, unit):
        if precision == "bf16":
            for contiguous in range(1, 2 if unit == 2 else lines + 1):
                if lines % contiguous == 0:
                    yield lines, contiguous, width, max(view.row_pitch, width), 0, 0, 1
            continue
        quarter = ceil_div(ceil_div(width, 4), unit) * unit
        yield lines, 1, quarter, quarter, 0, quarter, 1
        if width <= QUAD_ROWS_WIDTH and 4 * (lines - unit) < height:
            yield lines, 1, width, width, lines, 0, 1


def _strips_of_samples(view: InputView, precision: str) -> Iterator[_Strip]:
    """Yield strips of several samples."""
    for lines in range(1, view.out_height + 1):
        for n in LINE_SAMPLES[precision]:
            positions = n * view.out_width
            if precision == "bf16":
                yield lines, 1, positions, n * view.row_pitch, 0, 0, n
            else:
                yield lines, 1, positions, positions, 0, positions + n * (view.s - 1), 4 * n


def estimate_cycles(tile: WgradTile, view: InputView, samples: int) -> float:
    """Return the estimated cycles of the weight gradient, both kernels included.

    The blocks of a multiprocessor share its tensor cores and hide each other's other work. Fitted
    to 40 products on an H200 (CUDA 13, 2026-11; mostly 32 and 2048 samples of solar, cifar, model0
    to model2 and model-large) with 20 to 30 configurations each. The selected configurations took
    1.03 times as long as the fastest (geometric mean), at worst 1.19 times.
    """
    split_k = tile.config(view.filters, samples).split_k
    blocks = math.prod(tile.grid(0, view.filters, split_k.count))
    multiprocessors = tile.limits.multiprocessors
    resident = min(tile.blocks_per_sm, ceil_div(blocks, multiprocessors))
    waves = ceil_div(blocks, multiprocessors * tile.blocks_per_sm)
    costs = FEW_CHANNELS if tile.few_channels else MANY_CHANNELS
    if tile.tf32x3:
        issue = costs.issue + TF32X3_ISSUE
        costs = replace(costs, issue=issue, load_cost=TF32X3_LOAD_COST)
    multiply = tile.double_steps * tile.columns * (3 if tile.tf32x3 else 1)
    own = max(multiply, costs.step * tile.double_steps / tile.k_groups)
    if tile.tf32x3:
        promotions = tile.columns // tile.promoted_columns
        promote = promotions * (tile.promoted_columns // 2 + PROMOTE)
        own = max(multiply, (multiply + tile.double_steps * promote) / tile.k_groups)
    prefetched = tile.buffers == 2
    wait, rate = (
        (costs.prefetched_wait, costs.prefetch_rate)
        if prefetched
        else (costs.load_wait, costs.load_rate)
    )
    wait += costs.group_wait * (tile.k_groups - 1)
    strip = own + wait + tile.strip_bytes / (rate * tile.k_groups)
    busy = (
        multiply * SHARED_TENSOR_CORES
        + tile.double_steps * costs.issue
        + tile.strip_bytes * costs.load_cost
    )
    elements = view.r * view.s * view.channels * view.filters
    further_parts = max(ceil_div(split_k.count - MANY_PARTS, PARTS_STEP), 0)
    add = ADD_ELEMENT * split_k.count * elements + PARTS_STEP_COST * further_parts
    join = JOIN_COLUMN * (tile.k_groups - 1) * tile.columns
    multiplied = split_k.terms * waves * max(resident * busy, strip)
    if tile.precision == "tf32" and not tile.few_channels:
        multiplied *= SHORT_LINES.get(tile.line_positions, 1.0)
        short = view.fold == 1 and view.out_width <= QUAD_ROWS_WIDTH
        if resident == 1 and prefetched and short:
            multiplied *= ALONE
    return LAUNCH + multiplied + add + join


@functools.cache
def rank_wgrad_tiles(
    view: InputView, precision: str, strides: tuple[int, int], epilogue: int, samples: int,
    limits: DeviceLimits,
) -> tuple[tuple[float, WgradTile], ...]:  # fmt: skip
    """Return the tile configurations with their estimated times in µs, which include launches."""
    view = view.folded(strides)
    if not supports_wgrad_tiles(view, precision, limits):
        return ()
    pixels = samples * view.out_height * view.out_width
    few_channels = view.channels % 16 > 0
    if precision == "tf32" and epilogue == RELU_POOL and few_channels and pixels < MIN_PIXELS:
        return ()
    tiles = wgrad_candidates(view, precision, epilogue, limits)
    return tuple((estimate_cycles(tile, view, samples) / CYCLES_PER_US, tile) for tile in tiles)


def supports(case: Case) -> bool:
    """Return whether the kernels exist for a case."""
    view = case.view.folded(case.strides)
    return not case.is_dilated and supports_wgrad_tiles(view, case.precision, case.limits)


def estimate(case: Case) -> Sequence[tuple[float, WgradTile]]:
    """Return the estimated µs of the tile configurations."""
    ranked = rank_wgrad_tiles(
        case.view, case.precision, case.strides, case.epilogue, case.samples, case.limits
    )
    return [(case.corrected_us(time), tile) for time, tile in ranked]


def config_of(case: Case, tile: WgradTile) -> GemmConfig:
    """Return the configuration of a product, with split-K."""
    return tile.config(case.group.head.output_shape[0], case.samples)


def bind(operation: BoundConvolution, phase: Phase, tile: WgradTile) -> Kernel:
    """Return the stage of a weight gradient."""
    samples = operation.setting.summed_samples
    config = tile.config(operation.group.head.output_shape[0], samples)
    return operation.gradient_product("conv2d_backward_weight_halo", config, tile.strips)
