"""Every layer and its exact derivative in NumPy, written as directly as possible.

Arrays are (N, C, H, W). An operation reads and writes the arrays that it was bound to, for the
first n samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from dptrain.backends.replica import Arrays, Context, Kernel
from dptrain.network.biases import BiasAdd
from dptrain.network.layers import (
    AveragePool2d,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    Layer,
    LocalResponseNorm,
    MaxPool2d,
    Pads,
    ReLU,
    Sigmoid,
    SumPool2d,
)
from dptrain.network.network import Node
from dptrain.plan.lowering import Access, BufferSpec, GroupNeeds, Phase, Setting
from dptrain.plan.random import dropout_keep


class Operation(ABC):
    """A layer bound to arrays.

    Class attributes:
        backward_reads: arrays that backward reads: ``x``, ``y``, or both.
        saved: buffers with the shape of the output that forward writes for backward, with dtypes.
    """

    backward_reads: ClassVar[tuple[str, ...]] = ()
    saved: ClassVar[Mapping[str, str]] = {}

    def __init__(self, node: Node, arrays: Arrays) -> None:
        self.node, self.arrays = node, arrays

    @classmethod
    def needs(cls, node: Node, setting: Setting) -> GroupNeeds:
        """Return what each phase reads and writes; here of a layer without parameters."""
        shape = (setting.batch_size, *node.output_maps)
        buffers = {k: BufferSpec(shape, v) for k, v in cls.saved.items()}
        buffers = buffers if setting.training else {}
        phases = {Phase.FORWARD: Access(("x",), ("y", *buffers))}
        if setting.training:
            phases[Phase.BACKWARD] = Access(("dy", *cls.backward_reads, *buffers), ("dx",))
        return GroupNeeds(phases, buffers)

    def kernels(self) -> Mapping[Phase, Kernel]:
        """Return the kernel of each phase."""
        return {Phase.FORWARD: self.forward, Phase.BACKWARD: self.backward}

    @abstractmethod
    def forward(self, context: Context) -> None:
        """Write y from x."""

    def backward(self, context: Context) -> None:
        """Write dx from dy."""


class _Weighted(Operation):
    """A layer with weight and bias."""

    @classmethod
    def needs(cls, node: Node, setting: Setting) -> GroupNeeds:
        phases = {Phase.FORWARD: Access(("x",), ("y",))}
        if setting.training:
            phases[Phase.BACKWARD_WEIGHT] = Access(("x", "dy"))
            phases[Phase.BACKWARD_INPUT] = Access(("dy",), ("dx",))
        return GroupNeeds(phases)

    def kernels(self) -> Mapping[Phase, Kernel]:
        return {
            Phase.FORWARD: self.forward,
            Phase.BACKWARD_WEIGHT: self.backward_weight,
            Phase.BACKWARD_INPUT: self.backward_input,
        }

    @abstractmethod
    def backward_weight(self, context: Context) -> None:
        """Write dweight and dbias from x and dy."""

    @abstractmethod
    def backward_input(self, context: Context) -> None:
        """Write dx from dy and weight."""


def _pad(x: NDArray[Any], pads: Pads, value: float = 0.0) -> NDArray[Any]:
    return np.pad(x, ((0, 0), (0, 0), *pads), constant_values=value)


def _crop(x: NDArray[Any], pads: Pads) -> NDArray[Any]:
    (top, bottom), (left, right) = pads
    return x[:, :, top : x.shape[2] - bottom, left : x.shape[3] - right]


def _windows(x: NDArray[Any], window: tuple[int, int], strides: tuple[int, int]) -> NDArray[Any]:
    """Return a view (N, C, Ho, Wo, R, S) of every window of an array (N, C, H, W)."""
    return sliding_window_view(x, window, axis=(2, 3))[:, :, :: strides[0], :: strides[1]]


class Convolution(_Weighted):
    """y[n, k, i, j] = b[k] + Σ x[n, c, i·stride + r − top, …] w[k, c, r, s]."""

    def _geometry(self) -> tuple[tuple[int, int], tuple[int, int], Pads]:
        layer = self.node.layer
        assert isinstance(layer, Conv2d)
        return layer.window, layer.strides, layer.pads(self.node.input_shape)

    def _input_windows(self, n: int) -> NDArray[Any]:
        window, strides, pads = self._geometry()
        ho, wo = self.node.output_shape[1:]
        return _windows(_pad(self.arrays["x"][:n], pads), window, strides)[:, :, :ho, :wo]

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        y = np.tensordot(self._input_windows(n), a["weight"], ((1, 4, 5), (1, 2, 3)))
        a["y"][:n] = (y + a["bias"]).transpose(0, 3, 1, 2)

    def backward_weight(self, context: Context) -> None:
        a, n = self.arrays, context.n
        dy = a["dy"][:n]
        a["dweight"][:] = np.tensordot(dy, self._input_windows(n), ((0, 2, 3), (0, 2, 3)))
        a["dbias"][:] = dy.sum(axis=(0, 2, 3))

    def backward_input(self, context: Context) -> None:
        a, n = self.arrays, context.n
        (r, s), (vertical, horizontal), pads = self._geometry()
        dx = _pad(np.zeros_like(a["x"][:n]), pads)
        # dwindows[n, i, j, c, r, s]: what each window's elements receive from its output.
        dwindows = np.tensordot(a["dy"][:n], a["weight"], ((1,), (0,)))
        ho, wo = self.node.output_shape[1:]
        for i in range(r):
            for j in range(s):
                rows = slice(i, i + vertical * (ho - 1) + 1, vertical)
                columns = slice(j, j + horizontal * (wo - 1) + 1, horizontal)
                dx[:, :, rows, columns] += dwindows[..., i, j].transpose(0, 3, 1, 2)
        a["dx"][:n] = _crop(dx, pads)


class FullyConnected(_Weighted):
    """y = x Wᵀ + b, row by row."""

    def _rows(self, n: int) -> NDArray[Any]:
        """Return the input as (n, in). The shape is explicit because −1 is ambiguous for n = 0."""
        rows: NDArray[Any] = self.arrays["x"][:n].reshape(n, self.arrays["weight"].shape[1])
        return rows

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        x = self._rows(n)
        a["y"][:n, :, 0, 0] = x @ a["weight"].T + a["bias"]

    def backward_weight(self, context: Context) -> None:
        a, n = self.arrays, context.n
        dy = a["dy"][:n, :, 0, 0]
        a["dweight"][:] = dy.T @ self._rows(n)
        a["dbias"][:] = dy.sum(axis=0)

    def backward_input(self, context: Context) -> None:
        a, n = self.arrays, context.n
        dx = a["dy"][:n, :, 0, 0] @ a["weight"]
        a["dx"][:n] = dx.reshape(a["dx"][:n].shape)


class _Pooling(Operation):
    """A layer that reduces windows of a map."""

    outside: ClassVar[float] = 0.0

    def _geometry(self) -> tuple[tuple[int, int], tuple[int, int], Pads]:
        layer = self.node.layer
        assert isinstance(layer, MaxPool2d | AveragePool2d | SumPool2d)
        return layer.windows, layer.strides, layer.pads(self.node.input_shape)

    def windows(self, x: NDArray[Any], outside: float) -> NDArray[Any]:
        """Return the windows (n, C, Ho, Wo, R·S) of an array (n, C, H, W)."""
        window, strides, pads = self._geometry()
        ho, wo = self.node.output_shape[1:]
        view = _windows(_pad(x, pads, outside), window, strides)[:, :, :ho, :wo]
        return view.reshape(*view.shape[:4], window[0] * window[1])

    def scatter(self, dwindows: NDArray[Any], n: int) -> None:
        """Add gradients of windows (n, C, Ho, Wo, R·S) up to dx; windows may overlap."""
        (r, s), (vertical, horizontal), pads = self._geometry()
        ho, wo = self.node.output_shape[1:]
        dx = _pad(np.zeros_like(self.arrays["dx"][:n]), pads)
        for k in range(r * s):
            i, j = divmod(k, s)
            rows = slice(i, i + vertical * (ho - 1) + 1, vertical)
            columns = slice(j, j + horizontal * (wo - 1) + 1, horizontal)
            dx[:, :, rows, columns] += dwindows[..., k]
        self.arrays["dx"][:n] = _crop(dx, pads)


class MaxPooling(_Pooling):
    """Max pooling. The gradient goes to the first of the largest elements of each window."""

    saved: ClassVar[Mapping[str, str]] = {"argmax": "int64"}

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        windows = self.windows(a["x"][:n], -np.inf)
        a["y"][:n] = windows.max(axis=-1)
        if "argmax" in a:
            a["argmax"][:n] = windows.argmax(axis=-1)

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        r, s = self._geometry()[0]
        chosen = a["argmax"][:n, ..., None] == np.arange(r * s)
        self.scatter(chosen * a["dy"][:n, ..., None], n)


class SumPooling(_Pooling):
    """Sum pooling. Every element of a window receives the window's gradient."""

    def _weight(self) -> NDArray[Any]:
        """Return the factors (1, 1, Ho, Wo, 1) of the sums."""
        return np.ones((1, 1, 1, 1, 1))

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        windows = self.windows(a["x"][:n], 0.0)
        a["y"][:n] = (windows * self._weight()).sum(axis=-1)

    def backward(self, context: Context) -> None:
        n = context.n
        r, s = self._geometry()[0]
        dy = self.arrays["dy"][:n, ..., None] * self._weight()
        self.scatter(np.broadcast_to(dy, (*dy.shape[:4], r * s)), n)


class AveragePooling(SumPooling):
    """Average pooling: the sum divided by the number of elements inside the map."""

    def _weight(self) -> NDArray[Any]:
        inside = self.windows(np.ones((1, *self.node.input_shape)), 0.0)[:, :1]
        return np.asarray(1.0 / inside.sum(axis=-1, keepdims=True))


class Alias(Operation):
    """Flatten: the same memory in another shape."""

    @classmethod
    def needs(cls, node: Node, setting: Setting) -> GroupNeeds:
        return GroupNeeds(alias=True)

    def kernels(self) -> Mapping[Phase, Kernel]:
        return {}

    def forward(self, context: Context) -> None:
        raise AssertionError("an alias has no stage")


class BiasAddition(Operation):
    """y = x + bias of the channel or unit."""

    @classmethod
    def needs(cls, node: Node, setting: Setting) -> GroupNeeds:
        assert not setting.training, "biases are layers only in inference"
        return super().needs(node, setting)

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        x = a["x"][:n]
        a["y"][:n] = x + a["bias"].reshape(-1, *(1,) * (x.ndim - 2))


class Rectifier(Operation):
    """max(x, 0)."""

    backward_reads: ClassVar[tuple[str, ...]] = ("x",)

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        a["y"][:n] = np.maximum(a["x"][:n], 0.0)

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        a["dx"][:n] = np.where(a["x"][:n] > 0.0, a["dy"][:n], 0.0)


class Logistic(Operation):
    """σ(x), computed with tanh, which never overflows."""

    backward_reads: ClassVar[tuple[str, ...]] = ("y",)

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        a["y"][:n] = 0.5 * (1.0 + np.tanh(0.5 * a["x"][:n]))

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        y = a["y"][:n]
        a["dx"][:n] = a["dy"][:n] * y * (1.0 - y)


class Drop(Operation):
    """Dropout with masks of `dptrain.plan.random`."""

    saved: ClassVar[Mapping[str, str]] = {"factor": "float64"}

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        layer = self.node.layer
        assert isinstance(layer, Dropout)
        x = a["x"][:n]
        if not context.training:
            a["y"][:n] = x
            return
        channels, height, width = self.node.output_maps
        keep = dropout_keep(
            layer.rate,
            channels * height * width,
            seed=context.seed,
            step=context.step,
            layer=self.node.index,
            samples=context.samples,
        )
        ordered = keep.reshape(n, height, width, channels).transpose(0, 3, 1, 2)
        a["factor"][:n] = ordered / (1.0 - layer.rate)
        a["y"][:n] = x * a["factor"][:n]

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        a["dx"][:n] = a["dy"][:n] * a["factor"][:n]


class ResponseNorm(Operation):
    """y = x · s^−beta with s = bias + alpha · Σ x² over neighbouring channels."""

    backward_reads: ClassVar[tuple[str, ...]] = ("x",)

    def _neighbours(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sum over the channels within the radius."""
        layer = self.node.layer
        assert isinstance(layer, LocalResponseNorm)
        padded = np.pad(values, ((0, 0), (layer.radius, layer.radius), (0, 0), (0, 0)))
        window = sliding_window_view(padded, 2 * layer.radius + 1, axis=1)
        return np.asarray(window.sum(axis=-1))

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        layer = self.node.layer
        assert isinstance(layer, LocalResponseNorm)
        x = a["x"][:n]
        a["y"][:n] = x * (layer.bias + layer.alpha * self._neighbours(x * x)) ** -layer.beta

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        layer = self.node.layer
        assert isinstance(layer, LocalResponseNorm)
        x, dy = a["x"][:n], a["dy"][:n]
        s = layer.bias + layer.alpha * self._neighbours(x * x)
        power = s**-layer.beta
        # x[c] is in the sum of every neighbour: dx = dy s^−β − 2αβ x Σ dy x s^(−β−1).
        shared = self._neighbours(dy * x * power / s)
        a["dx"][:n] = dy * power - 2.0 * layer.alpha * layer.beta * x * shared


OPERATIONS: Mapping[type[Layer], type[Operation]] = {
    Conv2d: Convolution,
    Dense: FullyConnected,
    MaxPool2d: MaxPooling,
    AveragePool2d: AveragePooling,
    SumPool2d: SumPooling,
    Flatten: Alias,
    ReLU: Rectifier,
    Sigmoid: Logistic,
    Dropout: Drop,
    LocalResponseNorm: ResponseNorm,
    BiasAdd: BiasAddition,
}
