"""The flat layout: every parameter has a slot, the same in parameters, gradients and state.

Slots are in the order in which backward finishes their gradients (last layer first), so that
consecutive finished gradients are one slice, a bucket. The slots of frozen parameters are the last
ones, and only the flat array of the parameters has them. After the slots of the flat gradient
follow the sums of the loss, of correct predictions and of stop requests. They are part of the last
bucket, so that they need no collective of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import cached_property

from dptrain.network.layers import Parameter
from dptrain.network.network import Node
from dptrain.plan.lowering import Storage

ALIGNMENT = 16
"""Alignment of slots in elements: 64 bytes of float32, so that a slot starts on a cache line."""

SUMS = ("loss", "correct", "stop")
"""The sums that follow the slots of the flat gradient, in this order."""

LOSS, CORRECT, STOP = range(len(SUMS))


@dataclass(frozen=True)
class Slot:
    """Elements [start, stop) of the flat arrays, which belong to one parameter."""

    parameter: Parameter
    node: Node
    storage: Storage
    start: int

    @property
    def name(self) -> str:
        """Full name of the parameter."""
        return self.parameter.name

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.parameter.size


@dataclass(frozen=True)
class FlatLayout:
    """The slots of all parameters.

    Attributes:
        slots: the slots in storage order.
        size: number of elements of all parameters, with the padding between slots.
        unread_size: elements of the frozen parameters whose gradients are computed with those of
            other parameters of their layer, and not read. Their slots are the first frozen ones.
    """

    slots: tuple[Slot, ...]
    size: int
    unread_size: int = 0

    @cached_property
    def trained(self) -> FlatLayout:
        """The slots of the trained parameters: those of gradients and of the optimizer state."""
        slots = tuple(slot for slot in self.slots if slot.parameter.is_trained)
        return FlatLayout(slots, padded(slots[-1].stop) if slots else 0)

    @property
    def gradient_size(self) -> int:
        """Number of elements of the flat gradient: trained slots and, after them, `SUMS`."""
        return self.trained.size + ALIGNMENT

    @property
    def gradient_pitch(self) -> int:
        """Number of elements from one gradient to the next: with those that are not read."""
        return self.gradient_size + self.unread_size

    def gradient_start(self, slot: Slot) -> int:
        """Return the first element of a gradient that is computed."""
        return slot.start if slot.parameter.is_trained else slot.start + ALIGNMENT

    def has_gradient(self, slot: Slot) -> bool:
        """Return whether the gradient of a parameter is computed."""
        return slot.start < self.trained.size + self.unread_size

    def __getitem__(self, name: str) -> Slot:
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.slots}


def make_layout(
    parameters: Iterable[tuple[Node, Parameter, Storage]], unread: Set[str] = frozenset()
) -> FlatLayout:
    """Return the layout in which the parameters have slots in the given order, frozen ones last.

    Args:
        parameters: with their layers and their storage.
        unread: names of the frozen parameters whose gradients are computed.
    """

    def place(item: tuple[Node, Parameter, Storage]) -> int:
        _, parameter, _ = item
        return 0 if parameter.is_trained else 1 if parameter.name in unread else 2

    slots, start, unread_size = [], 0, 0
    for node, parameter, storage in sorted(parameters, key=place):
        slots.append(Slot(parameter, node, storage, start))
        start += padded(parameter.size)
        unread_size += padded(parameter.size) if parameter.name in unread else 0
    return FlatLayout(tuple(slots), start, unread_size)


def padded(size: int) -> int:
    """Return the number of elements until the next slot."""
    return -(-size // ALIGNMENT) * ALIGNMENT
