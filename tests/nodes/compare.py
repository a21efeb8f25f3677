"""Compares methods of summing gradients on two nodes, and prints a table in Markdown.

    python -m tests.nodes.compare --ranks 2,2 --mbit 1000 --delays 50,500

Each rank sums a gradient of the size of a network's and updates its parameters, without a forward
or backward pass. The time of a step is that of the slowest rank. See `tests.nodes.machines` for
what is needed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from functools import partial

import numpy as np

from dptrain.backends import load_backend
from dptrain.comm import make_gradient_sum
from dptrain.comm.sums.shared import share_arrays
from dptrain.comm.world import World
from dptrain.network import get_network
from dptrain.plan import SGD, make_buckets, make_plan
from tests.nodes.machines import MPIS, Nodes

METHODS = {"shared": "mirrored", "mpi": "mirrored", "central": "central"}
"""Names in the table, and their strategies."""
WARM_UP, STEPS = 10, 50
BUCKET_BYTES = 256 * 1024
"""The size of gradient buckets on several nodes."""


def time_steps(world: World, method: str, network: str) -> list[float]:
    """Return the time of each step of the slowest rank, in milliseconds."""
    backend = load_backend("numba")
    plan = make_plan(get_network(network), backend, 1, optimizer=SGD(momentum=0.9))
    arrays = share_arrays(world, plan) if method == "shared" else None
    replica = backend.make_replica(plan, arrays=arrays)
    buckets = make_buckets(plan, BUCKET_BYTES)
    transport = "shared" if method == "shared" else "mpi"
    sums = make_gradient_sum(METHODS[method], world, replica, buckets, transport)
    update = partial(replica.update_slice, number=1)
    times = np.zeros(WARM_UP + STEPS)
    for step in range(times.size):
        replica.flat_gradients[:] = 0
        world.barrier()
        start = time.perf_counter()
        for index in range(len(buckets)):
            sums.start(index)
        sums.finish_and_update(update, 0.01)
        times[step] = time.perf_counter() - start
    slowest = np.max(world.all_gather_json((1e3 * times[WARM_UP:]).tolist()), axis=0)
    return [float(value) for value in slowest]


def measure(network: str) -> None:
    """Print the times of all methods as JSON, on every rank of a job."""
    world = World.connect(timeout=60.0)
    times = {method: time_steps(world, method, network) for method in METHODS}
    if world.is_rank_zero:
        print("\n" + json.dumps(times), flush=True)


def compare(nodes: Nodes, ranks: list[int], mpi: str, network: str) -> list[str]:
    """Return median and quartiles of each method, in milliseconds."""
    program = (sys.executable, "-m", "tests.nodes.compare", "--measure", "--network", network)
    command, variables = nodes.mpirun(ranks, *program, mpi=mpi)
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    quartiles = [np.percentile(times, (50, 25, 75)) for times in json.loads(line).values()]
    return [f"{median:.1f} ({low:.1f}–{high:.1f})" for median, low, high in quartiles]


def main() -> None:
    """Measure each delay and print the table."""
    parser = argparse.ArgumentParser(description="Compare gradient sums on two nodes.")
    parser.add_argument("--ranks", default="2,2", help="number of ranks of each node")
    parser.add_argument("--mpi", choices=MPIS, default=MPIS[0])
    parser.add_argument("--mbit", type=int, default=1000, help="bandwidth, 10⁶ bits per second")
    parser.add_argument("--delays", default="50,500", help="one-way delays in microseconds")
    parser.add_argument("--network", default="model0")
    parser.add_argument("--measure", action="store_true", help="for the ranks that are started")
    arguments = parser.parse_args()
    if arguments.measure:
        return measure(arguments.network)
    ranks = [int(number) for number in arguments.ranks.split(",")]
    print(f"| delay | {' | '.join(METHODS)} |\n|---|{'---:|' * len(METHODS)}")
    for delay_us in map(int, arguments.delays.split(",")):
        with Nodes(len(ranks), delay_us=delay_us, mbit=arguments.mbit) as nodes:
            cells = compare(nodes, ranks, arguments.mpi, arguments.network)
        print(f"| {delay_us} µs | {' | '.join(cells)} |", flush=True)
    return None


if __name__ == "__main__":
    main()
