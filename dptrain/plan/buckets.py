"""What becomes of gradients while backward goes on: slices of the flat arrays, and from when on.

Buckets are summed over the ranks; what is settled may be updated.
"""

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


@dataclass(frozen=True)
class Settled:
    """Elements [0, stop) of the flat arrays, which no stage behind `after` reads or writes."""

    stop: int
    after: int


def settled(plan: Plan) -> tuple[Settled, ...]:
    """What is settled when, layer by layer: more and more, as backward goes on.

    Slots lie in backward order, so all of them up to a layer's last are settled with that layer.
    """
    last_use = {name: stage.index for stage in plan.stages for name in stage.parameters}
    found: list[Settled] = []
    slots = plan.layout.slots
    for i, slot in enumerate(slots):
        stop = slots[i + 1].start if i + 1 < len(slots) else plan.layout.size
        after = max([last_use[slot.name], *(before.after for before in found[-1:])])
        if found and found[-1].after == after:
            found.pop()
        found.append(Settled(stop, after))
    return tuple(found)


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
