"""Tables of the page on performance, each from results of one kind."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.node import inference, ranks, threads
from benchmarks.node.rows import Rows, speedup, text_of, time_of, wall_ratio

Result = Mapping[str, Any]
Row = Mapping[str, Any]
Lines = tuple[list[str], list[list[str]]]
"""The head of a table, and its lines."""
Cells = dict[tuple[Hashable, Hashable], str]
"""Texts by the names of their line and their column."""


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
            rows = Rows(result["rows"].get(section, ()))
            for network, batch, count in _cases(rows, "network", "batch", "threads"):
                here = rows.where(network=network, batch=batch, threads=count)
                mine, best = here.one(program=threads.OURS), here.fastest(tuple(threads.PEERS))
                if mine is not None and best is not None:
                    text = f"{text_of(speedup(best, mine))}<br>{_three(mine['median_ms'])} ms"
                    cells[f"{network}, {batch}", _threads(count)] = text
    return pivot("network, batch", _sorted_columns(cells))


def node_inference(results: Sequence[Result]) -> Lines:
    """Speedups of inference over the best peer by batch size and number of threads."""
    cells: Cells = {}
    rows = Rows(row for result in results for row in result["rows"]["inference"])
    for network, count, batch in _cases(rows, "network", "threads", "batch"):
        here = rows.where(network=network, threads=count, batch=batch)
        mine, best = here.one(program=inference.OURS), here.fastest(inference.PEERS)
        if mine is not None and best is not None:
            text = f"{text_of(speedup(best, mine))}<br>{_three(mine['median_ms'])} ms"
            cells[network, f"batch {batch}, {_threads(count)}"] = text
    return pivot("network", cells)


def node_ranks(results: Sequence[Result]) -> Lines:
    """Steps of ranks with one thread each, and of copies without communication."""
    rows = Rows(row for result in results for row in result["rows"]["ranks"])
    lines = []
    for network, scaling, samples, count in _cases(rows, "network", "scaling", "samples", "ranks"):
        case = rows.where(network=network, scaling=scaling, samples=samples, ranks=count)
        mine, copies = case.one(program=ranks.OURS), case.one(program=ranks.COPIES)
        if mine is None or copies is None:
            continue
        meeting, peer = case.one(program=ranks.IN_STEP), case.fastest(ranks.DDP_MODES)
        lines.append([
            f"{network}, {scaling}, {samples} samples", str(count), time_of(mine, wall=True),
            time_of(copies, wall=True), text_of(wall_ratio(copies, mine)),
            text_of(wall_ratio(meeting, mine)), time_of(peer, wall=True),
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


def _cases(rows: Rows, *names: str) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))


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
