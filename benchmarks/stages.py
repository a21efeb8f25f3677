"""Every stage of a training step against the limit that applies to it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

import dptrain
from benchmarks.batch import random_batch
from benchmarks.kinds import kind_of
from benchmarks.limits import MEMORY_BYTES, Roofs, copy_rate, l2_bytes, sgemm_peak
from benchmarks.programs.own_programs import LEARNING_RATE
from benchmarks.timing import one_core
from dptrain.batch import Batch
from dptrain.network import Network
from dptrain.plan.lowering import Phase
from dptrain.plan.plan import Stage

WARM_UP = 3
ROUNDS = 5
"""Series of steps. Limits are measured after each: the speed of a shared machine varies."""


@dataclass(frozen=True)
class StageResult:
    """The time of a stage, and the limit that applies to it.

    Attributes:
        network, batch_size: the case.
        name: of the stage.
        kind: "convolution", "first convolution" (few input channels), "dense" or "memory".
        flops, bytes_moved: as in the plan; loading also counts the bytes of the user's arrays.
        time_us: median.
        quartiles_us: first and third.
        share_of_step: of the sum of all stages' medians.
        rate: FLOP/s, or bytes/s of a memory-bound stage.
        limit: sgemm peak in FLOP/s, or bytes/s of copying with the same working set.
        share_of_limit: median of rate over limit, both measured in each of the `ROUNDS` series.
    """

    network: str
    batch_size: int
    name: str
    kind: str
    flops: int
    bytes_moved: int
    time_us: float
    quartiles_us: tuple[float, float]
    share_of_step: float
    rate: float
    limit: float
    share_of_limit: float


def bytes_of(stage: Stage) -> int:
    """Return the bytes moved; loading also reads the user's arrays, which are not in the plan."""
    return stage.bytes_moved * (2 if stage.phase is Phase.LOAD else 1)


def measure_stages(
    network: Network, batch_size: int, *, steps: int
) -> tuple[Roofs, list[StageResult]]:
    """Time every stage within whole training steps, and measure the limits between them."""
    x, y = random_batch(network, batch_size)
    replica = dptrain.make_replica(network, batch_size=batch_size)
    plan, cache = replica.plan, l2_bytes()
    kinds = [kind_of(plan, stage) for stage in plan.stages]
    memory = [kind == "memory" for kind in kinds]
    work = np.where(memory, [bytes_of(s) for s in plan.stages], [s.flops for s in plan.stages])
    laps, limits, roofs = [], [], []
    with one_core():
        for _ in range(WARM_UP):
            _laps(replica, x, y)
        for _ in range(ROUNDS):
            laps.append([_laps(replica, x, y) for _ in range(-(-steps // ROUNDS))])
            peak = sgemm_peak()
            roofs.append((peak, copy_rate(cache // 2), copy_rate(MEMORY_BYTES)))
            limits.append(
                [copy_rate(int(w)) if m else peak for w, m in zip(work, memory, strict=True)]
            )
    shares = np.median(work / (np.median(laps, axis=1) / 1e9) / limits, axis=0)
    times = np.concatenate(laps)
    low, medians, high = np.percentile(times, [25, 50, 75], axis=0)
    typical = np.median(limits, axis=0)
    peak, in_cache, in_memory = np.median(roofs, axis=0)
    results = [
        StageResult(
            network.name, batch_size, stage.name, kinds[i], stage.flops, bytes_of(stage),
            medians[i] / 1e3, (low[i] / 1e3, high[i] / 1e3), medians[i] / medians.sum(),
            1e9 * work[i] / medians[i], typical[i], shares[i],
        )
        for i, stage in enumerate(plan.stages)
    ]  # fmt: skip
    return Roofs(network.name, batch_size, peak, cache, in_cache, in_memory), results


def _laps(replica: dptrain.Replica, x: Any, y: Any) -> list[int]:
    """Return the nanoseconds of every stage of one step, by index."""
    clock = time.process_time_ns
    stamps = np.zeros(len(replica.plan.stages) + 1, np.int64)
    stamps[0] = clock()
    replica.load(Batch.of(x, y))
    stamps[1] = clock()

    def note(index: int) -> None:
        stamps[index + 1] = clock()

    replica.run(note)
    replica.update(LEARNING_RATE)
    stamps[-1] = clock()
    return [int(lap) for lap in np.diff(stamps)]
