"""The timeline of a typical step of all ranks on a common clock, from the trace of a profile."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dptrain.files import parse_json
from dptrain.measure.step_record import DATA_WAIT, EXPOSED, STEP
from dptrain.measure.trace import COMMUNICATION, THREADS
from dptrain.numbers import short
from dptrain.report.elements.canvas import (
    BOTTOM,
    PARTS,
    PHASES,
    TOP,
    Plot,
    colour,
    plot,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RANKS = 16
"""Largest number of ranks in a plot."""
ROW_PT = 20.0
VISIBLE = 0.02
"""Share of a step from which a difference is visible in the plot."""
KINDS = {
    "forward": ("blue", "forward"),
    "backward": (PHASES["backward_weight"][0], "backward"),
    "rest": ("grey", "load, loss, update"),
    "data wait": (PARTS["data_wait"], "waiting for data"),
    "transfer": (PARTS["transfer"], "communication"),
    "imbalance": (PARTS["imbalance"], "waiting"),
    "sum": ("ink", "gradient sum in progress"),
}
"""Role of the colour, and label, of each kind of span."""


@dataclass(frozen=True)
class Span:
    """An activity of a rank.

    Attributes:
        rank: number of the rank.
        kind: a key of `KINDS`.
        begin, end: milliseconds since the first rank started the step.
    """

    rank: int
    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class StepSpans:
    """A step of all ranks.

    Attributes:
        step: number of the step.
        spans: activities of all ranks.
        bounds: start and end of the step by rank, in milliseconds.
    """

    step: int
    spans: tuple[Span, ...]
    bounds: dict[int, tuple[float, float]]

    @property
    def length(self) -> float:
        """Milliseconds from the first start to the last end."""
        return max(end for _, end in self.bounds.values())


def read_step(path: Path) -> StepSpans | None:
    """Return the most typical step of a ``trace.json``; None if there is no complete one."""
    try:
        events = parse_json(path.read_bytes())["traceEvents"]
        return _typical([event for event in events if event["ph"] == "X"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _typical(events: Iterable[Mapping[str, Any]]) -> StepSpans | None:
    """Return the most typical step among those with timed stages of all ranks.

    The durations, the exposed communication and the starts of all ranks are compared with their
    medians over the steps. The step with the smallest sum of deviations is typical in all of them:
    a step whose duration alone is the median may have a late rank that other steps do not have.
    """
    events = list(events)
    bounds: dict[int, dict[int, tuple[float, float]]] = {}
    for event in events:
        if event["name"] == STEP:
            begin = event["ts"] / 1e3
            step = bounds.setdefault(event["args"][STEP], {})
            step[event["pid"]] = (begin, begin + event["dur"] / 1e3)
    timed = _with_stages(events, bounds)
    if not timed:
        return None
    found = _features(events, {number: bounds[number] for number in timed})
    deviations = np.abs(found - np.median(found, axis=0)).sum(axis=1)
    chosen = timed[int(np.argmin(deviations))]
    zero = min(begin for begin, _ in bounds[chosen].values())
    own = {rank: (b - zero, e - zero) for rank, (b, e) in bounds[chosen].items()}
    spans = []
    for event in events:
        begin = event["ts"] / 1e3 - zero
        if event["name"] != STEP and _inside(begin, own.get(event["pid"])):
            spans.append(Span(event["pid"], _kind(event), begin, begin + event["dur"] / 1e3))
    return StepSpans(chosen, tuple(_with_waiting(spans, own)), own)


def _features(
    events: Iterable[Mapping[str, Any]], bounds: Mapping[int, Mapping[int, tuple[float, float]]]
) -> NDArray[np.float64]:
    """Return duration, exposed communication and relative start of each rank, by step.

    Returns:
        Milliseconds, shape (steps, 3 · ranks).
    """
    exposed: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["name"] == EXPOSED:
            exposed.setdefault(event["pid"], []).append((event["ts"] / 1e3, event["dur"] / 1e3))
    for spans in exposed.values():
        spans.sort()
    rows = []
    for ranks in bounds.values():
        first = min(begin for begin, _ in ranks.values())
        row = []
        for rank in sorted(ranks):
            begin, end = ranks[rank]
            spans = exposed.get(rank, [])
            inside = spans[bisect_left(spans, (begin,)) : bisect_left(spans, (end,))]
            row += [end - begin, sum(length for _, length in inside), begin - first]
        rows.append(row)
    return np.array(rows)


def _with_waiting(
    spans: Sequence[Span], bounds: Mapping[int, tuple[float, float]]
) -> Iterator[Span]:
    """Divide exposed communication into waiting and communication, as in the parts of a step.

    The waiting of a rank is the busy time of the slowest rank minus its own, at most its exposed
    communication; here it is the first part of that.
    """
    busy = {rank: end - begin for rank, (begin, end) in bounds.items()}
    for span in spans:
        if span.kind == "transfer":
            busy[span.rank] -= span.end - span.begin
    left = {rank: max(busy.values()) - time for rank, time in busy.items()}
    for span in sorted(spans, key=lambda span: span.begin):
        if span.kind != "transfer":
            yield span
            continue
        middle = span.begin + min(left[span.rank], span.end - span.begin)
        left[span.rank] -= middle - span.begin
        for kind, begin, end in (("imbalance", span.begin, middle), ("transfer", middle, span.end)):
            if end > begin:
                yield Span(span.rank, kind, begin, end)


def _with_stages(
    events: Iterable[Mapping[str, Any]], bounds: Mapping[int, Mapping[int, tuple[float, float]]]
) -> list[int]:
    """Return the steps in which forward stages of all ranks were timed, on a GPU only some."""
    forward: dict[int, list[float]] = {}
    for event in events:
        if event["cat"] == "forward":
            forward.setdefault(event["pid"], []).append(event["ts"] / 1e3)

    def timed(rank: int, limits: tuple[float, float]) -> bool:
        moments = forward.get(rank, [])
        next_one = bisect_left(moments, limits[0])
        return next_one < len(moments) and _inside(moments[next_one], limits)

    for moments in forward.values():
        moments.sort()
    return [
        step
        for step, ranks in sorted(bounds.items())
        if all(timed(*rank) for rank in ranks.items())
    ]


def _inside(moment: float, limits: tuple[float, float] | None) -> bool:
    return limits is not None and limits[0] - 1e-6 <= moment <= limits[1] + 1e-6


def _kind(event: Mapping[str, Any]) -> str:
    if event["name"] == DATA_WAIT:
        return "data wait"
    if event["name"] == EXPOSED:
        return "transfer"
    if event["tid"] == THREADS.index(COMMUNICATION):
        return "sum"
    phase = str(event["cat"])
    return "forward" if phase == "forward" else "backward" if "backward" in phase else "rest"


def timeline(found: StepSpans, suffix: str, where: str, straggler: int | None = None) -> Plot:
    """Return the timeline plot of a step, with one row per rank.

    Args:
        found: the step.
        suffix, where: as in `profile_plots`.
        straggler: rank that is late on average; None if there is none.
    """
    all_ranks = sorted(found.bounds)
    stride = -(-len(all_ranks) // RANKS)
    ranks = all_ranks[::stride]
    row = {rank: y for y, rank in enumerate(ranks)}
    there = {span.kind for span in found.spans}
    kinds = {name: kind for name, kind in KINDS.items() if name in there}

    def draw(axes: Axes) -> None:
        for name, (role, label) in kinds.items():
            spans = [s for s in found.spans if s.kind == name and s.rank in row]
            low, height = (0.27, 0.16) if name == "sum" else (-0.36, 0.6)
            axes.barh(
                [row[s.rank] + low for s in spans],
                [s.end - s.begin for s in spans],
                height,
                left=[s.begin for s in spans],
                align="edge",
                color=colour(role),
                edgecolor=colour("paper"),
                label=label,
                linewidth=[0.3 * (s.end - s.begin > 0.015 * found.length) for s in spans],
            )
        axes.set_ylim(len(ranks) - 0.5, -0.5)
        axes.set_xlim(0, found.length * 1.01)
        axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("time since the start of the step, ms", labelpad=2)

    fewer = f" The plot shows {len(ranks)} of {len(all_ranks)} ranks."
    return plot(
        f"timeline{suffix}",
        f"Timeline{where}",
        "rank",
        draw,
        height=TOP + BOTTOM + max(ROW_PT * len(ranks), 56.0),
        left=24.0,
        legend=2,
        caption=f"Step {found.step}, the most typical one, on a common clock. Waiting is the busy "
        "time of the slowest rank minus the own one."
        + _sum_sentence(found)
        + _start_sentence(found)
        + _slowest_sentence(found, straggler)
        + (fewer if len(ranks) < len(all_ranks) else ""),
        alt=f"Timeline of step {found.step} over {len(all_ranks)} ranks, "
        f"{short(found.length)} ms long.",
    )


def _sum_sentence(found: StepSpans) -> str:
    """Return what communication outside the sums is, if that is visible in the plot."""
    if time_outside_sums(found) < VISIBLE * found.length:
        return ""
    return (
        " A gradient sum ends when the part that the rank updates is summed. Communication after "
        "it exchanges the updated parameters, and lasts until all ranks have updated their parts."
    )


def time_outside_sums(found: StepSpans) -> float:
    """Return the longest time in ms in which a rank communicates while no sum is in progress."""
    longest = 0.0
    for rank in found.bounds:
        own = [span for span in found.spans if span.rank == rank]
        sums = [span for span in own if span.kind == "sum"]
        for span in own:
            if sums and span.kind in ("transfer", "imbalance"):
                # The sums of a rank follow each other and do not overlap.
                inside = sum(
                    max(0.0, min(span.end, s.end) - max(span.begin, s.begin)) for s in sums
                )
                longest = max(longest, span.end - span.begin - inside)
    return longest


def _start_sentence(found: StepSpans) -> str:
    """Return how much later the last rank started, if that is visible in the plot."""
    begins = {rank: begin for rank, (begin, _) in found.bounds.items()}
    last = max(begins, key=lambda rank: begins[rank])
    if begins[last] < 0.1 * found.length:
        return ""
    return (
        f" Rank {last} started {short(begins[last])} ms after the first one, because it left the "
        "previous gradient sum later."
    )


def _slowest_sentence(found: StepSpans, straggler: int | None) -> str:
    """Return which rank the others wait for, if it is not the one that is late on average."""
    waiting = {span.rank for span in found.spans if span.kind == "imbalance"}
    slowest = [rank for rank in found.bounds if rank not in waiting]
    if straggler is None or len(slowest) != 1 or slowest[0] == straggler:
        return ""
    return (
        f" Here the others wait for rank {slowest[0]}; on average they wait for rank {straggler}."
    )
