"""Dropout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from dptrain.backends.reference.operation import Operation
from dptrain.backends.replica import Context
from dptrain.network.layers import Dropout
from dptrain.philox import dropout_keep


class Drop(Operation[Dropout]):
    """Dropout with masks of `dptrain.philox`."""

    saved: ClassVar[Mapping[str, str]] = {"factor": "float64"}

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        x = a["x"][:n]
        if not context.training:
            a["y"][:n] = x
            return
        channels, height, width = self.node.output_maps
        keep = dropout_keep(
            self.layer.rate,
            channels * height * width,
            seed=context.seed,
            step=context.step,
            layer=self.node.index,
            samples=context.samples,
        )
        ordered = keep.reshape(n, height, width, channels).transpose(0, 3, 1, 2)
        a["factor"][:n] = ordered / (1.0 - self.layer.rate)
        a["y"][:n] = x * a["factor"][:n]

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        a["dx"][:n] = a["dy"][:n] * a["factor"][:n]
