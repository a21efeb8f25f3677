"""From the profiles of many launches to points: medians, efficiencies, and where the loss goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dptrain.errors import UserError
from dptrain.measure.profile import Parts, Profile
from dptrain.measure.statistics import Estimate, median_of_launches, ratio_of_launches
from dptrain.scaling.study import STRONG, WEAK, Launch, Point

PARTS = ("compute", "data_wait", "transfer", "imbalance", "other")
OUTLIER = 3.0
"""Median absolute deviations, in units of the standard deviation that they stand for."""
FEWEST_TO_JUDGE = 5
"""Launches from which on one may be called an outlier."""
_DEVIATIONS = 1.4826
"""Standard deviations of normal numbers in a median absolute deviation."""


@dataclass(frozen=True)
class Measured:
    """One finished launch.

    Attributes:
        folder: of its ``profile.json``, as the study names it.
        order: place among all launches, in time.
        profile: what it measured.
    """

    folder: str
    order: int
    profile: Profile

    @property
    def key(self) -> tuple[int, int, int]:
        """Threads, ranks and minibatch: what tells points apart."""
        job = self.profile.job
        return int(job["threads"]), int(job["ranks"]), int(job["batch_size"])


def refuse_small_data(folder: str, profile: Profile) -> None:
    """Refuse minibatches that the data could not fill.

    Raises:
        UserError: steps had fewer samples than the minibatch has.
    """
    wanted = int(profile.job["batch_size"])
    had = round(profile.samples_per_s * profile.step_ms.median / 1e3)
    if had < wanted:
        raise UserError(
            f"{folder} asks for minibatches of {wanted:,}, but all of the data is {had:,} samples; "
            "try --data synthetic, a smaller --batch-size or fewer ranks"
        )


@dataclass(frozen=True)
class Group:
    """The launches of one point.

    Attributes:
        launches: in the order of time; at least one.
    """

    launches: tuple[Measured, ...]

    @property
    def ranks(self) -> int:
        return int(self.first.job["ranks"])

    @property
    def threads(self) -> int:
        return int(self.first.job["threads"])

    @property
    def workers(self) -> int:
        """Ranks × threads."""
        return self.ranks * self.threads

    @property
    def batch_size(self) -> int:
        """Of all ranks."""
        return int(self.first.job["batch_size"])

    @property
    def possible(self) -> float:
        """Most efficiency that the cores allow."""
        return float(self.first.job["possible"])

    @property
    def first(self) -> Profile:
        """Of the first launch."""
        return self.launches[0].profile

    @property
    def steps_ms(self) -> np.ndarray:
        """A launch's median step each."""
        return np.array([launch.profile.step_ms.median for launch in self.launches])

    @property
    def median_launch(self) -> Measured:
        """The launch in the middle."""
        order = np.argsort(self.steps_ms, kind="stable")
        return self.launches[int(order[(len(order) - 1) // 2])]

    @property
    def step_ms(self) -> float:
        """Median over the launches."""
        return float(np.median(self.steps_ms))

    @property
    def parts(self) -> Parts:
        """Of a typical step: median shares of the launches' mean steps, of the median step."""
        rows = [[getattr(m.profile.parts, name) for name in PARTS] for m in self.launches]
        values = np.array(rows, float)
        shares = np.median(values / values.sum(axis=1, keepdims=True), axis=0)
        return Parts(*(self.step_ms * shares / shares.sum()).tolist())

    @property
    def hidden_ms(self) -> float:
        """Communication behind computing, mean of the ranks, median of the launches."""
        return float(np.median([_hidden(m.profile) for m in self.launches]))


def _hidden(profile: Profile) -> float:
    return float(np.mean([rank.hidden_ms for rank in profile.ranks]))


def make_groups(launches: Sequence[Measured]) -> list[Group]:
    """Launches of the same point together, by threads, then ranks, then minibatch."""
    found: dict[tuple[int, int, int], list[Measured]] = {}
    for launch in sorted(launches, key=lambda launch: launch.order):
        found.setdefault(launch.key, []).append(launch)
    return [Group(tuple(found[key])) for key in sorted(found)]


def base_of(groups: Sequence[Group]) -> Group:
    """What speed-ups are relative to: fewest workers, of those with the fewest threads."""
    return min(groups, key=lambda group: (group.workers, group.threads, group.batch_size))


def scalings_of(group: Group, base: Group) -> tuple[str, ...]:
    """What a group is a point of; the base belongs to both.

    Raises:
        UserError: neither keeps the minibatch nor the work of a worker.
    """
    weak = group.batch_size * base.workers == base.batch_size * group.workers
    strong = group.batch_size == base.batch_size
    if not weak and not strong:
        grown = base.batch_size * group.workers / base.workers
        raise UserError(
            f"{group.launches[0].folder} has a minibatch of {group.batch_size} for {group.workers} "
            f"workers; beside {base.batch_size} for {base.workers} expected {base.batch_size} "
            f"(strong scaling) or {grown:g} (weak scaling)"
        )
    return (WEAK,) * weak + (STRONG,) * strong


def make_points(groups: Sequence[Group]) -> tuple[Point, ...]:
    """Points of weak scaling, then of strong, each by threads and ranks.

    A base that is alone in a way of scaling is no point of it, unless it is alone altogether.
    """
    base = base_of(groups)
    slower = {
        (group.ranks, group.threads): group.parts.compute / base.parts.compute
        for group in groups
        if WEAK in scalings_of(group, base) and base.parts.compute
    }
    points = [
        _point(scaling, group, base, slower.get((group.ranks, group.threads)))
        for group in groups
        for scaling in scalings_of(group, base)
    ]
    several = {p.scaling for p in points if p.workers != base.workers or p.threads != base.threads}
    kept = [p for p in points if p.scaling in several or (not several and p.scaling == WEAK)]
    return tuple(sorted(kept, key=lambda p: (p.scaling != WEAK, p.threads, p.ranks)))


def _point(scaling: str, group: Group, base: Group, slower: float | None) -> Point:
    """A point; `slower` is how many times as long the same work takes beside as many workers."""
    workers = group.workers / base.workers
    step = median_of_launches(group.steps_ms)
    exact = Estimate(1.0, 1.0, 1.0, step.n)
    grown = group.batch_size / base.batch_size
    speed_up = (
        exact if group is base else ratio_of_launches(base.steps_ms, group.steps_ms).times(grown)
    )
    parts = group.parts
    ideal = _each(base.parts, factor=grown / workers)
    loss = Parts(*(getattr(parts, name) - getattr(ideal, name) for name in PARTS))
    possible = min(group.possible / base.possible, 1.0)
    shared = max(min(ideal.compute * (1 / possible - 1), loss.compute), 0.0)
    contention = None if slower is None else ideal.compute * (slower - 1) - shared
    job = group.first.job
    return Point(
        scaling=scaling,
        ranks=group.ranks,
        threads=group.threads,
        nodes=int(job["nodes"]),
        batch_size=group.batch_size,
        local_batch=int(job["local_batch"]),
        launches=tuple(_launch(measured) for measured in group.launches),
        step_ms=step,
        samples_per_s=step.below(1e3 * group.batch_size),
        speed_up=speed_up,
        efficiency=speed_up.times(1 / workers),
        karp_flatt=karp_flatt(speed_up, workers) if scaling == STRONG else None,
        parts=parts,
        ideal=ideal,
        loss=loss,
        shared_ms=shared,
        contention_ms=contention,
        small_batch_ms=None if contention is None else loss.compute - shared - contention,
        hidden_ms=group.hidden_ms,
        possible=possible,
        outliers=tuple(_outliers(group)),
    )


def _each(parts: Parts, *, factor: float) -> Parts:
    return Parts(*(factor * getattr(parts, name) for name in PARTS))


def _launch(measured: Measured) -> Launch:
    profile = measured.profile
    return Launch(
        measured.folder,
        measured.order,
        str(profile.environment.get("started", "")),
        profile.step_ms.median,
        profile.parts,
        _hidden(profile),
    )


def karp_flatt(speed_up: Estimate, workers: float) -> Estimate | None:
    """Experimentally determined serial fraction e = (1/S − 1/p) / (1 − 1/p); None for p ≤ 1.

    Source: Karp and Flatt, "Measuring parallel processor performance", CACM 33 (1990).
    """
    if workers <= 1:
        return None
    inverse = speed_up.below(1.0)

    def fraction(value: float) -> float:
        return (value - 1 / workers) / (1 - 1 / workers)

    ends = fraction(inverse.low), fraction(inverse.high)
    return Estimate(fraction(inverse.value), *ends, inverse.n)


def _outliers(group: Group) -> list[int]:
    values = group.steps_ms
    if len(values) < FEWEST_TO_JUDGE:
        return []
    away = np.abs(values - np.median(values))
    limit = OUTLIER * _DEVIATIONS * float(np.median(away))
    return [
        launch.order
        for launch, distance in zip(group.launches, away, strict=True)
        if distance > limit > 0
    ]
