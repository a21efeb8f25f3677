"""Print the estimated and the measured time of each candidate kernel.

    python3 -m benchmarks.gpu_tuning [--batch N ...] [--precision P ...] [network ...]

Networks are those of `dptrain describe` and of `benchmarks.outside`. For each stage with several
candidates a line for each shows the estimate relative to the lowest, the median of the measured
times, and the selected one. A summary follows for each network, precision and batch size: the sum
of the times with the lowest estimates, and with the fastest candidates. The time grows with the
number of kernels to compile; `--seconds` limits it for each network.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from benchmarks.outside import find_network
from dptrain.backends import load_backend
from dptrain.backends.cuda.tuning import Candidate, Tuning, tune
from dptrain.plan.plan import make_plan

DEFAULTS = "model0", "cifar", "vgg"


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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("networks", nargs="*", default=DEFAULTS, metavar="network")
    parser.add_argument("--batch", type=int, nargs="+", default=[32])
    parser.add_argument("--precision", nargs="+", default=["bf16"])
    parser.add_argument("--seconds", type=float, default=12.0)
    args = parser.parse_args()
    backend = load_backend("cuda")
    backend.choose_device(0)
    for name in args.networks:
        for precision in args.precision:
            for batch_size in args.batch:
                plan = make_plan(find_network(name), backend, batch_size, precision=precision)
                start = time.monotonic()
                tuning = tune(backend, plan, budget_s=args.seconds)
                print(f"\n{name} {precision} batch {batch_size}: estimate, µs, candidate")
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
    main()
