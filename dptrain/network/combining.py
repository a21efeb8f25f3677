"""Descriptions of layers that combine several inputs, or all pixels of a map."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from dptrain.errors import UserError
from dptrain.network.layers import Flops, Layer, Shape, check_size, maps_of


@dataclass(frozen=True)
class _Combination(Layer):
    """A layer with several inputs.

    Attributes:
        num_inputs: number of inputs, at least 2.
    """

    num_inputs: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(self.num_inputs, f"{self.kind} num_inputs", least=2)

    def output_shape(self, input_shape: Shape) -> Shape:
        return input_shape


@dataclass(frozen=True)
class Add(_Combination):
    """Sum of inputs of the same shape, such as the two ends of a residual connection."""

    kind: ClassVar[str] = "add"

    def combine_shapes(self, input_shapes: tuple[Shape, ...]) -> Shape:
        if len(set(input_shapes)) > 1:
            listed = " and ".join(str(shape) for shape in dict.fromkeys(input_shapes))
            raise UserError(f"add: the inputs have the shapes {listed}; expected one shape")
        return input_shapes[0]

    def flops(self, input_shape: Shape) -> Flops:
        return Flops((self.num_inputs - 1) * math.prod(input_shape))


@dataclass(frozen=True)
class Multiply(Layer):
    """Product of two inputs: of one shape, or of maps (C, H, W) and a gate (C, 1, 1) or (1, H, W).

    A gate multiplies every pixel of a channel, as in squeeze-and-excitation, or every channel of a
    pixel. Either input may be the gate.

    Source: Hu, Shen and Sun, "Squeeze-and-excitation networks", 2018, equation 4.

    Example:
        >>> from dptrain import Conv2d, GlobalAveragePool2d, Input, Sigmoid
        >>> x = Input((8, 5, 5))
        >>> gate = Sigmoid()(Conv2d(8, 1)(GlobalAveragePool2d()(x)))
        >>> (x * gate).shape  # (C, H, W), and a gate of shape (C, 1, 1)
        (8, 5, 5)
    """

    kind: ClassVar[str] = "multiply"

    @property
    def num_inputs(self) -> int:
        return 2

    def combine_shapes(self, input_shapes: tuple[Shape, ...]) -> Shape:
        for whole, gate in (input_shapes, reversed(input_shapes)):
            if whole == gate or (
                len(whole) == 3 and gate in ((whole[0], 1, 1), (1, whole[1], whole[2]))
            ):
                return whole
        one, two = input_shapes
        raise UserError(
            f"multiply: the inputs have the shapes {one} and {two}; expected one shape, or "
            "(C, H, W) and (C, 1, 1) or (1, H, W)"
        )

    def output_shape(self, input_shape: Shape) -> Shape:
        return input_shape

    def flops(self, input_shape: Shape) -> Flops:
        size = math.prod(input_shape)
        return Flops(size, 2 * size)


@dataclass(frozen=True)
class Concatenate(_Combination):
    """The channels of all inputs, one after another, for maps of the same height and width."""

    kind: ClassVar[str] = "concatenate"

    def combine_shapes(self, input_shapes: tuple[Shape, ...]) -> Shape:
        maps = [maps_of(self.kind, shape) for shape in input_shapes]
        sizes = dict.fromkeys(shape[1:] for shape in maps)
        if len(sizes) > 1:
            listed = " and ".join(f"{height}×{width}" for height, width in sizes)
            raise UserError(f"concatenate: the inputs are {listed} pixels; expected one size")
        return sum(channels for channels, *_ in maps), *next(iter(sizes))

    def flops(self, input_shape: Shape) -> Flops:
        return Flops(0)


class GlobalPool2d(Layer):
    """A layer that makes one number of each map; (C, H, W) becomes (C, 1, 1)."""

    def output_shape(self, input_shape: Shape) -> Shape:
        return maps_of(self.kind, input_shape)[0], 1, 1

    def flops(self, input_shape: Shape) -> Flops:
        size = math.prod(input_shape)
        return Flops(size, size)


@dataclass(frozen=True)
class GlobalAveragePool2d(GlobalPool2d):
    """Mean of each map over all of its pixels; (C, H, W) becomes (C, 1, 1)."""

    kind: ClassVar[str] = "globalavgpool"


@dataclass(frozen=True)
class GlobalMaxPool2d(GlobalPool2d):
    """Maximum of each map; (C, H, W) becomes (C, 1, 1).

    The gradient goes to the first of the largest elements in row-major order.

    Example:
        >>> from dptrain import GlobalMaxPool2d, Input
        >>> GlobalMaxPool2d()(Input((8, 5, 5))).shape
        (8, 1, 1)
    """

    kind: ClassVar[str] = "globalmaxpool"
