"""Texts of values: ratios with intervals, times with spreads, lists of cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from string import Formatter
from typing import Any

from benchmarks.studies.claims.judgements import estimate
from benchmarks.studies.claims.spreads import Row, median_of, quartiles_of, spread
from dptrain.measure.statistics import Estimate

MISSING = "–"


def times(value: float) -> str:
    """Format a ratio."""
    return f"{value:.3g}×" if value < 100 else f"{value:,.0f}×"


def percent(value: float, digits: int = 1) -> str:
    """Format a share."""
    return f"{100 * value:.{digits}f}%"


def duration(ms: float) -> str:
    """Format a time in ms with a unit."""
    for unit, size in (("s", 1e3), ("ms", 1.0)):
        if ms >= size:
            return f"{ms / size:.3g} {unit}"
    return f"{ms / 1e-3:.3g} µs"


def number(value: float) -> str:
    """Format a number with three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ratio_text(value: Estimate, suffix: str = "×", to: str = " to ") -> str:
    """Format a ratio with its interval, such as ``3.86× (3.22 to 4.62)``."""
    text = times(value.value).removesuffix("" if suffix else "×")
    if value.low == value.high or math.isinf(value.high):
        return text
    return f"{text} ({value.low:.3g}{to}{value.high:.3g})"


def with_spread(row: Row, factor: float = 1.0) -> str:
    """Format the median of a row with its spread, without a space if it is short."""
    found, text = spread(row), number(factor * median_of(row))
    return f"{text}{found}" if found.startswith("±") else f"{text} ({found})"


def quartiles(row: Row, digits: int = 3) -> str:
    """Format a median with its quartiles in brackets."""
    low, high = quartiles_of(row) or (math.nan, math.nan)
    return f"{median_of(row):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def call(row: Row) -> str:
    """Format the median of real calls in ms, with the fastest and the slowest."""
    return (f"{duration(median_of(row))} (from {duration(row['min_ms'])} to "
            f"{duration(row['max_ms'])})")  # fmt: skip


def _points(value: Estimate) -> str:
    return f"{100 * value.value:.1f} points ({100 * value.low:.1f} to {100 * value.high:.1f})"


FORMATS: Mapping[str, Callable[[Any], str]] = {
    "times": lambda v: times(estimate(v).value),
    "percent": lambda v: percent(estimate(v).value),
    "percent0": lambda v: percent(estimate(v).value, 0),
    "duration": lambda v: duration(estimate(v).value),
    "number": lambda v: number(estimate(v).value),
    "interval": lambda v: ratio_text(v, "", "–"),
    "spread": with_spread,
    "µs": lambda v: with_spread(v, 1e3),
    "quartiles": quartiles,
    "calls": call,
    "points": _points,
    "percents": lambda v: ", ".join(map(percent, v)),
    "MB": lambda v: f"{v / 1e6:.2f}",
    "M": lambda v: f"{v / 1e6:.2f}",
}
"""Formats of a single value by name; others are those of Python."""


def single(value: Any, name: str) -> str:
    """Return the text of a value in one of `FORMATS`, or in the format of its type."""
    if name in FORMATS:
        return FORMATS[name](value)
    if name:
        return format(value if isinstance(value, int | float) else estimate(value).value, name)
    if isinstance(value, Estimate):
        return ratio_text(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return number(median_of(value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def collective(found: Mapping[str, Any], how: str, name: str) -> str:
    """Return the text of values by case.

    Args:
        found: the values.
        how: ``list`` has the cases in brackets, ``only`` no cases; ``range`` and ``extremes`` have
            the smallest and the largest value, the latter with their cases; ``largest`` has the
            largest; ``top`` the three largest of each case.
        name: format of each value.
    """
    if how == "top":
        return "; ".join(
            f"{case}: " + ", ".join(f"{key} {single(own[key], name)}"
                                    for key in sorted(own, key=lambda k: -own[k])[:3])
            for case, own in found.items()
        )  # fmt: skip
    texts = {case: single(value, name) for case, value in found.items()}
    if how == "only":
        return ", ".join(texts.values())
    if how == "list":
        return ", ".join(f"{text} ({case})" for case, text in texts.items())
    order = sorted(found, key=lambda case: estimate(found[case]).value)
    low, high = order[0], order[-1]
    if how == "range":
        return texts[low] if low == high else f"{texts[low]} to {texts[high]}"
    ends = f"{texts[high]} ({high})"
    return ends if how == "largest" else f"{texts[low]} ({low}) to {ends}"


COLLECTIVE = ("list", "only", "range", "extremes", "largest", "top")


class Template(Formatter):
    """Fills ``{value}``, ``{value[case]}`` and ``{value:range percent}`` of a text."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return the text of a value; a dash for None.

        The format says how cases are combined, and has the format of each.
        """
        if value is None:
            return MISSING
        how, _, name = format_spec.partition(" ")
        if how not in COLLECTIVE:
            how, name = "list", format_spec
        is_row = isinstance(value, Mapping) and any(str(k).startswith("median") for k in value)
        if isinstance(value, Mapping) and not is_row:
            return collective(value, how, name)
        return single(value, name)


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Return a template with its values."""
    return Template().vformat(template, (), values)
