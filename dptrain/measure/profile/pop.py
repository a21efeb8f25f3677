"""Efficiencies of the POP hierarchy, from the busy times of all ranks in all steps.

b(r, s) is the time of rank r in step s without exposed communication, and T(s) the wall time of the
step. Steps end with a gradient sum over all ranks, so a network that takes no time would make
them last as long as the longest busy time. Then

    parallel efficiency = load balance · serialisation · transfer
    load balance   = mean of b / largest mean over steps of any rank
    serialisation  = largest mean over steps of any rank / mean over steps of max over ranks of b
    transfer       = mean over steps of max over ranks of b / mean of T

Load balance is lost if the same rank is always slower, serialisation if a different rank is late in
each step, and transfer by communication itself.

The largest mean over steps of any rank is that of `slowest_rank`, because the largest of several
measured means is too large on average. That of `slowest_rank` may be too small. The intervals of
load balance and serialisation contain those of both.

Source: Wagner, Mohr, Giménez and Labarta, "A structured approach to performance analysis", 2017;
definitions of the POP Centre of Excellence, https://pop-coe.eu/node/69.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dptrain.measure.statistics import Estimate, slowest_rank, student

Table = NDArray[np.float64]

FEWEST_STEPS = 40
"""Smallest number of steps with an interval; the correlation of fewer steps is hardly known."""

FEWEST_INDEPENDENT = 16
"""Smallest number of independent steps with intervals of load balance and serialisation."""

BLOCKS = 4
"""Number of blocks of a series; with four, their means are hardly correlated."""


@dataclass(frozen=True)
class LayerBalance:
    """How evenly the ranks compute some layers.

    Attributes:
        name: names of the layers, joined with ``+``, or input, loss, update.
        load_balance: mean time / largest mean over steps of any rank.
        serialisation: largest mean over steps of any rank / mean over steps of the slowest rank.
    """

    name: str
    load_balance: Estimate
    serialisation: Estimate


@dataclass(frozen=True)
class Pop:
    """Efficiencies of a job with 95% intervals; the first is the product of the next three.

    Attributes:
        parallel: share of the wall time in which ranks are busy, mean over ranks.
        load_balance, serialisation, transfer: its factors.
        ranks: share of the wall time in which each rank is busy.
        layers: balance of the ranks by layers.
    """

    parallel: Estimate
    load_balance: Estimate
    serialisation: Estimate
    transfer: Estimate
    ranks: tuple[Estimate, ...]
    layers: tuple[LayerBalance, ...]


def pop_efficiencies(busy: Table, wall: Table, layers: Mapping[str, Table]) -> Pop:
    """Return the efficiencies of a job.

    Args:
        busy: (ranks, steps), times without exposed communication.
        wall: (steps,), wall times in the same unit.
        layers: times (ranks, steps) of the stages of some layers, by the names of the layers.
    """
    sums = _Sums.of(busy, wall)
    ranks = tuple(sums.estimate(partial(_busy_share, rank)) for rank in range(len(busy)))
    balances = []
    for name, times in layers.items():
        own = _Sums.of(times, times.max(axis=0))
        if own.wall[0] > 0:
            balances.append(LayerBalance(name, own.load_balance(), own.serialisation()))
    return Pop(
        parallel=sums.estimate(lambda s: s.ranks.mean(axis=0) / s.wall),
        load_balance=sums.load_balance(),
        serialisation=sums.serialisation(),
        transfer=sums.estimate(lambda s: s.slowest / s.wall),
        ranks=ranks,
        layers=tuple(balances),
    )


@dataclass(frozen=True)
class _Sums:
    """Sums over all steps (index 0), and over all steps but one (index 1 …, by that step).

    Attributes:
        ranks: (ranks, 1 + steps), of the busy times of each rank.
        slowest_rank: (1 + steps,), of the times that `slowest_rank` returns.
        largest_rank: (1 + steps,), of the busy times of the rank with the largest sum.
        slowest: (1 + steps,), of the largest busy time of each step.
        wall: (1 + steps,), of the wall times.
        rho: correlation of neighbouring busy times of a rank, from all ranks together.
    """

    ranks: Table
    slowest_rank: Table
    largest_rank: Table
    slowest: Table
    wall: Table
    rho: float

    @classmethod
    def of(cls, busy: Table, wall: Table) -> _Sums:
        return cls(
            rho=correlation(busy),
            ranks=_leave_one_out(busy),
            slowest_rank=_leave_one_out(slowest_rank(busy, BLOCKS)),
            largest_rank=_leave_one_out(busy[busy.sum(axis=1).argmax()]),
            slowest=_leave_one_out(busy.max(axis=0)),
            wall=_leave_one_out(wall),
        )

    def load_balance(self) -> Estimate:
        """Return the mean busy time divided by that of the slowest rank."""
        return self._with_slowest(
            lambda s: s.ranks.mean(axis=0) / s.slowest_rank,
            lambda s: s.ranks.mean(axis=0) / s.largest_rank,
        )

    def serialisation(self) -> Estimate:
        """Return the mean busy time of the slowest rank divided by that of the slowest of each
        step.
        """
        return self._with_slowest(
            lambda s: s.slowest_rank / s.slowest, lambda s: s.largest_rank / s.slowest
        )

    def _with_slowest(
        self, found: Callable[[_Sums], Table], largest: Callable[[_Sums], Table]
    ) -> Estimate:
        """Return a ratio that is at most 1, with an interval that contains those of both functions.

        There is no interval if the steps may count as fewer than `FEWEST_INDEPENDENT` independent
        ones, because a rank that is slow for a while then looks like one that is always slow. Two
        standard errors of the correlation, 2 (1 − ρ²) / √(ranks · steps), are added to it for this
        decision.
        """
        estimate = self.estimate(found, 1, self.rho)
        steps = estimate.n
        error = (1 - self.rho**2) / math.sqrt(len(self.ranks) * max(steps, 1))
        if num_independent(steps, min(self.rho + 2 * error, 1.0)) < FEWEST_INDEPENDENT:
            return Estimate(estimate.value, 0.0, math.inf, steps)
        return estimate.extended_to(self.estimate(largest, 1, self.rho))

    def estimate(
        self, ratio: Callable[[_Sums], Table], most: float = math.inf, rho: float = 0.0
    ) -> Estimate:
        """Return a ratio of sums with its interval, of which `most` is an upper bound.

        The correlation of neighbouring steps counts as at least `rho`.

        The logarithm's pseudo-values of the jackknife, one for each step, are a series whose mean
        is the logarithm of the ratio. Source: Efron and Tibshirani, "An introduction to the
        bootstrap", 1993, chapter 11.
        """
        with np.errstate(invalid="ignore"):  # Nothing is left of a single step.
            values = ratio(self)
        value, steps = min(float(values[0]), most), len(values) - 1
        if steps < FEWEST_STEPS or not (values > 0).all():
            return Estimate(value, 0.0, math.inf, steps)
        logs = np.log(values)
        half = half_width_of_mean(steps * logs[0] - (steps - 1) * logs[1:], rho)
        high = max(min(value * math.exp(half), most), value)
        return Estimate(value, value * math.exp(-half), high, steps)


def _leave_one_out(values: Table) -> Table:
    total = values.sum(axis=-1, keepdims=True)
    return np.concatenate([total, total - values], axis=-1)


def _busy_share(rank: int, sums: _Sums) -> Table:
    share: Table = sums.ranks[rank] / sums.wall
    return share


def correlation(values: Table) -> float:
    """Return the correlation of neighbours in one or more series along the last axis.

    The bias of the estimate, −(1 + 3 ρ) / n, is corrected; negative values count as 0.
    Source: Kendall, "Note on bias in the estimation of autocorrelation", Biometrika 41, 1954.
    """
    n = values.shape[-1]
    centred = values - values.mean(axis=-1, keepdims=True)
    squares = float((centred**2).sum())
    if n < 4 or squares <= 0:
        return 0.0
    found = float((centred[..., 1:] * centred[..., :-1]).sum()) / squares
    return float(min(max((n * found + 1) / (n - 3), 0.0), 0.98))


def num_independent(steps: int, rho: float) -> float:
    """Return as how many independent steps a series with correlation `rho` counts.

    Source: Zwiers and von Storch, Journal of Climate 8, 1995.
    """
    return steps * (1 - rho) / (1 + rho)


def half_width_of_mean(values: Table, least_rho: float = 0.0) -> float:
    """Return half the 95% interval of the mean of a series whose neighbours are correlated.

    It is the larger of two: that of the means of `BLOCKS` blocks by Student's t, and that of an
    autoregressive process of order 1 with correlation ρ, whose values count as
    `num_independent` ones. The first is too small if blocks are short, and the second if the series
    has another kind of correlation.

    In simulations with 4, 16 and 64 ranks (equal, one slower by little, or all different), ρ up to
    0.9 and 50 to 400 steps, the intervals of parallel efficiency and transfer contain the truth in
    95 to 100% of cases, and those of load balance and serialisation in 92 to 100% if they are given
    in a tenth of the cases or more.
    """
    n = len(values)
    variance = float(values.var())
    if variance <= 0:
        return 0.0
    independent = max(num_independent(n, max(correlation(values), least_rho)), 2.0)
    variance /= 1 - 1 / independent
    half: float = student(independent - 1) * math.sqrt(variance / independent)
    means = np.array([block.mean() for block in np.array_split(values, BLOCKS)])
    return max(half, student(BLOCKS - 1) * float(means.std(ddof=1)) / math.sqrt(BLOCKS))
