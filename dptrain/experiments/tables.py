"""Tables of the results of a benchmark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dptrain.experiments.cases import INFERENCE, TRAINING
from dptrain.experiments.findings import SATURATED, Finding, View, by_configuration, find
from dptrain.experiments.measuring import Result, size_text
from dptrain.experiments.memory_budget import HOST_TOO_SMALL
from dptrain.tables import Table


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
            tables.append(training_table(training, view, configuration))
        if inference:
            tables.append(inference_table(inference, view, configuration))
        if searches:
            tables.append(largest_table(searches, configuration))
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
        rows: dict[tuple[int, str, int], dict[tuple[str, str, int], float]] = {}
        for r in results:
            if r.task == task and r.timing is not None:
                row = rows.setdefault((r.parameters, r.network, r.samples), {})
                row[r.case.configuration] = r.median_ms
        if rows:
            tables.append(_comparison(rows, groups, f"Comparison: {noun}, ms"))
    return tables


def _comparison(
    rows: Mapping[tuple[int, str, int], Mapping[tuple[str, str, int], float]],
    groups: Sequence[tuple[str, str, int]],
    title: str,
) -> Table:
    names = [
        f"{backend} {precision}" + (f" x{threads}" if threads > 1 else "")
        for backend, precision, threads in groups
    ]
    table = _table(title, "network", "batch", *names, "fastest")
    before = ""
    for (_, network, samples), times in sorted(rows.items()):
        fastest = min(times, key=times.__getitem__)
        slowest = max(times.values())
        cells = [
            digits(times[configuration]) if configuration in times else ""
            for configuration in groups
        ]
        name = names[groups.index(fastest)]
        gain = f"{name}, {slowest / times[fastest]:.1f}×" if len(times) > 1 else ""
        table.add_row(network if network != before else "", f"{samples:,}", *cells, gain)
        before = network
    table.caption = "×: speed relative to the slowest in the row"
    return table


def training_table(results: Sequence[Result], view: View, configuration: str) -> Table:
    """Return the times of training steps, a row for each network and batch size."""
    epochs = "epoch" if view.epochs == 1 else f"{view.epochs:,} epochs"
    energy = _energy_column(results)
    title = f"Training, {configuration}"
    table = _table(title, "network", "batch", "step ms", "outliers", "samples/s", epochs, *energy)
    for r, name in zip(results, _names(results), strict=True):
        if r.timing is None:
            _refused(table, r, name, 4 + len(energy))
            continue
        table.add_row(
            name,
            f"{r.samples:,}",
            *_time(r),
            f"{r.samples_per_s:,.0f}",
            duration(view.training_s(r)),
            *[_energy(r)] * len(energy),
        )
    budget = size_text(min(r.available_bytes for r in results))
    table.caption = (
        f"epoch: {view.epoch_samples:,} samples, estimated from the time per step; memory budget: "
        f"{budget}"
    )
    return table


def inference_table(results: Sequence[Result], view: View, configuration: str) -> Table:
    """Return the times of forward passes, a row for each network and batch size."""
    limit = f"within {duration(view.within_s)}"
    energy = _energy_column(results)
    title = f"Inference, {configuration}"
    table = _table(title, "network", "batch", "time ms", "outliers", "samples/s", limit, *energy)
    for r, name in zip(results, _names(results), strict=True):
        if r.timing is None:
            _refused(table, r, name, 4 + len(energy))
            continue
        verdict = "yes" if view.in_time(r) else "no"
        table.add_row(
            name,
            f"{r.samples:,}",
            *_time(r),
            f"{r.samples_per_s:,.0f}",
            f"{verdict}, {r.why}" if r.why else verdict,
            *[_energy(r)] * len(energy),
        )
    return table


def largest_table(results: Sequence[Result], configuration: str) -> Table:
    """Return the largest batches, a row for each network and task."""
    budget = size_text(min(r.available_bytes for r in results))
    title = f"Largest batch in {budget}, {configuration}"
    table = _table(title, "network", "task", "batch", "memory", "next batch")
    for r, name in zip(results, _names(results), strict=True):
        task = TRAINING if r.case.trains else INFERENCE
        if r.largest is None or not r.fits:
            table.add_row(name, task, "none" if r.largest is not None else "", "", r.why)
            continue
        over = r.largest.next_bytes - r.available_bytes
        beyond = f"{size_text(over)} too large" if over > 0 else _short(r.largest.why)
        needs = size_text(r.largest.needed_bytes)
        table.add_row(name, task, f"{r.samples:,}", needs, beyond)
    return table


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
    table = Table(f"Summary, {configuration}", tuple(columns), text=("network",))
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    if saturates in columns:
        table.caption = (
            f"{saturates}: the smallest batch size with at least {SATURATED:.0%} of the best "
            "samples/s"
        )
    return table


def _in_time(finding: Finding) -> str:
    """Return the numbers of samples whose inference is fast enough, and those that are not."""
    too_slow = f", not {_list(finding.too_slow)}" if finding.too_slow else ""
    is_known = finding.in_time or finding.too_slow
    return f"{_list(finding.in_time) or 'none'}{too_slow}" if is_known else ""


def _short(why: str) -> str:
    return "exceeds host memory" if why == HOST_TOO_SMALL else "exceeds index range"


def _energy_column(results: Sequence[Result]) -> list[str]:
    """Return the heading of the column of energies; none if no counter could be read."""
    known = any(r.energy is not None and r.energy.joules_per_sample is not None for r in results)
    return ["mJ/sample (95%)"] * known


def _energy(result: Result) -> str:
    """Return millijoules per sample with half the 95% interval."""
    if result.energy is None or result.energy.joules_per_sample is None:
        return ""
    value = result.energy.joules_per_sample.times(1e3)
    half = (value.high - value.low) / 2
    return digits(value.value) + (f" ±{half / value.value:.0%}" if math.isfinite(half) else "")


def _time(result: Result) -> tuple[str, str]:
    """Return the median with half the interquartile range, and the share of outliers."""
    assert result.timing is not None
    times, outliers = result.timing.time_ms, result.timing.outliers
    share = f"{outliers / times.n:.0%}" if outliers >= times.n / 100 else "< 1%"
    if times.n == 1:
        return f"{digits(times.median)} (1 run)", ""
    around = f"{digits(times.median)} ±{(times.q3 - times.q1) / 2 / times.median:.0%}"
    return around, share if outliers else ""


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


def _names(results: Sequence[Result]) -> list[str]:
    """Return the names of the networks; empty if the row above has the same name."""
    names = [r.network for r in results]
    return [
        name if name != before else "" for name, before in zip(names, ["", *names], strict=False)
    ]


def _table(title: str, *columns: str) -> Table:
    texts = ("network", "task", "time of a run", "fastest")
    text = [column for column in columns if column in texts or column.startswith("within")]
    return Table(title, columns, text, keys=2)


def _refused(table: Table, result: Result, name: str, cells: int) -> None:
    if result.needed_bytes > result.available_bytes:
        table.add_row(name, f"{result.samples:,}", f"needs {size_text(result.needed_bytes)}")
    else:
        table.add_row(name, f"{result.samples:,}", *[""] * (cells - 1), result.why)
