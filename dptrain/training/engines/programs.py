"""Programs of a device engine: work that is captured once and launched in every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.data.loading.sharding import shard


class Kind(Enum):
    """Kinds of programs."""

    LOAD = auto()  # Unpacks the minibatch of a pass, during the pass before.
    STEP = auto()
    SERIES = auto()  # Several steps, which load their minibatches.
    TIMED_STEP = auto()  # Loads the minibatch, too, and writes time stamps between stages.
    EARLY_PASS = auto()  # One of several passes of a step, not the last one.
    TIMED_EARLY_PASS = auto()


@dataclass(slots=True)
class _Program:
    """A captured program (`Memory.program`), and how many runs remain until it is captured."""

    run: Callable[[], None]
    slow_runs: int


_Key = tuple[int, int, bool, Kind]
"""Samples of the global minibatch and of the pass, whether another pass was before it, and kind."""


class Programs:
    """Programs by size of the minibatch, pass, kind and staging slot.

    The sizes of the global minibatch and of its part that a pass processes determine the share of
    every rank. The first pass of a step stores its gradients, later ones add theirs.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica, self._passes = replica, replica.plan.passes
        self._programs: dict[_Key, dict[int, _Program]] = {}

    def _key(self, batch: Batch, kind: Kind) -> _Key:
        count = batch.global_count
        if self._passes == 1:
            return count, count, False, kind
        part = shard(count, batch.part, self._passes)
        return count, part.stop - part.start, batch.part > 0, kind

    def run(
        self,
        batch: Batch,
        enqueue: Callable[[], None],
        *,
        kind: Kind = Kind.STEP,
        slot: int = 0,
    ) -> None:
        """Run the work of `enqueue`, captured if it was run before."""
        by_slot = self._programs.setdefault(self._key(batch, kind), {})
        program = by_slot.get(slot)
        if program is None:
            captured = self._replica.memory.program(enqueue, warm=bool(by_slot))
            # The first one of a kind runs uncaptured before it is captured.
            program = by_slot[slot] = _Program(captured, 1 if by_slot else 2)
        program.run()
        program.slow_runs -= program.slow_runs > 0

    def is_captured(self, batch: Batch, *, kind: Kind, slot: int) -> bool:
        """Return whether `run` would only launch a captured graph."""
        program = self._programs.get(self._key(batch, kind), {}).get(slot)
        return program is not None and not program.slow_runs

    def clear(self) -> None:
        """Release the graphs."""
        self._programs.clear()
