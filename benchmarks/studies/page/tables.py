"""The tables of the page, from page/tables.toml.

Each table of the file has ``columns``, ``cells`` (templates, `texts.Template`), ``rows`` (as the
cases of `Values.compute`, combined with ``by``), ``values`` in whose paths ``{row}`` is a row, and
perhaps ``before`` (cells of first lines) and a ``note`` with the values of the last row. A column
and a cell ``*name format`` stand for a column of each case of a value. ``@name`` is the hardware of
a measurement. A value that was not measured is a dash, and a row without any is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.studies.claims.results import PUBLISHED, MissingResultError, Results
from benchmarks.studies.claims.spreads import MEDIANS, rounds_of
from benchmarks.studies.claims.texts import MISSING, filled
from benchmarks.studies.claims.values import Values
from benchmarks.studies.store import Result
from benchmarks.tables import markdown
from dptrain.toml import read_toml

FILE = Path(__file__).with_name("tables.toml")
LINK = "../benchmarks/results/studies"
PACKAGES = ("numba", "numpy", "cupy-cuda13x", "nvidia-cudnn-cu13", "torch")


@cache
def specifications() -> Mapping[str, Mapping[str, Any]]:
    """Return the tables of the file by name."""
    return read_toml(FILE)


def table(name: str, results: Results) -> str:
    """Return a table of the file with its note and its sources.

    Raises:
        MissingResultError: nothing of it was measured.
    """
    spec = specifications()[name]
    values = Values(results)
    listed = values.listed(spec["rows"])
    rows = list(product(listed, spec["by"])) if "by" in spec else listed
    lines, labels = [], dict[str, list[str]]()
    for number, row in enumerate(rows):
        values.row = row
        known = {key: _or_missing(values, own, labels, key) for key, own in spec["values"].items()}
        own = [v for key, v in known.items() if _is_measured(spec["values"][key])]
        if all(_is_missing(value) for value in own):
            continue
        if not number:
            lines += [[filled(cell, known) for cell in line] for line in spec.get("before", ())]
        lines.append([text for cell in spec["cells"] for text in _cells(cell, known, row, results)])
    if not lines:
        raise MissingResultError(f"the results of '{name}' were not measured yet")
    heads = list[str]()
    for column in spec["columns"]:
        heads += labels[column[1:]] if column.startswith("*") else [with_hardware(column, results)]
    note = with_hardware(filled(f"{spec['note']} ", known), results) if "note" in spec else ""
    return f"{markdown(heads, lines)}\n\n{note}{source(results, *values.used)}"


def _or_missing(
    values: Values, spec: Mapping[str, Any], labels: dict[str, list[str]], name: str
) -> Any:
    """Return a value, or by case, with None for what was not measured; remember the labels."""
    if "cases" not in spec:
        return _computed(values, spec, "")
    cases = values.listed(spec["cases"])
    labels[name] = [values.label(spec, case) for case in cases]
    found = [_computed(values, {k: v for k, v in spec.items() if k != "cases"}, c) for c in cases]
    return dict(zip(labels[name], found, strict=True))


def _computed(values: Values, spec: Mapping[str, Any], case: Any) -> Any:
    try:
        return values.one(spec, case)
    except MissingResultError:
        return None


def _is_measured(spec: Mapping[str, Any]) -> bool:
    return not spec["of"].startswith((f"{PUBLISHED}/", "counts/"))


def _is_missing(value: Any) -> bool:
    return value is None or (
        isinstance(value, Mapping) and all(each is None for each in value.values())
    )


def _cells(cell: str, known: Mapping[str, Any], row: Any, results: Results) -> Iterator[str]:
    if cell.startswith("*"):
        name, _, how = cell[1:].partition(" ")
        for value in known[name].values():
            yield filled(f"{{value:{how}}}", {"value": value})
    else:
        yield with_hardware(filled(cell, {**known, "row": row}), results)


def with_hardware(text: str, results: Results) -> str:
    """Return a text in which ``@name`` is the hardware of a measurement."""
    return re.sub(r"@([a-z-]+[a-z])", lambda match: results.hardware(match[1]), text)


def source(results: Results, *names: str) -> str:
    """Return the line below a table: files, repeats and load of the measurements."""
    parts = [f"`{name}` in `{found.kind}.json`{repeats_text(found)}, load "
             f"{found.about['load'][0]:.3g}"
             for name, found in ((name, results.find(name)) for name in names)
             if found.kind != "exact"]  # fmt: skip
    return f"Source: {'; '.join(parts)}."


def repeats_text(result: Result) -> str:
    """Return the number of repeats of a result, such as ``, n = 5 to 7``."""
    repeats = set(_repeats(result.values))
    known = sorted(repeats - {0})
    if not known:
        return ", n not stored" if repeats else ""
    low, high = known[0], known[-1]
    return f", n = {low:,}" if low == high else f", n = {low:,} to {high:,}"


def _repeats(values: Any) -> Iterator[int]:
    """Yield the numbers of repeats in a result; 0 for times without one."""
    if isinstance(values, Mapping):
        if rounds := rounds_of(values):
            yield len(rounds)
        elif any(key in values for key in MEDIANS):
            yield int(values.get("rounds", values.get("n", 0)))
        else:
            values = list(values.values())
    if isinstance(values, list):
        for each in values:
            yield from _repeats(each)


def machines(results: Results) -> str:
    """Return the machines, with the dates and versions of their results."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for result in results.all:
        about = result.about
        machine = f"{about['cores']} cores of {about['cpu']}"
        if "gpu" in about:
            machine = f"{about['gpu']}, driver {about['driver']}"
        versions = ", ".join(f"{n} {about['versions'][n]}" for n in PACKAGES
                             if n in about["versions"])  # fmt: skip
        file = f"[{result.kind}.json]({LINK}/{result.kind}.json)"
        key = file, machine, f"Python {about['python']}, {versions}"
        found.setdefault(key, []).append(about["date"].partition("T")[0])
    lines = [(file, machine, " to ".join(dict.fromkeys((min(dates), max(dates)))), versions)
             for (file, machine, versions), dates in found.items()]  # fmt: skip
    return markdown(("file", "machine", "dates", "versions"), lines, of_text=True)


def raw_results(results: Results, served: Mapping[str, Sequence[str]]) -> str:
    """Return the measurements: file, date, repeats, load, and which results and claims use it.

    Args:
        results: all results.
        served: results and claims by measurement, as ``name`` or ``name@kind``.
    """
    lines = []
    for result in results.all:
        names = [*served.get(f"{result.name}@{result.kind}", ())]
        if results.find(result.name) is result:
            names += served.get(result.name, ())
        if names:
            repeats = repeats_text(result).removeprefix(", ").removeprefix("n = ")
            lines.append((f"`{result.name}`", f"`{result.kind}.json`",
                          result.about["date"].partition("T")[0], repeats or MISSING,
                          f"{result.about['load'][0]:.3g}",
                          " ".join(dict.fromkeys(names))))  # fmt: skip
    return markdown(("measurement", "file", "date", "repeats", "load", "for"), sorted(lines),
                    of_text=True)  # fmt: skip
