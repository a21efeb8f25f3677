"""The conclusion of a study in sentences: how far training scales, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import takewhile

from dptrain.measure.machine.load import is_busy
from dptrain.measure.statistics import FEWEST, Estimate
from dptrain.numbers import percent
from dptrain.scaling.study import Forecast, Point, series_name

GOOD = 0.8
"""Efficiency from which a job counts as scaling; below it, a fifth of the machine is wasted."""
LARGE = 0.1
"""Share of all losses of a point from which the conclusion names a part."""
CAUSES = {
    "compute": "slower computation",
    "data_wait": "waiting for data",
    "transfer": "exposed communication",
    "imbalance": "waiting for other ranks",
    "without_core": "time without a core",
    "other": "time between stages",
}


def conclude(points: Sequence[Point], forecasts: Iterable[Forecast]) -> tuple[str, ...]:
    """Return the conclusion in sentences, the most important first.

    Missing forecasts are not part of it; `withheld_sentence` states the reason.
    """
    found = []
    by_scaling: dict[str, list[Point]] = {}
    for point in points:
        by_scaling.setdefault(point.scaling, []).append(point)
    for scaling, members in by_scaling.items():
        found += _about(scaling, members)
        found += _about_accuracy(members)
    return (*found, *(_of_forecast(forecast) for forecast in forecasts if forecast.points))


def withheld_sentence(forecast: Forecast) -> str:
    """Return why there is no forecast, as a sentence."""
    return f"No forecast of {series_name(forecast)}: {forecast.withheld.rstrip('.')}."


def _about(scaling: str, points: Sequence[Point]) -> list[str]:
    def size(point: Point) -> tuple[int, int]:
        return point.total_threads, point.ranks

    base, largest = points[0], max(points, key=size)
    name = f"{scaling.capitalize()} scaling"
    if largest.total_threads == base.total_threads:
        return [
            f"Only one point was measured, with a step of {base.step_ms.value:.3g} ms; a scaling "
            "study needs two."
        ]
    at_largest = f"{_percent(largest)}{_core_limit(largest)}"
    if _passes(largest):
        first = f"{name}: {at_largest} efficiency at {_ranks(largest)}, the largest measured point."
        return [first, _limit(largest)]
    others = sorted((point for point in points if point is not base), key=size)
    open_ones = [p for p in others if p.efficiency is not None and _low(p) < GOOD <= _high(p)]
    at = f"the efficiency at {_ranks(largest)} is {at_largest}"
    if len(open_ones) == len(others) == 1:
        first = f"{name}: undecided; {at}, and {GOOD:.0%} is in the interval."
        return [first, _limit(largest)]
    first = f"{name}: {_reached(base, others)}; {at}."
    if open_ones:
        first += (
            f" At {_ranks(open_ones[-1])} the interval includes {GOOD:.0%}, so the launches do not "
            "decide."
        )
    return [first, _limit(largest)]


def _about_accuracy(points: Sequence[Point]) -> list[str]:
    """Return the time to accuracy of the largest point, as a sentence; none if none was measured.

    Args:
        points: of one kind of scaling, the base first.
    """
    trained = [point for point in points if point.time_to_accuracy is not None]
    if not trained:
        return []
    largest = max(trained, key=lambda point: (point.total_threads, point.ranks))
    found = largest.time_to_accuracy
    assert found is not None
    name = f"{percent(found.accuracy)} validation accuracy"
    if found.time_s is None:
        return [
            f"{found.reached} of {found.trainings} launches at {_ranks(largest)} reached {name}, "
            "so its time is not known."
        ]
    sentence = f"Training reaches {name} in {_seconds(found.time_s)} at {_ranks(largest)}"
    if largest is points[0] or found.speed_up is None:
        return [f"{sentence}."]
    low, high, value = found.speed_up.low, found.speed_up.high, found.speed_up.value
    interval = f" (95% interval {low:.3g} to {high:.3g})" if found.speed_up.n >= FEWEST else ""
    return [f"{sentence}; the speed-up over {_ranks(points[0])} is {value:.3g}{interval}."]


def _seconds(value: Estimate) -> str:
    known = value.n >= FEWEST and value.low != value.high
    interval = f" (95% interval {value.low:.3g} to {value.high:.3g} s)" if known else ""
    return f"{value.value:.3g} s{interval}"


def _reached(base: Point, others: Sequence[Point]) -> str:
    """Return which points are known to reach a good efficiency, as a main clause.

    The efficiency may rise again with more ranks, so points after the first one that is not known
    to reach it are named separately.

    Args:
        base: the base of the speed-up.
        others: the other points in the order of size; the last one is not known to reach it.
    """
    passed = [point for point in others if _passes(point)]
    if not passed:
        if all(_high(point) < GOOD for point in others):
            return f"efficiency is below {GOOD:.0%} at every point above {_ranks(base)}"
        return f"no point above {_ranks(base)} is known to reach {GOOD:.0%} efficiency"
    up_to = list(takewhile(_passes, others))
    named = [f"up to {_value_at(up_to[-1])}"] if up_to else []
    named += [f"at {_value_at(point)}" for point in passed[len(up_to) :]]
    clause = f"efficiency is at least {GOOD:.0%} {_list(named)}"
    if len(passed) > len(up_to):
        lower = others[len(up_to)]
        clause += f", but it is {_percent(lower)} at {_ranks(lower)}"
    return clause


def _passes(point: Point) -> bool:
    return _low(point) >= GOOD


def _value_at(point: Point) -> str:
    return f"{_ranks(point)} ({_percent(point, brackets=False)})"


def _low(point: Point) -> float:
    """Return the lower limit of the efficiency; minus infinity if too few launches were made."""
    return -math.inf if point.efficiency is None else point.efficiency.low


def _high(point: Point) -> float:
    """Return the upper limit of the efficiency; infinity if too few launches were made."""
    return math.inf if point.efficiency is None else point.efficiency.high


def _limit(point: Point) -> str:
    """Return what the loss of a point consists of, as a sentence.

    A part is named if its interval excludes 0 and no other program may have caused it.
    """
    total, ideal = point.loss.total, point.ideal.total
    if point.losses_withheld:
        return (
            f"At {_ranks(point)} a step takes {point.step_ms.value:.3g} ms, ideal is {ideal:.3g} "
            f"ms; the causes are withheld, because {point.losses_withheld}."
        )
    if total <= 0.02 * ideal:
        return f"At {_ranks(point)} a step takes at most 2% longer than the ideal step."
    certain, is_disturbed = certain_losses(point), is_busy(point.other_cores)
    num_large = sum(ms > LARGE * total for ms in point.loss.known.values())
    step = f"At {_ranks(point)} a step takes {point.step_ms.value:.3g} ms, ideal is {ideal:.3g} ms"
    worst = sorted(certain, key=lambda name: -certain[name])
    named = [_loss_text(name, point) for name in worst]
    found = f"the main loss{'es are' if len(named) > 1 else ' is'} {_list(named)}" if named else ""
    if is_disturbed:
        others = f"other programs used up to {point.other_cores:.1f} cores"
        if not found:
            return f"{step}; the cause is not known, because {others}."
        rest = ", which may cause all other losses, too" if num_large > len(certain) else ""
        return f"{step}; {found}, and {others}{rest}."
    return f"{step}; {found or _why_unknown(point)}."


def certain_losses(point: Point) -> dict[str, float]:
    """Return the large losses in ms, by part, that are certain and not caused by other programs.

    Args:
        point: any but the base.
    """
    least = LARGE * point.loss.total
    found = {n: ms for n, ms in point.loss.known.items() if ms > max(least, 0.0)}
    names = ("without_core",) if is_busy(point.other_cores) else tuple(found)
    return {n: found[n] for n in names if n in found and _is_certain(point, n)}


def _is_certain(point: Point, part: str) -> bool:
    """Return True if the loss of a part is known to be positive.

    Studies of older versions have no intervals.
    """
    found = point.loss_intervals.get(part)
    return not point.loss_intervals if found is None else found.low > 0


def _why_unknown(point: Point) -> str:
    """Return why no cause is named, as a main clause."""
    fewest = min((each.n for each in point.loss_intervals.values()), default=FEWEST)
    if fewest < FEWEST:
        return f"fewer than {FEWEST} launches do not show the cause"
    return "the cause is not known, because the interval of no large loss excludes 0"


def _loss_text(part: str, point: Point) -> str:
    """Return a part with its loss, interval and cause."""
    found = point.loss_intervals.get(part)
    interval = "" if found is None else f", 95% interval {found.low:.3g} to {found.high:.3g} ms"
    return f"{CAUSES[part]} ({getattr(point.loss, part):.3g} ms{interval}{_why(part, point)})"


def _why(part: str, point: Point) -> str:
    """Return the causes of the loss of a part, as far as they are known."""
    knows_delays = point.loss.without_core is not None
    if part == "transfer" and point.possible < 1 and not knows_delays:
        return ", which includes waiting for a core that ranks share"
    if part == "without_core" and point.possible < 1:
        return ", because ranks share cores"
    if part != "compute":
        return ""
    causes = {
        "because ranks share cores": point.shared_ms,
        "because ranks compete for memory and caches": point.contention_ms or 0.0,
        "because the batch of a rank is smaller": point.small_batch_ms or 0.0,
    }
    named = {cause: ms for cause, ms in causes.items() if ms > 0.1 * point.loss.compute}
    if len(named) == 1:
        return f", {next(iter(named))}"
    return f": {_list([f'{ms:.3g} ms {cause}' for cause, ms in named.items()])}" if named else ""


def _of_forecast(forecast: Forecast) -> str:
    (ranks, _, efficiency), (low, high) = forecast.points[-1], forecast.intervals[-1]
    pairs = zip(forecast.points, forecast.intervals, strict=True)
    good = [r for (r, *_), _ in takewhile(lambda pair: pair[1][0] >= GOOD, pairs)]
    reach = f", at least {GOOD:.0%} up to {good[-1]:,}" if good and good[-1] != ranks else ""
    assumed = f" This assumes that {forecast.assumed[-1]}." if forecast.assumed[-1] else ""
    interval = f"95% interval {low:.0%} to {high:.0%}{', wide' * forecast.wide[-1]}"
    return (
        f"Forecast of {series_name(forecast)}: {efficiency:.0%} at {ranks:,} ranks ({interval})"
        f"{reach}; {forecast.unknown}.{assumed}"
    )


def _ranks(point: Point) -> str:
    ranks = f"{point.ranks} rank{'s' * (point.ranks > 1)}"
    return f"{ranks} × {point.threads} threads" if point.threads > 1 else ranks


def _percent(point: Point, *, brackets: bool = True) -> str:
    value = point.efficiency
    if value is None:
        return f"not known from fewer than {FEWEST} launches"
    if value.low == value.high:
        return f"{value.value:.0%}"
    kind = "range of the launches" if point.has_range("efficiency") else "95% interval"
    interval = f"{kind} {value.low:.0%} to {value.high:.0%}"
    return f"{value.value:.0%} ({interval})" if brackets else f"{value.value:.0%}, {interval}"


def _core_limit(point: Point) -> str:
    if point.possible == 1:
        return ""
    return f" of at most {point.possible:.0%} that the cores allow"


def _list(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
