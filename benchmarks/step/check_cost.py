"""What the checks for silent corruption cost, in CPU time of a rank, or in the time of a GPU.

    python -m benchmarks checks --network resnet20 --batch-size 128
    mpirun -n 2 python -m benchmarks checks --network model0
    mpirun -n 2 python -m benchmarks checks --backend cuda --precision bf16 --shards 0

In periods of six steps, one step also guards its update or compares the replicas of all ranks, one
does neither, and one is replayed. The cost of a check is the median over periods of the difference
to the step with neither, of both this step and the one after it, whose caches the check has filled.
It is divided by the median of a step and by the interval between two checks.
"""

from __future__ import annotations

from time import perf_counter, process_time
from typing import Any

import click
import numpy as np

from benchmarks.flags import flags
from benchmarks.step.timing_cost import frozen_objects
from dptrain.comm.world import World
from dptrain.training.baseline import open_loader, whole_minibatches
from dptrain.training.digests import guard
from dptrain.training.digests.comparison import StateChecks
from dptrain.training.job import assemble
from dptrain.training.resources import DIGEST_EVERY, REPLAY_EVERY
from dptrain.training.settings import GivenSettings, Settings
from dptrain.training.trainer import connect_ranks

PERIOD, GUARDED, BARE, REPLAYED = 6, 1, 3, 5
"""Steps of a period, and the numbers of those that are checked and of the one that is not."""


def measure(settings: Settings, world: World, rounds: int) -> np.ndarray[Any, Any]:
    """Return the time of each step in s, (rounds, `PERIOD`)."""
    job = assemble(settings, world, keeps_run=False, quiet=True)
    clock = perf_counter if job.replica.memory.asynchronous else process_time
    checks, engine = StateChecks(()), job.engine
    times = np.zeros((rounds + 1, PERIOD))
    with (
        job.engine,
        open_loader(job, range(1 << 40), batch_size=job.spec.batch_size, **job.passes) as loader,
        frozen_objects(),
    ):
        batches = whole_minibatches(loader, job)
        for step in range(times.size):
            is_guarded = step % PERIOD == GUARDED
            engine.requires_guard = is_guarded
            begin = clock()
            engine.step(batches, 0.0)
            engine.results(wait=True)
            if is_guarded:
                checks.compare(job, step + 1)
            times[divmod(step, PERIOD)] = clock() - begin
    return times[1:]


def costs(times: np.ndarray[Any, Any]) -> tuple[float, dict[str, tuple[float, float, float]]]:
    """Return the median of a step in s, and quartiles of the costs in steps by name."""
    pairs = (times + np.roll(times.reshape(-1), -1).reshape(times.shape))[:-1]
    step = float(np.median(times[:, BARE]))
    found = {}
    for name, number in (("digests", GUARDED), ("replay", REPLAYED)):
        differences = (pairs[:, number] - pairs[:, BARE]) / step
        low, median, high = np.percentile(differences, [25, 50, 75])
        found[name] = float(low), float(median), float(high)
    return step, found


@click.command()
@flags(
    network="model0", backend="numba", precision=None, batch_size=256, threads=1, rounds=40,
    shards=4,
)  # fmt: skip
def main(rounds: int, **options: Any) -> None:
    """Measure what the checks for silent corruption cost, and print a line for each."""
    guard.SHARE = 0.0  # Only those that are required.
    world = connect_ranks()
    settings = GivenSettings(
        data="synthetic", crop=0, steps=PERIOD, digest_every=PERIOD, baseline_steps=0,
        replay_every=PERIOD if options["shards"] else None, **options,
    ).with_recipe()  # fmt: skip
    step, found = costs(measure(settings, world, rounds))
    if not world.is_rank_zero:
        return
    print(
        f"{settings.network}, batch {settings.batch_size}, {world.size} rank(s), "
        f"{settings.shards} micro-shards: {1e3 * step:.3f} ms per step; {rounds} rounds"
    )
    for (name, cost), every in zip(found.items(), (DIGEST_EVERY, REPLAY_EVERY), strict=True):
        low, median, high = (100 * each / every for each in cost)
        print(
            f"{name}: {median:.4f}% ({low:.4f} to {high:.4f}) of the time, every {every} steps; "
            f"{100 * cost[1]:.2f}% of a step"
        )


if __name__ == "__main__":
    main()
