"""Tile configuration of the weight gradient of pooled first layers.

See ``conv2d_backward_weight_few_channels.cu``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dptrain.backends.cuda.convolution import gather_convolution
from dptrain.backends.cuda.convolution.bound_convolution import BoundConvolution, Case
from dptrain.backends.cuda.convolution.halo import wgrad_tiles
from dptrain.backends.cuda.convolution.halo.halo_tiles import InputView
from dptrain.backends.cuda.dense.gemm_tiles import GemmConfig, SplitK, ceil_div
from dptrain.backends.cuda.device.device import Extent
from dptrain.backends.cuda.device.hardware import (
    DEFAULT_LIMITS,
    ELEMENT_BYTES,
    VECTOR_BYTES,
    WARP_SIZE,
)
from dptrain.backends.replica import Kernel
from dptrain.plan.limits import DeviceLimits
from dptrain.plan.lowering import Phase

MIN_PIXELS = 1 << 16
"""Computed output pixels of all samples from which the kernel is used. In tf32, conv1 of model0
takes 9.3 instead of 14.4 µs with 77 samples (2¹⁶·1.2 pixels), and 43 instead of 141 µs with 2048
(H100, CUDA 13, November 2026)."""

GAIN = 0.65
"""Time as a part of that of the fastest of the other kernels, for 77 samples of model0."""

WARPS = 8
"""Warps of a block, which divide the windows of a strip."""

FILTERS = 16, 32
"""Supported numbers of filters."""

MARGIN = 16
"""Bytes before an input line in shared memory, which contain its padding."""

MAX_ACCUMULATORS = 120
"""Most accumulators of a thread."""

OTHER_REGISTERS = 56
"""Registers of a thread apart from its accumulators. An estimate."""

MAX_BLOCKS = 4
"""Most resident blocks of a multiprocessor."""

STRIP_WINDOWS = 256
"""Pooling windows of a strip, if a sample has more."""


@dataclass(frozen=True)
class FewChannelWgradTile:
    """Tile configuration of a block.

    Attributes:
        precision: ``tf32`` or ``bf16``.
        view: the input.
        strip_lines: lines of pooling windows of a strip.
        limits: of the GPU.
    """

    precision: str
    view: InputView
    strip_lines: int
    limits: DeviceLimits = DEFAULT_LIMITS

    ALGORITHM: ClassVar[str] = "few-channel weight gradient"

    @property
    def _element_bytes(self) -> int:
        return ELEMENT_BYTES[self.precision]

    @property
    def line_windows(self) -> int:
        """Pooling windows of a line."""
        return self.view.out_width // 2

    @property
    def patch_elements(self) -> int:
        """Padded elements of a patch line, which the taps of a filter row and a window cover."""
        return ceil_div((self.view.s + 1) * self.view.channels + 1, 8) * 8

    @property
    def line_bytes(self) -> int:
        """Bytes of an input line."""
        return self.view.width * self.view.channels * self._element_bytes

    @property
    def _input_pitch(self) -> int:
        """Bytes of an input line with margins."""
        last = 2 * (self.line_windows - 1) - self.view.left + self.view.s + 1
        reach = (last * self.view.channels + 2) * self._element_bytes
        return ceil_div(MARGIN + max(self.line_bytes, reach), VECTOR_BYTES) * VECTOR_BYTES

    @property
    def _input_lines(self) -> int:
        return 2 * self.strip_lines + self.view.r - 1

    @property
    def accumulators(self) -> int:
        """Accumulators of a thread."""
        return 2 * self.view.r * self.patch_elements * self.view.filters // WARP_SIZE

    @property
    def strips_per_sample(self) -> int:
        """Strips of a sample."""
        return ceil_div(self.view.out_height // 2, self.strip_lines)

    @property
    def shared_bytes(self) -> int:
        """Two buffers of a strip and its patch lines, or the sums of warps, in bytes."""
        step = 32 // self._element_bytes
        windows = ceil_div(self.strip_lines * self.line_windows, step) * step
        buffer = self._input_lines * self._input_pitch
        buffer += windows * self.view.filters * (self._element_bytes + 1)
        patches = self._input_lines * self.line_windows * self.patch_elements
        exchanged = WARPS // 2 * self.accumulators * WARP_SIZE * 4
        return max(2 * buffer + patches * self._element_bytes, exchanged)

    @property
    def block(self) -> Extent:
        """Threads of a block."""
        return WARPS * WARP_SIZE, 1, 1

    @property
    def blocks_per_sm(self) -> int:
        """Resident blocks of a multiprocessor (occupancy)."""
        registers = self.accumulators + OTHER_REGISTERS
        resident = self.limits.blocks_per_sm(self.block[0], registers, self.shared_bytes)
        return min(resident, MAX_BLOCKS)

    @property
    def defines(self) -> dict[str, int]:
        """Macros of the kernel."""
        return {
            "TILE_M": self.view.filters, "TILE_N": 16, "WARP_M": 16, "WARP_N": 16,
            "TILE_K_WORDS": 16, "PREFETCH_STEPS": 1, "K_GROUPS": 1, "WARPS": WARPS,
            "MIN_BLOCKS": self.blocks_per_sm, "TAP_ROWS": self.view.r, "TAP_COLUMNS": self.view.s,
            "CHANNELS": self.view.channels, "PAD_LEFT": self.view.left,
            "LINE_WINDOWS": self.line_windows, "STRIP_LINES": self.strip_lines,
            "PATCH_ELEMENTS": self.patch_elements, "INPUT_PITCH": self._input_pitch,
            "COPY_BYTES": math.gcd(self.line_bytes, VECTOR_BYTES),
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.view.filters} filters, strips of {self.strip_lines} lines"

    def grid(self, rows: int, columns: int, parts: int = 1) -> Extent:
        """Return the blocks of a sum split into `parts`."""
        return 1, 1, parts

    def strips(self, samples: int) -> int:
        """Return the strips of so many samples."""
        return samples * self.strips_per_sample

    def config(self, filters: int, samples: int) -> GemmConfig:
        """Return this tile with the split-K that fills the GPU; its terms are strips."""
        strips = self.strips(samples)
        part = max(ceil_div(strips, self.limits.multiprocessors * self.blocks_per_sm), 1)
        return GemmConfig(self, SplitK(max(ceil_div(strips, part), 1), part))


def few_channel_wgrad_candidates(
    view: InputView, precision: str, limits: DeviceLimits
) -> Iterator[FewChannelWgradTile]:
    """Yield the tile configurations that fit a multiprocessor, of a pooled layer of stride 1."""
    if precision not in ELEMENT_BYTES or view.filters not in FILTERS or view.channels >= 8:
        return
    height = view.out_height // 2
    for lines in range(1, height + 1):
        tile = FewChannelWgradTile(precision, view, lines, limits)
        aligned = tile.line_bytes % 4 == 0 and (
            view.left * view.channels * ELEMENT_BYTES[precision] <= MARGIN - 2
        )
        fits = tile.accumulators <= MAX_ACCUMULATORS and tile.blocks_per_sm > 0
        if aligned and fits and (lines == height or height % lines == 0):
            yield tile


def select_few_channel_wgrad_tile(
    view: InputView, precision: str, samples: int, limits: DeviceLimits
) -> FewChannelWgradTile | None:
    """Return the tile configuration of a pooled layer; None if the kernel is not used."""
    if samples * view.out_height * view.out_width < MIN_PIXELS:
        return None
    return next(iter(rank_few_channel_wgrad_tiles(view, precision, samples, limits)), None)


def rank_few_channel_wgrad_tiles(
    view: InputView, precision: str, samples: int, limits: DeviceLimits
) -> list[FewChannelWgradTile]:
    """Return the tile configurations, the preferred one first.

    Strips should occupy all multiprocessors and have at most `STRIP_WINDOWS` windows.
    """

    def key(tile: FewChannelWgradTile) -> tuple[bool, bool, int]:
        blocks = limits.multiprocessors * tile.blocks_per_sm
        idle = samples * tile.strips_per_sample < blocks
        windows = tile.strip_lines * tile.line_windows
        return idle, windows > STRIP_WINDOWS, -windows

    return sorted(few_channel_wgrad_candidates(view, precision, limits), key=key)


def supports(case: Case) -> bool:
    """Return whether the kernel exists for a case: pooled, without strides and dilation."""
    plain = case.strides == (1, 1) and not case.is_dilated
    return case.pools and not case.stores_dz and plain


def estimate(case: Case) -> Sequence[tuple[float, FewChannelWgradTile]]:
    """Return the estimated µs of the tile configurations, which are parts of other kernels' times.

    They have no estimates of their own: the first of `rank_few_channel_wgrad_tiles` is selected.
    """
    product = case.view, case.precision, case.samples, case.limits
    if select_few_channel_wgrad_tile(*product) is None:
        return ()
    others = [*gather_convolution.estimate(case), *wgrad_tiles.estimate(case)]
    least = GAIN * min(time for time, _ in others)
    best, *rest = rank_few_channel_wgrad_tiles(*product)
    return [(least, best), *((1.1 * least, tile) for tile in rest)]


def config_of(case: Case, tile: FewChannelWgradTile) -> GemmConfig:
    """Return the configuration of a product, with split-K."""
    return tile.config(case.group.head.output_shape[0], case.samples)


def bind(operation: BoundConvolution, phase: Phase, tile: FewChannelWgradTile) -> Kernel:
    """Return the stage of a weight gradient."""
    samples = operation.setting.summed_samples
    config = tile.config(operation.group.head.output_shape[0], samples)
    name = "conv2d_backward_weight_few_channels"
    return operation.gradient_product(name, config, tile.strips)
