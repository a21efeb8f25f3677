"""The flat layout: every parameter has one slot, the same in parameters, gradients and state.

Slots lie in the order in which backward finishes their gradients (last layer first), so that a
run of finished gradients is one slice: a bucket. Behind the slots lie a few sums that ranks share
besides gradients (loss, correct answers, wish to stop); they travel with the last bucket and so
cost no collective of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from dptrain.network.layers import Parameter
from dptrain.network.network import Node
from dptrain.plan.lowering import Storage

ALIGNMENT = 16
"""Elements; 64 bytes of float32, so that every slot starts on a cache line."""

SUMS = ("loss", "correct", "stop")
"""What lies behind the slots of the flat gradient, in this order."""

LOSS, CORRECT, STOP = range(len(SUMS))


@dataclass(frozen=True)
class Slot:
    """Place of one parameter: elements [start, stop) of the flat array."""

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
    """All slots.

    Attributes:
        slots: in storage order.
        size: elements of parameters, padding between slots included.
    """

    slots: tuple[Slot, ...]
    size: int

    @property
    def gradient_size(self) -> int:
        """Elements of the flat gradient: the slots and, from `size` on, `SUMS`."""
        return self.size + ALIGNMENT

    def __getitem__(self, name: str) -> Slot:
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.slots}


def lay_out(parameters: Iterable[tuple[Node, Parameter, Storage]]) -> FlatLayout:
    """Give each parameter a slot, in the order given."""
    slots, start = [], 0
    for node, parameter, storage in parameters:
        slots.append(Slot(parameter, node, storage, start))
        start += -(-parameter.size // ALIGNMENT) * ALIGNMENT
    return FlatLayout(tuple(slots), start)
