"""Results as tables, Markdown, JSON and a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.node import reach
from benchmarks.node.rows import Row, Rows
from benchmarks.node.section_tables import (
    filters_table,
    inference_table,
    outside_table,
    ranks_table,
    shards_table,
    stages_table,
    sums_table,
    threads_table,
)
from benchmarks.tables import document, new_files
from dptrain.tables import Table

TABLES: Mapping[str, Callable[[Rows], Table]] = {
    "threads": threads_table,
    "stages": stages_table,
    "ranks": partial(ranks_table, "Ranks with one thread each"),
    "two-cores": partial(ranks_table, "Ranks on two cores"),
    "sums": sums_table,
    "shards": shards_table,
    "inference": inference_table,
    "outside": outside_table,
    "residual": outside_table,
    "filters": filters_table,
}

CASE = (
    "network", "batch", "bytes", "scaling", "samples", "ranks", "threads", "layer", "filters",
    "phase",
)  # fmt: skip
"""Columns that name a case, in which programs are compared."""


@dataclass
class Report:
    """Results of a run, or of several.

    Attributes:
        about: machine, versions, date, repeats.
        rows: results by section.
        missing: what was not measured, with the reason, by program.
        checks: largest relative difference from dptrain's results by case.
        wrong: programs with wrong results, which were not timed.
    """

    about: dict[str, Any]
    rows: dict[str, list[Row]]
    missing: dict[str, str] = field(default_factory=dict)
    checks: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read a result file."""
        from dptrain.files import parse_json

        read = parse_json(path.read_text(encoding="utf-8"))
        return cls(
            read["about"], read["rows"], read["missing"], read["checks"], read.get("wrong", [])
        )

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
        sections = [section for report in reports for section in report.about["sections"]]
        combined = cls({**about, "sections": sections}, {})
        for report in reports:
            for name, rows in report.rows.items():
                combined.rows[name] = _merged(combined.rows.get(name, []), rows)
            combined.missing.update(report.missing)
            combined.checks.update(report.checks)
            combined.wrong += report.wrong
        return combined

    def sections(self) -> dict[str, Rows]:
        """Return the sections that have results."""
        return {name: Rows(rows) for name, rows in self.rows.items() if rows}

    def tables(self) -> list[Table]:
        """Return the tables of all sections, and the targets."""
        sections = self.sections()
        tables = [TABLES[name](rows) for name, rows in sections.items() if name in TABLES]
        found = reach.figures(sections)
        return [reach.summary(sections), *tables, reach.table(found)] if found else tables

    def headline(self) -> str:
        """Summarize the results in a few lines."""
        found = reach.figures(self.sections())
        reached = sum(figure.reached for figure in found)
        lines = [f"wrong result: {text}" for text in self.wrong]
        if found:
            lines.append(f"{reached} of {len(found)} figures reach their target")
        if self.checks:
            lines.append(
                f"{len(self.checks)} results were compared before they were timed; the largest "
                f"relative difference is {max(self.checks.values()):.1e}"
            )
        lines += [f"not measured: {name}: {_line(why)}" for name, why in self.missing.items()]
        return "\n".join(lines)

    def write(self, folder: Path) -> list[Path]:
        """Write all files, named by date."""
        from benchmarks.node.plot import draw
        from dptrain.files import dump_json

        json_path, markdown_path = new_files(folder, "node", str(_first(self.about["date"])))
        json_path.write_text(dump_json(vars(self)), encoding="utf-8")
        title = "dptrain on the cores of one node"
        markdown_path.write_text(
            document(title, self.about, self.headline(), self.tables()), encoding="utf-8"
        )
        plot = draw(self.sections(), self.about, json_path.with_suffix(".svg"))
        return [json_path, markdown_path, *([plot] if plot else [])]


def _conditions(report: Report, name: str) -> list[Any]:
    """Return the values of a condition, of which a report of several runs has a list."""
    value = report.about.get(name)
    if isinstance(report.about["date"], list) and isinstance(value, list):
        return value
    return [value]


def _case(row: Row) -> tuple[Any, ...]:
    """Return what a row has in common with those of the programs that were compared with it."""
    return tuple(row.get(name) for name in CASE)


def _merged(earlier: list[Row], later: list[Row]) -> list[Row]:
    """Return the rows of both, without the earlier rows of cases that were measured again."""
    again: dict[tuple[Any, ...], list[Row]] = {}
    for row in later:
        again.setdefault(_case(row), []).append(row)
    found = list[Row]()
    for row in earlier:
        if _case(row) in again:
            found += again[_case(row)]
            again[_case(row)] = []
        else:
            found.append(row)
    return found + [row for rows in again.values() for row in rows]


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _line(text: str) -> str:
    """Return the first line of a text, at most 200 characters."""
    return text.strip().partition("\n")[0][:200]
