"""The result of a scaling study: points with their launches, efficiencies, fits, forecasts.

The records contain plain numbers and are written to ``study.json``;
docs/reference/study.md defines every value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from dptrain.measure.profile.known import Recovery
from dptrain.measure.profile.profile import Parts, Roofs
from dptrain.measure.statistics import FEWEST, Estimate
from dptrain.records import Form, StoredRecord

WEAK, STRONG = "weak", "strong"
WIDE = 1.3
"""Ratio of the limits of a forecast above which it is called wide."""
UNITY = Estimate(1.0, 0.0, math.inf, 0)
"""The base point relative to itself: 1 by definition, with no interval and of no launches."""


OLD_STEPS = (
    "the steps and efficiencies of this study are medians, as an older version defined them; "
    "dptrain scale --collect computes them from wall times"
)


@dataclass(frozen=True)
class Launch:
    """One launch of one point, from its ``profile.json``.

    Attributes:
        folder: folder of the launch, relative to the folder of the study.
        order: index among all launches of the study, in time.
        started: start of the launch in UTC, ISO 8601.
        step_ms: wall time / steps.
        parts: parts of this step.
        hidden_ms: communication that overlaps with computation, mean over the ranks.
        median_step_ms: median step; None in studies of older versions, whose `step_ms` is that.
    """

    folder: str
    order: int
    started: str
    step_ms: float
    parts: Parts
    hidden_ms: float
    median_step_ms: float | None = None


@dataclass(frozen=True)
class Efficiencies:
    """Efficiencies of the POP hierarchy over launches, with 95% intervals.

    They are ratios of times that are summed over the launches of the rounds that the efficiency
    of the point compares, so the products of the printed factors are the printed efficiencies.

    Attributes:
        parallel: share of the wall time in which ranks are busy: the product of the next three.
        load_balance, serialisation, transfer: see `dptrain.measure.profile.pop.Pop`.
        computation_scaling: busy time at the base point / busy time, for the same work.
        instructions_per_cycle, ghz: of the processor, waiting included; None if they cannot be
            read.
    """

    parallel: Estimate
    load_balance: Estimate
    serialisation: Estimate
    transfer: Estimate
    computation_scaling: Estimate
    instructions_per_cycle: Estimate | None = None
    ghz: Estimate | None = None


@dataclass(frozen=True)
class TimeToAccuracy:
    """How long training takes until the validation accuracy reaches a requested value.

    Estimates are geometric means over launches, at the first evaluation with the accuracy. It was
    reached between that evaluation and the one before, and the 95% intervals contain both. They are
    None if a launch did not reach the accuracy, because the others are not representative.

    Attributes:
        accuracy: the requested validation accuracy.
        trainings, reached: number of launches that trained, and of those that reached it.
        epochs, samples: passes over the training data, and samples, until the first evaluation that
            reached it.
        time_s: time of these steps in seconds, without start-up, evaluations and checkpoints.
        speed_up: time at the base point / time at this point, paired by round; None also if the
            base did not reach the accuracy.
    """

    accuracy: float
    trainings: int
    reached: int
    epochs: Estimate | None
    samples: Estimate | None
    time_s: Estimate | None
    speed_up: Estimate | None


@dataclass(frozen=True)
class Point:
    """Weak or strong scaling with one number of ranks and of threads.

    Attributes:
        scaling: `WEAK` or `STRONG`.
        ranks, threads, nodes: number of ranks, compute threads per rank, and nodes.
        batch_size: global minibatch size.
        local_batch: largest number of samples of a rank.
        launches: the launches of the point, in time.
        step_ms: wall time / steps, mean over launches, with its 95% interval. If rounds lack a
            launch, it is that of the base divided by the ratio over the common rounds.
        samples_per_s: throughput of all ranks, minibatch / step.
        speed_up: throughput over the throughput of the base point, from the wall times of the
            common rounds.
        efficiency: speed-up over the ratio of compute threads (ranks × threads). The base point has
            1 and no interval, with an n of 0 (`UNITY`). None, like `speed_up` and `karp_flatt`, if
            fewer than three launches were made.
        karp_flatt: experimentally determined serial fraction, by cores that compute; None for weak
            scaling and if no more cores compute than at the base point.
        parts: parts of the step, slow steps included, which sum to it.
        ideal: parts of the base point; for strong scaling divided by the ratio of compute threads.
        loss: parts − ideal in milliseconds, so that ideal and loss sum to the step. Negative values
            are faster than ideal.
        loss_intervals: `loss` with 95% intervals over launches, by part; infinite ones with fewer
            than three. Empty at the base, and in studies of older versions.
        other_cores: most cores that other programs used during a launch of the point or of the
            base; None if it is unknown.
        shared_ms: part of the loss of compute that is caused by ranks sharing cores; 0 if run
            delays are known, because this time is then without a core.
        contention_ms: part of the loss of compute that is caused by other competition, such as for
            memory and caches; None for strong scaling if the weak point with the same ranks and
            threads is missing.
        small_batch_ms: the rest of the loss of compute, caused by the smaller batch of a rank; None
            as above.
        hidden_ms: communication that overlaps with computation.
        possible: upper bound of the efficiency if ranks share cores.
        outliers: `Launch.order` of launches beyond 3 median absolute deviations.
        two_groups: True if the step times fall into two groups; the intervals of `step_ms` and
            `samples_per_s` are then the range of the launches.
        efficiency_has_range: True if T(base) / T(point) falls into two groups; the intervals of
            `speed_up`, `efficiency` and `karp_flatt` are then the range.
        pop: efficiencies of the POP hierarchy; None for one rank.
        joules_per_sample: energy of processors and GPUs, median over launches; None if a launch has
            no counter.
        time_to_accuracy: None for strong scaling, and if no accuracy was requested.
        recoveries: how much of each known loss the launches recovered; empty if none was injected.
        losses_withheld: why `loss` is not shown, else "".
    """

    scaling: str
    ranks: int
    threads: int
    nodes: int
    batch_size: int
    local_batch: int
    launches: tuple[Launch, ...]
    step_ms: Estimate
    samples_per_s: Estimate
    speed_up: Estimate | None
    efficiency: Estimate | None
    karp_flatt: Estimate | None
    parts: Parts
    ideal: Parts
    loss: Parts
    shared_ms: float
    contention_ms: float | None
    small_batch_ms: float | None
    hidden_ms: float
    possible: float
    outliers: tuple[int, ...]
    two_groups: bool = False
    efficiency_has_range: bool = False
    pop: Efficiencies | None = None
    joules_per_sample: Estimate | None = None
    time_to_accuracy: TimeToAccuracy | None = None
    loss_intervals: dict[str, Estimate] = field(default_factory=dict)
    other_cores: float | None = None
    recoveries: tuple[Recovery, ...] = ()
    losses_withheld: str = ""

    @property
    def name(self) -> str:
        """The name of the point, such as ``weak-r2-t1``."""
        return f"{self.scaling}-r{self.ranks}-t{self.threads}"

    def has_range(self, name: str) -> bool:
        """Return True if the interval of the estimate `name` is the range of the launches."""
        by_step = name in ("step_ms", "samples_per_s")
        return self.two_groups if by_step else self.efficiency_has_range

    @property
    def total_threads(self) -> int:
        """Number of compute threads of all ranks: ranks × threads."""
        return self.ranks * self.threads


class OfSeries(Protocol):
    """What belongs to the points of one kind of scaling with one number of threads per rank."""

    @property
    def scaling(self) -> str: ...
    @property
    def threads(self) -> int: ...


def series_name(of: OfSeries) -> str:
    """Return ``weak scaling``; with more than one thread per rank, their number, too."""
    return f"{of.scaling} scaling" + (f" with {of.threads} threads per rank" * (of.threads > 1))


def losses_withheld(points: Sequence[Point]) -> str:
    """Return why the losses of points are not shown; "" if they are."""
    reasons = [(p.ranks, p.losses_withheld) for p in points if p.losses_withheld]
    return "; ".join(f"at {ranks} ranks {reason}" for ranks, reason in reasons)


@dataclass(frozen=True)
class Forecast:
    """Efficiencies at more ranks by an ensemble of models, as far as they are known.

    Attributes:
        scaling, threads: the points that the forecast extrapolates.
        hindcasts: (ranks, predicted_ms, measured_ms) of each point that the ensemble predicts from
            the smaller ones.
        algorithm: the all-reduce algorithm that fits the timed all-reduces best; "" if none was
            fitted.
        alpha_us, beta_gb_per_s: latency of a message and bandwidth, from the same fit; None if they
            are not determined.
        withheld: the reason if there is no forecast, else "".
        assumptions: assumptions of the forecast in sentences.
        points: (ranks, step_ms, efficiency).
        intervals: (low, high) of each efficiency; they hold 95% of the weight of the ensemble.
        assumes: what each efficiency assumes; empty in studies of older versions.
        unknown: from which number of ranks on the efficiency is unknown, and why.
    """

    scaling: str
    threads: int
    hindcasts: tuple[tuple[int, float, float], ...] = ()
    algorithm: str = ""
    alpha_us: float | None = None
    beta_gb_per_s: float | None = None
    withheld: str = ""
    assumptions: tuple[str, ...] = ()
    points: tuple[tuple[int, float, float], ...] = ()
    intervals: tuple[tuple[float, float], ...] = ()
    assumes: tuple[str, ...] = ()
    unknown: str = ""

    @property
    def assumed(self) -> tuple[str, ...]:
        """What each efficiency assumes; "" in studies of older versions."""
        return self.assumes or ("",) * len(self.points)

    @property
    def wide(self) -> tuple[bool, ...]:
        """True for each efficiency whose upper limit is more than `WIDE` times its lower limit."""
        return tuple(high > WIDE * low for low, high in self.intervals)

    @property
    def hindcast_error(self) -> float | None:
        """|predicted − measured| / measured of the largest point that was predicted."""
        if not self.hindcasts:
            return None
        _, predicted, measured = self.hindcasts[-1]
        return abs(predicted / measured - 1)


@dataclass(frozen=True)
class Score:
    """A registered forecast and the efficiency that was measured after it.

    Attributes:
        sha256: hash of the registered forecast.
        scaling, threads, ranks: of the point.
        efficiency, low, high: forecast and its limits.
        measured: the efficiency of the point.
    """

    sha256: str
    scaling: str
    threads: int
    ranks: int
    efficiency: float
    low: float
    high: float
    measured: Estimate

    @property
    def is_inside(self) -> bool:
        """True if the interval of the forecast contains the measured efficiency."""
        return self.low <= self.measured.value <= self.high

    @property
    def verdict(self) -> str:
        """``inside``, or on which side of the interval the measured efficiency is."""
        if self.is_inside:
            return "inside"
        side = "below" if self.measured.value < self.low else "above"
        overlap = self.measured.low <= self.high and self.low <= self.measured.high
        return f"{side}, but the intervals overlap" if overlap else side


@dataclass(frozen=True)
class Study(StoredRecord):
    """The result of a scaling study.

    Attributes:
        job: entries of `dptrain.measure.profile.profile.Profile.job` that are equal at all points.
        base_ranks, base_threads: ranks and threads of the base point of speed-ups.
        points: points of weak scaling, then of strong scaling.
        forecasts: one for each kind of scaling and number of threads.
        conclusion: the conclusion in sentences: how far training scales, and what limits it.
        notes: restrictions of the validity: shared cores, other load, launches that differ.
        profiles: folder of the median launch by the name of the point; its ``profile.json``
            contains the stages.
        commands: command line by the name of the point.
        environment: environment of the first launch.
        scores: forecasts that were registered before a launch of the point started.
        roofs: limits of the roofline model by the name of the point, the highest of its launches;
            empty in studies of older versions.
    """

    FORM = Form(
        noun="study",
        otherwise="expected a file of `dptrain scale`",
        anew="collect the study again with `dptrain scale --collect`",
        version=3,
        dropped=("fits",),
    )

    job: dict[str, Any]
    base_ranks: int
    base_threads: int
    points: tuple[Point, ...]
    forecasts: tuple[Forecast, ...]
    conclusion: tuple[str, ...]
    notes: tuple[str, ...]
    profiles: dict[str, str]
    commands: dict[str, str]
    environment: dict[str, Any]
    scores: tuple[Score, ...] = ()
    roofs: dict[str, Roofs] = field(default_factory=dict)

    def check(self) -> None:
        if not self.points or not all(point.launches for point in self.points):
            raise ValueError("no point or no launch")

    @classmethod
    def read(cls, path: Path) -> Study:
        """Read a file that `write` has written.

        In those of older versions the base has an interval of zero width, and points of fewer than
        three launches have an efficiency; both are removed. A note states that steps are medians.

        Raises:
            UserError: it does not exist, or has another format or version.
        """
        found = super().read(path)
        if all(m.median_step_ms is not None for p in found.points for m in p.launches):
            return found
        points = tuple(_without_few(point) for point in found.points)
        return replace(found, points=points, notes=(*found.notes, OLD_STEPS))


def _without_few(point: Point) -> Point:
    old = point.efficiency
    if old is None or old.low == old.high == 1:
        return replace(point, speed_up=UNITY, efficiency=UNITY)
    if old.n < FEWEST:
        return replace(point, speed_up=None, efficiency=None, karp_flatt=None)
    return point
