"""Buckets: slices of the flat gradient whose sum over the ranks starts while backward goes on."""

from __future__ import annotations

from dataclasses import dataclass

from dptrain.plan.lowering import Phase
from dptrain.plan.plan import Plan


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of the flat gradient, final once stage `after` has run."""

    start: int
    stop: int
    after: int


def make_buckets(plan: Plan, bucket_bytes: int | None) -> tuple[Bucket, ...]:
    """Cut the flat gradient into runs of at least `bucket_bytes`, the last one perhaps smaller.

    None makes one bucket of everything. The shared sums behind the slots belong to the last
    bucket. Together the buckets cover the flat gradient exactly once, in order.
    """
    finished = {
        name: stage.index
        for stage in plan.stages
        if stage.phase is Phase.BACKWARD_WEIGHT
        for name in stage.parameters
    }
    buckets: list[Bucket] = []
    start, after = 0, 0
    slots = plan.layout.slots
    for i, slot in enumerate(slots):
        after = max(after, finished[slot.name])
        stop = slots[i + 1].start if i + 1 < len(slots) else plan.layout.size
        # Weight and bias of a layer are finished by the same stage: never cut between them.
        same = i + 1 < len(slots) and finished[slots[i + 1].name] == after
        full = bucket_bytes is not None and (stop - start) * plan.itemsize >= bucket_bytes
        if full and not same:
            buckets.append(Bucket(start, stop, after))
            start = stop
    end = plan.layout.gradient_size
    last_stage = max((s.index for s in plan.stages if s.phase is not Phase.UPDATE), default=0)
    if start < plan.layout.size or not buckets:
        buckets.append(Bucket(start, end, after if slots else last_stage))
    else:
        buckets[-1] = Bucket(buckets[-1].start, end, buckets[-1].after)
    return tuple(buckets)
