"""The best state of a run by the validation data, which a checkpoint stores later."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dptrain.backends.replica import Replica
from dptrain.training.persistence.checkpoints import (
    Checkpoint,
    replica_arrays,
    restore_replica,
)
from dptrain.training.persistence.rundir import BEST
from dptrain.training.persistence.state_copy import StateCopy


class BestState:
    """The best state so far, on rank 0.

    It is a `StateCopy`, or in host memory if a device has too little. `checkpoint` transfers it to
    the host when a file is written.

    Args:
        checkpoint: that a resumed run has read from its directory; None if there is none.

    Attributes:
        stored_step: step of the best checkpoint in the run directory; -1 if there is none.
    """

    def __init__(self, checkpoint: Checkpoint | None = None) -> None:
        self._checkpoint, self._copy = checkpoint, StateCopy()
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
        return self._copy.nbytes

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The state as a checkpoint; None if there is none."""
        if self._checkpoint is None and self._kept is not None:
            step, facts = self._kept
            self._checkpoint = Checkpoint(step, self._copy.arrays(), dict(facts), Path(BEST))
        return self._checkpoint

    def prepare(self, replica: Replica) -> None:
        """Allocate the copy, so that `keep` allocates nothing between steps."""
        if not self._copy.fits(replica):
            # The state of a replica that was replaced by another layout.
            self._checkpoint, self._kept = self.checkpoint, None
            self._copy.allocate(replica)

    def keep(self, replica: Replica, step: int, facts: Mapping[str, Any]) -> None:
        """Replace the state by the present one of a replica.

        Args:
            replica: between two steps.
            step: number of completed steps.
            facts: as for `CheckpointStore.save`.
        """
        self.prepare(replica)
        if not self._copy.fits(replica):
            self._checkpoint = Checkpoint(step, replica_arrays(replica), dict(facts), Path(BEST))
            return
        self._copy.assign(replica)
        self._checkpoint, self._kept = None, (step, facts)

    def restore(self, replica: Replica) -> None:
        """Set a replica to the state, bit for bit."""
        if self._kept is None:
            assert self._checkpoint is not None, "no epoch was the best"
            restore_replica(replica, self._checkpoint)
            return
        self._copy.restore(replica)
        replica.updates = self._kept[1]["updates"]
