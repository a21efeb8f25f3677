"""Size, colours and shapes that the figures share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

WIDTH = 4.8
"""Inches; on a phone the letters are then large enough to read."""

BLUE, GREEN, ORANGE, RED, GREY = "#2b6cb0", "#2f855a", "#c77d14", "#b83232", "#5c6b78"
FILLS = {BLUE: "#dbe9f6", GREEN: "#dff0e3", ORANGE: "#fde9c9", RED: "#f8dada", GREY: "#eef1f4"}

SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dptrain",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}


def new_figure(height: float) -> Figure:
    """Return an empty figure of a height in inches."""
    matplotlib.rcParams.update(SETTINGS)
    return Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")


def write(figure: Figure, path: Path) -> Path:
    """Write a figure as SVG; the same figure results in the same bytes."""
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
    return path


def blank(axes: Axes, width: float, height: float) -> Axes:
    """Turn axes into a drawing area from (0, 0), top left, to (width, height)."""
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    return axes


def box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str = "",
    colour: str = GREY, **options: Any,
) -> None:  # fmt: skip
    """Draw a box with a text in its middle; `options` are those of the text."""
    axes.add_patch(
        Rectangle((x, y), width, height, facecolor=FILLS[colour], edgecolor=colour, linewidth=0.9)
    )
    if text:
        options = {"ha": "center", "va": "center", "fontsize": 8, **options}
        axes.text(x + width / 2, y + height / 2, text, **options)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = GREY,
    bend: float = 0.0,
) -> None:  # fmt: skip
    """Draw an arrow, straight or bent."""
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=9, color=colour, linewidth=1.1,
            shrinkA=1, shrinkB=1, connectionstyle=f"arc3,rad={bend}",
        )
    )  # fmt: skip


def timeline(
    axes: Axes, y: float, label: str, bars: Sequence[tuple[float, float, str, str]],
    height: float = 0.7,
) -> None:  # fmt: skip
    """Draw one line of bars (start, end, text, colour) with a label on the left."""
    axes.text(-0.2, y + height / 2, label, ha="right", va="center", fontsize=8)
    for start, end, text, colour in bars:
        box(axes, start, y, end - start, height, text, colour)


def time_axis(axes: Axes, width: float, height: float, left: float) -> None:
    """Turn axes into a drawing area whose horizontal direction is time."""
    blank(axes, width, height)
    axes.set_xlim(-left, width)
    arrow(axes, (0, height - 0.6), (width, height - 0.6))
    axes.text(width, height, "time", ha="right", va="bottom", fontsize=8, color=GREY)
