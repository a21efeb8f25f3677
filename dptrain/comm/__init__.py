"""Ranks, and ways of summing gradients by name; each is imported when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dptrain.errors import UserError, suggest

if TYPE_CHECKING:
    from dptrain.backends.base import Replica
    from dptrain.comm.base import GradientSum
    from dptrain.comm.world import World
    from dptrain.plan.buckets import Bucket

STRATEGIES = ("mirrored", "central")
"""Names users may say, the default first."""


def load_strategy(
    name: str, world: World, replica: Replica, buckets: tuple[Bucket, ...]
) -> GradientSum:
    """Make the way of summing gradients called `name`; one rank sums nothing under any name.

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
    if name == "central":
        from dptrain.comm.central import CentralSum

        return CentralSum(world, replica, buckets)
    from dptrain.comm.mpi import MirroredSum

    return MirroredSum(world, replica, buckets)
