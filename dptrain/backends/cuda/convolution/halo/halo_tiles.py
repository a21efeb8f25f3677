"""Geometry of convolutions that read halo tiles from shared memory (``halo_tile.cuh``).

A halo tile contains the input pixels of a tile of output pixels together with the border (the halo)
that their filter windows reach.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dptrain.backends.cuda.dense.gemm_tiles import ceil_div
from dptrain.backends.cuda.device.hardware import ELEMENT_BYTES, VECTOR_BYTES, allows_tf32x3
from dptrain.network.layers import Conv2d
from dptrain.network.network import Node
from dptrain.plan.limits import DeviceLimits

CHANNEL_MULTIPLE = 32
"""Channels and filters in multiples of this fill tiles of one or two output lines, and the steps
of the sum in every precision."""

STEP_PACKS = 2
"""Packs of 16 bytes of channels in a step of the sum."""


@dataclass(frozen=True)
class InputView:
    """The input of a convolution of stride 1 with shared padding: ``View`` of the kernels.

    Rows follow each other without a gap: the zeros that pad a row on its right also pad the next
    row on its left, and the zeros below a sample also pad the next sample above.

    Attributes:
        height, width, channels: of the input.
        top, left: rows and columns of zero padding before the input.
        out_height, out_width, filters: of the output.
        r, s: height and width of the filter.
        align: the row pitch is a multiple of this number of pixels.
        stored_channels: channels of a pixel in memory, if `channels` are padded or those of a
            folded pixel; otherwise 0.
        fold: pixels in memory that form a pixel of a folded map: the product of the strides.
        row_samples: samples whose pixels alternate in a row. What is counted per sample, such as
            rows, then belongs to so many samples.
    """

    height: int
    width: int
    channels: int
    top: int
    left: int
    out_height: int
    out_width: int
    filters: int
    r: int
    s: int
    align: int = 1
    stored_channels: int = 0
    fold: int = 1
    row_samples: int = 1

    @classmethod
    def forward(cls, node: Node) -> InputView:
        """Return the view of x that produces the output of a convolution layer."""
        layer = node.layer_of(Conv2d)
        (c, h, w), (k, ho, wo) = node.input_shape, node.output_shape
        (top, _), (left, _) = layer.pads(node.input_shape)
        return cls(h, w, c, top, left, ho, wo, k, *layer.window)

    @property
    def backward(self) -> InputView:
        """The view of dz that produces dx: a convolution with the rotated filter."""
        return InputView(
            self.out_height, self.out_width, self.filters, self.r - 1 - self.top,
            self.s - 1 - self.left, self.height, self.width, self.channels, self.r, self.s,
        )  # fmt: skip

    @property
    def row_pitch(self) -> int:
        """Pixels from the start of a row to the start of the next."""
        padded = max(self.left, self.out_width + self.s - 1 - self.width - self.left)
        return ceil_div(self.row_samples * (self.width + padded), self.align) * self.align

    @property
    def sample_rows(self) -> int:
        """Rows from the start of a sample to the start of the next."""
        return self.height + max(self.top, self.out_height + self.r - 1 - self.height - self.top)

    @property
    def memory_channels(self) -> int:
        """Channels of a pixel in memory."""
        return self.stored_channels or self.channels

    def folded(self, strides: tuple[int, int]) -> InputView:
        """Return the stride-1 convolution on the folded map (space to depth).

        ``strides[0] · strides[1]`` pixels become one pixel with as many times the channels, or only
        those of the first pixel if the filter has one tap. The folded map includes the padding.
        """
        if strides == (1, 1):
            return self
        (down, across), fold = strides, strides[0] * strides[1]
        parts = 1 if (self.r, self.s) == (1, 1) else fold
        r, s = ceil_div(self.r, down), ceil_div(self.s, across)
        return replace(
            self, r=r, s=s, channels=parts * self.channels, stored_channels=self.channels,
            fold=fold, top=0, left=0,
            height=max(ceil_div(self.height + self.top, down), self.out_height + r - 1),
            width=max(ceil_div(self.width + self.left, across), self.out_width + s - 1),
        )  # fmt: skip

    def padded(self, element_bytes: int) -> InputView:
        """Return the view with channels that fill whole steps of the sum."""
        step = STEP_PACKS * VECTOR_BYTES // element_bytes
        channels = ceil_div(self.channels, step) * step
        if channels == self.channels:
            return self
        return replace(self, channels=channels, stored_channels=self.memory_channels)


def supports_halo_tiles(
    view: InputView, precision: str, strides: tuple[int, int], limits: DeviceLimits
) -> bool:
    """Return whether halo-tile kernels exist for a layer.

    They require tensor cores. fp32 uses 3xTF32 if that is enabled, and only for layers that fill
    halo tiles. The padding must be smaller than the filter, because neighbouring rows and samples
    share their padding; folded maps share none.
    """
    tf32x3 = allows_tf32x3(precision, limits) and fills_halo_tiles(view, strides)
    if not (precision in ELEMENT_BYTES or tf32x3):
        return False
    if strides != (1, 1):
        return True
    bottom = view.out_height + view.r - 1 - view.height - view.top
    right = view.out_width + view.s - 1 - view.width - view.left
    return max(view.top, bottom) < view.r and max(view.left, right) < view.s


def fills_halo_tiles(view: InputView, strides: tuple[int, int]) -> bool:
    """Return whether a layer fills tiles and steps without zeros.

    Then it has stride 1, and its channels and filters are multiples of `CHANNEL_MULTIPLE`.
    """
    counts = view.channels, view.filters
    return strides == (1, 1) and all(count % CHANNEL_MULTIPLE == 0 for count in counts)
