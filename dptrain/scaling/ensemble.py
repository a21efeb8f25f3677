"""Forecast of the step time on more nodes by an ensemble of models, with a 95% interval.

A step takes T = busy + exposed all-reduce + waiting for the slowest rank. Each member of the
ensemble combines one assumption on each:

- the algorithm that explains the timed all-reduces, and whether the MPI library changes to
  recursive doubling on more nodes (`dptrain.scaling.allreduce`);
- congestion: how much more nodes slow all-reduces because messages share links;
- the distribution of lateness, which determines how waiting grows with p ranks: normal, about
  √(2 ln p); exponential, harmonic numbers; Pareto with tail index 3, about p^(1/3);
- whether longer all-reduces overlap with computation like the measured ones, or not at all;
- in strong scaling, whether lateness shrinks with the work or not.

Launches are resampled by round. The weights of the members come from the points of the study: each
member predicts each point from the smaller ones (rolling-origin hindcasts) and is scored by the
logarithm of the density that a normal distribution around its prediction assigns to the measured
step, which is a proper score (Gneiting and Raftery, "Strictly proper scoring rules, prediction, and
estimation", JASA 102, 2007). n hindcasts count as n / (n + `PRIOR_STRENGTH`) of their sum, because
few hindcasts prove little. Members that explain timed all-reduces or waiting poorly lose weight,
too. The interval holds 95% of the weight. If its upper limit is more than `WIDEST` times its lower
limit, the efficiency is unknown.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from dptrain.measure.student import student
from dptrain.scaling.allreduce import (
    ALGORITHMS,
    DOUBLING,
    TOLERATED,
    Network,
    fit_networks,
    selected,
)

WIDEST = 1.3
"""Largest ratio of the limits of a forecast; beyond it the answer is unknown."""
TRUSTED = 0.15
"""Largest error of the hindcast of the largest point with which a forecast is given."""
FARTHEST = 8
"""Largest ratio of the nodes of a forecast to the measured ones: larger ratios were not tested."""
CONGESTION = (0.0, 1 / 6, 1 / 3)
"""On d times as many nodes, messages that share links slow all-reduces by d to this power: not at
all, by half a doubling of congestion at d = 8, or as the bisection bandwidth of a 3-D torus."""
GROWTH_ERROR = 0.15
"""Standard deviation of the logarithm of the growth of all-reduces, given algorithm and congestion;
from tuning with simulated networks."""
COMMUNICATION_ERROR = 0.25
"""Error that a member may have in a hindcast, as a share of communication and waiting in the step;
from tuning with simulated networks."""
CLOCK_ERROR = 1e-3
"""Relative error of any step time; noise and communication may both be zero."""
PRIOR_STRENGTH = 2.0
"""Number of hindcasts that count as much as the equal weights of members before any hindcast."""
TOLERATED_WAITING = 0.15
"""Relative error that a distribution of lateness may have in the measured waiting times."""
RESAMPLES = 100


@dataclass(frozen=True)
class Figures:
    """Times of one launch in milliseconds.

    Attributes:
        step_ms: wall time / steps.
        busy_ms, transfer_ms, waiting_ms: parts of the mean step; busy is all but communication.
        sums_ms: gradient sums of a step, timed alone.
        sweep: bytes and time of an all-reduce alone; empty on one rank.
    """

    step_ms: float
    busy_ms: float
    transfer_ms: float
    waiting_ms: float
    sums_ms: float
    sweep: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Observed:
    """A point that was measured.

    Attributes:
        ranks, nodes: their numbers.
        batch_size, local_batch: samples of a step, of all ranks and of one.
        buckets: bytes of each gradient bucket, and number of such buckets.
        launches: in the order of rounds.
        library: name of the MPI library; "" if it is unknown.
    """

    ranks: int
    nodes: int
    batch_size: int
    local_batch: float
    buckets: tuple[tuple[int, int], ...]
    launches: tuple[Figures, ...]
    library: str = ""

    @property
    def per_node(self) -> int:
        """Ranks of the fullest node."""
        return math.ceil(self.ranks / self.nodes)

    @property
    def step_ms(self) -> float:
        """Mean of wall time / steps over the launches."""
        return float(np.mean([found.step_ms for found in self.launches]))

    @property
    def noise(self) -> float:
        """Standard error of the logarithm of `step_ms`."""
        logs = np.log([found.step_ms for found in self.launches])
        return float(np.std(logs, ddof=1) / math.sqrt(len(logs)))


@dataclass(frozen=True)
class Predicted:
    """The efficiency and the step time at more ranks.

    Attributes:
        ranks: number of ranks.
        efficiency, low, high: weighted median, and limits of 95% of the weight.
        step_ms: weighted median.
    """

    ranks: int
    efficiency: float
    low: float
    high: float
    step_ms: float

    @property
    def is_known(self) -> bool:
        """True if the limits are close enough."""
        return self.low > 0 and self.high <= WIDEST * self.low


@dataclass(frozen=True)
class Hindcast:
    """A measured point as predicted from smaller ones."""

    ranks: int
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """Logarithm of predicted over measured."""
        return math.log(self.predicted_ms / self.measured_ms)


@dataclass(frozen=True)
class Member:
    """One combination of assumptions."""

    algorithm: str
    changes: bool
    congestion: float
    lateness: str
    overlaps: bool
    shrinks: bool


def _normal(ranks: float) -> float:
    # Blom, "Statistical estimates and transformed beta-variables", 1958.
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def _exponential(ranks: float) -> float:
    return sum(1 / k for k in range(2, round(ranks) + 1))


def _pareto(ranks: float) -> float:
    if ranks <= 1:
        return 0.0
    largest = math.lgamma(ranks + 1) + math.lgamma(2 / 3) - math.lgamma(ranks + 2 / 3)
    return math.exp(largest) - 1.5


LATENESS: dict[str, Callable[[float], float]] = {
    "normal": _normal,
    "exponential": _exponential,
    "Pareto": _pareto,
}
"""Expected maximum of p variables minus their mean, up to a factor."""


@dataclass(frozen=True)
class _Means:
    """A point with the mean times of some launches, in milliseconds."""

    point: Observed
    step: float
    busy: float
    transfer: float
    waiting: float
    sums: float
    sweep: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, point: Observed, chosen: NDArray[np.int64]) -> _Means:
        """Return the means over the chosen launches."""
        found = [point.launches[i % len(point.launches)] for i in chosen]
        times = [[f.busy_ms, f.transfer_ms, f.waiting_ms, f.sums_ms] for f in found]
        busy, transfer, waiting, sums = np.mean(times, axis=0).tolist()
        step = float(np.mean([f.step_ms for f in found]))
        sizes = [size for size, _ in found[0].sweep]
        laps = np.array([[ms for _, ms in f.sweep] for f in found]).reshape(len(found), -1)
        means = np.exp(np.mean(np.log(laps), axis=0)).tolist()
        sweep = tuple(zip(sizes, means, strict=True))
        return cls(point, step, busy, transfer, waiting, sums, sweep)


class _Fit:
    """What the measured points determine, without the assumptions of members."""

    def __init__(self, points: Sequence[_Means]) -> None:
        largest = points[-1]
        fullest = max(at.point.per_node for at in points)
        self.points, self.largest = points, largest
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

    def waiting(self, member: Member, ranks: int, busy: float) -> float:
        """Return the time that a rank waits for the slowest one on average."""
        growth, times, known = self._waiting_times(member)
        scale = float(known @ times / (known @ known))
        return scale * growth(ranks) * (busy if member.shrinks else 1.0)

    def _waiting_times(
        self, member: Member
    ) -> tuple[Callable[[float], float], NDArray[np.float64], NDArray[np.float64]]:
        """Return the growth of waiting with the ranks, the measured times, and their growth."""
        growth = LATENESS[member.lateness]
        several = [at for at in self.points if at.point.ranks > 1]
        times = [at.waiting / (at.busy if member.shrinks else 1.0) for at in several]
        return growth, np.array(times), np.array([growth(at.point.ranks) for at in several])

    def steps_ms(
        self,
        members: Sequence[Member],
        ranks: int,
        nodes: int,
        local_batch: float,
        growth_factor: float = 1.0,
    ) -> NDArray[np.float64]:
        """Return the step time that each member predicts.

        Args:
            members: their assumptions.
            ranks, nodes, local_batch: of the point.
            growth_factor: multiplies the growth of the all-reduce.

        Returns:
            Milliseconds, of shape (members,).
        """
        largest, busy = self.largest, self.busy(local_batch)
        growths: dict[tuple[str, bool], float] = {}
        waitings: dict[tuple[str, bool], float] = {}
        for member in members:  # Many members share these assumptions.
            if (key := (member.algorithm, member.changes)) not in growths:
                growths[key] = sum(
                    count * self._growth_ms(member, ranks, nodes, size)
                    for size, count in largest.point.buckets
                )
            if (key := (member.lateness, member.shrinks)) not in waitings:
                waitings[key] = self.waiting(member, ranks, busy)
        congestion = np.array([member.congestion for member in members])
        far = (nodes / largest.point.nodes) ** congestion
        growth = np.array([growths[m.algorithm, m.changes] for m in members])
        growth = growth_factor * (far * (largest.sums + growth) - largest.sums)
        exposed = np.array([self.exposed if member.overlaps else 1.0 for member in members])
        waiting = np.array([waitings[m.lateness, m.shrinks] for m in members])
        steps: NDArray[np.float64] = busy + largest.transfer + exposed * growth + waiting
        return self.scale * steps

    def _growth_ms(self, member: Member, ranks: int, nodes: int, size: int) -> float:
        """Return how much longer one all-reduce takes than at the largest point if no links are
        shared.
        """
        measured, network = self.largest.point.nodes, self.networks[size][member.algorithm]
        now = network.sum_ms(measured, size)
        growth = network.sum_ms(nodes, size) - now
        possible = selected(self.largest.point.library, ranks, size)
        changes = member.changes if possible is None else member.algorithm not in possible
        if not changes or member.algorithm == DOUBLING:
            return growth
        # The smallest number of nodes needs the fewest exchanges, which share no links.
        fewest, _, time = min(self.sweep, key=lambda row: (row[0], abs(row[1] - size)))
        return float(max(time / math.log2(fewest) * math.log2(nodes) - now, growth))

    def plausibility(self, member: Member) -> float:
        """Return the weight of a member by the timed all-reduces and the measured waiting."""
        size, _ = max(self.largest.point.buckets)
        error = self.networks[size][member.algorithm].error
        _, times, known = self._waiting_times(member)
        if not times.any():
            return math.exp(-0.5 * (error / TOLERATED) ** 2)
        ratios = times / known
        spread = float(np.std(ratios) / np.mean(ratios))
        return math.exp(-0.5 * ((error / TOLERATED) ** 2 + (spread / TOLERATED_WAITING) ** 2))


def _members(fit: _Fit, congestion: Sequence[float] = CONGESTION) -> list[Member]:
    overlaps = (True, False) if fit.exposed < 0.9 else (True,)
    shrinks = (True, False) if fit.strong else (False,)
    point = fit.largest.point
    size, _ = max(point.buckets)
    possible = selected(point.library, point.ranks, size) or ALGORITHMS
    # A library that decides by unknown rules changes to recursive doubling or not.
    changes = (False, True)
    combined = itertools.product(possible, changes, congestion, LATENESS, overlaps, shrinks)
    return [Member(*choice) for choice in combined]


def obstacle(points: Sequence[Observed]) -> str:
    """Return why more nodes cannot be forecast; "" if they can."""
    nodes = {point.nodes for point in points if point.nodes > 1}
    if not nodes:
        return "all measured ranks were on one node, so nothing is known about the network"
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


def fitted_network(points: Sequence[Observed]) -> Network:
    """Return the network that the all-reduces of all points and sizes determine."""
    fit = _Fit([_Means.of(at, np.arange(len(at.launches))) for at in points])
    return fit_networks(fit.sweep)[0]


def _held_back(points: Sequence[Observed]) -> Iterator[tuple[_Fit, Observed]]:
    """Return each point that smaller ones predict, after their fit."""
    for count in range(2, len(points)):
        known, point = points[:count], points[count]
        if not any(at.nodes > 1 and at.launches[0].sweep for at in known):
            continue
        if known[-1].per_node == point.per_node:
            yield _Fit([_Means.of(at, np.arange(len(at.launches))) for at in known]), point


def hindcasts(points: Sequence[Observed]) -> list[Hindcast]:
    """Return the median prediction of each point, the smallest of several nodes excepted.

    Args:
        points: sorted by ranks.
    """
    found = []
    for fit, point in _held_back(points):
        steps = fit.steps_ms(_members(fit), point.ranks, point.nodes, point.local_batch)
        found.append(Hindcast(point.ranks, float(np.median(steps)), point.step_ms))
    return found


def is_trusted(found: Sequence[Hindcast]) -> bool:
    """Return True if the hindcast of the largest point is close enough for a forecast."""
    return not found or abs(math.expm1(found[-1].error)) <= TRUSTED


class Ensemble:
    """All members, fitted to all launches and to resampled rounds of launches.

    Args:
        points: sorted by ranks, the base first, without an `obstacle`.
        congestion: exponents that are possible; fewer if more is known about the network.
        growth_error: standard deviation of the logarithm of the growth of all-reduces.
    """

    def __init__(
        self,
        points: Sequence[Observed],
        congestion: Sequence[float] = CONGESTION,
        growth_error: float = GROWTH_ERROR,
    ) -> None:
        self._points = points
        count = len(points[0].launches)
        self._centre = self._fit(np.arange(count))
        self._members = _members(self._centre, congestion)
        self._random = np.random.Generator(np.random.Philox(0))
        chosen = self._random.integers(0, count, (RESAMPLES, count))
        self._draws = [self._fit(row) for row in chosen]
        self._factors = np.exp(growth_error * self._random.normal(size=RESAMPLES)).tolist()
        # The bootstrap of n launches is too small by √((n − 1) / n), and assumes a known deviation.
        self._wider = student(count - 1) / 1.96 * math.sqrt(count / (count - 1))
        weights, self._error = _weights(points, self._members)
        self._weights = weights * [self._centre.plausibility(m) for m in self._members]

    def _fit(self, chosen: NDArray[np.int64]) -> _Fit:
        return _Fit([_Means.of(point, chosen) for point in self._points])

    def predict(self, ranks: int) -> Predicted:
        """Return the forecast for more ranks on nodes that are as full as the measured ones."""
        base, largest = self._points[0], self._points[-1]
        nodes = math.ceil(ranks / largest.per_node)
        batch = base.batch_size * (1.0 if self._centre.strong else ranks / base.ranks)
        ideal = batch / base.batch_size * base.ranks / ranks

        def efficiencies(fit: _Fit, factor: float) -> NDArray[np.float64]:
            steps = fit.steps_ms(self._members, ranks, nodes, batch / ranks, factor)
            return np.log(ideal * fit.points[0].step / steps)

        middle = efficiencies(self._centre, 1.0)
        logs = np.array(
            [
                self._wider * (efficiencies(fit, 1.0) - middle) + efficiencies(self._centre, factor)
                for fit, factor in zip(self._draws, self._factors, strict=True)
            ]
        )
        doublings = math.log2(nodes / largest.nodes)
        logs += self._error * math.sqrt(doublings) * self._random.normal(size=(RESAMPLES, 1))
        weights = np.broadcast_to(self._weights, logs.shape)
        low, value, high = np.exp(_quantiles(logs, weights, (0.025, 0.5, 0.975))).tolist()
        return Predicted(ranks, value, low, high, ideal * self._centre.points[0].step / value)


def _weights(
    points: Sequence[Observed], members: Sequence[Member]
) -> tuple[NDArray[np.float64], float]:
    """Return the weight of each member, and the hindcast error for a doubling of the nodes."""
    errors, deviations = [], []
    for fit, point in _held_back(points):
        steps = fit.steps_ms(members, point.ranks, point.nodes, point.local_batch)
        errors.append(np.log(steps / point.step_ms))
        share = (fit.largest.transfer + fit.largest.waiting) / fit.largest.step
        noise = math.hypot(point.noise, fit.largest.point.noise)
        deviations.append(math.hypot(COMMUNICATION_ERROR * share, noise, CLOCK_ERROR))
    if not errors:
        return np.ones(len(members)) / len(members), TOLERATED
    error = float(np.sqrt(np.mean(np.square(errors), axis=0).min()))
    return score_weights(np.array(errors), np.array(deviations)), error


def score_weights(
    errors: NDArray[np.float64], deviations: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the weights of members from their hindcasts, shrunk to equal weights.

    Args:
        errors: logarithm of predicted over measured, of shape (hindcasts, members).
        deviations: standard deviation of each hindcast, of shape (hindcasts,).

    Returns:
        Weights that sum to 1, of shape (members,).

    Example:
        >>> score_weights(np.array([[0.0, 0.1]]), np.array([0.05])).round(2)
        array([0.66, 0.34])
    """
    scores = -0.5 * np.sum(np.square(errors / deviations[:, np.newaxis]), axis=0)
    scores *= len(errors) / (len(errors) + PRIOR_STRENGTH)
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())


def _quantiles(
    values: NDArray[np.float64], weights: NDArray[np.float64], at: Sequence[float]
) -> NDArray[np.float64]:
    order = np.argsort(values, axis=None)
    below = np.cumsum(weights.reshape(-1)[order])
    return np.asarray(np.interp(np.array(at) * below[-1], below, values.reshape(-1)[order]))
