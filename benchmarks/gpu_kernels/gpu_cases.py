"""What benchmarks of single kernels of the `cuda` backend share: command line, and timing."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import click

from benchmarks.outside import find_network
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.network.network import Network

PRECISIONS = ("fp32", "tf32", "bf16")


class Case(NamedTuple):
    """A network with a batch size and a precision."""

    network: Network
    batch_size: int
    precision: str


def takes_cases(
    networks: Sequence[str], batches: Sequence[int], precisions: Sequence[str], *,
    choices: Sequence[str] = PRECISIONS,
) -> Callable[[Callable[..., None]], Callable[..., None]]:  # fmt: skip
    """Return a decorator of a command whose first argument is a list of `Case`.

    It adds the options --batch and --precision, which can be repeated, and names of networks.

    Args:
        networks, batches, precisions: defaults.
        choices: precisions that the command supports.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @click.option(
            "--batch",
            "batches",
            multiple=True,
            type=click.IntRange(1),
            default=batches,
            show_default=True,
            help="Batch size; repeat for several.",
        )
        @click.option(
            "--precision",
            "precisions",
            multiple=True,
            type=click.Choice(choices),
            default=precisions,
            show_default=True,
            help="Precision; repeat for several.",
        )
        @click.argument("names", nargs=-1, metavar="[NETWORK]...")
        @functools.wraps(function)
        def run(
            batches: Sequence[int], precisions: Sequence[str], names: Sequence[str], **options: Any
        ) -> None:
            found = [find_network(name) for name in names or networks]
            cases = itertools.product(found, batches, precisions)
            function([Case(*case) for case in cases], **options)

        return run

    return decorate  # fmt: skip


def print_reports(
    report: Callable[[Network, int, str, CudaBackend], Iterable[str]], cases: Iterable[Case]
) -> None:
    """Print the lines of the report of each case on the first GPU."""
    from dptrain.backends.cuda.device.gpu import GPU

    backend = CudaBackend(GPU(0))
    for case in cases:
        for line in report(*case, backend):
            print(line, flush=True)


@dataclass(frozen=True)
class Times:
    """Time of one launch in µs: median and quartiles over graph launches."""

    median: float
    low: float
    high: float


def timed(
    starts: Sequence[Callable[[], None]], stream: Any, launches: int, repeats: int = 7
) -> Times:
    """Time one of many launches in a CUDA graph.

    Args:
        starts: functions that launch the same kernels, in turns.
        stream: of CuPy.
        launches: number of launches in the graph, a multiple of the number of functions.
        repeats: number of timed graph launches.
    """
    from dptrain.backends.cuda.device.cupy_runtime import import_cupy

    cuda = import_cupy().cuda
    for start in starts:
        start()
    stream.begin_capture()
    for i in range(launches):
        starts[i % len(starts)]()
    graph = stream.end_capture()
    graph.launch(stream)
    times: list[float] = []
    for _ in range(repeats):
        first, last = cuda.Event(), cuda.Event()
        first.record(stream)
        graph.launch(stream)
        last.record(stream)
        last.synchronize()
        times.append(1000.0 * cuda.get_elapsed_time(first, last) / launches)
    low, _, high = statistics.quantiles(times, n=4)
    return Times(statistics.median(times), low, high)
