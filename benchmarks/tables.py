"""Tables, documents and files of reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import (
    COPIES,
    OURS,
    STEPS,
    Comparison,
    Report,
    Row,
    Rows,
    comparisons,
    is_ours,
    speedup,
    times_ms,
    wall_ratio,
)
from benchmarks.targets import Figure, case_of, figures, speedup_target
from benchmarks.timing import Ratio


@dataclass(frozen=True)
class Table:
    """Rows of text under a title."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Return the table in Markdown, with all but the first column right-aligned."""
        return f"### {self.title}\n\n{markdown(self.columns, self.rows)}"


def markdown(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, of_text: bool = False
) -> str:
    """Return a Markdown table.

    Args:
        columns: names of the columns.
        rows: the cells of each row.
        of_text: False aligns all columns but the first to the right.

    Example:
        >>> print(markdown(("network", "ms"), [("model0", "1.5")]))
        | network | ms |
        | --- | ---: |
        | model0 | 1.5 |
    """
    rule = ["---", *["---" if of_text else "---:"] * (len(columns) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, rule, *rows))


def text_of(ratio: Ratio | None) -> str:
    """Format a ratio with its quartiles; empty if there is none.

    Quartiles that equal the median are those of a single value, and are left out.
    """
    if ratio is None:
        return ""
    text = f"{ratio.value:.2f}"
    return text if ratio.low == ratio.high else f"{text} ({ratio.low:.2f}–{ratio.high:.2f})"


def time_of(row: Row | None, *, wall: bool = False) -> str:
    """Format the time of a step with its quartiles, in ms or µs; empty if there is no row.

    On one thread it is CPU time (see `times_ms`), unless `wall` requests the wall time. Rows
    without the times of rounds have the quartiles of all.
    """
    if row is None:
        return ""
    times = row["walls_ms"] if wall else times_ms(row)
    low, middle, high = np.percentile(times, [25, 50, 75]).tolist()
    if len(times) == 1:
        low, high = row.get("quartiles_ms", (low, high))
    unit, factor = ("ms", 1.0) if middle >= 1.0 else ("µs", 1e3)
    texts = [three_digits(factor * time) for time in (middle, low, high)]
    return f"{texts[0]} ({texts[1]}–{texts[2]}) {unit}"


def three_digits(value: float) -> str:
    """Format a number with three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


Cell = Callable[[Row], Any]


def plain_table(title: str, rows: Iterable[Row], cells: Mapping[str, Cell]) -> Table:
    """Return a table with a line for each row, without columns that are empty in all of them.

    Args:
        title: of the table.
        rows: the rows.
        cells: functions of a row by column; `None` is shown as an empty cell.
    """
    lines = [
        ["" if (value := cell(row)) is None else str(value) for cell in cells.values()]
        for row in rows
    ]
    kept = [i for i, _ in enumerate(cells) if any(line[i] for line in lines)]
    heads = list(cells)
    return Table(
        title, tuple(heads[i] for i in kept), tuple(tuple(line[i] for i in kept) for line in lines)
    )


def _fact(name: str) -> Cell:
    return lambda row: row.get(name)


CASE = {name: _fact(name) for name in ("network", "batch", "precision", "threads", "ranks", "gpus")}


def steps_table(title: str, kind: str, section: str, rows: Rows) -> Table:
    """Compare training steps or inference passes with the fastest peer."""
    found = {id(each.ours): each for each in comparisons(rows)}

    def best(cell: Callable[[Comparison], Any]) -> Cell:
        return lambda row: cell(found[id(row)])

    def target(row: Row) -> tuple[str, str]:
        aim, ratio = speedup_target(kind, section, row), found[id(row)].ratio
        verdict = "" if aim is None or ratio is None else aim.verdict(ratio.value)
        return "" if aim is None else f"≥ {aim.value:g}", verdict

    cells: dict[str, Cell] = {
        **CASE,
        "program": lambda row: row["program"] if row["program"] != OURS else None,
        "dptrain": time_of,
        "best peer": best(lambda each: time_of(each.best)),
        "peer": best(lambda each: None if each.best is None else each.best["program"]),
        "times faster": best(lambda each: text_of(each.ratio)),
        "target": lambda row: target(row)[0],
        "": lambda row: target(row)[1],
        "samples/s": lambda row: f"{1e3 * row['batch'] / np.median(times_ms(row)):,.0f}",
        "p50, p95, p99 µs": lambda row: _latencies(row),
        "the best peer's": best(lambda each: _latencies(each.best)),
        "peak memory": _memory,
    }
    return plain_table(title, filter(is_ours, rows), cells)


def _latencies(row: Row | None) -> str | None:
    if row is None or "latencies_us" not in row:
        return None
    return ", ".join(f"{value:.1f}" for value in row["latencies_us"])


def _memory(row: Row) -> str | None:
    return f"{row['memory_bytes'] / 2**20:.0f} MiB" if "memory_bytes" in row else None


def peers_table(title: str, rows: Rows) -> Table:
    """List the times of all programs of peers."""
    peers = (row for row in rows if not is_ours(row) and row["program"] != COPIES)
    cells = {**CASE, "program": _fact("program"), "time": time_of, "peak memory": _memory,
             "p50, p95, p99 µs": _latencies}  # fmt: skip
    return plain_table(title, peers, cells)


def threads_table(rows: Rows) -> Table:
    """Return the efficiency of threads, alone and relative to independent copies."""

    def copies(row: Row) -> Row | None:
        return rows.one(network=row["network"], threads=row["threads"], program=COPIES)

    def single(row: Row) -> Row | None:
        return rows.one(network=row["network"], threads=1, program=OURS)

    cells: dict[str, Cell] = {
        **CASE,
        "dptrain": lambda row: time_of(row, wall=True),
        "copies": lambda row: time_of(copies(row), wall=True),
        "efficiency": lambda row: text_of(wall_ratio(single(row), row, 1.0 / row["threads"])),
        "of copies'": lambda row: text_of(wall_ratio(copies(row), row)),
    }
    title = "Threads: wall time divided by steps, median (quartiles)"
    return plain_table(title, rows.where(program=OURS), cells)


DDP_MODES = ("PyTorch DDP eager", "PyTorch DDP channels_last")


def ranks_table(rows: Rows) -> Table:
    """Return the steps and efficiencies of ranks on CPUs by case."""
    lines = []
    for here in rows.cases("network", "scaling", "samples", "ranks"):
        mine = here.one(program=OURS)
        if mine is None:
            continue
        facts = {name: mine[name] for name in ("network", "scaling", "samples")}
        ddp, factor = here.fastest(DDP_MODES), 1.0
        if mine["scaling"] == "strong":
            factor /= mine["ranks"]
        other = {
            name: here.one(program=name)
            for name in ("dptrain, MPI", COPIES, "copies that meet", "alone")
        }
        ddp_alone = rows.where(ranks=1, **facts).fastest(DDP_MODES)
        lines.append({
            "case": ", ".join(map(str, facts.values())), "ranks": mine["ranks"],
            "dptrain": time_of(mine, wall=True),
            "over MPI": time_of(other["dptrain, MPI"], wall=True),
            "copies": time_of(other[COPIES], wall=True),
            "copies that meet": time_of(other["copies that meet"], wall=True),
            "efficiency": text_of(wall_ratio(other["alone"], mine, factor)),
            "of copies'": text_of(wall_ratio(other[COPIES], mine)),
            "of meeting copies'": text_of(wall_ratio(other["copies that meet"], mine)),
            "PyTorch DDP": time_of(ddp, wall=True),
            "its efficiency": text_of(wall_ratio(ddp_alone, ddp, factor)),
        })  # fmt: skip
    title = "Ranks with one thread each: wall time divided by steps, median (quartiles)"
    return plain_table(title, lines, {name: _fact(name) for name in (lines[0] if lines else ())})


def sums_table(rows: Rows) -> Table:
    """Return the times of sums with update."""

    def here(row: Row) -> Rows:
        return rows.where(network=row["network"], ranks=row["ranks"])

    def parts(row: Row) -> str | None:
        found = row.get("parts_us")
        return found and " + ".join(f"{found[part]:.0f}" for part in ("arrive", "work", "release"))

    def other(program: str) -> Cell:
        return lambda row: time_of(here(row).one(program=program))

    others = [p for p in rows.values("program") if p not in (OURS, "traffic.c")]
    mpi = "MPICH", "Open MPI"
    cells: dict[str, Cell] = {
        "gradients": lambda row: f"{1e-6 * row['bytes']:.2f} MB",
        "ranks": _fact("ranks"),
        "dptrain": time_of,
        "arrive + work + release µs": parts,
        "traffic.c": other("traffic.c"),
        "dptrain / traffic.c": lambda r: text_of(speedup(r, here(r).one(program="traffic.c"))),
        "times faster than MPI": lambda row: text_of(speedup(here(row).fastest(mpi), row)),
        **{name: other(name) for name in others},
    }
    return plain_table("Sum and update alone", rows.where(program=OURS), cells)


def shards_table(rows: Rows) -> Table:
    """Return the cost of micro-shards."""

    def without(row: Row) -> Row | None:
        facts = {name: row[name] for name in ("network", "ranks", "threads")}
        return rows.one(program="without shards", **facts)

    cells: dict[str, Cell] = {
        **CASE,
        "without": lambda row: time_of(without(row), wall=True),
        "with shards": lambda row: time_of(row, wall=True),
        "with / without": lambda row: text_of(wall_ratio(row, without(row))),
    }
    return plain_table("Micro-shards", rows.where(program="with shards"), cells)


def _share(row: Row) -> str:
    limit = row.get("bare_ms") or max(row["limits_ms"].values())
    return f"{limit / row['median_ms']:.3f}"


DATA = {
    "images": _fact("source"),
    **CASE,
    "program": _fact("program"),
    "time of a step": time_of,
    "samples/s": lambda r: f"{1e3 * r.get('gpus', 1) * r['batch'] / r['median_ms']:,.0f}",
    "bare step µs": lambda row: f"{1e3 * row['bare_ms']:.4g}" if "bare_ms" in row else None,
    "limits µs": lambda row: ", ".join(
        f"{name} {1e3 * value:.4g}" for name, value in row.get("limits_ms", {}).items()
    ),
    "share": lambda row: _share(row) if is_ours(row) else None,
    "the run says": _fact("says"),
}
"""Columns of training on images."""

GPU_RANKS = {
    **CASE,
    "program": _fact("program"),
    "time of a step": time_of,
    "weak efficiency within a launch": lambda r: f"{r['weak']:.3f}" if r.get("weak") else None,
}

ERRORS = {
    **CASE,
    "layer": _fact("layer"),
    "result": _fact("quantity"),
    "program": _fact("program"),
    "error": lambda row: f"{row['error']:.2e}",
}


def tables_of(report: Report) -> list[Table]:
    """Return the tables of all sections, after a summary of the speedups.

    Sections of earlier versions, which are unknown, have none.
    """
    kind = report.kind
    tables = [_summary(figures(report))]
    for section, rows in report.sections().items():
        make = SECTIONS.get(f"{kind} {section}")
        if make is not None:
            tables.append(make(rows))
        if section not in STEPS:
            continue
        pass_or_step = "Inference pass" if section == "inference" else f"Training step ({section})"
        tables += [
            steps_table(f"{pass_or_step}: median (quartiles)", kind, section, rows),
            peers_table(f"{pass_or_step}: peers", rows),
        ]
        if rows.where(program=COPIES):
            tables.append(threads_table(rows))
    return [table for table in tables if table.rows]


SECTIONS: Mapping[str, Callable[[Rows], Table]] = {
    "cpu ranks": ranks_table,
    "cpu sums": sums_table,
    "cpu shards": shards_table,
    "gpu data": lambda rows: plain_table("Training on cached images", rows, DATA),
    "gpu streams": lambda rows: plain_table("Training on streamed images", rows, DATA),
    "gpu ranks": lambda rows: plain_table("Several GPUs: a step", rows, GPU_RANKS),
    "gpu precision": lambda rows: plain_table("Errors of fp32 against float64", rows, ERRORS),
}


def _summary(found: Mapping[str, Sequence[Figure]]) -> Table:
    """Return for each target the range, and the case that is farthest from it."""
    lines = []
    for section, of_section in found.items():
        for bound in dict.fromkeys(figure.bound for figure in of_section):
            group = [figure for figure in of_section if figure.bound == bound]
            worst = min(group, key=lambda figure: figure.value.value)
            values = [figure.value.value for figure in group]
            lines.append((
                section, f"{min(values):.2f}–{max(values):.2f}", bound,
                f"{sum(figure.reached for figure in group)} of {len(group)}",
                f"{worst.case} ({worst.value.value:.2f})",
            ))  # fmt: skip
    columns = ("section", "times faster than the best peer", "target", "reached", "least")
    return Table("Summary", columns, tuple(lines))


def headline(report: Report) -> str:
    """Summarize the results in a few lines."""
    found = list(chain.from_iterable(figures(report).values()))
    lines = [*_warnings(report.about), *(f"wrong result: {text}" for text in report.wrong)]
    lines += [f"did not run: {text}" for text in report.failed]
    if found:
        reached = sum(figure.reached for figure in found)
        lines.append(f"{reached} of {len(found)} figures reach their target")
    if report.checks:
        lines.append(
            f"{len(report.checks)} results were checked before they were timed; the largest "
            f"error is {max(report.checks.values()):.2g} of the allowed one"
        )
    lines += [f"not measured: {name}: {_line(why)}" for name, why in report.missing.items()]
    return "\n".join(lines)


BUSY = 0.25
"""Load for each core from which other programs disturb."""


def _warnings(about: Mapping[str, Any]) -> list[str]:
    """Return a warning if other programs used the machine when the run began."""
    cores, load = about.get("cores"), about.get("load at the start")
    if not isinstance(cores, int) or not load or isinstance(load[0], list):
        return []
    if load[0] < BUSY * cores:
        return []
    return [
        f"warning: the machine was busy when the run began (load {load[0]:g} on {cores} cores): "
        "wall times, above all of several threads or ranks, are not those of an idle machine"
    ]


def comparison_table(reports: Iterable[Report]) -> Table:
    """Return networks, devices and precisions with the speedup over the fastest peer.

    A later report replaces the cases of an earlier one.
    """
    lines: dict[tuple[str, ...], tuple[str, ...]] = {}
    for report in reports:
        about = report.about
        device = str(about.get("gpu", about.get("cpu")))
        for section, rows in report.sections().items():
            if section not in STEPS:
                continue
            task = "inference" if section == "inference" else "training"
            for found in comparisons(rows):
                if found.best is not None:
                    case = (task, device, case_of(found.ours))
                    times = time_of(found.ours), time_of(found.best)
                    peer, ratio = str(found.best["program"]), text_of(found.ratio)
                    lines[case] = (*case, *times, peer, ratio, _day(about["date"]))
    columns = ("task", "device", "case", "dptrain", "best peer", "peer", "times faster", "date")
    rows_of = tuple(lines[case] for case in sorted(lines))
    return Table("dptrain and the fastest peer: medians (quartiles)", columns, rows_of)


def document(title: str, about: Mapping[str, Any], summary: str, tables: Iterable[Table]) -> str:
    """Return a report in Markdown: conditions and summary as lists, then tables."""
    conditions = "\n".join(f"- {key}: {_plain(value)}" for key, value in about.items())
    lines = "\n".join(f"- {line}" for line in summary.splitlines())
    bodies = "\n\n".join(table.markdown() for table in tables)
    return f"# {title}\n\n{conditions}\n\n{lines}\n\n{bodies}\n"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def new_files(folder: Path, kind: str, date: str) -> tuple[Path, Path]:
    """Return unused paths for JSON and Markdown, named by date with a suffix -2, -3, … if needed.

    Args:
        folder: created if it does not exist.
        kind: prefix of the names.
        date: in ISO format; only the day is used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    day, number = f"{kind}-{_day(date)}", 1
    name = day
    while (folder / f"{name}.json").exists():
        number += 1
        name = f"{day}-{number}"
    return folder / f"{name}.json", folder / f"{name}.md"


def write(report: Report, paths: tuple[Path, Path]) -> None:
    """Write JSON, with numbers of six digits, and Markdown; replace those of an earlier call."""
    from dptrain.files import dump_json

    rounded = json.loads(
        dump_json(vars(report)), parse_float=lambda text: float(f"{float(text):.6g}")
    )
    paths[0].write_text(dump_json(rounded), encoding="utf-8")
    title = {"cpu": "dptrain on the cores of one node", "gpu": "dptrain on GPUs"}[report.kind]
    text = document(title, report.about, headline(report), tables_of(report))
    paths[1].write_text(text, encoding="utf-8")


def _day(date: Any) -> str:
    first = date[0] if isinstance(date, list) else date
    return str(first).partition("T")[0]


def _line(text: str) -> str:
    """Return the first line of a text, at most 200 characters."""
    return text.strip().partition("\n")[0][:200]
