"""The time of a training step, and how much of it is the project's own overhead.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --steps 20000 --backends null,numba

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
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain import get_network
from dptrain.backends import load_backend
from dptrain.comm import make_gradient_sum
from dptrain.comm.world import World
from dptrain.data import Dataset, Loader, Sampler, open_data
from dptrain.errors import UserError
from dptrain.measure.recorder import DATA_WAIT, StepRecorder
from dptrain.plan import SGD, make_buckets, make_plan
from dptrain.training.engines import Engine, make_engine

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

    canvas = None

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
    network, backend = get_network(NETWORK), load_backend(backend_name)
    plan = make_plan(
        network, backend, BATCH_SIZE, precision=next(iter(backend.precisions)), optimizer=SGD(0.9)
    )
    replica = backend.make_replica(plan)
    buckets = make_buckets(plan, None)
    gradient_sum = make_gradient_sum("mirrored", World.single(), replica, buckets)
    recorder = StepRecorder(plan.stages, capacity=steps)
    data = open_data("digits", network, seed=0)
    total = WARM_UP + steps
    with (
        make_engine(replica, gradient_sum, buckets, recorder) as engine,
        open_loader(data, total, copies_images=copies_images) as loader,
    ):
        times = time_steps(engine, loader, total)[WARM_UP:] / 1e3
    q1, median, q3 = (float(q) for q in np.percentile(times, [25, 50, 75]))
    blocks = [np.median(times[start : start + BLOCK]) for start in range(0, steps, BLOCK)]
    waits = recorder.rows()[:, recorder.names.index(DATA_WAIT)] / 1e3
    name = backend_name if copies_images else f"{backend_name}, images not copied"
    return Overhead(name, (q1, median, q3), float(min(blocks)), float(np.median(waits)))


def open_loader(data: Dataset, steps: int, *, copies_images: bool) -> Loader:
    """Return the loader that `dptrain train` uses for data in memory on the CPU."""
    samples: Any = data.train if copies_images else UncopiedSamples(data.train)
    sampler = Sampler(len(samples), BATCH_SIZE, seed=0)
    return Loader(samples, sampler, range(steps), data.input_shape, data.target_shape, depth=0)


def time_steps(engine: Engine, loader: Loader, steps: int) -> NDArray[np.int64]:
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
    heads = ("backend", "q1", "median", "q3", "best block", "data wait")
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
