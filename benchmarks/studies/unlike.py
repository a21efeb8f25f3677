"""Study B: two equal and two unlike workers, with equal shares and with shares by speed."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.step.unequal import Setup, Worker, rate_of, run, shares_of
from benchmarks.studies.measuring import CPU, Context, Values, measurement, summary
from benchmarks.studies.scaling import SOLAR_BATCH, require_mpi

SLOWDOWNS = (2.0, 4.0)
"""How many times as long the second of two unlike workers computes."""
STEPS, ROUNDS = 60, 3


@measurement("unlike", CPU)
def unlike_workers(context: Context) -> Values:
    """Train the solar network on one worker, on two equal ones, and on two unlike ones."""
    require_mpi()
    batch, steps = (16, 20) if context.quick else (SOLAR_BATCH, STEPS)
    setup = Setup("solar", batch, steps, steps, 0)
    fast = Worker("numba")
    teams: dict[str, tuple[Sequence[Worker], Sequence[str]]] = {
        "one": ([fast], ()),
        "two, equal": ([fast, fast], ()),
    }
    for factor in SLOWDOWNS:
        pair = [fast, Worker("numba", slowdown=factor)]
        teams[f"unlike by {factor:g}, equal shares"] = pair, ()
        teams[f"unlike by {factor:g}, shares by speed"] = pair, ("--balance", "measured")
    rates, shares = {name: list[float]() for name in teams}, dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1 if context.quick else ROUNDS):
            for name, (workers, options) in teams.items():
                path = run(workers, [*setup.arguments(steps), *options], Path(folder) / "run")
                rates[name].append(rate_of(path, batch))
                if options:
                    shares[name] = shares_of(path)
                context.say(f"round {number + 1}, {name}: {rates[name][-1]:,.0f} samples/s")
    return {
        "batch": batch,
        "slowdowns": list(SLOWDOWNS),
        "samples_per_s": {name: summary(values) for name, values in rates.items()},
        "shares": shares,
    }
