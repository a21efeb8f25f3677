"""The plots of the page, from page/plots.toml.

Each plot of the file has a ``title``, a ``subtitle``, an ``alt`` text with ``values``, axes
(``x_label``, ``x_ticks`` or ``x_log``, ``y_log``, formats), perhaps a horizontal ``line`` or the
diagonal ``linear``, and ``series``: each has ``lines``, for whose ``{row}`` it is drawn once with a
``label``, the specification of y over ``cases``, ``x`` (default: the case), a ``style``, colours by
``role``, ``bars`` for intervals, and ``point_names``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.studies.claims.judgements import estimate
from benchmarks.studies.claims.results import MissingResultError, Results
from benchmarks.studies.claims.texts import filled
from benchmarks.studies.claims.values import KEYS, Values
from benchmarks.studies.page.tables import with_hardware
from dptrain.measure.statistics import Estimate
from dptrain.report.elements.canvas import Plot, colour, plot, set_ranks_axis
from dptrain.toml import read_toml

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE = Path(__file__).with_name("plots.toml")
PREFIX = "studies-"
HEIGHT = 190.0
COLOURS = ("blue", "green", "purple", "orange", "ink", "sky")
MARKERS = ("o", "s", "^", "D", "v", "P")

Spec = Mapping[str, Any]
Points = dict[Any, tuple[float, Estimate]]


def draw_plots(results: Results) -> Iterator[Plot]:
    """Yield the plots for which there are results."""
    for name, spec in read_toml(FILE).items():
        try:
            yield _plot(name, spec, results)
        except MissingResultError:
            continue


def _plot(name: str, spec: Spec, results: Results) -> Plot:
    values = Values(results)
    values.add(spec["values"])
    series = [(each, _lines(each, results)) for each in spec["series"]]

    def draw(axes: Axes) -> None:
        if spec.get("linear"):
            axes.plot(spec["x_ticks"], spec["x_ticks"], color=colour("grid"), linewidth=2,
                      label="linear")  # fmt: skip
        if "line" in spec:
            axes.axhline(spec["line"], color=colour("ink"), linewidth=0.8)
        for each, lines in series:
            for number, (label, points) in enumerate(lines.items()):
                _draw_line(axes, each, number, label, points)
        _set_axes(axes, spec)

    return plot(
        f"{PREFIX}{name}", spec["title"], spec["subtitle"], draw, caption="",
        alt=filled(spec["alt"], values.known), height=HEIGHT, legend=spec.get("legend", 1),
        lines=True, left=spec.get("left", 30.0),
    )  # fmt: skip


def _lines(series: Spec, results: Results) -> dict[str, Points]:
    """Return the points by case of each line of a series, by its label."""
    values, found = Values(results), {}
    lines = values.listed(series["lines"])
    y = {key: series[key] for key in KEYS & series.keys() if key not in ("cases", "label")}
    for number, row in enumerate(lines):
        values.row, points = row, {}
        for case in values.listed(series["cases"]):
            try:
                x = estimate(values.one(series["x"], case)).value if "x" in series else (
                    float(str(case)))  # fmt: skip
                points[case] = x, estimate(values.one(y, case))
            except MissingResultError:
                continue
        if not points:
            raise MissingResultError(f"nothing of '{row}' was measured yet")
        label = series["names"][number] if "names" in series else (
            series.get("label", "{row}").format(row=row))  # fmt: skip
        found[with_hardware(label, results)] = points
    return found


def _draw_line(axes: Axes, series: Spec, number: int, label: str, points: Points) -> None:
    roles = series["role"].split() if "role" in series else COLOURS
    style = series.get("style", f"{MARKERS[number]}-")
    found = sorted(points.values(), key=lambda point: point[0])
    xs, ys = [x for x, _ in found], [y.value for _, y in found]
    options: dict[str, Any] = {"color": colour(roles[number]), "label": label}
    if series.get("bars"):
        around = [y.value - y.low for _, y in found], [y.high - y.value for _, y in found]
        # Intervals at the same place would cover each other.
        shifted = [x * 1.05 ** (number - 1) for x in xs]
        axes.errorbar(shifted, ys, yerr=around, fmt=style, capsize=3, **options)
    else:
        axes.plot(xs, ys, style, markersize=10 if style == "*" else None, **options)
    for case, name in series.get("point_names", {}).items():
        x, y = points[case]
        # Labels of points that lie next to others are below them.
        offset = (-4, -10) if "," in name or case == "base" else (3, 4)
        axes.annotate(name, (x, y.value), xytext=offset, textcoords="offset points", fontsize=7,
                      color=colour("faint"))  # fmt: skip


def _set_axes(axes: Axes, spec: Spec) -> None:
    if "x_ticks" in spec:
        set_ranks_axis(axes, spec["x_ticks"], spec["x_label"])
    else:
        axes.set_xscale("log", base=spec["x_log"])
        axes.set_xlabel(spec["x_label"], labelpad=2)
        axes.set_xlim(right=spec.get("x_right"))
    if spec.get("y_log"):
        axes.set_yscale("log")
    if spec.get("linear"):
        axes.set_ylim(0)
        axes.set_yticks(range(0, max(spec["x_ticks"]) + 1, 4))
    for axis, name in ((axes.xaxis, "x_format"), (axes.yaxis, "y_format")):
        if name in spec:
            axis.set_major_formatter(spec[name])
