"""The audit of a study on its page: a table, and marks at the intervals that fail."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from dptrain.audit.coverage import ENOUGH
from dptrain.audit.study import Audit
from dptrain.audit.tables import audit_tables
from dptrain.report.elements.page import Key, Section
from dptrain.scaling.study import Study
from dptrain.tables import Cell, Number, Table

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
    marked = table.with_cells(lambda cell: (*cell, MARK) if _is_weak(cell, sources) else cell)
    if marked == table:
        return table
    what = f"* contains the truth in less than {ENOUGH:.0%} of simulated studies, see the audit."
    return replace(marked, note=f"{table.note} {what}".strip())


def marked_key(key: Key, sources: Collection[str]) -> Key:
    """Return the key result with `MARK` if its interval is one of `sources`."""
    return replace(key, detail=(*key.detail, MARK)) if _is_weak(key.detail, sources) else key


def audit_section(audit: Audit) -> Section:
    """Return the section with the coverage of each interval."""
    tables = tuple(audit_tables(audit)[::-1])
    return Section("audit", "Audit of the intervals", text=(audit.sentence(),), tables=tables)
