"""Results of runs: rows of a section, what follows from them, and their files."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import Ratio, quotient

Row = dict[str, Any]
"""A program in one case: facts of the case, ``program``, and times (`Series.as_dict`)."""

OURS, COPIES = "dptrain", "copies"
PRECISIONS = ("fp32", "tf32", "bf16")
"""Precisions, the most precise first."""

STEPS = ("threads", "outside", "residual", "inference", "training", "shapes", "fp32")
"""Sections that compare steps or passes with those of peers."""

CASE = (
    "network", "batch", "bytes", "scaling", "samples", "ranks", "threads", "gpus", "source",
    "precision", "layer", "quantity",
)  # fmt: skip
"""Facts that name a case, in which programs are compared. Rows can lack some."""


class Rows:
    """Rows of a section.

    Args:
        rows: dictionaries with the facts of a case and its times.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = list(rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, **facts: Any) -> Rows:
        """Return the rows with these facts."""
        return Rows(r for r in self._rows if all(r.get(k) == v for k, v in facts.items()))

    def one(self, **facts: Any) -> Row | None:
        """Return the last row with these facts; None if there is none."""
        found = list(self.where(**facts))
        return found[-1] if found else None

    def values(self, name: str) -> list[Any]:
        """Return the different values of a fact, in order of appearance."""
        return list(dict.fromkeys(row[name] for row in self._rows))

    def cases(self, *names: str) -> list[Rows]:
        """Return the rows in groups with equal facts, in order of appearance."""
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in self._rows:
            groups.setdefault(tuple(row.get(name) for name in names), []).append(row)
        return [Rows(group) for group in groups.values()]

    def fastest(self, programs: Sequence[str] | None = None) -> Row | None:
        """Return the row with the smallest median, among programs with these names if stated.

        Programs that were excluded after the first round are slower, so they cannot be it.
        """
        found = [row for row in self._rows if programs is None or row["program"] in programs]
        most = max((row["rounds"] for row in found), default=0)
        whole = [row for row in found if row["rounds"] == most]
        return min(whole, key=lambda row: float(np.median(times_ms(row))), default=None)


@dataclass(frozen=True)
class Comparison:
    """dptrain in one case, and the fastest comparable program of a peer, if any."""

    ours: Row
    best: Row | None

    @property
    def ratio(self) -> Ratio | None:
        """How many times faster dptrain is.

        Results without the times of rounds contain it, with its quartiles, as ``speedup``.
        """
        stored = self.ours.get("speedup")
        return Ratio(*stored) if stored else speedup(self.best, self.ours)


def comparisons(rows: Rows) -> list[Comparison]:
    """Return each program of dptrain with the fastest peer that is at least as precise."""
    found = []
    for case in rows.cases("network", "batch", "threads", "gpus", "ranks"):
        peers = [row for row in case if not is_ours(row) and row["program"] != COPIES]
        for row in filter(is_ours, case):
            precise = PRECISIONS[: PRECISIONS.index(row.get("precision", "fp32")) + 1]
            comparable = Rows(p for p in peers if p.get("precision", "fp32") in precise)
            found.append(Comparison(row, comparable.fastest()))
    return found


def is_ours(row: Row) -> bool:
    """Return whether a row is one of dptrain."""
    program: str = row["program"]
    return program.startswith(OURS)


def times_ms(row: Row) -> Sequence[float]:
    """Return the time of a step in each round: CPU time on one thread, otherwise wall time.

    Other programs on a busy machine disturb CPU times less. Results of earlier versions, and
    programs with several threads or on GPUs, have none.
    """
    found: Sequence[float] = row["cpus_ms" if "cpus_ms" in row else "medians_ms"]
    return found


def speedup(slower: Row | None, faster: Row | None) -> Ratio | None:
    """Return how many times faster one program is, by the times of each round.

    They are CPU times if both have some (see `times_ms`), otherwise wall times.
    """
    if slower is None or faster is None:
        return None
    kind = "cpus_ms" if "cpus_ms" in slower and "cpus_ms" in faster else "medians_ms"
    return quotient(slower[kind], faster[kind])


def wall_ratio(numerator: Row | None, denominator: Row | None, factor: float = 1.0) -> Ratio | None:
    """Return the quotient of wall times divided by steps, times `factor`."""
    if numerator is None or denominator is None:
        return None
    return quotient(numerator["walls_ms"], denominator["walls_ms"]).times(factor)


@dataclass
class Report:
    """Results of a run, or of several.

    Attributes:
        about: machine, versions, date, repeats, load, and ``kind``: cpu or gpu.
        rows: results by section.
        missing: what was not measured, with the reason, by program.
        checks: largest error of each case, relative to the allowed one.
        wrong: programs with wrong results, which were not timed.
        failed: programs of dptrain that did not run.
    """

    about: dict[str, Any]
    rows: dict[str, list[Row]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    checks: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """Device of the programs, ``cpu`` or ``gpu``."""
        return str(self.about.get("kind", "cpu"))

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read a result file, which may be compressed by gzip.

        Raises:
            UserError: the file is not one of this version.
        """
        from dptrain.errors import UserError
        from dptrain.files import parse_json

        content = path.read_bytes()
        read = parse_json(gzip.decompress(content) if path.suffix == ".gz" else content)
        if "rows" not in read:
            raise UserError(f"{path} has no rows; expected a result file of this version")
        return cls(**read)

    @classmethod
    def combine(cls, paths: Iterable[Path]) -> Report:
        """Return the results of several runs as one; a case of a later run replaces an earlier one.

        The conditions are those of the first run, with the dates and processors of all.
        """
        reports = [cls.read(path) for path in paths]
        about = dict(reports[0].about)
        for name in ("date", "cpu", "load at the start"):
            values = [value for report in reports for value in _conditions(report, name)]
            about[name] = values if any(v != values[0] for v in values) else values[0]
        about["sections"] = [section for each in reports for section in each.about["sections"]]
        combined = cls(about)
        for report in reports:
            for name, rows in report.rows.items():
                combined.rows[name] = _merged(combined.rows.get(name, []), rows)
            combined.missing.update(report.missing)
            combined.checks.update(report.checks)
            combined.wrong += report.wrong
            combined.failed += report.failed
        return combined

    def sections(self) -> dict[str, Rows]:
        """Return the sections that have results."""
        return {name: Rows(rows) for name, rows in self.rows.items() if rows}


def _conditions(report: Report, name: str) -> list[Any]:
    """Return the values of a condition, of which a report of several runs has a list."""
    value = report.about.get(name)
    if isinstance(report.about["date"], list) and isinstance(value, list):
        return value
    return [value]


def _merged(earlier: list[Row], later: list[Row]) -> list[Row]:
    """Return the rows of both, without the earlier rows of cases that were measured again."""
    again = {_case(rows): list(rows) for rows in Rows(later).cases(*CASE)}
    found = list[Row]()
    for rows in Rows(earlier).cases(*CASE):
        found += again.pop(_case(rows), list(rows))
    return found + [row for rows in again.values() for row in rows]


def _case(rows: Rows) -> tuple[Any, ...]:
    first = next(iter(rows))
    return tuple(first.get(name) for name in CASE)
