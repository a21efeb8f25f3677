"""What the sections of a run share: settings, progress, results."""

from __future__ import annotations

import gc
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.coarse_check import COARSE, WrongResultError, require_agreement
from benchmarks.machine import load
from benchmarks.node.mpi import Mpi
from benchmarks.node.rounds import Entry
from benchmarks.node.workers.processes import Team, WorkerError
from benchmarks.node.workers.running import MissingError
from benchmarks.progress import Progress
from benchmarks.report import Report, Row
from benchmarks.timing import Series, measure


@dataclass(frozen=True)
class Cases:
    """Cases of a section.

    Attributes:
        networks, batches, precisions: names and sizes.
        compiled: batch sizes that also run with torch.compile.
    """

    networks: tuple[str, ...]
    batches: tuple[int, ...]
    precisions: tuple[str, ...] = ("fp32",)
    compiled: tuple[int, ...] = ()

    def replaced(self, settings: Settings) -> Cases:
        """Return these cases with the values of the command line, if there are any."""
        return replace(
            self,
            networks=settings.networks or self.networks,
            batches=settings.batches or self.batches,
            precisions=settings.precisions or self.precisions,
            compiled=self.compiled if settings.compiled is None else settings.compiled,
        )


@dataclass(frozen=True)
class Settings:
    """Settings of a run; values that are empty or None are those of each section.

    Attributes:
        sections: parts of the run, in order.
        networks, batches, precisions: names and sizes.
        compiled: batch sizes that also run with torch.compile.
        rounds: alternating rounds.
        launches: launches of each job of several GPUs.
        quick: fewer cases.
        cores: numbers of the cores that may be used.
        counts: numbers of threads and ranks.
        mpis: MPI libraries; the first one launches dptrain.
        block_s: time of a program in a round.
        section_s: time after which a section starts no further rounds; each case gets two.
    """

    sections: tuple[str, ...]
    networks: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    precisions: tuple[str, ...] = ()
    compiled: tuple[int, ...] | None = None
    rounds: int = 3
    launches: int = 3
    quick: bool = False
    cores: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    mpis: tuple[Mpi, ...] = ()
    block_s: float = 0.25
    section_s: float = 540.0


@dataclass
class Session:
    """A run: its settings and what has been found so far.

    Attributes:
        report: the results.
        save: stores the results so far.
        facts: versions and other facts that programs report.
        deadline: reading of `time.monotonic` after which the section starts no further rounds.
    """

    settings: Settings
    progress: Progress
    report: Report = field(default_factory=lambda: Report({}))
    save: Callable[[Report], object] = lambda report: None
    facts: dict[str, Any] = field(default_factory=dict)
    deadline: float = 0.0

    def begin(self, section: str) -> None:
        """Start a section and its clock."""
        self.report.rows.setdefault(section, [])
        self.deadline = time.monotonic() + self.settings.section_s

    def in_time(self, case: str) -> bool:
        """Return whether a case can still start; report it otherwise."""
        if time.monotonic() < self.deadline:
            return True
        self.report.missing[case] = (
            f"not measured: the section had used its {self.settings.section_s:.0f} s"
        )
        return False

    def counts(self, default: tuple[int, ...] = ()) -> list[int]:
        """Return the numbers of threads or ranks: those chosen, or those that have a core each.

        Args:
            default: numbers of the section; by default the powers of 2 and all cores.
        """
        cores = max(len(self.settings.cores), 1)
        powers = (*(2**i for i in range(cores.bit_length())), cores)
        if self.settings.quick and not default:
            powers = (1, cores)
        return sorted({min(count, cores) for count in self.settings.counts or default or powers})

    def networks(self, default: tuple[str, ...]) -> tuple[str, ...]:
        """Return the chosen ones of a section's networks."""
        chosen = self.settings.networks
        return tuple(n for n in default if n in chosen) if chosen else default

    def add(self, section: str, series: Series | None, **facts: Any) -> Row:
        """Store the result of a program and return it."""
        row = {**facts, **({} if series is None else series.as_dict())}
        self.report.rows.setdefault(section, []).append(row)
        return row

    def measure(
        self, section: str, entries: Mapping[str, Entry], *, block_s: float = math.inf,
        **facts: Any,
    ) -> None:  # fmt: skip
        """Time programs of worker processes by name, store their rows, and release them.

        Args:
            section: of the rows.
            entries: the programs; a row has the name as ``program``, and the facts of the entry.
            block_s: longest time of a program in a round.
            facts: of all rows.
        """
        block_s = min(self.settings.block_s, block_s)
        found = measure(entries, rounds=self.settings.rounds, block_s=block_s, limit=self.deadline)
        for program, series in found.items():
            self.add(section, series, **{"program": program, **facts, **entries[program].facts})
        for entry in entries.values():
            entry.team.drop(entry.key)

    def attempt(self, program: str, action: Callable[[], Any]) -> bool:
        """Run `action`; if something is missing, note the reason and return False."""
        try:
            action()
        except (MissingError, WorkerError) as error:
            self.report.missing.setdefault(program, str(error).strip().splitlines()[-1])
            return False
        return True

    @contextmanager
    def reported(self, case: str, *, ours: bool = True) -> Iterator[None]:
        """Show what is measured, and note an error or a wrong result instead of raising it.

        Libraries raise any kind of exception; the report lists what failed, and why.

        Args:
            case: names what is measured.
            ours: True if it is a program of dptrain.
        """
        self.progress.step(case)
        try:
            yield
        except WrongResultError as error:
            self.report.wrong.append(str(error))
        except Exception as error:
            self.report.missing[case] = reason(error)
            if ours:
                self.report.failed.append(case)

    def accept(self, check: Callable[[], object]) -> bool:
        """Run a check; if a result is wrong, note it and return False: it must not be timed."""
        try:
            check()
        except WrongResultError as error:
            self.report.wrong.append(str(error))
            return False
        return True

    def build(
        self, team: Team, key: str, program: str, spec: Mapping[str, Any],
        results: Path | None = None, *, name: str = "",
    ) -> bool:  # fmt: skip
        """Build a program in a team; if it is missing, note the reason and return False.

        Args:
            team: the processes.
            key: names the program in later requests.
            program: one of `benchmarks.node.workers.programs.PROGRAMS`.
            spec: its specification.
            results: file for the results of its check; None makes no check.
            name: of the program in the report; `program` if it is empty.
        """
        team.begin_build(key, program, spec, results)
        return self.end_build(team, name or program)

    def end_build(self, team: Team, name: str) -> bool:
        """Wait for a build that was requested; if it is missing, note it and return False."""

        def action() -> None:
            for fact, value in team.end_build().items():
                if fact not in ("bytes", "transport", "strategy"):
                    self.facts[fact] = value

        return self.attempt(name, action)

    def compare(
        self,
        case: str,
        ours: Mapping[str, Any],
        theirs: Mapping[str, Any],
        peer: str,
        allowed: float = COARSE,
    ) -> bool:
        """Return whether results agree with dptrain's; note it if they do not.

        `allowed` is passed to `require_agreement`.
        """

        def check() -> None:
            share = require_agreement(case, ours, theirs, peer, allowed)
            self.report.checks[f"{case}, {peer}"] = share

        return self.accept(check)


def run_sections(session: Session, sections: Mapping[str, Callable[[Session], None]]) -> Report:
    """Run the chosen sections and return their results.

    SIGINT (Ctrl-C) and SIGTERM end the measurements; the results so far are returned.
    """
    report, section = session.report, ""
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for section in session.settings.sections:
            try:
                session.begin(section)
                sections[section](session)
            except (MissingError, WorkerError) as error:
                # The results of the other sections remain.
                report.missing[section] = str(error)
            session.save(report)
    except KeyboardInterrupt:
        report.missing[section] = "interrupted; the report has the results up to then"
    finally:
        signal.signal(signal.SIGTERM, handler)
    report.rows = {name: rows for name, rows in report.rows.items() if rows}
    report.about.setdefault("versions", {}).update(session.facts)
    report.about["load at the end"] = load()
    session.save(report)
    return report


def reason(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def release_memory() -> None:
    """Return unused cached memory of both libraries to the GPU."""
    gc.collect()
    torch, cupy = (sys.modules.get(name) for name in ("torch", "cupy"))
    if torch is not None:
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if cupy is not None:
        cupy.get_default_memory_pool().free_all_blocks()
