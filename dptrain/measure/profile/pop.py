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

from dptrain.measure.series import (
    BLOCKS,
    correlation,
    degrees_of_freedom,
    half_width_of_mean,
    num_independent,
)
from dptrain.measure.statistics import Estimate, slowest_rank, unseen_share

Table = NDArray[np.float64]

FEWEST_STEPS = 40
"""Smallest number of steps with an interval; the correlation of fewer steps is hardly known."""

FEWEST_DEGREES = 16
"""Smallest number of degrees of freedom of each rank that distinguish load balance from
serialisation."""


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
        busy: (ranks, steps), times without exposed communication in ms.
        wall: (steps,), wall times in ms.
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
        degrees: the fewest of any rank, see `dptrain.measure.series.degrees_of_freedom`.
    """

    ranks: Table
    slowest_rank: Table
    largest_rank: Table
    slowest: Table
    wall: Table
    rho: float
    degrees: float

    @classmethod
    def of(cls, busy: Table, wall: Table) -> _Sums:
        return cls(
            rho=correlation(busy),
            degrees=min(degrees_of_freedom(row, num_independent(row)) for row in busy),
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

        A rank that is slow for a while, or in a few bursts, looks like one that is always slow if
        its steps have fewer than `FEWEST_DEGREES` degrees of freedom. Then only the product of load
        balance and serialisation is known: each is between it and 1.
        """
        estimate = self.estimate(found, 1, self.rho)
        steps = estimate.n
        if self.degrees < FEWEST_DEGREES:
            product = self.estimate(lambda s: s.ranks.mean(axis=0) / s.slowest, 1, self.rho)
            high = 1.0 if math.isfinite(product.high) else math.inf
            return Estimate(estimate.value, min(product.low, estimate.value), high, steps)
        return estimate.extended_to(self.estimate(largest, 1, self.rho))

    def estimate(
        self, ratio: Callable[[_Sums], Table], most: float = 1.0, rho: float = 0.0
    ) -> Estimate:
        """Return a ratio of sums with its interval, of which `most` is an upper bound.

        The correlation of neighbouring steps counts as at least `rho`. The interval includes
        interruptions that were not seen, see `dptrain.measure.statistics.unseen_share`.

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
        unseen = unseen_share(float(self.wall[0]) / steps, steps)
        high = max(min(value * math.exp(half) * (1 + unseen), most), value)
        return Estimate(value, value * math.exp(-half) / (1 + unseen), high, steps)


def _leave_one_out(values: Table) -> Table:
    total = values.sum(axis=-1, keepdims=True)
    return np.concatenate([total, total - values], axis=-1)


def _busy_share(rank: int, sums: _Sums) -> Table:
    share: Table = sums.ranks[rank] / sums.wall
    return share
