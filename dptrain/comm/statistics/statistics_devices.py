"""Sums of batch statistics in the memory of GPUs, enqueued on the stream of the computation.

They are parts of a captured step. They use a carrier of their own, so that they do not wait for the
sums of gradients, which are in progress on another stream.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.device_replica import DeviceReplica, SummedStatistics
from dptrain.comm.statistics.statistics import StatisticsSum
from dptrain.comm.sums.enqueued import Carrier, Connect, Shared
from dptrain.comm.world import World


class EnqueuedStatisticsSum(StatisticsSum):
    """Adds sums of all ranks in device memory.

    Args:
        world: the ranks; every rank makes the object.
        replica: has the sums, in the memory of a device.
        connect: makes the carrier.
    """

    def __init__(self, world: World, replica: DeviceReplica, connect: Connect) -> None:
        super().__init__(world)
        self._memory = replica.memory
        shared = Shared(statistics=list(replica.summed_statistics.values()))
        self.carrier: Carrier = connect(world, replica, shared)
        self.memory_bytes = self.carrier.memory_bytes
        self.kernel_ranks = world.size if self.carrier.kernels_add_statistics else 0

    def enqueue(self, statistics: SummedStatistics) -> None:
        self.carrier.sum_statistics(statistics)

    def close(self) -> None:
        self._memory.synchronize()
        self.carrier.close()

    def _sum(self, parts: NDArray[np.float64], totals: NDArray[np.float64]) -> None:
        raise NotImplementedError("a device's sums are enqueued")
