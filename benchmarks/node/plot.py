"""One figure of all sections: steps by threads, efficiency of ranks, times of sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.node import ranks, sums, threads
from benchmarks.node.rows import Rows, wall_ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "dptrain": "#0b5394",
    "copies": "#999999",
    "PyTorch": "#d9541e",
    "JAX": "#3f8f3f",
    "MPICH": "#7a4fa3",
    "Open MPI": "#b5892b",
    "gloo": "#d9541e",
    "traffic.c": "#222222",
    "PyTorch DDP": "#d9541e",
}
PANEL, COLUMNS = (3.1, 2.7), 4
Draw = Callable[["Axes"], None]


def draw(sections: Mapping[str, Rows], about: Mapping[str, Any], path: Path) -> Path | None:
    """Draw the panels of all sections that have results; return the path, or None."""
    panels = _panels(sections)
    if not panels:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = math.ceil(len(panels) / COLUMNS)
    columns = min(len(panels), COLUMNS)
    figure, axes = pyplot.subplots(
        lines, columns, squeeze=False, figsize=(PANEL[0] * columns, PANEL[1] * lines + 0.4)
    )
    for panel in axes.flat[len(panels) :]:
        panel.set_visible(False)
    for panel, (title, function) in zip(axes.flat, panels, strict=False):
        function(panel)
        panel.set_title(title, loc="left", fontsize=8.5)
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=6.5, frameon=False)
    cpu, date = about.get("cpu"), str(about.get("date")).partition("T")[0].strip("['")
    figure.suptitle(f"{cpu}, {about.get('cores')} cores, {date}", fontsize=9, x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _panels(sections: Mapping[str, Rows]) -> list[tuple[str, Draw]]:
    panels: list[tuple[str, Draw]] = []
    for network in sections["threads"].values("network") if "threads" in sections else ():
        rows = sections["threads"].where(network=network)
        title = f"{network}@{rows.values('batch')[0]}: ms per training step"
        panels.append((title, _bound(_draw_threads, rows)))
    found = sections.get("ranks", Rows([]))
    for network, scaling, samples in dict.fromkeys(
        (r["network"], r["scaling"], r["samples"]) for r in found
    ):
        rows = found.where(network=network, scaling=scaling, samples=samples)
        title = f"{network}, {samples}: {scaling} efficiency of ranks"
        panels.append((title, _bound(_draw_ranks, rows)))
    for network in sections["sums"].values("network") if "sums" in sections else ():
        rows = sections["sums"].where(network=network)
        size = 4e-6 * sums.NETWORKS[network]
        panels.append((f"sum and update of {size:.2f} MB: µs", _bound(_draw_sums, rows)))
    return panels


def _bound(function: Callable[[Axes, Rows], None], rows: Rows) -> Draw:
    return lambda panel: function(panel, rows)


def _draw_threads(panel: Axes, rows: Rows) -> None:
    counts = sorted(rows.values("threads"))
    torch = tuple(name for name in threads.PEERS if name.startswith("PyTorch"))
    groups = {"dptrain": (threads.OURS,), "PyTorch": torch, "JAX": ("JAX",),
              "copies": (threads.COPIES,)}  # fmt: skip
    for label, programs in groups.items():
        times = {c: rows.where(threads=c).fastest(programs) for c in counts}
        found = {c: row for c, row in times.items() if row is not None}
        _line(panel, {c: row["median_ms"] for c, row in found.items()}, label)
        for count, row in found.items():
            panel.vlines(
                count, *row["quartiles_ms"], color=COLOURS[label], linewidth=2.4, alpha=0.4
            )
    _logarithmic(panel)
    _axis(panel, counts, "threads")


def _draw_ranks(panel: Axes, rows: Rows) -> None:
    counts = sorted(rows.values("ranks"))
    weak = rows.values("scaling") == ["weak"]
    for label, programs in {
        "dptrain": (ranks.OURS,), "copies": (ranks.COPIES,), "PyTorch DDP": ranks.DDP_MODES,
    }.items():  # fmt: skip
        points = {}
        for count in counts:
            here = rows.where(ranks=count)
            alone = here.one(program=ranks.ALONE)
            if label == "PyTorch DDP":
                alone = rows.where(ranks=1).fastest(programs)
            ratio = wall_ratio(alone, here.fastest(programs), 1.0 if weak else 1.0 / count)
            if ratio is not None:
                points[count] = ratio.value
        _line(panel, points, label)
    panel.set_ylim(0.0, max(1.1, panel.get_ylim()[1]))
    _axis(panel, counts, "ranks")


def _draw_sums(panel: Axes, rows: Rows) -> None:
    counts = sorted(rows.values("ranks"))
    for program in (sums.OURS, sums.TRAFFIC, *sums.MPI_LIBRARIES, "gloo"):
        found = {c: rows.one(ranks=c, program=program) for c in counts}
        points = {c: 1e3 * row["median_ms"] for c, row in found.items() if row is not None}
        _line(panel, points, program)
    _logarithmic(panel)
    _axis(panel, counts, "ranks")


def _line(panel: Axes, points: Mapping[int, float], label: str) -> None:
    if points:
        style = "--" if label in ("copies", "traffic.c") else "-"
        panel.plot(list(points), list(points.values()), style, marker="o", markersize=3,
                   linewidth=1.2, color=COLOURS[label], label=label)  # fmt: skip


def _logarithmic(panel: Axes) -> None:
    """Use a logarithmic scale with plain numbers: 1, 2, 5, 10, …"""
    from matplotlib.ticker import FuncFormatter, LogLocator

    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _axis(panel: Axes, counts: list[int], label: str) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks(counts, [str(count) for count in counts])
    panel.set_xlabel(label, fontsize=7)
    panel.minorticks_off()
