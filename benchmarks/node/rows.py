"""Results of sections: selecting rows, and the figures that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.node.rounds import quotient
from benchmarks.timing import Ratio

Row = dict[str, Any]


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

    def fastest(self, programs: Sequence[str]) -> Row | None:
        """Return the row with the smallest median among programs.

        Programs that were excluded after the first round are slower, so they cannot be it.
        """
        found = [row for row in self._rows if row["program"] in programs]
        most = max((row["rounds"] for row in found), default=0)
        whole = [row for row in found if row["rounds"] == most]
        return min(whole, key=lambda row: float(row["median_ms"]), default=None)


def speedup(slower: Row | None, faster: Row | None) -> Ratio | None:
    """Return how many times faster one program is, by the medians of steps in each round."""
    if slower is None or faster is None:
        return None
    return quotient(slower["medians_ms"], faster["medians_ms"])


def wall_ratio(numerator: Row | None, denominator: Row | None, factor: float = 1.0) -> Ratio | None:
    """Return the quotient of wall times divided by steps, times `factor`."""
    if numerator is None or denominator is None:
        return None
    found = quotient(numerator["walls_ms"], denominator["walls_ms"])
    return Ratio(factor * found.value, factor * found.low, factor * found.high)


def text_of(ratio: Ratio | None) -> str:
    """Format a ratio with its quartiles; empty if there is none."""
    return "" if ratio is None else f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"


def time_of(row: Row | None, *, wall: bool = False, unit: float = 1.0) -> str:
    """Format a time with its quartiles; empty if there is none."""
    if row is None:
        return ""
    kind = "wall_" if wall else ""
    value = row["wall_ms" if wall else "median_ms"] * unit
    low, high = (end * unit for end in row[f"{kind}quartiles_ms"])
    return f"{_three(value)} ({_three(low)}–{_three(high)})"


def _three(value: float) -> str:
    """Format a number with three digits, without an exponent."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
