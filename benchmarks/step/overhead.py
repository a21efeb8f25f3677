"""The time of a training step, and how much of it is the project's own overhead.

    python -m benchmarks.step.overhead
    python -m benchmarks.step.overhead --steps 20000 --backends null,numba

A step is made by the calls that `dptrain train` makes: the loader returns a minibatch, the engine
makes the step and reports its result. The network is model0 at batch 32 with the digits data set in
memory, one rank, one thread. The backend `null` computes nothing, so that its step is overhead. The
loader's copy of the images into a minibatch is not overhead but work that any program does; the row
``null, images not copied`` leaves it out.

Other programs make a step longer, never shorter, so on a busy machine the best block of 100 steps
is closest to the truth.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.comm.world import World
from dptrain.data import Batch
from dptrain.errors import UserError
from dptrain.measure.step_record import DATA_WAIT
from dptrain.training.baseline import open_loader
from dptrain.training.engines import Engine
from dptrain.training.job import assemble
from dptrain.training.settings import GivenSettings

NETWORK, BATCH_SIZE, LEARNING_RATE = "model0", 32, 0.01
WARM_UP, BLOCK = 200, 100
BACKENDS = ("null", "numba", "cuda")


@dataclass(frozen=True)
class Overhead:
    """Times of steps in µs.

    Attributes:
        name: of the row.
        quartiles: lower quartile, median and upper quartile of a step.
        best_block: smallest median of a block of 100 steps.
        data_wait: median time until the minibatch is there, part of the step.
    """

    name: str
    quartiles: tuple[float, float, float]
    best_block: float
    data_wait: float


class UncopiedSamples:
    """Samples whose images are not copied: a minibatch has undefined content.

    Args:
        samples: replaced by this object; only their number is used.
    """

    readable_shape = None

    def __init__(self, samples: Any) -> None:
        self._count = len(samples)

    def __len__(self) -> int:
        return self._count

    def read(self, indices: NDArray[np.int64], x: NDArray[Any], y: NDArray[Any]) -> None:
        """Copy nothing."""


def measure(backend_name: str, steps: int, *, copies_images: bool = True) -> Overhead:
    """Time steps of training.

    Args:
        backend_name: one of `dptrain.backends.BACKENDS`.
        steps: timed after the warm-up.
        copies_images: False leaves out the loader's copy of the images.

    Raises:
        UserError: the backend is not available.
    """
    chosen = GivenSettings(
        network=NETWORK, backend=backend_name, data="digits", crop=0, batch_size=BATCH_SIZE,
        threads=1, steps=WARM_UP + steps,
    ).with_recipe()  # fmt: skip
    total = WARM_UP + steps
    job = assemble(chosen, World.single(), keeps_run=False, recorded_steps=steps)
    if not copies_images:
        samples: Any = UncopiedSamples(job.dataset.train)
        job.dataset = replace(job.dataset, train=samples)
    with (
        job.engine,
        open_loader(job, range(total), batch_size=BATCH_SIZE) as loader,
    ):
        times = time_steps(job.engine, loader, total)[WARM_UP:] / 1e3
    recorder = job.recorder
    q1, median, q3 = (float(q) for q in np.percentile(times, [25, 50, 75]))
    blocks = [np.median(times[start : start + BLOCK]) for start in range(0, steps, BLOCK)]
    waits = recorder.rows()[:, recorder.names.index(DATA_WAIT)] / 1e3
    name = backend_name if copies_images else f"{backend_name}, images not copied"
    return Overhead(name, (q1, median, q3), float(min(blocks)), float(np.median(waits)))


def time_steps(engine: Engine, loader: Iterator[Batch], steps: int) -> NDArray[np.int64]:
    """Return nanoseconds from the end of one step to the end of the next."""
    times = np.zeros(steps, np.int64)
    with frozen_objects():
        last = perf_counter_ns()
        for number in range(steps):
            engine.step(loader, LEARNING_RATE)
            for result in engine.results(wait=number == steps - 1):
                assert math.isfinite(result.loss)
            now = perf_counter_ns()
            times[number] = now - last
            last = now
    return times


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Keep the garbage collector from looking at existing objects, as training does."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def show(rows: Sequence[Overhead], steps: int) -> None:
    """Print a table."""
    print(f"{NETWORK}, batch {BATCH_SIZE}, digits, 1 rank, 1 thread; µs per step, {steps} steps")
    heads = ("backend", "q1", "median", "q3", "best block", "waiting for data")
    print("{:26}{:>10}{:>10}{:>10}{:>12}{:>11}".format(*heads))
    for row in rows:
        numbers = (*row.quartiles, row.best_block, row.data_wait)
        print("{:26}{:10.1f}{:10.1f}{:10.1f}{:12.1f}{:11.1f}".format(row.name, *numbers))


def main() -> None:
    """Measure the backends of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000, help="timed steps [default: 4000]")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="comma-separated names")
    options = parser.parse_args()
    rows = []
    for name in options.backends.split(","):
        try:
            if name == "null":
                rows.append(measure(name, options.steps, copies_images=False))
            rows.append(measure(name, options.steps))
        except UserError as error:
            print(f"{name}: {error}")
    show(rows, options.steps)


if __name__ == "__main__":
    main()
