"""Convolution and its derivatives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.reference.operation import WeightedOperation
from dptrain.backends.reference.windows import pad, scatter_windows, windows_of
from dptrain.backends.replica import Context
from dptrain.network.layers import Conv2d


class Convolution(WeightedOperation[Conv2d]):
    """y[n, k, i, j] = b[k] + Σ x[n, c, i·stride + r·dilation − top, …] w[k, c, r, s].

    The sum is over the channels c of the group of filter k.
    """

    def _groups(self) -> Iterator[tuple[slice, slice]]:
        """Yield the channels and the filters of each group."""
        groups = self.layer.groups
        channels, filters = self.node.input_shape[0] // groups, self.layer.filters // groups
        for g in range(groups):
            yield slice(g * channels, (g + 1) * channels), slice(g * filters, (g + 1) * filters)

    def _input_windows(self, n: int) -> NDArray[Any]:
        """Return the windows (n, C, Ho, Wo, R, S) of the input."""
        layer, node = self.layer, self.node
        ho, wo = node.output_shape[1:]
        padded = pad(self.arrays["x"][:n], layer.pads(node.input_shape))
        found = windows_of(padded, layer.window, layer.strides, layer.dilations)
        return found[:, :, :ho, :wo]

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        windows = self._input_windows(n)
        for channels, filters in self._groups():
            weight = a["weight"][filters]
            y = np.tensordot(windows[:, channels], weight, ((1, 4, 5), (1, 2, 3)))
            if self.layer.bias:
                y += a["bias"][filters]
            a["y"][:n, filters] = y.transpose(0, 3, 1, 2)

    def backward_weight(self, context: Context) -> None:
        a, n = self.arrays, context.n
        dy, windows = a["dy"][:n], self._input_windows(n)
        over_outputs = ((0, 2, 3), (0, 2, 3))
        for channels, filters in self._groups():
            dweight = np.tensordot(dy[:, filters], windows[:, channels], over_outputs)
            a["dweight"][filters] = dweight
        if self.layer.bias:
            a["dbias"][:] = dy.sum(axis=(0, 2, 3))

    def backward_input(self, context: Context) -> None:
        a, n = self.arrays, context.n
        layer = self.layer
        pads = layer.pads(self.node.input_shape)
        for channels, filters in self._groups():
            dwindows = np.tensordot(a["dy"][:n, filters], a["weight"][filters], ((1,), (0,)))
            dwindows = dwindows.transpose(0, 3, 1, 2, 4, 5)
            dx = a["dx"][:n, channels]
            scatter_windows(dwindows, dx, layer.strides, pads, layer.dilations)
