"""The roofline plot of a profile.

Source: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for
multicore architectures", 2009.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from dptrain.measure.profile.profile import Profile, Roofs, StageProfile
from dptrain.numbers import flop_rate, percent, short
from dptrain.report.elements.canvas import (
    BOTTOM,
    LEGEND_PT,
    PHASES,
    SMALL_PT,
    WIDTH,
    Plot,
    colour,
    plot,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

NAMED = 6
"""Largest number of stages with a number and a name."""
AREA = 130.0
"""Area of the marker of the longest stage in square points."""


def computing_stages(stages: Sequence[StageProfile]) -> list[StageProfile]:
    """Return the stages with floating-point operations."""
    return [
        s for s in stages if _work(s)[0] and s.bytes_moved and s.gflops > 0 and s.phase in PHASES
    ]


def _work(stage: StageProfile) -> tuple[float, float]:
    """Return the least operations and bytes; of older versions, those of the direct algorithm."""
    if stage.least_flops is None or stage.least_bytes is None:
        return stage.flops, stage.bytes_moved
    return stage.least_flops, stage.least_bytes


def _rate(stage: StageProfile) -> float:
    return _work(stage)[0] / stage.typical_ms / 1e6


def roofline(profile: Profile, roofs: Roofs, suffix: str, where: str) -> Plot:
    """Return the roofline plot of a profile.

    Args:
        profile: the profile.
        roofs: the measured limits of the machine.
        suffix, where: as in `profile_plots`.
    """
    stages = sorted(computing_stages(profile.stages), key=lambda stage: -stage.share)
    named = stages[:NAMED]
    xs = [flops / moved for flops, moved in map(_work, stages)]
    rates = [_rate(stage) for stage in stages]
    ridge = roofs.gflops / roofs.gb_per_s
    cached = max([roofs.gb_per_s, *(rate for _, rate in roofs.copies)])
    right = max([*xs, ridge]) * 28
    # The labels of the bandwidths need almost half of the width.
    left = min([*[x / 3 for x in xs], roofs.gflops / cached / 3, ridge * (ridge / right) ** 0.9])
    high = max([roofs.gflops, *rates])
    low = max(min(rates) / 2.5, roofs.gflops / 3e4)

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import NullFormatter

        axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(low, high * 3))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter(NullFormatter())
        axes.plot(
            (left, ridge, right),
            (left * roofs.gb_per_s, roofs.gflops, roofs.gflops),
            color=colour("ink"),
            linewidth=1.2,
            zorder=2,
        )
        if cached > 1.1 * roofs.gb_per_s:
            line = axes.plot((left, roofs.gflops / cached), (left * cached, roofs.gflops))[0]
            line.set(color=colour("ink"), linewidth=0.9, linestyle=(0, (4, 3)), zorder=2)
            _bandwidth_label(axes, cached, "cache", above=True)
        _bandwidth_label(axes, roofs.gb_per_s, "memory", above=False)
        for stage, x, rate in zip(stages, xs, rates, strict=True):
            role, marker = PHASES[stage.phase]
            area = max(AREA * stage.share / stages[0].share, 9)
            axes.scatter(
                x,
                rate,
                s=area,
                marker=marker,
                facecolor=colour(role),
                edgecolor=colour("paper"),
                linewidth=0.6,
                zorder=3,
            )
        points = list(zip(xs, rates, strict=True))
        _numbers(axes, points[: len(named)], points, _peak_label(axes, roofs.gflops, points))
        axes.set_xlabel("arithmetic intensity, FLOP/byte (log scale)", labelpad=2)
        _key(axes, named, height)

    bottom = BOTTOM + 6 + LEGEND_PT * (len(named) + 1)
    height = 200.0 + bottom
    values = "; ".join(
        f"{_stage_name(s)} {percent(s.share, decimals=0)} of the step, {flop_rate(s.gflops)}"
        for s in named
    )
    return plot(
        f"roofline{suffix}",
        f"Roofline{where}",
        "rate of each stage, GFLOP/s (log scale)",
        draw,
        height=height,
        bottom=bottom,
        left=40.0,
        caption="Stages and the measured limits; the area of a marker is proportional to the time. "
        "Listed: the longest stages. Only operations that no implementation of the algorithm can "
        "omit count.",
        alt=f"Roofline with {flop_rate(roofs.gflops)} and {short(roofs.gb_per_s)} GB/s: {values}.",
    )


def _stage_name(stage: StageProfile) -> str:
    """Return ``conv1 backward weight`` for ``conv1+relu1+pool1.backward_weight``."""
    return f"{stage.group.partition('+')[0]} {stage.phase.replace('_', ' ')}"


def _bandwidth_label(axes: Axes, gb_per_s: float, where: str, *, above: bool) -> None:
    """Write a bandwidth along its slanted line."""
    # The label starts where the line enters the plot, at the left or at the bottom.
    x = max(1.3 * axes.get_xlim()[0], 1.3 * axes.get_ylim()[0] / gb_per_s)
    (x0, y0), (x1, y1) = axes.transData.transform([(x, x * gb_per_s), (2 * x, 2 * x * gb_per_s)])
    axes.annotate(
        f"{short(gb_per_s)} GB/s {where}",
        (x, x * gb_per_s),
        xytext=(-2, 3) if above else (2, -3),
        rotation=math.degrees(math.atan2(y1 - y0, x1 - x0)),
        rotation_mode="anchor",
        ha="left",
        textcoords="offset points",
        va="bottom" if above else "top",
        fontsize=SMALL_PT,
    )


def _peak_label(
    axes: Axes, gflops: float, points: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Write the peak rate at the right end of its line, above or below it.

    Args:
        axes: axes of the plot.
        gflops: peak rate.
        points: data points to avoid.

    Returns:
        Pixel coordinates of the text.
    """
    text, scale = flop_rate(gflops), axes.figure.dpi / 72
    right = axes.get_xlim()[1]
    end, height = axes.transData.transform((right, gflops))
    markers = [tuple(axes.transData.transform(point)) for point in points]

    def positions(side: int) -> list[tuple[float, float]]:
        return [(end - 5.5 * k * scale, height + 8 * side * scale) for k in range(len(text))]

    def clearance(side: int) -> float:
        return min(math.dist(at, marker) for at in positions(side) for marker in markers)

    side = max((-1, 1), key=clearance)
    axes.annotate(
        text,
        (right, gflops),
        xytext=(-2, 3 * side),
        textcoords="offset points",
        ha="right",
        va="bottom" if side > 0 else "top",
        fontsize=SMALL_PT,
    )
    return positions(side)


def _numbers(
    axes: Axes,
    named: Sequence[tuple[float, float]],
    points: Sequence[tuple[float, float]],
    texts: Sequence[tuple[float, float]],
) -> None:
    """Write 1, 2, … next to the points, as far as possible from other points and texts."""
    to_pixels = axes.transData.transform
    taken: list[tuple[float, float]] = [*(tuple(to_pixels(point)) for point in points), *texts]
    scale = axes.figure.dpi / 72
    for number, point in enumerate(named, start=1):
        x, y = to_pixels(point)

        def clearance(shift: tuple[int, int], x: float = x, y: float = y) -> float:
            at = (x + shift[0] * scale, y + shift[1] * scale)
            return min(math.dist(at, other) for other in taken)

        near = max((s for s in product((-10, 0, 10), (-10, 0, 10)) if s != (0, 0)), key=clearance)
        far = max((s for s in product((-17, 0, 17), (-17, 0, 17)) if s != (0, 0)), key=clearance)
        best = near if clearance(near) >= 9 * scale else far
        taken.append((x + best[0] * scale, y + best[1] * scale))
        axes.annotate(
            str(number), point, xytext=best, textcoords="offset points", ha="center",
            va="center", fontsize=SMALL_PT, weight="bold", zorder=5,
            arrowprops={"arrowstyle": "-", "color": colour("faint"), "linewidth": 0.6,
                        "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip


def _key(axes: Axes, named: Sequence[StageProfile], height: float) -> None:
    """Write a line for each number below a plot with a height in points."""
    figure = axes.figure
    head, y = "stage, share of the step · of the roofline", 4 + LEGEND_PT * len(named)
    figure.text(4 / WIDTH, y / height, head, fontsize=SMALL_PT, color=colour("faint"))
    for row, stage in enumerate(named):
        y = 4 + LEGEND_PT * (len(named) - 1 - row)
        role, marker = PHASES[stage.phase]
        figure.text(4 / WIDTH, y / height, str(row + 1), fontsize=SMALL_PT, weight="bold")
        figure.add_artist(_marker(16 / WIDTH, (y + 3.2) / height, role, marker))
        limit = f" · {percent(stage.roofline_share, decimals=0)}" if stage.roofline_share else ""
        text = f"{_stage_name(stage)}  {percent(stage.share, decimals=0)}{limit}"
        figure.text(24 / WIDTH, y / height, text, fontsize=SMALL_PT)


def _marker(x: float, y: float, role: str, marker: str) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D(
        [x],
        [y],
        linestyle="",
        marker=marker,
        markersize=5.5,
        color=colour(role),
        markeredgecolor=colour("paper"),
        markeredgewidth=0.5,
    )
