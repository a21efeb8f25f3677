"""Ranks with one thread each: weak and strong scaling, relative to independent copies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.coarse_check import WrongResultError
from benchmarks.node.rounds import Entry
from benchmarks.node.workers.processes import Processes, Team, load_results
from benchmarks.report import COPIES, OURS
from benchmarks.session import Session
from benchmarks.tables import DDP_MODES

SECTION = "ranks"
OVER_MPI, DDP, ALONE = "dptrain, MPI", "PyTorch DDP", "alone"
IN_STEP = "copies that meet"
"""Independent copies that wait for each other after each step, and sum nothing."""
LOSS_TOLERANCE = 1e-4
"""Allowed relative difference of the losses of two steps from those of a single rank."""


@dataclass(frozen=True)
class Case:
    """A scaling study.

    Attributes:
        network: its name.
        scaling: ``weak`` or ``strong``.
        samples: per rank (weak), or of the global batch (strong).
    """

    network: str
    scaling: str
    samples: int

    def batch(self, ranks: int) -> int:
        """Return the global batch size."""
        return self.samples * ranks if self.scaling == "weak" else self.samples

    def alone(self) -> int:
        """Return the batch size of the single process to which ranks are compared."""
        return self.samples

    def __str__(self) -> str:
        each = "a rank" if self.scaling == "weak" else "in all"
        return f"{self.network}, {self.scaling}, {self.samples} samples {each}"


CASES = (Case("model0", "weak", 64), Case("cifar", "weak", 32), Case("model0", "strong", 256))


def measure_ranks(session: Session) -> None:
    """Measure every case with 1 … all ranks."""
    cores, counts = session.settings.cores, session.counts()
    names = session.networks(("model0", "cifar"))
    cases = [case for case in CASES if case.network in names]
    if not session.settings.mpis:
        session.report.missing[SECTION] = "no mpirun"
        return
    with Processes(cores) as processes:
        copies = processes.copies(max(counts))
        for ranks in counts:
            if session.in_time(f"{ranks} ranks"):
                _measure_count(session, processes, copies, ranks, cases)


def _measure_count(
    session: Session, processes: Processes, copies: Team, ranks: int, cases: list[Case]
) -> None:
    session.progress.step(f"ranks: starting {ranks} ranks")
    mpi = session.settings.mpis[0]
    team = processes.ranks(mpi, ranks) if ranks > 1 else processes.single(1)
    torch = processes.copies(ranks)
    rendezvous = str(processes.temporary_file())
    for case in cases:
        session.progress.step(f"{ranks} ranks, {case}")
        entries = _build(session, processes, team, copies, case, ranks)
        entries |= _build_ddp(session, torch, case, ranks, rendezvous)
        session.measure(
            SECTION, entries, network=case.network, scaling=case.scaling, samples=case.samples,
            ranks=ranks, mpi=mpi.name,
        )  # fmt: skip
    processes.stop(team)
    processes.stop(torch)


def _build(
    session: Session, processes: Processes, team: Team, copies: Team, case: Case, ranks: int
) -> dict[str, Entry]:
    """Build ranks, copies and the single process, and check the losses of the ranks."""
    spec: dict[str, Any] = {"network": case.network, "threads": 1, "ranks": ranks}
    whole, share = case.batch(ranks), case.batch(ranks) // ranks
    one = {**spec, "ranks": 1}
    single = Team(copies.workers[:1])
    expected = processes.temporary_file(".npz")
    single.build("whole", "dptrain engine", {**one, "batch": whole}, expected)
    single.drop("whole")
    single.build(ALONE, "dptrain engine", {**one, "batch": case.alone()})
    group = Team(copies.workers[:ranks])
    group.build(COPIES, "dptrain engine", {**one, "batch": share})
    entries = {ALONE: Entry(single, ALONE), COPIES: Entry(group, COPIES)}
    if ranks > 1:
        options = {**spec, "batch": whole}
        if session.build(team, IN_STEP, "dptrain copy", options, name=IN_STEP):
            entries[IN_STEP] = Entry(team, IN_STEP)
    transports = {OURS: "auto", OVER_MPI: "mpi"} if ranks > 1 else {OURS: "auto"}
    for program, transport in transports.items():
        path = processes.temporary_file(".npz")
        options = {**spec, "batch": whole, "transport": transport}
        if not session.build(team, program, "dptrain engine", options, path, name=program):
            continue
        name = f"{program}, {ranks} ranks, {case}"
        if session.accept(partial(require_losses, name, expected, path)):
            entries[program] = Entry(team, program)
    return entries


def _build_ddp(
    session: Session, torch: Team, case: Case, ranks: int, rendezvous: str
) -> dict[str, Entry]:
    entries = {}
    for program in DDP_MODES:
        spec = {
            "network": case.network, "batch": case.batch(ranks), "threads": 1, "ranks": ranks,
            "mode": program.removeprefix(f"{DDP} "), "rendezvous": rendezvous,
        }  # fmt: skip
        if session.build(torch, program, DDP, spec, name=program):
            group = Team(torch.workers, shares_steps=True)
            entries[program] = Entry(group, program, peer_of=DDP)
    return entries


def require_losses(case: str, expected_file: Path, found_file: Path) -> None:
    """Check that ranks have the losses of a single process on the same global minibatches.

    Raises:
        WrongResultError: they differ.
    """
    expected, found = (load_results(path)["losses"] for path in (expected_file, found_file))
    if not (np.abs(found / expected - 1.0) <= LOSS_TOLERANCE).all():
        raise WrongResultError(f"{case}: losses are {found}, those of one rank {expected}")
