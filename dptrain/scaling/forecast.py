"""Models judged by the largest point, which they do not see, and what the best one says beyond it.

The error of that prediction is called hindcast error. A forecast whose model missed the largest
measured point by more than `TRUSTED` is withheld.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dptrain.scaling.alpha_beta import Calibration, fit_alpha_beta
from dptrain.scaling.models import LAWS, Model, Setting, Timed, TooFewPointsError
from dptrain.scaling.points import Group, scalings_of
from dptrain.scaling.study import STRONG, WEAK, Fit, Forecast

TRUSTED = 0.15
FARTHEST = 4096
"""Ranks."""
UNMEASURED_NETWORK = "all measured ranks were on one node: what a network adds is not in it"


@dataclass(frozen=True)
class Series:
    """Points of one way of scaling with one number of threads.

    Attributes:
        base: of the study.
        groups: by ranks.
    """

    scaling: str
    threads: int
    base: Group
    groups: tuple[Group, ...]

    def setting(self, group: Group) -> Setting:
        """Of a measured point."""
        job = group.first.job
        at_once = group.workers * group.possible / (self.base.workers * self.base.possible)
        return Setting(
            at_once, group.ranks, group.threads, int(job["nodes"]), group.batch_size,
            float(job["local_batch"]), group.possible,
        )  # fmt: skip

    def setting_at(self, ranks: int, *, crowded: bool) -> Setting:
        """Of a number of ranks that was not measured.

        Args:
            ranks: of all nodes.
            crowded: on the measured nodes, sharing their cores if need be; else on as many nodes
                as it takes for each to hold what the fullest measured one held without sharing.
        """
        free = [group for group in self.groups if group.possible == 1] or self.groups[:1]
        fullest = max(free, key=_ranks_per_node)
        nodes = max(int(group.first.job["nodes"]) for group in self.groups)
        possible = 1.0
        if crowded:
            rooms = [g.possible * _ranks_per_node(g) for g in self.groups if g.possible < 1]
            nodes = min(nodes, ranks)
            possible = min(min(rooms, default=math.inf) / math.ceil(ranks / nodes), 1.0)
        else:
            nodes = math.ceil(ranks / _ranks_per_node(fullest))
        workers = ranks * self.threads / self.base.workers
        grows = self.scaling == WEAK
        batch = round(self.base.batch_size * workers) if grows else self.base.batch_size
        at_once = workers * possible / self.base.possible
        return Setting(
            at_once, ranks, self.threads, nodes, batch, math.ceil(batch / ranks), possible
        )


def _ranks_per_node(group: Group) -> int:
    return math.ceil(group.ranks / int(group.first.job["nodes"]))


def make_series(groups: Sequence[Group], base: Group) -> list[Series]:
    """What models are fitted to: ways of scaling and threads with two points or more."""
    found = []
    for scaling in (WEAK, STRONG):
        points = [group for group in groups if scaling in scalings_of(group, base)]
        for threads in sorted({group.threads for group in points}):
            members = tuple(group for group in points if group.threads == threads)
            if len(members) > 1:
                found.append(Series(scaling, threads, base, members))
    return found


def _fitters(series: Series) -> Iterator[Callable[[Sequence[Group]], Model]]:
    """Functions from points to a model."""

    def law(fit: Callable[[Sequence[Timed]], Model], groups: Sequence[Group]) -> Model:
        return fit([Timed(series.setting(group), group.step_ms) for group in groups])

    def parts(groups: Sequence[Group]) -> Model:
        return fit_alpha_beta([Calibration.of(group, series.setting(group)) for group in groups])

    yield from (partial(law, fit) for fit in LAWS[series.scaling])
    yield parts


@dataclass(frozen=True)
class Judged:
    """A model of all points, and how far it was off at the largest when it did not know that.

    Attributes:
        hindcast_ms: what it then foretold.
    """

    model: Model
    hindcast_error: float
    hindcast_ms: float


def judge(series: Series) -> tuple[list[Judged], list[str]]:
    """Fit every model, the best hindcast first; and say why some cannot be.

    Through as many points as it has parameters any curve goes. So a model is fitted if the points
    without the largest determine it, and that one is left to contradict it.
    """
    judged, missing = [], []
    largest = series.groups[-1]
    for fit in _fitters(series):
        try:
            blind, model = fit(series.groups[:-1]), fit(series.groups)
        except TooFewPointsError as reason:
            missing.append(str(reason))
            continue
        foretold = blind.step_ms(series.setting(largest))
        judged.append(Judged(model, abs(foretold / largest.step_ms - 1), foretold))
    notes = [f"{name_of(series)} without its largest point does not determine {_listed(missing)}"]
    return sorted(judged, key=lambda found: found.hindcast_error), notes if missing else []


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + " and " * (len(words) > 1) + "".join(words[-1:])


def name_of(series: Series) -> str:
    """``weak scaling``; with more than one thread, how many."""
    threads = f" with {series.threads} threads" if series.threads > 1 else ""
    return f"{series.scaling} scaling{threads}"


def as_fit(found: Judged, series: Series) -> Fit:
    """The record, with a curve through the measured range."""
    measured = {group.ranks: series.setting(group) for group in series.groups}
    curve = tuple(
        (ranks, found.model.step_ms(measured.get(ranks) or series.setting_at(ranks, crowded=True)))
        for ranks in _between(min(measured), max(measured), measured)
    )
    return Fit(
        found.model.name, series.scaling, series.threads, found.model.parameters,
        found.model.equation, found.hindcast_error, curve, found.hindcast_ms,
    )  # fmt: skip


def _between(first: int, last: int, measured: Collection[int]) -> list[int]:
    """The measured numbers, and others between them: all of few, about 30 of many."""
    step = max((last / first) ** (1 / 30), 1 + 1e-9)
    spaced = {round(first * step**i) for i in range(31)}
    few = set(range(first, last + 1)) if last - first < 32 else set()
    return sorted({*measured, *spaced, *few})


def make_forecast(series: Series, judged: Sequence[Judged]) -> Forecast:
    """What the best model says of 2, 4, … times as many ranks, up to `FARTHEST`."""
    empty = Forecast(series.scaling, series.threads, "", None, "", (), ())
    if not judged:
        reason = "no model could be tried on a point that it had not seen; measure more numbers "
        return replace(empty, withheld=reason + "of ranks")
    at_once = [series.setting(group).n for group in series.groups]
    if at_once[-1] <= max(at_once[:-1]):
        reason = "the largest point has no more cores than a smaller one, so no model was tried on "
        return replace(empty, withheld=reason + "growing; measure more ranks that have cores")
    best, error = judged[0].model, judged[0].hindcast_error
    named = replace(empty, model=best.name, hindcast_error=error)
    if error > TRUSTED:
        return replace(
            named,
            withheld=f"the best model, {best.name}, missed the largest point by {error:.0%}, which "
            f"is more than {TRUSTED:.0%}",
        )
    trusted = [found.model for found in judged if found.hindcast_error <= TRUSTED]
    return replace(
        named,
        assumptions=_assumptions(series, best),
        points=_points(series, best),
        efficiencies={
            model.name: tuple(efficiency for _, _, efficiency in _points(series, model))
            for model in trusted
        },
    )


def _assumptions(series: Series, model: Model) -> tuple[str, ...]:
    free = [group for group in series.groups if group.possible == 1] or series.groups[:1]
    ranks = max(map(_ranks_per_node, free))
    nodes = f"further ranks are on further nodes like the measured ones, {ranks} on each"
    seen = max(group.ranks for group in series.groups)
    far = f"measured up to {seen} rank{'s' * (seen > 1)}: what only more would show is not in it"
    one = max(int(group.first.job["nodes"]) for group in series.groups) == 1
    network = (UNMEASURED_NETWORK,) if one else ()
    limit = ("a rank has one sample or more",) if series.scaling == STRONG else ()
    return (nodes, *network, *model.assumptions, *limit, far)


def _points(series: Series, model: Model) -> tuple[tuple[int, float, float], ...]:
    base = series.base
    found = []
    ranks = 2 ** math.ceil(math.log2(series.groups[-1].ranks + 1))
    while ranks <= FARTHEST and (series.scaling == WEAK or ranks <= base.batch_size):
        at = series.setting_at(ranks, crowded=False)
        step_ms = model.step_ms(at)
        workers = ranks * series.threads / base.workers
        speed_up = (at.batch_size / step_ms) / (base.batch_size / base.step_ms)
        found.append((ranks, step_ms, speed_up / workers))
        ranks *= 2
    return tuple(found)
