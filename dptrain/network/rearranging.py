"""Descriptions of layers that select, permute, pad or resize maps, without parameters.

`ChannelLayer`: channels of the output are channels of the input. `Resampling`: pixels of the output
are weighted sums of pixels of the input. Rows and columns are independent: y = R x Cᵀ for each
channel, with a sparse matrix R for the rows and C for the columns. Padding, parts of maps and
resizing differ in these matrices alone.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from dptrain.errors import UserError
from dptrain.network.layers import Flops, Layer, Shape, check_size, maps_of


class Selection(NamedTuple):
    """Channel c of y is channel first + (c mod groups) · (C / groups) + ⌊c / groups⌋ of x.

    C is the number of channels of y. A channel that x does not have is 0.
    """

    first: int
    groups: int


class ChannelLayer(Layer):
    """A layer whose channels are channels of its input, and whose pixels are those of its input."""

    @abstractmethod
    def selection(self, channels: int) -> Selection:
        """Return where the channels of the output are in an input with a number of channels."""

    @abstractmethod
    def transposed(self, channels: int) -> Selection:
        """Return where the channels of dx are in dy."""

    def flops(self, input_shape: Shape) -> Flops:
        return Flops(0)


@dataclass(frozen=True)
class ChannelSlice(ChannelLayer):
    """Channels `start` to `stop` − 1 of maps, such as one part of a split along the channels.

    Attributes:
        start: the first channel, from 0.
        stop: the channel after the last one.

    Example:
        >>> from dptrain import ChannelSlice, Input
        >>> x = Input((8, 5, 5))
        >>> [ChannelSlice(0, 6)(x).shape, ChannelSlice(6, 8)(x).shape]
        [(6, 5, 5), (2, 5, 5)]
    """

    kind: ClassVar[str] = "slice"

    start: int
    stop: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(self.start, "slice start", least=0)
        check_size(self.stop, "slice stop", least=self.start + 1)

    def output_shape(self, input_shape: Shape) -> Shape:
        channels, *sizes = maps_of(self.kind, input_shape)
        if self.stop > channels:
            raise UserError(f"slice stop is {self.stop}; expected at most {channels} channels")
        return self.stop - self.start, sizes[0], sizes[1]

    def selection(self, channels: int) -> Selection:
        return Selection(self.start, 1)

    def transposed(self, channels: int) -> Selection:
        return Selection(-self.start, 1)


@dataclass(frozen=True)
class ChannelShuffle(ChannelLayer):
    """Channels of equal groups in turn: the first of each group, then the second of each, ….

    y[i·groups + g] = x[g·C/groups + i]

    Source: Zhang et al., "ShuffleNet: an extremely efficient convolutional neural network for
    mobile devices", 2018, section 3.1.

    Attributes:
        groups: number of groups; a divisor of the number of channels.

    Example:
        >>> from dptrain import ChannelShuffle, Input
        >>> ChannelShuffle(2)(Input((6, 5, 5))).shape  # channels 0, 3, 1, 4, 2, 5 of the input
        (6, 5, 5)
    """

    kind: ClassVar[str] = "shuffle"

    groups: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(self.groups, "shuffle groups")

    def output_shape(self, input_shape: Shape) -> Shape:
        shape = maps_of(self.kind, input_shape)
        if shape[0] % self.groups:
            raise UserError(
                f"shuffle has {self.groups} groups, but its input has {shape[0]} channels; "
                "expected a divisor of the number of channels"
            )
        return shape

    def selection(self, channels: int) -> Selection:
        return Selection(0, self.groups)

    def transposed(self, channels: int) -> Selection:
        return Selection(0, channels // self.groups)


Taps = tuple[tuple[tuple[int, float], ...], ...]
"""For each position of the output, positions of the input and their weights."""


class Resampling(Layer):
    """A layer that computes each channel of y as R x Cᵀ."""

    @abstractmethod
    def taps(self, sizes: tuple[int, int]) -> tuple[Taps, Taps]:
        """Return the rows of R and of C for maps of a height and a width.

        Raises:
            UserError: the layer does not accept maps of this size.
        """

    def output_shape(self, input_shape: Shape) -> Shape:
        channels, height, width = maps_of(self.kind, input_shape)
        rows, columns = self.taps((height, width))
        return channels, len(rows), len(columns)

    def flops(self, input_shape: Shape) -> Flops:
        rows, columns = self.taps((input_shape[1], input_shape[2]))
        if all(weight == 1.0 for each in (*rows, *columns) for _, weight in each):
            return Flops(0)
        work = 2 * input_shape[0] * sum(map(len, rows)) * sum(map(len, columns))
        return Flops(work, work)


def transposed(taps: Taps, size: int) -> Taps:
    """Return the rows of the transposed matrix, which has `size` rows."""
    found: list[list[tuple[int, float]]] = [[] for _ in range(size)]
    for position, terms in enumerate(taps):
        for source, weight in terms:
            found[source].append((position, weight))
    return tuple(map(tuple, found))


@dataclass(frozen=True)
class Pad2d(Resampling):
    """Rows and columns around maps.

    Attributes:
        padding: numbers of rows and columns (top, bottom, left, right).
        mode: values there: "zeros", "reflect" (pixels mirrored at the outermost ones) or
            "replicate" (the outermost pixels).

    Example:
        >>> from dptrain import Input, Pad2d
        >>> Pad2d((1, 1, 2, 0))(Input((3, 8, 8))).shape
        (3, 10, 10)
    """

    kind: ClassVar[str] = "pad"

    padding: tuple[int, int, int, int]
    mode: Literal["zeros", "reflect", "replicate"] = "zeros"

    def __post_init__(self) -> None:
        super().__post_init__()
        for value in self.padding:
            check_size(value, "pad padding", least=0)
        if self.mode not in ("zeros", "reflect", "replicate"):
            raise UserError(f"pad mode is '{self.mode}'; expected zeros, reflect or replicate")

    def taps(self, sizes: tuple[int, int]) -> tuple[Taps, Taps]:
        top, bottom, left, right = self.padding
        return self._taps(sizes[0], top, bottom), self._taps(sizes[1], left, right)

    def _taps(self, size: int, before: int, after: int) -> Taps:
        if self.mode == "reflect" and max(before, after) >= size:
            raise UserError(
                f"pad reflects {max(before, after)} pixels of maps with {size}; expected fewer "
                "pixels than the map has"
            )
        positions = range(-before, size + after)
        return tuple(((self._source(at, size), 1.0),) if self._exists(at, size) else ()
                     for at in positions)  # fmt: skip

    def _exists(self, at: int, size: int) -> bool:
        return self.mode != "zeros" or 0 <= at < size

    def _source(self, at: int, size: int) -> int:
        if self.mode == "reflect":
            return size - 1 - abs(size - 1 - abs(at))
        return min(max(at, 0), size - 1)


@dataclass(frozen=True)
class Resize2d(Resampling):
    """Maps of another height and width.

    Attributes:
        size: height and width, one number or a pair.
        mode: "nearest" takes pixel ⌊i · H / size⌋; "bilinear" interpolates between the two nearest
            pixels, whose centres are at (i + ½) · H / size − ½.
        align_corners: True puts the outermost pixels of "bilinear" on each other, so that centres
            are at i · (H − 1) / (size − 1).

    Example:
        >>> from dptrain import Input, Resize2d
        >>> Resize2d(16, mode="bilinear")(Input((3, 8, 8))).shape
        (3, 16, 16)
    """

    kind: ClassVar[str] = "resize"

    size: int | tuple[int, int]
    mode: Literal["nearest", "bilinear"] = "nearest"
    align_corners: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for value in self.sizes:
            check_size(value, "resize size")
        if self.mode not in ("nearest", "bilinear"):
            raise UserError(f"resize mode is '{self.mode}'; expected nearest or bilinear")
        if self.align_corners and self.mode == "nearest":
            raise UserError(
                "resize aligns corners with mode nearest; set mode to bilinear or align_corners "
                "to false"
            )

    @property
    def sizes(self) -> tuple[int, int]:
        """Height and width."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    def taps(self, sizes: tuple[int, int]) -> tuple[Taps, Taps]:
        rows, columns = (
            tuple(self._terms(i, size, wanted) for i in range(wanted))
            for size, wanted in zip(sizes, self.sizes, strict=True)
        )
        return rows, columns

    def _terms(self, i: int, size: int, wanted: int) -> tuple[tuple[int, float], ...]:
        if self.mode == "nearest":
            return ((i * size // wanted, 1.0),)
        if self.align_corners:
            centre = i * (size - 1) / max(wanted - 1, 1)
        else:
            centre = max((i + 0.5) * size / wanted - 0.5, 0.0)
        first = min(math.floor(centre), size - 1)
        share = centre - first
        second = min(first + 1, size - 1)
        if second == first or share == 0.0:
            return ((first, 1.0),)
        return (first, 1.0 - share), (second, share)


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

    def taps(self, sizes: tuple[int, int]) -> tuple[Taps, Taps]:
        for after, size in zip(self.stop, sizes, strict=True):
            if after > size:
                raise UserError(
                    f"crop stop is {after}; expected at most {size}, the size of the map"
                )
        rows, columns = (
            tuple(((at, 1.0),) for at in range(first, after, step))
            for first, after, step in zip(self.start, self.stop, self.step, strict=True)
        )
        return rows, columns
