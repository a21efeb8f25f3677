"""Format numbers for the report: rounding, digit groups, and the minus sign U+2212."""

from __future__ import annotations

import math
from collections.abc import Iterable

THOUSANDS_SEPARATOR = "\u202f"
"""A thin space at which lines do not break."""


def decimals_for(values: Iterable[float], *, digits: int = 4, most: int = 4) -> int:
    """Return the number of decimals with which the largest of `values` has `digits` digits.

    Args:
        values: the numbers of a column, which share their decimals.
        digits: significant digits of the largest number.
        most: upper bound of the result.
    """
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if not largest:
        return 0
    return min(max(digits - 1 - math.floor(math.log10(largest)), 0), most)


def fixed(value: float, decimals: int) -> str:
    """Return the number with so many decimals, grouped digits, and no minus sign before a zero."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:,.{decimals}f}"
    if text.startswith("-"):
        text = text[1:] if not text.strip("-0.,") else "−" + text[1:]
    return text.replace(",", THOUSANDS_SEPARATOR)


def value_text(value: object) -> str:
    """Return a setting as a person writes it; ``none`` for None and an empty text.

    Example:
        >>> [value_text(value) for value in (True, 1e-05, 1000, 0.25, "cosine", "")]
        ['on', '1e-05', '1000', '0.25', 'cosine', 'none']
    """
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None or value == "" else str(value)


def short(value: float, *, digits: int = 3) -> str:
    """Return a number with `digits` significant digits: ``0.912``, ``12.3``, ``4 567``."""
    return fixed(value, decimals_for([value], digits=digits, most=6))


def percent(share: float, *, decimals: int = 1) -> str:
    """Return a share as a percentage, such as ``12.3%``."""
    return f"{fixed(100 * share, decimals)}%"


def flop_rate(gflops: float) -> str:
    """Return a rate such as ``26.5 GFLOP/s`` or ``55.6 TFLOP/s``."""
    return f"{short(gflops)} GFLOP/s" if gflops < 1e4 else f"{short(gflops / 1e3)} TFLOP/s"


def scaled_bytes(value: float) -> str:
    """Return a size such as ``4.53 MB``, in decimal units."""
    size, units = float(value), ["B", "kB", "MB", "GB", "TB"]
    while abs(size) >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{short(size)} {units[0]}"
