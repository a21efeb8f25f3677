"""The flat layout: every parameter has a slot, the same in parameters, gradients and state.

Slots are in the order in which backward finishes their gradients (last layer first), so that
consecutive finished gradients are one slice, a bucket. After the slots of the flat gradient follow
the sums of the loss, of correct predictions and of stop requests. They are part of the last bucket,
so that they need no collective of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    """

    slots: tuple[Slot, ...]
    size: int

    @property
    def gradient_size(self) -> int:
        """Number of elements of the flat gradient: the slots and, from `size` on, `SUMS`."""
        return self.size + ALIGNMENT

    def __getitem__(self, name: str) -> Slot:
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.slots}


def make_layout(parameters: Iterable[tuple[Node, Parameter, Storage]]) -> FlatLayout:
    """Return the layout in which the parameters have slots in the given order."""
    slots, start = [], 0
    for node, parameter, storage in parameters:
        slots.append(Slot(parameter, node, storage, start))
        start += -(-parameter.size // ALIGNMENT) * ALIGNMENT
    return FlatLayout(tuple(slots), start)
