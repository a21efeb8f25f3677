"""What the clock readings of training cost: steps without, with timed stages, and with a trace.

    python -m benchmarks.step.timing_cost
    python -m benchmarks.step.timing_cost --backend cuda --precision tf32 --block 500

One job makes blocks of steps in three modes, in a random order in each round: without times of
stages, with those of `dptrain train`, and with the time stamps of a trace as well. The cost of a
mode is the median over rounds of its block divided by the block without times, minus 1. Work that
follows the steps, such as writing the trace, is not included.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import click
import numpy as np

from benchmarks.flags import flags
from dptrain.batch import Batch
from dptrain.comm.world import World
from dptrain.measure.statistics import Estimate, median_of_launches
from dptrain.training.baseline import open_loader, whole_minibatches
from dptrain.training.engines import FIRST_TIMED, Engine
from dptrain.training.engines.device import TIMED_EVERY
from dptrain.training.job import Job, assemble
from dptrain.training.settings import GivenSettings, Settings

UNTIMED, TIMED, TRACED = "without times", "timed as in training", "with a trace"
WARM_UP = 3
"""Untimed steps at the start of each block."""


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Keep the garbage collector from looking at existing objects, as training does."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def make_steps(engine: Engine, batches: Iterator[Batch], count: int) -> None:
    """Make steps with a learning rate of 0, and wait for them."""
    for number in range(count):
        engine.step(batches, 0.0)
        for result in engine.results(wait=number + 1 == count):
            assert math.isfinite(result.loss)


def block_ms(
    job: Job, batches: Iterator[Batch], mode: str, steps: int, every: int | None = None
) -> float:
    """Return the mean time of a step of a block in ms.

    Args:
        job: the job.
        batches: whole minibatches.
        mode: `UNTIMED`, `TIMED` or `TRACED`.
        steps: number of timed steps.
        every: steps from one with times of its stages to the next; None as in training.
    """
    engine, recorder = job.engine, job.recorder
    every = every or (TIMED_EVERY if job.replica.memory.asynchronous else 1)
    engine.time_stages(None)
    make_steps(engine, batches, WARM_UP)
    if mode != UNTIMED:
        engine.time_stages(recorder.steps + every // 2, every)
    recorder.stamped = [] if mode == TRACED else None
    begin = perf_counter_ns()
    make_steps(engine, batches, steps)
    mean_ms = (perf_counter_ns() - begin) / steps / 1e6
    recorder.stamped = None
    return mean_ms


def measure(
    settings: Settings, rounds: int, block: int, every: int | None = None
) -> dict[str, list[float]]:
    """Return the mean step of each block in ms, by mode; `every` as in `block_ms`."""
    job = assemble(settings, World.single(), keeps_run=False, recorded_steps=block)
    found: dict[str, list[float]] = {UNTIMED: [], TIMED: [], TRACED: []}
    order = np.random.default_rng(0)
    last = 1 << 40
    with (
        job.engine,
        open_loader(job, range(last), batch_size=job.spec.batch_size) as loader,
        frozen_objects(),
    ):
        batches = whole_minibatches(loader, job)
        if job.replica.memory.asynchronous:
            make_steps(job.engine, batches, FIRST_TIMED + TIMED_EVERY + 1)
        for mode in found:
            block_ms(job, batches, mode, block, every)
        for _ in range(rounds):
            for mode in order.permutation(list(found)).tolist():
                found[mode].append(block_ms(job, batches, mode, block, every))
    return found


def costs(found: dict[str, list[float]]) -> dict[str, Estimate]:
    """Return the ratio of each mode to the steps without times, by mode."""
    bare = np.array(found[UNTIMED])
    return {mode: median_of_launches(np.array(found[mode]) / bare) for mode in (TIMED, TRACED)}


@click.command()
@flags(
    network="model0", backend="numba", precision=None, batch_size=32, threads=1, rounds=60,
    block=(30, "Steps; on a GPU 500 or more."),
)  # fmt: skip
def main(rounds: int, block: int, **options: Any) -> None:
    """Measure what the clock readings of training cost, and print a line for each mode."""
    settings = GivenSettings(data="synthetic", crop=0, steps=block, **options).with_recipe()
    found = measure(settings, rounds, block)
    print(
        f"{settings.network}, batch {settings.batch_size}, {settings.backend}, threads "
        f"{settings.threads}: {np.median(found[UNTIMED]):.4f} ms per step {UNTIMED}; {rounds} "
        f"rounds of {block} steps"
    )
    for mode, ratio in costs(found).items():
        low, high = (f"{100 * (x - 1):+.2f}%" for x in (ratio.low, ratio.high))
        print(f"{mode}: {100 * (ratio.value - 1):+.2f}% ({low} to {high})")


if __name__ == "__main__":
    main()
