"""Forecast the efficiency of more ranks from the points of a study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dptrain.measure.profile.profile import Profile
from dptrain.measure.statistics import FEWEST
from dptrain.scaling.forecasts.ensemble import (
    WIDEST,
    Ensemble,
    Hindcast,
    Predicted,
    assumed_at,
    assumptions,
    fitted_network,
    hindcasts,
    is_trusted,
    larger_ranks,
    obstacle,
    why_no_more,
)
from dptrain.scaling.forecasts.observed import Figures, Observed
from dptrain.scaling.points import Group, scalings_of
from dptrain.scaling.study import STRONG, WEAK, Forecast

FEWEST_RANKS = 2
"""Smallest number of numbers of ranks; between nodes, more are necessary."""


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


def make_forecast(series: Series) -> Forecast:
    """Return the forecast of the ensemble for the next powers of two of the number of ranks.

    It ends where the answer becomes unknown: the interval is too wide, the number of nodes is more
    than `FARTHEST` times the measured one, or the only measured node is full.
    """
    forecast = Forecast(series.scaling, series.threads)
    points = [_observed(group) for group in series.groups if group.possible == 1]
    reason = _obstacle(series, points)
    if reason:
        return replace(forecast, withheld=reason)
    earlier = hindcasts(points)
    forecast = replace(
        forecast, hindcasts=tuple((h.ranks, h.predicted_ms, h.measured_ms) for h in earlier)
    )
    if network := fitted_network(points):
        forecast = replace(
            forecast,
            algorithm=network.algorithm,
            alpha_us=1e3 * network.alpha_ms,
            beta_gb_per_s=1e-6 / network.beta_ms if network.beta_ms else None,
        )
    if not is_trusted(earlier):
        return replace(forecast, withheld=_wrong(earlier[-1]))
    known, unknown = _predictions(series, points)
    if not known:
        return replace(forecast, withheld=unknown)
    scale = _of_study_base(series)
    return replace(
        forecast,
        assumptions=(*assumptions(points), *_ASSUMED, *[_SAMPLES] * (series.scaling == STRONG)),
        points=tuple((p.ranks, p.step_ms, scale * p.efficiency) for p in known),
        intervals=tuple((scale * p.low, scale * p.high) for p in known),
        assumes=tuple(assumed_at(p.ranks, points) for p in known),
        unknown=unknown,
    )


_ASSUMED = (
    "delays of ranks are independent, with a normal, exponential or Pareto distribution",
    "slow launches are as frequent as among the measured ones; intervals of points include "
    "further ones, those of forecasts do not",
)
_SAMPLES = "each rank has at least one sample"


def _obstacle(series: Series, points: Sequence[Observed]) -> str:
    """Return why there can be no forecast, or ""."""
    if len(points) < FEWEST_RANKS:
        return f"it needs {FEWEST_RANKS} numbers of ranks with own cores"
    if series.groups[-1].possible < 1:
        return "the ranks of the largest point share cores"
    if min(len(point.launches) for point in points) < FEWEST:
        return f"it needs {FEWEST} launches of each point"
    return obstacle(points)


def _wrong(found: Hindcast) -> str:
    return (
        f"the step of {found.ranks} ranks takes {found.measured_ms:.3g} ms, and the smaller points "
        f"predict {found.predicted_ms:.3g} ms; an error above {found.tolerated:.0%} is not "
        "extrapolated"
    )


def _predictions(series: Series, points: Sequence[Observed]) -> tuple[list[Predicted], str]:
    """Return the known predictions, and why the next one is unknown."""
    ensemble = Ensemble(points)
    known: list[Predicted] = []
    for ranks in larger_ranks(points):
        if series.scaling == STRONG and ranks > series.base.batch_size:
            return known, f"for {ranks:,} ranks the minibatch has too few samples"
        found = ensemble.predict(ranks)
        if not found.is_known:
            return known, (
                f"for {ranks:,} ranks and more the efficiency is unknown: the interval would be "
                f"{found.low:.0%} to {found.high:.0%}, and a forecast is given if its upper limit "
                f"is at most {WIDEST:g} times its lower limit"
            )
        known.append(found)
    last = known[-1].ranks if known else points[-1].ranks
    return known, f"beyond {last:,} ranks the efficiency is unknown: {why_no_more(points)}"


def _of_study_base(series: Series) -> float:
    """Return the efficiency of the smallest point of the series over the base of the study."""
    first, base = series.groups[0], series.base
    faster = (first.batch_size / first.step_ms) / (base.batch_size / base.step_ms)
    return faster * base.total_threads / first.total_threads


def _observed(group: Group) -> Observed:
    """Return the figures of a point that a forecast uses."""
    job, sums = group.first.job, group.first.sums
    figures = [_figures(measured.profile) for measured in group.launches]
    # Launches of older versions timed other sizes or none.
    sizes = set.intersection(*({size for size, _ in found.sweep} for found in figures))
    return Observed(
        group.ranks,
        int(job["nodes"]),
        group.batch_size,
        float(job["local_batch"]),
        tuple((s.bucket_bytes, s.buckets) for s in sums),
        tuple(
            replace(found, sweep=tuple(pair for pair in found.sweep if pair[0] in sizes))
            for found in figures
        ),
        str((group.first.environment.get("mpi") or {}).get("library", "")),
        _slots(group),
        on_gpu=bool(job.get("node_gpus")),
    )


def _slots(group: Group) -> int:
    """Return the number of ranks for which a node has GPUs or cores; 0 if it is unknown."""
    first, job = group.first, group.first.job
    if "node_cores" not in job:  # A profile of an older version.
        on_cores = first.ranks[0].device in ("", first.environment.get("cpu"))
        per_node = math.ceil(group.ranks / int(job["nodes"])) * group.threads
        # A launcher that binds ranks leaves each of them fewer cores than all need.
        return int(job["cores"]) // group.threads if on_cores and job["cores"] >= per_node else 0
    return int(job["node_gpus"] or job["node_cores"] // group.threads)


def _figures(profile: Profile) -> Figures:
    parts = profile.step_parts.all_steps
    return Figures(
        profile.step_ms.mean,
        parts.compute + parts.data_wait + parts.other + (parts.without_core or 0.0),
        parts.transfer,
        parts.imbalance,
        sum(s.buckets * s.time_ms.median for s in profile.sums),
        tuple((s.bucket_bytes, s.time_ms.median) for s in profile.sweep or profile.sums),
    )
