"""Positions of patches in the maps of a convolution; see ``conv2d_wgmma.cu``."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from dptrain.backends.cuda.dense.gemm_tiles import ceil_div
from dptrain.backends.cuda.device.tensor_maps import PatchGrid
from dptrain.network.layers import Conv2d
from dptrain.network.network import Node


@dataclass(frozen=True)
class PixelClass:
    """Pixels of the input that the same taps of a convolution with strides reach.

    Attributes:
        counts: rows and columns of pixels.
        window: rows and columns of taps; 0 if none reaches the pixels.
        first: row and column of the first pixel of the output that the first of them reads.
    """

    counts: tuple[int, int]
    window: tuple[int, int]
    first: tuple[int, int]

    @property
    def pixels(self) -> int:
        """Number of pixels of a sample."""
        return math.prod(self.counts)

    @property
    def taps(self) -> int:
        """Number of taps."""
        return math.prod(self.window)


def pixel_classes(node: Node) -> list[PixelClass]:
    """Return the classes of the pixels of a convolution's input, in the order of ``blockIdx.z``."""
    layer = node.layer_of(Conv2d)
    pads = [before for before, _ in layer.pads(node.input_shape)]
    sizes = zip(node.input_maps[1:], layer.window, layer.strides, pads, strict=True)
    lines = [
        [_line_class(index, size, window, stride, pad) for index in range(stride)]
        for size, window, stride, pad in sizes
    ]
    return [
        PixelClass(*((down, across) for down, across in zip(*pair, strict=True)))
        for pair in itertools.product(*lines)
    ]


def _line_class(index: int, size: int, window: int, stride: int, pad: int) -> tuple[int, int, int]:
    """Return pixels, taps and first output pixel of a class of one dimension."""
    tap = (index + pad) % stride
    taps = ceil_div(window - tap, stride) if window > tap else 0
    return ceil_div(size - index, stride), taps, (index + pad) // stride - (taps - 1)


def forward_grid(node: Node) -> PatchGrid:
    """Return the patches of the input of a convolution."""
    layer = node.layer_of(Conv2d)
    (top, _), (left, _) = layer.pads(node.input_shape)
    _, down, across = node.output_maps
    return PatchGrid((down, across), (-top, -left), layer.strides)


def class_grids(node: Node) -> list[PatchGrid]:
    """Return the patches of the output's gradient from which each class of pixels is computed."""
    return [PatchGrid(each.counts, each.first, (1, 1)) for each in pixel_classes(node)]
