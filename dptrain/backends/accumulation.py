"""Gradient accumulation: the gradients of several passes are added before an update.

Every pass writes the flat gradient, with the loss sums at its end. After each pass but the last it
is added to a stored sum; the last pass adds the stored sums to its own gradient, bucket by bucket,
before the sum over the ranks. So the kernels of the layers do not differ, and an update costs three
to five times the memory traffic of a gradient for each further pass.

Order of summation: one pass after the other. With micro-shards, each pass is a subtree of the tree
of `dptrain.plan.shards`; the sums of subtrees are stored until their neighbours are complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dptrain.backends.replica import Replica

Operation = Callable[[], None]


class Accumulation:
    """The stored sums of the gradients of a replica, and the additions after each pass.

    Args:
        replica: its plan has several passes, and one gradient slot.
    """

    def __init__(self, replica: Replica) -> None:
        plan, gradient = replica.plan, replica.flat_gradients
        assert plan.gradient_slots == 1, "a pass has several gradient slots"
        self._replica, self._gradient = replica, gradient
        shape, dtype = gradient.shape, plan.dtype
        self._sums = [replica.memory.zeros(shape, dtype) for _ in range(plan.stored_gradients)]
        self._stores: list[list[Operation]] = []
        self._additions: dict[tuple[int, int], list[Operation]] = {}
        num_stored = 0
        for merged in plan.pass_merges.tolist()[:-1]:
            self._stores.append(self._bind_store(num_stored, merged))
            num_stored += 1 - merged
        self._bound_additions(slice(0, gradient.size))  # Compiles before the first step.

    def store(self, number: int) -> None:
        """Add the gradient of pass `number`, which is not the last one, to the stored sums."""
        for operation in self._stores[number]:
            operation()

    def add(self, elements: slice) -> None:
        """Add all stored sums to some elements of the gradient of the last pass.

        Args:
            elements: of the flat gradient; start and stop are multiples of 16.
        """
        for operation in self._bound_additions(elements):
            operation()

    def _bound_additions(self, elements: slice) -> list[Operation]:
        """Return the operations of `add`, which are bound once."""
        key, bind = (elements.start, elements.stop), self._replica.backend.bind_addition
        if key not in self._additions:
            target, newest_first = self._gradient[elements], reversed(self._sums)
            self._additions[key] = [
                bind(self._replica, target, stored[elements]) for stored in newest_first
            ]
        return self._additions[key]

    def _bind_store(self, num_stored: int, merged: int) -> list[Operation]:
        """Return the operations after a pass that completes sums.

        Args:
            num_stored: number of stored sums before.
            merged: number of them, the newest, to which this pass is the neighbour.
        """
        replica, gradient, sums = self._replica, self._gradient, self._sums
        bind = replica.backend.bind_addition
        if not merged:
            return [bind(replica, sums[num_stored], gradient, copies=True)]
        oldest, *newer = sums[num_stored - merged : num_stored]
        additions = [bind(replica, gradient, each) for each in reversed(newer)]
        return [*additions, bind(replica, oldest, gradient)]
