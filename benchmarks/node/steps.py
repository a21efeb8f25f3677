"""Training steps and inference passes on 1 … all threads: dptrain, its peers, and copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.coarse_check import COARSE, allowed_in_updates
from benchmarks.node.rounds import Entry
from benchmarks.node.workers.processes import Processes, Team, load_results
from benchmarks.outside import OUTSIDE, find_network
from benchmarks.report import COPIES, OURS
from benchmarks.session import Session

QUICK_NETWORKS = ("model0", "lenet5")
OTHER_BATCHES = (32,)
"""Batch sizes of networks that no section names."""
CHECKED_BATCH = 32
"""Largest batch that is compared with float64."""

Peers = Mapping[str, tuple[str, dict[str, Any]]]
"""Program and options of a worker process by the name of a peer, which begins with its library."""

_MODES = ("eager", "channels_last", "compile", "compile + channels_last")
PEERS: Mapping[str, Peers] = {
    "training": {
        **{f"PyTorch {mode}": ("PyTorch training", {"mode": mode}) for mode in _MODES},
        "JAX": ("JAX training", {}),
    },
    "inference": {
        **{f"PyTorch {mode}": ("PyTorch inference", {"mode": mode}) for mode in _MODES},
        "ONNX Runtime": ("ONNX Runtime inference", {}),
        "OpenVINO": ("OpenVINO inference", {}),
    },
}


@dataclass(frozen=True)
class StepSection:
    """A section that compares steps.

    Attributes:
        task: ``training`` or ``inference``.
        batches: batch sizes by network.
        threads: numbers of threads; empty for 1 … all cores.
        with_copies: also independent copies that share the minibatch.
        is_checked: compare with float64 before anything is timed.
        block_s: longest time of a program in a round.
    """

    task: str
    batches: Mapping[str, tuple[int, ...]]
    threads: tuple[int, ...] = ()
    with_copies: bool = False
    is_checked: bool = True
    block_s: float = 1.0


_SET = ("model0", "model1", "model2", "cifar", "solar")
SECTIONS: Mapping[str, StepSection] = {
    "threads": StepSection(
        "training", {"model0": (256,), "model2": (256,), "cifar": (128,), "solar": (128,)},
        with_copies=True,
    ),
    "outside": StepSection("training", dict.fromkeys(OUTSIDE, (32,)), (1, 8)),
    "residual": StepSection(
        "training", {"resnet20": (128,), "resnet18-cifar": (128,), "resnet50": (64,)},
        is_checked=False,
    ),
    "inference": StepSection(
        "inference", dict.fromkeys((*_SET, *OUTSIDE), (1, 8, 32)), (1, 8), block_s=0.04
    ),
}  # fmt: skip


@dataclass(frozen=True)
class _Case:
    """A network and a batch size, and the processes that run it by number of threads."""

    section: str
    network: str
    batch: int
    teams: Mapping[int, Mapping[str, Team]]
    peers: Peers

    @property
    def key(self) -> str:
        return f"{self.network}/{self.batch}"

    def __str__(self) -> str:
        return f"{self.section}: {self.network} at batch {self.batch}"


def measure_steps(section: str, session: Session) -> None:
    """Measure each network with every number of threads, all in the same rounds."""
    chosen, settings = SECTIONS[section], session.settings
    counts = session.counts(chosen.threads)
    compiled = settings.compiled or ()
    with Processes(settings.cores) as processes:
        session.progress.step(f"{section}: starting processes")
        libraries = {OURS, *(name.split()[0] for name in PEERS[chosen.task])}
        teams = {n: {each: processes.single(n) for each in sorted(libraries)} for n in counts}
        copies = processes.copies(max(counts)) if chosen.with_copies else None
        for network in _networks(section, session):
            batches = settings.batches or chosen.batches.get(network, OTHER_BATCHES)
            for batch in batches:
                peers = {name: each for name, each in PEERS[chosen.task].items()
                         if batch in compiled or "compile" not in name}  # fmt: skip
                case = _Case(section, network, batch, teams, peers)
                if session.in_time(str(case)) and _is_right(session, chosen, case):
                    _measure_case(session, processes, case, copies)


def _networks(section: str, session: Session) -> tuple[str, ...]:
    """Return the networks of a section; the first one also measures those that no section names."""
    own, chosen = SECTIONS[section].batches, session.settings.networks
    if not chosen and session.settings.quick:
        chosen = QUICK_NETWORKS
    known = {name for each in SECTIONS.values() for name in each.batches}
    others = tuple(n for n in chosen if n not in known and section == next(iter(SECTIONS)))
    return (*(n for n in own if not chosen or n in chosen), *others)


def _is_right(session: Session, section: StepSection, case: _Case) -> bool:
    """Compare a training step with PyTorch in float64, if it is installed."""
    if not section.is_checked or section.task != "training":
        return True
    try:
        from benchmarks.check import check, require
    except ImportError as error:
        session.report.missing["comparison with float64"] = str(error)
        return True
    session.progress.step(f"{case}: checking")
    found = check(find_network(case.network), min(case.batch, CHECKED_BATCH))
    session.report.checks[f"{case}, float64"] = found.share
    return session.accept(partial(require, found))


def _measure_case(session: Session, processes: Processes, case: _Case, copies: Team | None) -> None:
    session.progress.step(f"{case}: building")
    entries = _build(session, processes, case)
    for count in case.teams if copies is not None else ():
        assert copies is not None
        # Single-thread copies share the minibatch.
        group, key = Team(copies.workers[:count]), f"{case.key}/{count}"
        spec = {"network": case.network, "batch": case.batch // count, "threads": 1}
        group.build(key, "dptrain training", spec)
        entries.append(_entry(group, key, COPIES, count))
    session.progress.step(f"{case}: measuring")
    session.measure(
        case.section, {f"{e.facts['program']}/{e.facts['threads']}": e for e in entries},
        block_s=SECTIONS[case.section].block_s, network=case.network, batch=case.batch,
    )  # fmt: skip


def _entry(team: Team, key: str, program: str, threads: int, peer_of: str = "") -> Entry:
    return Entry(team, key, peer_of, facts={"program": program, "threads": threads})


def _build(session: Session, processes: Processes, case: _Case) -> list[Entry]:
    """Build dptrain and its peers at the same time, and check that they compute the same."""
    task = SECTIONS[case.section].task
    specs = {n: {"network": case.network, "batch": case.batch, "threads": n} for n in case.teams}
    ours = {count: processes.temporary_file(".npz") for count in case.teams}
    peers = {(n, name): processes.temporary_file(".npz") for n in case.teams for name in case.peers}
    # The first process compiles; the others read the compiled kernels.
    for count, teams in case.teams.items():
        teams[OURS].build(case.key, f"dptrain {task}", specs[count], ours[count])
    entries = [_entry(teams[OURS], case.key, OURS, n) for n, teams in case.teams.items()]
    allowed = COARSE if task == "inference" else allowed_in_updates(find_network(case.network))
    for name, (program, options) in case.peers.items():
        for count, teams in case.teams.items():
            key, spec = f"{case.key}/{name}", {**specs[count], **options}
            teams[name.split()[0]].begin_build(key, program, spec, peers[count, name])
        for count, teams in case.teams.items():
            team, what = teams[name.split()[0]], f"{case}, {count} threads"
            if session.end_build(team, name) and session.compare(
                what, load_results(ours[count]), load_results(peers[count, name]), name, allowed
            ):
                key = f"{case.key}/{name}"
                entries.append(_entry(team, key, name, count, f"threads {count}"))
    return entries
