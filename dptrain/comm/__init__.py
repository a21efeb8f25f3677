"""Ranks, gradient sums and sums of batch statistics.

Each method of summing is imported when it is selected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dptrain.errors import UserError, suggest

if TYPE_CHECKING:
    from dptrain.backends.replica import Replica
    from dptrain.comm.statistics.statistics import StatisticsSum
    from dptrain.comm.sums.base import GradientSum
    from dptrain.comm.world import World
    from dptrain.plan.buckets import Bucket

STRATEGIES = ("mirrored", "central")
"""Names that users may pass, the default first."""

TRANSPORTS = ("auto", "shared", "peer", "nccl", "mpi", "host")
"""How gradients, and with one exception batch statistics, are transferred between ranks.

Ranks that compute on CPUs use ``shared``, memory that the ranks of a node share, or ``mpi``, an
all-reduce. Ranks that compute on GPUs use ``peer`` (peer-to-peer memory within a node), ``nccl``,
``mpi`` (GPU addresses are passed to MPI), or ``host`` (gradients are staged through host memory).
``host`` means ``mpi`` on CPUs. ``auto`` takes the first of these that is available. With ``nccl``,
batch statistics use peer-to-peer memory if it is available."""

BATCH_NORM_MODES = ("global", "rank")
"""Whose statistics a batch normalisation uses in training: those of the global minibatch, or of the
part of each rank. The default comes first."""


def make_gradient_sum(
    strategy: str,
    world: World,
    replica: Replica,
    buckets: tuple[Bucket, ...],
    transport: str | None = None,
    *,
    mixed: bool = False,
) -> GradientSum:
    """Return the gradient sum of a strategy; one rank sums nothing with any strategy.

    Args:
        strategy: one of `STRATEGIES`.
        world: the ranks; every rank calls this.
        replica: has the gradients.
        buckets: of the flat gradient.
        transport: the result of `choose_transport`; None calls it.
        mixed: True if ranks have different backends.

    Raises:
        UserError: the strategy is unknown, or does not support the transport.
    """
    if strategy not in STRATEGIES:
        raise UserError(
            f"there is no strategy '{strategy}'; expected one of {', '.join(STRATEGIES)}"
            f"{suggest(strategy, STRATEGIES)}"
        )
    if world.size == 1:
        from dptrain.comm.sums.none import NoSum

        return NoSum(world, replica.flat_gradients, replica.plan.trained.size, buckets)
    if mixed:
        from dptrain.comm.sums.mixed import MixedSum

        return MixedSum(world, replica, buckets)
    from dptrain.comm.transport import check_strategy, choose_transport, transports_in_order

    transport = transport or choose_transport(world, replica, strategy=strategy)
    check_strategy(transport, strategy, on_gpu=replica.memory.on_gpu)
    # Ranks may have other numbers of micro-shards than at the start of the job.
    if transport in ("peer", "nccl") and transport in transports_in_order(world, replica):
        from dptrain.comm.sums.enqueued import EnqueuedCentralSum, EnqueuedSum
        from dptrain.comm.sums.nccl import Nccl
        from dptrain.comm.sums.peer import Peers

        enqueued = EnqueuedCentralSum if strategy == "central" else EnqueuedSum
        return enqueued(world, replica, buckets, Peers if transport == "peer" else Nccl)
    if transport == "shared":
        from dptrain.comm.sums.shared import SharedSum
        from dptrain.comm.sums.shared_nodes import SharedNodesSum

        several = world.local_size < world.size
        return (SharedNodesSum if several else SharedSum)(world, replica, buckets)
    return _sum_by_mpi(strategy, world, replica, buckets, passes_gpu_memory=transport == "mpi")


def make_statistics_sum(world: World, replica: Replica, transport: str) -> StatisticsSum | None:
    """Return the sum of batch statistics over the ranks.

    The sums of a step are many and small, so GPUs of one node add them in peer-to-peer memory, also
    if gradients use NCCL. The 106 sums of a step of ResNet-50 take 1.45 ms by NCCL (two H100s).

    Args:
        world: the ranks; every rank calls this.
        replica: has the statistics.
        transport: how its gradients are transferred: `GradientSum.transport`.

    Returns:
        None if there is nothing to sum: one rank, or no stage that computes such statistics.

    Raises:
        AgreedError: memory cannot be shared; on every rank.
    """
    from dptrain.plan.lowering import STATISTICS_PHASES

    phases = {stage.phase for stage in replica.plan.stages}
    if world.size == 1 or phases.isdisjoint(STATISTICS_PHASES):
        return None
    if transport in ("peer", "nccl"):
        from dptrain.backends.device_replica import DeviceReplica
        from dptrain.comm.statistics.statistics_devices import EnqueuedStatisticsSum
        from dptrain.comm.sums.nccl import Nccl
        from dptrain.comm.sums.peer import Peers, peer_error

        assert isinstance(replica, DeviceReplica)
        has_peers = transport == "peer" or peer_error(world, replica) is None
        return EnqueuedStatisticsSum(world, replica, Peers if has_peers else Nccl)
    if transport == "shared":
        from dptrain.comm.statistics.statistics_shared import (
            SharedNodesStatisticsSum,
            SharedStatisticsSum,
        )

        several = world.local_size < world.size
        shared = SharedNodesStatisticsSum if several else SharedStatisticsSum
        return shared(world, replica.plan)
    from dptrain.comm.statistics.statistics_mpi import MpiStatisticsSum

    return MpiStatisticsSum(world, replica.plan, replica.memory)


def _sum_by_mpi(
    strategy: str,
    world: World,
    replica: Replica,
    buckets: tuple[Bucket, ...],
    *,
    passes_gpu_memory: bool,
) -> GradientSum:
    """Return the gradient sum that calls MPI from the host.

    Args:
        strategy, world, replica, buckets: see `make_gradient_sum`.
        passes_gpu_memory: True passes addresses in GPU memory to MPI.
    """
    if replica.plan.micro_shards is not None:
        from dptrain.comm.sums.tree import CentralTreeSum, TreeSum

        tree = CentralTreeSum if strategy == "central" else TreeSum
        return tree(world, replica, buckets)
    from dptrain.comm.sums.mpi import DeviceMirroredSum, MirroredSum

    size, gradients = replica.plan.trained.size, replica.flat_gradients
    if passes_gpu_memory and replica.memory.on_gpu:
        return DeviceMirroredSum(world, gradients, size, buckets)
    if replica.memory.asynchronous:
        gradients = replica.memory.host_copy(gradients)
    if strategy == "central":
        from dptrain.comm.sums.central import CentralSum

        parameters = replica.flat_parameters[:size]
        return CentralSum(world, gradients, buckets, parameters, replica.memory)
    return MirroredSum(world, gradients, size, buckets)
