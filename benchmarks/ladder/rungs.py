"""The simple kernels of the ladder, bound to arrays on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.ladder.layer import Layer, Numbers
from dptrain.backends.cuda.dense.gemm_tiles import ceil_div
from dptrain.backends.cuda.device.device import Array, Device, Function

FOLDER = Path(__file__).parent
"""Folder of the CUDA sources."""

TILE = 16
BLOCK = 256
"""Threads of a one-dimensional block."""

SQUARE = (TILE, TILE, 1)
ROW = (BLOCK, 1, 1)


@dataclass(frozen=True)
class Rung:
    """An implementation of the layer, bound to arrays.

    Attributes:
        name: name of the rung.
        start: enqueues the computation.
        result: returns the result of the last `start`, y (N, K, Ho, Wo).
        extra_bytes: memory in addition to inputs and result.
    """

    name: str
    start: Callable[[], None]
    result: Callable[[], NDArray[Any]]
    extra_bytes: int = 0


def rungs(device: Device, layer: Layer, numbers: Numbers, folder: str = f"{FOLDER}/") -> list[Rung]:
    """Return the rungs, the simplest first.

    Args:
        device: device that computes.
        layer, numbers: layer and its arrays.
        folder: prefix of the source files, as passed to `Device.function`.
    """
    builder = _Rungs(device, layer, numbers, folder)
    return [
        builder.direct("direct, by image", 1),
        builder.direct("direct", layer.samples),
        builder.forward("one block", "one_block.cu", (1, 1, 1), (1024, 1, 1)),
        builder.forward("one block, tiles", "one_block_tiles.cu", (1, 1, 1), SQUARE),
        builder.forward("many blocks", "many_blocks.cu", builder.maps, SQUARE),
        builder.forward("shared tiles", "shared_tiles.cu", builder.maps, SQUARE),
        builder.implicit(),
    ]


class _Rungs:
    """The arrays of a layer on a device, and the rungs that use them.

    Attributes:
        maps: grid over the output (K, Ho Wo) of one image.
    """

    def __init__(self, device: Device, layer: Layer, numbers: Numbers, folder: str) -> None:
        self.device, self.layer, self.folder = device, layer, folder
        self.x, self.w, self.b = map(self._uploaded, (numbers.x, numbers.w, numbers.b))
        self.shape = layer.samples, layer.filters, *layer.out
        self.maps = ceil_div(layer.pixels, TILE), ceil_div(layer.filters, TILE), 1
        channels, height, width, *rest = layer.geometry
        self.geometry = _ints(channels, height, width, *rest)
        self.all_geometry = _ints(layer.samples, channels, height, width, layer.filters, *rest)

    def _uploaded(self, values: NDArray[np.float32]) -> Array:
        array = self.device.zeros(values.shape, "float32")
        self.device.upload(array, values)
        return array

    def _function(self, file: str, name: str) -> Function:
        tiled = "tiles" in file or "implicit" in file
        return self.device.function(
            f"{self.folder}{file}", name, **({"TILE": TILE} if tiled else {})
        )

    def _rung(self, name: str, start: Callable[[], None], result: Array, *extra: Array) -> Rung:
        extra_bytes = sum(array.nbytes for array in extra)
        return Rung(name, start, lambda: self.device.download(result), extra_bytes)

    def _buffer(self) -> Array:
        """Return an im2col buffer for one image, which all images reuse."""
        return self.device.zeros((self.layer.terms, self.layer.pixels), "float32")

    def forward(
        self, name: str, file: str, grid: tuple[int, int, int], block: tuple[int, int, int]
    ) -> Rung:
        """Return a rung that computes im2col and a product for each image."""
        layer, buffer = self.layer, self._buffer()
        y = self.device.zeros(self.shape, "float32")
        unroll, product = self._function("im2col.cu", "im2col"), self._function(file, "gemm_bias")
        sizes = _ints(layer.filters, layer.pixels, layer.terms)
        unroll_grid = ceil_div(layer.terms * layer.pixels, BLOCK), 1, 1

        def start() -> None:
            for n in range(layer.samples):
                unroll(unroll_grid, ROW, [self.x[n], buffer, *self.geometry])
                product(grid, block, [self.w, buffer, self.b, y[n], *sizes])

        return self._rung(name, start, y, buffer)

    def direct(self, name: str, images: int) -> Rung:
        """Return the direct convolution; a launch computes a number of images that divides all."""
        layer = self.layer
        y, function = (
            self.device.zeros(self.shape, "float32"),
            self._function("direct.cu", "direct"),
        )
        geometry = [np.int32(images), *self.all_geometry[1:]]
        grid = ceil_div(images * layer.filters * layer.pixels, BLOCK), 1, 1

        def start() -> None:
            for n in range(0, layer.samples, images):
                function(grid, ROW, [self.x[n:], self.w, self.b, y[n:], *geometry])

        return self._rung(name, start, y)

    def implicit(self) -> Rung:
        """Return the implicit GEMM, one launch for all images."""
        layer = self.layer
        y = self.device.zeros(self.shape, "float32")
        function = self._function("implicit.cu", "conv2d_forward")
        grid = ceil_div(layer.samples * layer.pixels, TILE), ceil_div(layer.filters, TILE), 1
        args = [self.x, self.w, self.b, y, *self.all_geometry]
        return self._rung("implicit", lambda: function(grid, SQUARE, args), y)


def _ints(*values: int) -> list[np.int32]:
    return [np.int32(value) for value in values]
