"""Numbers as people read them: rounded sensibly, with a real minus sign."""

from __future__ import annotations

import math
from collections.abc import Iterable

NARROW = "\N{NARROW NO-BREAK SPACE}"


def decimals_for(values: Iterable[float], *, digits: int = 4, most: int = 4) -> int:
    """Decimals that give the largest of `values` so many digits; a column shares them."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if not largest:
        return 0
    return min(max(digits - 1 - math.floor(math.log10(largest)), 0), most)


def fixed(value: float, decimals: int) -> str:
    """``1,234.5``; a real minus sign, and none before a zero."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:,.{decimals}f}"
    if text.startswith("-"):
        text = text[1:] if not text.strip("-0.,") else "−" + text[1:]
    return text.replace(",", NARROW)


def short(value: float, *, digits: int = 3) -> str:
    """A number alone, to so many digits: ``0.912``, ``12.3``, ``4 567``."""
    return fixed(value, decimals_for([value], digits=digits, most=6))


def percent(share: float, *, decimals: int = 1) -> str:
    """``12.3%``."""
    return f"{fixed(100 * share, decimals)}%"


def flop_rate(gflops: float) -> str:
    """``26.5 GFLOP/s``, ``55.6 TFLOP/s``."""
    return f"{short(gflops)} GFLOP/s" if gflops < 1e4 else f"{short(gflops / 1e3)} TFLOP/s"


def scaled_bytes(value: float) -> str:
    """``4.53 MB``; units of thousands, as in all tables."""
    size, units = float(value), ["B", "kB", "MB", "GB", "TB"]
    while abs(size) >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{short(size)} {units[0]}"
