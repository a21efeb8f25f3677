"""The conclusion of a study in sentences: how far it scales, what limits it, what is to come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dptrain.measure.statistics import FEWEST, Estimate
from dptrain.scaling.forecast import UNMEASURED_NETWORK
from dptrain.scaling.points import PARTS
from dptrain.scaling.study import Forecast, Point

GOOD = 0.8
"""Efficiency at which a job still counts as scaling; what lies below wastes every fifth worker."""
WORDS = {
    "compute": "slower computing",
    "data_wait": "waiting for data",
    "transfer": "exposed communication",
    "imbalance": "waiting for slower ranks",
    "other": "what lies between stages",
}
MODELS = {
    "amdahl": "Amdahl's law",
    "gustafson": "Gustafson's law",
    "usl": "the universal scalability law",
    "alpha-beta": "the α–β model",
}


def conclude(points: Sequence[Point], forecasts: Iterable[Forecast]) -> tuple[str, ...]:
    """Sentences, the most important first."""
    found = []
    by_scaling: dict[str, list[Point]] = {}
    for point in points:
        by_scaling.setdefault(point.scaling, []).append(point)
    for scaling, members in by_scaling.items():
        found += _about(scaling, members)
    return (*found, *(_of_forecast(forecast) for forecast in forecasts))


def _about(scaling: str, points: Sequence[Point]) -> list[str]:
    base, largest = points[0], max(points, key=lambda point: (point.workers, point.ranks))
    if largest.workers == points[0].workers:
        return [f"One point: a step takes {base.step_ms.value:.3g} ms; scaling takes two."]
    good = [point for point in points if point.efficiency.value >= GOOD]
    farthest = max(good, key=lambda point: (point.workers, point.ranks))
    if farthest is largest:
        first = f"{scaling.capitalize()} scaling holds up to {_place(largest)}, the most measured: "
        first += f"efficiency {_percent(largest.efficiency)}{_allowed(largest)}."
    else:
        reach = "no further than" if farthest.workers == base.workers else "to"
        first = (
            f"{scaling.capitalize()} scaling goes {reach} {_place(farthest)} with an efficiency "
        )
        first += f"of {GOOD:.0%} or more"
        if farthest.workers != base.workers:
            first += f" ({_percent(farthest.efficiency)})"
        first += f"; {_place(largest)}: {_percent(largest.efficiency)}{_allowed(largest)}."
    return [first, _limit(largest)]


def _limit(point: Point) -> str:
    """Where the loss of a point goes."""
    lost = {name: getattr(point.loss, name) for name in PARTS}
    total, ideal = point.loss.total, point.ideal.total
    if total <= 0.02 * ideal:
        return f"At {_place(point)} a step loses nothing worth naming."
    worst = sorted((name for name in PARTS if lost[name] > 0.1 * total), key=lambda n: -lost[n])
    named = [f"{WORDS[name]} ({lost[name]:.3g} ms{_why(name, point)})" for name in worst]
    return (
        f"There a step takes {point.step_ms.value:.3g} ms in place of {ideal:.3g} ms; the loss is "
        f"{_list(named)}."
    )


def _why(part: str, point: Point) -> str:
    """What the loss of compute follows from, where one cause alone would not say it."""
    if part != "compute":
        return ""
    causes = {
        "because ranks share cores": point.shared_ms,
        "because workers slow each other down": point.contention_ms or 0.0,
        "because a rank's batch is small": point.small_batch_ms or 0.0,
    }
    named = {cause: ms for cause, ms in causes.items() if ms > 0.1 * point.loss.compute}
    if len(named) == 1:
        return f", {next(iter(named))}"
    return f": {_list([f'{ms:.3g} ms {cause}' for cause, ms in named.items()])}" if named else ""


def _of_forecast(forecast: Forecast) -> str:
    threads = f" with {forecast.threads} threads" if forecast.threads > 1 else ""
    what = f"{forecast.scaling} scaling{threads}"
    if forecast.withheld:
        return f"No forecast of {what}: {forecast.withheld}."
    if not forecast.points:
        return f"No forecast of {what}: a minibatch has no sample for further ranks."
    ranks, _, efficiency = forecast.points[-1]
    ends = sorted(found[-1] for found in forecast.efficiencies.values())
    apart = f" ({ends[0]:.0%} to {ends[-1]:.0%} by all that can be trusted)" * (len(ends) > 1)
    good = [r for r, _, e in forecast.points if e >= GOOD]
    reach = f", {GOOD:.0%} or more up to {good[-1]:,}" if good and good[-1] != ranks else ""
    alone = "; one node was measured, so no network" * (UNMEASURED_NETWORK in forecast.assumptions)
    return (
        f"Forecast of {what}: {efficiency:.0%} at {ranks:,} ranks{apart}{reach}, by "
        f"{MODELS[forecast.model]}, which was off by {forecast.hindcast_error:.1%} at the largest "
        f"point when it had not seen it{alone}."
    )


def _place(point: Point) -> str:
    ranks = f"{point.ranks} rank{'s' * (point.ranks > 1)}"
    return f"{ranks} x {point.threads} threads" if point.threads > 1 else ranks


def _percent(value: Estimate) -> str:
    interval = "no interval" if value.n < FEWEST else f"{value.low:.0%} to {value.high:.0%}"
    return f"{value.value:.0%}, {interval}"


def _allowed(point: Point) -> str:
    if point.possible == 1:
        return ""
    return f", where the cores allow {point.possible:.0%}"


def _list(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
