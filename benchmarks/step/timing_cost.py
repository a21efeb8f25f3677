"""What the clock readings of training cost: steps without, with timed stages, and with a trace.

    python -m benchmarks.step.timing_cost
    python -m benchmarks.step.timing_cost --backend cuda --precision tf32 --block 500

One job makes blocks of steps in three modes, in a random order in each round: without times of
stages, with those of `dptrain train`, and with the time stamps of a trace as well. The cost of a
mode is the median over rounds of its block divided by the block without times, minus 1. Work that
follows the steps, such as writing the trace, is not included.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns

import numpy as np

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


def block_ms(job: Job, batches: Iterator[Batch], mode: str, steps: int) -> float:
    """Return the mean time of a step of a block in ms.

    Args:
        job: the job.
        batches: whole minibatches.
        mode: `UNTIMED`, `TIMED` or `TRACED`.
        steps: number of timed steps.
    """
    engine, recorder = job.engine, job.recorder
    every = TIMED_EVERY if job.replica.memory.asynchronous else 1
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


def measure(settings: Settings, rounds: int, block: int) -> dict[str, list[float]]:
    """Return the mean step of each block in ms, by mode."""
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
            block_ms(job, batches, mode, block)
        for _ in range(rounds):
            for mode in order.permutation(list(found)).tolist():
                found[mode].append(block_ms(job, batches, mode, block))
    return found


def costs(found: dict[str, list[float]]) -> dict[str, Estimate]:
    """Return the ratio of each mode to the steps without times, by mode."""
    bare = np.array(found[UNTIMED])
    return {mode: median_of_launches(np.array(found[mode]) / bare) for mode in (TIMED, TRACED)}


def main() -> None:
    """Measure one configuration of the command line, and print a line for each mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="model0")
    parser.add_argument("--backend", default="numba")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60, help="[default: 60]")
    parser.add_argument("--block", type=int, default=30, help="steps; on a GPU 500 or more")
    options = parser.parse_args()
    settings = GivenSettings(
        network=options.network, backend=options.backend, precision=options.precision,
        data="synthetic", crop=0, batch_size=options.batch_size, threads=options.threads,
        steps=options.block,
    ).with_recipe()  # fmt: skip
    found = measure(settings, options.rounds, options.block)
    print(
        f"{options.network}, batch {options.batch_size}, {options.backend}, threads "
        f"{options.threads}: {np.median(found[UNTIMED]):.4f} ms per step {UNTIMED}; "
        f"{options.rounds} rounds of {options.block} steps"
    )
    for mode, ratio in costs(found).items():
        low, high = (f"{100 * (x - 1):+.2f}%" for x in (ratio.low, ratio.high))
        print(f"{mode}: {100 * (ratio.value - 1):+.2f}% ({low} to {high})")


if __name__ == "__main__":
    main()
