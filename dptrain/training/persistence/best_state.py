"""The best state of a run by the validation data, which a checkpoint stores later."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dptrain.backends.named_arrays import NamedArrays
from dptrain.backends.replica import Replica
from dptrain.training.persistence.checkpoints import (
    Checkpoint,
    named_arrays,
    replica_arrays,
    restore_replica,
)
from dptrain.training.persistence.rundir import BEST

MOST_OF_FREE = 0.5
"""Largest share of the free memory of a device that the copy may take. If it needs more, it is in
host memory."""


class BestState:
    """The best state so far, on rank 0.

    It is copied within the memory of the replica: a device needs microseconds for this, and the
    host does not wait for it. `checkpoint` transfers it to the host when a file is written.

    Args:
        checkpoint: that a resumed run has read from its directory; None if there is none.

    Attributes:
        stored_step: step of the best checkpoint in the run directory; -1 if there is none.
    """

    def __init__(self, checkpoint: Checkpoint | None = None) -> None:
        self._checkpoint, self._copies = checkpoint, dict[str, NamedArrays]()
        self._kept: tuple[int, Mapping[str, Any]] | None = None
        self.stored_step = -1 if checkpoint is None else checkpoint.step

    @property
    def step(self) -> int:
        """Step of the state; -1 if there is none."""
        if self._kept is not None:
            return self._kept[0]
        return -1 if self._checkpoint is None else self._checkpoint.step

    @property
    def memory_bytes(self) -> int:
        """Size of the copy in the memory of the replica."""
        return sum(copy.nbytes for copy in self._copies.values())

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The state as a checkpoint; None if there is none."""
        if self._checkpoint is None and self._kept is not None:
            step, facts = self._kept
            arrays = {
                f"{kind}/{name}": array
                for kind, copy in self._copies.items()
                for name, array in copy.copies().items()
            }
            self._checkpoint = Checkpoint(step, arrays, dict(facts), Path(BEST))
        return self._checkpoint

    def prepare(self, replica: Replica) -> None:
        """Allocate the copy, so that `keep` allocates nothing between steps."""
        named = named_arrays(replica)
        if all(kind in self._copies and self._copies[kind].fits(named[kind]) for kind in named):
            return
        # The state of a replica that was replaced by another layout.
        self._checkpoint, self._kept, self._copies = self.checkpoint, None, {}
        free, nbytes = replica.backend.free_bytes(), sum(each.nbytes for each in named.values())
        if free is None or nbytes <= MOST_OF_FREE * free:
            self._copies = {kind: each.like() for kind, each in named.items()}

    def keep(self, replica: Replica, step: int, facts: Mapping[str, Any]) -> None:
        """Replace the state by the present one of a replica.

        Args:
            replica: between two steps.
            step: number of completed steps.
            facts: as for `CheckpointStore.save`.
        """
        self.prepare(replica)
        if not self._copies:
            self._checkpoint = Checkpoint(step, replica_arrays(replica), dict(facts), Path(BEST))
            return
        for kind, arrays in named_arrays(replica).items():
            self._copies[kind].assign(arrays)
        self._checkpoint, self._kept = None, (step, facts)

    def restore(self, replica: Replica) -> None:
        """Set a replica to the state, bit for bit."""
        if self._kept is None:
            assert self._checkpoint is not None, "no epoch was the best"
            restore_replica(replica, self._checkpoint)
            return
        for kind, arrays in named_arrays(replica).items():
            arrays.assign(self._copies[kind])
        replica.updates = self._kept[1]["updates"]
