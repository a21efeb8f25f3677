"""Programs of a device engine: work that is captured once and launched in every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dptrain.backends.replica import Replica
from dptrain.data.loader import Batch


@dataclass(slots=True)
class _Program:
    """A captured program (`Memory.program`), and how many runs remain until it is captured."""

    run: Callable[[], None]
    slow_runs: int


class Programs:
    """Programs by size of the minibatch, kind of step and staging slot.

    The size of the global minibatch determines the share of every rank.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._programs: dict[tuple[int, bool], dict[int, _Program]] = {}

    def run(
        self, batch: Batch, enqueue: Callable[[], None], *, by_stage: bool = False, slot: int = 0
    ) -> None:
        """Run the work of `enqueue`, captured if it was run before."""
        by_slot = self._programs.setdefault((batch.global_count, by_stage), {})
        program = by_slot.get(slot)
        if program is None:
            captured = self._replica.memory.program(enqueue, warm=bool(by_slot))
            # The first one of a kind runs uncaptured before it is captured.
            program = by_slot[slot] = _Program(captured, 1 if by_slot else 2)
        program.run()
        program.slow_runs -= program.slow_runs > 0

    def is_captured(self, batch: Batch, *, by_stage: bool, slot: int) -> bool:
        """Return whether `run` would only launch a captured graph."""
        program = self._programs.get((batch.global_count, by_stage), {}).get(slot)
        return program is not None and not program.slow_runs

    def clear(self) -> None:
        """Release the graphs."""
        self._programs.clear()
