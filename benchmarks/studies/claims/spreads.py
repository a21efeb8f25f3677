"""Spreads of measured values, and ratios with intervals.

Programs that were measured in alternating rounds are compared round by round. Older results have
quartiles only; the interval of their ratio then extends from quartile to quartile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

from dptrain.measure.statistics import Estimate
from dptrain.scaling.pairing import mean_ratio, split

Row = Mapping[str, Any]

ROUNDS = ("medians_ms", "blocks_us", "rounds_ms", "accuracies", "accuracy", "rounds")
MEDIANS = ("median_ms", "median_us", "median", "accuracy_mean", "share")
QUARTILES = (("q1_ms", "q3_ms"), ("q1", "q3"), ("low_ms", "high_ms"), ("low", "high"))
PAIRS = ("quartiles_ms", "quartiles_us")
MICROSECONDS = 1e-3
"""Times are compared in ms, whatever the unit in which they are stored."""


def as_row(value: Any) -> Row:
    """Return a row: of a number, or of a list of values of rounds."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, int | float):
        return {"median": float(value)}
    return {"rounds": list(value), "median": median(value)}


def rounds_of(row: Row) -> list[float]:
    """Return the values of the rounds; empty if they were not stored."""
    lists = ((key, row[key]) for key in ROUNDS if isinstance(row.get(key), Sequence))
    return [float(v) * _unit(key) for key, values in lists for v in values]


def _unit(key: str) -> float:
    return MICROSECONDS if key.endswith("_us") else 1.0


def median_of(row: Row) -> float:
    """Return the median of a row."""
    return next(float(row[key]) * _unit(key) for key in MEDIANS if key in row)


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
    pairs = ((row[k], _unit(k)) for k in PAIRS if k in row)
    return next(((low * unit, high * unit) for (low, high), unit in pairs), None)


def ratio(numerator: Row, denominator: Row) -> Estimate:
    """Return the ratio of two rows: paired by round, or of medians with their quartiles.

    Returns:
        n is the number of rounds, or 1 for medians. A row without a spread counts as exact.
    """
    top, bottom = rounds_of(numerator), rounds_of(denominator)
    if len(top) == len(bottom) > 2:
        return mean_ratio([a / b for a, b in zip(top, bottom, strict=True)])
    above, below = median_of(numerator), median_of(denominator)
    top_low, top_high = quartiles_of(numerator) or (above, above)
    bottom_low, bottom_high = quartiles_of(denominator) or (below, below)
    return Estimate(above / below, top_low / bottom_high, top_high / bottom_low, 1)


def product_of(rows: Sequence[Row]) -> Row:
    """Return the product of rows: by round if all have rounds, else of medians and quartiles."""
    rounds = [rounds_of(row) for row in rows]
    if all(rounds) and len(set(map(len, rounds))) == 1:
        products = [math.prod(each) for each in zip(*rounds, strict=True)]
        return {"rounds": products, "median": median(products)}
    quartiles = [quartiles_of(row) or (median_of(row),) * 2 for row in rows]
    low, high = (math.prod(each[i] for each in quartiles) for i in (0, 1))
    found = {"median": math.prod(map(median_of, rows)), "low": low, "high": high}
    known = next((own for own in rounds if own), None)
    factor = math.prod(median_of(row) for row, own in zip(rows, rounds, strict=True) if not own)
    n = next(({"n": row["n"]} for row in rows if "n" in row), {})
    return {**found, "rounds": [factor * v for v in known]} if known else {**found, **n}


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
