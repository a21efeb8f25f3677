"""Ranks, and ways of summing gradients by name; each is imported when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dptrain.errors import UserError, suggest

if TYPE_CHECKING:
    from dptrain.backends.replica import Replica
    from dptrain.comm.base import GradientSum
    from dptrain.comm.world import World
    from dptrain.plan.buckets import Bucket

STRATEGIES = ("mirrored", "central")
"""Names users may say, the default first."""

TRANSPORTS = ("auto", "peer", "nccl", "mpi", "host")
"""Ways between GPUs. With ``peer`` those of one node write into each other's memory; ``mpi`` hands
MPI addresses of GPU memory, which it must understand."""


def make_gradient_sum(
    name: str,
    world: World,
    replica: Replica,
    buckets: tuple[Bucket, ...],
    transport: str | None = None,
) -> GradientSum:
    """Make the way of summing gradients called `name`; one rank sums nothing under any name.

    Args:
        name: one of `STRATEGIES`.
        world: the ranks.
        replica, buckets: what is summed.
        transport: how gradients of GPUs travel, as `choose_transport` says; asked where left out.

    Raises:
        UserError: no such name.
    """
    if name not in STRATEGIES:
        raise UserError(
            f"no strategy '{name}'; there are {', '.join(STRATEGIES)}{suggest(name, STRATEGIES)}"
        )
    if world.size == 1:
        from dptrain.comm.none import NoSum

        return NoSum(world, replica, buckets)
    from dptrain.comm.transport import choose_transport

    transport = transport or choose_transport(world, replica)
    if transport in ("peer", "nccl"):
        from dptrain.comm.enqueued import EnqueuedCentralSum, EnqueuedSum
        from dptrain.comm.nccl import Nccl
        from dptrain.comm.peer import Peers

        strategy = EnqueuedCentralSum if name == "central" else EnqueuedSum
        return strategy(world, replica, buckets, Peers if transport == "peer" else Nccl)
    if name == "central":
        from dptrain.comm.central import CentralSum

        return CentralSum(world, replica, buckets)
    from dptrain.comm.mpi import DeviceMirroredSum, MirroredSum

    return (DeviceMirroredSum if transport == "mpi" else MirroredSum)(world, replica, buckets)
