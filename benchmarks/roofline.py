"""Draw the stages of each network in a roofline plot.

    python -m benchmarks.roofline benchmarks/results/cpu-2026-11-21.json [--output DIR]

draws the results of an earlier run of `benchmarks.cpu` again: a figure for each batch size, a panel
for each network.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from benchmarks.limits import Roofs
    from benchmarks.stages import StageResult

AT_ROOF = 0.8
"""Share of its roof from which a stage counts as reaching it."""
DRAWN, LABELLED = 0.003, 0.08
"""Shares of the step from which a stage is drawn, and labelled."""
AREA = 1200.0
"""Area of a marker for the whole step, in points²."""
COLUMNS = 2
PANEL = (4.3, 3.2)
"""Size in inches."""
INTENSITIES, RATES = (0.03, 3000.0), (1.0, 5000.0)
"""Limits of the axes in FLOP/byte and GFLOP/s, with space for labels above the roofs."""
ASPECT = 0.7
"""Ratio of height to width of a panel."""
NAMES_UP_TO = 1.2
"""Right edge of the column of labels in FLOP/byte. Stages left of it have adjacent labels."""
INK, FAINT = "#222222", "#6f6f6f"
COLOURS = {
    "convolution": "#2166ac",
    "first convolution": "#35978f",
    "dense": "#b35806",
    "memory": "#7b3294",
}
FILLED, HOLLOW = (None, "white"), ("white", None)
"""Face and edge colour of a marker; None is the colour of its kind."""
STYLE: dict[Any, Any] = {
    "font.size": 7.0,
    "font.sans-serif": ["DejaVu Sans", "Arial"],
    "xtick.minor.bottom": False,
    "ytick.minor.left": False,
    "svg.fonttype": "none",
    # The same results yield the same file.
    "svg.hashsalt": "roofline",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
}


@dataclass(frozen=True)
class Point:
    """A stage in the plot: FLOP/byte, GFLOP/s, share of the step and of its roof."""

    name: str
    kind: str
    intensity: float
    gflop_per_s: float
    share_of_step: float
    share_of_roof: float

    @property
    def at_roof(self) -> bool:
        """Whether the stage reaches its roof, so that it can only become faster by doing less."""
        return self.share_of_roof >= AT_ROOF

    @property
    def label(self) -> str:
        """``conv1 forward 12% · 61%``."""
        return f"{self.name}  {self.share_of_step:.0%} · {self.share_of_roof:.0%}"


def points_of(roofs: Roofs, stages: Sequence[StageResult]) -> list[Point]:
    """Return the points of one case in the order of the step, without stages of 0 FLOPs."""
    points = []
    for stage in stages:
        if not stage.flops:
            continue
        intensity = stage.flops / stage.bytes_moved
        roof = roofs.over(stage.flops, stage.bytes_moved)
        # Limits of memory-bound stages are in bytes/s.
        limit = stage.limit * (intensity if stage.kind == "memory" else 1.0)
        points.append(
            Point(
                short_name(stage.name), stage.kind, intensity, stage.flops / stage.time_us / 1e3,
                stage.share_of_step, stage.share_of_limit * limit / roof,
            )
        )  # fmt: skip
    return points


def short_name(stage: str) -> str:
    """``conv1 backward weight`` of ``conv1+relu1+pool1.backward_weight``."""
    group, _, phase = stage.partition(".")
    return f"{group.partition('+')[0]} {phase.replace('_', ' ')}".rstrip()


def draw(roofs: Sequence[Roofs], stages: Sequence[StageResult], stem: Path) -> list[Path]:
    """Write a figure for each batch size, such as ``STEM-roofline-32.svg``."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    paths = []
    for batch_size in sorted({case.batch_size for case in roofs}):
        cases = [case for case in roofs if case.batch_size == batch_size]
        rows = -(-(len(cases) + 1) // COLUMNS)
        with mpl.rc_context(STYLE):
            figure = Figure((COLUMNS * PANEL[0], rows * PANEL[1]), layout="constrained")
            panels = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
            for panel, case in zip(panels, cases, strict=False):
                of_case = [
                    s for s in stages if (s.network, s.batch_size) == (case.network, batch_size)
                ]
                _panel(panel, case, points_of(case, of_case))
            for panel in panels[len(cases) :]:
                panel.set_axis_off()
            _legend(panels[len(cases)], batch_size)
            path = stem.with_name(f"{stem.name}-roofline-{batch_size}.svg")
            figure.savefig(path, metadata={"Date": None, "Creator": None})
            paths.append(path)
    return paths


def _panel(panel: Axes, roofs: Roofs, points: Sequence[Point]) -> None:
    panel.set(
        xscale="log", yscale="log", xlim=INTENSITIES, ylim=RATES, box_aspect=ASPECT,
        xticks=(0.1, 1, 10, 100, 1000), yticks=(1, 10, 100, 1000),
        xlabel="FLOP / byte", ylabel="GFLOP/s",
    )  # fmt: skip
    panel.tick_params(length=2, color=FAINT)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.spines[["top", "right"]].set_visible(False)
    reached = sum(point.share_of_step for point in points if point.at_roof)
    panel.set_title(
        f"{roofs.network}: {reached:.0%} of the step at its roof", loc="left", fontsize=8.5
    )
    _roofs(panel, roofs)
    drawn = [point for point in points if point.share_of_step >= DRAWN]
    for point in sorted(drawn, key=lambda point: -point.share_of_step):
        colour, (face, edge) = COLOURS[point.kind], FILLED if point.at_roof else HOLLOW
        panel.scatter(
            point.intensity, point.gflop_per_s, s=AREA * point.share_of_step,
            facecolor=face or colour, edgecolor=edge or colour, linewidth=0.8, alpha=0.85, zorder=3,
        )  # fmt: skip
    _names(panel, [point for point in points if point.share_of_step >= LABELLED])
    _step(panel, points)


def _roofs(panel: Axes, roofs: Roofs) -> None:
    """Draw the compute roof, and a bandwidth roof for each memory level."""
    peak = roofs.peak / 1e9
    line: dict[str, Any] = {"color": FAINT, "linewidth": 1.0, "zorder": 1}
    text: dict[str, Any] = {"color": FAINT, "fontsize": 6, "rotation_mode": "anchor"}
    # Length of a decade of FLOP/byte relative to a decade of FLOP/s.
    angle = math.degrees(math.atan(ASPECT * _decades(INTENSITIES) / _decades(RATES)))
    for bandwidth, name, style, x, side in (
        (roofs.cache, "L2", "--", 0.045, 1.1),
        (roofs.memory, "memory", "-", 0.45, 1 / 1.1),
    ):
        slope = bandwidth / 1e9
        ends = INTENSITIES[0], peak / slope
        panel.plot(ends, [end * slope for end in ends], linestyle=style, **line)
        panel.text(
            x, x * slope * side, f"{name} {slope:.0f} GB/s", rotation=angle,
            va="bottom" if side > 1 else "top", **text,
        )  # fmt: skip
    panel.plot([peak * 1e9 / roofs.cache, INTENSITIES[1]], [peak, peak], **line)
    panel.text(INTENSITIES[1], peak / 1.15, f"sgemm {peak:.0f}", ha="right", va="top", **text)


def _step(panel: Axes, points: Sequence[Point]) -> None:
    """Draw the step from left to right; the height of a stage is its share of its roof."""
    inset = panel.inset_axes((0.58, 0.09, 0.39, 0.3), zorder=2)
    starts = accumulate((point.share_of_step for point in points), initial=0.0)
    for start, point in zip(starts, points, strict=False):
        if point.share_of_step >= DRAWN:
            inset.bar(start, min(point.share_of_roof, 1.4), point.share_of_step, align="edge",
                      color=COLOURS[point.kind], edgecolor="white", linewidth=0.3)  # fmt: skip
    inset.axhline(1.0, color=FAINT, linewidth=0.8)
    inset.set(xlim=(0, 1), ylim=(0, 1.4), xticks=(), yticks=(0, 1), yticklabels=("0", "roof"))
    inset.set_xlabel("the step", fontsize=6, labelpad=2)
    inset.tick_params(length=0, labelsize=6, pad=1)
    inset.spines[:].set_visible(False)


def _decades(limits: tuple[float, float]) -> float:
    return math.log10(limits[1] / limits[0])


def _names(panel: Axes, points: Sequence[Point]) -> None:
    """Draw labels on the left with lines to the stages, or next to stages on the left."""
    height = 0.98
    for point in sorted(points, key=lambda point: -point.gflop_per_s):
        on_the_left = point.intensity <= NAMES_UP_TO
        position: dict[str, Any] = {"xytext": (14, 0), "textcoords": "offset points"}
        if not on_the_left:
            line = {"arrowstyle": "-", "color": COLOURS[point.kind], "linewidth": 0.5,
                    "shrinkA": 1, "shrinkB": 0, "relpos": (1, 0.5)}  # fmt: skip
            position = {"xytext": (0.44, height), "textcoords": "axes fraction", "ha": "right",
                     "arrowprops": line}  # fmt: skip
            height -= 0.045
        panel.annotate(
            point.label, (point.intensity, point.gflop_per_s), va="center", fontsize=6,
            color=COLOURS[point.kind], zorder=4, **position,
        )  # fmt: skip


def _legend(panel: Axes, batch_size: int) -> None:
    """Draw the legend in the unused panel."""
    panel.set(xlim=(0, 1), ylim=(0, 1))
    height = 0.95

    def row(text: str, **marker: Any) -> None:
        nonlocal height
        if marker:
            panel.scatter(0.06, height, linewidth=0.9, **marker)
        panel.text(0.12 if marker else 0.03, height, text, va="center", fontsize=7)
        height -= 0.08

    row(f"A training step at batch {batch_size}, float32, one thread")
    for kind, colour in COLOURS.items():
        row(kind, s=60, color=colour)
    row(f"at {AT_ROOF:.0%} or more of its roof", s=60, color=INK)
    row("below it", s=60, facecolor="white", edgecolor=INK)
    row("10% of the step", s=AREA / 10, facecolor="white", edgecolor=INK)
    row(f"Names, from {LABELLED:.0%} of the step on: share of the step · of the roof")
    row(f"Points and bars, from {DRAWN:.1%} on")
    row("Bars: the stages in order, as wide as their share of the step, as high")
    row("as their share of the roof; white below the line is time that faster code could save")


@click.command()
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the figures.  [default: the folder of RESULTS]",
)
def main(results: Path, output: Path | None) -> None:
    """Draw roofline plots of RESULTS, a JSON file of `benchmarks.cpu`."""
    from benchmarks.limits import Roofs
    from benchmarks.stages import StageResult
    from dptrain.files import parse_json

    read = parse_json(results.read_text(encoding="utf-8"))
    if not read.get("roofs"):
        print(f"benchmarks.roofline: {results} contains no stages with roofs", file=sys.stderr)
        sys.exit(2)
    stem = (output or results.parent) / results.stem
    roofs = [Roofs(**case) for case in read["roofs"]]
    for path in draw(roofs, [StageResult(**stage) for stage in read["stages"]], stem):
        print(f"written: {path}")


if __name__ == "__main__":
    main()
