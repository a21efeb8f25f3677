"""Digests of state that has one copy.

This is the state of a single rank, slices in shared memory, and with the strategy ``central`` all
state, because rank 0 replaces the parameters of the others after each update. There is nothing to
compare it with. The rank that updates or receives it stores its digest, and computes it again
before the next update. Between the two only computations read the state, so that a difference is an
error of memory, or a write to a wrong address.

A guarded update takes the time in which a processor reads the state twice more. As many updates are
guarded as fit into `SHARE` of the time, and in addition one in `JobSpec.digest_every` and those
before checkpoints.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.digests import PARAMETERS, StateDigests, tensors_text
from dptrain.backends.replica import Replica
from dptrain.comm.sums.base import GradientSum
from dptrain.errors import UserError
from dptrain.training.digests.differences import CORRUPTION

SHARE = 0.0005
"""Part of the time that guards take, unless more are required."""


class CorruptedSliceError(UserError):
    """State has changed between an update and its next use; the rank that owns it raises this."""

    exit_code = 1


class StateGuard:
    """Guards the slices of the state that this rank updates.

    Args:
        replica: has the state.
        slices: elements that this rank updates or receives.
        arrays: the arrays of the state; None for all.

    Attributes:
        receives: True if another rank updates the slices.
    """

    def __init__(
        self,
        replica: Replica,
        slices: Sequence[slice],
        arrays: Sequence[str] | None = None,
    ) -> None:
        self._replica, self.receives = replica, arrays is not None
        self._digests = {
            (each.start, each.stop): StateDigests(replica, each, arrays) for each in slices
        }
        self._began, self._guarded_s = perf_counter(), 0.0
        self._stored: dict[tuple[int, int], NDArray[np.uint64]] = {}
        self._number = self._num_writes = 0

    def store(self, elements: slice, number: int, *, is_required: bool) -> None:
        """Store the digests of a slice after an update.

        Args:
            elements: the slice.
            number: of the update, from 1.
            is_required: False guards the update only if this takes little of the time.
        """
        began = perf_counter()
        if not is_required and self._guarded_s > SHARE * (began - self._began):
            return
        key = elements.start, elements.stop
        self._stored[key] = self._digests[key].compute()
        self._number, self._num_writes = number, self._replica.context.num_writes
        self._guarded_s += 2 * (perf_counter() - began)  # The check takes as long.

    def release(self) -> None:
        """Let the state change: check it, and forget its digests.

        Raises:
            CorruptedSliceError: a slice has changed.
        """
        self.check()
        self._stored = {}

    def check(self) -> None:
        """Compare all slices with their digests.

        Nothing is compared if a program has assigned parameters in between.

        Raises:
            CorruptedSliceError: a slice has changed.
        """
        if self._replica.context.num_writes != self._num_writes:
            return
        for key, before in self._stored.items():
            digests = self._digests[key]
            changed = np.flatnonzero(digests.compute() != before)
            if len(changed):
                tensors = [digests.tensors[at] for at in changed.tolist()]
                device = self._replica.memory.name or "host memory"
                raise CorruptedSliceError(
                    f"{CORRUPTION}{tensors_text(tensors)} changed on {socket.gethostname()} "
                    f"({device}) between step {self._number} and its next use, while nothing wrote "
                    "there; the memory is faulty, or a program wrote to a wrong address"
                )


def make_guard(gradient_sum: GradientSum, replica: Replica) -> StateGuard | None:
    """Return the guard of the state that has one copy; None if there is none on this rank.

    Args:
        gradient_sum: decides which elements this rank updates.
        replica: has the state.
    """
    is_central = gradient_sum.name == "central"
    if is_central and not gradient_sum.world.is_rank_zero:
        return StateGuard(replica, [slice(0, replica.plan.trained.size)], [PARAMETERS])
    has_one_copy = gradient_sum.is_identity or replica.arrays.is_shared or is_central
    slices = [each for each in gradient_sum.updated_slices if each.stop > each.start]
    return StateGuard(replica, slices) if has_one_copy and slices else None
