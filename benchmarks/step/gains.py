"""Measure what an algorithm gains for a step: `serves` of the tables of algorithms.

    python3 -m benchmarks.step.gains --algorithm NAME [--operation convolution|dense]
        [--backend numba|cuda] [--precision P] [--batch N] [--pairs N] NETWORK ...

Whole training steps with and without the row of this name are timed in alternation, without the
load of a minibatch. On the CPU one thread computes, and its processor time counts, so that other
processes disturb less; on a GPU a step is a CUDA graph, and the device's time counts. A line shows
the medians, the median of the ratios of the pairs with quartiles, and the load of the machine.
"""

from __future__ import annotations

import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import click

from benchmarks.outside import find_network
from dptrain.backends import load_backend
from dptrain.backends.device_replica import DeviceReplica
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.network.network import Network
from dptrain.network.random_batch import random_batch
from dptrain.plan.plan import make_plan

LEARNING_RATE = 1e-6

LEAST_S = 0.05
"""Time of a measurement on the CPU; shorter steps are repeated."""


@contextmanager
def without(backend: str, operation: str, name: str) -> Iterator[None]:
    """Leave out the algorithm of an operation with a name."""
    module = importlib.import_module(f"dptrain.backends.{backend}.{operation}.algorithms")
    rows = getattr(module, operation.upper())
    others = tuple(row for row in rows if row.name != name)
    if len(others) == len(rows):
        known = ", ".join(f"'{row.name}'" for row in rows)
        raise click.BadParameter(f"'{name}' is no algorithm of {operation}; expected {known}")
    with mock.patch.object(module, operation.upper(), others):
        yield


def make(network: Network, backend: str, batch_size: int, precision: str | None) -> Replica:
    """Return a replica that has loaded a random batch and made two steps."""
    made = load_backend(backend)
    replica = made.make_replica(make_plan(network, made, batch_size, precision=precision))
    replica.load(Batch.of(*random_batch(network, batch_size), step=0))
    replica.run()
    replica.update(LEARNING_RATE)  # It also uploads the learning rate that later steps use.
    step(replica)
    replica.memory.synchronize()
    return replica


def step(replica: Replica) -> None:
    """Make or enqueue a step with the batch that is loaded."""
    replica.run()
    if isinstance(replica, DeviceReplica):
        replica.enqueue_update()
    else:
        replica.update(LEARNING_RATE)


def timer(replica: Replica) -> Callable[[], float]:
    """Return a function that returns the milliseconds of a step."""
    if replica.memory.on_gpu:
        return lambda: statistics.median(replica.memory.times_ms(lambda: step(replica)))
    begin = time.process_time()
    step(replica)
    repeats = max(1, int(LEAST_S / max(time.process_time() - begin, 1e-6)))

    def measure() -> float:
        begin = time.process_time()
        for _ in range(repeats):
            step(replica)
        return 1e3 * (time.process_time() - begin) / repeats

    return measure


def gain(
    network: Network, backend: str, operation: str, name: str, batch_size: int,
    precision: str | None, pairs: int,
) -> str:  # fmt: skip
    """Return a line with the times with and without an algorithm."""
    ours = timer(make(network, backend, batch_size, precision))
    with without(backend, operation, name):
        other = timer(make(network, backend, batch_size, precision))
    found = []
    for index in range(pairs):
        if index % 2:
            found.append((ours(), other()))
        else:
            found.append((other(), ours())[::-1])
    medians = [statistics.median(times) for times in zip(*found, strict=True)]
    ratios = sorted(there / here for here, there in found)
    low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
    return (
        f"{network.name}, batch {batch_size}: {medians[0]:.3f} ms, without {name} "
        f"{medians[1]:.3f} ms, factor {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}), "
        f"{pairs} pairs, load {os.getloadavg()[0]:.1f}"
    )


@click.command()
@click.option("--algorithm", required=True, help="Name of the row.")
@click.option(
    "--operation",
    type=click.Choice(["convolution", "dense"]),
    default="convolution",
    show_default=True,
)
@click.option("--backend", type=click.Choice(["numba", "cuda"]), default="numba", show_default=True)
@click.option("--precision", default=None, help="By default the backend's.")
@click.option("--batch", "batch_size", default=32, show_default=True)
@click.option("--pairs", default=31, show_default=True)
@click.argument("names", nargs=-1, required=True)
def main(
    algorithm: str, operation: str, backend: str, precision: str | None, batch_size: int,
    pairs: int, names: Sequence[str],
) -> None:  # fmt: skip
    """Measure what an algorithm gains for a step of some networks."""
    for name in names:
        network = find_network(name)
        line = gain(network, backend, operation, algorithm, batch_size, precision, pairs)
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
