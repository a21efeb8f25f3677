"""Plots of experiments as SVG and PNG. Matplotlib is imported when a plot is drawn."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain.experiments.cases import INFERENCE, TRAINING
from dptrain.experiments.findings import by_configuration
from dptrain.experiments.measuring import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Colours that are distinguishable with any colour vision (Okabe and Ito, 2008)."""
MARKERS = "osD^vP*"
MAX_LINES = len(COLOURS)
"""Above this number of networks, lines have shades of one colour, by number of parameters."""


def plot_bench(results: Sequence[Result], folder: Path) -> list[Path]:
    """Plot time per sample against batch size, and time against the number of parameters.

    A plot is omitted if there are too few results for a line.

    Returns:
        The files that were written.
    """
    timed = [result for result in results if result.timing is not None and not result.case.searches]
    written = []
    for task, noun in ((TRAINING, "a training step"), (INFERENCE, "a forward pass")):
        own = [result for result in timed if result.task == task]
        if len({result.samples for result in own}) > 1:
            written += _plot_by_samples(own, task, noun, folder)
        if len({result.parameters for result in own}) > 2:
            written += _plot_by_parameters(own, task, noun, folder)
    return written


@contextmanager
def figure(path: Path, written: list[Path], *, x: str, y: str, title: str) -> Iterator[Axes]:
    """Yield axes in the style of the project; write ``path.svg`` and ``path.png`` at the end."""
    # pyplot is not used because it has global state and looks for a display.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style = {"font.size": 9, "svg.hashsalt": "dptrain", "svg.fonttype": "none"}
    # Names may contain dollar signs.
    options: Any = {**style, "text.parse_math": False}
    with rc_context(options), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # The font lacks some characters.
        drawn = Figure(figsize=(7.2, 4.4), layout="constrained")
        FigureCanvasAgg(drawn)
        axes = drawn.add_subplot()
        axes.set_title(title, loc="left", fontweight="bold", fontsize=10)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        yield axes
        for suffix, options in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": 150})):
            file = path.with_suffix(suffix)
            drawn.savefig(file, **options)
            written.append(file)


def _plot_by_samples(results: Sequence[Result], task: str, noun: str, folder: Path) -> list[Path]:
    written: list[Path] = []
    with figure(
        folder / f"{task}-by-batch",
        written,
        x="batch size",
        y="time per sample, ms",
        title=f"{task.capitalize()}: time of {noun} per sample",
    ) as axes:
        draw_by_samples(axes, results)
        _legend(axes, _lines(results))
    return written


def can_draw_by_samples(results: Sequence[Result]) -> bool:
    """Return True if results have several batch sizes, and few enough lines for a legend."""
    return len({r.samples for r in results}) > 1 and len(_lines(results)) <= MAX_LINES


def draw_by_samples(axes: Axes, results: Sequence[Result]) -> None:
    """Draw the median time per sample against the batch size, a line for each network."""
    for label, own, colour, marker in _styled(_lines(results), axes):
        own = sorted(own, key=lambda r: r.samples)
        axes.errorbar(
            [r.samples for r in own],
            [r.median_ms / r.samples for r in own],
            yerr=_bars(own, per_sample=True),
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1.2,
            capsize=2,
            label=label,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _name_ticks(axes, sorted({r.samples for r in results}))
    label_decades(axes.yaxis)


def _plot_by_parameters(
    results: Sequence[Result], task: str, noun: str, folder: Path
) -> list[Path]:
    written: list[Path] = []
    several = len(by_configuration(results)) > 1
    word = "batch size"
    lines: dict[tuple[str, int], list[Result]] = {}
    for r in sorted(results, key=lambda r: (r.samples, r.parameters)):
        configuration = " ".join(map(str, r.case.configuration)) + ", " if several else ""
        lines.setdefault((f"{configuration}{word} {r.samples:,}", r.samples), []).append(r)
    title = f"{task.capitalize()}: time of {noun} by number of parameters"
    with figure(
        folder / f"{task}-by-parameters",
        written,
        x="parameters",
        y=f"time of {noun}, ms",
        title=title,
    ) as axes:
        for i, ((label, _), own) in enumerate(lines.items()):
            axes.errorbar(
                [r.parameters for r in own],
                [r.median_ms for r in own],
                yerr=_bars(own, per_sample=False),
                color=COLOURS[i % len(COLOURS)],
                marker=MARKERS[i % len(MARKERS)],
                markersize=4,
                linewidth=0.8,
                capsize=2,
                label=label,
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        label_decades(axes.xaxis)
        label_decades(axes.yaxis)
        legend_outside(axes)
    return written


def _bars(results: Sequence[Result], *, per_sample: bool) -> list[list[float]]:
    """Return the distances of the quartiles from the medians, below and above."""
    below, above = [], []
    for r in results:
        assert r.timing is not None
        times, by = r.timing.time_ms, r.samples if per_sample else 1
        below.append((times.median - times.q1) / by)
        above.append((times.q3 - times.median) / by)
    return [below, above]


def _lines(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results of each line by its label, the smallest network first."""
    several = len(by_configuration(results)) > 1
    lines: dict[str, list[Result]] = {}
    for r in sorted(results, key=lambda r: r.parameters):
        backend, precision, threads = r.case.configuration
        configuration = f", {backend} {precision}" + (f" x{threads}" if threads > 1 else "")
        lines.setdefault(r.network + (configuration if several else ""), []).append(r)
    return lines


def _styled(
    lines: dict[str, list[Result]], axes: Axes
) -> Iterator[tuple[str, list[Result], Any, str]]:
    if len(lines) <= MAX_LINES:
        for i, (label, own) in enumerate(lines.items()):
            yield label, own, COLOURS[i], MARKERS[i]
        return
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    sizes = [own[0].parameters for own in lines.values()]
    shades = ScalarMappable(LogNorm(min(sizes), max(sizes)), colormaps["viridis_r"])
    assert axes.figure is not None
    bar = axes.figure.colorbar(shades, ax=axes, label="parameters", format="{x:,g}")
    bar.minorticks_off()
    for label, own in lines.items():
        yield label, own, shades.to_rgba(np.array(own[0].parameters)), "o"


def _legend(axes: Axes, lines: dict[str, list[Result]]) -> None:
    if len(lines) <= MAX_LINES:
        legend_outside(axes)


def legend_outside(axes: Axes) -> None:
    """Draw the legend to the right of the axes, where no line can be hidden."""
    axes.legend(frameon=False, bbox_to_anchor=(1.01, 1.0), loc="upper left")


def _name_ticks(axes: Axes, sizes: Sequence[int]) -> None:
    """Label exactly the batch sizes that were measured."""
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()


def label_decades(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers: 1, 2 and 5 in each decade.

    If fewer than three of them lie in the range, all digits are labelled.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    known = [f * 10.0**k for k in range(-9, 13) for f in (1, 2, 5) if low <= f * 10.0**k <= high]
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if len(known) > 2 else range(1, 10)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_locator(NullLocator())
