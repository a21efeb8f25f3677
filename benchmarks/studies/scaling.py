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
BATCH, LARGE_BATCH, SOLAR_BATCH = 32, 1024, 128
ROUNDS, BLOCK_S = 7, 0.15
STRATEGY_ROUNDS = 11
"""More rounds, because the step of one rank had two groups of times in five."""
SCALED = ("model0", LOG)
"""Networks on which threads are compared at equal arithmetic per step."""
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


def measure_cases(
    context: Context,
    cases: Mapping[str, Spec],
    programs: Mapping[str, Spec],
    compiled: Sequence[Spec],
    rounds: int = ROUNDS,
) -> dict[str, Values]:
    """Time all programs of each case in alternating rounds, and compare their losses.

    Args:
        context: the machine and options.
        cases: network and batch size by name.
        programs: threads, ranks and further settings by name; the first is the one with which
            the losses of others are compared. Programs with as many threads and ranks share their
            processes.
        compiled: networks and batch sizes whose kernels are compiled before.
        rounds: number of rounds.
    """
    teams: dict[tuple[int, int], Team] = {}
    found = {}
    with Processes(context.cores) as processes:
        context.say("compiling")
        compile_first(processes, compiled)
        for spec in programs.values():
            threads, ranks = key = spec["threads"], spec["ranks"]
            if key not in teams:
                alone = ranks == 1
                teams[key] = processes.single(threads) if alone else (
                    processes.ranks(require_mpi(), ranks))  # fmt: skip
        chosen = {name: teams[spec["threads"], spec["ranks"]] for name, spec in programs.items()}
        for case, own in cases.items():
            context.say(case)
            specs = {name: {**spec, **own} for name, spec in programs.items()}
            found[case] = _measure_case(chosen, specs, processes, context, rounds)
            context.keep({"cases": found, PARTIAL: True})
    return found


def _measure_case(
    teams: Mapping[str, Team],
    specs: Mapping[str, Spec],
    processes: Processes,
    context: Context,
    rounds: int,
) -> Values:
    """Build a program in each team, and time all in alternating rounds."""
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
    losses = {name: load_results(paths[name])["losses"] for name in names}
    first = losses[names[0]]
    return {
        name: {
            **found[name].as_dict(),
            "medians_ms": list(found[name].medians),
            "loss_difference": float(np.max(np.abs(losses[name] / first - 1.0))),
        }
        for name in names
    }


def _threads(context: Context) -> dict[str, Spec]:
    return {f"threads {n}": {"threads": n, "ranks": 1} for n in context.counts}


def _ranks(context: Context) -> dict[str, Spec]:
    return {f"ranks {n}": {"threads": 1, "ranks": n} for n in context.counts[1:]}


@measurement("speed-up", CPU, many_cores=True)
def speed_up(context: Context) -> Values:
    """Time training steps of study A's networks with the reference, threads and ranks."""
    names = STUDY_A[:1] if context.quick else STUDY_A
    cases = {name: {"network": network_name(name), "batch": BATCH} for name in names}
    reference = {"threads": 1, "ranks": 1, "backend": "reference"}
    programs = {**_threads(context), **_ranks(context), "reference": reference}
    return {"batch": BATCH,
            "steps": measure_cases(context, cases, programs, list(cases.values()))}  # fmt: skip


@measurement("equal-arithmetic", CPU, many_cores=True)
def equal_arithmetic(context: Context) -> Values:
    """Time steps of two networks with 1 to all threads, with minibatches of 32 and 1,024."""
    cases = {
        f"{name}, batch {batch}": {"network": network_name(name), "batch": batch}
        for name in SCALED for batch in (BATCH, LARGE_BATCH)
    }  # fmt: skip
    cases = dict(list(cases.items())[:1]) if context.quick else cases
    return {"cases": measure_cases(context, cases, _threads(context), list(cases.values()))}


@measurement("strategies", CPU, many_cores=True)
def strategies(context: Context) -> Values:
    """Time steps of the solar network, mirrored and central, on the same global minibatch."""
    batch = 16 if context.quick else SOLAR_BATCH
    programs: dict[str, Spec] = {"threads 1": {"threads": 1, "ranks": 1}}
    for name, spec in _ranks(context).items():
        programs |= {f"{how}, {name}": {**spec, **options} for how, options in STRATEGIES.items()}
    shares = sorted({batch // n for n in context.counts}, reverse=True)
    compiled = [{"network": "solar", "batch": share} for share in shares]
    case = {"solar": {"network": "solar", "batch": batch}}
    found = measure_cases(context, case, programs, compiled, STRATEGY_ROUNDS)
    return {"batch": batch, "steps": found["solar"]}
