"""What fits: memory at hand against what plans say they need."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dptrain.backends.base import Backend
from dptrain.errors import UserError
from dptrain.machine import free_memory
from dptrain.plan.plan import Plan

KEPT_BACK = 0.05
"""Part of the free memory that is left to kernels, engines' workspaces and everybody else."""

MOST_SAMPLES = 2**31
"""No batch is larger: sample numbers and shares of batches stay whole numbers everywhere."""


CROWDED = "its batches do not fit into the host's memory"

BATCHES_ON_HOST = 3
"""Beside a device: the batch itself, and two messages to the device, one under way."""


@dataclass(frozen=True)
class Room:
    """Memory that a replica may take.

    Attributes:
        nbytes: of it.
        host_bytes: of the host, for batches, where the replica lies on a device; None where
            `nbytes` are the host's, and hold the batch as well.
    """

    nbytes: int
    host_bytes: int | None = None

    def need(self, plan: Plan) -> int:
        """Bytes of this room that a replica of `plan` takes, with a batch to compute."""
        own = sum(plan.memory.values())
        return own + batch_bytes(plan) if self.host_bytes is None else own

    def crowds_host(self, plan: Plan) -> bool:
        """Whether the host, beside the device, lacks room for the batches."""
        return self.host_bytes is not None and (
            BATCHES_ON_HOST * batch_bytes(plan) > self.host_bytes
        )

    def holds(self, plan: Plan) -> bool:
        """Whether `plan` fits."""
        return self.need(plan) <= self.nbytes and not self.crowds_host(plan)


def room_of(backend: Backend, limit: int | None = None) -> Room:
    """What `backend` may use now, at most `limit` bytes."""
    on_device, on_host = backend.free_bytes(), int(free_memory() * (1 - KEPT_BACK))
    nbytes = on_host if on_device is None else int(on_device * (1 - KEPT_BACK))
    nbytes = nbytes if limit is None else min(limit, nbytes)
    return Room(nbytes, None if on_device is None else on_host)


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
        next_bytes: of the next larger batch, which does not fit; 0 where there is a `why`.
        why: what is against the next batch where that is not the memory of `Room.nbytes`.
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

    def plan_of(batch_size: int) -> Plan | None:
        """The plan, if it fits; `refusals` then says what no number of bytes would."""
        try:
            plan = make(batch_size)
        except UserError as error:
            if batch_size == 1:
                raise
            refusals[batch_size] = str(error)
            return None
        if room.holds(plan):
            return plan
        if room.crowds_host(plan):
            refusals[batch_size] = CROWDED
        return None

    if plan_of(1) is None:
        alone = room.need(make(1))
        return Largest(0, alone, alone, refusals.get(1, ""))
    fits, fails = 1, 2
    while fails < MOST_SAMPLES and plan_of(fails) is not None:
        fits, fails = fails, 2 * fails
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if plan_of(middle) is None:
            fails = middle
        else:
            fits = middle
    why = refusals.get(fails, "")
    return Largest(fits, room.need(make(fits)), 0 if why else room.need(make(fails)), why)
