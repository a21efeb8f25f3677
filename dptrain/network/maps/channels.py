"""Descriptions of layers that select or permute channels."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

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
