"""Sums over MPI: every rank receives the sum of the gradients and applies the same update."""

from __future__ import annotations

from typing import Any, ClassVar

from mpi4py import MPI
from numpy.typing import NDArray

from dptrain.comm.sums.base import GradientSum
from dptrain.comm.world import World, pieces
from dptrain.plan.buckets import Bucket


class MirroredSum(GradientSum):
    """g ← Σ_r g_r on every rank, by one nonblocking all-reduce per bucket, in host memory.

    MPI decides the order of summation.
    """

    name: ClassVar[str] = "mirrored"
    transport: ClassVar[str] = "mpi"

    def __init__(
        self,
        world: World,
        gradients: NDArray[Any],
        num_parameters: int,
        buckets: tuple[Bucket, ...],
    ) -> None:
        super().__init__(world, gradients, num_parameters, buckets)
        assert world.comm is not None
        self.comm = world.comm
        self._active: list[tuple[int, MPI.Request]] = []
        self._num_summed = 0

    def _start(self, bucket: int) -> None:
        start, stop = self.buckets[bucket].start, self.buckets[bucket].stop
        self._start_all_reduce(bucket, self.gradients[start:stop])

    def _start_all_reduce(self, bucket: int, array: NDArray[Any]) -> None:
        for piece in pieces(array):
            self._active.append((bucket, self.comm.Iallreduce(MPI.IN_PLACE, piece)))

    def _poll(self) -> None:
        self._active = [active for active in self._active if not active[1].Test()]
        self._report_summed()

    def _finish(self) -> None:
        while self._active:
            self.world.wait(self._active[0][1], f"the {self.name} sum of gradients")
            del self._active[0]
            self._report_summed()
        self._num_summed = 0

    def _report_summed(self) -> None:
        """Call `on_bucket_summed` for each bucket before the first active one."""
        first_active = self._active[0][0] if self._active else self._num_started
        while self._num_summed < first_active:
            if self.on_bucket_summed is not None:
                self.on_bucket_summed(self._num_summed)
            self._num_summed += 1


class DeviceMirroredSum(MirroredSum):
    """The same in GPU memory, by an MPI library that accepts GPU addresses.

    The gradients of a bucket must be final when `start` is called: the caller synchronizes.
    """

    def _start(self, bucket: int) -> None:
        start, stop = self.buckets[bucket].start, self.buckets[bucket].stop
        sum_in_place(self.world, self.gradients[start:stop], f"the {self.name} sum of gradients")


def sum_in_place(world: World, array: Any, what: str) -> None:
    """Sum an array in GPU memory over all ranks, in place, and wait for the result.

    Open MPI sums GPU memory in blocking calls only. Ranks therefore wait for each other first,
    within the world's timeout, and block when all have arrived.

    Args:
        world: the ranks; every rank calls this.
        array: contiguous, of a type that MPI supports.
        what: names the operation in the error message.

    Raises:
        TimeoutError: another rank did not arrive.

    Source: Open MPI's documentation, "Open MPI APIs that do not work with CUDA-aware support".
    """
    assert world.comm is not None
    world.wait(world.comm.Ibarrier(), what)
    for piece in pieces(array):
        world.comm.Allreduce(MPI.IN_PLACE, piece)
