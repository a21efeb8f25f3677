"""Spreads of measured values, ratios with intervals, and what they decide.

Programs that were measured in alternating rounds are compared round by round. Older results have
quartiles only; the interval of their ratio then extends from quartile to quartile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import quantiles
from typing import Any

from benchmarks.studies.claims.verdicts import CONFIRMED, REFUTED, UNDECIDED, times
from dptrain.measure.statistics import Estimate
from dptrain.scaling.pairing import mean_ratio, split

Row = Mapping[str, Any]

ROUNDS = ("medians_ms", "blocks_us", "rounds_ms", "accuracies", "accuracy")
MEDIANS = ("median_ms", "median_us", "median", "accuracy_mean")
QUARTILES = (("q1_ms", "q3_ms"), ("q1", "q3"), ("low_ms", "high_ms"), ("low", "high"))
PAIRS = ("quartiles_ms", "quartiles_us")


def rounds_of(row: Row) -> list[float]:
    """Return the values of the rounds; empty if they were not stored."""
    return [float(v) for key in ROUNDS for v in row.get(key, ())]


def median_of(row: Row) -> float:
    """Return the median of a row."""
    return float(next(row[key] for key in MEDIANS if key in row))


def quartiles_of(row: Row) -> tuple[float, float] | None:
    """Return the first and third quartile; None if they were not stored."""
    if rounds := rounds_of(row):
        if len(rounds) == 1:
            return rounds[0], rounds[0]
        first, _, third = quantiles(rounds, n=4, method="inclusive")
        return first, third
    for low, high in QUARTILES:
        if low in row and high in row:
            return float(row[low]), float(row[high])
    return next(((float(row[k][0]), float(row[k][1])) for k in PAIRS if k in row), None)


def ratio(numerator: Row, denominator: Row) -> Estimate:
    """Return the ratio of two rows: paired by round, or of medians with their quartiles.

    Returns:
        n is the number of rounds, or 1 for medians; without any spread, the interval is the value.
    """
    top, bottom = rounds_of(numerator), rounds_of(denominator)
    if len(top) == len(bottom) > 2:
        return mean_ratio([a / b for a, b in zip(top, bottom, strict=True)])
    value = median_of(numerator) / median_of(denominator)
    top_quartiles, bottom_quartiles = quartiles_of(numerator), quartiles_of(denominator)
    if top_quartiles is None or bottom_quartiles is None:
        return Estimate(value, value, value, 1)
    low, high = top_quartiles[0] / bottom_quartiles[1], top_quartiles[1] / bottom_quartiles[0]
    return Estimate(value, low, high, 1)


def shown(estimate: Estimate) -> str:
    """Return a ratio with its interval, such as ``3.86× (3.22 to 4.62)``."""
    if estimate.low == estimate.high or math.isinf(estimate.high):
        return times(estimate.value)
    return f"{times(estimate.value)} ({estimate.low:.3g} to {estimate.high:.3g})"


def spread(row: Row) -> str:
    """Return half the interquartile range in percent of the median, two groups, or why neither."""
    rounds = rounds_of(row)
    border = split(rounds) if rounds and min(rounds) > 0 else None
    if border is not None:
        below, above = ([v for v in rounds if (v < border) == is_low] for is_low in (True, False))
        return f"two groups: {_range(below)}, {_range(above)}"
    found = quartiles_of(row)
    if found is None or found[0] == found[1]:
        return "one run" if row.get("n") == 1 else "no spread stored"
    return f"±{100 * (found[1] - found[0]) / 2 / median_of(row):.2g}%"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3g}–{max(values):.3g}"


def with_spread(text: str, row: Row) -> str:
    """Return a value with the spread of its row, without a space if it is short."""
    found = spread(row)
    return f"{text}{found}" if found.startswith("±") else f"{text} ({found})"


def decided(estimates: Iterable[Estimate], threshold: float = 1.0) -> str:
    """Return whether all ratios exceed a threshold: confirmed, not reproduced or undecided."""
    found = list(estimates)
    if any(e.high < threshold for e in found):
        return REFUTED
    return CONFIRMED if all(e.low > threshold for e in found) else UNDECIDED
