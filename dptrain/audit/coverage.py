"""How many intervals contain the truth, by kind of interval and noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from dptrain.audit.kinds import KINDS, Kind, Size
from dptrain.audit.noise import NOISES, Noise
from dptrain.measure.statistics import Estimate

T = TypeVar("T")

SERIES = 50
"""Number of measurements that are simulated together."""
ENOUGH = 0.9
"""Intervals that contain the truth less often are marked."""


@dataclass(frozen=True)
class Coverage:
    """How often an interval was given in simulations, and how often it then contained the truth.

    Attributes:
        replications: number of simulated measurements.
        given: number of these with an interval.
        covered: number of these intervals that contain the truth.
        width: median of (high − low) / value of these intervals.
    """

    replications: int
    given: int
    covered: int
    width: float

    @property
    def share(self) -> float:
        """Share of the given intervals that contain the truth; NaN if none was given."""
        return self.covered / self.given if self.given else math.nan

    @property
    def is_weak(self) -> bool:
        """True if too few of the given intervals contain the truth."""
        return self.given > 0 and self.share < ENOUGH


def coverage(kind: Kind, noise: Noise, size: Size, *, replications: int, seed: int = 0) -> Coverage:
    """Simulate measurements and compare their intervals with the truth.

    Args:
        kind: kind of interval.
        noise: of the steps and launches.
        size: of each measurement.
        replications: number of measurements.
        seed: of the random numbers.
    """
    random = np.random.default_rng(seed)
    found = in_parts(partial(kind.draw, noise, size, random), replications)
    return count(found, kind.truth(noise, size), replications)


def in_parts(draw: Callable[[int], Iterable[T]], number: int) -> Iterator[T]:
    """Call `draw` for a number of measurements, so that few of them are in memory at a time."""
    for done in range(0, number, SERIES):
        yield from draw(min(SERIES, number - done))


def count(estimates: Iterable[Estimate], truth: float, replications: int) -> Coverage:
    """Return how many estimates have an interval, and how many of these contain the truth.

    Args:
        estimates: of the simulated measurements that have one.
        truth: what their intervals should contain.
        replications: number of simulated measurements.

    Example:
        >>> count([Estimate(1.0, 0.9, 1.2, 5), Estimate(1.0, 1.1, 1.4, 5)], 1.0, 3)
        Coverage(replications=3, given=2, covered=1, width=0.3)
    """
    given = [e for e in estimates if math.isfinite(e.low) and math.isfinite(e.high)]
    margin = 1e-9 * abs(truth)
    covered = sum(e.low - margin <= truth <= e.high + margin for e in given)
    widths = [round((e.high - e.low) / abs(e.value), 6) if e.value else 0.0 for e in given]
    width = float(np.median(widths)) if given else math.nan
    return Coverage(replications, len(given), covered, width)


def cases() -> Iterator[tuple[str, str]]:
    """Return each kind of interval with each noise that affects it."""
    for name, kind in KINDS.items():
        yield from ((name, noise) for noise in kind.noises)


def coverage_of(name: str, noise: str, *, replications: int, **size: int) -> Coverage:
    """Return the coverage of a case.

    Args:
        name: of the kind of interval, in `KINDS`.
        noise: its name in `NOISES`.
        replications: number of simulated measurements.
        size: fields of `Size` in place of those of the kind.
    """
    kind = KINDS[name]
    fields: dict[str, Any] = {**kind.longer.get(noise, {}), **size}
    chosen = replace(kind.size, **fields)
    return coverage(kind, NOISES[noise], chosen, replications=replications)
