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
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from unittest import mock

import click

from benchmarks.flags import flags
from benchmarks.machine import load
from benchmarks.outside import find_network
from benchmarks.timing import HostProgram, Lap, Program, measure, quotient
from dptrain.backends import load_backend
from dptrain.backends.device_replica import DeviceReplica
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.network.network import Network
from dptrain.network.random_batch import random_batch
from dptrain.plan.plan import make_plan
from dptrain.plan.shards import MicroShards

LEARNING_RATE = 1e-6

LEAST_S = 0.05
"""Time of a round on the CPU; shorter steps are repeated."""


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


def make(
    network: Network, backend: str, batch_size: int, precision: str | None, shards: int = 0
) -> Replica:
    """Return a replica that has loaded a random batch and made two steps."""
    made = load_backend(backend)
    own = MicroShards.of_rank(shards, batch_size=batch_size) if shards else None
    plan = make_plan(network, made, batch_size, precision=precision, micro_shards=own)
    replica = made.make_replica(plan)
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


@dataclass(frozen=True)
class GraphProgram:
    """Steps of a replica on a GPU, in CUDA graphs (see `benchmarks.timing.Program`)."""

    replica: Replica
    peer_of: str = ""
    steps: int = 1

    def run(self, steps: int) -> Lap:
        """Return the median time of a step of several graphs."""
        times = self.replica.memory.times_ms(lambda: step(self.replica))
        return Lap(statistics.median(times), statistics.median(times))


def program(replica: Replica) -> Program:
    """Return the steps of a replica as a timed program."""
    return GraphProgram(replica) if replica.memory.on_gpu else HostProgram(partial(step, replica))


def gain(
    network: Network, backend: str, operation: str, name: str, batch_size: int,
    precision: str | None, pairs: int,
) -> str:  # fmt: skip
    """Return a line with the times with and without an algorithm."""
    programs = {"with": program(make(network, backend, batch_size, precision))}
    with without(backend, operation, name):
        programs["without"] = program(make(network, backend, batch_size, precision))
    found = measure(programs, rounds=pairs, block_s=LEAST_S)
    factor = quotient(found["without"].medians, found["with"].medians)
    return (
        f"{network.name}, batch {batch_size}: {found['with'].median:.3f} ms, without {name} "
        f"{found['without'].median:.3f} ms, factor {factor.value:.3f} ({factor.low:.3f} to "
        f"{factor.high:.3f}), {pairs} pairs, load {load()[0]:.1f}"
    )


@click.command()
@click.option("--algorithm", required=True, help="Name of the row.")
@click.option("--operation", type=click.Choice(["convolution", "dense"]), default="convolution")
@click.option("--backend", type=click.Choice(["numba", "cuda"]), default="numba", show_default=True)
@flags(precision=(None, "By default the backend's."), batch=32, pairs=31)
@click.argument("names", nargs=-1, required=True)
def main(
    algorithm: str, operation: str, backend: str, precision: str | None, batch: int, pairs: int,
    names: Sequence[str],
) -> None:  # fmt: skip
    """Measure what an algorithm gains for a step of some networks."""
    for name in names:
        network = find_network(name)
        line = gain(network, backend, operation, algorithm, batch, precision, pairs)
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
