"""Inference at small batches: dptrain, ONNX Runtime, OpenVINO, PyTorch."""

from __future__ import annotations

from typing import Any

from benchmarks.node.rounds import Entry, measure
from benchmarks.node.session import Session
from benchmarks.node.workers.processes import Processes, Team, load_results
from benchmarks.outside import OUTSIDE

SECTION = "inference"
NETWORKS = ("model0", "model1", "model2", "cifar", "solar")
BATCHES, THREADS = (1, 8, 32), (1, 8)
BLOCK_S = 0.04
OURS = "dptrain"
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: ("dptrain inference", {}),
    "ONNX Runtime": ("ONNX Runtime inference", {}),
    "OpenVINO": ("OpenVINO inference", {}),
    "PyTorch eager": ("PyTorch inference", {"mode": "eager"}),
    "PyTorch channels_last": ("PyTorch inference", {"mode": "channels_last"}),
}
PEERS = tuple(name for name in PROGRAMS if name != OURS)


def measure_inference(session: Session) -> None:
    """Measure each network with every batch size and number of threads in the same rounds."""
    session.begin(SECTION)
    counts = sorted({min(count, len(session.settings.cores)) for count in THREADS})
    with Processes(session.settings.cores) as processes:
        session.progress.step("inference: starting processes")
        teams = {(c, name): processes.single(c) for c in counts for name in PROGRAMS}
        for network in session.networks((*NETWORKS, *OUTSIDE)):
            if session.in_time(f"inference of {network}"):
                _measure_network(session, processes, teams, network)


def _measure_network(
    session: Session, processes: Processes, teams: dict[tuple[int, str], Team], network: str
) -> None:
    session.progress.step(f"inference: building {network}")
    entries: dict[str, Entry] = {}
    for batch in BATCHES:
        entries |= _build(session, processes, teams, network, batch)
    session.progress.step(f"inference: measuring {network}")
    block_s = min(BLOCK_S, session.settings.block_s)
    found = measure(
        entries, rounds=session.settings.rounds, block_s=block_s, limit=session.deadline
    )
    for key, series in found.items():
        program, threads, batch_size = key.split("/")
        session.add(
            SECTION, series, network=network, batch=int(batch_size), program=program,
            threads=int(threads),
        )  # fmt: skip
    for entry in entries.values():
        entry.team.drop(entry.key)


def _build(
    session: Session,
    processes: Processes,
    teams: dict[tuple[int, str], Team],
    network: str,
    batch: int,
) -> dict[str, Entry]:
    """Build every program at one batch size at the same time, and compare their outputs."""
    key, entries = f"{network}/{batch}", dict[str, Entry]()
    paths = {case: processes.temporary_file(".npz") for case in teams}
    for (threads, name), team in teams.items():
        program, options = PROGRAMS[name]
        spec = {"network": network, "batch": batch, "threads": threads, **options}
        team.begin_build(key, program, spec, paths[threads, name])
    built = {case for case, team in teams.items() if session.end_build(team, case[1])}
    for threads, name in teams:
        if (threads, name) not in built or (threads, OURS) not in built:
            continue
        case = f"inference of {network} at batch {batch}, {threads} threads"
        ours = load_results(paths[threads, OURS])
        if name != OURS and not session.compare(case, ours, paths[threads, name], name):
            continue
        peer_of = "" if name == OURS else f"{threads}/{batch}"
        entries[f"{name}/{threads}/{batch}"] = Entry(teams[threads, name], key, peer_of)
    return entries
