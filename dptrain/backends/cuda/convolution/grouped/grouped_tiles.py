"""Tiles of convolutions with groups on tensor cores; see ``grouped_tile.cuh``."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

from dptrain.backends.cuda.convolution.bound_convolution import Case
from dptrain.backends.cuda.dense.gemm_tiles import ceil_div
from dptrain.backends.cuda.device.hardware import ELEMENT_BYTES, VECTOR_BYTES, allows_tf32x3
from dptrain.plan.limits import DeviceLimits
from dptrain.plan.lowering import Phase

UNIT_CHANNELS = 16
"""Rows and columns of a fragment: the channels and filters of a unit are completed to multiples."""

SLAB_BYTES = 128
"""Bytes of a pixel that a block copies if it has several units: a cache line."""

MIN_TILE_PIXELS, MAX_TILE_PIXELS = 48, 256
"""Fewest pixels of a tile if the map has more, and most."""

MIN_WARPS, MAX_WARPS, MAX_WGRAD_WARPS = 4, 8, 16
"""Fewest and most warps of a block of products, and most of a block of weight gradients."""

PRODUCT_REGISTERS, WGRAD_REGISTERS = 96, 72
"""Registers of a thread of products and of weight gradients, from which the resident blocks are
estimated: what the layers of ResNeXt-50 and RegNet-X and -Y (400 MF) take at most on sm_90."""

WEIGHT_BYTES, OFFSET_BYTES = 4, 4
"""Bytes of a weight and of its gradient, and of the offset of a pixel in shared memory."""


class Cycles(NamedTuple):
    """Estimated cycles of a product.

    Attributes:
        block_wait, tile_wait: of a block and of each of its tiles, which wait for memory.
        block, tile: of a multiprocessor, which its blocks share.
    """

    block_wait: float
    tile_wait: float
    block: float
    tile: float


@dataclass(frozen=True)
class GroupedShape:
    """What the tiles of a product of a convolution with groups depend on.

    Attributes:
        group_channels, group_filters, groups: of the layer.
        window, strides, dilations: of the layer.
        pads: rows above, and columns to the left of a map.
        sides: rows and columns of which tiles consist: those of the output, or for the input
            gradient those of a class (``conv2d_grouped_tile.cu``).
        samples: of a minibatch.
        itemsize: bytes of an activation.
        tf32x3: whether products of float32 are computed from TF32 parts.
        limits: of the GPU.
    """

    group_channels: int
    group_filters: int
    groups: int
    window: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    pads: tuple[int, int]
    sides: tuple[int, int]
    samples: int
    itemsize: int
    tf32x3: bool
    limits: DeviceLimits

    @classmethod
    def of(cls, case: Case) -> GroupedShape:
        """Return the shape of a product."""
        head, layer = case.group.head, case.layer
        channels, *in_sides = head.input_maps
        filters, *sides = head.output_maps
        if case.phase is Phase.BACKWARD_INPUT:
            sides = [ceil_div(*pair) for pair in zip(in_sides, layer.strides, strict=True)]
        (top, _), (left, _) = layer.pads(head.input_maps)
        return cls(
            channels // layer.groups, filters // layer.groups, layer.groups, layer.window,
            layer.strides, layer.dilations, (top, left), (sides[0], sides[1]), case.samples,
            ELEMENT_BYTES.get(case.precision, 4), case.precision == "fp32", case.limits,
        )  # fmt: skip

    @property
    def extents(self) -> tuple[int, int]:
        """Rows and columns that the window extends over."""
        (r, s), (down, across) = self.window, self.dilations
        return (r - 1) * down + 1, (s - 1) * across + 1

    @property
    def pack(self) -> int:
        """Elements of 16 bytes; an instruction multiplies two packs of terms."""
        return VECTOR_BYTES // self.itemsize

    @cached_property
    def unit_groups(self) -> int:
        """Groups of a unit, with the fewest products of zeros; 0 if packs do not divide evenly."""
        sizes, pack = (self.group_channels, self.group_filters), self.pack
        if any(self.groups * size % pack for size in sizes):
            return 0
        counts = [
            count
            for count in range(1, min(self.groups, UNIT_CHANNELS) + 1)
            if all(count * size % pack == 0 for size in sizes)
        ]

        def products(count: int) -> float:
            """Return the products of a group, with zeros."""
            chunks = (ceil_div(count * size, UNIT_CHANNELS) for size in sizes)
            return math.prod(chunks) / count

        return min(counts, key=products, default=0)

    @cached_property
    def units(self) -> int:
        """Units of the layer, of which the last may have fewer groups."""
        return ceil_div(self.groups, self.unit_groups)

    def pitch(self, channels: int) -> int:
        """Return the elements between pixels in shared memory: an odd number of packs."""
        return (ceil_div(channels, self.pack) | 1) * self.pack


@dataclass(frozen=True)
class GroupedTile:
    """A tile of pixels, and the units of a block.

    Attributes:
        shape: of the product.
        samples: of which the tile consists.
        rows, columns: pixels of the tile, of each sample.
        units: of a block.
        buffers: 2 copies a tile while another is multiplied.
    """

    shape: GroupedShape
    samples: int
    rows: int
    columns: int
    units: int
    buffers: int

    ALGORITHM = "grouped tiles"
    REGISTERS: ClassVar[int] = PRODUCT_REGISTERS

    def __str__(self) -> str:
        samples = f"{self.samples} x " if self.samples > 1 else ""
        return (
            f"{samples}{self.rows} x {self.columns} pixels, {self.units} units, {self.warps} warps"
        )

    @property
    def warps(self) -> int:
        """Warps of a block."""
        raise NotImplementedError

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        raise NotImplementedError

    @property
    def cycles(self) -> Cycles:
        """Estimated cycles.

        The numbers were fitted to 650 tiles of the layers of ResNeXt-50 and RegNet-X and -Y (400
        MF) with 64 samples in bf16 (H200, 2026-11-30). The selected tiles take 1.07 times as long
        as the fastest ones of each layer.
        """
        raise NotImplementedError

    @property
    def grid_slabs(self) -> int:
        """Extent of the grid along the units."""
        return ceil_div(self.shape.units, self.units)

    @property
    def parts(self) -> int:
        """Blocks of a unit, for the same pixels."""
        raise NotImplementedError

    @property
    def slabs(self) -> int:
        """Blocks for the same pixels."""
        return self.grid_slabs * self.parts

    @cached_property
    def resident_blocks(self) -> int:
        """Resident blocks of a multiprocessor; 0 if a block does not fit."""
        return self.shape.limits.blocks_per_sm(32 * self.warps, self.REGISTERS, self.shared_bytes)

    @property
    def pixels(self) -> int:
        """Pixels of the tile."""
        return self.samples * self.rows * self.columns

    def tiles(self, samples: int) -> int:
        """Return the number of tiles of so many samples."""
        height, width = self.shape.sides
        across = ceil_div(height, self.rows) * ceil_div(width, self.columns)
        return ceil_div(samples, self.samples) * across

    def blocks(self, samples: int) -> int:
        """Return the blocks of a slab: as many as are resident."""
        most = self.shape.limits.multiprocessors * self.resident_blocks // self.slabs
        return min(self.tiles(samples), max(most, 1))

    @property
    def cost(self) -> float:
        """Estimated cycles of the product."""
        if not self.resident_blocks:
            return math.inf
        cycles, blocks = self.cycles, self.blocks(self.shape.samples)
        rounds = ceil_div(self.tiles(self.shape.samples), blocks)
        own = max(blocks * self.slabs / self.shape.limits.multiprocessors, 1.0)
        waits = cycles.block_wait + rounds * cycles.tile_wait
        return waits + own * (cycles.block + rounds * cycles.tile)

    @property
    def defines(self) -> dict[str, int]:
        """Macros of the kernel."""
        shape = self.shape
        return {
            "WINDOW_R": shape.window[0], "WINDOW_S": shape.window[1],
            "STEP_H": shape.strides[0], "STEP_W": shape.strides[1],
            "DILATION_H": shape.dilations[0], "DILATION_W": shape.dilations[1],
            "PAD_H": shape.pads[0], "PAD_W": shape.pads[1],
            "TILE_SAMPLES": self.samples, "TILE_ROWS": self.rows, "TILE_COLUMNS": self.columns,
            "GROUP_CHANNELS": shape.group_channels, "GROUP_FILTERS": shape.group_filters,
            "UNIT_GROUPS": shape.unit_groups, "UNITS": self.units, "BUFFERS": self.buffers,
            **({"TF32X3": 1} if shape.tf32x3 else {}),
        }  # fmt: skip


@dataclass(frozen=True)
class ProductTile(GroupedTile):
    """Tile of the forward product, or of the input gradient.

    Attributes:
        backward: True for the input gradient.
        whole: False if a block computes a part of the results of a unit only, those of a warp.
    """

    backward: bool
    whole: bool

    @property
    def _summed(self) -> int:
        shape = self.shape
        return shape.unit_groups * (shape.group_filters if self.backward else shape.group_channels)

    @property
    def results(self) -> int:
        """Results of a unit."""
        shape = self.shape
        return shape.unit_groups * (shape.group_channels if self.backward else shape.group_filters)

    @property
    def warp_columns(self) -> int:
        """Results that a warp computes."""
        results = self.shape.groups * self.results // self.shape.unit_groups
        return 32 if self.results % 32 == results % 8 == 0 else 16

    @property
    def _columns(self) -> int:
        """Columns of a unit in a block."""
        return self.warp_columns * (ceil_div(self.results, self.warp_columns) if self.whole else 1)

    @property
    def parts(self) -> int:
        return ceil_div(self.results, self._columns)

    @property
    def _terms(self) -> int:
        step = 2 * self.shape.pack
        return ceil_div(self._summed, step) * step

    @property
    def _classes(self) -> int:
        return math.prod(self.shape.strides) if self.backward else 1

    @property
    def _halo(self) -> int:
        """Pixels of the halo tile."""
        shape, count = self.shape, self.samples
        axes = (self.rows, self.columns), shape.extents, shape.strides, shape.pads
        for side, extent, stride, pad in zip(*axes, strict=True):
            if self.backward:
                count *= side + (stride - 1 + pad) // stride - (pad - extent + 1) // stride
            else:
                count *= (side - 1) * stride + extent
        return count

    @property
    def _slab_channels(self) -> int:
        return self.units * self._summed + self._terms - self._summed

    @property
    def warp_pixel_tiles(self) -> int:
        """Tiles of 16 pixels that a warp multiplies together: fewer if warps had no work."""
        most = 64 // self.warp_columns
        return next((tiles for tiles in (most, 2) if self._jobs(tiles) >= MIN_WARPS), 1)

    def _jobs(self, tiles: int) -> int:
        """Return the products of a block that warps share, for tiles of pixels of a warp."""
        pixel_tiles = ceil_div(self.pixels, 16)
        chunks = self.units * (self._columns // self.warp_columns)
        return chunks * ceil_div(pixel_tiles, tiles) * self._classes

    @cached_property
    def warps(self) -> int:
        jobs, counts = self._jobs(self.warp_pixel_tiles), range(MIN_WARPS, MAX_WARPS + 1)
        return min(counts, key=lambda warps: (ceil_div(jobs, warps), warps))

    @property
    def shared_bytes(self) -> int:
        shape = self.shape
        weights = math.prod(shape.window) * self.units * self._unit_size
        source = self._halo * shape.pitch(self._slab_channels)
        return (weights + self.buffers * source) * shape.itemsize

    @property
    def _unit_size(self) -> int:
        """Elements of the weights of a unit and a tap in shared memory."""
        shape, columns = self.shape, self._columns
        if self.backward:
            return columns * shape.pitch(self._terms)
        words = shape.itemsize == ELEMENT_BYTES["bf16"]
        return self._terms * (shape.pitch(columns) if words else ceil_div(columns, 16) * 16 + 8)

    @property
    def cycles(self) -> Cycles:
        shape, single = self.shape, self.buffers == 1
        taps, tiles = math.prod(shape.window), self.warp_pixel_tiles
        steps = taps * self._terms // (2 * shape.pack) / self._classes
        products = steps * tiles * self.warp_columns // 16 * (3 if shape.tf32x3 else 1)
        jobs = self._jobs(tiles)
        packs = self._halo * self._slab_channels // shape.pack
        width = math.gcd(shape.group_filters, 4)
        columns = min(self._columns, self.results) * self._summed // shape.unit_groups
        vectors = taps * self.units * columns / (32 * width)
        zeros = taps * self.units * self._unit_size / (32 * shape.pack)
        return Cycles(
            block_wait=310 * math.ceil(vectors * width / (32 * self.warps)),
            tile_wait=(900 if single else 640)
            + ceil_div(jobs, self.warps) * (1650 + 10 * products)
            + 145 * packs / (32 * self.warps),
            block=12 * vectors + (2.7 * zeros if shape.unit_groups > 1 else 0),
            tile=(0.29 * packs if single else 0) + jobs * (3.5 * products + 25 * tiles),
        )

    @property
    def defines(self) -> dict[str, int]:
        own = {
            "WARPS": self.warps, "WARP_PIXEL_TILES": self.warp_pixel_tiles,
            "WARP_COLUMNS": self.warp_columns, "PART_COLUMNS": self._columns,
            "BACKWARD": int(self.backward),
        }  # fmt: skip
        return {**super().defines, **own}


@dataclass(frozen=True)
class WeightTile(GroupedTile):
    """Tile of the weight gradient.

    Attributes:
        channel_chunks, filter_chunks: 16 channels, and 16 filters, of a unit that a block computes.
        blocks_per_sm: blocks of a multiprocessor, at most those that are resident. Fewer blocks
            write fewer sums.
    """

    REGISTERS: ClassVar[int] = WGRAD_REGISTERS

    channel_chunks: int
    filter_chunks: int
    blocks_per_sm: int

    def blocks(self, samples: int) -> int:
        most = self.shape.limits.multiprocessors * self.blocks_per_sm // self.slabs
        return min(self.tiles(samples), max(most, 1))

    @property
    def parts(self) -> int:
        channels, filters = _unit_chunks(self.shape)
        return ceil_div(channels, self.channel_chunks) * ceil_div(filters, self.filter_chunks)

    @property
    def warps(self) -> int:
        return self.units * self.channel_chunks * self.filter_chunks * self.shape.window[0]

    @property
    def _halo(self) -> int:
        sides = (self.rows, self.columns), self.shape.extents, self.shape.strides
        return self.samples * math.prod(
            (side - 1) * stride + extent for side, extent, stride in zip(*sides, strict=True)
        )

    @property
    def _channels(self) -> tuple[int, int]:
        """Channels and filters that a block copies."""
        if self.units == 1:
            return 16 * self.channel_chunks, 16 * self.filter_chunks
        groups = self.units * self.shape.unit_groups
        return groups * self.shape.group_channels, groups * self.shape.group_filters

    @property
    def _steps(self) -> int:
        return ceil_div(self.pixels, 2 * self.shape.pack)

    @property
    def shared_bytes(self) -> int:
        channels, filters = map(self.shape.pitch, self._channels)
        terms = self._steps * 2 * self.shape.pack
        size = self._halo * channels + 16 + terms * filters + 16
        return self.buffers * size * self.shape.itemsize + terms * OFFSET_BYTES

    @property
    def cycles(self) -> Cycles:
        shape, (channels, filters) = self.shape, self._channels
        packs = (self._halo * channels + self.pixels * filters) // shape.pack
        products = 2 * shape.window[1] * (3 if shape.tf32x3 else 1)
        size = math.prod(shape.window) * shape.groups * shape.group_channels * shape.group_filters
        # Fewer blocks than are resident are divided unevenly among the multiprocessors.
        uneven = 1.6 if self.blocks_per_sm < self.resident_blocks else 1
        copying = 0.79 if self.buffers == 1 else 0.61
        return Cycles(
            block_wait=0,
            tile_wait=uneven * 101 * packs / (32 * self.warps),
            # Each block writes its sums, which another kernel reads.
            block=size * WEIGHT_BYTES / self.slabs * 0.24,
            tile=uneven * (copying * packs + 2.1 * self.warps * self._steps * products),
        )

    @property
    def defines(self) -> dict[str, int]:
        own = {"CHANNEL_CHUNKS": self.channel_chunks, "FILTER_CHUNKS": self.filter_chunks}
        return {**super().defines, **own}


def supports(case: Case) -> bool:
    """Return whether tensor cores compute the products of a layer."""
    if case.precision == "fp32" and not allows_tf32x3(case.precision, case.limits):
        return False
    shape = GroupedShape.of(case)
    if not shape.unit_groups or shape.window[0] > MAX_WGRAD_WARPS:
        return False
    phases = Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT
    return all(math.isfinite(choose(replace(case, phase=phase)).cost) for phase in phases)


def choose(case: Case) -> GroupedTile:
    """Return the tile of a product with the lowest estimate."""
    return choose_tile(GroupedShape.of(case), case.phase)


@functools.cache
def choose_tile(shape: GroupedShape, phase: Phase) -> GroupedTile:
    """Return the tile of a shape with the lowest estimate, which is infinite if none fits."""
    return min(tiles_of(shape, phase), key=lambda tile: tile.cost)


def tiles_of(shape: GroupedShape, phase: Phase) -> Iterator[GroupedTile]:
    """Return all tiles of a shape; the cost of those that do not fit is infinite."""
    wgrad = phase is Phase.BACKWARD_WEIGHT
    return _weight_tiles(shape) if wgrad else _product_tiles(shape, phase)


def _product_tiles(shape: GroupedShape, phase: Phase) -> Iterator[GroupedTile]:
    backward = phase is Phase.BACKWARD_INPUT
    size = shape.group_filters if backward else shape.group_channels
    most = max(SLAB_BYTES // (shape.unit_groups * size * shape.itemsize), 1)
    for sides in _tile_sides(shape):
        for buffers in (1, 2):
            yield ProductTile(shape, *sides, 1, buffers, backward, whole=False)
            for count in _units_of_slabs(shape, most):
                yield ProductTile(shape, *sides, count, buffers, backward, whole=True)


def _weight_tiles(shape: GroupedShape) -> Iterator[GroupedTile]:
    channels, filters = _unit_chunks(shape)
    rows_of_taps = shape.window[0]
    channel_chunks = min(channels, max(MAX_WGRAD_WARPS // rows_of_taps, 1))
    filter_chunks = min(filters, max(MAX_WGRAD_WARPS // (rows_of_taps * channel_chunks), 1))
    warps = rows_of_taps * channel_chunks * filter_chunks
    whole = (channel_chunks, filter_chunks) == (channels, filters)
    size = shape.unit_groups * max(shape.group_channels, shape.group_filters) * shape.itemsize
    most = max(min(SLAB_BYTES // size, MAX_WGRAD_WARPS // warps), 1) if whole else 1
    for sides in _tile_sides(shape):
        for count in _units_of_slabs(shape, most):
            for buffers in (1, 2):
                tile = WeightTile(shape, *sides, count, buffers, channel_chunks, filter_chunks, 1)
                for blocks in range(1, max(tile.resident_blocks, 1) + 1):
                    yield replace(tile, blocks_per_sm=blocks)


def _tile_sides(shape: GroupedShape) -> Iterator[tuple[int, int, int]]:
    """Yield samples, rows and columns of tiles that divide the maps about evenly."""
    height, width = shape.sides
    pixels, samples = height * width, 1
    while samples * pixels <= MAX_TILE_PIXELS and samples < 2 * shape.samples:
        yield samples, height, width
        samples *= 2
    for row in _parts(height):
        for column in _parts(width):
            if MIN_TILE_PIXELS <= row * column <= MAX_TILE_PIXELS and row * column < pixels:
                yield 1, row, column


def _parts(side: int) -> list[int]:
    """Return the sides of tiles: a whole side, a half, a third and so on, down to few pixels."""
    return sorted({ceil_div(side, count) for count in range(1, max(side // 2, 2))})


def _unit_chunks(shape: GroupedShape) -> tuple[int, int]:
    """Return the chunks of 16 channels, and of 16 filters, of a unit."""
    groups = shape.unit_groups
    return ceil_div(groups * shape.group_channels, 16), ceil_div(groups * shape.group_filters, 16)


def _units_of_slabs(shape: GroupedShape, most: int) -> list[int]:
    """Return the units of a slab with the fewest slabs, with one slab more, and so on."""
    fewest = ceil_div(shape.units, most)
    return sorted({ceil_div(shape.units, count) for count in range(fewest, fewest + 3)})
