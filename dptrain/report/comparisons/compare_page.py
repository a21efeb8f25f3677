"""The page of a comparison of training runs, profiles or studies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from dptrain.measure.statistics import Estimate
from dptrain.numbers import decimals_for, fixed, short
from dptrain.report.comparisons.compare_plots import (
    accuracy_plots,
    changes_plot,
    efficiency_plot,
    layers_comparison,
    parts_plot,
    pop_comparison,
    signed,
)
from dptrain.report.comparisons.comparison import (
    FILE,
    POINTS,
    Comparison,
    Quantity,
    Result,
    common_points,
)
from dptrain.report.elements.canvas import Plot
from dptrain.report.elements.page import Key, Page, Section, restrictions_section
from dptrain.report.profiles.profile_page import MeasuredProfile, sentence
from dptrain.report.runs.run_record import TrainingRun
from dptrain.scaling.study import STRONG, WEAK, Study
from dptrain.tables import MISSING, Cell, Column, Number, Table, bounds, texts

MOST_KEYS = 4


def compare_page(comparison: Comparison, results: Sequence[Result]) -> Page:
    """Return the report of a comparison.

    Args:
        comparison: the comparison.
        results: the compared results, of one kind.
    """
    plots = [plot for plot in _plots(comparison, results) if plot is not None]
    changes = changes_plot(comparison)
    # Two plots are so much higher than the key results that a wide page would begin half empty.
    lead, *others = [plot for plot in (changes, *plots) if plot is not None]
    measured = [q for q in comparison.quantities if any(change for change in q.changes)]
    known = [q for q in measured if any(c and math.isfinite(c.high) for c in q.changes)]
    measured = known + [quantity for quantity in measured if quantity not in known]
    sentences = [_sentence(comparison, quantity) for quantity in measured[: max(len(known), 1)]]
    notes = tuple(map(sentence, comparison.notes))
    names = comparison.names
    return Page(
        kind=f"dptrain: comparison of {comparison.noun}",
        title=f"{', '.join(names[1:])} compared with {names[0]}",
        about=f"{len(names)} {comparison.noun}; differences are relative to {names[0]}.",
        headline=sentences[0] if sentences else "No quantity can be compared.",
        lead=(lead,),
        text=tuple(sentences[1:2]),
        file=FILE,
        keys=tuple(_keys(comparison, measured)),
        notes=notes,
        sections=(
            Section("differences", "Side by side", plots=tuple(others),
                    tables=(_quantities_table(comparison),)),
            Section("settings", "Settings that differ", text=_equal_text(comparison),
                    tables=_settings_tables(comparison)),
            *restrictions_section(notes),
            Section("results", "Compared results",
                    facts=tuple(zip(names, comparison.folders, strict=True))),
        ),
        closing=f"Written by dptrain. {FILE} contains each number in full precision.",
    )  # fmt: skip


def _plots(comparison: Comparison, results: Sequence[Result]) -> list[Plot | None]:
    names = comparison.names
    if isinstance(results[0], TrainingRun):
        runs = cast("Sequence[TrainingRun]", results)
        steps = [run.step_parts for run in runs]
        parts = [None if step is None else step.all_steps for step in steps]
        return [
            *accuracy_plots(names, runs),
            parts_plot(
                "parts",
                "Where the time of training goes",
                names,
                parts,
                "Means of all steps, with the slow ones, checkpoints and evaluations.",
            ),
            layers_comparison(names, [run.stages for run in runs]),
        ]
    if isinstance(results[0], MeasuredProfile):
        profiles = [found.profile for found in cast("Sequence[MeasuredProfile]", results)]
        return [
            parts_plot(
                "parts",
                "Where the time of a step goes",
                names,
                [profile.parts for profile in profiles],
                "Means of typical steps, the half of the steps closest to the median.",
            ),
            layers_comparison(names, [profile.stages for profile in profiles]),
            pop_comparison(names, [profile.pop for profile in profiles]),
        ]
    studies = cast("Sequence[Study]", results)
    found = [efficiency_plot(scaling, names, studies) for scaling in (WEAK, STRONG)]
    return [*(plot for plot in found if plot is not None), *_study_parts(names, studies)]


def _study_parts(names: Sequence[str], studies: Sequence[Study]) -> list[Plot | None]:
    """Return the parts of a step at the largest common point of each kind of scaling."""
    plots = []
    for scaling in (WEAK, STRONG):
        common = [points for points in common_points(studies) if points[0].scaling == scaling]
        if common:
            largest = max(common, key=lambda points: points[0].total_threads)
            plots.append(
                parts_plot(
                    f"parts-{scaling}",
                    f"{scaling.capitalize()} scaling: {largest[0].ranks} ranks",
                    names,
                    [point.parts for point in largest],
                    "Parts of the step, mean over ranks.",
                )
            )
    return plots


def _value_text(quantity: Quantity, estimate: Estimate | None) -> str:
    if estimate is None:
        return "unknown"
    if quantity.unit == "%":
        return f"{fixed(estimate.value, 1)}%"
    digits = 4 if abs(estimate.value) >= 1000 else 3
    return f"{short(estimate.value, digits=digits)} {quantity.unit}".strip()


def _sentence(comparison: Comparison, quantity: Quantity) -> str:
    """Return the values of a quantity and their differences, as a sentence or two."""
    names = comparison.names
    name = f"{quantity.name[:1].upper()}{quantity.name[1:]}"
    first = _value_text(quantity, quantity.values[0])
    known = [(i, change) for i, change in enumerate(quantity.changes) if change is not None]
    if len(names) == 2:
        ((i, change),) = known
        amount, interval = _change_words(quantity, change)
        value = _value_text(quantity, quantity.values[i])
        return (
            f"{name} of {names[i]} is {value}, {amount} than that of {names[0]}, {first}{interval}."
        )
    found = []
    for i, change in known:
        amount, interval = _change_words(quantity, change)
        found.append(f"{names[i]} {_value_text(quantity, quantity.values[i])}, {amount}{interval}")
    return f"{name} of {names[0]} is {first}. In comparison, {'; '.join(found)}."


def _change_words(quantity: Quantity, change: Estimate) -> tuple[str, str]:
    """Return ``1.4 percentage points less`` and its interval, ``(95% interval of …)``."""
    points = quantity.change_unit == POINTS
    decimals = 1 if abs(change.value) < 100 else 0
    amount = fixed(abs(change.value), decimals) + (f" {POINTS}" if points else "%")
    amount += " less" if change.value < 0 else " more"
    if not math.isfinite(change.high):
        return amount, ""
    unit = "" if points else "%"
    interval = f"{signed(change.low, decimals)}{unit} to {signed(change.high, decimals)}{unit}"
    doubt = ", so it is not certain" if change.low <= 0 <= change.high else ""
    return amount, f" (95% interval of the difference {interval}{doubt})"


def _keys(comparison: Comparison, measured: Sequence[Quantity]) -> list[Key]:
    """Return the most important changes, of the first quantity if there are several results."""
    keys: list[Key] = []
    several = len(comparison.names) > 2
    changes = [change for quantity in measured for change in quantity.changes if change]
    some_known = any(math.isfinite(change.high) for change in changes)
    for quantity in measured:
        at = f"quantities.{comparison.quantities.index(quantity)}"
        for i, change in enumerate(quantity.changes):
            # A change without an interval is no result; the table has it.
            is_left_out = change is not None and some_known and not math.isfinite(change.high)
            if change is not None and not is_left_out and len(keys) < MOST_KEYS:
                label = f"{quantity.name[:1].upper()}{quantity.name[1:]}"
                label = f"{comparison.names[i]}: {quantity.name}" if several else label
                unit = " points" if quantity.change_unit == POINTS else "%"
                number = Number(_rounded(change.value), change.value, f"{at}.changes.{i}.value")
                keys.append(Key(label, (number, unit), _interval_cell(change, f"{at}.changes.{i}")))
    return keys[: len(keys) // 2 * 2 or 1]


def _rounded(value: float) -> str:
    return signed(value, 1 if abs(value) < 100 else 0)


def _interval_cell(change: Estimate, at: str) -> Cell:
    if not math.isfinite(change.high):
        return ("no interval, so it may be chance",)
    decimals = 1 if abs(change.value) < 100 else 0
    return (
        "95% interval ",
        Number(signed(change.low, decimals), change.low, f"{at}.low"),
        " to ",
        Number(signed(change.high, decimals), change.high, f"{at}.high"),
    )


def _quantities_table(comparison: Comparison) -> Table:
    quantities = comparison.quantities
    columns = [
        texts(
            "quantity",
            [f"{q.name}, {q.unit}" if q.unit else q.name for q in quantities],
            kind="prose",
        )
    ]
    for i, name in enumerate(comparison.names):
        cells = tuple(
            _estimate_cell(q, q.values[i], f"quantities.{k}.values.{i}")
            for k, q in enumerate(quantities)
        )
        columns.append(Column(name, "(95% interval)", cells))
    for i, name in enumerate(comparison.names):
        if i:
            cells = tuple(
                _change_cell(q.changes[i], f"quantities.{k}.changes.{i}", q.change_unit)
                for k, q in enumerate(quantities)
            )
            head = "difference" if len(comparison.names) == 2 else f"difference of {name}"
            columns.append(Column(head, "(95% interval)", cells))
    note = (
        f"Differences to {comparison.names[0]}: of shares in percentage points (pp), of other "
        "quantities in per cent. A dash means that a value or its difference is not known."
    )
    return Table("Quantities", tuple(columns), note, "quantities", FILE)


def _estimate_cell(quantity: Quantity, found: Estimate | None, at: str) -> Cell:
    if found is None:
        return (MISSING,)
    known = [e.value for e in quantity.values if e is not None]
    decimals = 1 if quantity.unit == "%" else decimals_for(known)
    value = Number(fixed(found.value, decimals), found.value, f"{at}.value", "value")
    if not (math.isfinite(found.low) and math.isfinite(found.high)):
        return (value,)
    return (value, *bounds(found.low, found.high, decimals, at, ("low", "high")))


def _change_cell(found: Estimate | None, at: str, unit: str) -> Cell:
    if found is None:
        return (MISSING,)
    decimals = 1 if abs(found.value) < 100 else 0
    short_unit = " pp" if unit == POINTS else "%"
    value = Number(signed(found.value, decimals), found.value, f"{at}.value", "value")
    if not math.isfinite(found.high):
        return value, short_unit
    return (
        value,
        f"{short_unit} (",
        Number(signed(found.low, decimals), found.low, f"{at}.low", "low"),
        " to ",
        Number(signed(found.high, decimals), found.high, f"{at}.high", "high"),
        ")",
    )


def _equal_text(comparison: Comparison) -> tuple[str, ...]:
    return (
        ()
        if comparison.settings
        else ("All recorded settings, the machine and the version are equal.",)
    )


def _settings_tables(comparison: Comparison) -> tuple[Table, ...]:
    if not comparison.settings:
        return ()
    settings = comparison.settings
    columns = [texts("setting", [name.replace("_", " ") for name in settings], kind="prose")]
    columns += [
        texts(name, [values[i] for values in settings.values()], kind="prose")
        for i, name in enumerate(comparison.names)
    ]
    return (Table("Settings that differ", tuple(columns), "", "settings", FILE),)
