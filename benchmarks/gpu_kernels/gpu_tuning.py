"""Print the estimated and the measured time of each candidate kernel.

    python3 -m benchmarks.gpu_kernels.gpu_tuning [--batch N ...] [--precision P ...] [network ...]

Networks are those of `dptrain describe` and of `benchmarks.outside`. For each stage with several
candidates a line for each shows the estimate relative to the lowest, the median of the measured
times, and the selected one. A summary follows for each network, precision and batch size: the sum
of the times with the lowest estimates, and with the fastest candidates. The time grows with the
number of kernels to compile; `--seconds` limits it for each case.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

import click

from benchmarks.gpu_kernels.gpu_cases import Case, takes_cases
from dptrain.backends import load_backend
from dptrain.backends.cuda.tuning import Candidate, Tuning, tune
from dptrain.plan.plan import make_plan


def lines(tuning: Tuning) -> Iterator[str]:
    """Yield a line for each candidate of the stages that have several."""
    for stage, candidates in tuning.stages.items():
        if len(candidates) == 1:
            continue
        yield stage
        fastest = tuning.fastest(stage)
        for each in candidates:
            mark = "*" if each is fastest else " "
            yield f"  {mark} {each.estimate:5.2f}  {_microseconds(each)}  {each.name}"


def _microseconds(candidate: Candidate) -> str:
    return "       –" if candidate.time_ms is None else f"{1e3 * candidate.time_ms:8.2f}"


def sums_us(tuning: Tuning) -> tuple[float, float]:
    """Return the sums of the measured times by the lowest estimates, and by the fastest, in µs."""
    timed = [stage for stage, all_ in tuning.stages.items() if all_[0].time_ms is not None]
    first = sum(tuning.stages[stage][0].time_ms or 0.0 for stage in timed)
    best = sum(tuning.fastest(stage).time_ms or 0.0 for stage in timed)
    return 1e3 * first, 1e3 * best


@click.command()
@click.option("--seconds", default=12.0, show_default=True, help="Limit for each case.")
@takes_cases(("model0", "cifar", "vgg"), batches=(32,), precisions=("bf16",))
def main(cases: Sequence[Case], seconds: float) -> None:
    """Print the estimated and the measured time of each candidate kernel."""
    backend = load_backend("cuda")
    backend.choose_device(0)
    for network, batch_size, precision in cases:
        plan = make_plan(network, backend, batch_size, precision=precision)
        start = time.monotonic()
        tuning = tune(backend, plan, budget_s=seconds)
        print(f"\n{network.name} {precision} batch {batch_size}: estimate, µs, candidate")
        for line in lines(tuning):
            print(line)
        first, best = sums_us(tuning)
        print(
            f"sum {first:.1f} µs by estimates, {best:.1f} µs by measurement; "
            f"{time.monotonic() - start:.1f} s, "
            f"{'complete' if tuning.complete else 'out of time'}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
