"""Descriptions of layers: shapes, parameters and FLOPs, without arithmetic on data.

Shapes are per sample, without the batch: ``(C, H, W)`` for maps, ``(F,)`` for vectors.
Letters: N batch, C and K input and output channels, H and W height and width, R and S kernel
height and width. A multiply-add counts as two FLOPs.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from dptrain.arguments import NamedArguments
from dptrain.errors import UserError, shown
from dptrain.network.field_types import check_field_types
from dptrain.network.initializers import Constant, He, Initializer

if TYPE_CHECKING:
    from dptrain.network.functional import Tensor

T = TypeVar("T")
Shape = tuple[int, ...]
Pads = tuple[tuple[int, int], tuple[int, int]]
PaddingName = Literal["same", "valid", "full"]
Rounding = Literal["strict", "floor"]
PoolRounding = Literal["strict", "floor", "ceil"]


@dataclass(frozen=True)
class Parameter:
    """One trainable array of a layer, in its canonical layout.

    Attributes:
        name: name in the layer; the network puts the name of the layer in front.
        shape: canonical shape, (K, C, R, S), (out, in) or (out,).
        fan_in: number of inputs that one output element sums.
        init: distribution of the initial values.
        weight_decay: λ of the term ½λ‖w‖² that is added to the loss.
        rate_factor: the learning rate is multiplied by it; 0 if the parameter is frozen, by its
            layer or by a plan (`dptrain.plan.freezing`).
    """

    name: str
    shape: Shape
    fan_in: int
    init: Initializer
    weight_decay: float = 0.0
    rate_factor: float = 1.0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_trained(self) -> bool:
        """True unless the parameter is frozen."""
        return self.rate_factor > 0.0


@dataclass(frozen=True)
class Statistic:
    """An array that forward passes of training update, and that is not trained.

    Attributes:
        name: name in the layer; the network puts the name of the layer in front.
        shape: canonical shape.
        initial: value of every element before training.
    """

    name: str
    shape: Shape
    initial: float

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations for one sample, by phase."""

    forward: int
    backward_input: int = 0
    backward_weight: int = 0


def entry_of(table: Mapping[type[Any], T], layer: Layer) -> T | None:
    """Return the entry of the class of a layer, or of a class that it is derived from."""
    return next((table[cls] for cls in type(layer).__mro__ if cls in table), None)


MAX_SIZE = 2**31 - 1
"""Largest size that a field of a layer may have; kernels receive sizes as 32-bit integers."""


def check_size(value: int, what: str, least: int = 1) -> None:
    """Raise a `UserError` unless `value` is a whole number from `least` to `MAX_SIZE`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_SIZE:
        raise UserError(
            f"{what} is {shown(value)}; expected a whole number from {least} to {MAX_SIZE:,}"
        )


def _check_number(value: float, what: str, least: float = -math.inf) -> None:
    if not (math.isfinite(value) and value >= least):
        minimum = "" if least == -math.inf else f" of at least {least:g}"
        raise UserError(f"{what} is {value}; expected a finite number{minimum}")


def _check_rounding(layer: str, rounding: str, *others: str) -> None:
    known = ("strict", *others, "floor")
    if rounding not in known:
        expected = f"{', '.join(known[:-1])} or {known[-1]}"
        raise UserError(f"{layer} rounding is '{rounding}'; expected {expected}")


def maps_of(layer: str, shape: Shape) -> tuple[int, int, int]:
    """Return (C, H, W), or raise a `UserError` that names the kind of layer."""
    if len(shape) != 3:
        raise UserError(f"{layer} needs an input of shape (C, H, W), got {shape}")
    return shape[0], shape[1], shape[2]


def _same_pads(size: int, window: int, stride: int) -> tuple[int, int]:
    """Zeros before and after, so that the output has ceil(size / stride) elements."""
    total = max((-(-size // stride) - 1) * stride + window - size, 0)
    return total // 2, total - total // 2


def _reaching_beyond(size: int, window: int, stride: int, pads: tuple[int, int]) -> tuple[int, int]:
    """Return the pads before and after a map, so that a further window covers what is left over.

    There is none if it would begin after the map.
    """
    before, after = pads
    missing = -(size + before + after - window) % stride
    last = size + before + after + missing - window
    return before, after + (missing if last < size + before else 0)


def _pads(layer: Conv2d | Pool2d, input_shape: Shape, windows: tuple[int, int]) -> Pads:
    """Return positions around each map, with a padding that is not "full"."""
    _, height, width = maps_of(layer.kind, input_shape)
    if layer.padding == "same":
        pairs = zip((height, width), windows, layer.strides, strict=True)
        first, second = (_same_pads(*pair) for pair in pairs)
        return first, second
    p = 0 if layer.padding == "valid" else int(layer.padding)
    return (p, p), (p, p)


def _window_counts(
    layer: Conv2d | Pool2d,
    input_shape: Shape,
    windows: tuple[int, int],
    axes: tuple[str, str],
    noun: str,
) -> tuple[int, int]:
    """Return the number of windows in both directions; `axes` and `noun` are for messages."""
    counts = []
    pads, strides = layer.pads(input_shape), layer.strides
    for axis, size, window, stride, pad in zip(
        axes, input_shape[1:], windows, strides, map(sum, pads), strict=True
    ):
        span = size + pad - window
        if span < 0:
            raise UserError(
                f"{axis}: {noun} {window} is larger than the input, padding included "
                f"({size} + {pad})"
            )
        if layer.padding != "same" and layer.rounding == "strict" and span % stride:
            raise UserError(
                f"{axis}: ({size} − {window} + {pad}) / {stride} + 1 is not a whole number; "
                f'change {noun}, stride or padding, or set rounding to "floor"'
            )
        counts.append(span // stride + 1)
    return counts[0], counts[1]


class Layer(metaclass=NamedArguments):
    """One layer. Subclasses are frozen dataclasses; their fields are the settings of a user.

    `kind` names the layer in TOML files (``type = "conv"``) and, with a number, in the network
    (``conv1``).
    """

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        """Check the types of the fields; a subclass that checks their values calls this first."""
        check_field_types(self, self.kind)

    @property
    def num_inputs(self) -> int:
        """Number of inputs. A layer with another number also overrides `combine_shapes`."""
        return 1

    def combine_shapes(self, input_shapes: tuple[Shape, ...]) -> Shape:
        """Return the shape that the other methods receive as `input_shape`.

        A layer with one input returns its shape. A layer with several inputs checks that they fit
        together and returns the shape of their combination: the common shape for a sum.

        Raises:
            UserError: the inputs do not fit together.
        """
        (input_shape,) = input_shapes
        return input_shape

    def __call__(self, *inputs: Tensor | Sequence[Tensor], name: str | None = None) -> Tensor:
        """Return the output of this layer for symbolic inputs; see `dptrain.network.functional`.

        Args:
            inputs: the tensors that the layer reads, or a list of them.
            name: name of the node; None for kind and running number, ``conv1``.

        Raises:
            UserError: the number or the shapes of the tensors do not fit the layer.
        """
        from dptrain.network.functional import apply

        return apply(self, inputs, name)

    @abstractmethod
    def output_shape(self, input_shape: Shape) -> Shape:
        """Return the shape of the output for one sample.

        Raises:
            UserError: the layer does not accept an input of this shape.
        """

    def parameters(self, input_shape: Shape) -> tuple[Parameter, ...]:
        """Return the trainable arrays, named without the layer's name."""
        return ()

    def statistics(self, input_shape: Shape) -> tuple[Statistic, ...]:
        """Return the arrays that training updates without gradients, named as in `parameters`."""
        return ()

    @abstractmethod
    def flops(self, input_shape: Shape) -> Flops:
        """Return the number of operations for one sample."""


@dataclass(frozen=True)
class Conv2d(Layer):
    """Two-dimensional cross-correlation, by default with a bias per filter.

    y[n, k, i, j] = b[k] + Σ x[n, c, h, v] · w[k, c, r, s] over c, r and s, with
    h = i·stride + r·dilation − top and v = j·stride + s·dilation − left. With several groups,
    channels and filters are divided into equal groups, and each filter reads the channels of its
    group only: one channel in a depthwise convolution, whose number of groups is that of the
    channels.

    Source of dilation: Yu and Koltun, "Multi-scale context aggregation by dilated convolutions",
    2016.

    Attributes:
        filters: number of output channels K.
        kernel: R and S, one number or a pair.
        stride: one number or a pair.
        padding: number of zeros on every side, or "same" (output ceil(size / stride)), "valid"
            (none), or "full" (extent of the kernel − 1).
        groups: number of groups; a divisor of channels and filters.
        bias: False omits the bias, which a normalisation after the convolution would cancel.
        rounding: "strict" requires that windows end at the last row and column, padding included;
            "floor" ignores rows and columns after the last window. "same" always fits.
        weight_init, bias_init: distributions of the initial parameters.
        weight_decay: λ for the weights; biases are not decayed.
        dilation: distance of the pixels that adjacent weights of the kernel multiply, one number or
            a pair; the kernel then extends over (kernel − 1) · dilation + 1 rows and columns.

    Example:
        >>> from dptrain import Input
        >>> Conv2d(4, 3, padding="valid", dilation=2)(Input((3, 8, 8))).shape
        (4, 4, 4)
    """

    kind: ClassVar[str] = "conv"

    filters: int
    kernel: int | tuple[int, int] = 3
    stride: int | tuple[int, int] = 1
    padding: int | PaddingName = "same"
    weight_init: Initializer = He()
    bias_init: Constant = Constant(0.0)
    weight_decay: float = 0.0
    groups: int = 1
    bias: bool = True
    rounding: Rounding = "strict"
    dilation: int | tuple[int, int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(self.filters, "conv filters")
        check_size(self.groups, "conv groups")
        _check_rounding("conv", self.rounding)
        if self.filters % self.groups:
            raise UserError(
                f"conv has {self.filters} filters in {self.groups} groups; expected a multiple of "
                "the number of groups"
            )
        for value in (*self.window, *self.strides):
            check_size(value, "conv kernel or stride")
        for value in _pair(self.dilation):
            check_size(value, "conv dilation")
        for extent in self.extents:
            check_size(extent, "conv extent of the dilated kernel")
        if isinstance(self.padding, str):
            if self.padding not in ("same", "valid", "full"):
                raise UserError(
                    f"conv padding is '{self.padding}'; expected a number, same, valid or full"
                )
        else:
            check_size(self.padding, "conv padding", least=0)
        _check_number(self.weight_decay, "conv weight_decay", least=0.0)

    @property
    def window(self) -> tuple[int, int]:
        """(R, S)."""
        return _pair(self.kernel)

    @property
    def strides(self) -> tuple[int, int]:
        """Vertical and horizontal stride."""
        return _pair(self.stride)

    @property
    def dilations(self) -> tuple[int, int]:
        """Vertical and horizontal dilation; 1 for directions in which the kernel has one weight."""
        down, across = _pair(self.dilation)
        return down if self.window[0] > 1 else 1, across if self.window[1] > 1 else 1

    @property
    def extents(self) -> tuple[int, int]:
        """Rows and columns of the input from the first to the last weight of a filter."""
        (r, s), (down, across) = self.window, self.dilations
        return (r - 1) * down + 1, (s - 1) * across + 1

    def pads(self, input_shape: Shape) -> Pads:
        """Zeros ((top, bottom), (left, right)) around each map."""
        if self.padding == "full":
            r, s = self.extents
            return (r - 1, r - 1), (s - 1, s - 1)
        return _pads(self, input_shape, self.extents)

    def output_shape(self, input_shape: Shape) -> Shape:
        channels = maps_of("conv", input_shape)[0]
        if channels % self.groups:
            raise UserError(
                f"conv has {self.groups} groups, but its input has {channels} channels; expected a "
                "divisor of the number of channels"
            )
        axes = ("conv height", "conv width")
        noun = "kernel" if self.dilations == (1, 1) else "extent of the dilated kernel"
        return self.filters, *_window_counts(self, input_shape, self.extents, axes, noun)

    def parameters(self, input_shape: Shape) -> tuple[Parameter, ...]:
        channels = input_shape[0] // self.groups
        r, s = self.window
        fan_in = channels * r * s
        weight = Parameter(
            "weight", (self.filters, channels, r, s), fan_in, self.weight_init, self.weight_decay
        )
        bias = Parameter("bias", (self.filters,), fan_in, self.bias_init)
        return (weight, bias) if self.bias else (weight,)

    def flops(self, input_shape: Shape) -> Flops:
        k, ho, wo = self.output_shape(input_shape)
        r, s = self.window
        products = 2 * k * ho * wo * input_shape[0] // self.groups * r * s
        additions = k * ho * wo if self.bias else 0
        return Flops(products + additions, products, products + additions)


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return value[0], value[1]


@dataclass(frozen=True)
class Pool2d(Layer):
    """Shape arithmetic of the pooling layers.

    Attributes:
        window: height and width, one number or a pair.
        stride: one number or a pair; None for the size of the window. Windows may overlap.
        padding: number of positions on every side, at most half of the window, or "valid" (none) or
            "same" (output ceil(size / stride)). Positions outside the map are ignored.
        rounding: "floor" ignores rows and columns after the last window; "strict" refuses them;
            "ceil" adds a window that reaches beyond the padding, unless it would begin there.
            "same" always fits.
    """

    window: int | tuple[int, int] = 2
    stride: int | tuple[int, int] | None = None
    padding: int | Literal["same", "valid"] = "valid"
    rounding: PoolRounding = "floor"

    def __post_init__(self) -> None:
        super().__post_init__()
        for value in (*self.windows, *self.strides):
            check_size(value, f"{self.kind} window or stride")
        _check_rounding(self.kind, self.rounding, "ceil")
        if isinstance(self.padding, str):
            if self.padding not in ("same", "valid"):
                raise UserError(
                    f"{self.kind} padding is '{self.padding}'; expected a number, same or valid"
                )
            return
        check_size(self.padding, f"{self.kind} padding", least=0)
        if 2 * self.padding > min(self.windows):
            raise UserError(
                f"{self.kind} padding is {self.padding}; expected at most half of the window "
                f"({min(self.windows)})"
            )

    @property
    def windows(self) -> tuple[int, int]:
        """Height and width of the window."""
        return _pair(self.window)

    @property
    def strides(self) -> tuple[int, int]:
        """Vertical and horizontal stride."""
        return self.windows if self.stride is None else _pair(self.stride)

    def pads(self, input_shape: Shape) -> Pads:
        """Positions outside the map, ((top, bottom), (left, right)), that windows cover."""
        pads = _pads(self, input_shape, self.windows)
        if self.rounding != "ceil" or self.padding == "same":
            return pads
        axes = zip(input_shape[1:], self.windows, self.strides, pads, strict=True)
        vertical, horizontal = (_reaching_beyond(*axis) for axis in axes)
        return vertical, horizontal

    def output_shape(self, input_shape: Shape) -> Shape:
        axes = (self.kind, self.kind)
        counts = _window_counts(self, input_shape, self.windows, axes, "window")
        return maps_of(self.kind, input_shape)[0], *counts

    def flops(self, input_shape: Shape) -> Flops:
        work = math.prod(self.output_shape(input_shape)) * math.prod(self.windows)
        return Flops(work, work)


@dataclass(frozen=True)
class MaxPool2d(Pool2d):
    """Maximum of each window; the gradient goes to the first of its largest elements."""

    kind: ClassVar[str] = "pool"


@dataclass(frozen=True)
class AveragePool2d(Pool2d):
    """Mean of each window over the positions inside the map.

    Attributes:
        count_padding: True divides by the size of the window instead, as if positions outside the
            map were zeros. No window may reach beyond the padding then.
    """

    kind: ClassVar[str] = "avgpool"

    count_padding: bool = False

    def output_shape(self, input_shape: Shape) -> Shape:
        pads = _pads(self, input_shape, self.windows)
        if self.count_padding and self.pads(input_shape) != pads:
            raise UserError(
                "avgpool counts positions outside the map, but windows reach beyond the padding; "
                'set rounding to "floor" or count_padding to false'
            )
        return super().output_shape(input_shape)


@dataclass(frozen=True)
class SumPool2d(Pool2d):
    """Sum of each window."""

    kind: ClassVar[str] = "sumpool"


@dataclass(frozen=True)
class Flatten(Layer):
    """Turns maps into a vector, in the order C, H, W."""

    kind: ClassVar[str] = "flatten"

    def output_shape(self, input_shape: Shape) -> Shape:
        return (math.prod(input_shape),)

    def flops(self, input_shape: Shape) -> Flops:
        return Flops(0)


@dataclass(frozen=True)
class Reshape(Layer):
    """Turns a vector, or maps of which one size alone exceeds 1, into such maps of other sizes.

    The order of the elements does not change. As maps of one row, the means of channels are the
    input of a convolution along the channels, as in efficient channel attention.

    Source: Wang et al., "ECA-Net: efficient channel attention", 2020, section 3.3.

    Attributes:
        shape: (C, H, W) of the output, of which one size alone may exceed 1.

    Example:
        >>> from dptrain import Conv2d, GlobalAveragePool2d, Input, Reshape, Sigmoid
        >>> x = Input((8, 5, 5))
        >>> row = Conv2d(1, (1, 3), bias=False)(Reshape((1, 1, 8))(GlobalAveragePool2d()(x)))
        >>> (x * Sigmoid()(Reshape((8, 1, 1))(row))).shape
        (8, 5, 5)
    """

    kind: ClassVar[str] = "reshape"

    shape: tuple[int, int, int]

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in self.shape:
            check_size(size, "reshape size")
        if max(self.shape) != math.prod(self.shape):
            raise UserError(f"reshape shape is {self.shape}; expected one size above 1 at most")

    def output_shape(self, input_shape: Shape) -> Shape:
        count = math.prod(input_shape)
        if max(input_shape) != count or count != math.prod(self.shape):
            raise UserError(
                f"reshape makes {self.shape} of {input_shape}; expected as many elements, on one "
                "axis alone"
            )
        return self.shape

    def flops(self, input_shape: Shape) -> Flops:
        return Flops(0)


@dataclass(frozen=True)
class Dense(Layer):
    """Fully connected layer, y = W x + b with W of shape (out, in)."""

    kind: ClassVar[str] = "dense"

    units: int
    weight_init: Initializer = He()
    bias_init: Constant = Constant(0.0)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(self.units, "dense units")
        _check_number(self.weight_decay, "dense weight_decay", least=0.0)

    def output_shape(self, input_shape: Shape) -> Shape:
        if len(input_shape) != 1:
            raise UserError(f"dense needs a vector, got {input_shape}; put a flatten before it")
        return (self.units,)

    def parameters(self, input_shape: Shape) -> tuple[Parameter, ...]:
        fan_in = input_shape[0]
        weight = Parameter(
            "weight", (self.units, fan_in), fan_in, self.weight_init, self.weight_decay
        )
        return weight, Parameter("bias", (self.units,), fan_in, self.bias_init)

    def flops(self, input_shape: Shape) -> Flops:
        products = 2 * self.units * input_shape[0]
        return Flops(products + self.units, products, products + self.units)


class Elementwise(Layer):
    """A layer whose output has the shape of its input."""

    operations: ClassVar[int] = 1

    def output_shape(self, input_shape: Shape) -> Shape:
        return input_shape

    def flops(self, input_shape: Shape) -> Flops:
        work = self.operations * math.prod(input_shape)
        return Flops(work, work)


@dataclass(frozen=True)
class RandomMask(Elementwise):
    """A layer that sets elements to 0 at random in training, and does nothing otherwise.

    Attributes:
        rate: probability of a zero, at least 0 and less than 1.
    """

    rate: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.rate < 1.0:
            raise UserError(f"{self.kind} rate is {self.rate}; expected 0 ≤ rate < 1")


@dataclass(frozen=True)
class Dropout(RandomMask):
    """In training, sets each element to 0 with probability `rate`, else divides it by 1 − rate.

    The mask is a pure function of seed, step, sample and layer (`dptrain.philox`), so it does
    not depend on the number of ranks.

    Attributes:
        rate: probability of a zero, at least 0 and less than 1.
    """

    kind: ClassVar[str] = "dropout"


@dataclass(frozen=True)
class StochasticDepth(RandomMask):
    """In training, sets whole samples to 0 with probability `rate`, else divides by 1 − rate.

    At the end of the branch of a residual connection, it omits the branch for some samples. The
    choice is a pure function of seed, step, sample and layer (`dptrain.philox`), so it does not
    depend on the number of ranks. Files for other programs do not contain the layer.

    Source: Huang et al., "Deep networks with stochastic depth", 2016, with the factor in training.

    Attributes:
        rate: probability of a zero, at least 0 and less than 1.

    Example:
        >>> from dptrain import Add, Conv2d, Input, StochasticDepth
        >>> x = Input((8, 5, 5))
        >>> Add()(x, StochasticDepth(0.1)(Conv2d(8)(x))).shape
        (8, 5, 5)
    """

    kind: ClassVar[str] = "stochastic_depth"


@dataclass(frozen=True)
class LocalResponseNorm(Elementwise):
    """Normalisation over neighbouring channels of the same pixel.

    y[c] = x[c] / (bias + alpha · Σ_{|c' − c| ≤ radius} x[c']²)^beta

    Source: Krizhevsky et al., "ImageNet classification with deep convolutional neural networks",
    2012, section 3.3, with `radius` the half width n/2.
    """

    kind: ClassVar[str] = "lrn"

    radius: int = 4
    bias: float = 1.0
    alpha: float = 0.001 / 9.0
    beta: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(self.radius, "lrn radius", least=0)
        if not 0.0 < self.bias < math.inf:
            raise UserError(f"lrn bias is {self.bias}; expected a finite number above 0")
        _check_number(self.alpha, "lrn alpha")
        _check_number(self.beta, "lrn beta")

    def output_shape(self, input_shape: Shape) -> Shape:
        return maps_of("lrn", input_shape)

    def flops(self, input_shape: Shape) -> Flops:
        window = 2 * self.radius + 1
        size = math.prod(input_shape)
        return Flops(size * (2 * window + 4), size * (3 * window + 8))
