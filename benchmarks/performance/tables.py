"""Tables of the page on performance, each from results of one kind."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

Result = Mapping[str, Any]
Row = Mapping[str, Any]
Lines = tuple[list[str], list[list[str]]]
"""The head of a table, and its lines."""
Cells = dict[tuple[Hashable, Hashable], str]
"""Texts by the names of their line and their column."""

OURS, COPIES, MEETING = "dptrain", "copies", "copies that meet"
"""Programs in the results of a node; all others are peers or variants of these."""


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


def cpu_steps(results: Sequence[Result]) -> Lines:
    """Speedups over PyTorch on one core, with the quartiles of blocks, and the time in ms."""
    cells: Cells = {}
    for row in _all(results, "comparisons"):
        low, high = row["ratio_quartiles"]
        text = f"{row['ratio']:.2f} ({low:.2f}–{high:.2f})<br>{_three(row['dptrain_ms'])} ms"
        cells[row["network"], f"{row['task']}, {row['batch_size']}"] = text
    return pivot("network", cells)


def node_steps(results: Sequence[Result]) -> Lines:
    """Speedups over the best peer by number of threads, and the time in ms."""
    cells: Cells = {}
    for result in results:
        for section in ("threads", "residual"):
            rows = result["rows"].get(section, ())
            for (network, batch, count), here in _cases(rows, "network", "batch", "threads"):
                if text := _compared(here):
                    cells[f"{network}, {batch}", _threads(count)] = text
    return pivot("network, batch", _sorted_columns(cells))


def node_inference(results: Sequence[Result]) -> Lines:
    """Speedups of inference over the best peer by batch size and number of threads."""
    cells: Cells = {}
    for result in results:
        rows = result["rows"]["inference"]
        for (network, batch, count), here in _cases(rows, "network", "batch", "threads"):
            if text := _compared(here):
                cells[network, f"batch {batch}, {_threads(count)}"] = text
    return pivot("network", cells)


def node_ranks(results: Sequence[Result]) -> Lines:
    """Steps of ranks with one thread each, and of copies without communication."""
    lines = []
    rows = [row for result in results for row in result["rows"]["ranks"]]
    for case, here in _cases(rows, "network", "scaling", "samples", "ranks"):
        if OURS not in here or COPIES not in here:
            continue
        network, scaling, samples, count = case
        ours, copies, meeting = (here.get(name) for name in (OURS, COPIES, MEETING))
        peer = _fastest(row for name, row in here.items() if name.startswith("PyTorch DDP"))
        lines.append([
            f"{network}, {scaling}, {samples} samples", str(count), _wall(ours), _wall(copies),
            _quotient(copies, ours, "walls_ms"), _quotient(meeting, ours, "walls_ms"), _wall(peer),
        ])  # fmt: skip
    head = ["case", "ranks", "dptrain ms", "copies ms", "copies / dptrain", "meeting / dptrain",
            "PyTorch DDP ms"]  # fmt: skip
    return head, lines


def gpu_steps(results: Sequence[Result]) -> Lines:
    """Speedups over PyTorch's fastest mode by precision, and the time in µs."""
    cells: Cells = {}
    for row in _all(results, "training"):
        case = f"{row['network']}, {row['batch_size']}"
        cells[case, row["precision"]] = f"{row['ratio']:.2f} ({_three(row['dptrain_us'])} µs)"
    return pivot("network, batch", _sorted_columns(cells))


def gpu_inference(results: Sequence[Result]) -> Lines:
    """Speedups of a pass over PyTorch's fastest mode by precision, and its time in µs."""
    times: dict[tuple[str, int, str], dict[str, float]] = {}
    for result in results:
        for row in result["inference"]:
            case = row["network"], row["batch_size"], row["precision"]
            times.setdefault(case, {})[row["program"]] = row["us"]
    cells: Cells = {}
    for (network, batch, precision), found in times.items():
        peer = min(us for program, us in found.items() if program != "cuda")
        text = f"{peer / found['cuda']:.2f} ({_three(found['cuda'])} µs)"
        cells[f"{network}, {batch}", precision] = text
    return pivot("network, batch", _sorted_columns(cells))


def gpu_images(results: Sequence[Result]) -> Lines:
    """Steps of training on images, compared with a step without input and with PyTorch."""
    lines = []
    for row in sorted(_all(results, "data"), key=lambda row: (row["gpus"], row["batch_size"])):
        us = median(row["us"])
        peers = [median(times) for times in row["theirs"].values()]
        samples = 1e6 * row["batch_size"] * row["gpus"] / us
        lines.append([
            f"{row['network']}, {row['batch_size']} per GPU, {row['precision']}", str(row["gpus"]),
            f"{_three(us)} µs", f"{row['bare_us'] / us:.3f}",
            f"{min(peers) / us:.2f}" if peers else "", f"{samples:,.0f}",
        ])  # fmt: skip
    head = ["case", "GPUs", "step", "share of the bare step", "times faster than PyTorch",
            "samples/s"]  # fmt: skip
    return head, lines


def gpu_ranks(results: Sequence[Result]) -> Lines:
    """Steps in µs on several GPUs, with the weak efficiency in brackets."""
    rows = _all(results, "ranks")
    alone = {(r["network"], r["batch_size"]): r["us"] for r in rows if r["ranks"] == 1}
    cells: Cells = {}
    for row in rows:
        case = row["network"], row["batch_size"]
        for program, us in row["us"].items():
            share = median(alone[case][program]) / median(us)
            text = f"{_three(median(us))} µs" + (f" ({share:.2f})" if row["ranks"] > 1 else "")
            cells[f"{case[0]}, {case[1]} per GPU, {program}", f"{row['ranks']} GPUs"] = text
    return pivot("case", cells)


TABLES: Mapping[str, Callable[[Sequence[Result]], Lines]] = {
    "cpu-steps": cpu_steps,
    "node-steps": node_steps,
    "node-inference": node_inference,
    "node-ranks": node_ranks,
    "gpu-steps": gpu_steps,
    "gpu-inference": gpu_inference,
    "gpu-images": gpu_images,
    "gpu-ranks": gpu_ranks,
}
"""Tables by the name that the template uses."""


def _all(results: Iterable[Result], key: str) -> list[Row]:
    return [row for result in results for row in result[key]]


def _cases(rows: Iterable[Row], *facts: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Row]]]:
    """Yield the cases of one run, each with its last row by program."""
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(tuple(row[fact] for fact in facts), {})[row["program"]] = row
    yield from cases.items()


def _compared(here: Mapping[str, Row]) -> str:
    """Return the speedup over the fastest peer of a case and the time, or "" without a peer."""
    peer = _fastest(row for name, row in here.items() if name not in (OURS, COPIES))
    if OURS not in here or peer is None:
        return ""
    ours = here[OURS]
    return f"{_quotient(peer, ours, 'medians_ms')}<br>{_three(ours['median_ms'])} ms"


def _fastest(rows: Iterable[Row]) -> Row | None:
    """Return the fastest of the programs with all rounds; slow ones were left out after one."""
    found = list(rows)
    most = max((row["rounds"] for row in found), default=0)
    whole = [row for row in found if row["rounds"] == most]
    return min(whole, key=lambda row: float(row["median_ms"]), default=None)


def _quotient(numerator: Row | None, denominator: Row | None, key: str) -> str:
    """Return median and quartiles of the quotients of the rounds that both have."""
    if numerator is None or denominator is None:
        return ""
    count = min(len(numerator[key]), len(denominator[key]))
    ratios = np.array(numerator[key][:count]) / np.array(denominator[key][:count])
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def _wall(row: Row | None) -> str:
    """Return the wall time of a step with its quartiles, in ms."""
    if row is None:
        return ""
    low, high = row["wall_quartiles_ms"]
    return f"{_three(row['wall_ms'])} ({_three(low)}–{_three(high)})"


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count != 1)}"


def _sorted_columns(cells: Cells) -> Cells:
    """Order the columns: threads by number, precisions from the most exact one."""
    exact = {"fp32": 0, "tf32": 1, "bf16": 2}

    def key(cell: tuple[Hashable, Hashable]) -> int:
        name = str(cell[1])
        return exact[name] if name in exact else int(name.partition(" ")[0])

    lines = {line: number for number, line in enumerate(dict.fromkeys(n for n, _ in cells))}
    ordered = sorted(cells, key=lambda cell: (key(cell), lines[cell[0]]))
    by_line = sorted(ordered, key=lambda cell: lines[cell[0]])
    columns = dict.fromkeys(column for _, column in ordered)
    first = {(by_line[0][0], column): "" for column in columns}
    return {**first, **{cell: cells[cell] for cell in by_line}}


def _three(value: float) -> str:
    """Format a number with three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
