"""The cost of micro-shards: steps with and without them, for arrangements of ranks and threads."""

from __future__ import annotations

from typing import Any

from benchmarks.node.rounds import Entry
from benchmarks.node.workers.processes import Processes, Team
from benchmarks.session import Session

SECTION = "shards"
SHARDS, SAMPLES = 8, 16
"""Number of micro-shards, and samples of each."""
NETWORKS = ("model0", "cifar", "solar")
ARRANGEMENTS = ((1, 1), (1, 8), (8, 1), (2, 4))
"""Ranks and threads of each rank."""
WITH, WITHOUT = "with shards", "without shards"


def measure_shards(session: Session) -> None:
    """Measure every arrangement that has a core for each thread."""
    cores, mpis = session.settings.cores, session.settings.mpis
    with Processes(cores) as processes:
        for ranks, threads in ARRANGEMENTS:
            case = f"shards, {ranks} ranks × {threads} threads"
            if ranks * threads > len(cores):
                session.report.missing[case] = (
                    f"needs {ranks * threads} cores; there are {len(cores)}"
                )
            elif ranks > 1 and not mpis:
                session.report.missing[case] = "no mpirun"
            elif session.in_time(case):
                _measure_arrangement(session, processes, ranks, threads)


def _measure_arrangement(session: Session, processes: Processes, ranks: int, threads: int) -> None:
    session.progress.step(f"shards: starting {ranks} ranks × {threads} threads")
    single = ranks == 1
    team: Team = (
        processes.single(threads) if single
        else processes.ranks(session.settings.mpis[0], ranks, threads)
    )  # fmt: skip
    for network in session.networks(NETWORKS):
        session.progress.step(f"shards: {network}, {ranks} ranks × {threads} threads")
        spec: dict[str, Any] = {
            "network": network, "batch": SHARDS * SAMPLES, "threads": threads, "ranks": ranks
        }  # fmt: skip
        entries = {}
        for program, shards in ((WITHOUT, 0), (WITH, SHARDS)):
            if session.build(
                team, program, "dptrain engine", {**spec, "shards": shards}, name=program
            ):
                entries[program] = Entry(team, program)
        if len(entries) == 2:
            session.measure(SECTION, entries, network=network, ranks=ranks, threads=threads)
    processes.stop(team)
