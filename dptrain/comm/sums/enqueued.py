"""Sums over GPUs that are enqueued on a stream and overlap with the backward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

from dptrain.backends.cuda.device.device import SUM_STREAM, Array, Device
from dptrain.backends.device_replica import SummedStatistics
from dptrain.backends.replica import Replica
from dptrain.comm.sums.base import GradientSum, UpdateSlice
from dptrain.comm.world import World
from dptrain.plan.buckets import Bucket


class Carrier(ABC):
    """Collective operations on arrays in GPU memory, in place; every call only enqueues work.

    All ranks make the same calls in the same order, with the arrays that the carrier was made for.
    There is a sum between any two broadcasts.
    """

    @abstractmethod
    def all_reduce(self, array: Array) -> None:
        """Replace the array by Σ_r x_r on every rank, with the same bits."""

    @abstractmethod
    def reduce(self, array: Array) -> None:
        """Replace the array by Σ_r x_r on rank 0; it is undefined on other ranks."""

    @abstractmethod
    def broadcast(self, array: Array) -> None:
        """Replace the array by that of rank 0 on every rank."""

    @abstractmethod
    def sum_statistics(self, statistics: SummedStatistics) -> None:
        """Replace statistics by Σ_r x_r on every rank, with the same bits."""

    kernels_add_statistics: ClassVar[bool] = False
    """True if the kernels that compute statistics can add them over the ranks themselves."""

    transport: ClassVar[str]
    """Its name in `dptrain.comm.TRANSPORTS`."""

    memory_bytes: int = 0
    """Device memory that it allocates, as far as it is known."""

    @abstractmethod
    def close(self) -> None:
        """Release what the ranks share, when nothing is enqueued any more."""


@dataclass(frozen=True)
class Shared:
    """What a carrier is used with: arrays of float32, of equal sizes on all ranks.

    Attributes:
        all_reduced, reduced, broadcast: by operation; sizes are multiples of 16 bytes.
        statistics: what `Carrier.sum_statistics` receives, which need not be float32.
    """

    all_reduced: Sequence[Array] = ()
    reduced: Sequence[Array] = ()
    broadcast: Sequence[Array] = ()
    statistics: Sequence[SummedStatistics] = ()


Connect = Callable[[World, Replica, Shared], Carrier]
"""Makes a carrier for some arrays of a replica; all ranks call it."""


class EnqueuedSum(GradientSum):
    """g ← Σ_r g_r on every rank, by one all-reduce per bucket in GPU memory.

    The sums are enqueued on a stream of their own and overlap with the stages that follow. The
    carrier decides the order of summation.

    Args:
        world, buckets: see `GradientSum`.
        replica: has the gradients, in the memory of a device.
        connect: makes the carrier.

    Attributes:
        replica, connect: as above.
    """

    name: ClassVar[str] = "mirrored"
    enqueues: ClassVar[bool] = True

    def __init__(
        self, world: World, replica: Replica, buckets: tuple[Bucket, ...], connect: Connect
    ) -> None:
        super().__init__(world, replica.flat_gradients, replica.plan.trained.size, buckets)
        assert isinstance(replica.memory, Device)
        self.device = replica.memory
        self.replica, self.connect = replica, connect
        self._bucket_arrays = self._slice_buckets()
        self.carrier = connect(world, replica, self._shared_arrays(replica))

    def _slice_buckets(self) -> list[Array]:
        """Return what is summed of each bucket."""
        return [self.gradients[bucket.start : bucket.stop] for bucket in self.buckets]

    def _shared_arrays(self, replica: Replica) -> Shared:
        """Return the arrays that the carrier is used with."""
        return Shared(all_reduced=self._bucket_arrays)

    @property
    def memory_bytes(self) -> int:
        return self.carrier.memory_bytes

    def stream(self) -> AbstractContextManager[None]:
        return self.device.side_stream(SUM_STREAM)

    def close(self) -> None:
        self.device.synchronize()
        self.carrier.close()

    @property
    def transport(self) -> str:  # type: ignore[override]
        """The carrier's."""
        return self.carrier.transport

    def _start(self, bucket: int) -> None:
        with self.device.side_stream(SUM_STREAM):
            self.carrier.all_reduce(self._bucket_arrays[bucket])

    def _poll(self) -> None:
        pass

    def _finish(self) -> None:
        self.device.join_streams()


class EnqueuedCentralSum(EnqueuedSum):
    """g ← Σ_r g_r on rank 0, which updates and broadcasts the parameters.

    The loss sums at the end of the last bucket reach every rank.
    """

    name: ClassVar[str] = "central"

    @property
    def updated_slices(self) -> tuple[slice, ...]:
        return super().updated_slices if self.world.is_rank_zero else ()

    def _slice_buckets(self) -> list[Array]:
        size = self.num_parameters
        self._loss_sums = self.gradients[size:]
        return [self.gradients[bucket.start : min(bucket.stop, size)] for bucket in self.buckets]

    def _shared_arrays(self, replica: Replica) -> Shared:
        self._parameters = replica.flat_parameters[: self.num_parameters]
        return Shared([self._loss_sums], self._bucket_arrays, [self._parameters])

    def _start(self, bucket: int) -> None:
        with self.device.side_stream(SUM_STREAM):
            self.carrier.reduce(self._bucket_arrays[bucket])
            if bucket == len(self.buckets) - 1:
                self.carrier.all_reduce(self._loss_sums)

    def update(self, update_slice: UpdateSlice, learning_rate: float) -> None:
        if self.world.is_rank_zero:
            super().update(update_slice, learning_rate)
        self.carrier.broadcast(self._parameters)


class EnqueuedOneNumberSum(EnqueuedSum):
    """Sums the loss instead of the gradients, so that ranks wait for each other; for experiments.

    Args:
        original: the sum of the job, whose updates it makes.
    """

    name: ClassVar[str] = "experimental"
    overlaps: ClassVar[bool] = False

    def __init__(self, original: EnqueuedSum) -> None:
        self._original = original
        super().__init__(original.world, original.replica, original.buckets, original.connect)

    def _slice_buckets(self) -> list[Array]:
        return [self.gradients[self.num_parameters :]]

    def _start(self, bucket: int) -> None:
        if bucket == len(self.buckets) - 1:
            super()._start(0)

    def update(self, update_slice: UpdateSlice, learning_rate: float) -> None:
        for elements in self._original.updated_slices:
            update_slice(elements, learning_rate)
