"""Measure whether the selected kernels are the fastest.

    python3 -m benchmarks.step.choices [--backend numba|cuda] [--precision P] [--batch N ...]
        [--rounds N] [--all] [--details] [--write] [NETWORK ...]

Every stage that several algorithms or configurations can compute runs with each candidate, in
turn in a replica that selects them. A line for each network shows in how many stages the candidate
with the lowest estimate, which training uses, takes at most 3% longer than the fastest, and the
sums of both times; the last line counts all. `--all` adds the best configuration of every
algorithm that is estimated to be much slower; `--details` prints every candidate. `--write`
replaces the rows of these networks in the table of measured products, which training on a GPU looks
up before it compares estimates.

On the CPU one thread computes, and its processor time counts. A time is the shortest of several
rounds, because only what disturbs it makes it longer.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import click

from benchmarks.outside import find_network
from benchmarks.step import measured
from benchmarks.timing import HostProgram
from benchmarks.timing import measure as clock
from dptrain.backends import load_backend
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.measured import FILE
from dptrain.backends.cuda.tuning import Candidate, Tuning, tune
from dptrain.backends.replica import Kernel, Replica
from dptrain.plan.plan import Plan, make_plan
from dptrain.plan.selection import worthwhile

TOLERANCE = 1.03
"""A selected kernel counts as the fastest up to this multiple of its time."""

LEAST_S = 0.004
"""Time of a measurement on the CPU; shorter kernels are repeated."""
MOST_CALLS = 10_000

REPEATS = 5


def times_ms(replica: Replica, kernel: Kernel) -> Sequence[float]:
    """Return the shortest time of a kernel, on the CPU of the processor."""
    if replica.memory.on_gpu:
        return [min(replica.memory.times_ms(lambda: kernel(replica.context)))]
    programs = {"kernel": HostProgram(partial(kernel, replica.context), is_short=True)}
    found = clock(programs, rounds=REPEATS, block_s=LEAST_S, max_steps=MOST_CALLS)
    return [min(found["kernel"].medians)]


def best_of_each(ranked: Iterable[tuple[float, Any]]) -> list[tuple[float, Any]]:
    """Return the candidates that training may measure, and the best of every algorithm."""
    found = sorted(ranked, key=lambda pair: pair[0])
    by_algorithm: dict[str, tuple[float, Any]] = {}
    for estimate, candidate in found:
        algorithm = getattr(candidate, "algorithm", candidate)
        name = getattr(algorithm, "name", str(candidate))
        by_algorithm.setdefault(name, (estimate, candidate))
    chosen = worthwhile(found)
    return chosen + [pair for pair in by_algorithm.values() if pair not in chosen]


def measure(backend: Any, plan: Plan, rounds: int, *, every: bool) -> dict[str, list[Candidate]]:
    """Return the candidates of the stages that have several, with the shortest times."""
    stages: dict[str, list[Candidate]] = {}
    for _ in range(rounds):
        tuning: Tuning = tune(
            backend, plan, budget_s=math.inf, time_kernel=times_ms,
            candidates=best_of_each if every else worthwhile,
        )  # fmt: skip
        for stage, found in tuning.stages.items():
            if len(found) > 1 and all(each.time_ms is not None for each in found):
                before = stages.get(stage, list(found))
                stages[stage] = [
                    min(pair, key=lambda each: each.time_ms or 0.0)
                    for pair in zip(before, found, strict=True)
                ]
    return stages


def ratio(candidates: Sequence[Candidate]) -> float:
    """Return the time of the selected candidate, divided by that of the fastest."""
    times = [each.time_ms or 0.0 for each in candidates]
    return times[0] / min(times)


def details(stages: dict[str, list[Candidate]]) -> Iterator[str]:
    """Yield a line for each candidate: its estimate, its time, and whether it is the fastest."""
    for stage, candidates in stages.items():
        yield f"{stage}: {ratio(candidates):.3f}"
        fastest = min(candidates, key=lambda each: each.time_ms or 0.0)
        for each in candidates:
            mark = "*" if each is fastest else " "
            time_us = 1e3 * (each.time_ms or 0.0)
            yield f"  {mark} {each.estimate:5.2f} {time_us:10.2f} µs  {each.name}"


@click.command()
@click.option("--backend", type=click.Choice(["numba", "cuda"]), default="numba", show_default=True)
@click.option("--precision", default=None, help="By default the backend's.")
@click.option("--batch", "batches", multiple=True, type=click.IntRange(1), default=(32,))
@click.option("--rounds", default=3, show_default=True)
@click.option("--all", "every", is_flag=True, help="Also candidates with high estimates.")
@click.option("--details", "detailed", is_flag=True, help="Print every candidate.")
@click.option("--write", is_flag=True, help="Write what is faster than the lowest estimate.")
@click.argument("names", nargs=-1, required=True, metavar="NETWORK...")
def main(
    backend: str, precision: str | None, batches: Sequence[int], rounds: int, every: bool,
    detailed: bool, write: bool, names: Sequence[str],
) -> None:  # fmt: skip
    """Measure whether the selected kernels of some networks are the fastest."""
    made = load_backend(backend)
    if backend == "cuda":
        made.choose_device(0)
    everything: list[float] = []
    products: list[measured.Times] = []
    for name in names:
        for batch_size in batches:
            begin = time.monotonic()
            plan = make_plan(find_network(name), made, batch_size, precision=precision)
            stages = measure(made, plan, rounds, every=every)
            ratios = [ratio(candidates) for candidates in stages.values()]
            everything += ratios
            selected = sum(each[0].time_ms or 0.0 for each in stages.values())
            fastest = sum(min(c.time_ms or 0.0 for c in each) for each in stages.values())
            if isinstance(made, CudaBackend):
                products += measured.times_of(made, plan, stages)
            if detailed:
                print("\n".join(details(stages)))
            print(
                f"{name} {plan.precision} batch {batch_size}: {_counted(ratios)}; sums"
                f" {selected:.3f} and {fastest:.3f} ms; {time.monotonic() - begin:.0f} s",
                flush=True,
            )
    print(f"all: {_counted(everything)}")
    if write:
        count = measured.write(FILE, measured.rows(products))
        print(f"{FILE.name}: {count} rows")


def _counted(ratios: Sequence[float]) -> str:
    """Return in how many stages the selected kernel is the fastest."""
    count = sum(each <= TOLERANCE for each in ratios)
    share = f" ({count / len(ratios):.0%}), at most {max(ratios):.2f}" if ratios else ""
    return f"{count} of {len(ratios)} stages within {TOLERANCE - 1:.0%} of the fastest{share}"


if __name__ == "__main__":
    sys.exit(main())
