"""The interface of a gradient sum, which each method of summing over the ranks implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dptrain.comm.world import World
from dptrain.plan.buckets import Bucket

UpdateSlice = Callable[[slice, float], None]
"""Applies the update rule to elements of the flat arrays, with a learning rate. It changes nothing
if the loss, which the last bucket carries, is not finite."""


class GradientSum(ABC):
    """Sums the flat gradients of all ranks in place, bucket by bucket, during the backward pass.

    A training step calls `start` for each bucket in order, as soon as its gradients are final on
    this rank; `poll` between stages; and then `finish_and_update`. A subclass implements `_start`,
    `_poll` and `_finish`. It overrides `finish_and_update` if not every rank updates all parameters
    by itself.

    The last bucket carries the loss, the number of correct predictions and the stop request. Their
    sums reach every rank with every method.

    Attributes:
        before_update: called before `update` changes parameters, when the gradients are summed; by
            ranks that update parameters alone. None calls nothing.
        world: the ranks.
        gradients: the array that is summed, (num_parameters + 16,), in host or device memory.
        num_parameters: elements of the flat arrays, padding included.
        buckets: slices of `gradients`, in the order in which they become final.
        on_bucket_summed: called with the index of a bucket when its sum was found to be complete;
            None calls nothing. Methods that only enqueue work do not call it.
    """

    name: ClassVar[str]
    """The method's name in the output: a strategy, or ``none``."""

    transport: ClassVar[str]
    """How gradients are transferred: one of `dptrain.comm.TRANSPORTS`, or ``none``."""

    enqueues: ClassVar[bool] = False
    """True if `start`, `finish` and `update` only enqueue work on the device's streams, so that a
    CUDA graph can contain them."""

    is_identity: ClassVar[bool] = False
    """True if the gradients of this rank already are the sum."""

    overlaps: ClassVar[bool] = True
    """True if a sum may progress while this rank computes."""

    def __init__(
        self,
        world: World,
        gradients: NDArray[Any],
        num_parameters: int,
        buckets: tuple[Bucket, ...],
    ) -> None:
        covered = [0, *(bucket.stop for bucket in buckets)]
        assert [bucket.start for bucket in buckets] == covered[:-1], "buckets leave gaps"
        assert covered[-1] == gradients.size, "buckets do not cover the gradient"
        self.world, self.gradients, self.buckets = world, gradients, buckets
        self.num_parameters = num_parameters
        self.on_bucket_summed: Callable[[int], None] | None = None
        self.before_update: Callable[[], None] | None = None
        self._num_started = 0

    @property
    def memory_bytes(self) -> int:
        """Device memory that the method needs in addition to the gradients."""
        return 0

    @property
    def contributions(self) -> NDArray[Any]:
        """What this rank adds to the sum, (gradient slots, elements); without slots, `gradients`.

        If gradients are summed in host memory, the engine of a device copies them here.
        """
        return self.gradients[None]

    @property
    def updated_slices(self) -> tuple[slice, ...]:
        """Elements of the flat arrays that this rank updates in a step."""
        return (slice(0, self.num_parameters),)

    def start(self, bucket: int) -> None:
        """Start the sum of a bucket. All ranks start the same buckets in the same order."""
        assert bucket == self._num_started, f"bucket {bucket} started, expected {self._num_started}"
        self._num_started += 1
        self._start(bucket)

    def poll(self) -> None:
        """Let sums progress: MPI works on them only inside its calls."""
        if self._num_started:
            self._poll()

    def finish(self) -> None:
        """Wait until every bucket is summed, or enqueue that later work waits for it."""
        assert self._num_started == len(self.buckets), "finish before every bucket was started"
        self._finish()
        self._num_started = 0

    def update(self, update_slice: UpdateSlice, learning_rate: float) -> None:
        """Apply the update rule after `finish`, so that all ranks hold the same parameters.

        Args:
            update_slice: updates a slice of this rank's parameters.
            learning_rate: of the update.
        """
        if self.before_update is not None:
            self.before_update()
        update_slice(slice(0, self.num_parameters), learning_rate)

    def share_squares(self) -> None:
        """Wait until `FlatArrays.squares` is complete; all ranks that update call this.

        By default every rank that updates has the whole gradient, and computes all by itself.
        """

    def finish_and_update(self, update_slice: UpdateSlice, learning_rate: float) -> None:
        """Finish the sum, and update all parameters.

        A method may override this to sum and update in one pass: each rank finishes the sum of its
        own slice and calls `update_slice` for it alone, once or several times. The sums of the last
        bucket (loss, stop request) must be complete in `gradients` before the first call.

        Args:
            update_slice: updates a slice of this rank's parameters.
            learning_rate: of the update.
        """
        self.finish()
        self.update(update_slice, learning_rate)

    def synchronize(self) -> None:
        """Wait until all ranks call this, by the sum of one number outside a step."""
        self.world.all_reduce(np.zeros(1, np.float32))

    def sum_alone(self, bucket: int) -> None:
        """Sum one bucket outside a step and wait for it, for measurements."""
        self._start(bucket)
        self._finish()

    def stream(self) -> AbstractContextManager[None]:
        """Return a context that enqueues work after the sums that were started, on their stream."""
        return nullcontext()

    def close(self) -> None:
        """Release what the ranks share. All ranks call this, after graphs with sums are gone."""

    @abstractmethod
    def _start(self, bucket: int) -> None:
        """Implement `start`."""

    @abstractmethod
    def _poll(self) -> None:
        """Implement `poll`; called only while a step has started sums."""

    @abstractmethod
    def _finish(self) -> None:
        """Implement `finish`."""
