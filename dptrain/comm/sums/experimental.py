"""Gradient sums that leave out or postpone a part of another one, to measure what it costs.

They change no parameters that matter: the experiments use a learning rate of 0, so that all ranks
keep the same parameters although their gradients are not summed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar

from dptrain.comm.sums.base import GradientSum, UpdateSlice


class ExperimentalSum(GradientSum):
    """The base of the experimental sums.

    Args:
        original: the sum of the job; it remains usable between steps.
    """

    name: ClassVar[str] = "experimental"
    transport: ClassVar[str] = "experimental"
    overlaps: ClassVar[bool] = False

    def __init__(self, original: GradientSum) -> None:
        self._original = original
        super().__init__(
            original.world, original.gradients, original.num_parameters, original.buckets
        )

    @property
    def enqueues(self) -> bool:  # type: ignore[override]
        """Of the original sum."""
        return self._original.enqueues

    def _start(self, bucket: int) -> None:
        pass

    def _poll(self) -> None:
        pass

    def _finish(self) -> None:
        pass


class WithoutSum(ExperimentalSum):
    """Sums nothing and waits for no rank; each rank updates what it updates in the job."""

    def update(self, update_slice: UpdateSlice, learning_rate: float) -> None:
        for elements in self._original.updated_slices:
            update_slice(elements, learning_rate)


class OneNumberSum(WithoutSum):
    """Sums one number instead of the gradients, so that ranks wait for each other.

    `dptrain.comm.sums.enqueued.EnqueuedOneNumberSum` does the same on GPUs.
    """

    def _finish(self) -> None:
        self._original.synchronize()


class LateSum(ExperimentalSum):
    """Sums all gradients when the backward pass has ended."""

    @property
    def on_bucket_summed(self) -> Callable[[int], None] | None:
        """Of the original sum."""
        return self._original.on_bucket_summed

    @on_bucket_summed.setter
    def on_bucket_summed(self, function: Callable[[int], None] | None) -> None:
        self._original.on_bucket_summed = function

    def _finish(self) -> None:
        self._start_all()
        self._original.finish()

    def update(self, update_slice: UpdateSlice, learning_rate: float) -> None:
        self._original.update(update_slice, learning_rate)

    def finish_and_update(self, update_slice: UpdateSlice, learning_rate: float) -> None:
        self._num_started = 0
        self._start_all()
        self._original.finish_and_update(update_slice, learning_rate)

    def stream(self) -> AbstractContextManager[None]:
        return self._original.stream()

    def _start_all(self) -> None:
        for bucket in range(len(self.buckets)):
            self._original.start(bucket)
