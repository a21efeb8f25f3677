"""Central storage over MPI: rank 0 receives the sum, updates, and hands the parameters out.

Source: the parameter-server arrangement of Li et al., "Scaling distributed machine learning with
the parameter server", 2014, with one server and synchronous steps.
"""

from __future__ import annotations

from typing import ClassVar

from mpi4py import MPI

from dptrain.comm.mpi import MirroredSum
from dptrain.comm.world import pieces


class CentralSum(MirroredSum):
    """g ← Σ_r g_r on rank 0 alone; the optimizer's state is kept up there alone.

    The few shared sums behind the slots go to every rank, since every rank decides by them.
    """

    name: ClassVar[str] = "central"

    def _do_start(self, bucket: int) -> None:
        start, stop = self.buckets[bucket].start, self.buckets[bucket].stop
        size, gradients = self.replica.plan.layout.size, self.replica.host_gradients
        self.replica.fetch_gradients(start, stop)
        for piece in pieces(gradients[start : min(stop, size)]):
            self.bytes += piece.nbytes
            if self.world.is_rank_zero:
                self._active.append((bucket, self.comm.Ireduce(MPI.IN_PLACE, piece)))
            else:
                self._active.append((bucket, self.comm.Ireduce(piece, None)))
        if stop > size:
            self._sum_everywhere(bucket, gradients[size:])

    def update(self, learning_rate: float) -> None:
        replica = self.replica
        if self.world.is_rank_zero:
            self._update_here(learning_rate)
            self.bytes += replica.flat_parameters.nbytes
        else:
            replica.updates += 1
        with self._exposed():
            parameters = replica.memory.download(replica.flat_parameters)
            for piece in pieces(parameters):
                self.world.wait(self.comm.Ibcast(piece), "the parameters of rank 0")
            replica.memory.upload(replica.flat_parameters, parameters)
