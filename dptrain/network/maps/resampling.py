"""Descriptions of layers whose pixels are sums of a few pixels of the same channel.

The sums are products of those of rows and of columns, which a layer states as *taps*: for each row
of y, the rows of x that it reads and their weights. The gradient of x has the transposed taps, so a
backend needs one kernel for both phases of all of these layers. To add one, write its taps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from dptrain.errors import UserError, shown
from dptrain.network.layers import Conv2d, Flops, Layer, PaddingName, Shape, check_size, maps_of

Taps = tuple[tuple[tuple[int, float], ...], ...]
"""For each position of the output, the positions of the input that it reads, with weights."""


def transposed(taps: Taps, size: int) -> Taps:
    """Return the taps of the gradient of an input with `size` positions.

    Example:
        >>> transposed((((0, 1.0),), ((0, 0.5), (1, 0.5))), 2)
        (((0, 1.0), (1, 0.5)), ((1, 0.5),))
    """
    found: list[list[tuple[int, float]]] = [[] for _ in range(size)]
    for position, read in enumerate(taps):
        for source, weight in read:
            found[source].append((position, weight))
    return tuple(map(tuple, found))


class Resampling(Layer):
    """A layer for maps whose rows and columns are sums of rows and columns of its input."""

    def axis_taps(self, axis: int, size: int) -> Taps:
        """Return the taps of the rows (axis 0) or columns (axis 1) of an input with `size`."""
        raise NotImplementedError

    def taps(self, input_shape: Shape) -> tuple[Taps, Taps]:
        """Return the taps of rows and of columns."""
        _, height, width = maps_of(self.kind, input_shape)
        return self.axis_taps(0, height), self.axis_taps(1, width)

    def axis_size(self, axis: int, size: int) -> int:
        """Return the number of rows or columns of the output.

        Raises:
            UserError: the layer does not accept an input with `size` of them.
        """
        raise NotImplementedError

    def output_shape(self, input_shape: Shape) -> Shape:
        channels, height, width = maps_of(self.kind, input_shape)
        return channels, self.axis_size(0, height), self.axis_size(1, width)

    def flops(self, input_shape: Shape) -> Flops:
        return Flops(0)


def _reflected(position: int, size: int) -> int:
    """Return the position that mirrors the border without repeating it."""
    return abs(position) if position < size else 2 * (size - 1) - position


PADDINGS: Mapping[str, Callable[[int, int], int | None]] = {
    "zeros": lambda position, size: position if 0 <= position < size else None,
    "reflect": _reflected,
    "replicate": lambda position, size: min(max(position, 0), size - 1),
}
"""For each mode of padding, the position that a position around an axis copies; None for 0."""


@dataclass(frozen=True)
class Pad2d(Resampling):
    """Rows and columns around each map.

    Attributes:
        padding: number of positions on every side, or at the top, bottom, left and right.
        mode: the values: "zeros", "reflect" (the map mirrored at its border, which is not
            repeated), or "replicate" (the nearest element of the map).

    Example:
        >>> from dptrain import Input, Pad2d
        >>> Pad2d((1, 2, 0, 0), mode="reflect")(Input((8, 5, 5))).shape
        (8, 8, 5)
    """

    kind: ClassVar[str] = "pad"

    padding: int | tuple[int, int, int, int] = 1
    mode: Literal["zeros", "reflect", "replicate"] = "zeros"

    def __post_init__(self) -> None:
        super().__post_init__()
        for number in self.sides:
            check_size(number, "pad padding", least=0)
        _check_name(self.mode, "pad mode", PADDINGS)

    @property
    def sides(self) -> tuple[int, int, int, int]:
        """Positions at the top, bottom, left and right."""
        if isinstance(self.padding, int):
            return (self.padding,) * 4
        top, bottom, left, right = self.padding
        return top, bottom, left, right

    def axis_size(self, axis: int, size: int) -> int:
        before, after = self.sides[2 * axis : 2 * axis + 2]
        if self.mode == "reflect" and max(before, after) >= size:
            raise UserError(
                f"pad reflects {max(before, after)} positions of an axis with {size}; expected at "
                f"most {size - 1}"
            )
        return before + size + after

    def axis_taps(self, axis: int, size: int) -> Taps:
        before, after = self.sides[2 * axis : 2 * axis + 2]
        sources = (PADDINGS[self.mode](i, size) for i in range(-before, size + after))
        return tuple(() if source is None else ((source, 1.0),) for source in sources)


@dataclass(frozen=True)
class Resize2d(Resampling):
    """Maps of another size, by the nearest pixel or by linear interpolation in both directions.

    With s pixels of the input for each pixel of the output, pixel i of the output is at s·i of the
    input for "nearest", which takes the pixel ⌊s·i⌋, and at (i + ½)·s − ½ for "bilinear", as in
    PyTorch. With `align_corners`, s is (H − 1) / (Ho − 1), and pixel i is at s·i.

    Attributes:
        scale: size of the output, rounded down, relative to that of the input; one number or that
            of height and width.
        size: height and width of the output instead; None for those from `scale`. It is needed if
            rounding makes H, or 2·H for "nearest", of another number H·scale: programs then differ
            in the pixels that they read.
        mode: "nearest" or "bilinear".
        align_corners: the corners of input and output are at the same positions; for "bilinear".

    Example:
        >>> from dptrain import Input, Resize2d
        >>> Resize2d(2)(Input((8, 5, 5))).shape, Resize2d(size=(7, 9))(Input((8, 5, 5))).shape
        ((8, 10, 10), (8, 7, 9))
    """

    kind: ClassVar[str] = "resize"

    scale: float | tuple[float, float] = 2.0
    size: int | tuple[int, int] | None = None
    mode: Literal["nearest", "bilinear"] = "nearest"
    align_corners: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for scale in self.scales:
            if not 0.0 < scale < 2.0**20:
                raise UserError(f"resize scale is {scale}; expected a number above 0, below 2^20")
        if self.size is not None:
            for number in _pair(self.size):
                check_size(number, "resize size")
        _check_name(self.mode, "resize mode", ("nearest", "bilinear"))
        if self.align_corners and self.mode != "bilinear":
            raise UserError("resize aligns corners; expected the mode bilinear")

    @property
    def scales(self) -> tuple[float, float]:
        """Scales of height and width."""
        first, second = self.scale if isinstance(self.scale, tuple | list) else (self.scale,) * 2
        return float(first), float(second)

    def flops(self, input_shape: Shape) -> Flops:
        # Four products and three sums, unless pixels are copied.
        size = 0 if self.mode == "nearest" else 7 * math.prod(self.output_shape(input_shape))
        return Flops(size, size)

    def axis_size(self, axis: int, size: int) -> int:
        if self.size is not None:
            return _pair(self.size)[axis]
        scale = self.scales[axis]
        count = math.floor(size * scale)
        if count < 1:
            raise UserError(f"resize makes 0 of {size} rows or columns; expected at least 1")
        # PyTorch and ONNX Runtime copy pixels for these sizes, and do not use the scale.
        copied = (size, 2 * size) if self.mode == "nearest" else (size,)
        if count in copied and count != size * scale:
            raise UserError(
                f"resize scale is {scale}, which makes {count} of {size} rows or columns without a "
                f"definite position; use the scale {count / size:g}, or a size"
            )
        return count

    def axis_taps(self, axis: int, size: int) -> Taps:
        count, scale = self.axis_size(axis, size), self.scales[axis]
        ratio = (1, scale) if self.size is None else (size, count)
        if self.mode == "nearest":
            sources = (min(math.floor(i * ratio[0] / ratio[1]), size - 1) for i in range(count))
            return tuple(((source, 1.0),) for source in sources)
        return tuple(self._between(i, ratio[0] / ratio[1], size, count) for i in range(count))

    def _between(
        self, i: int, ratio: float, size: int, count: int
    ) -> tuple[tuple[int, float], ...]:
        """Return the two neighbours of position i of the output, with their weights."""
        at = max((i + 0.5) * ratio - 0.5, 0.0)
        if self.align_corners:
            at = i * (size - 1) / (count - 1) if count > 1 else 0.0
        first = min(math.floor(at), size - 1)
        weight = at - first if first < size - 1 else 0.0
        return ((first, 1.0 - weight), (first + 1, weight)) if weight else ((first, 1.0),)


@dataclass(frozen=True)
class Crop2d(Resampling):
    """Rows and columns of maps, all or every second, third, ….

    Attributes:
        start: first row and column.
        stop: row and column after the last ones.
        step: vertical and horizontal distance.

    Example:
        >>> from dptrain import Crop2d, Input
        >>> Crop2d((0, 1), (8, 8), (2, 2))(Input((3, 8, 8))).shape
        (3, 4, 4)
    """

    kind: ClassVar[str] = "crop"

    start: tuple[int, int]
    stop: tuple[int, int]
    step: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for first, after, step in zip(self.start, self.stop, self.step, strict=True):
            check_size(first, "crop start", least=0)
            check_size(after, "crop stop", least=first + 1)
            check_size(step, "crop step")

    def axis_size(self, axis: int, size: int) -> int:
        if self.stop[axis] > size:
            raise UserError(
                f"crop stop is {self.stop[axis]}; expected at most {size}, the size of the map"
            )
        return len(self._positions(axis))

    def axis_taps(self, axis: int, size: int) -> Taps:
        return tuple(((position, 1.0),) for position in self._positions(axis))

    def _positions(self, axis: int) -> range:
        return range(self.start[axis], self.stop[axis], self.step[axis])


@dataclass(frozen=True)
class Dilate2d(Resampling):
    """Zeros between the pixels of each map, as in a transposed convolution.

    `transposed_convolution` returns it with the layers that follow.

    Attributes:
        factor: distance of the pixels in the output; one number or that of rows and columns.

    Example:
        >>> from dptrain import Dilate2d, Input
        >>> Dilate2d(2)(Input((8, 5, 5))).shape
        (8, 9, 9)
    """

    kind: ClassVar[str] = "dilate"

    factor: int | tuple[int, int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        for number in _pair(self.factor):
            check_size(number, "dilate factor")

    @property
    def factors(self) -> tuple[int, int]:
        """Distances of rows and of columns."""
        return _pair(self.factor)

    def axis_size(self, axis: int, size: int) -> int:
        return (size - 1) * self.factors[axis] + 1

    def axis_taps(self, axis: int, size: int) -> Taps:
        factor, positions = self.factors[axis], range(self.axis_size(axis, size))
        return tuple(((i // factor, 1.0),) if i % factor == 0 else () for i in positions)


def transposed_convolution(
    filters: int,
    kernel: int | tuple[int, int] = 2,
    stride: int | tuple[int, int] = 2,
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    *,
    groups: int = 1,
    bias: bool = True,
    dilation: int | tuple[int, int] = 1,
) -> tuple[Layer, ...]:
    """Return the layers of a transposed convolution, the gradient of a convolution by its input.

    They are zeros between the pixels, zeros around the map, and a convolution. Its weights are
    those of PyTorch's ConvTranspose2d with the kernel rotated by 180° and, within each group,
    channels and filters exchanged. An output has (H − 1) · stride + extent rows, less padding, with
    an extent of (kernel − 1) · dilation + 1.

    Source: Dumoulin and Visin, "A guide to convolution arithmetic for deep learning", 2016.

    Args:
        filters: number of output channels.
        kernel: one number or height and width.
        stride: one number or that of rows and columns.
        padding: rows and columns that the output lacks at the top, bottom, left and right: the
            padding of PyTorch, less its output_padding at the bottom and right.
        groups: of channels and filters.
        bias: whether the convolution has a bias for each filter.
        dilation: of the convolution, one number or that of rows and columns.

    Raises:
        UserError: the output would lack more than extent − 1 rows or columns at a side, or an
            argument is of another type.

    Example:
        >>> from dptrain import Input
        >>> x = Input((8, 5, 5))
        >>> for layer in transposed_convolution(4, kernel=3, padding=(1, 0, 1, 0)):
        ...     x = layer(x)
        >>> x.shape
        (4, 10, 10)
    """
    convolution = Conv2d(filters, kernel, groups=groups, bias=bias, dilation=dilation)
    height, width = convolution.extents
    match padding:
        case (int(top), int(bottom), int(left), int(right)):
            pass
        case _:
            raise UserError(
                f"the padding of a transposed convolution is {shown(padding)}; expected four whole "
                "numbers: top, bottom, left and right"
            )
    pads = height - 1 - top, height - 1 - bottom, width - 1 - left, width - 1 - right
    if min(pads) < 0:
        raise UserError(
            f"the padding of a transposed convolution is {padding}; expected at most the extent of "
            f"the kernel ({height}, {width}) less 1"
        )
    is_equal = len(set(pads)) == 1
    outside: int | PaddingName = pads[0] if is_equal else "valid"
    layers: list[Layer] = [Dilate2d(stride)] if Dilate2d(stride).factors != (1, 1) else []
    layers += [] if is_equal else [Pad2d(pads)]
    return *layers, replace(convolution, padding=outside)


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _check_name(name: str, what: str, known: Sequence[str] | Mapping[str, object]) -> None:
    if name not in known:
        raise UserError(f"{what} is {name!r}; expected {' or '.join(known)}")
