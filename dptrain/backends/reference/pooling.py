"""Pooling and its derivatives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.reference.operation import Operation
from dptrain.backends.reference.windows import pad, scatter_windows, windows_of
from dptrain.backends.replica import Context
from dptrain.network.combining import GlobalAveragePool2d, GlobalMaxPool2d
from dptrain.network.layers import AveragePool2d, MaxPool2d, Pool2d, SumPool2d

P = TypeVar("P", bound=Pool2d)


class _Pooling(Operation[P]):
    """A layer that reduces windows of a map."""

    def windows(self, x: NDArray[Any], outside: float) -> NDArray[Any]:
        """Return the windows (n, C, Ho, Wo, R·S) of an array (n, C, H, W)."""
        layer, node = self.layer, self.node
        ho, wo = node.output_shape[1:]
        padded = pad(x, layer.pads(node.input_shape), outside)
        view = windows_of(padded, layer.windows, layer.strides)[:, :, :ho, :wo]
        return view.reshape(*view.shape[:4], math.prod(layer.windows))

    def scatter(self, dwindows: NDArray[Any], n: int) -> None:
        """Write dx, the sums of the gradients of windows (n, C, Ho, Wo, R·S)."""
        layer = self.layer
        dwindows = dwindows.reshape(*dwindows.shape[:4], *layer.windows)
        pads = layer.pads(self.node.input_shape)
        scatter_windows(dwindows, self.arrays["dx"][:n], layer.strides, pads)


class MaxPooling(_Pooling[MaxPool2d]):
    """Max pooling. The gradient goes to the first of the largest elements of each window."""

    saved: ClassVar[Mapping[str, str]] = {"argmax": "int64"}

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        windows = self.windows(a["x"][:n], -np.inf)
        a["y"][:n] = windows.max(axis=-1)
        if context.training and not self.group.infers:
            a["argmax"][:n] = windows.argmax(axis=-1)

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        chosen = a["argmax"][:n, ..., None] == np.arange(math.prod(self.layer.windows))
        self.scatter(chosen * a["dy"][:n, ..., None], n)


class _WeightedPooling(_Pooling[P]):
    """Weighted sums. Every element of a window receives the window's gradient."""

    def _weight(self) -> NDArray[Any]:
        """Return the factors (1, 1, Ho, Wo, 1) of the sums."""
        return np.ones((1, 1, 1, 1, 1))

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        windows = self.windows(a["x"][:n], 0.0)
        a["y"][:n] = (windows * self._weight()).sum(axis=-1)

    def backward(self, context: Context) -> None:
        n = context.n
        dy = self.arrays["dy"][:n, ..., None] * self._weight()
        self.scatter(np.broadcast_to(dy, (*dy.shape[:4], math.prod(self.layer.windows))), n)


class SumPooling(_WeightedPooling[SumPool2d]):
    """Sum pooling."""


class AveragePooling(_WeightedPooling[AveragePool2d]):
    """Average pooling: the sum divided by the number of elements inside the map, or of all."""

    def _weight(self) -> NDArray[Any]:
        if self.layer.count_padding:
            return np.full((1, 1, 1, 1, 1), 1.0 / math.prod(self.layer.windows))
        inside = self.windows(np.ones((1, *self.node.input_shape)), 0.0)[:, :1]
        return np.asarray(1.0 / inside.sum(axis=-1, keepdims=True))


class GlobalAveragePooling(Operation[GlobalAveragePool2d]):
    """The mean of each map. Every pixel receives the same part of its gradient."""

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        a["y"][:n] = a["x"][:n].mean(axis=(2, 3), keepdims=True)

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        height, width = self.node.input_shape[1:]
        a["dx"][:n] = a["dy"][:n] / (height * width)


class GlobalMaxPooling(Operation[GlobalMaxPool2d]):
    """The maximum of each map. The gradient goes to the first of the largest elements."""

    saved: ClassVar[Mapping[str, str]] = {"argmax": "int64"}

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        maps = a["x"][:n].reshape(n, self.node.output_shape[0], -1)
        a["y"][:n, :, 0, 0] = maps.max(axis=2)
        if context.training and not self.group.infers:
            a["argmax"][:n, :, 0, 0] = maps.argmax(axis=2)

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        pixels = np.arange(math.prod(self.node.input_shape[1:]))
        dx = (a["argmax"][:n, :, 0] == pixels) * a["dy"][:n, :, 0]
        a["dx"][:n] = dx.reshape(a["dx"][:n].shape)
