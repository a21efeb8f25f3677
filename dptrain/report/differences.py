"""Differences and ratios of two independent results, from their 95% intervals.

The method of variance estimates recovery (MOVER) needs only the two values and their intervals: for
values a and b with intervals (l, u), the interval of a − b is

    a − b − √((a − l_a)² + (u_b − b)²)   to   a − b + √((u_a − a)² + (b − l_b)²).

Sources: Zou and Donner, "Construction of confidence limits about effect measures", Statistics in
Medicine 27 (2008); with Wilson's intervals of two shares it is method 10 of Newcombe, "Interval
estimation for the difference between independent proportions", Statistics in Medicine 17 (1998).
"""

from __future__ import annotations

import math

from dptrain.measure.statistics import Estimate


def difference(one: Estimate, base: Estimate) -> Estimate:
    """Return one − base with its 95% interval; infinite if one of the intervals is."""
    value, n = one.value - base.value, min(one.n, base.n)
    low = value - math.hypot(one.value - one.low, base.high - base.value)
    high = value + math.hypot(one.high - one.value, base.value - base.low)
    return Estimate(value, low, high, n)


def ratio(one: Estimate, base: Estimate) -> Estimate:
    """Return one / base of positive quantities, with the interval of the difference of logarithms.

    It is 0 to infinity if one of the intervals is unbounded or contains 0.
    """
    value, n = one.value / base.value, min(one.n, base.n)
    ends = (one.low, one.high, base.low, base.high)
    if min(ends) <= 0 or not all(map(math.isfinite, ends)):
        return Estimate(value, 0.0, math.inf, n)
    found = difference(_log(one), _log(base))
    return Estimate(value, math.exp(found.low), math.exp(found.high), n)


def _log(value: Estimate) -> Estimate:
    return Estimate(math.log(value.value), math.log(value.low), math.log(value.high), value.n)
