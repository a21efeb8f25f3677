"""Geometry of convolutions that read halo tiles from shared memory (``kernels/halo_tile.cuh``).

A halo tile contains the input pixels of a tile of output pixels together with the border (the halo)
that their filter windows reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dptrain.backends.cuda.hardware import ELEMENT_BYTES, allows_tf32x3
from dptrain.network.network import Node
from dptrain.plan.limits import DeviceLimits

CHANNEL_MULTIPLE = 32
"""Channels and filters are multiples of this: two tensor-core steps in every precision."""


@dataclass(frozen=True)
class InputView:
    """The input of a stride-1 convolution, laid out with shared padding: ``View`` of the kernels.

    Rows follow each other without a gap: the zeros that pad a row on its right also pad the next
    row on its left, and the zeros below a sample also pad the next sample above.

    Attributes:
        height, width, channels: of the input.
        top, left: rows and columns of zero padding before the input.
        out_height, out_width, filters: of the output.
        r, s: height and width of the filter.
        align: the row pitch is a multiple of this number of pixels.
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

    @classmethod
    def forward(cls, node: Node) -> InputView:
        """Return the view of x that produces the output of a convolution layer."""
        layer: Any = node.layer
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
        return -(-(self.width + padded) // self.align) * self.align

    @property
    def sample_rows(self) -> int:
        """Rows from the start of a sample to the start of the next."""
        return self.height + max(self.top, self.out_height + self.r - 1 - self.height - self.top)


def supports_halo_tiles(
    view: InputView, precision: str, strides: tuple[int, int], limits: DeviceLimits
) -> bool:
    """Return whether halo-tile kernels exist for a layer.

    They require tensor cores (fp32 uses 3xTF32 if that is enabled), stride 1, channels and filters
    in multiples of `CHANNEL_MULTIPLE`, and padding smaller than the filter, because neighbouring
    rows and samples share their padding.
    """
    if not (precision in ELEMENT_BYTES or allows_tf32x3(precision, limits)) or strides != (1, 1):
        return False
    bottom = view.out_height + view.r - 1 - view.height - view.top
    right = view.out_width + view.s - 1 - view.width - view.left
    padding_fits = max(view.top, bottom) < view.r and max(view.left, right) < view.s
    return (
        padding_fits
        and view.channels % CHANNEL_MULTIPLE == 0
        and view.filters % CHANNEL_MULTIPLE == 0
    )
