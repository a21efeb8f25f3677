"""Verdicts: a few rules, each a function whose first sentence is the rule in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from benchmarks.studies.claims.spreads import median_of
from dptrain.measure.statistics import Estimate

CONFIRMED, REFUTED, UNDECIDED = "confirmed", "not reproduced", "undecided"
NOT_COMPARABLE, NOT_MEASURED = "not comparable", "not measured"
VERDICTS = (CONFIRMED, REFUTED, UNDECIDED, NOT_COMPARABLE, NOT_MEASURED)


def decide(condition: bool) -> str:
    """Return `CONFIRMED` or `REFUTED`."""
    return CONFIRMED if condition else REFUTED


def combined(verdicts: Sequence[str]) -> str:
    """Return the verdict of several conditions: one that fails decides, then one undecided."""
    return next((each for each in (REFUTED, UNDECIDED) if each in verdicts), CONFIRMED)


def above(found: Any, limit: Any, *, least: int = 0) -> str:
    """Every interval lies above a limit; one below refutes, one that contains it is undecided.

    The limit is a number or another interval. With `least`, this many cases must lie above it.
    """
    found = pairs(found, limit)
    if least:
        return decide(sum(own.low > other.high for own, other in found) >= least)
    return combined([
        REFUTED if own.high < other.low else CONFIRMED if own.low > other.high else UNDECIDED
        for own, other in found
    ])  # fmt: skip


def below(found: Any, limit: Any) -> str:
    """Every interval lies below a limit; one above refutes, one that contains it is undecided."""
    return combined([
        REFUTED if own.low > other.high else CONFIRMED if own.high < other.low else UNDECIDED
        for own, other in pairs(found, limit)
    ])  # fmt: skip


def near(found: Any, limit: float, *, tolerance: float) -> str:
    """Every value is near the published one, within a tolerance; if only some are: undecided."""
    return _all_or_some([abs(e.value - limit) <= tolerance for e in map(estimate, _list(found))])


def equal(found: Any, limit: Any, *, digits: int | None = None) -> str:
    """Counts match to the digit."""
    return decide(not differences(found, limit, digits))


def falls(found: Any, limit: None = None) -> str:
    """Every value is smaller than the one before."""
    return decide(all(a > b for a, b in pairwise(estimate(e).value for e in _list(found))))


def rises(found: Any, limit: None = None) -> str:
    """Every value is larger than the one before."""
    return decide(all(a < b for a, b in pairwise(estimate(e).value for e in _list(found))))


def rank(found: Mapping[str, Mapping[str, float]], limit: str, *, place: int) -> str:
    """An operation has this place by its share on every machine; if only on some: undecided."""
    orders = [sorted(shares, key=lambda name: -shares[name]) for shares in found.values()]
    return _all_or_some([order[place - 1] == limit for order in orders])


def starts(found: str, limit: str) -> str:
    """A reply of a driver starts with a word."""
    return decide(found.startswith(limit))


RULES: Mapping[str, Callable[..., str]] = MappingProxyType({
    rule.__name__: rule for rule in (above, below, near, equal, falls, rises, rank, starts)
})  # fmt: skip
"""Rules by name; arguments are our values and a limit, or the published values."""


def estimate(value: Any) -> Estimate:
    """Return a value as an estimate; a number or the median of a row is exact."""
    if isinstance(value, Estimate):
        return value
    number = median_of(value) if isinstance(value, Mapping) else float(value)
    return Estimate(number, number, number, 1)


def differences(found: Any, limit: Any, digits: int | None = None) -> list[str]:
    """Return the values that differ from the published ones, such as ``x: 8 instead of 9``.

    Args:
        found: a value, or values by name.
        limit: the published value, or values by the same names; a size as text, such as
            ``1.31 MB``, is compared with ours in the same unit.
        digits: decimals to which our values are rounded.
    """
    if not isinstance(found, Mapping):
        found, limit = {"value": found}, {"value": limit}
    pairs = {name: (_rounded(own, limit[name], digits), limit[name]) for name, own in found.items()}
    return [f"{name}: {own} instead of {other}" for name, (own, other) in pairs.items()
            if own != other]  # fmt: skip


def _rounded(own: Any, other: Any, digits: int | None) -> Any:
    if isinstance(other, str) and not isinstance(own, str):
        unit = other.split()[-1]
        return f"{own / {'MB': 1e6, 'KB': 1e3, 'B': 1}[unit]:.2f} {unit}"
    if isinstance(own, Mapping):
        own = int(median_of(own))
    return own if digits is None else round(own, digits)


def _all_or_some(found: Sequence[bool]) -> str:
    return CONFIRMED if all(found) else UNDECIDED if any(found) else REFUTED


def _list(found: Any) -> list[Any]:
    return list(found.values()) if _is_by_case(found) else [found]


def _is_by_case(found: Any) -> bool:
    """Return whether a value is a mapping by case and not the row of a single one."""
    return isinstance(found, Mapping) and all(
        isinstance(each, Mapping | Estimate | int | float) for each in found.values()
    ) and not any(key.startswith("median") for key in found)  # fmt: skip


def pairs(found: Any, limit: Any) -> list[tuple[Estimate, Estimate]]:
    """Return each value with its limit, by case if the limit has cases too."""
    if _is_by_case(found) and _is_by_case(limit):
        return [(estimate(each), estimate(limit[name])) for name, each in found.items()]
    return [(estimate(each), estimate(limit)) for each in _list(found)]
