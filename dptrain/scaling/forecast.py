"""Rank models by predicting the largest point from the others, and extrapolate the best one.

The error of that prediction is the hindcast error. If it is above `TRUSTED` for the best model, the
forecast is withheld.
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
"""Largest hindcast error of an accepted model."""
FARTHEST = 4096
"""Largest number of ranks of a forecast."""
UNMEASURED_NETWORK = "all measured ranks were on one node, so the cost of a network is not included"


@dataclass(frozen=True)
class Series:
    """The points of one kind of scaling with one number of threads per rank.

    Attributes:
        scaling: `WEAK` or `STRONG`.
        threads: compute threads per rank.
        base: base point of the study.
        groups: launches of each point, sorted by ranks.
    """

    scaling: str
    threads: int
    base: Group
    groups: tuple[Group, ...]

    def setting(self, group: Group) -> Setting:
        """Return the setting of a measured point."""
        job = group.first.job
        at_once = (
            group.total_threads * group.possible / (self.base.total_threads * self.base.possible)
        )
        return Setting(
            at_once, group.ranks, group.threads, int(job["nodes"]), group.batch_size,
            float(job["local_batch"]), group.possible,
        )  # fmt: skip

    def setting_at(self, ranks: int, *, on_measured_nodes: bool) -> Setting:
        """Return the setting of a number of ranks that was not measured.

        Args:
            ranks: ranks of all nodes.
            crowded: on the measured nodes, sharing their cores if need be; else on as many nodes
                as it takes for each to hold what the fullest measured one held without sharing.
        """
        free = [group for group in self.groups if group.possible == 1] or self.groups[:1]
        fullest = max(free, key=_ranks_per_node)
        nodes = max(int(group.first.job["nodes"]) for group in self.groups)
        possible = 1.0
        if on_measured_nodes:
            capacities = [g.possible * _ranks_per_node(g) for g in self.groups if g.possible < 1]
            nodes = min(nodes, ranks)
            possible = min(min(capacities, default=math.inf) / math.ceil(ranks / nodes), 1.0)
        else:
            nodes = math.ceil(ranks / _ranks_per_node(fullest))
        ratio = ranks * self.threads / self.base.total_threads
        grows = self.scaling == WEAK
        batch = round(self.base.batch_size * ratio) if grows else self.base.batch_size
        at_once = ratio * possible / self.base.possible
        return Setting(
            at_once, ranks, self.threads, nodes, batch, math.ceil(batch / ranks), possible
        )


def _ranks_per_node(group: Group) -> int:
    return math.ceil(group.ranks / int(group.first.job["nodes"]))


def make_series(groups: Sequence[Group], base: Group) -> list[Series]:
    """Return the series with two points or more, by kind of scaling and threads per rank."""
    found = []
    for scaling in (WEAK, STRONG):
        points = [group for group in groups if scaling in scalings_of(group, base)]
        for threads in sorted({group.threads for group in points}):
            members = tuple(group for group in points if group.threads == threads)
            if len(members) > 1:
                found.append(Series(scaling, threads, base, members))
    return found


def _fitters(series: Series) -> Iterator[Callable[[Sequence[Group]], Model]]:
    """Return the functions that fit a model to points."""

    def law(fit: Callable[[Sequence[Timed]], Model], groups: Sequence[Group]) -> Model:
        return fit([Timed(series.setting(group), group.step_ms) for group in groups])

    def parts(groups: Sequence[Group]) -> Model:
        return fit_alpha_beta([Calibration.of(group, series.setting(group)) for group in groups])

    yield from (partial(law, fit) for fit in LAWS[series.scaling])
    yield parts


@dataclass(frozen=True)
class Judged:
    """A model with its hindcast error.

    Attributes:
        model: the model, fitted to all points.
        hindcast_error: |predicted − measured| / measured of the largest point, fitted without it.
        hindcast_ms: that prediction.
    """

    model: Model
    hindcast_error: float
    hindcast_ms: float


def judge(series: Series) -> tuple[list[Judged], list[str]]:
    """Fit every model, and predict the largest point from the others.

    A model is fitted only if the points without the largest one determine its parameters;
    otherwise the hindcast would be no test.

    Returns:
        The models in the order of the hindcast error, and notes on models that are not determined.
    """
    judged, missing = [], []
    largest = series.groups[-1]
    for fit in _fitters(series):
        try:
            without_largest, model = fit(series.groups[:-1]), fit(series.groups)
        except TooFewPointsError as reason:
            missing.append(str(reason))
            continue
        predicted = without_largest.step_ms(series.setting(largest))
        judged.append(Judged(model, abs(predicted / largest.step_ms - 1), predicted))
    notes = [
        f"{name_of(series)}: the points without the largest one do not determine {_listed(missing)}"
    ]
    return sorted(judged, key=lambda found: found.hindcast_error), notes if missing else []


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + " and " * (len(words) > 1) + "".join(words[-1:])


def name_of(series: Series) -> str:
    """Return ``weak scaling``; with more than one thread per rank, their number, too."""
    threads = f" with {series.threads} threads per rank" if series.threads > 1 else ""
    return f"{series.scaling} scaling{threads}"


def as_fit(found: Judged, series: Series) -> Fit:
    """Return the record of a model, with its curve over the measured range."""
    measured = {group.ranks: series.setting(group) for group in series.groups}
    curve = tuple(
        (
            ranks,
            found.model.step_ms(
                measured.get(ranks) or series.setting_at(ranks, on_measured_nodes=True)
            ),
        )
        for ranks in _between(min(measured), max(measured), measured)
    )
    return Fit(
        found.model.name, series.scaling, series.threads, found.model.parameters,
        found.model.equation, found.hindcast_error, curve, found.hindcast_ms,
    )  # fmt: skip


def _between(first: int, last: int, measured: Collection[int]) -> list[int]:
    """Return the measured numbers of ranks and up to about 30 others between them."""
    step = max((last / first) ** (1 / 30), 1 + 1e-9)
    spaced = {round(first * step**i) for i in range(31)}
    every = set(range(first, last + 1)) if last - first < 32 else set()
    return sorted({*measured, *spaced, *every})


def make_forecast(series: Series, judged: Sequence[Judged]) -> Forecast:
    """Return the prediction of the best model for the next powers of two, up to `FARTHEST`."""
    empty = Forecast(series.scaling, series.threads, "", None, "", (), ())
    if not judged:
        reason = "no model could predict the largest point from the others; measure more numbers "
        return replace(empty, withheld=reason + "of ranks")
    at_once = [series.setting(group).n for group in series.groups]
    if at_once[-1] <= max(at_once[:-1]):
        reason = "the largest point uses no more cores than a smaller one, so no prediction was "
        return replace(empty, withheld=reason + "tested; measure more ranks with own cores")
    best, error = judged[0].model, judged[0].hindcast_error
    named = replace(empty, model=best.name, hindcast_error=error)
    if error > TRUSTED:
        return replace(
            named,
            withheld=f"the best model, {best.name}, predicts the largest point with an error of "
            f"{error:.0%}, which is more than {TRUSTED:.0%}",
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
    nodes = f"additional ranks run on additional nodes like the measured ones, {ranks} per node"
    most = max(group.ranks for group in series.groups)
    far = f"effects that appear only beyond the measured {most} ranks are not included"
    one = max(int(group.first.job["nodes"]) for group in series.groups) == 1
    network = (UNMEASURED_NETWORK,) if one else ()
    limit = ("each rank has at least one sample",) if series.scaling == STRONG else ()
    return (nodes, *network, *model.assumptions, *limit, far)


def _points(series: Series, model: Model) -> tuple[tuple[int, float, float], ...]:
    base = series.base
    found = []
    ranks = 2 ** math.ceil(math.log2(series.groups[-1].ranks + 1))
    while ranks <= FARTHEST and (series.scaling == WEAK or ranks <= base.batch_size):
        at = series.setting_at(ranks, on_measured_nodes=False)
        step_ms = model.step_ms(at)
        ratio = ranks * series.threads / base.total_threads
        speed_up = (at.batch_size / step_ms) / (base.batch_size / base.step_ms)
        found.append((ranks, step_ms, speed_up / ratio))
        ranks *= 2
    return tuple(found)
