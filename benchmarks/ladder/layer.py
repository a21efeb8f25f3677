"""The layer that every rung computes, its exact result, and an error bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dptrain.errors import UserError
from dptrain.network import get_network
from dptrain.network.layers import Conv2d
from dptrain.plan.lowering import Phase

DIRECTIONS = {
    "forward": Phase.FORWARD, "weights": Phase.BACKWARD_WEIGHT, "input": Phase.BACKWARD_INPUT,
}  # fmt: skip
"""Directions by name: the output, or the gradient with respect to weights or input."""


@dataclass(frozen=True)
class Layer:
    """A convolution with square kernels that maps N images (C, H, W) to (K, Ho, Wo)."""

    samples: int
    channels: int
    height: int
    width: int
    filters: int
    kernel: int
    stride: int = 1
    padding: int = 0

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of the output, Ho and Wo."""
        reach = 2 * self.padding - self.kernel
        return (self.height + reach) // self.stride + 1, (self.width + reach) // self.stride + 1

    @property
    def pixels(self) -> int:
        """Output pixels of an image, Ho · Wo."""
        return self.out[0] * self.out[1]

    @property
    def terms(self) -> int:
        """Terms of an output element, C · R · S."""
        return self.channels * self.kernel**2

    @property
    def geometry(self) -> tuple[int, ...]:
        """Kernel arguments: C, H, W, R, S, stride, padding, Ho, Wo."""
        maps = self.channels, self.height, self.width
        return *maps, self.kernel, self.kernel, self.stride, self.padding, *self.out

    @property
    def flops(self) -> int:
        """Floating-point operations for all images, two per multiply-add, in any direction."""
        return 2 * self.samples * self.filters * self.pixels * self.terms

    def most_terms(self, direction: Phase) -> int:
        """Return the number of products in the longest sum of a direction."""
        if direction is Phase.FORWARD:
            return self.terms
        if direction is Phase.BACKWARD_WEIGHT:
            return self.samples * self.pixels
        return self.filters * math.ceil(self.kernel / self.stride) ** 2


@dataclass(frozen=True)
class Numbers:
    """Arrays of a layer: x (N, C, H, W), w (K, C, R, S), b (K,) and dy (N, K, Ho, Wo)."""

    x: NDArray[np.float32]
    w: NDArray[np.float32]
    b: NDArray[np.float32]
    dy: NDArray[np.float32]

    @classmethod
    def of(cls, layer: Layer) -> Numbers:
        """Return arrays of normally distributed elements."""
        random = np.random.default_rng(0)
        images = layer.samples, layer.channels, layer.height, layer.width
        filters = layer.filters, layer.channels, layer.kernel, layer.kernel
        shapes = images, filters, (layer.filters,), (layer.samples, layer.filters, *layer.out)
        return cls(*(random.standard_normal(shape, dtype=np.float32) for shape in shapes))


def exact(layer: Layer, numbers: Numbers, direction: Phase) -> NDArray[np.float64]:
    """Return y (N, K, Ho, Wo), dw (K, C, R, S) or dx (N, C, H, W) in float64."""
    p, step, size = layer.padding, layer.stride, layer.kernel
    x = np.pad(numbers.x.astype(np.float64), ((0, 0), (0, 0), (p, p), (p, p)))
    if direction is Phase.BACKWARD_INPUT:
        down, across = (step * (length - 1) + 1 for length in layer.out)
        dx = np.zeros_like(x)
        for r, s in np.ndindex(size, size):
            part = np.einsum("nkhw,kc->nchw", numbers.dy, numbers.w[:, :, r, s], dtype=np.float64)
            dx[:, :, r : r + down : step, s : s + across : step] += part
        return dx[:, :, p : p + layer.height, p : p + layer.width]
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), (2, 3))
    seen = windows[:, :, ::step, ::step]
    if direction is Phase.BACKWARD_WEIGHT:
        return np.asarray(np.einsum("nchwrs,nkhw->kcrs", seen, numbers.dy, optimize=True))
    y = np.einsum("nchwrs,kcrs->nkhw", seen, numbers.w, optimize=True)
    return np.asarray(y + numbers.b[:, None, None])


def error(found: NDArray[np.float32], wanted: NDArray[np.float64]) -> float:
    """Return the largest error, relative to the root mean square of the exact result."""
    return float(np.abs(found - wanted).max() / np.sqrt(np.mean(wanted**2)))


ROUNDING = {"fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-8}


def bound(layer: Layer, direction: Phase, size: int, precision: str = "fp32") -> float:
    """Return an upper bound of `error` for a correct result.

    The error of a sum of T products in any order is at most (T + 1) roundings of the sum of their
    magnitudes. For normally distributed operands this sum is about 0.64 · T, and sums of T′
    products on average have a root mean square of about √T′. Operands in TF32 and bfloat16 are
    rounded as well, and so are results in bfloat16.
    Source: Higham, "Accuracy and stability of numerical algorithms", 2002, section 3.1.

    Args:
        layer, direction: the computation.
        size: number of elements of the result.
        precision: precision of the operands.
    """
    most = layer.most_terms(direction)
    mean = min(layer.flops / 2 / size, most)
    sums = (most + 1) * ROUNDING["fp32"]
    factors = 0.0 if precision == "fp32" else 3 * ROUNDING[precision]
    return (sums + factors) * most / math.sqrt(mean)


def layer_of(name: str, samples: int) -> Layer:
    """Return a layer of a named network, for example ``cifar:conv2``."""
    title, _, wanted = name.partition(":")
    for node in get_network(title).nodes:
        if node.name == wanted and isinstance(node.layer, Conv2d):
            (channels, height, width), layer = node.input_shape, node.layer
            (top, _), _ = layer.pads(node.input_shape)
            size, step = layer.window[0], layer.strides[0]
            return Layer(samples, channels, height, width, layer.filters, size, step, top)
    raise UserError(f"no convolution '{name}'; expected a network's layer such as cifar:conv2")
