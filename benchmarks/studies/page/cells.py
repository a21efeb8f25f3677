"""Cells, tables and sources of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.studies.claims.spreads import (
    MEDIANS,
    Row,
    median_of,
    ratio,
    rounds_of,
    with_spread,
)
from benchmarks.studies.claims.verdicts import Results
from dptrain.measure.statistics import Estimate

MISSING = "–"


def markdown(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, of_text: bool = False
) -> str:
    """Return a Markdown table.

    Args:
        columns: names of the columns.
        rows: the cells of each row.
        of_text: False aligns all columns but the first to the right.
    """
    rules = ["---", *["---" if of_text else "---:"] * (len(columns) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [list(columns), rules, *map(list, rows)])


def number(value: float | None) -> str:
    """Return a number with three digits; a dash for None."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def time_of(row: Row | None, factor: float = 1.0) -> str:
    """Return the median of a row, multiplied by a factor, with its spread; a dash for None."""
    return MISSING if row is None else with_spread(number(factor * median_of(row)), row)


def ratio_of(
    numerator: Row | None,
    denominator: Row | None,
    compare: Callable[[Row, Row], Estimate] = ratio,
) -> str:
    """Return a ratio with its interval in brackets; a dash if a row is missing."""
    if numerator is None or denominator is None:
        return MISSING
    found = compare(numerator, denominator)
    if found.low == found.high:
        return f"{found.value:.3g}"
    return f"{found.value:.3g} ({found.low:.3g}–{found.high:.3g})"


def source(results: Results, *names: str) -> str:
    """Return the line below a table: files, repeats and load of the measurements."""
    parts = []
    for name in names:
        if not results.has(name):
            continue
        found = results.find(name)
        repeats = set(_repeats(found.values))
        known = sorted(repeats - {0})
        count = f", n = {_span(known)}" if known else ", n not stored" if repeats else ""
        parts.append(f"`{name}` in `{found.kind}.json`{count}, load {found.about['load'][0]:.3g}")
    return f"Source: {'; '.join(parts)}."


def _span(values: Sequence[int]) -> str:
    low, high = values[0], values[-1]
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _repeats(values: Any) -> Iterator[int]:
    """Yield the numbers of repeats in a result; 0 for times without one."""
    if isinstance(values, Mapping):
        if rounds := rounds_of(values):
            yield len(rounds)
        elif any(key in values for key in MEDIANS):
            yield int(values.get("rounds", values.get("n", 0)))
        else:
            values = list(values.values())
    if isinstance(values, list):
        for each in values:
            yield from _repeats(each)
