"""Sums over GPUs that are enqueued behind the stages, beside those that follow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dptrain.backends.cuda.device import SUMS, Array, Device
from dptrain.backends.replica import Replica
from dptrain.comm.base import GradientSum
from dptrain.comm.world import World
from dptrain.plan.buckets import Bucket


class Carrier(ABC):
    """What ranks do together with arrays of their GPUs; every call is enqueued, in place.

    All ranks make the same calls in the same order, with arrays that were named at the start.
    Between two broadcasts there is a sum.
    """

    @abstractmethod
    def all_reduce(self, array: Array) -> None:
        """Have every rank hold Σ_r x_r, with the same bits."""

    @abstractmethod
    def reduce(self, array: Array) -> None:
        """Have rank 0 hold Σ_r x_r; what others have then is of no use."""

    @abstractmethod
    def broadcast(self, array: Array) -> None:
        """Have every rank hold what rank 0 does."""

    transport: ClassVar[str]
    """Its word in `dptrain.comm.TRANSPORTS`."""

    memory_bytes: int = 0
    """Of the device that this takes, as far as it is known."""

    @abstractmethod
    def close(self) -> None:
        """Leave the others in good order, when nothing is enqueued any more."""


@dataclass(frozen=True)
class Shared:
    """Arrays of a rank, float32, of which the others have the same, by what is done with them.

    Attributes:
        all_reduced, reduced, broadcast: as `Carrier` has it; 16 bytes each or a multiple.
    """

    all_reduced: Sequence[Array] = ()
    reduced: Sequence[Array] = ()
    broadcast: Sequence[Array] = ()


Connect = Callable[[World, Replica, Shared], Carrier]
"""Makes the carrier of some arrays of a replica; all ranks call it."""


class EnqueuedSum(GradientSum):
    """g ← Σ_r g_r on every rank, by one all-reduce a bucket, in the memory of the GPUs."""

    name: ClassVar[str] = "mirrored"
    enqueues: ClassVar[bool] = True

    def __init__(
        self, world: World, replica: Replica, buckets: tuple[Bucket, ...], connect: Connect
    ) -> None:
        super().__init__(world, replica, buckets)
        assert isinstance(replica.memory, Device)
        self.device = replica.memory
        self.parts = self._parts()
        self.carrier = connect(world, replica, self._shared())

    def _parts(self) -> list[Array]:
        """What is summed of each bucket."""
        gradients = self.replica.flat_gradients
        return [gradients[bucket.start : bucket.stop] for bucket in self.buckets]

    def _shared(self) -> Shared:
        """What the carrier is to know of."""
        return Shared(all_reduced=self.parts)

    @property
    def memory_bytes(self) -> int:
        return self.carrier.memory_bytes

    def close(self) -> None:
        self.device.synchronize()
        self.carrier.close()

    def stamp(self, place: int) -> None:
        with self.device.beside(SUMS):
            self.replica.stamp(place)

    @property
    def transport(self) -> str:  # type: ignore[override]
        """The carrier's."""
        return self.carrier.transport

    def _first_under_way(self) -> int | None:
        return None

    def _do_start(self, bucket: int) -> None:
        self.bytes += self.parts[bucket].nbytes
        with self.device.beside(SUMS):
            self.carrier.all_reduce(self.parts[bucket])

    def _do_poll(self) -> None:
        pass

    def _do_finish(self) -> None:
        self.device.join()


class EnqueuedCentralSum(EnqueuedSum):
    """g ← Σ_r g_r on rank 0, which updates and hands the parameters out.

    The few shared sums behind the slots go to every rank.
    """

    name: ClassVar[str] = "central"

    def _parts(self) -> list[Array]:
        size, gradients = self.replica.plan.layout.size, self.replica.flat_gradients
        self.sums = gradients[size:]
        return [gradients[bucket.start : min(bucket.stop, size)] for bucket in self.buckets]

    def _shared(self) -> Shared:
        return Shared([self.sums], self.parts, [self.replica.flat_parameters])

    def _do_start(self, bucket: int) -> None:
        self.bytes += self.parts[bucket].nbytes
        with self.device.beside(SUMS):
            self.carrier.reduce(self.parts[bucket])
            if bucket == len(self.buckets) - 1:
                self.carrier.all_reduce(self.sums)

    def update(self, learning_rate: float) -> None:
        if self.world.is_rank_zero:
            self._update_here(learning_rate)
        else:
            self.replica.updates += 1
        self.carrier.broadcast(self.replica.flat_parameters)

    def apply_update(self, *, rest: bool = False) -> None:
        if self.world.is_rank_zero:
            super().apply_update(rest=rest)
        self.carrier.broadcast(self.replica.flat_parameters)
