"""Compile the kernels of replicas in processes of their own, before they are needed.

    python -m benchmarks.gpu.compiling NETWORK:BACKEND:BATCH:PRECISION:OPTIMIZER:FORM …

A step of a network compiles for seconds, in which the GPU is idle. Meanwhile the benchmark starts
PyTorch and computes references. The kernels reach it through the project's cache on disk; a kernel
that it needs first is compiled once, by whichever process begins. FORM is ``step``, ``unfused`` (a
step without fused layers), ``forward`` or ``layers`` (inference with each layer alone).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from benchmarks.outside import find_network
from dptrain.backends import load_backend
from dptrain.backends.replica import Replica
from dptrain.network import Network
from dptrain.network.biases import separate_biases
from dptrain.plan.optimizers import make_optimizer
from dptrain.plan.plan import make_plan

COMPILED = "cuda"
"""Backend whose steps compile in other processes. cudnn times engines when it builds a step, which
other processes on the same GPU would disturb, and keeps the selection."""


STEP, UNFUSED, FORWARD, LAYERS = "step", "unfused", "forward", "layers"


class Request(NamedTuple):
    """A replica that will be needed."""

    network: str
    backend: str = COMPILED
    batch: int = 32
    precision: str = "fp32"
    optimizer: str = "sgd"
    form: str = STEP

    def __str__(self) -> str:
        return ":".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Request:
        """Return the request that `str` made `text` of."""
        network, backend, batch, *rest = text.rsplit(":", 5)
        return cls(network, backend, int(batch), *rest)


def make(
    request: Request, threads: int = 1, find: Callable[[str], Network] = find_network
) -> Replica:
    """Return the replica of a request, whose network `find` knows."""
    backend, network = load_backend(request.backend), find(request.network)
    backend.choose_device(0)
    plan = make_plan(
        separate_biases(network) if request.form == LAYERS else network, backend, request.batch,
        precision=request.precision, optimizer=make_optimizer(request.optimizer, momentum=0.0),
        training=request.form in (STEP, UNFUSED), threads=threads,
        fused=request.form in (STEP, FORWARD),
    )  # fmt: skip
    return backend.make_replica(plan)


@contextmanager
def compiling(cases: Iterable[Request]) -> Iterator[None]:
    """Compile kernels during the context, and wait for the rest at its end.

    There is one process for each precision, which share the work. What they cannot
    compile, the benchmark tries again and reports.
    """
    by_process: dict[str, list[str]] = {}
    for case in cases:
        if case.backend == COMPILED:
            by_process.setdefault(case.precision, []).append(str(case))
    with running("benchmarks.gpu.compiling", by_process.values()):
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


def main(texts: Sequence[str], find: Callable[[str], Network] = find_network) -> None:
    """Make replicas, which compiles what the cache lacks."""
    for text in texts:
        # What fails here fails again when it is measured, and is reported then.
        with suppress(Exception):
            make(Request.parse(text), find=find)


if __name__ == "__main__":
    main(sys.argv[1:])
