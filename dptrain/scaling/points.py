"""Turn the profiles of many launches into points: steps, efficiencies, and losses by part."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from dptrain.errors import UserError
from dptrain.measure.profile.known import judge
from dptrain.measure.profile.known_tables import why_withheld
from dptrain.measure.profile.profile import Parts, Profile
from dptrain.measure.statistics import FEWEST, Estimate
from dptrain.scaling.accuracy import Training, find_time_to_accuracy
from dptrain.scaling.efficiencies import find_efficiencies, joules_per_sample, walls_of
from dptrain.scaling.losses import loss_intervals, mean_parts, subtract, uniform
from dptrain.scaling.pairing import Walls, common_rounds, compare_walls, mean_wall
from dptrain.scaling.study import STRONG, UNITY, WEAK, Launch, Point

PARTS = ("compute", "data_wait", "transfer", "imbalance", "without_core", "other")
OUTLIER = 3.0
"""Distance of an outlier from the median, in scaled median absolute deviations."""
FEWEST_TO_JUDGE = 5
"""Smallest number of launches in which outliers are marked."""
_DEVIATIONS = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_ROUND = re.compile(r"(?:weak|strong)-r\d+-t\d+-(\d+)")


@dataclass(frozen=True)
class Measured:
    """One complete launch.

    Attributes:
        folder: folder of its ``profile.json``, relative to the folder of the study.
        order: index among all launches, in time.
        profile: its result.
        training: until the requested accuracy; None if there was none.
        other_cores: mean number of cores that other programs used meanwhile; None if it is unknown.
    """

    folder: str
    order: int
    profile: Profile
    training: Training | None = None
    other_cores: float | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Threads, ranks and minibatch size, which identify a point."""
        job = self.profile.job
        return int(job["threads"]), int(job["ranks"]), int(job["batch_size"])

    @property
    def round(self) -> str:
        """Name of the round of the launch, unique among studies; "" if it belongs to none."""
        return round_of(self.folder)


def round_of(folder: str) -> str:
    """Return the name of the round of a launch from its folder; "" if it belongs to none."""
    path = PurePath(folder)
    found = _ROUND.fullmatch(path.name)
    return f"{path.parent}/{found[1]}" if found else ""


def refuse_small_data(folder: str, profile: Profile) -> None:
    """Refuse a minibatch that is larger than the data set.

    Raises:
        UserError: the steps had fewer samples than the minibatch size.
    """
    expected = int(profile.job["batch_size"])
    found = round(profile.samples)
    if found < expected:
        raise UserError(
            f"{folder} has a minibatch size of {expected:,}, but the data set has only {found:,} "
            "samples; try --data synthetic, a smaller --batch-size or fewer ranks"
        )


@dataclass(frozen=True)
class Group:
    """The launches of one point.

    Attributes:
        launches: at least one, in the order of time.
    """

    launches: tuple[Measured, ...]

    @property
    def ranks(self) -> int:
        return int(self.first.job["ranks"])

    @property
    def threads(self) -> int:
        return int(self.first.job["threads"])

    @property
    def total_threads(self) -> int:
        """Number of compute threads of all ranks: ranks × threads."""
        return self.ranks * self.threads

    @property
    def batch_size(self) -> int:
        """Global minibatch size."""
        return int(self.first.job["batch_size"])

    @property
    def possible(self) -> float:
        """Upper bound of the efficiency if ranks share cores."""
        return float(self.first.job["possible"])

    @property
    def first(self) -> Profile:
        """The profile of the first launch."""
        return self.launches[0].profile

    @property
    def steps_ms(self) -> NDArray[np.float64]:
        """Wall time of each launch divided by its steps, in milliseconds."""
        return self.walls.steps_ms

    @property
    def by_round(self) -> dict[str, Measured]:
        """The launch of each round."""
        return {launch.round: launch for launch in self.launches if launch.round}

    def compared_with(self, base: Group) -> tuple[Group, Group, bool]:
        """Return the launches of this group and of the base that are compared, and if in pairs.

        These are all launches that have a partner in their round if there are enough, else all.
        """
        own, others = self.by_round, base.by_round
        common = common_rounds(list(others), list(own))
        if not common:
            return self, base, False
        one, two = (Group(tuple(side[name] for name in common)) for side in (own, others))
        return one, two, True

    @property
    def walls(self) -> Walls:
        """Steps of the launches, and how many steps they are the means of."""
        return walls_of([launch.profile for launch in self.launches])

    @property
    def cores(self) -> float:
        """Number of cores that compute: the compute threads, at most the cores they share."""
        return self.total_threads * self.possible

    @property
    def median_launch(self) -> Measured:
        """The launch with the median step time."""
        order = np.argsort(self.steps_ms, kind="stable")
        return self.launches[int(order[(len(order) - 1) // 2])]

    @property
    def step_ms(self) -> float:
        """Mean of wall time / steps over the launches in milliseconds."""
        return float(np.mean(self.steps_ms))

    @property
    def launch_parts(self) -> list[Parts]:
        """Parts of the step of each launch."""
        return [launch.profile.step_parts.all_steps for launch in self.launches]

    @property
    def parts(self) -> Parts:
        """Parts of the step, by the share of each in all steps of all launches."""
        return mean_parts(uniform(self.launch_parts), self.step_ms)

    @property
    def other_cores(self) -> float | None:
        """Most cores that other programs used during a launch; None if it is unknown."""
        known = [m.other_cores for m in self.launches if m.other_cores is not None]
        return max(known, default=None)

    @property
    def hidden_ms(self) -> float:
        """Communication that overlaps with computation: mean over ranks, median over launches."""
        return float(np.median([_hidden(m.profile) for m in self.launches]))


def _hidden(profile: Profile) -> float:
    return float(np.mean([rank.hidden_ms for rank in profile.ranks]))


def make_groups(launches: Sequence[Measured]) -> list[Group]:
    """Group launches by point; the groups are sorted by threads, ranks and minibatch size."""
    found: dict[tuple[int, int, int], list[Measured]] = {}
    for launch in sorted(launches, key=lambda launch: launch.order):
        found.setdefault(launch.key, []).append(launch)
    return [Group(tuple(found[key])) for key in sorted(found)]


def base_of(groups: Sequence[Group]) -> Group:
    """Return the base of speed-ups: the group with the fewest compute threads."""
    return min(groups, key=lambda group: (group.total_threads, group.threads, group.batch_size))


def scalings_of(group: Group, base: Group) -> tuple[str, ...]:
    """Return the kinds of scaling to which a group belongs; the base belongs to both.

    Raises:
        UserError: the minibatch size is neither that of weak nor that of strong scaling.
    """
    weak = group.batch_size * base.total_threads == base.batch_size * group.total_threads
    strong = group.batch_size == base.batch_size
    if not weak and not strong:
        grown = base.batch_size * group.total_threads / base.total_threads
        raise UserError(
            f"{group.launches[0].folder} has a minibatch of {group.batch_size} with "
            f"{group.total_threads} compute threads, the base has {base.batch_size} with "
            f"{base.total_threads}; expected {base.batch_size} (strong scaling) or {grown:g} "
            "(weak scaling)"
        )
    return (WEAK,) * weak + (STRONG,) * strong


def make_points(groups: Sequence[Group]) -> tuple[Point, ...]:
    """Return the points of weak, then of strong scaling, each sorted by threads and ranks.

    A kind of scaling for which only the base was measured has no points, unless the base is the
    only point of the study.
    """
    base = base_of(groups)
    slowdowns = {
        (group.ranks, group.threads): _slowdown(group, base)
        for group in groups
        if WEAK in scalings_of(group, base) and base.parts.compute
    }
    points = [
        _point(scaling, group, base, slowdowns.get((group.ranks, group.threads)))
        for group in groups
        for scaling in scalings_of(group, base)
    ]
    several = {
        p.scaling
        for p in points
        if p.total_threads != base.total_threads or p.threads != base.threads
    }
    kept = [p for p in points if p.scaling in several or (not several and p.scaling == WEAK)]
    kept = _with_known_losses(kept, groups)
    return tuple(sorted(kept, key=lambda p: (p.scaling != WEAK, p.threads, p.ranks)))


def _slowdown(group: Group, base: Group) -> float:
    """Return the compute time of a group over that of the base; both contain the same parts."""
    own, others = (
        mean_parts(uniform(one.launch_parts, two.launch_parts), one.step_ms).compute
        for one, two in ((group, base), (base, group))
    )
    return own / others


def _with_known_losses(points: Sequence[Point], groups: Sequence[Group]) -> list[Point]:
    """Return the points with what their launches recovered of known losses."""
    by_key = {group.launches[0].key: group for group in groups}
    known = [loss for group in groups for m in group.launches for loss in m.profile.known]
    comparisons = len({(loss.name) for loss in known if loss.injected_ms}) * sum(
        any(loss.injected_ms for m in group.launches for loss in m.profile.known)
        for group in groups
    )
    found = []
    for point in points:
        profiles = [
            m.profile for m in by_key[point.threads, point.ranks, point.batch_size].launches
        ]
        recoveries = judge((k for p in profiles for k in p.known), max(comparisons, 1))
        loads = [p.other_cores for p in profiles if p.other_cores is not None]
        reason = why_withheld(
            recoveries, max(loads, default=None), profiles[0].environment.get("cores")
        )
        found.append(replace(point, recoveries=recoveries, losses_withheld=reason))
    return found


def _point(scaling: str, group: Group, base: Group, slowdown: float | None) -> Point:
    """Return a point.

    Args:
        scaling: kind of scaling.
        group: launches of the point.
        base: launches of the base point.
        slowdown: compute time of the weak point with the same ranks and threads over that of the
            base; None if there is no such point.
    """
    ratio = group.total_threads / base.total_threads
    grown = group.batch_size / base.batch_size
    *compared, paired = group.compared_with(base)
    faster, is_range = _faster(group, base)
    speed_up, is_known = faster.times(grown), faster.n >= FEWEST or group is base
    step, apart = mean_wall(group.walls)
    if group is not base:
        # Rounds without a launch of the base, or of the group, are not compared. The step is that
        # of the compared rounds, so that the columns of a row multiply.
        step = step.times(base.step_ms / faster.value / step.value)
    share = grown / ratio
    parts = mean_parts(uniform(group.launch_parts, base.launch_parts), step.value)
    ideal = mean_parts(uniform(base.launch_parts, group.launch_parts), share * base.step_ms)
    loss = subtract(parts, ideal)
    possible = min(group.possible / base.possible, 1.0)
    shared = max(min(ideal.compute * (1 / possible - 1), loss.compute), 0.0)
    if loss.without_core is not None:
        shared = 0.0  # Computation contains no time in which another rank has the core.
    contention = None if slowdown is None else ideal.compute * (slowdown - 1) - shared
    if scaling == WEAK:
        contention = loss.compute - shared  # The batch of a rank is that of the base.
    job, other = group.first.job, group.other_cores
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
        speed_up=speed_up if is_known else None,
        efficiency=UNITY if group is base else speed_up.times(1 / ratio) if is_known else None,
        karp_flatt=(
            karp_flatt(speed_up, group.cores / base.cores)
            if is_known and scaling == STRONG
            else None
        ),
        parts=parts,
        ideal=ideal,
        loss=loss,
        loss_intervals={}
        if group is base
        else _loss_intervals(loss, compared[0], compared[1], share, paired=paired),
        other_cores=None if other is None else max(other, base.other_cores or 0.0),
        shared_ms=shared,
        contention_ms=contention,
        small_batch_ms=None if contention is None else loss.compute - shared - contention,
        hidden_ms=group.hidden_ms,
        possible=possible,
        outliers=tuple(_outliers(group)),
        two_groups=apart,
        efficiency_has_range=is_range,
        pop=find_efficiencies(
            *([m.profile for m in side.launches] for side in compared),
            work=grown / ratio,
            paired=paired,
        ),
        joules_per_sample=joules_per_sample([launch.profile for launch in group.launches]),
        time_to_accuracy=(
            find_time_to_accuracy(group.launches, base.launches) if scaling == WEAK else None
        ),
    )


def _loss_intervals(
    loss: Parts, group: Group, base: Group, share: float, *, paired: bool
) -> dict[str, Estimate]:
    """Return the losses with intervals, of the compared launches."""
    own = uniform(group.launch_parts, base.launch_parts)
    ideal = [each.times(share) for each in uniform(base.launch_parts, group.launch_parts)]
    if loss.without_core is None:
        own, ideal = ([each.merged() for each in side] for side in (own, ideal))
    return loss_intervals(loss, own, ideal, paired=paired)


def _faster(group: Group, base: Group) -> tuple[Estimate, bool]:
    """Return T(base) / T(group), and whether its interval is the range because of two groups."""
    if group is base:
        return UNITY, False
    group, base, paired = group.compared_with(base)
    return compare_walls(base.walls, group.walls, paired=paired)


def has_range(group: Group, base: Group) -> bool:
    """Return True if the efficiency of a group has the range of its launches as interval."""
    return _faster(group, base)[1]


def _launch(measured: Measured) -> Launch:
    profile = measured.profile
    return Launch(
        measured.folder,
        measured.order,
        str(profile.environment.get("started", "")),
        profile.step_ms.mean,
        profile.step_parts.all_steps,
        _hidden(profile),
        profile.step_ms.median,
    )


def karp_flatt(speed_up: Estimate, ratio: float) -> Estimate | None:
    """Return the experimentally determined serial fraction e = (1/S − 1/p) / (1 − 1/p).

    Source: Karp and Flatt, "Measuring parallel processor performance", CACM 33 (1990).

    Args:
        speed_up: S.
        ratio: p, cores that compute over those of the base. Ranks that share a core count as one,
            because they cannot speed up more.

    Returns:
        The fraction with its interval; None for p ≤ 1.
    """
    if ratio <= 1 + 1e-9:
        return None
    inverse = speed_up.below(1.0)

    def fraction(value: float) -> float:
        return (value - 1 / ratio) / (1 - 1 / ratio)

    ends = fraction(inverse.low), fraction(inverse.high)
    return Estimate(fraction(inverse.value), *ends, inverse.n)


def _outliers(group: Group) -> list[int]:
    values = group.steps_ms
    if len(values) < FEWEST_TO_JUDGE:
        return []
    distances = np.abs(values - np.median(values))
    limit = OUTLIER * _DEVIATIONS * float(np.median(distances))
    return [
        launch.order
        for launch, distance in zip(group.launches, distances, strict=True)
        if distance > limit > 0
    ]
