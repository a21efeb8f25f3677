"""How convolutions that read windows of maps are cut; see ``kernels/halo_tile.cuh``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dptrain.network.network import Node

PIECE = 16
"""Bytes that are read and written at once."""

SIZES = {"tf32": 4, "bf16": 2}
"""Bytes of a number, by precision; there are no such kernels in float32."""

WIDTH = 32
"""What channels and filters are a multiple of: two steps of tensor cores in every precision."""

MULTIPROCESSORS = 132
"""That all tiles together should fill."""

SHARED_BYTES = 227 << 10
"""Of a multiprocessor."""

RESERVED_BYTES = 1 << 10
"""Of that, which each block costs besides its own."""


@dataclass(frozen=True)
class View:
    """A map as a convolution of stride 1 reads it: ``View`` of ``halo_tile.cuh``.

    Attributes:
        height, width, channels: of the map.
        top, left: zeros above and before it.
        out_height, out_width, filters: of the output.
        r, s: of the patches.
        align: what pixels from a row to the next are a multiple of.
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
    def forward(cls, node: Node) -> View:
        """x, as a layer makes its output of it."""
        layer: Any = node.layer
        (c, h, w), (k, ho, wo) = node.input_shape, node.output_shape
        (top, _), (left, _) = layer.pads(node.input_shape)
        return cls(h, w, c, top, left, ho, wo, k, *layer.window)

    @property
    def backward(self) -> View:
        """dz, as dx is made of it."""
        return View(
            self.out_height, self.out_width, self.filters, self.r - 1 - self.top,
            self.s - 1 - self.left, self.height, self.width, self.channels, self.r, self.s,
        )  # fmt: skip

    @property
    def across(self) -> int:
        """Pixels from a row to the next."""
        padded = max(self.left, self.out_width + self.s - 1 - self.width - self.left)
        return -(-(self.width + padded) // self.align) * self.align

    @property
    def down(self) -> int:
        """Rows from a sample to the next."""
        return self.height + max(self.top, self.out_height + self.r - 1 - self.height - self.top)


def suits(view: View, precision: str, strides: tuple[int, int]) -> bool:
    """Whether there are kernels for a layer, and it is wide enough for them."""
    if precision not in SIZES or strides != (1, 1):
        return False
    bottom = view.out_height + view.r - 1 - view.height - view.top
    right = view.out_width + view.s - 1 - view.width - view.left
    # More zeros than a patch reaches would have no place between maps.
    padded = max(view.top, bottom) < view.r and max(view.left, right) < view.s
    return padded and view.channels % WIDTH == 0 and view.filters % WIDTH == 0
