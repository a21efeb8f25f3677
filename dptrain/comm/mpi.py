"""Mirrored replicas over MPI: every rank receives the sum and makes the same update."""

from __future__ import annotations

from typing import Any, ClassVar

from mpi4py import MPI
from numpy.typing import NDArray

from dptrain.backends.replica import Replica
from dptrain.comm.base import GradientSum
from dptrain.comm.world import World, pieces
from dptrain.plan.buckets import Bucket


class MirroredSum(GradientSum):
    """g ← Σ_r g_r on every rank, by one nonblocking all-reduce a bucket."""

    name: ClassVar[str] = "mirrored"
    transport: ClassVar[str] = "host"

    def __init__(self, world: World, replica: Replica, buckets: tuple[Bucket, ...]) -> None:
        super().__init__(world, replica, buckets)
        assert world.comm is not None
        self.comm = world.comm
        self._active: list[tuple[int, MPI.Request]] = []

    def _first_under_way(self) -> int | None:
        return self._active[0][0] if self._active else None

    def _do_start(self, bucket: int) -> None:
        start, stop = self.buckets[bucket].start, self.buckets[bucket].stop
        self.replica.fetch_gradients(start, stop)
        self._sum_everywhere(bucket, self.replica.host_gradients[start:stop])

    def _sum_everywhere(self, bucket: int, array: NDArray[Any]) -> None:
        self.bytes += array.nbytes
        for piece in pieces(array):
            self._active.append((bucket, self.comm.Iallreduce(MPI.IN_PLACE, piece)))

    def _do_poll(self) -> None:
        self._active = [sum_ for sum_ in self._active if not sum_[1].Test()]

    def _do_finish(self) -> None:
        self._wait()
        self.replica.use_gradients()

    def _wait(self) -> None:
        while self._active:
            self.world.wait(self._active[0][1], f"the {self.name} sum of gradients")
            del self._active[0]
            self._note()


class DeviceMirroredSum(MirroredSum):
    """The same from the memory of GPUs, with an MPI library that understands their addresses."""

    transport: ClassVar[str] = "mpi"

    def _do_start(self, bucket: int) -> None:
        start, stop = self.buckets[bucket].start, self.buckets[bucket].stop
        self.replica.memory.synchronize()
        array = self.replica.flat_gradients[start:stop]
        self.bytes += array.nbytes
        sum_in_place(self.world, array, f"the {self.name} sum of gradients")

    def _do_finish(self) -> None:
        self._wait()


def sum_in_place(world: World, array: Any, what: str) -> None:
    """Sum an array in a GPU's memory over all ranks, where it lies; done on return.

    Open MPI adds up GPU memory in calls that block, but not in those that do not. So ranks wait for
    each other first, within the world's patience, and block when all are there.

    Args:
        world: the ranks; every rank calls this.
        array: contiguous, of a kind that MPI knows.
        what: this is, for the error.

    Raises:
        TimeoutError: another rank did not come.

    Source: Open MPI's documentation, "Open MPI APIs that do not work with CUDA-aware support".
    """
    assert world.comm is not None
    world.wait(world.comm.Ibarrier(), what)
    for piece in pieces(array):
        world.comm.Allreduce(MPI.IN_PLACE, piece)
