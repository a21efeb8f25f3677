"""The pages of experiments: a sweep over settings, a study of variants, and a benchmark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dptrain.forms import NUMBER, TEXT, check_form
from dptrain.numbers import percent, scaled_bytes, short
from dptrain.report.elements.canvas import Plot, plot
from dptrain.report.elements.page import Key, Page, Section, restrictions_section
from dptrain.report.studies.bench_page import BENCH, Benchmark, bench_page
from dptrain.report.studies.experiment_parts import closing, settings_section
from dptrain.tables import Number, Records, Table
from dptrain.vocabulary import find_term

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dptrain.experiments.study import VariantResult
    from dptrain.experiments.sweep import PointResult

SWEEP, VARIANTS = "sweep", "variants"
"""Names of the files of experiments, without suffix."""

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


@dataclass(frozen=True)
class Variants:
    """The results of `dptrain study variants`.

    Attributes:
        settings: the settings of the training, with the original network.
        results: the results in the order of training.
    """

    settings: Mapping[str, Any]
    results: tuple[VariantResult, ...]


Experiment = Sweep | Variants | Benchmark


def read_experiment(folder: Path) -> Experiment | None:
    """Return the experiment that a folder contains; None if there is none.

    Raises:
        UserError: it has no results yet, or cannot be read.
    """
    if (folder / f"{SWEEP}.json").exists():
        from dptrain.experiments import sweep

        settings, points = sweep.read_results(folder)
        check_form(settings, {**CONDITIONS, "seeds": [NUMBER]}, str(folder / f"{SWEEP}.json"))
        return Sweep(settings, tuple(points))
    if (folder / f"{VARIANTS}.json").exists():
        from dptrain.experiments import study

        settings, results = study.read_results(folder)
        names = {**CONDITIONS, "network": TEXT, "data": TEXT}
        check_form(settings, names, str(folder / f"{VARIANTS}.json"))
        return Variants(settings, tuple(results))
    if (folder / f"{BENCH}.json").exists():
        from dptrain.experiments import bench

        settings, measured = bench.read_results(folder)
        names = {name: form for name, form in CONDITIONS.items() if name != "ranks"}
        check_form(settings, names, str(folder / f"{BENCH}.json"))
        return Benchmark(settings, tuple(measured))
    return None


def experiment_page(found: Experiment) -> Page:
    """Return the page of an experiment."""
    if isinstance(found, Benchmark):
        return bench_page(found)
    return _sweep_page(found) if isinstance(found, Sweep) else _variants_page(found)


def _sections(
    found: Sweep | Variants, table: Table, notes: tuple[str, ...], reasons: Sequence[str] = ()
) -> tuple[Section, ...]:
    return (
        Section(table.name, table.title, tables=(table,)),
        *([Section("refused", "Not possible", lists=(("", tuple(reasons)),))] * bool(reasons)),
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


# Sweeps.


def _sweep_page(found: Sweep) -> Page:
    from dptrain.experiments.sweep_tables import best_points, sweep_table

    settings, points = found.settings, found.points
    axes = [name.replace("_", " ") for name in settings["axes"]]
    best = best_points(points)
    runs, seeds = sum(point.runs for point in points), len(settings["seeds"])
    network = f" of {settings['network']}" if "network" in settings else ""
    data = f" on {settings['data']}" if "data" in settings else ""
    notes = _sweep_notes(points, seeds)
    return Page(
        kind="dptrain sweep",
        title=f"Sweep over {' and '.join(axes)}{network}{data}",
        about=f"{runs} runs of {len(points)} points, {seeds} seed{'s' * (seeds != 1)}; "
        f"{_conditions(settings)}.",
        headline=best_sentence(best) if best else "No run has a score.",
        lead=tuple(_sweep_plots(points)),
        text=(_overlap_sentence(best[0], points),) if best else (),
        file=f"{SWEEP}.csv",
        keys=tuple(_best_keys(best[0], points.index(best[0]))) if best else (),
        notes=notes,
        sections=_sections(found, sweep_table(points), notes),
        closing=closing(SWEEP),
    )


def _name(point: PointResult) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in point.point.items())


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
    where = " and with ".join(map(_name, points)) if len(points) < 4 else f"{len(points)} points"
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


def _best_keys(best: PointResult, row: int) -> list[Key]:
    assert best.score is not None
    score = Number(_score(best.score.value, best.scored), best.score.value, f"{row}.score")
    keys = [Key(best.scored.capitalize(), (score,), (f"mean of {best.runs} runs",))]
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
    from dptrain.experiments.sweep_tables import draw_sweep, sweep_lines

    lines = sweep_lines(points)
    scored = [point for line in lines.values() for point in line]
    if len(scored) < 2:
        return []
    axis = next(iter(scored[0].point)).replace("_", " ")

    def draw(axes: Axes) -> None:
        draw_sweep(axes, points)
        axes.set_xlabel(axis, labelpad=2)

    alt = "; ".join(
        f"{_name(p)}: {_score(p.score.value, p.scored)}" for p in scored if p.score is not None
    )
    return [
        plot(
            SWEEP,
            f"{scored[0].scored.capitalize()} by {axis}",
            "mean over seeds",
            draw,
            caption="Points are means over seeds, vertical lines their 95% intervals.",
            alt=alt,
            legend=1,
            lines=True,
            left=44.0,
        )
    ]


# Variants.


def _variants_page(found: Variants) -> Page:
    settings, results = found.settings, found.results
    trained = [result for result in results if result.possible]
    classifies = any(result.accuracy is not None for result in trained)
    refused = [result for result in results if not result.possible]
    notes = ("Each variant was trained once; runs with other seeds have other results.",)
    table = _variants_table(results, classifies=classifies)
    reasons = [f"{result.variant}: {result.why}" for result in refused]
    return Page(
        kind="dptrain study of variants",
        title=f"Variants of {settings['network']} on {settings['data']}",
        about=f"{len(trained)} variants trained, {len(refused)} not possible; "
        f"{_conditions(settings)}.",
        headline=_variants_headline(trained, classifies=classifies),
        lead=tuple(_variants_plots(trained, classifies=classifies)),
        text=(),
        file=f"{VARIANTS}.csv",
        keys=(),
        notes=notes,
        sections=_sections(found, table, notes, reasons),
        closing=closing(VARIANTS),
    )


def _variants_headline(trained: Sequence[VariantResult], *, classifies: bool) -> str:
    if not trained:
        return "No variant could be trained."
    best = _best_variant(trained)
    fastest = min(trained, key=lambda result: result.step_ms)
    score = (
        f"The highest test accuracy is {percent(best.accuracy or 0.0)}"
        if classifies
        else f"The lowest test loss is {short(best.test_loss)}"
    )
    return (
        f"{score} (variant {best.variant}); the shortest step takes {short(fastest.step_ms)} ms "
        f"(variant {fastest.variant})."
    )


def _best_variant(trained: Sequence[VariantResult]) -> VariantResult:
    return min(trained, key=lambda r: r.test_loss if r.accuracy is None else -r.accuracy)


def _variants_plots(trained: Sequence[VariantResult], *, classifies: bool) -> list[Plot]:
    from dptrain.experiments.plots import draw_variants

    if len(trained) < 2:
        return []

    def draw(axes: Axes) -> None:
        draw_variants(axes, trained)
        axes.set_xlabel("time per step, ms (log scale)", labelpad=2)

    what = "test accuracy" if classifies else "test loss"
    alt = "; ".join(
        f"{r.variant}: {short(r.step_ms)} ms, "
        + (short(r.test_loss) if r.accuracy is None else percent(r.accuracy))
        for r in trained
    )
    return [
        plot(
            "accuracy-by-time",
            f"{what.capitalize()} by time per step",
            f"{what}, %" if classifies else what,
            draw,
            caption="Lines are the quartiles of the time per step.",
            alt=alt,
            legend=1,
            left=40.0,
        )
    ]


def _variants_table(results: Sequence[VariantResult], *, classifies: bool) -> Table:
    records = Records.of([asdict(r) if r.possible else {"variant": r.variant} for r in results])
    columns = (
        records.texts("variant", "variant"),
        records.values("accuracy", unit="%") if classifies else records.values("test_loss"),
        replace(records.values("step_ms"), term=find_term("variants.step_ms")),
        records.values("conv_forward_ms"),
        records.values("conv_forward_share", decimals=0),
        records.values("many_steps_s", decimals=0),
        records.values("memory_bytes"),
    )
    note = "Steps are medians. Convolutions: stages with a convolution in a forward pass."
    return Table("Variants", columns, note, "variants", f"{VARIANTS}.csv")
