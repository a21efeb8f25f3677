"""Threads and ranks on the cores of one machine, and mirrored against central parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.node.mpi import Mpi, find_mpis
from benchmarks.node.rounds import Entry
from benchmarks.node.workers.processes import Processes, Team, load_results
from benchmarks.studies.measuring import CPU, Context, Values, measurement
from benchmarks.studies.networks import LOG, STUDY_A, network_name
from benchmarks.studies.store import PARTIAL
from benchmarks.timing import measure
from dptrain.errors import UserError

PROGRAM = "dptrain engine"
BATCH, LOG_BATCH, SOLAR_BATCH = 32, 1024, 128
ROUNDS, BLOCK_S = 7, 0.15
STRATEGY_ROUNDS = 11
"""More rounds, because the step of one rank had two groups of times in five."""
SCALED = {
    f"{name}, batch {batch}": (name, batch) for name in ("model0", LOG) for batch in (32, LOG_BATCH)
}
"""Networks and minibatches on which threads are compared at equal arithmetic per step."""
STRATEGIES = {
    "mirrored, shared memory": {"strategy": "mirrored", "transport": "auto"},
    "mirrored, MPI": {"strategy": "mirrored", "transport": "mpi"},
    "central, MPI": {"strategy": "central", "transport": "auto"},
}
"""Strategies and how gradients travel. Central storage cannot use shared memory."""

Spec = Mapping[str, Any]


def require_mpi() -> Mpi:
    """Return the MPI library of this machine.

    Raises:
        UserError: there is none.
    """
    found = find_mpis()
    if not found:
        raise UserError("no mpirun was found; install one with: pip install '.[mpi]'")
    return found[0]


def compile_first(processes: Processes, specs: Sequence[Spec]) -> None:
    """Compile the kernels of different steps at the same time, in a process for each."""
    pool = processes.copies(min(len(specs), len(processes.cores)))
    for start in range(0, len(specs), len(pool)):
        part = specs[start : start + len(pool)]
        teams = [Team([worker]) for worker in pool.workers[: len(part)]]
        for team, spec in zip(teams, part, strict=True):
            team.begin_build("compile", PROGRAM, {"threads": 1, "ranks": 1, **spec})
        for team in teams:
            team.end_build()
            team.drop("compile")
    processes.stop(pool)


def measure_specs(
    teams: Mapping[str, Team],
    specs: Mapping[str, Spec],
    processes: Processes,
    context: Context,
    rounds: int = ROUNDS,
) -> Values:
    """Build a program in each team, time all in alternating rounds, and compare their losses.

    Args:
        teams: processes by name of the program.
        specs: specifications by the same names; the first is the one with which others compare.
        processes: they make temporary files.
        context: the machine and options.
        rounds: number of rounds.
    """
    names, paths = list(specs), {}
    for name in names:
        paths[name] = processes.temporary_file(".npz")
        teams[name].begin_build(name, PROGRAM, specs[name], paths[name])
        teams[name].end_build()
    entries = {name: Entry(teams[name], name) for name in names}
    rounds, block_s = (2, 0.02) if context.quick else (rounds, BLOCK_S)
    found = measure(entries, rounds=rounds, block_s=block_s)
    for name in names:
        teams[name].drop(name)
    first = load_results(paths[names[0]])["losses"]
    return {
        name: {
            **found[name].as_dict(),
            "loss_difference": float(
                np.max(np.abs(load_results(paths[name])["losses"] / first - 1.0))
            ),
        }
        for name in names
    }


def _teams(processes: Processes, context: Context, mpi: Mpi) -> dict[str, Team]:
    """Start a process for each number of threads, and the ranks of each number of ranks."""
    teams = {f"threads {n}": processes.single(n) for n in context.counts}
    for n in context.counts[1:]:
        teams[f"ranks {n}"] = processes.ranks(mpi, n)
    return teams


def _spec(name: str, **settings: Any) -> Spec:
    unit, number = name.split()
    count = int(number)
    counts = {"threads": count, "ranks": 1} if unit == "threads" else {"threads": 1, "ranks": count}
    return {**counts, **settings}


@measurement("speed-up", CPU, "A1 A2 A5 Q1 Q2 Q3 Q16", many_cores=True)
def speed_up(context: Context) -> Values:
    """Time training steps of study A's networks with the reference, threads and ranks."""
    names = STUDY_A[:1] if context.quick else STUDY_A
    paths = {name: network_name(name) for name in names}
    with Processes(context.cores) as processes:
        context.say("compiling")
        compile_first(processes, [{"network": p, "batch": BATCH} for p in paths.values()])
        teams = _teams(processes, context, require_mpi())
        reference = processes.single(1)
        steps = {}
        for name, path in paths.items():
            context.say(name)
            chosen = {team: _spec(team, network=path, batch=BATCH) for team in teams}
            slow = {"backend": "reference", "network": path, "batch": BATCH}
            chosen["reference"] = {"threads": 1, "ranks": 1, **slow}
            steps[name] = measure_specs(
                {**teams, "reference": reference}, chosen, processes, context
            )
            context.keep({"batch": BATCH, "steps": steps, PARTIAL: True})
    return {"batch": BATCH, "steps": steps}


@measurement("equal-arithmetic", CPU, "A1 A9 Q2", many_cores=True)
def equal_arithmetic(context: Context) -> Values:
    """Time steps of two networks with 1 to all threads, with minibatches of 32 and 1,024."""
    cases = dict(list(SCALED.items())[:1]) if context.quick else SCALED
    with Processes(context.cores) as processes:
        specs = {case: {"network": network_name(n), "batch": b} for case, (n, b) in cases.items()}
        compile_first(processes, list(specs.values()))
        teams = {f"threads {n}": processes.single(n) for n in context.counts}
        found = {}
        for case, spec in specs.items():
            context.say(case)
            chosen = {team: _spec(team, **spec) for team in teams}
            found[case] = measure_specs(teams, chosen, processes, context)
    return {"cases": found}


@measurement("strategies", CPU, "B8 Q21 Q22 Q23", many_cores=True)
def strategies(context: Context) -> Values:
    """Time steps of the solar network, mirrored and central, on the same global minibatch."""
    batch = 16 if context.quick else SOLAR_BATCH
    with Processes(context.cores) as processes:
        context.say("compiling")
        settings: dict[str, Any] = {"network": "solar", "batch": batch}
        shares = sorted({batch // n for n in context.counts}, reverse=True)
        compile_first(processes, [{**settings, "batch": share} for share in shares])
        teams = {"threads 1": processes.single(1)}
        chosen = {"threads 1": _spec("threads 1", **settings)}
        for n in context.counts[1:]:
            team = processes.ranks(require_mpi(), n)
            for strategy, options in STRATEGIES.items():
                name = f"{strategy}, ranks {n}"
                teams[name] = team
                chosen[name] = _spec(f"ranks {n}", **settings, **options)
        context.say("timing")
        steps = measure_specs(teams, chosen, processes, context, STRATEGY_ROUNDS)
        return {"batch": batch, "steps": steps}
