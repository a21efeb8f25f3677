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
        size = self.replica.plan.layout.size
        for piece in pieces(self.replica.flat_gradients[start : min(stop, size)]):
            self.bytes += piece.nbytes
            if self.world.is_main:
                self._active.append(self.comm.Ireduce(MPI.IN_PLACE, piece))
            else:
                self._active.append(self.comm.Ireduce(piece, None))
        if stop > size:
            self._sum_everywhere(self.replica.flat_gradients[size:])

    def update(self, learning_rate: float) -> None:
        if self.world.is_main:
            self._update_here(learning_rate)
            self.bytes += self.replica.flat_parameters.nbytes
        else:
            self.replica.updates += 1
        with self._exposed():
            for piece in pieces(self.replica.flat_parameters):
                self.world.wait(self.comm.Ibcast(piece), "the parameters of rank 0")
