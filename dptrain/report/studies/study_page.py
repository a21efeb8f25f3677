"""The page of a study: the conclusion, then plots and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dptrain.audit.study import Audit
from dptrain.measure.profile.known_tables import NOT_VERIFIED
from dptrain.measure.profile.profile_files import PROFILE
from dptrain.measure.statistics import Estimate
from dptrain.numbers import fixed, percent, short
from dptrain.report.elements.canvas import Plot
from dptrain.report.elements.definitions import OF_STUDIES
from dptrain.report.elements.page import Key, Page, Section, restrictions_section
from dptrain.report.profiles.profile_page import (
    MeasuredProfile,
    definitions_section,
    environment_section,
    job_line,
    sentence,
    step_section,
)
from dptrain.report.studies.audit_tables import (
    audit_section,
    marked_key,
    marked_table,
    weak_sources,
)
from dptrain.report.studies.study_plots import point_name, study_plots
from dptrain.scaling.conclusion import certain_losses, withheld_sentence
from dptrain.scaling.files import STUDY
from dptrain.scaling.study import (
    STRONG,
    WEAK,
    Forecast,
    Point,
    Study,
    losses_withheld,
    series_name,
)
from dptrain.scaling.tables import (
    accuracy_table,
    forecast_table,
    known_losses_table,
    launches_table,
    loss_table,
    parts_table,
    points_table,
    pop_table,
)
from dptrain.tables import Cell, Number
from dptrain.vocabulary import label_of


def largest_points(study: Study) -> list[Point]:
    """Return the largest point of each kind of scaling, of which a report shows the step."""
    scalings = [s for s in (WEAK, STRONG) if any(p.scaling == s for p in study.points)]
    return [
        max((p for p in study.points if p.scaling == s), key=lambda p: (p.total_threads, p.ranks))
        for s in scalings
    ]


def study_page(
    study: Study,
    profiles: Mapping[str, MeasuredProfile],
    audit: Audit | None = None,
    notes: tuple[str, ...] = (),
) -> Page:
    """Return the report of a study.

    Args:
        study: the study.
        profiles: profiles of the largest points, by the name of the point, as far as they exist.
        audit: the audit of its intervals; None if there is none.
        notes: further restrictions, which are the first ones of the page.
    """
    if audit is None:
        return _page(study, profiles, notes)
    if not audit.describes(study):
        old = "The study has other launches than its audit; run dptrain audit again."
        return _page(study, profiles, (*notes, old))
    page = _page(study, profiles, (*notes, audit.sentence()) if audit.weak else notes)
    weak = weak_sources(study, audit)
    sections = tuple(
        replace(section, tables=tuple(marked_table(table, weak) for table in section.tables))
        for section in page.sections
    )
    at = next(i for i, section in enumerate(sections) if section.name == "launches")
    return replace(
        page,
        keys=tuple(marked_key(key, weak) for key in page.keys),
        sections=(*sections[:at], audit_section(audit), *sections[at:]),
    )


def _page(
    study: Study, profiles: Mapping[str, MeasuredProfile], notes: tuple[str, ...] = ()
) -> Page:
    """Return the page without the table of an audit, and with its `notes` first."""
    largest = largest_points(study)
    scalings = [point.scaling for point in largest]
    plots = {plot.name: plot for plot in study_plots(study)}

    def chosen(*prefixes: str) -> tuple[Plot, ...]:
        return tuple(p for n, p in plots.items() if n.startswith(prefixes))

    accuracy = accuracy_table(study)
    sections = [
        Section(
            "scaling",
            "Efficiency and speed-up",
            plots=chosen("speed-up"),
            tables=(
                *(points_table(study, scaling) for scaling in scalings),
                *([accuracy] if accuracy is not None else []),
            ),
        ),
        Section(
            "parts",
            "Parts of a step",
            text=_about_losses(study, scalings),
            plots=chosen("parts", "pop"),
            tables=tuple(
                table
                for scaling in scalings
                for make in (parts_table, loss_table, known_losses_table, pop_table)
                if (table := make(study, scaling)) is not None
            ),
        ),
        _forecast(study, chosen("forecast")),
    ]
    for point in largest:
        if point.name in profiles:
            title = f"Profile of a step: {point.scaling} scaling, {point_name(point)}"
            file = f"{study.profiles[point.name]}/{PROFILE}"
            sections.append(step_section(profiles[point.name], f"-{point.scaling}", title, file))
    valid, missing = _split_notes(study.notes)
    valid = (*notes, *valid)
    sections += [
        Section(
            "launches",
            "Launches",
            plots=chosen("launches"),
            tables=(launches_table(study),),
            new_page=True,
        ),
        *restrictions_section(valid),
        environment_section(
            study.environment, _commands(study), (_measured(study, profiles), *missing)
        ),
        definitions_section(OF_STUDIES),
    ]
    return Page(
        kind="dptrain scaling study",
        title=f"Scaling of {study.job['network']}",
        about=f"{job_line(study.job)}.",
        headline=study.conclusion[0],
        lead=chosen("efficiency"),
        text=study.conclusion[1:],
        file=STUDY,
        keys=tuple(_keys(study, largest)),
        notes=valid,
        sections=tuple(section for section in sections if section is not None),
        closing="Written by dptrain from study.json and the profiles of its launches, which "
        "contain each number in full precision.",
    )


def _about_losses(study: Study, scalings: Sequence[str]) -> tuple[str, ...]:
    """Return why tables of losses are withheld or not verified, as sentences."""
    found = []
    for scaling in scalings:
        points = [point for point in study.points if point.scaling == scaling]
        name = scaling.capitalize()
        if reason := losses_withheld(points):
            found.append(f"{name} scaling: the table of losses is withheld, because {reason}.")
        elif not any(point.recoveries for point in points):
            found.append(f"{name} scaling: {NOT_VERIFIED}.")
    return tuple(found)


def _split_notes(notes: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return restrictions of the validity, and what was not measured, as sentences."""
    missing = [note for note in notes if " not measured: " in note]
    valid = [note for note in notes if note not in missing]
    return tuple(map(sentence, valid)), tuple(map(sentence, missing))


def _commands(study: Study) -> list[tuple[str, str]]:
    """Return each command line once, with the names of its points."""
    points: dict[str, list[str]] = {}
    for name, command in study.commands.items():
        points.setdefault(command, []).append(name)
    return [(", ".join(names), command) for command, names in points.items()]


def _measured(study: Study, profiles: Mapping[str, MeasuredProfile]) -> str:
    """Return the number of launches, the time and the machine as a sentence."""
    launches = {launch.folder for point in study.points for launch in point.launches}
    ranks = sorted({point.ranks for point in study.points})
    span = f"{ranks[0]} to {ranks[-1]} ranks" if len(ranks) > 1 else f"{ranks[0]} ranks"
    started = str(study.environment.get("started", ""))[:16].replace("T", " ")
    devices = {rank.device for p in profiles.values() for rank in p.profile.ranks if rank.device}
    machine = ", ".join(sorted(devices)) or study.environment.get("cpu", "")
    return f"{len(launches)} launches on {span}, {started} UTC, {machine}."


def _keys(study: Study, largest: Sequence[Point]) -> list[Key]:
    keys = []
    for point in largest:
        scaling = f"{point.scaling.capitalize()} scaling"
        if point.efficiency is None:
            continue
        at = f"points.{study.points.index(point)}"
        value, detail = _estimate(point, "efficiency", at, 0)
        keys.append(Key(f"{scaling}: efficiency at {point_name(point)}", value, detail))
        value, detail = _estimate(point, "speed_up", at, 2)
        keys.append(Key(f"{scaling}: speed-up at {point_name(point)}", value, detail))
        lost = certain_losses(point)
        if lost and point.efficiency.value < 1 and not point.losses_withheld:
            name = max(lost, key=lambda part: lost[part])
            ms = lost[name]
            share = percent(ms / point.parts.total, decimals=0)
            keys.append(
                Key(
                    f"{scaling}: largest loss at {point_name(point)}",
                    (label_of(name),),
                    (Number(short(ms), ms, f"{at}.loss.{name}"), f" ms, {share} of the step"),
                )
            )
    return keys


def _estimate(point: Point, name: str, at: str, decimals: int) -> tuple[Cell, Cell]:
    """Return an estimate of a point, and its interval or the range of its launches.

    Efficiencies are in per cent, as in the sentences.
    """
    estimate: Estimate = getattr(point, name)
    source = f"{at}.{name}"
    scale, unit = (100.0, "%") if name == "efficiency" else (1.0, "")

    def number(value: float, end: str) -> Number:
        return Number(fixed(scale * value, decimals), value, f"{source}.{end}")

    value: Cell = (
        (number(estimate.value, "value"), unit) if unit else (number(estimate.value, "value"),)
    )
    low, high = number(estimate.low, "low"), number(estimate.high, "high")
    kind = "range of the launches" if point.has_range(name) else "95% interval"
    return value, (f"{kind} ", low, f"{unit} to ", high, unit)


def _forecast(study: Study, plots: tuple[Plot, ...]) -> Section | None:
    table = forecast_table(study)
    reasons: dict[str, list[Forecast]] = {}
    for forecast in study.forecasts:
        if not forecast.points:
            reasons.setdefault(forecast.withheld, []).append(forecast)
    withheld = tuple(
        withheld_sentence(found[0]).replace(
            series_name(found[0]), " and ".join(map(series_name, found)), 1
        )
        for found in reasons.values()
    )
    assumed: dict[tuple[str, ...], list[str]] = {}
    for forecast in study.forecasts:
        if forecast.points:
            assumptions = tuple(map(sentence, forecast.assumptions))
            assumed.setdefault(assumptions, []).append(series_name(forecast))
    lists = tuple(
        (f"The forecast of {' and '.join(what)} assumes:", items) for items, what in assumed.items()
    )
    if not (table or withheld or plots):
        return None
    tables = (table,) if table else ()
    return Section("forecast", "Forecast", text=withheld, lists=lists, plots=plots, tables=tables)
