"""Sums over ranks with different backends, which store parameters in different orders.

Each rank copies its gradients to host memory, in the canonical order of `CanonicalOrder`. MPI sums
them there, and each rank copies the sum back to the order of its backend. Every rank applies the
same update to its own copy of the parameters.

Order of summation: MPI decides. Cost model for n bytes: that of one all-reduce of n bytes, and four
passes over n bytes in host memory, in addition to the transfers of a GPU.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from dptrain.backends.canonical import CanonicalOrder
from dptrain.backends.replica import Replica
from dptrain.comm.sums.mpi import MirroredSum
from dptrain.comm.world import World
from dptrain.plan.buckets import Bucket
from dptrain.plan.flat import ALIGNMENT


class MixedSum(MirroredSum):
    """g ← Σ_r g_r on every rank by MPI, in host memory and in canonical order.

    Args:
        world: the ranks.
        replica: has the gradients; the backends of other ranks may be others.
        buckets: the whole gradient, as a single bucket.
    """

    transport: ClassVar[str] = "host"

    def __init__(self, world: World, replica: Replica, buckets: tuple[Bucket, ...]) -> None:
        assert len(buckets) == 1, "buckets of different backends have different parameters"
        gradients, layout = replica.flat_gradients, replica.plan.trained
        if replica.memory.asynchronous:
            gradients = replica.memory.host_copy(gradients)
        super().__init__(world, gradients, layout.size, buckets)
        self._order = CanonicalOrder(layout)
        self._canonical = np.zeros(self._order.size + ALIGNMENT, gradients.dtype)

    def _start(self, bucket: int) -> None:
        self._order.read(self.gradients, self._canonical)
        self._canonical[self._order.size :] = self.gradients[self.num_parameters :]
        self._start_all_reduce(bucket, self._canonical)

    def _finish(self) -> None:
        super()._finish()
        self._order.write(self.gradients, self._canonical)
        self.gradients[self.num_parameters :] = self._canonical[self._order.size :]
