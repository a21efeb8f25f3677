"""Digests of state that has one copy: of slices in shared memory, and of what rank 0 alone updates.

There is nothing to compare such state with. In one update of `every`, the rank that has updated a
slice stores its digest, and computes it again before the next update of the slice. Between the two
only computations read the state, so that a difference is an error of memory, or a write to a wrong
address. Other updates are not guarded: with `every` = 1 all are, and the state is then read twice
more in each step.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.digests import StateDigests, tensors_text
from dptrain.backends.replica import Replica
from dptrain.comm.sums.base import GradientSum
from dptrain.comm.world import World
from dptrain.errors import UserError

ADVICE = "continue with --resume from the newest checkpoint, without this hardware"
"""What to do, the end of each message."""


class CorruptedSliceError(UserError):
    """State has changed between an update and its next use; the rank that owns it raises this."""

    exit_code = 1


class StateGuard:
    """Guards the slices of the state that this rank updates.

    Args:
        world: the ranks, for the error.
        replica: has the state.
        slices: elements that this rank updates.
        every: number of updates of which the last is guarded.
    """

    def __init__(self, world: World, replica: Replica, slices: Sequence[slice], every: int) -> None:
        self._world, self._replica, self._every = world, replica, every
        self._digests = {(each.start, each.stop): StateDigests(replica, each) for each in slices}
        self._stored: dict[tuple[int, int], NDArray[np.uint64]] = {}
        self._num_writes = 0

    def store(self, elements: slice, number: int) -> None:
        """Store the digests of a slice after update number `number`, if this one is guarded."""
        if number % self._every == 0:
            key = elements.start, elements.stop
            self._stored[key] = self._digests[key].compute()
            self._num_writes = self._replica.num_writes

    def check(self, number: int) -> None:
        """Compare all slices with their digests, before update number `number`.

        Nothing is compared if a program has assigned parameters in between.

        Raises:
            CorruptedSliceError: a slice has changed.
        """
        stored, self._stored = self._stored, {}
        if self._replica.num_writes != self._num_writes:
            return
        for key, before in stored.items():
            digests = self._digests[key]
            changed = np.flatnonzero(digests.compute() != before)
            if len(changed):
                tensors = [digests.tensors[at] for at in changed.tolist()]
                device = self._replica.memory.name or "host memory"
                raise CorruptedSliceError(
                    f"silent corruption: {tensors_text(tensors)} changed on {socket.gethostname()} "
                    f"({device}) between step {number - 1} and its next use, while nothing wrote "
                    f"there; the memory is faulty, or a program wrote to a wrong address; {ADVICE}"
                )


def make_guard(gradient_sum: GradientSum, replica: Replica, every: int) -> StateGuard | None:
    """Return the guard of the state that has one copy; None if there is none on this rank.

    Args:
        gradient_sum: decides which elements this rank updates.
        replica: has the state.
        every: number of updates of which the last is guarded; 0 guards none.
    """
    has_one_copy = (
        gradient_sum.is_identity or replica.arrays.is_shared or gradient_sum.name == "central"
    )
    slices = [each for each in gradient_sum.updated_slices if each.stop > each.start]
    if not every or not has_one_copy or not slices:
        return None
    return StateGuard(gradient_sum.world, replica, slices, every)
