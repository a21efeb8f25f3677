"""Dropout of elements and of samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.reference.operation import Operation
from dptrain.backends.replica import Context
from dptrain.network.layers import RandomMask
from dptrain.philox import dropout_keep


class Drop(Operation[RandomMask]):
    """Dropout with masks of `dptrain.philox`."""

    saved: ClassVar[Mapping[str, str]] = {"factor": "float64"}

    def _draw(self, context: Context, size: int) -> NDArray[Any]:
        """Return `size` random choices for each sample, True with probability 1 − rate."""
        return dropout_keep(
            self.layer.rate,
            size,
            seed=context.seed,
            step=context.step,
            layer=self.node.index,
            samples=context.samples,
        )

    def _kept(self, context: Context) -> NDArray[Any]:
        """Return which elements are kept, (n, C, H, W)."""
        channels, height, width = self.node.output_maps
        kept = self._draw(context, channels * height * width)
        ordered = kept.reshape(context.n, height, width, channels)
        return np.asarray(ordered.transpose(0, 3, 1, 2))

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        x = a["x"][:n]
        if not context.training:
            a["y"][:n] = x
            return
        a["factor"][:n] = self._kept(context) / (1.0 - self.layer.rate)
        a["y"][:n] = x * a["factor"][:n]

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        a["dx"][:n] = a["dy"][:n] * a["factor"][:n]


class DropSamples(Drop):
    """Stochastic depth: one choice for each sample."""

    def _kept(self, context: Context) -> NDArray[Any]:
        return self._draw(context, 1).reshape(context.n, 1, 1, 1)
