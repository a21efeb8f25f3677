"""What the sections of a run share: settings, progress, results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.coarse_check import WrongResultError, require_agreement
from benchmarks.node.mpi import Mpi
from benchmarks.node.rounds import Series
from benchmarks.node.workers.processes import Team, WorkerError, load_results
from benchmarks.node.workers.running import MissingError, Results
from benchmarks.progress import Progress

Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        sections: parts of the run, in order.
        cores: numbers of the cores that may be used.
        counts: numbers of threads and ranks.
        networks: names; None for those of each section.
        mpis: MPI libraries; the first one launches dptrain.
        rounds: alternating rounds.
        block_s: time of a program in a round.
        section_s: time after which a section starts no further rounds; each case gets two.
        quick: fewer cases.
    """

    sections: tuple[str, ...]
    cores: tuple[int, ...]
    counts: tuple[int, ...]
    networks: tuple[str, ...] | None
    mpis: tuple[Mpi, ...]
    rounds: int
    block_s: float
    section_s: float
    quick: bool


@dataclass
class Session:
    """A run: its settings and what has been found so far.

    Attributes:
        rows: results by section.
        missing: what could not be measured, with the reason, by program.
        wrong: programs with wrong results, which are not timed.
        checks: largest relative difference from dptrain's results by case.
        facts: versions and other facts that programs report.
    """

    settings: Settings
    progress: Progress
    rows: dict[str, list[Row]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    checks: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    deadline: float = 0.0

    def begin(self, section: str) -> None:
        """Start a section and its clock."""
        self.rows.setdefault(section, [])
        self.deadline = time.monotonic() + self.settings.section_s

    def in_time(self, case: str) -> bool:
        """Return whether a case can still start; report it otherwise."""
        if time.monotonic() < self.deadline:
            return True
        self.missing[case] = (
            f"not measured: the section had used its {self.settings.section_s:.0f} s"
        )
        return False

    def networks(self, default: tuple[str, ...]) -> tuple[str, ...]:
        """Return the chosen ones of a section's networks."""
        chosen = self.settings.networks
        return default if chosen is None else tuple(n for n in default if n in chosen)

    def add(self, section: str, series: Series, **facts: Any) -> Row:
        """Store a result and return it."""
        row = {**facts, **series.as_dict(), "medians_ms": series.medians, "walls_ms": series.walls}
        self.rows[section].append(row)
        return row

    def attempt(self, program: str, action: Callable[[], Any]) -> bool:
        """Run `action`; if something is missing, note the reason and return False."""
        try:
            action()
        except (MissingError, WorkerError) as error:
            self.missing.setdefault(program, str(error).strip().splitlines()[-1])
            return False
        return True

    def accept(self, check: Callable[[], object]) -> bool:
        """Run a check; if a result is wrong, note it and return False: it must not be timed."""
        try:
            check()
        except WrongResultError as error:
            self.wrong.append(str(error))
            return False
        return True

    def build(
        self,
        team: Team,
        key: str,
        program: str,
        spec: Mapping[str, Any],
        results: Path | None = None,
        *,
        name: str = "",
    ) -> bool:
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
        ours: Results,
        path: Path,
        peer: str,
        flips: Callable[[], Sequence[Results] | None] | None = None,
    ) -> bool:
        """Return whether the results in a file agree with dptrain's; note it if they do not.

        `flips` is passed to `require_agreement`.
        """

        def check() -> None:
            theirs = load_results(path)
            self.checks[f"{case}, {peer}"] = require_agreement(case, ours, theirs, peer, flips)

        return self.accept(check)
