"""Tables of the results of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dptrain.experiments.cases import INFERENCE, TRAINING
from dptrain.experiments.findings import SATURATED, Finding, View, by_configuration, find, rows
from dptrain.experiments.measuring import Result, size_text
from dptrain.experiments.memory_budget import HOST_TOO_SMALL
from dptrain.numbers import fixed
from dptrain.tables import MISSING, Cell, Column, Number, Records, Table, bounds, texts
from dptrain.vocabulary import find_term

BENCH = "bench"
"""Name of the files of a benchmark, without suffix."""


def bench_tables(results: Sequence[Result], view: View) -> list[Table]:
    """Return tables of training, inference, largest batches and a summary, by configuration."""
    tables = []
    for (backend, precision, threads), own in by_configuration(results).items():
        device = next((r.device for r in own if r.device), "")
        configuration = f"{backend} {precision}, " + (device or _threads(threads))
        ordered = sorted(own, key=lambda r: (r.parameters, r.network, r.samples))
        training = [r for r in ordered if r.task == TRAINING]
        inference = [r for r in ordered if r.task == INFERENCE]
        searches = [r for r in ordered if r.case.searches]
        if training:
            tables.append(times_table(results, training, view, f"Training, {configuration}"))
        if inference:
            tables.append(times_table(results, inference, view, f"Inference, {configuration}"))
        if searches:
            tables.append(largest_table(results, searches, f"Largest batches, {configuration}"))
        tables.append(findings_table(find(own, view), view, configuration))
    return tables + comparison_tables(results)


def energy_reasons(results: Sequence[Result]) -> list[str]:
    """Return a line for each counter of energy that could not be read."""
    reasons = [reason for r in results if r.energy is not None for reason in r.energy.missing]
    return [f"energy not measured: {reason}" for reason in dict.fromkeys(reasons)]


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def comparison_tables(results: Sequence[Result]) -> list[Table]:
    """Return tables that compare the medians of all configurations; none for a single one."""
    groups = list(by_configuration(results))
    if len(groups) < 2:
        return []
    tables = []
    for task, noun in ((TRAINING, "training step"), (INFERENCE, "forward pass")):
        times: dict[tuple[int, str, int], dict[tuple[str, str, int], float]] = {}
        for r in results:
            if r.task == task and r.timing is not None:
                row = times.setdefault((r.parameters, r.network, r.samples), {})
                row[r.case.configuration] = r.median_ms
        if times:
            tables.append(_comparison(times, groups, f"Comparison: {noun}, ms"))
    return tables


def _comparison(
    cases: Mapping[tuple[int, str, int], Mapping[tuple[str, str, int], float]],
    groups: Sequence[tuple[str, str, int]],
    title: str,
) -> Table:
    names = [
        f"{backend} {precision}" + (f" x{threads}" if threads > 1 else "")
        for backend, precision, threads in groups
    ]
    heads = ("network", "batch", *names, "fastest")
    cells = []
    for (_, network, samples), times in sorted(cases.items()):
        fastest = min(times, key=times.__getitem__)
        slowest = max(times.values())
        texts_ = [digits(times[each]) if each in times else "" for each in groups]
        name = names[groups.index(fastest)]
        gain = f"{name}, {slowest / times[fastest]:.1f}×" if len(times) > 1 else ""
        cells.append((network, f"{samples:,}", *texts_, gain))
    note = "×: speed relative to the slowest in the row"
    return Table.of_rows(title, heads, cells, text=("network", "fastest"), note=note, keys=2)


def times_table(
    results: Sequence[Result],
    chosen: Sequence[Result],
    view: View,
    title: str,
    *,
    name: str = "",
    shows_configuration: bool = False,
) -> Table:
    """Return the times of training steps or forward passes, a row for each case.

    Args:
        results: all results, in the order of the file.
        chosen: those of the table, of one task; some may not have been timed.
        view: parameters of the evaluation.
        title, name: as in `dptrain.tables.Table`.
        shows_configuration: whether a column names the backend, precision and threads.
    """
    records, trains = _records(results, chosen, view), chosen[0].task == TRAINING
    remarks = [_remark(result) for result in chosen]
    columns = [
        *_which(records, shows_configuration),
        records.counts("samples", is_key=True),
        _medians(records),
        records.values("samples_per_s", decimals=0),
        records.counts("outliers"),
        *([_epochs(records, view)] if trains else [_in_time_column(chosen, view)]),
        *_energies(chosen),
        *(
            replace(column, is_detail=True)
            for column in (
                records.counts("n"), records.values("gflops"), records.values("allocated_bytes"),
            )
        ),
        *([texts("remark", remarks, kind="prose")] if any(remarks) else []),
    ]  # fmt: skip
    budget = size_text(min(result.available_bytes for result in chosen))
    note = f"Throughput: of the median. Memory budget: {budget}."
    if trains:
        note = f"Epoch: {view.epoch_samples:,} samples, estimated from the time per step. {note}"
    return _of_file(title, _in_vocabulary(columns), note, name)


def _of_file(title: str, columns: Sequence[Column], note: str, name: str) -> Table:
    keys = max((i + 1 for i, column in enumerate(columns) if column.is_key), default=1)
    return Table(title, tuple(columns), note, name, f"{BENCH}.csv", keys=keys)


def _in_vocabulary(columns: Sequence[Column]) -> list[Column]:
    """Return columns with the definitions of benchmarks, whose file has no enclosing keys."""
    found = []
    for column in columns:
        term = find_term("bench", column.name)
        is_own = term is not None and term.name.startswith("bench.")
        found.append(
            replace(column, term=term, head=term.label, unit=column.unit or term.shown_unit)
            if term is not None and is_own
            else column
        )
    return found


def _records(results: Sequence[Result], chosen: Sequence[Result], view: View) -> Records:
    """Return the rows of the file that belong to some results."""
    items, numbers = rows(results, view), [list(results).index(each) for each in chosen]
    return Records([_measured(items[number]) for number in numbers], list(map(str, numbers)))


def _measured(row: Mapping[str, object]) -> Mapping[str, object]:
    """Return a row without rates and memory if nothing was timed, which are 0 in the file."""
    absent = ("samples_per_s", "gflops", "allocated_bytes") if row["median_ms"] is None else ()
    return {name: value for name, value in row.items() if name not in absent}


def _which(records: Records, shows_configuration: bool) -> list[Column]:
    """Return the columns that name a case."""
    columns = [records.texts("network", "network")]
    if shows_configuration:
        columns += [records.texts(name, name) for name in ("backend", "precision")]
        columns.append(records.counts("threads", "threads"))
    return columns


def _medians(records: Records) -> Column:
    """Return a column of medians with their quartiles."""
    cells: list[Cell] = []
    for row, at in zip(records.items, records.at, strict=True):
        if row["median_ms"] is None:
            cells.append((MISSING,))
            continue
        median = Number(fixed(row["median_ms"], 3), row["median_ms"], f"{at}.median_ms", "median")
        names = ("q1_ms", "q3_ms")
        ends = bounds(row["q1_ms"], row["q3_ms"], 3, at, names) if row["n"] > 1 else ()
        cells.append((median, *ends))
    term = find_term("median_ms")
    return Column("median", "ms (quartiles)", tuple(cells), term=term, name="time_ms")


def _epochs(records: Records, view: View) -> Column:
    head = "epoch" if view.epochs == 1 else f"{view.epochs:,} epochs"
    return records.values("training_s", head)


def _in_time_column(chosen: Sequence[Result], view: View) -> Column:
    verdicts = ["" if r.timing is None else "yes" if view.in_time(r) else "no" for r in chosen]
    return texts(f"within {duration(view.within_s)}", verdicts)


def _energies(chosen: Sequence[Result]) -> list[Column]:
    """Return a column of energies; none if no counter could be read."""
    found = [None if r.energy is None else r.energy.joules_per_sample for r in chosen]
    if not any(found):
        return []
    scaled = [None if each is None else each.times(1e3) for each in found]
    column = Records(scaled, [""] * len(scaled)).estimates("", "energy", "mJ/sample")
    return [replace(column, kind="computed", term=find_term("joules_per_sample"))]


def _remark(result: Result) -> str:
    """Return why a case was not measured, or a remark."""
    if result.why:
        return result.why
    is_refused = result.timing is None and result.needed_bytes > result.available_bytes
    return f"needs {size_text(result.needed_bytes)}" if is_refused else ""


def largest_table(
    results: Sequence[Result],
    searches: Sequence[Result],
    title: str,
    *,
    name: str = "",
    shows_configuration: bool = False,
) -> Table:
    """Return the largest batches, a row for each network and task.

    Args:
        results: all results, in the order of the file.
        searches: those of the table.
        title, name, shows_configuration: as for `times_table`.
    """
    records = _records(results, searches, View())
    remarks = [_limit(result) for result in searches]
    columns = [
        *_which(records, shows_configuration),
        texts("task", [TRAINING if r.case.trains else INFERENCE for r in searches]),
        records.counts("samples"),
        records.values("needed_bytes"),
        records.values("available_bytes"),
        records.values("next_bytes"),
        *([texts("remark", remarks, kind="prose")] if any(remarks) else []),
    ]
    columns = [
        replace(column, head="largest batch") if column.name == "samples" else column
        for column in _in_vocabulary(columns)
    ]
    note = (
        "By plans: memory that a plan needs, memory that was free or allowed, and memory of the "
        "next larger batch."
    )
    return _of_file(title, columns, note, name)


def _limit(result: Result) -> str:
    """Return what limits the batch, if it is not the memory budget."""
    if result.largest is None or not result.fits:
        return result.why
    is_memory = result.largest.next_bytes > result.available_bytes
    return "" if is_memory else f"the next batch {_short(result.largest.why)}"


def findings_table(findings: Sequence[Finding], view: View, configuration: str) -> Table:
    """Return a summary of the times, a row for each network, without columns that are empty."""
    saturates = "saturates at"
    columns: dict[str, list[str]] = {
        "network": [f.network for f in findings],
        "parameters": [f"{f.parameters:,}" for f in findings],
        saturates: ["" if f.saturation is None else str(f.saturation) for f in findings],
        "best samples/s": [f"{f.samples_per_s:,.0f}" if f.samples_per_s else "" for f in findings],
        f"within {duration(view.within_s)}": [_in_time(f) for f in findings],
    }
    columns = {heading: values for heading, values in columns.items() if any(values)}
    note = ""
    if saturates in columns:
        note = (
            f"{saturates}: the smallest batch size with at least {SATURATED:.0%} of the best "
            "samples/s"
        )
    rows_ = list(zip(*columns.values(), strict=True))
    title = f"Summary, {configuration}"
    return Table.of_rows(title, tuple(columns), rows_, text=("network",), note=note)


def _in_time(finding: Finding) -> str:
    """Return the numbers of samples whose inference is fast enough, and those that are not."""
    too_slow = f", not {_list(finding.too_slow)}" if finding.too_slow else ""
    is_known = finding.in_time or finding.too_slow
    return f"{_list(finding.in_time) or 'none'}{too_slow}" if is_known else ""


def _short(why: str) -> str:
    return "exceeds host memory" if why == HOST_TOO_SMALL else "exceeds index range"


def digits(value: float) -> str:
    """Return a number with at least three significant digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{3 if value < 10 else 1}f}"


def duration(seconds: float) -> str:
    """Return a duration with a unit."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
