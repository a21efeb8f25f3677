"""The sum of gradients and the update alone, next to MPI, gloo and the memory traffic alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.coarse_check import WrongResultError
from benchmarks.node.rounds import Entry
from benchmarks.node.sum_parts import parts_of_sum
from benchmarks.node.traffic import Traffic, compile_traffic
from benchmarks.node.workers.processes import Processes, Team, WorkerError, load_results
from benchmarks.node.workers.running import MissingError
from benchmarks.report import OURS
from benchmarks.session import Session
from benchmarks.timing import Series, measure

SECTION = "sums"
NETWORKS = {"model0": 210_998, "cifar": 1_068_298}
"""Networks by the number of their parameters: 0.84 MB and 4.27 MB."""
TRAFFIC, CENTRAL = "traffic.c", "dptrain, central"
METHODS: dict[str, dict[str, Any]] = {
    OURS: {"transport": "auto"},
    "dptrain, MPI": {"transport": "mpi"},
    CENTRAL: {"transport": "auto", "strategy": "central"},
}
PERIOD_NS = 500_000
"""Time from the start of one sum to the next, for each megabyte and rank: writing the gradients and
the slowest method need less."""
MIN_PERIOD_NS = 6_000_000


def measure_sums(session: Session) -> None:
    """Measure both sizes with 2 … all ranks."""
    cores = session.settings.cores
    counts = [count for count in session.counts() if count > 1] or [2]
    networks = session.networks(tuple(NETWORKS))
    with Processes(cores) as processes:
        traffic: list[Traffic] = []
        session.attempt(TRAFFIC, lambda: traffic.append(compile_traffic(processes.folder)))
        for ranks in counts:
            if session.in_time(f"sums of {ranks} ranks"):
                _measure_count(session, processes, ranks, networks, traffic)


def _measure_count(
    session: Session,
    processes: Processes,
    ranks: int,
    networks: tuple[str, ...],
    traffic: list[Traffic],
) -> None:
    session.progress.step(f"sums: starting {ranks} ranks")
    teams: dict[str, Team] = {}
    for mpi in session.settings.mpis:
        try:
            teams[mpi.name] = processes.ranks(mpi, ranks)
        except (MissingError, WorkerError) as error:
            session.report.missing[mpi.name] = str(error).strip().splitlines()[-1]
    gloo = Team(processes.copies(ranks).workers, shares_steps=True)
    rendezvous = str(processes.temporary_file())
    for network in networks:
        session.progress.step(f"sums: {ranks} ranks, {network}")
        spec = {
            "network": network, "batch": ranks, "threads": 1, "ranks": ranks, "launched": True,
            "elements": NETWORKS[network], "rendezvous": rendezvous,
        }  # fmt: skip
        entries = _build(session, processes, teams, gloo, spec)
        found = measure(
            entries, rounds=session.settings.rounds, block_s=0.0, limit=session.deadline
        )
        if traffic:
            repeats = _num_sums(session)
            found |= _run_traffic(session, traffic[0], ranks, NETWORKS[network], repeats)
        facts = {OURS: _parts(entries[OURS])} if OURS in entries else {}
        for program, series in found.items():
            session.add(
                SECTION, series, network=network, bytes=4 * NETWORKS[network], ranks=ranks,
                program=program, **facts.get(program, {}),
            )  # fmt: skip
        for entry in entries.values():
            entry.team.drop(entry.key)
    for team in (*teams.values(), gloo):
        processes.stop(team)


def _build(
    session: Session, processes: Processes, teams: dict[str, Team], gloo: Team, spec: dict[str, Any]
) -> dict[str, Entry]:
    """Build every method, and check the sums of each."""
    programs = [
        (method, "dptrain sum", team, options)
        for method, options in METHODS.items()
        for team in list(teams.values())[:1]
    ]
    programs += [(name, "MPI all-reduce", team, {}) for name, team in teams.items()]
    programs += [("gloo", "PyTorch all-reduce", gloo, {})]
    megabytes, ranks = spec["elements"] * 4e-6, spec["ranks"]
    period = max(int(PERIOD_NS * megabytes * ranks), MIN_PERIOD_NS)
    entries = {}
    for name, program, team, options in programs:
        path = processes.temporary_file(".npz")
        case = f"sum of {spec['network']}, {ranks} ranks, {name}"
        if session.build(
            team, name, program, {**spec, **options}, path, name=name
        ) and session.accept(partial(require_sum, case, path, ranks)):
            session.report.checks[case] = 0.0
            entries[name] = Entry(team, name, period_ns=period, steps=_num_sums(session))
    return entries


def _parts(entry: Entry) -> dict[str, Any]:
    """Return the parts of the sums so far."""
    stamps = [details["stamps"] for details in entry.team.details(entry.key)]
    return {"parts_us": parts_of_sum(stamps)}


def require_sum(case: str, path: Path, ranks: int) -> None:
    """Check the numbers of wrong elements that the ranks have stored.

    Raises:
        WrongResultError: a rank has found one.
    """
    files = [path, *(Path(f"{path}.rank{rank}.npz") for rank in range(1, ranks))]
    for rank, file in enumerate(files):
        if wrong := int(load_results(file)["wrong"]):
            raise WrongResultError(f"{case}: rank {rank} has {wrong} wrong elements")


def _num_sums(session: Session) -> int:
    return 10 if session.settings.quick else 20


def _run_traffic(
    session: Session, traffic: Traffic, ranks: int, elements: int, repeats: int
) -> dict[str, Series]:
    cores = session.settings.cores
    medians: list[float] = []

    def run() -> None:
        for _ in range(session.settings.rounds):
            times = traffic.run(ranks, elements, repeats, cores)
            medians.append(sorted(times)[len(times) // 2] / 1e6)

    if not session.accept(run):
        return {}
    return {TRAFFIC: Series(tuple(medians), tuple(medians), repeats * len(medians))}
