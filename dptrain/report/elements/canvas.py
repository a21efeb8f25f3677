"""The style of all plots: colours and fonts, and the conversion of a drawing to SVG and PNG.

A plot has the width of a phone; wider screens show two next to each other. Each colour has a role,
and the roles have the same order of lightness in greyscale and with colour blindness (after Okabe
and Ito, "Color universal design", 2008). In dark mode a page defines other values for the roles.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIGHT = {
    "ink": "#1c2128",
    "faint": "#5a636d",
    "grid": "#e2e6ea",
    "paper": "#ffffff",
    "blue": "#1d4f8c",
    "sky": "#86c0e6",
    "orange": "#cf5508",
    "amber": "#f0bd4a",
    "grey": "#8d949c",
    "green": "#1b7f5c",
    "mint": "#93d1b3",
    "purple": "#7b3294",
}
"""Colours by role. All values differ, so that a colour in an SVG identifies its role."""
DARK = {
    "ink": "#e4e7eb",
    "faint": "#a3adb8",
    "grid": "#30373f",
    "paper": "#15191e",
    "blue": "#5b94d6",
    "sky": "#b5dcf3",
    "orange": "#ee7f33",
    "amber": "#f7d27c",
    "grey": "#747c85",
    "green": "#3fa67e",
    "mint": "#a9e3c8",
    "purple": "#c38ad8",
}
PARTS = {
    "compute": "blue",
    "data_wait": "sky",
    "transfer": "orange",
    "imbalance": "amber",
    "checkpoint": "purple",
    "evaluation": "mint",
    "other": "grey",
    "without_core": "ink",
}
"""Role of the colour of each part of a step."""
PHASES = {
    "forward": ("blue", "o"),
    "backward": ("purple", "v"),
    "backward_weight": ("green", "s"),
    "backward_input": ("mint", "^"),
}
"""Role of the colour, and marker, of each phase of a layer."""
OTHER_PHASE = ("grey", "load, loss, update")
"""Role of the colour, and label, of stages that belong to no layer."""

WIDTH = 264.0
"""Width of a plot in points, 352 CSS pixels: a phone, or half of an A4 page."""
HEIGHT = 196.0
TOP, BOTTOM, RIGHT = 34.0, 30.0, 9.0
"""Margins of the axes in points; the top margin contains the title and the y-axis label."""
LEGEND_PT = 13.0
"""Height of a row of a legend in points."""
PNG_DPI = 220
FONT = "'DejaVu Sans', 'Liberation Sans', Arial, sans-serif"
TITLE_PT, TEXT_PT, SMALL_PT = 10.0, 9.0, 8.5

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # Part of matplotlib, so text has the same size everywhere.
    "font.size": TEXT_PT,
    "svg.fonttype": "none",
    "text.parse_math": False,  # Names of classes and files may contain dollar signs.
    "axes.edgecolor": LIGHT["faint"],
    "axes.labelcolor": LIGHT["faint"],
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "axes.labelsize": SMALL_PT,
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 0.7,
    "xtick.labelsize": SMALL_PT,
    "ytick.labelsize": SMALL_PT,
    "xtick.color": LIGHT["faint"],
    "ytick.color": LIGHT["faint"],
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": SMALL_PT,
    "legend.handlelength": 1.5,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.1,
    "legend.borderaxespad": 0,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "text.color": LIGHT["ink"],
}


@dataclass(frozen=True)
class Plot:
    """A finished plot.

    Attributes:
        name: name of its files.
        title: title above the plot.
        caption: explanation below the plot.
        alt: description with numbers, for screen readers.
        svg: contents of an SVG file, in which text is not converted to paths.
        png: contents of a PNG file.
        figure: the drawing.
    """

    name: str
    title: str
    caption: str
    alt: str
    svg: str
    png: bytes
    figure: Figure = field(compare=False, repr=False)

    def pdf(self) -> bytes:
        """Return the contents of a PDF file, in which text has embedded fonts."""
        buffer = io.BytesIO()
        facts = {"Title": self.title, "Creator": "dptrain report", "CreationDate": None}
        with _style({"pdf.fonttype": 42}):
            self.figure.savefig(buffer, format="pdf", metadata=facts)
        return buffer.getvalue()


def plot(
    name: str,
    title: str,
    vertical: str,
    draw: Callable[[Axes], None],
    *,
    caption: str,
    alt: str,
    height: float = HEIGHT,
    left: float = 30.0,
    bottom: float = BOTTOM,
    legend: int = 0,
    lines: bool = False,
) -> Plot:
    """Draw one plot.

    Args:
        name: name of its files.
        title: title above the plot.
        vertical: label of the y axis with its unit, written horizontally below the title.
        draw: function that draws the data on empty axes.
        caption, alt: as in `Plot`.
        height: total height in points, without the legend.
        left, bottom: margins of the axes in points, without the legend.
        legend: columns of a legend below the plot, which is filled row by row; 0: none.
        lines: whether the legend shows lines, which need more width than patches.
    """
    from matplotlib.figure import Figure

    with _style({"svg.hashsalt": name}):
        figure = Figure((WIDTH / 72, height / 72))
        axes = figure.add_axes((0, 0, 1, 1))
        head = figure.text(0.004, 1, title, fontsize=TITLE_PT, weight="bold", va="baseline")
        label = figure.text(
            0.004, 1, vertical, fontsize=SMALL_PT, color=LIGHT["faint"], va="baseline"
        )

        def place(below: float) -> None:
            """Place everything above a legend of this height."""
            total, end = height + below, bottom + below
            figure.set_size_inches(WIDTH / 72, total / 72)
            inner = 1 - (left + RIGHT) / WIDTH, 1 - (end + TOP) / total
            axes.set_position((left / WIDTH, end / total, *inner))
            head.set_y(1 - 10 / total)
            label.set_y(1 - 22 / total)

        place(0)
        draw(axes)
        if legend:
            place(_legend_below(axes, legend, lines=lines))
        return Plot(
            name, title, caption, alt, _svg(figure, title, alt), _png(figure, title), figure
        )


def colour(role: str) -> str:
    """Return the colour of a role on a white background."""
    return LIGHT[role]


def set_ranks_axis(axes: Axes, values: Sequence[float], label: str) -> None:
    """Set a logarithmic x axis with ticks at `values`, at most nine of them.

    Args:
        axes: axes to change.
        values: numbers of ranks or compute threads.
        label: label of the axis.
    """
    low, high = min(values), max(values)
    axes.set_xscale("log", base=2)
    # The same distance on paper is a larger factor on a wide range; labels are on the right.
    reach = max(high / low, 2.0)
    axes.set_xlim(low / reach**0.1, high * reach**0.19)
    shown = sorted(set(values))
    while len(shown) > 9:
        shown = shown[::2]
    axes.set_xticks(shown, [f"{value:g}" for value in shown])
    axes.set_xlabel(f"{label} (log scale)" if len(shown) > 2 else label, labelpad=2)
    axes.grid(visible=False, axis="x")


def draw_launches(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], role: str, *, shift_pt: float = -6.0
) -> None:
    """Draw single launches as small circles, shifted from their estimate in the x direction."""
    from matplotlib.transforms import ScaledTranslation

    figure = axes.figure
    assert figure is not None
    shifted = axes.transData + ScaledTranslation(shift_pt / 72, 0, figure.dpi_scale_trans)
    axes.plot(
        xs,
        ys,
        linestyle="none",
        marker="o",
        markersize=3.2,
        markerfacecolor="none",
        markeredgecolor=colour(role),
        markeredgewidth=0.7,
        transform=shifted,
        zorder=3,
    )


def set_bars_axis(axes: Axes, label: str) -> None:
    """Set the axes of horizontal bars: no y axis, and plain numbers below."""
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel(label, labelpad=2)


def draw_end_value(axes: Axes, x: float, y: float, text: str) -> None:
    """Write a value at the end of a horizontal bar."""
    axes.annotate(text, (x, y), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)


def _legend_below(axes: Axes, columns: int, *, lines: bool) -> float:
    """Add a legend at the bottom; return its height in points, 0 if no drawing has a label."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return 0.0
    # matplotlib fills a legend column by column.
    order = [i for column in range(columns) for i in range(column, len(handles), columns)]
    axes.figure.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        ncols=columns,
        loc="lower left",
        bbox_to_anchor=(0.004, 0.004),
        handlelength=2.0 if lines else 0.9,
        handleheight=0.9,
    )
    return LEGEND_PT * -(-len(handles) // columns) + 4


@contextmanager
def _style(options: dict[Any, Any]) -> Iterator[None]:
    """Draw in the style of the project, without warnings of characters that its font lacks."""
    from matplotlib import rc_context

    with rc_context({**STYLE, **options}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        yield


def _png(figure: Figure, title: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(
        buffer, format="png", dpi=PNG_DPI, metadata={"Software": "dptrain report", "Title": title}
    )
    return buffer.getvalue()


def _svg(figure: Figure, title: str, alt: str) -> str:
    """Return the drawing as SVG, without the date and without identifiers that are not used."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": "dptrain report"})
    text = buffer.getvalue()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!DOCTYPE.*?>\s*", "<!-- dptrain report -->\n", text, count=1, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*", f"font-family: {FONT}", text)
    text = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", text)
    referred = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in referred else "", text)
    described = f"<title>{escape(title)}</title>\n <desc>{escape(alt)}</desc>\n <defs>"
    return text.replace("<defs>", described, 1)


def inline(drawn: Plot) -> str:
    """Return the SVG of a plot as an element of a page, with unique identifiers.

    Colours become CSS variables such as ``var(--blue)``; the page defines them and the font.
    """
    text = drawn.svg[drawn.svg.index("<svg") :]
    text = re.sub(r"\s*<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r" font-family: [^;\"]*;?", "", text)
    text = re.sub(r'(url\(|href="|id=")(#?)(?=[pmhc][0-9a-f])', rf"\1\2{drawn.name}-", text)
    for role, value in LIGHT.items():
        text = text.replace(value, f"var(--{role})")
    title, desc = f"{drawn.name}-title", f"{drawn.name}-desc"
    text = text.replace("<title>", f'<title id="{title}">', 1)
    text = text.replace("<desc>", f'<desc id="{desc}">', 1)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'{box[0]} role="img" aria-labelledby="{title} {desc}">'
    )
    return head + text[text.index(">") + 1 :]
