"""Gradient buckets: slices of the flat gradient, and the stage after which each may be reduced.

The same for parameters: the stage after which a slice may be updated.
"""

from __future__ import annotations

from dataclasses import dataclass

from dptrain.plan.lowering import GRADIENT_PHASES, Phase
from dptrain.plan.plan import Plan


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of the flat gradient, complete once stage `after` has run."""

    start: int
    stop: int
    after: int


@dataclass(frozen=True)
class UpdatablePrefix:
    """Elements [0, stop) of the flat arrays, which no stage after `after` reads or writes."""

    stop: int
    after: int


def updatable_prefixes(plan: Plan) -> tuple[UpdatablePrefix, ...]:
    """Return which parameters may be updated after which stage, in the order of the stages.

    Slots are in the order in which backward finishes, so a prefix of the flat arrays grows with
    every layer whose backward pass has ended.
    """
    last_use = {name: stage.index for stage in plan.stages for name in stage.parameters}
    found: list[UpdatablePrefix] = []
    slots = plan.trained.slots
    for i, slot in enumerate(slots):
        stop = slots[i + 1].start if i + 1 < len(slots) else plan.trained.size
        after = max([last_use[slot.name], *(before.after for before in found[-1:])])
        if found and found[-1].after == after:
            found.pop()
        found.append(UpdatablePrefix(stop, after))
    return tuple(found)


def make_buckets(plan: Plan, bucket_bytes: int = 0) -> tuple[Bucket, ...]:
    """Divide the flat gradient into buckets of at least `bucket_bytes`; the last may be smaller.

    The buckets cover the flat gradient exactly once, in order. `SUMS`, which follow the gradients,
    belong to the last bucket.

    Args:
        plan: the plan, with training.
        bucket_bytes: least size of a bucket in bytes; 0 makes one bucket.
    """
    finished = {
        name: stage.index
        for stage in plan.stages
        if stage.phase in GRADIENT_PHASES
        for name in stage.parameters
    }
    buckets: list[Bucket] = []
    start, after = 0, 0
    slots = plan.trained.slots
    for i, slot in enumerate(slots):
        after = max(after, finished[slot.name])
        stop = slots[i + 1].start if i + 1 < len(slots) else plan.trained.size
        # One stage finishes the weight and the bias of a layer, so they share a bucket.
        same = i + 1 < len(slots) and finished[slots[i + 1].name] == after
        full = 0 < bucket_bytes <= (stop - start) * plan.itemsize
        if full and not same:
            buckets.append(Bucket(start, stop, after))
            start = stop
    end = plan.layout.gradient_size
    last_stage = max((s.index for s in plan.stages if s.phase is not Phase.UPDATE), default=0)
    if start < plan.trained.size or not buckets:
        buckets.append(Bucket(start, end, after if slots else last_stage))
    else:
        buckets[-1] = Bucket(buckets[-1].start, end, buckets[-1].after)
    return tuple(buckets)
