"""A copy of the state of a replica, in the memory of the replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from dptrain.backends.named_arrays import NamedArrays
from dptrain.backends.replica import Replica
from dptrain.training.persistence.checkpoints import named_arrays

MOST_OF_FREE = 0.5
"""Largest share of the free memory of a device that a copy may take."""


class StateCopy:
    """Parameters, running statistics and optimizer state of a replica after one step.

    They are copied within the memory of the replica: a device needs microseconds for this, and the
    host does not wait for it.
    """

    def __init__(self) -> None:
        self._copies, self._staging = dict[str, NamedArrays](), dict[str, NDArray[Any]]()

    @property
    def nbytes(self) -> int:
        """Size in the memory of the replica."""
        return sum(copy.nbytes for copy in self._copies.values())

    def fits(self, replica: Replica) -> bool:
        """Return True if there is memory for the state of a replica, in its layout."""
        named = named_arrays(replica)
        return all(kind in self._copies and self._copies[kind].fits(named[kind]) for kind in named)

    def allocate(self, replica: Replica) -> bool:
        """Allocate memory for the state of a replica; return False if the device has too little."""
        named = named_arrays(replica)
        self._copies, self._staging = {}, {}
        free, nbytes = replica.backend.free_bytes(), sum(each.nbytes for each in named.values())
        if free is None or nbytes <= MOST_OF_FREE * free:
            self._copies = {kind: each.like() for kind, each in named.items()}
        return bool(self._copies)

    def assign(self, replica: Replica) -> None:
        """Copy the state of a replica, between two steps."""
        for kind, arrays in named_arrays(replica).items():
            self._copies[kind].assign(arrays)

    def restore(self, replica: Replica) -> None:
        """Set the arrays of a replica to the state, bit for bit."""
        for kind, arrays in named_arrays(replica).items():
            arrays.assign(self._copies[kind])

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state on the host, as `checkpoints.replica_arrays` does."""
        return _named({kind: copy.copies() for kind, copy in self._copies.items()})

    def begin_arrays(self) -> Callable[[], dict[str, NDArray[Any]]]:
        """Start to send the state to the host; later steps do not wait for it.

        Returns:
            A function that waits for the arrays, in any thread, and returns them as `arrays` does.
            Until it returns, nothing may be assigned.
        """
        if not self._staging:
            self._staging = {kind: copy.staging() for kind, copy in self._copies.items()}
        parts = {
            kind: copy.begin_copies(self._staging[kind]) for kind, copy in self._copies.items()
        }
        return lambda: _named({kind: receive() for kind, receive in parts.items()})


def _named(kinds: dict[str, dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {f"{kind}/{name}": array for kind, part in kinds.items() for name, array in part.items()}
