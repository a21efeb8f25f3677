"""Training steps with 1 … all threads: dptrain, PyTorch, JAX, and independent copies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.node.rounds import Entry, measure
from benchmarks.node.session import Session
from benchmarks.node.workers.processes import Processes, Team, load_results
from benchmarks.node.workers.running import Results
from benchmarks.outside import OUTSIDE, find_network

SECTION = "threads"
CASES = {"model0": 256, "model2": 256, "cifar": 128, "solar": 128}
"""Batch sizes."""
OUTSIDE_SECTION, OUTSIDE_BATCH, OUTSIDE_THREADS = "outside", 32, (1, 8)
RESIDUAL_SECTION = "residual"
RESIDUAL = {"resnet20": 128, "resnet18-cifar": 128, "resnet50": 64}
"""Batch sizes of networks with residual connections and batch normalisation."""
OURS, COPIES = "dptrain", "copies"
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "PyTorch eager": ("PyTorch training", {"mode": "eager"}),
    "PyTorch channels_last": ("PyTorch training", {"mode": "channels_last"}),
    "JAX": ("JAX training", {}),
}


@dataclass(frozen=True)
class _Teams:
    """Processes with a number of threads: dptrain, and one for each library."""

    ours: Team
    peers: dict[str, Team]


def measure_threads(session: Session) -> None:
    """Measure the benchmark networks with 1 … all threads, and independent copies."""
    cores = session.settings.cores
    counts = [count for count in session.settings.counts if count <= len(cores)]
    _measure_section(session, SECTION, CASES, counts, with_copies=True)


def measure_outside(session: Session) -> None:
    """Measure the networks outside the benchmark set with 1 and 8 threads."""
    cases = dict.fromkeys(OUTSIDE, OUTSIDE_BATCH)
    counts = sorted({min(count, len(session.settings.cores)) for count in OUTSIDE_THREADS})
    _measure_section(session, OUTSIDE_SECTION, cases, counts, with_copies=False)


def measure_residual(session: Session) -> None:
    """Measure networks with residual connections with 1 … all threads."""
    counts = [count for count in session.settings.counts if count <= len(session.settings.cores)]
    _measure_section(session, RESIDUAL_SECTION, RESIDUAL, counts, with_copies=False)


def _measure_section(
    session: Session, section: str, cases: dict[str, int], counts: list[int], *, with_copies: bool
) -> None:
    """Measure each network with every number of threads, all in the same rounds."""
    session.begin(section)
    with Processes(session.settings.cores) as processes:
        session.progress.step(f"{section}: starting processes")
        teams = {count: _start(processes, count) for count in counts}
        copies = processes.copies(max(counts)) if with_copies else None
        for network in session.networks(tuple(cases)):
            if session.in_time(f"{section} of {network}"):
                batch = cases[network]
                _measure_network(session, processes, teams, copies, section, network, batch)


def _start(processes: Processes, threads: int) -> _Teams:
    torch = processes.single(threads)
    jax = processes.single(threads)
    return _Teams(
        processes.single(threads),
        {name: jax if name == "JAX" else torch for name in PEERS},
    )


def _measure_network(
    session: Session,
    processes: Processes,
    teams: dict[int, _Teams],
    copies: Team | None,
    section: str,
    network: str,
    batch: int,
) -> None:
    session.progress.step(f"{section}: building {network} at batch {batch}")
    entries = _build(session, processes, teams, network, batch)
    if copies is not None:
        entries |= _build_copies(copies, list(teams), network, batch)
    session.progress.step(f"{section}: measuring {network} at batch {batch}")
    found = measure(
        entries, rounds=session.settings.rounds, block_s=session.settings.block_s,
        limit=session.deadline,
    )  # fmt: skip
    for name, series in found.items():
        program, count = name.split("/")
        session.add(
            section, series, network=network, batch=batch, program=program, threads=int(count)
        )
    for entry in entries.values():
        entry.team.drop(entry.key)


def _build(
    session: Session, processes: Processes, teams: dict[int, _Teams], network: str, batch: int
) -> dict[str, Entry]:
    """Build dptrain and its peers at the same time, and check that they compute the same."""
    entries: dict[str, Entry] = {}
    specs = {n: {"network": network, "batch": batch, "threads": n} for n in teams}
    first, *others = teams
    ours = {count: processes.temporary_file(".npz") for count in teams}
    peers = {(n, name): processes.temporary_file(".npz") for n in teams for name in PEERS}
    # The first process compiles; the others read the compiled kernels.
    teams[first].ours.build(network, "dptrain training", specs[first], ours[first])
    for count in others:
        teams[count].ours.begin_build(network, "dptrain training", specs[count], ours[count])
    for (count, name), path in peers.items():
        program, options = PEERS[name]
        spec = {**specs[count], **options}
        teams[count].peers[name].begin_build(f"{network}/{name}", program, spec, path)
    for count in others:
        teams[count].ours.end_build()
    for count, team in teams.items():
        entries[f"{OURS}/{count}"] = Entry(team.ours, network)
    for (count, name), path in peers.items():
        peer = teams[count].peers[name]
        case = f"training {network} at batch {batch}, {count} threads"
        if session.end_build(peer, name) and session.compare(
            case, load_results(ours[count]), path, name,
            partial(_flips, network, batch),
        ):  # fmt: skip
            key = f"{network}/{name}"
            entries[f"{name}/{count}"] = Entry(peer, key, peer_of=f"threads {count}")
    return entries


def _flips(network: str, batch: int) -> list[Results] | None:
    from benchmarks.kinks import update_flips

    return update_flips(find_network(network), batch)


def _build_copies(copies: Team, counts: list[int], network: str, batch: int) -> dict[str, Entry]:
    """Build single-thread copies that share a minibatch."""
    entries = {}
    for count in counts:
        group, key = Team(copies.workers[:count]), f"{network}/{count}"
        spec = {"network": network, "batch": batch // count, "threads": 1}
        group.build(key, "dptrain training", spec)
        entries[f"{COPIES}/{count}"] = Entry(group, key)
    return entries
