"""Central storage over MPI: rank 0 receives the sum, updates, and broadcasts the parameters.

Source: the parameter-server arrangement of Li et al., "Scaling distributed machine learning with
the parameter server", 2014, with one server and synchronous steps.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mpi4py import MPI
from numpy.typing import NDArray

from dptrain.backends.memory import Memory
from dptrain.comm.sums.base import UpdateSlice
from dptrain.comm.sums.mpi import MirroredSum
from dptrain.comm.world import World, pieces
from dptrain.plan.buckets import Bucket


class CentralSum(MirroredSum):
    """g ← Σ_r g_r on rank 0 only; the optimizer state is current on rank 0 only.

    The loss sums at the end of the last bucket reach every rank, because every rank acts on them.

    Args:
        world, gradients, buckets: see `GradientSum`.
        parameters: the flat parameters, which rank 0 broadcasts after its update.
        memory: of `parameters`.
    """

    name: ClassVar[str] = "central"

    def __init__(
        self,
        world: World,
        gradients: NDArray[Any],
        buckets: tuple[Bucket, ...],
        parameters: NDArray[Any],
        memory: Memory,
    ) -> None:
        super().__init__(world, gradients, parameters.size, buckets)
        self._parameters, self._memory = parameters, memory

    @property
    def updated_slices(self) -> tuple[slice, ...]:
        return super().updated_slices if self.world.is_rank_zero else ()

    def _start(self, bucket: int) -> None:
        start, stop = self.buckets[bucket].start, self.buckets[bucket].stop
        size = self.num_parameters
        for piece in pieces(self.gradients[start : min(stop, size)]):
            if self.world.is_rank_zero:
                self._active.append((bucket, self.comm.Ireduce(MPI.IN_PLACE, piece)))
            else:
                self._active.append((bucket, self.comm.Ireduce(piece, None)))
        if stop > size:
            self._start_all_reduce(bucket, self.gradients[size:])

    def update(self, update_slice: UpdateSlice, learning_rate: float) -> None:
        if self.world.is_rank_zero:
            super().update(update_slice, learning_rate)
        parameters = self._memory.download(self._parameters)
        for piece in pieces(parameters):
            self.world.wait(self.comm.Ibcast(piece), "the parameters of rank 0")
        self._memory.upload(self._parameters, parameters)
