"""The layer that every rung computes, its exact result, and an error bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dptrain.errors import UserError
from dptrain.network import get_network
from dptrain.network.layers import Conv2d


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
        """Floating-point operations for all images, two per multiply-add."""
        return 2 * self.samples * self.filters * self.pixels * self.terms


@dataclass(frozen=True)
class Numbers:
    """Arrays of a layer: x (N, C, H, W), w (K, C, R, S) and b (K,)."""

    x: NDArray[np.float32]
    w: NDArray[np.float32]
    b: NDArray[np.float32]

    @classmethod
    def of(cls, layer: Layer) -> Numbers:
        """Return arrays of normally distributed elements."""
        random = np.random.default_rng(0)
        images = layer.samples, layer.channels, layer.height, layer.width
        filters = layer.filters, layer.channels, layer.kernel, layer.kernel
        shapes = images, filters, (layer.filters,)
        return cls(*(random.standard_normal(shape, dtype=np.float32) for shape in shapes))


def exact(layer: Layer, numbers: Numbers) -> NDArray[np.float64]:
    """Return y (N, K, Ho, Wo) in float64."""
    p, step, size = layer.padding, layer.stride, layer.kernel
    x = np.pad(numbers.x.astype(np.float64), ((0, 0), (0, 0), (p, p), (p, p)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), (2, 3))
    y = np.einsum("nchwrs,kcrs->nkhw", windows[:, :, ::step, ::step], numbers.w, optimize=True)
    return np.asarray(y + numbers.b[:, None, None])


def error(found: NDArray[np.float32], wanted: NDArray[np.float64]) -> float:
    """Return the largest error, relative to the root mean square of the exact result."""
    return float(np.abs(found - wanted).max() / np.sqrt(np.mean(wanted**2)))


ROUNDING = {"fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-8}


def bound(layer: Layer, precision: str = "fp32") -> float:
    """Return an upper bound of `error` for a correct result.

    The error of a sum of T products in any order is at most (T + 1) roundings of the sum of their
    magnitudes. For normally distributed operands this sum is about 0.64 · T, and sums of T products
    have a root mean square of about √T. Operands in TF32 and bfloat16 are rounded as well, and so
    are results in bfloat16.
    Source: Higham, "Accuracy and stability of numerical algorithms", 2002, section 3.1.

    Args:
        layer: the computation.
        precision: precision of the operands.
    """
    sums = (layer.terms + 1) * ROUNDING["fp32"]
    factors = 0.0 if precision == "fp32" else 3 * ROUNDING[precision]
    return (sums + factors) * math.sqrt(layer.terms)


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
