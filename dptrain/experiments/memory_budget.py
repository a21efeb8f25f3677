"""Memory budgets: which plans fit into the free memory, and the largest batch that fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dptrain.backends.base import Backend
from dptrain.errors import UserError
from dptrain.machine import free_memory
from dptrain.plan.plan import Plan

RESERVED_SHARE = 0.05
"""Share of the free memory that is reserved for workspaces of kernels and for other programs."""

MAX_SAMPLES = 2**31
"""Largest batch size that is tried; indices of samples are 32-bit integers."""


HOST_TOO_SMALL = "its minibatches do not fit into host memory"

BATCHES_ON_HOST = 3
"""Copies of a minibatch in host memory if a GPU computes: the minibatch and two staging slots."""


@dataclass(frozen=True)
class MemoryBudget:
    """Memory that a replica may use.

    Attributes:
        nbytes: bytes for the replica, in device memory if a GPU computes.
        host_bytes: bytes of host memory for minibatches if a GPU computes; None on a CPU, where
            `nbytes` are for the replica and the minibatch.
    """

    nbytes: int
    host_bytes: int | None = None

    def needed_bytes(self, plan: Plan) -> int:
        """Return the bytes of `nbytes` that a replica of `plan` and, on a CPU, a minibatch need."""
        own = sum(plan.memory.values())
        return own + batch_bytes(plan) if self.host_bytes is None else own

    def exceeds_host(self, plan: Plan) -> bool:
        """Return True if a GPU computes and the minibatches do not fit into host memory."""
        return self.host_bytes is not None and (
            BATCHES_ON_HOST * batch_bytes(plan) > self.host_bytes
        )

    def fits(self, plan: Plan) -> bool:
        """Return True if a replica of `plan` fits."""
        return self.needed_bytes(plan) <= self.nbytes and not self.exceeds_host(plan)


def memory_budget(backend: Backend, limit: int | None = None) -> MemoryBudget:
    """Return the memory that `backend` can use now, at most `limit` bytes."""
    on_device, on_host = backend.free_bytes(), int(free_memory() * (1 - RESERVED_SHARE))
    nbytes = on_host if on_device is None else int(on_device * (1 - RESERVED_SHARE))
    nbytes = nbytes if limit is None else min(limit, nbytes)
    return MemoryBudget(nbytes, None if on_device is None else on_host)


def batch_bytes(plan: Plan) -> int:
    """Return the size of a minibatch: inputs in float32, targets and indices of samples."""
    network = plan.network
    targets = 1 if network.loss.targets == "classes" else network.num_outputs
    return plan.batch_size * (4 * math.prod(network.input_shape) + 4 * targets + 8)


@dataclass(frozen=True)
class Largest:
    """The largest batch that fits according to its plan.

    Attributes:
        batch_size: its size; 0 if not even one sample fits.
        needed_bytes: memory that it needs; if none fits, that of one sample.
        next_bytes: memory of the next larger batch, which does not fit; 0 if `why` is set.
        why: the reason why the next batch does not fit, if it is not `MemoryBudget.nbytes`.
    """

    batch_size: int
    needed_bytes: int
    next_bytes: int
    why: str = ""


def largest_batch(make: Callable[[int], Plan], budget: MemoryBudget) -> Largest:
    """Find the largest batch by doubling and bisection over plans; nothing is allocated.

    Args:
        make: returns the plan for a batch size, or raises `UserError` if it is too large.
        budget: the available memory.
    """
    refusals: dict[int, str] = {}

    def plan_of(batch_size: int) -> Plan | None:
        """Return the plan if it fits; `refusals` records reasons other than `nbytes`."""
        try:
            plan = make(batch_size)
        except UserError as error:
            if batch_size == 1:
                raise
            refusals[batch_size] = str(error)
            return None
        if budget.fits(plan):
            return plan
        if budget.exceeds_host(plan):
            refusals[batch_size] = HOST_TOO_SMALL
        return None

    if plan_of(1) is None:
        alone = budget.needed_bytes(make(1))
        return Largest(0, alone, alone, refusals.get(1, ""))
    fits, fails = 1, 2
    while fails < MAX_SAMPLES and plan_of(fails) is not None:
        fits, fails = fails, 2 * fails
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if plan_of(middle) is None:
            fails = middle
        else:
            fits = middle
    why = refusals.get(fails, "")
    return Largest(
        fits, budget.needed_bytes(make(fits)), 0 if why else budget.needed_bytes(make(fails)), why
    )
