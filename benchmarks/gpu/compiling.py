"""Compile the kernels of steps in processes of their own, before the steps are needed.

    python -m benchmarks.gpu.compiling NETWORK,BATCH,BACKEND,PRECISION …

A step of a network compiles for seconds, in which the GPU is idle. Meanwhile the benchmark starts
PyTorch and computes references. The kernels reach it through the project's cache on disk; a kernel
that it needs first is compiled once, by whichever process begins.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from benchmarks.outside import find_network
from dptrain.network import Network

COMPILED = "cuda"
"""Backend whose steps compile in other processes. cudnn times engines when it builds a step, which
other processes on the same GPU would disturb, and keeps the selection."""


class StepCase(NamedTuple):
    """A training step that will be measured."""

    network: str
    batch_size: int
    backend: str
    precision: str


@contextmanager
def compiling(cases: Iterable[StepCase]) -> Iterator[None]:
    """Compile kernels during the context, and wait for the rest at its end.

    There is one process for each precision, which share the work. What they cannot
    compile, the benchmark tries again and reports.
    """
    by_process: dict[str, list[StepCase]] = {}
    for case in cases:
        if case.backend == COMPILED:
            by_process.setdefault(case.precision, []).append(case)
    words = [[",".join(map(str, case)) for case in part] for part in by_process.values()]
    with running("benchmarks.gpu.compiling", words):
        yield


@contextmanager
def running(module: str, parts: Iterable[Sequence[str]]) -> Iterator[None]:
    """Run a module in a process for each part, during the context; wait for all at its end.

    An exception in the context ends the processes.

    Args:
        module: its name; what it prints is ignored.
        parts: arguments of each process.
    """
    processes = [_start(module, part) for part in parts]
    try:
        yield
        for process in processes:
            process.wait()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _start(module: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module, *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def known_networks(networks: Iterable[Network]) -> set[str]:
    """Return the names of the networks that another process finds by name."""
    found = set[str]()
    for network in networks:
        with suppress(Exception):
            if find_network(network.name).nodes == network.nodes:
                found.add(network.name)
    return found


def main(words: Sequence[str]) -> None:
    """Build the steps of `words`, which compiles what the cache lacks."""
    from benchmarks.gpu.ours import Step

    for word in words:
        name, batch_size, backend, precision = word.split(",")
        # For example, memory does not suffice. The benchmark reports what it cannot measure.
        with suppress(Exception):
            Step(find_network(name), backend, precision, int(batch_size))


if __name__ == "__main__":
    main(sys.argv[1:])
