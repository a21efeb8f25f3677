"""Measure what micro-shards cost for a step on one rank, without the load of a minibatch.

    python3 -m benchmarks.step.shards [--backend numba|cuda] [--precision P] [--batch N]
        [--shards N] [--pairs N] NETWORK ...

Steps with and without micro-shards are timed in alternation, as by `benchmarks.step.gains`. One
micro-shard costs what a rank pays if each rank has one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from benchmarks.flags import flags
from benchmarks.machine import load
from benchmarks.outside import find_network
from benchmarks.step.gains import LEAST_S, make, program
from benchmarks.timing import measure, quotient
from dptrain.network.network import Network


def cost(
    network: Network, backend: str, batch_size: int, precision: str | None, shards: int, pairs: int
) -> str:
    """Return a line with the times without micro-shards, with one, and with several."""
    programs = {
        str(count): program(make(network, backend, batch_size, precision, count))
        for count in sorted({0, 1, shards})
    }
    found = measure(programs, rounds=pairs, block_s=LEAST_S)
    plain = found.pop("0")
    factors = {name: quotient(each.medians, plain.medians) for name, each in found.items()}
    texts = (
        f"--shards {name} {each.value:.3f} times ({each.low:.3f} to {each.high:.3f})"
        for name, each in factors.items()
    )
    return (
        f"{network.name}, batch {batch_size}: {plain.median:.3f} ms, {', '.join(texts)}, "
        f"{pairs} pairs, load {load()[0]:.1f}"
    )


@click.command()
@click.option("--backend", type=click.Choice(["numba", "cuda"]), default="numba", show_default=True)
@flags(precision=(None, "By default the backend's."), batch=128, shards=4, pairs=15)
@click.argument("names", nargs=-1, required=True)
def main(
    backend: str, precision: str | None, batch: int, shards: int, pairs: int, names: Sequence[str]
) -> None:
    """Measure what micro-shards cost for a step of some networks."""
    for name in names:
        print(cost(find_network(name), backend, batch, precision, shards, pairs), flush=True)


if __name__ == "__main__":
    sys.exit(main())
