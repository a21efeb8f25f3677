"""Steps on more ranks of one node: contention, gradient sums in its memory, and waiting.

No network takes part. What may change on more cores or GPUs, and what measurements cannot show:

- contention for memory, caches, power and frequency continues to slow the busy time down: not at
  all, by the logarithm of the ranks, linearly, or as between the two largest points;
- the bandwidth of the memory saturates just after the largest point, so that a share of the busy
  time grows with the ranks;
- on a full node, the operating system takes time of some cores;
- gradient sums are limited by bandwidth, 1 − 1/p; by latency, log₂ p; or serial, p − 1;
- lateness has a distribution, see `dptrain.scaling.forecasts.waiting`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from dptrain.scaling.forecasts.allreduce import nonnegative
from dptrain.scaling.forecasts.observed import Means, Observed
from dptrain.scaling.forecasts.waiting import LATENESS, Waiting

SATURATED: Mapping[float, float] = {0.0: 0.65, 0.125: 0.25, 0.25: 0.08, 0.5: 0.02}
"""Probability of each share of the busy time that grows with the ranks after the largest point;
from tuning with simulated nodes."""
TAKEN: Mapping[float, float] = {0.0: 0.6, 0.1: 0.3, 0.25: 0.1}
"""Probability of each relative increase of the step on a full node, from the same tuning."""
BUSY_ERROR = 0.02
"""Relative error that the growth of the busy time may have in a hindcast, from the same tuning."""
TOLERATED_SUMS = 0.3
"""Relative error that a growth of gradient sums may have in the timed sums."""
SUMS: dict[str, Callable[[float], float]] = {
    "bandwidth": lambda ranks: 1 - 1 / ranks,
    "latency": math.log2,
    "serial": lambda ranks: ranks - 1,
}
"""Growth of gradient sums with the ranks of a node."""
CONTENTION = ("none", "logarithmic", "linear", "last")


@dataclass(frozen=True)
class Member:
    """One combination of assumptions on more ranks of a node.

    Attributes:
        contention: how the busy time grows, one of `CONTENTION`.
        saturated: share of the busy time that grows with the ranks, see `SATURATED`.
        taken: relative increase of the step on a full node, see `TAKEN`.
        sums: key of `SUMS`.
        lateness: key of `LATENESS`.
        shrinks: True if lateness is proportional to the work of a rank.
    """

    contention: str
    saturated: float
    taken: float
    sums: str
    lateness: str
    shrinks: bool

    def as_measured(self) -> Member:
        """Return the member for ranks that were measured: nothing begins after them."""
        return replace(self, saturated=0.0, taken=0.0)


class NodeFit:
    """What the measured points determine, without the assumptions of members.

    Args:
        points: of one node, sorted by ranks.
    """

    busy_error = BUSY_ERROR

    def __init__(self, points: Sequence[Means]) -> None:
        self.points, self.largest = points, points[-1]
        largest = self.largest
        self.scale = largest.step / (largest.busy + largest.transfer + largest.waiting)
        self.strong = largest.point.batch_size == points[0].point.batch_size
        self._waiting = cache(lambda name, shrinks: Waiting(points, name, shrinks=shrinks))
        self._busy = cache(self._fit_busy)

    def busy_ms(self, contention: str, ranks: int, local_batch: float) -> float:
        """Return the busy time, in the proportion of a fit to that of the largest point."""
        largest, fitted = self.largest.point, self._busy(contention)
        now = fitted @ self._columns(contention, largest.ranks, largest.local_batch)
        then = fitted @ self._columns(contention, ranks, local_batch)
        return self.largest.busy * float(then / now)

    def _columns(self, contention: str, ranks: float, samples: float) -> list[float]:
        alone = samples if self.strong else 1.0
        if contention == "none":
            return [alone]
        # In strong scaling, a linear growth is that of a step with a constant part.
        return [alone, alone * (math.log2(ranks) if contention == "logarithmic" else ranks)]

    def _fit_busy(self, contention: str) -> NDArray[np.float64]:
        points = self.points[-2:] if contention == "last" else self.points
        rows = [self._columns(contention, m.point.ranks, m.point.local_batch) for m in points]
        times = np.array([at.busy for at in points])
        return nonnegative(np.array(rows) / times[:, None], np.ones(len(points)))

    def steps_ms(
        self, members: Sequence[Member], ranks: int, local_batch: float, growth_factor: float = 1.0
    ) -> NDArray[np.float64]:
        """Return the step time that each member predicts.

        Args:
            members: their assumptions.
            ranks, local_batch: of the point.
            growth_factor: multiplies the growth of the gradient sums.

        Returns:
            Milliseconds, of shape (members,).
        """
        now, transfer = self.largest.point.ranks, self.largest.transfer
        # Many members share these assumptions.
        busy = {c: self.busy_ms(c, ranks, local_batch) for c in CONTENTION}
        sums = {
            name: transfer * (1 + growth_factor * (growth(ranks) / growth(now) - 1))
            for name, growth in SUMS.items()
        }
        waiting = {
            (name, shrinks, c): self._waiting(name, shrinks).time_ms(ranks, busy[c])
            for name in LATENESS
            for shrinks in (False, True)
            for c in CONTENTION
        }
        is_full = ranks >= self.largest.point.slots
        found = np.array([
            (busy[m.contention], m.saturated, sums[m.sums],
             waiting[m.lateness, m.shrinks, m.contention], m.taken * is_full)
            for m in members
        ])  # fmt: skip
        computed, saturated, summed, waited, taken = found.T
        grown = computed * (1 + saturated * (ranks / now - 1))
        steps: NDArray[np.float64] = self.scale * (grown + summed + waited) * (1 + taken)
        return steps

    def plausibility(self, member: Member) -> float:
        """Return the weight of a member by its probability, the timed sums and the waiting."""
        several = [at for at in self.points if at.point.ranks > 1]
        ratios = np.array([at.transfer / SUMS[member.sums](at.point.ranks) for at in several])
        mean = float(np.mean(ratios))
        error = float(np.std(ratios)) / mean / TOLERATED_SUMS if mean else 0.0
        waiting = self._waiting(member.lateness, member.shrinks).error
        known = math.exp(-0.5 * (error**2 + waiting**2))
        return SATURATED[member.saturated] * TAKEN[member.taken] * known

    def members(self) -> list[Member]:
        """Return all combinations of assumptions that the measured points leave open."""
        shrinks = (True, False) if self.strong else (False,)
        saturated, taken = ((0.0,), (0.0,)) if self.largest.point.on_gpu else (SATURATED, TAKEN)
        combined = itertools.product(CONTENTION, saturated, taken, SUMS, LATENESS, shrinks)
        return [Member(*choice) for choice in combined]


def obstacle(points: Sequence[Observed]) -> str:
    """Return why more ranks of the node cannot be forecast; "" if they can."""
    largest = points[-1]
    if not largest.slots:
        return "all measured ranks were on one node, and the number of its cores or GPUs is unknown"
    return full(largest) if largest.ranks >= largest.slots else ""


def full(largest: Observed) -> str:
    """Return why nothing is known about more ranks than the node has cores or GPUs for."""
    unit = "GPU" if largest.on_gpu else "core"
    return (
        f"all measured ranks were on one node, which has {unit}s for {largest.slots:,} ranks, so "
        "nothing is known about the network; measure on 2 and 4 nodes"
    )


def can_be_fitted(points: Sequence[Observed], target: Observed) -> bool:
    """Return True if the points determine a prediction of a larger one."""
    return points[-1].ranks > 1 and target.nodes == 1


def assumptions(largest: Observed) -> tuple[str, ...]:
    """Return what all numbers of a forecast assume, as sentences."""
    where = "GPUs" if largest.on_gpu else "cores"
    return (
        f"additional ranks run on free {where} of the measured node, and nothing else runs there",
        "gradient sums grow with 1 − 1/p, log₂ p or p − 1, and the busy time not at all, by the "
        "logarithm of the ranks, or linearly",
    )


def assumed_at(ranks: int, largest: Observed) -> str:
    """Return what one number assumes, for the place next to it."""
    if largest.on_gpu:
        return "power, clock and links of the GPUs continue to slow steps as measured"
    grown = 1 + max(SATURATED) * (ranks / largest.ranks - 1)
    taken = f", and the system takes at most {max(TAKEN):.0%} of a step" * (ranks == largest.slots)
    return (
        f"memory that saturates beyond {largest.ranks:,} ranks slows computation at most "
        f"{grown:.2f} times{taken}"
    )
