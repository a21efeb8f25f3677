"""Forecast of the step time on more ranks by an ensemble of models, with a 95% interval.

A step takes T = busy + exposed all-reduce + waiting for the slowest rank. Each member of the
ensemble combines one assumption on each, for more nodes (`dptrain.scaling.forecasts.cluster_fit`)
or for more ranks of the only node that was measured (`dptrain.scaling.forecasts.node_fit`).

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

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dptrain.measure.student import student
from dptrain.scaling.forecasts import cluster_fit, node_fit
from dptrain.scaling.forecasts.allreduce import TOLERATED, Network, fit_networks
from dptrain.scaling.forecasts.cluster_fit import CONGESTION, ClusterFit
from dptrain.scaling.forecasts.node_fit import NodeFit
from dptrain.scaling.forecasts.observed import Means, Observed

WIDEST = 2.0
"""Largest ratio of the limits of a forecast; beyond it the answer is unknown."""
TRUSTED = 0.15
"""Largest error of the hindcast of the largest point with which a forecast is given, in addition to
twice the noise of the launches."""
FARTHEST = 8
"""Largest ratio of the nodes of a forecast to the measured ones: larger ratios were not tested."""
GROWTH_ERROR = 0.15
"""Standard deviation of the logarithm of the growth of all-reduces, given algorithm and congestion;
from tuning with simulated networks."""
COMMUNICATION_ERROR = 0.25
"""Error that a member may have in a hindcast, as a share of communication and waiting in the step;
from tuning with simulated networks."""
PRIOR_STRENGTH = 2.0
"""Number of hindcasts that count as much as the equal weights of members before any hindcast."""
RESAMPLES = 100


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
    """A measured point as predicted from smaller ones.

    Attributes:
        ranks: number of ranks.
        predicted_ms, measured_ms: step time.
        noise: standard error of the logarithm of their ratio, because launches differ.
    """

    ranks: int
    predicted_ms: float
    measured_ms: float
    noise: float

    @property
    def error(self) -> float:
        """Logarithm of predicted over measured."""
        return math.log(self.predicted_ms / self.measured_ms)

    @property
    def tolerated(self) -> float:
        """Largest relative error with which a forecast is given."""
        return TRUSTED + 2 * self.noise


class Fit(Protocol):
    """What measured points determine, from which members predict larger ones.

    Attributes:
        points: sorted by ranks.
        largest: the last of them.
        strong: True if all points have the same minibatch size.
        busy_error: relative error that a busy time may have in a hindcast.
    """

    points: Sequence[Means]
    largest: Means
    strong: bool
    busy_error: float

    def members(self) -> Sequence[Any]:
        """Return all combinations of assumptions that the points leave open."""

    def steps_ms(
        self, members: Any, ranks: int, local_batch: float, growth_factor: float = 1.0
    ) -> NDArray[np.float64]:
        """Return the step time that each member predicts."""

    def plausibility(self, member: Any) -> float:
        """Return the weight of a member before any hindcast."""


def on_one_node(points: Sequence[Observed]) -> bool:
    """Return True if all points were measured on one node."""
    return all(point.nodes == 1 for point in points)


def _kind(points: Sequence[Observed]) -> Any:
    """Return the module that describes larger points: of one node, or of several."""
    return node_fit if on_one_node(points) else cluster_fit


def obstacle(points: Sequence[Observed]) -> str:
    """Return why more ranks cannot be forecast; "" if they can."""
    return str(_kind(points).obstacle(points))


def assumptions(points: Sequence[Observed]) -> tuple[str, ...]:
    """Return what all numbers of a forecast assume, as sentences."""
    return tuple(_kind(points).assumptions(points[-1]))


def assumed_at(ranks: int, points: Sequence[Observed]) -> str:
    """Return what one number of a forecast assumes, for the place next to it."""
    return str(_kind(points).assumed_at(ranks, points[-1]))


def why_no_more(points: Sequence[Observed]) -> str:
    """Return why nothing is known about more ranks than `larger_ranks`."""
    if on_one_node(points) and larger_ranks(points)[-1:] == [points[-1].slots]:
        return node_fit.full(points[-1])
    return f"forecasts are tested up to {FARTHEST} times the measured nodes, or ranks of a node"


def larger_ranks(points: Sequence[Observed]) -> list[int]:
    """Return the numbers of ranks that can be forecast.

    These are the next powers of two, on at most `FARTHEST` times the nodes. On a single node they
    end with all its slots, at most `FARTHEST` times the ranks.
    """
    largest = points[-1]
    most = FARTHEST * largest.nodes * largest.per_node
    if on_one_node(points):
        most = min(most, largest.slots)
    powers = [2**k for k in range(most.bit_length()) if largest.ranks < 2**k <= most]
    is_last = on_one_node(points) and most == largest.slots > largest.ranks
    return powers + [largest.slots] * (is_last and largest.slots not in powers)


def _fit(points: Sequence[Means], congestion: Sequence[float] = CONGESTION) -> Fit:
    if on_one_node([at.point for at in points]):
        return NodeFit(points)
    return ClusterFit(points, congestion)


def fitted_network(points: Sequence[Observed]) -> Network | None:
    """Return the network that the all-reduces of all points and sizes determine.

    It is None if all points were measured on one node.
    """
    fit = _fit_all(points)
    return fit_networks(fit.sweep)[0] if isinstance(fit, ClusterFit) else None


def _fit_all(points: Sequence[Observed]) -> Fit:
    return _fit([Means.of(at, np.arange(len(at.launches))) for at in points])


def _held_back(points: Sequence[Observed]) -> Iterator[tuple[Fit, Observed]]:
    """Return each point that smaller ones predict, after their fit."""
    module = _kind(points)
    for count in range(2, len(points)):
        known, point = points[:count], points[count]
        if module.can_be_fitted(known, point):
            yield _fit_all(known), point


def hindcasts(points: Sequence[Observed]) -> list[Hindcast]:
    """Return the median prediction of each point, the smallest of several nodes excepted.

    Args:
        points: sorted by ranks.
    """
    found = []
    for fit, point in _held_back(points):
        members = [member.as_measured() for member in fit.members()]
        steps = fit.steps_ms(members, point.ranks, point.local_batch)
        noise = math.hypot(point.noise, fit.largest.point.noise)
        found.append(Hindcast(point.ranks, float(np.median(steps)), point.step_ms, noise))
    return found


def is_trusted(found: Sequence[Hindcast]) -> bool:
    """Return True if the hindcast of the largest point is close enough for a forecast."""
    return not found or abs(math.expm1(found[-1].error)) <= found[-1].tolerated


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
        self._congestion = congestion
        count = len(points[0].launches)
        self._centre = self._fit(np.arange(count))
        self._members = self._centre.members()
        self._random = np.random.Generator(np.random.Philox(0))
        chosen = self._random.integers(0, count, (RESAMPLES, count))
        self._draws = [self._fit(row) for row in chosen]
        self._factors = np.exp(growth_error * self._random.normal(size=RESAMPLES)).tolist()
        # The bootstrap of n launches is too small by √((n − 1) / n), and assumes a known deviation.
        self._wider = student(count - 1) / 1.96 * math.sqrt(count / (count - 1))
        weights, self._error = _weights(points, self._members)
        self._weights = weights * [self._centre.plausibility(m) for m in self._members]

    def _fit(self, chosen: NDArray[np.int64]) -> Fit:
        return _fit([Means.of(point, chosen) for point in self._points], self._congestion)

    def predict(self, ranks: int) -> Predicted:
        """Return the forecast for more ranks on nodes that are as full as the measured ones."""
        base, largest = self._points[0], self._points[-1]
        batch = base.batch_size * (1.0 if self._centre.strong else ranks / base.ranks)
        ideal = batch / base.batch_size * base.ranks / ranks

        def efficiencies(fit: Fit, factor: float) -> NDArray[np.float64]:
            steps = fit.steps_ms(self._members, ranks, batch / ranks, factor)
            return np.log(ideal * fit.points[0].step / steps)

        middle = efficiencies(self._centre, 1.0)
        logs = np.array(
            [
                self._wider * (efficiencies(fit, 1.0) - middle) + efficiencies(self._centre, factor)
                for fit, factor in zip(self._draws, self._factors, strict=True)
            ]
        )
        doublings = math.log2(ranks / largest.ranks)
        logs += self._error * math.sqrt(doublings) * self._random.normal(size=(RESAMPLES, 1))
        weights = np.broadcast_to(self._weights, logs.shape)
        low, value, high = np.exp(_quantiles(logs, weights, (0.025, 0.5, 0.975))).tolist()
        return Predicted(ranks, value, low, high, ideal * self._centre.points[0].step / value)


def _weights(
    points: Sequence[Observed], members: Sequence[Any]
) -> tuple[NDArray[np.float64], float]:
    """Return the weight of each member, and the hindcast error for a doubling of the nodes."""
    errors, deviations = [], []
    measured = [member.as_measured() for member in members]
    for fit, point in _held_back(points):
        steps = fit.steps_ms(measured, point.ranks, point.local_batch)
        errors.append(np.log(steps / point.step_ms))
        share = (fit.largest.transfer + fit.largest.waiting) / fit.largest.step
        noise = math.hypot(point.noise, fit.largest.point.noise)
        deviations.append(math.hypot(COMMUNICATION_ERROR * share, noise, fit.busy_error))
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
