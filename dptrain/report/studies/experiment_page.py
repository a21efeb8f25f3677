"""The pages of experiments: a sweep and a benchmark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dptrain.forms import NUMBER, TEXT, check_form
from dptrain.numbers import percent, scaled_bytes, short
from dptrain.report.elements.canvas import Plot, plot
from dptrain.report.elements.page import Key, Page, Section, restrictions_section
from dptrain.report.studies.bench_page import BENCH, Benchmark, bench_page
from dptrain.report.studies.experiment_parts import closing, settings_section
from dptrain.tables import Number, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dptrain.experiments.sweep_results import PointResult

SWEEP = "sweep"
"""Name of the files of a sweep, without suffix."""

CONDITIONS = {"ranks": NUMBER, "processor": TEXT, "cores": NUMBER, "dptrain": TEXT}
"""Where the runs of an experiment were made."""


@dataclass(frozen=True)
class Sweep:
    """The results of `dptrain study sweep`.

    Attributes:
        settings: what is equal in all runs, and ``axes`` with the values of the others.
        points: the results in the order of the table.
    """

    settings: Mapping[str, Any]
    points: tuple[PointResult, ...]


Experiment = Sweep | Benchmark


def read_experiment(folder: Path) -> Experiment | None:
    """Return the experiment that a folder contains; None if there is none.

    Raises:
        UserError: it has no results yet, or cannot be read.
    """
    from dptrain.experiments.sweep_results import FORMER, read_results

    if any((folder / f"{name}.json").exists() for name in (SWEEP, FORMER)):
        settings, points = read_results(folder)
        check_form(settings, {**CONDITIONS, "seeds": [NUMBER]}, str(folder / f"{SWEEP}.json"))
        return Sweep(settings, tuple(points))
    if (folder / f"{BENCH}.json").exists():
        from dptrain.experiments import bench

        settings, measured = bench.read_results(folder)
        names = {name: form for name, form in CONDITIONS.items() if name != "ranks"}
        check_form(settings, names, str(folder / f"{BENCH}.json"))
        return Benchmark(settings, tuple(measured))
    return None


def experiment_page(found: Experiment) -> Page:
    """Return the page of an experiment."""
    return bench_page(found) if isinstance(found, Benchmark) else _sweep_page(found)


def _sections(
    found: Sweep, table: Table, notes: tuple[str, ...], reasons: Sequence[str]
) -> tuple[Section, ...]:
    return (
        Section(table.name, table.title, tables=(table,)),
        *(
            [Section("refused", "Not possible or failed", lists=(("", tuple(reasons)),))]
            * bool(reasons)
        ),
        settings_section(found.settings, "all runs"),
        *restrictions_section(notes),
    )


def _conditions(settings: Mapping[str, Any]) -> str:
    ranks = int(settings["ranks"])
    return (
        f"{ranks} rank{'s' * (ranks != 1)} on {settings['processor']}, {settings['cores']} cores, "
        f"dptrain {settings['dptrain']}"
    )


def _score(value: float, scored: str) -> str:
    return percent(value) if scored.endswith("accuracy") else short(value)


def _sweep_page(found: Sweep) -> Page:
    from dptrain.experiments.sweep_tables import best_points, sweep_table

    settings, points = found.settings, found.points
    axes = [name.replace("_", " ") for name in settings["axes"]]
    best = best_points(points)
    runs, seeds = sum(point.runs for point in points), len(settings["seeds"])
    network = f" of {settings['network']}" if "network" in settings else ""
    data = f" on {settings['data']}" if "data" in settings else ""
    notes = _sweep_notes(points, seeds)
    reasons = tuple(f"{point.name}: {point.why}" for point in points if point.why)
    return Page(
        kind="dptrain sweep",
        title=f"Sweep over {' and '.join(axes)}{network}{data}",
        about=f"{runs} runs of {len(points)} points, {seeds} seed{'s' * (seeds != 1)}; "
        f"{_conditions(settings)}.",
        headline=best_sentence(best) if best else "No run has a score.",
        lead=(*_sweep_plots(points), *_plots_by_time(points)),
        text=(_overlap_sentence(best[0], points), *_fastest_sentence(points)) if best else (),
        file=f"{SWEEP}.csv",
        keys=tuple(_best_keys(best[0], points.index(best[0]))) if best else (),
        notes=notes,
        sections=_sections(found, sweep_table(points), notes, reasons),
        closing=closing(SWEEP),
    )


def _has_interval(point: PointResult) -> bool:
    return point.score is not None and math.isfinite(point.score.low)


def best_sentence(points: Sequence[PointResult]) -> str:
    """Return the score of the best points of a sweep, with its interval if there is one, and their
    values; of more than three, the number.
    """
    from dptrain.experiments.sweep_tables import limited

    best = points[0]
    assert best.score is not None
    score = limited(best.score, best.scored)
    interval = ""
    if _has_interval(best) and len(points) == 1:
        low, high = (_score(end, best.scored) for end in (score.low, score.high))
        interval = f" (95% interval {low} to {high})"
    extreme = "highest" if best.scored.endswith("accuracy") else "lowest"
    where = (
        " and with ".join(point.name for point in points)
        if len(points) < 4
        else f"{len(points)} points"
    )
    return (
        f"The {extreme} {best.scored} is {_score(score.value, best.scored)}{interval}, "
        f"{'equally ' if len(points) > 1 else ''}with {where}."
    )


def _overlap_sentence(best: PointResult, points: Sequence[PointResult]) -> str:
    others = [p for p in points if p is not best and p.score is not None]
    if not others:
        return "No other point has a score."
    known = [p for p in others if _has_interval(p)]
    if not _has_interval(best) or not known:
        return "Differences cannot be judged: an interval needs the runs of three seeds."
    assert best.score is not None
    alike = [p for p in known if p.score is not None and p.score.meets(best.score)]
    if not alike:
        return "The interval of no other point overlaps with that of the best one."
    return (
        f"{len(alike)} of {len(others)} other points may be as good, because "
        f"{'its interval overlaps' if len(alike) == 1 else 'their intervals overlap'} with that of "
        "the best one."
    )


def _fastest_sentence(points: Sequence[PointResult]) -> list[str]:
    from dptrain.experiments.sweep_tables import points_by_time

    timed = [(point.step_ms, point) for point in points_by_time(points) if point.step_ms]
    if not timed:
        return []
    step_ms, fastest = min(timed, key=lambda item: item[0])
    return [f"The shortest step takes {short(step_ms)} ms, with {fastest.name}."]


def _best_keys(best: PointResult, row: int) -> list[Key]:
    assert best.score is not None
    score = Number(_score(best.score.value, best.scored), best.score.value, f"{row}.score")
    of = f"mean of {best.runs} run{'s' * (best.runs != 1)}"
    keys = [Key(best.scored.capitalize(), (score,), (of,))]
    if best.step_ms is not None:
        step = Number(short(best.step_ms), best.step_ms, f"{row}.step_ms")
        keys.append(Key("Step, median", (step, " ms"), ("of the best point",)))
    if best.memory_bytes is not None:
        size = Number(scaled_bytes(best.memory_bytes), best.memory_bytes, f"{row}.memory_bytes")
        keys.append(Key("Memory", (size,), ("of a rank, best point",)))
    return keys


def _sweep_notes(points: Sequence[PointResult], seeds: int) -> tuple[str, ...]:
    notes = []
    failed = sum(point.failed for point in points)
    if failed:
        notes.append(f"{failed} run{'s' * (failed != 1)} failed, such as runs that diverged.")
    if any(point.scored.startswith("test") for point in points):
        notes.append(
            "The points are compared on test data, because the data has no validation split. The "
            "score of the best one is therefore too good."
        )
    if seeds < 3:
        notes.append("There are no intervals: they need at least three seeds (--seeds 3).")
    return tuple(notes)


def _sweep_plots(points: Sequence[PointResult]) -> list[Plot]:
    from dptrain.experiments.sweep_tables import draw_sweep, has_all_axes, sweep_lines

    points = [point for point in points if point.score is not None]
    if not has_all_axes(points):
        return []
    lines = sweep_lines(points)
    scored = [point for line in lines.values() for point in line]
    if len(scored) < 2:
        return []
    axis = next(iter(scored[0].point)).replace("_", " ")

    def draw(axes: Axes) -> None:
        draw_sweep(axes, points)
        axes.set_xlabel(axis, labelpad=2)

    return [
        plot(
            SWEEP,
            f"{scored[0].scored.capitalize()} by {axis}",
            "mean over seeds",
            draw,
            caption="Points are means over seeds, vertical lines their 95% intervals.",
            alt=_scores_text(scored),
            legend=1,
            lines=True,
            left=44.0,
        )
    ]


def _plots_by_time(points: Sequence[PointResult]) -> list[Plot]:
    from dptrain.experiments.sweep_tables import BY_TIME, draw_by_time, points_by_time

    timed = points_by_time(points)
    if not timed:
        return []

    def draw(axes: Axes) -> None:
        draw_by_time(axes, timed)
        axes.set_xlabel("time per step, ms (log scale)", labelpad=2)

    caption = "Vertical lines are 95% intervals over seeds, horizontal ones quartiles of the step."
    return [
        plot(
            BY_TIME,
            f"{timed[0].scored.capitalize()} by time per step",
            "mean over seeds",
            draw,
            caption=caption,
            alt=_scores_text(timed),
            legend=1,
            left=44.0,
        )
    ]


def _scores_text(points: Sequence[PointResult]) -> str:
    return "; ".join(
        f"{p.name}: {_score(p.score.value, p.scored)}"
        + ("" if p.step_ms is None else f", {short(p.step_ms)} ms")
        for p in points
        if p.score is not None
    )
