"""Steps on more nodes: growth of all-reduces, waiting, and busy time on full nodes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from dptrain.scaling.forecasts.allreduce import (
    ALGORITHMS,
    DOUBLING,
    TOLERATED,
    fit_networks,
    selected,
)
from dptrain.scaling.forecasts.observed import Means, Observed
from dptrain.scaling.forecasts.waiting import LATENESS, Waiting

CONGESTION = (0.0, 1 / 6, 1 / 3)
"""On d times as many nodes, messages that share links slow all-reduces by d to this power: not at
all, by half a doubling of congestion at d = 8, or as the bisection bandwidth of a 3-D torus."""


BUSY_ERROR = 1e-3
"""Relative error of a busy time on nodes that are as full as the measured ones."""


@dataclass(frozen=True)
class Member:
    """One combination of assumptions on more nodes.

    Attributes:
        algorithm: algorithm of the all-reduce.
        changes: True if the MPI library changes to recursive doubling on more nodes.
        congestion: exponent, see `CONGESTION`.
        lateness: key of `LATENESS`.
        overlaps: True if a longer all-reduce overlaps with computation like the measured one.
        shrinks: True if lateness is proportional to the work of a rank.
    """

    algorithm: str
    changes: bool
    congestion: float
    lateness: str
    overlaps: bool
    shrinks: bool

    def as_measured(self) -> Member:
        """Return the member for ranks that were measured."""
        return self


class ClusterFit:
    """What the measured points determine, without the assumptions of members.

    Args:
        points: sorted by ranks.
        congestion: exponents that are possible; fewer if more is known about the network.
    """

    busy_error = BUSY_ERROR

    def __init__(self, points: Sequence[Means], congestion: Sequence[float] = CONGESTION) -> None:
        largest = points[-1]
        fullest = max(at.point.per_node for at in points)
        self.points, self.largest, self._congestion = points, largest, congestion
        # Contention on a node is that of full nodes.
        self.full = [at for at in points if at.point.per_node == fullest]
        several = [at for at in points if at.point.nodes > 1 and at.sweep]
        self.sweep = [(at.point.nodes, size, ms) for at in several for size, ms in at.sweep]
        self.networks = {
            size: {found.algorithm: found for found in fit_networks(self.sweep, size)}
            for size, _ in largest.point.buckets
        }
        self.scale = largest.step / (largest.busy + largest.transfer + largest.waiting)
        self.exposed = min(largest.transfer / largest.sums, 1.0) if largest.sums else 1.0
        self.strong = largest.point.batch_size == points[0].point.batch_size
        self._waiting = cache(lambda name, shrinks: Waiting(points, name, shrinks=shrinks))

    def busy(self, local_batch: float) -> float:
        """Return the busy time with so many samples per rank."""
        if not self.strong:
            return float(np.mean([at.busy for at in self.full]))
        samples = np.array([at.point.local_batch for at in self.full])
        times = np.array([at.busy for at in self.full])
        matrix = np.stack([1 / times, samples / times], axis=1)
        fixed, slope = np.linalg.lstsq(matrix, np.ones(len(times)), rcond=None)[0]
        if fixed < 0:
            fixed, slope = 0.0, float(np.mean(times / samples))
        return float(fixed + slope * local_batch)

    def steps_ms(
        self, members: Sequence[Member], ranks: int, local_batch: float, growth_factor: float = 1.0
    ) -> NDArray[np.float64]:
        """Return the step time that each member predicts on nodes as full as the measured ones.

        Args:
            members: their assumptions.
            ranks, local_batch: of the point.
            growth_factor: multiplies the growth of the all-reduce.

        Returns:
            Milliseconds, of shape (members,).
        """
        largest, busy = self.largest, self.busy(local_batch)
        nodes = math.ceil(ranks / largest.point.per_node)

        # Many members share these assumptions.
        @cache
        def growth_ms(algorithm: str, changes: bool) -> float:
            return sum(
                count * self._growth_ms(algorithm, ranks, nodes, size, changes=changes)
                for size, count in largest.point.buckets
            )

        congestion = np.array([member.congestion for member in members])
        far = (nodes / largest.point.nodes) ** congestion
        growth = np.array([growth_ms(m.algorithm, m.changes) for m in members])
        growth = growth_factor * (far * (largest.sums + growth) - largest.sums)
        exposed = np.array([self.exposed if member.overlaps else 1.0 for member in members])
        found = {
            key: self._waiting(*key).time_ms(ranks, busy)
            for key in {(m.lateness, m.shrinks) for m in members}
        }
        waiting = np.array([found[m.lateness, m.shrinks] for m in members])
        steps: NDArray[np.float64] = busy + largest.transfer + exposed * growth + waiting
        return self.scale * steps

    def _growth_ms(
        self, algorithm: str, ranks: int, nodes: int, size: int, *, changes: bool
    ) -> float:
        """Return how much longer one all-reduce takes than at the largest point if no links are
        shared.
        """
        measured, network = self.largest.point.nodes, self.networks[size][algorithm]
        now = network.sum_ms(measured, size)
        growth = network.sum_ms(nodes, size) - now
        possible = selected(self.largest.point.library, ranks, size)
        changes = changes if possible is None else algorithm not in possible
        if not changes or algorithm == DOUBLING:
            return growth
        # The smallest number of nodes needs the fewest exchanges, which share no links.
        fewest, _, time = min(self.sweep, key=lambda row: (row[0], abs(row[1] - size)))
        return float(max(time / math.log2(fewest) * math.log2(nodes) - now, growth))

    def plausibility(self, member: Member) -> float:
        """Return the weight of a member by the timed all-reduces and the measured waiting."""
        size, _ = max(self.largest.point.buckets)
        error = self.networks[size][member.algorithm].error / TOLERATED
        waiting = self._waiting(member.lateness, member.shrinks).error
        return math.exp(-0.5 * (error**2 + waiting**2))

    def members(self) -> list[Member]:
        """Return all combinations of assumptions that the measured points leave open."""
        overlaps = (True, False) if self.exposed < 0.9 else (True,)
        shrinks = (True, False) if self.strong else (False,)
        point = self.largest.point
        size, _ = max(point.buckets)
        possible = selected(point.library, point.ranks, size) or ALGORITHMS
        # A library that decides by unknown rules changes to recursive doubling or not.
        combined = itertools.product(
            possible, (False, True), self._congestion, LATENESS, overlaps, shrinks
        )
        return [Member(*choice) for choice in combined]


def obstacle(points: Sequence[Observed]) -> str:
    """Return why more nodes cannot be forecast; "" if they can."""
    nodes = {point.nodes for point in points if point.nodes > 1}
    if len(nodes) < 2:
        return (
            f"only {nodes.pop()} nodes were measured; the growth of the communication needs two "
            "numbers of nodes, such as 2 and 4"
        )
    largest = points[-1]
    if largest.nodes < max(nodes) or not any(f.sweep for f in largest.launches):
        return "the all-reduces of the largest point were not timed"
    full = [point for point in points if point.per_node == largest.per_node]
    if largest.per_node < max(point.per_node for point in points) or len(full) < 2:
        return "fewer than two points have full nodes; measure the same ranks per node"
    return ""


def can_be_fitted(points: Sequence[Observed], target: Observed) -> bool:
    """Return True if the points determine a prediction of a larger one."""
    several = any(at.nodes > 1 and at.launches[0].sweep for at in points)
    return several and points[-1].per_node == target.per_node


def assumptions(largest: Observed) -> tuple[str, ...]:
    """Return what all numbers of a forecast assume, as sentences."""
    return (
        f"additional ranks run on additional nodes like the measured ones, {largest.per_node} per "
        "node, in the same network",
        "the all-reduce continues with a fitted algorithm, unless the MPI library is known to "
        "change it; congestion on d times the nodes slows it by d^0 to d^(1/3)",
    )


def assumed_at(ranks: int, largest: Observed) -> str:
    """Return what one number assumes, for the place next to it."""
    farther = math.ceil(ranks / largest.per_node) / largest.nodes
    return (
        f"nothing saturates beyond the measured {largest.ranks:,} ranks (storage, switch levels), "
        f"and shared links slow all-reduces at most {farther ** max(CONGESTION):.2f} times"
    )
