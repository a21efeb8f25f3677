"""Run the sections."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping

from benchmarks.machine import about
from benchmarks.node.inference import measure_inference
from benchmarks.node.mpi import find_mpis
from benchmarks.node.ranks import measure_ranks, measure_two_cores
from benchmarks.node.report import Report
from benchmarks.node.session import Session, Settings
from benchmarks.node.shards import measure_shards
from benchmarks.node.sums import measure_sums
from benchmarks.node.threads import measure_outside, measure_residual, measure_threads
from benchmarks.node.workers.processes import WorkerError
from benchmarks.node.workers.running import MissingError
from benchmarks.outside import find_network
from benchmarks.progress import Progress
from dptrain.errors import UserError, suggest
from dptrain.machine import own_cores

SECTIONS: Mapping[str, Callable[[Session], None]] = {
    "threads": measure_threads,
    "ranks": measure_ranks,
    "sums": measure_sums,
    "two-cores": measure_two_cores,
    "shards": measure_shards,
    "inference": measure_inference,
    "outside": measure_outside,
    "residual": measure_residual,
}
BLOCK_S, QUICK_BLOCK_S = 0.25, 0.1
ROUNDS, QUICK_ROUNDS = 9, 3
QUICK_NETWORKS = ("model0", "lenet5")


def make_settings(
    sections: str,
    *,
    networks: str | None,
    counts: str | None,
    cores: int | None,
    mpirun: tuple[str, ...],
    rounds: int | None,
    section_minutes: float,
    quick: bool,
) -> Settings:
    """Return the settings of a run from the options of the command line.

    Raises:
        UserError: an unknown section or network, or a number that is not one.
    """
    chosen = tuple(sections.split(","))
    for section in chosen:
        if section not in SECTIONS:
            raise UserError(
                f"section is '{section}'; expected one of {', '.join(SECTIONS)}"
                f"{suggest(section, SECTIONS)}"
            )
    available = tuple(sorted(own_cores()))[:cores]
    for name in networks.split(",") if networks else ():
        find_network(name)
    names = tuple(networks.split(",")) if networks else (QUICK_NETWORKS if quick else None)
    return Settings(
        sections=chosen,
        cores=available,
        counts=_counts(counts, len(available), quick=quick),
        networks=names,
        mpis=tuple(find_mpis(mpirun)),
        rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
        block_s=QUICK_BLOCK_S if quick else BLOCK_S,
        section_s=60.0 * section_minutes,
        quick=quick,
    )


def _counts(text: str | None, cores: int, *, quick: bool) -> tuple[int, ...]:
    if text is not None:
        try:
            return tuple(int(number) for number in text.split(","))
        except ValueError:
            raise UserError(f"counts is '{text}'; expected numbers such as 1,2,4") from None
    powers = [2**i for i in range(cores.bit_length()) if 2**i < cores]
    if quick:
        powers = powers[:1]
    return (*powers, cores)


def _run_section(section: str, session: Session) -> None:
    try:
        SECTIONS[section](session)
    except (MissingError, WorkerError) as error:
        # The results of the other sections remain.
        session.missing[section] = str(error)
        print(f"{section}: {error}", file=sys.stderr)


def run(settings: Settings, progress: Progress) -> Report:
    """Run the sections and return their results.

    SIGINT (Ctrl-C) and SIGTERM end the measurements; the results so far are returned.
    """
    conditions = about(
        rounds=settings.rounds,
        **{"time of a program in a round": f"{settings.block_s:g} s, at least one step"},
        sections=list(settings.sections),
        counts=list(settings.counts),
        MPI=[mpi.name for mpi in settings.mpis] or "none",
    )
    session = Session(settings, progress)
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for section in settings.sections:
            _run_section(section, session)
    except KeyboardInterrupt:
        session.missing[section] = "interrupted; the report has the results up to then"
    finally:
        signal.signal(signal.SIGTERM, handler)
    versions = {**conditions["versions"], **session.facts}
    return Report(
        {**conditions, "versions": versions},
        session.rows,
        session.missing,
        session.checks,
        session.wrong,
    )
