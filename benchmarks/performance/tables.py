"""Tables of the page on performance, each from the rows of some sections."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product

import numpy as np

from benchmarks.report import (
    COPIES,
    OURS,
    PRECISIONS,
    Comparison,
    Report,
    Row,
    Rows,
    comparisons,
    times_ms,
    wall_ratio,
)
from benchmarks.tables import DDP_MODES, text_of, three_digits

Lines = tuple[list[str], list[list[str]]]
"""The head of a table, and its lines."""
Cells = dict[tuple[Hashable, Hashable], str]
"""Texts by the names of their line and their column."""

CPU, GPU = OURS, f"{OURS} cuda"
"""Programs that train by default."""
TRAINING = ("threads", "residual", "training", "shapes", "fp32")
"""Sections with training steps of networks that the page lists."""


def pivot(corner: str, cells: Cells) -> Lines:
    """Return a table with a line and a column for each name, in order of appearance.

    Example:
        >>> pivot("network", {("a", "32"): "1.5", ("a", "64"): "2", ("b", "64"): "3"})
        (['network', '32', '64'], [['a', '1.5', '2'], ['b', '', '3']])
    """
    lines = dict.fromkeys(line for line, _ in cells)
    columns = dict.fromkeys(column for _, column in cells)
    rows = [[str(line), *(cells.get((line, c), "") for c in columns)] for line in lines]
    return [corner, *map(str, columns)], rows


def speedups(
    reports: Iterable[Report],
    corner: str,
    line: str,
    column: str,
    sections: Sequence[str] = TRAINING,
    *,
    is_sorted: bool = True,
) -> Lines:
    """Return the speedup over the fastest peer with the time of a step or a pass.

    On a CPU the quartiles of the speedup follow. A case of a later report replaces that of an
    earlier one.

    Args:
        reports: results.
        corner: name of the lines.
        line, column: formats of their names from the facts of a row, and ``task`` and ``count`` of
            threads.
        sections: those that count.
        is_sorted: order the columns by number of threads, or from the most exact precision.
    """
    cells: Cells = {}
    for report, section in product(reports, sections):
        for found in _default(Rows(report.rows.get(section, ()))):
            row, ratio = found.ours, found.ratio
            if ratio is None:
                continue
            task = "inference" if section == "inference" else "training"
            facts = {**row, "task": task, "count": threads_text(row.get("threads", 1))}
            text = f"{text_of(ratio)}<br>{three_digits(_median_ms(row))} ms"
            if report.kind == "gpu":
                text = f"{ratio.value:.2f} ({three_digits(1e3 * _median_ms(row))} µs)"
            cells[line.format_map(facts), column.format_map(facts)] = text
    return pivot(corner, _sorted_columns(cells) if is_sorted else cells)


def node_ranks(reports: Iterable[Report]) -> Lines:
    """Steps of ranks with one thread each, and of copies without communication."""
    lines = []
    rows = Rows(row for report in reports for row in report.rows.get("ranks", ()))
    for here in rows.cases("network", "scaling", "samples", "ranks"):
        ours, copies = here.one(program=OURS), here.one(program=COPIES)
        if ours is None or copies is None:
            continue
        meeting, peer = here.one(program="copies that meet"), here.fastest(DDP_MODES)
        lines.append([
            "{network}, {scaling}, {samples} samples".format_map(ours), str(ours["ranks"]),
            _wall(ours), _wall(copies), text_of(wall_ratio(copies, ours)),
            text_of(wall_ratio(meeting, ours)), _wall(peer),
        ])  # fmt: skip
    head = ["case", "ranks", "dptrain ms", "copies ms", "copies / dptrain", "meeting / dptrain",
            "PyTorch DDP ms"]  # fmt: skip
    return head, lines


def gpu_images(reports: Iterable[Report]) -> Lines:
    """Steps of training on images, compared with a step without input and with PyTorch."""
    lines = []
    cases = (Rows(report.rows.get("data", ())) for report in reports)
    found = [each for rows in cases for each in _default(rows)]
    for each in sorted(found, key=lambda each: (each.ours["gpus"], each.ours["batch"])):
        row, ms = each.ours, _median_ms(each.ours)
        peer = "" if each.best is None else f"{_median_ms(each.best) / ms:.2f}"
        lines.append([
            "{network}, {batch} per GPU, {precision}".format_map(row), str(row["gpus"]),
            f"{three_digits(1e3 * ms)} µs", f"{row['bare_ms'] / ms:.3f}", peer,
            f"{1e3 * row['batch'] * row['gpus'] / ms:,.0f}",
        ])  # fmt: skip
    head = ["case", "GPUs", "step", "share of the bare step", "times faster than PyTorch",
            "samples/s"]  # fmt: skip
    return head, lines


def gpu_ranks(reports: Iterable[Report]) -> Lines:
    """Steps in µs on several GPUs, with the weak efficiency in brackets."""
    rows = [row for report in reports for row in report.rows.get("ranks", ())]
    cells: Cells = {}
    alone: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: int(row["gpus"])):
        case, ms = "{network}, {batch} per GPU, {program}".format_map(row), _median_ms(row)
        share = f" ({alone.setdefault(case, ms) / ms:.2f})" if row["gpus"] > 1 else ""
        cells[case, f"{row['gpus']} GPUs"] = f"{three_digits(1e3 * ms)} µs{share}"
        alone.setdefault(case, ms)
    return pivot("case", cells)


GPU_CASES = partial(speedups, corner="network, batch", line="{network}, {batch}",
                    column="{precision}")  # fmt: skip

TABLES: Mapping[str, Callable[[Sequence[Report]], Lines]] = {
    "cpu-steps": partial(
        speedups, corner="network", line="{network}", column="{task}, {batch}",
        sections=(*TRAINING, "inference"), is_sorted=False,
    ),
    "node-steps": partial(
        speedups, corner="network, batch", line="{network}, {batch}", column="{count}"
    ),
    "node-inference": partial(
        speedups, corner="network", line="{network}", column="batch {batch}, {count}",
        sections=("inference",), is_sorted=False,
    ),
    "node-ranks": node_ranks,
    "gpu-steps": GPU_CASES,
    "gpu-inference": partial(GPU_CASES, sections=("inference",)),
    "gpu-images": gpu_images,
    "gpu-ranks": gpu_ranks,
}  # fmt: skip
"""Tables by the name that the template uses."""


def _default(rows: Rows) -> Iterator[Comparison]:
    """Yield the comparisons of the programs that train by default."""
    return (each for each in comparisons(rows) if each.ours["program"] in (CPU, GPU))


def _median_ms(row: Row) -> float:
    return float(np.median(times_ms(row)))


def _wall(row: Row | None) -> str:
    """Return the wall time of a step with its quartiles, in ms."""
    if row is None:
        return ""
    low, high = row["wall_quartiles_ms"]
    return f"{three_digits(row['wall_ms'])} ({three_digits(low)}–{three_digits(high)})"


def threads_text(count: int | str) -> str:
    """Return a number of threads with its noun."""
    return f"{count} thread{'s' * (str(count) != '1')}"


def _sorted_columns(cells: Cells) -> Cells:
    """Order the columns: threads by number, precisions from the most exact one."""

    def key(cell: tuple[Hashable, Hashable]) -> int:
        name = str(cell[1])
        return PRECISIONS.index(name) if name in PRECISIONS else int(name.partition(" ")[0])

    lines = {line: number for number, line in enumerate(dict.fromkeys(n for n, _ in cells))}
    ordered = sorted(cells, key=lambda cell: (key(cell), lines[cell[0]]))
    by_line = sorted(ordered, key=lambda cell: lines[cell[0]])
    columns = dict.fromkeys(column for _, column in ordered)
    first = {(by_line[0][0], column): "" for column in columns}
    return {**first, **{cell: cells[cell] for cell in by_line}}
