"""The audit of a study on its page: a table, and marks at the intervals that fail."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from dptrain.audit.coverage import ENOUGH
from dptrain.audit.study import AUDIT, Audit
from dptrain.report.elements.numbers import fixed
from dptrain.report.elements.page import Key, Section
from dptrain.report.elements.tables import Cell, Column, Number, Records, Table, texts
from dptrain.scaling.study import Study

MARK = " *"
DERIVED = {"efficiency": ("speed_up", "karp_flatt"), "step_ms": ("samples_per_s",)}
"""Estimates that follow from another one, and have its coverage."""


def weak_sources(study: Study, audit: Audit) -> frozenset[str]:
    """Return the paths in ``study.json`` of the estimates whose intervals fail the audit."""
    names = {point.name: point.launches[0].folder for point in study.points}
    weak = {(names[i.point], i.name) for i in audit.weak}
    return frozenset(
        f"points.{number}.{path}"
        for number, point in enumerate(study.points)
        for folder, name in weak
        if folder == point.launches[0].folder
        for path in (name, *DERIVED.get(name, ()))
    )


def _is_weak(cell: Cell, sources: Collection[str]) -> bool:
    numbers = [part for part in cell if isinstance(part, Number)]
    return len(numbers) > 1 and any(n.source.rpartition(".")[0] in sources for n in numbers)


def marked_table(table: Table, sources: Collection[str]) -> Table:
    """Return the table with `MARK` at each interval of `sources`."""
    columns = tuple(
        replace(
            column,
            cells=tuple(
                (*cell, MARK) if _is_weak(cell, sources) else cell for cell in column.cells
            ),
        )
        for column in table.columns
    )
    if columns == table.columns:
        return table
    what = f"* contains the truth in less than {ENOUGH:.0%} of simulated studies, see the audit."
    return replace(table, columns=columns, note=f"{table.note} {what}".strip())


def marked_key(key: Key, sources: Collection[str]) -> Key:
    """Return the key result with `MARK` if its interval is one of `sources`."""
    return replace(key, detail=(*key.detail, MARK)) if _is_weak(key.detail, sources) else key


def audit_section(audit: Audit) -> Section:
    """Return the section with the coverage of each interval."""
    records = Records.of(audit.intervals, "intervals")
    shares: tuple[Cell, ...] = tuple(
        (fixed(100 * i.coverage.share, 1),) if i.coverage.given else ("",) for i in audit.intervals
    )
    columns = (
        records.texts("point", "point"),
        texts("interval", [interval.label for interval in audit.intervals]),
        Column("contains the truth", "%", shares, "computed"),
        texts("", [f"below {ENOUGH:.0%}" if i.coverage.is_weak else "" for i in audit.intervals]),
        records.counts("given", "coverage.given", "studies"),
        records.counts("simulated", "coverage.replications", "studies"),
    )
    note = "Simulated studies have the autocorrelation, bursts, tail and launches of this study."
    table = Table("audit", "Coverage of the intervals", AUDIT, columns, note)
    return Section("audit", "Audit of the intervals", text=(audit.sentence(),), tables=(table,))
