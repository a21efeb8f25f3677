"""What fits: memory at hand against what plans say they need."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dptrain.backends.base import Backend
from dptrain.errors import UserError
from dptrain.measure.environment import free_memory
from dptrain.plan.plan import Plan

KEPT_BACK = 0.05
"""Part of the free memory that is left to kernels, engines' workspaces and everybody else."""

MOST_SAMPLES = 2**31
"""No batch is larger: sample numbers and shares of batches stay whole numbers everywhere."""


@dataclass(frozen=True)
class Room:
    """Memory that a replica may take.

    Attributes:
        nbytes: of it.
        on_host: it is the host's, where the batch lies as well.
    """

    nbytes: int
    on_host: bool

    def need(self, plan: Plan) -> int:
        """Bytes of this room that a replica of `plan` takes, with a batch to compute."""
        own = sum(plan.memory.values())
        return own + batch_bytes(plan) if self.on_host else own

    def holds(self, plan: Plan) -> bool:
        """Whether `plan` fits."""
        return self.need(plan) <= self.nbytes


def room_of(backend: Backend, limit: int | None = None) -> Room:
    """What `backend` may use now, at most `limit` bytes."""
    free = backend.free_bytes()
    nbytes = int((free_memory() if free is None else free) * (1 - KEPT_BACK))
    return Room(nbytes if limit is None else min(limit, nbytes), on_host=free is None)


def batch_bytes(plan: Plan) -> int:
    """Inputs in float32, targets, and the samples' numbers."""
    network = plan.network
    targets = 1 if network.loss.targets == "classes" else network.num_outputs
    return plan.batch_size * (4 * math.prod(network.input_shape) + 4 * targets + 8)


@dataclass(frozen=True)
class Largest:
    """The largest batch that fits, by plan.

    Attributes:
        batch_size: 0 where not even one sample fits.
        need_bytes: of it; of a single sample where none fits.
        next_bytes: of the next larger batch, which does not fit.
        why: what the plan says against the next batch where that is not its memory.
    """

    batch_size: int
    need_bytes: int
    next_bytes: int
    why: str = ""


def largest_batch(make: Callable[[int], Plan], room: Room) -> Largest:
    """Find the largest batch by doubling and bisection over plans; nothing is allocated.

    Args:
        make: plan for a batch size; may refuse one that is too large (`UserError`).
        room: what it must fit into.
    """
    refusals: dict[int, str] = {}

    def need(batch_size: int) -> int:
        try:
            return room.need(make(batch_size))
        except UserError as error:
            if batch_size == 1:
                raise
            refusals[batch_size] = str(error)
            return room.nbytes + 1

    if need(1) > room.nbytes:
        return Largest(0, need(1), need(1))
    fits, fails = 1, 2
    while fails < MOST_SAMPLES and need(fails) <= room.nbytes:
        fits, fails = fails, 2 * fails
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if need(middle) <= room.nbytes:
            fits = middle
        else:
            fails = middle
    beyond = need(fails)
    why = refusals.get(fails, "")
    return Largest(fits, need(fits), 0 if why else beyond, why)
