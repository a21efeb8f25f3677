"""What a bench has found, as people read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dptrain.experiments.cases import INFERENCE, TRAINING
from dptrain.experiments.findings import FLAT, Finding, View, by_means, find
from dptrain.experiments.measuring import Result, size_words
from dptrain.experiments.room import CROWDED
from dptrain.measure.tables import plain_table

if TYPE_CHECKING:
    from rich.table import Table


def bench_tables(results: Sequence[Result], view: View) -> list[Table]:
    """Times of training, times of answers, largest batches and what follows, by means."""
    tables = []
    for (backend, precision, threads), own in by_means(results).items():
        device = next((r.device for r in own if r.device), "")
        means = f"{backend} {precision}, " + (device or _threads(threads))
        ordered = sorted(own, key=lambda r: (r.parameters, r.network, r.samples))
        training = [r for r in ordered if r.task == TRAINING]
        answers = [r for r in ordered if r.task == INFERENCE]
        searches = [r for r in ordered if r.case.searches]
        if training:
            tables.append(training_table(training, view, means))
        if answers:
            tables.append(answers_table(answers, view, means))
        if searches:
            tables.append(largest_table(searches, means))
        tables.append(findings_table(find(own, view), view, means))
    return tables + comparison_tables(results)


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def comparison_tables(results: Sequence[Result]) -> list[Table]:
    """Medians by all means side by side, for training and for answers; none for one alone."""
    groups = list(by_means(results))
    if len(groups) < 2:
        return []
    tables = []
    for task, noun in ((TRAINING, "a step"), (INFERENCE, "an answer")):
        rows: dict[tuple[int, str, int], dict[tuple[str, str, int], float]] = {}
        for r in results:
            if r.task == task and r.timing is not None:
                row = rows.setdefault((r.parameters, r.network, r.samples), {})
                row[r.case.means] = r.median_ms
        if rows:
            tables.append(_comparison(rows, groups, f"Side by side: {noun}, ms"))
    return tables


def _comparison(
    rows: Mapping[tuple[int, str, int], Mapping[tuple[str, str, int], float]],
    groups: Sequence[tuple[str, str, int]],
    title: str,
) -> Table:
    table = plain_table(title)
    names = [f"{backend} {precision}" + (f" x{threads}" if threads > 1 else "")
             for backend, precision, threads in groups]  # fmt: skip
    _columns(table, "network", "samples", *names, "fastest")
    before = ""
    for (_, network, samples), times in sorted(rows.items()):
        fastest = min(times, key=times.__getitem__)
        slowest = max(times.values())
        cells = [digits(times[means]) if means in times else "" for means in groups]
        name = names[groups.index(fastest)]
        gain = f"{name}, {slowest / times[fastest]:.1f} times" if len(times) > 1 else ""
        table.add_row(network if network != before else "", f"{samples:,}", *cells, gain)
        before = network
    _explain(table, "times: as fast as the slowest of the row")
    return table


def training_table(results: Sequence[Result], view: View, means: str) -> Table:
    """A row a network and batch size."""
    table = plain_table(f"Training, {means}")
    epochs = "epoch" if view.epochs == 1 else f"{view.epochs:,} epochs"
    _columns(table, "network", "batch", "step ms", "outliers", "samples/s", epochs)
    for r, name in zip(results, _names(results), strict=True):
        if r.timing is None:
            _refused(table, r, name, 4)
            continue
        table.add_row(name, f"{r.samples:,}", *_time(r), f"{r.samples_per_s:,.0f}",
                      duration(view.training_s(r)))  # fmt: skip
    room = size_words(min(r.room_bytes for r in results))
    _explain(table, f"an epoch: {view.epoch_samples:,} samples, by the time of a step; "
                    f"memory: {room}")  # fmt: skip
    return table


def answers_table(results: Sequence[Result], view: View, means: str) -> Table:
    """A row a network and number of samples."""
    table = plain_table(f"Answers, {means}")
    limit = f"within {duration(view.within_s)}"
    _columns(table, "network", "samples", "answer ms", "outliers", "samples/s", limit)
    for r, name in zip(results, _names(results), strict=True):
        if r.timing is None:
            _refused(table, r, name, 4)
            continue
        said = "yes" if view.in_time(r) else "no"
        table.add_row(name, f"{r.samples:,}", *_time(r), f"{r.samples_per_s:,.0f}",
                      f"{said}, {r.why}" if r.why else said)  # fmt: skip
    return table


def largest_table(results: Sequence[Result], means: str) -> Table:
    """A row a network, for training and for answers."""
    room = size_words(min(r.room_bytes for r in results))
    table = plain_table(f"Largest batch in {room}, {means}")
    _columns(table, "network", "for", "batch", "needs", "one more is", "one step of it")
    for r, name in zip(results, _names(results), strict=True):
        task = TRAINING if r.case.trains else INFERENCE
        if r.largest is None or not r.fits:
            table.add_row(name, task, "none" if r.largest is not None else "", "", "", r.why)
            continue
        over = r.largest.next_bytes - r.room_bytes
        beyond = f"{size_words(over)} too much" if over > 0 else _short(r.largest.why)
        tried = r.why if r.timing is None else f"{r.median_ms:,.0f} ms"
        needs = size_words(r.largest.need_bytes)
        table.add_row(name, task, f"{r.samples:,}", needs, beyond, tried)
    return table


def findings_table(findings: Sequence[Finding], view: View, means: str) -> Table:
    """A row a network: what its times say together."""
    table = plain_table(f"What follows, {means}")
    table.add_column("network", no_wrap=True)
    within = f"within {duration(view.within_s)}"
    for column in ("parameters", "flat from", "best samples/s", within):
        table.add_column(column, justify="right")
    for f in findings:
        flat = "not yet" if f.flat_from is None else f"{f.flat_from:,}"
        late = f", not {_list(f.late)}" if f.late else ""
        answers = f"{_list(f.in_time) or 'none'}{late}" if f.in_time or f.late else ""
        best = f"{f.samples_per_s:,.0f}" if f.samples_per_s else ""
        table.add_row(f.network, f"{f.parameters:,}", flat if f.batches > 1 else "", best, answers)
    _explain(table, f"flat from: the batch from which on the time a sample is within {FLAT:.0%} of "
                    "the least")  # fmt: skip
    return table


def _short(why: str) -> str:
    return "beyond the host" if why == CROWDED else "beyond counting"


def _explain(table: Table, text: str) -> None:
    # A table without a caption ends in an empty line of its own.
    table.caption, table.caption_justify = f"{text}\n", "left"


def _time(result: Result) -> tuple[str, str]:
    """Median and half of the distance of the quartiles; share of outliers."""
    assert result.timing is not None
    times, outliers = result.timing.time_ms, result.timing.outliers
    share = f"{outliers / times.n:.0%}" if outliers >= times.n / 100 else "< 1%"
    if times.n == 1:
        return f"{digits(times.median)} once", ""
    around = f"{digits(times.median)} ±{(times.q3 - times.q1) / 2 / times.median:.0%}"
    return around, share if outliers else ""


def digits(value: float) -> str:
    """A number with three digits or more that count."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{3 if value < 10 else 1}f}"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _names(results: Sequence[Result]) -> list[str]:
    """Of the networks; empty where the row above says it already."""
    names = [r.network for r in results]
    return [name if name != before else ""
            for name, before in zip(names, ["", *names], strict=False)]  # fmt: skip


def _columns(table: Table, name: str, *columns: str) -> None:
    # The longest rows then fit 80 columns.
    table.collapse_padding = True
    table.add_column(name, no_wrap=True, overflow="ellipsis")
    for column in columns:
        words = column in ("for", "one step of it", "fastest") or column.startswith("within")
        table.add_column(column, justify="left" if words else "right")


def _refused(table: Table, result: Result, name: str, cells: int) -> None:
    if result.need_bytes > result.room_bytes:
        table.add_row(name, f"{result.samples:,}", f"needs {size_words(result.need_bytes)}")
    else:
        table.add_row(name, f"{result.samples:,}", *[""] * (cells - 1), result.why)
