"""One look for all plots: colours, type, and how a drawing becomes SVG text and a PNG picture.

Plots are drawn for the width of a phone, two of which stand side by side on anything wider. Each
colour has a role, and roles keep their order of lightness in greyscale and for colour-blind eyes
(after Okabe and Ito, "Color universal design", 2008). A page gives the roles other values where
the reader's screen is dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
"""Colours by role, which differ from each other, so that a role can be found again in an SVG."""
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
    "other": "grey",
}
"""Roles of the parts of a step."""
PHASES = {
    "forward": ("blue", "o"),
    "backward": ("purple", "v"),
    "backward_weight": ("green", "s"),
    "backward_input": ("mint", "^"),
}
"""Role of the colour, and marker, of each phase of a layer."""

WIDTH = 264.0
"""Points, 352 pixels of a screen: a phone's width, and half of an A4 page's."""
HEIGHT = 196.0
TOP, BOTTOM, RIGHT = 34.0, 30.0, 9.0
"""Points around the axes; those at the top hold the title and what the vertical axis is."""
LEGEND_PT = 13.0
"""Height of a row of a legend."""
PNG_DPI = 220
FONT = "'DejaVu Sans', 'Liberation Sans', Arial, sans-serif"
TITLE_PT, TEXT_PT, SMALL_PT = 10.0, 9.0, 8.5

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # Comes with matplotlib, so that sizes are the same everywhere.
    "font.size": TEXT_PT,
    "svg.fonttype": "none",
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
    """A finished drawing.

    Attributes:
        name: of its files.
        caption: how to read it, for below the picture.
        alt: what it shows, in words and numbers, for those who do not see it.
        svg: a whole file; text is text.
        png: bytes of a picture.
    """

    name: str
    title: str
    caption: str
    alt: str
    svg: str
    png: bytes


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
) -> Plot:
    """Draw one plot.

    Args:
        name: of its files.
        title: above the plot.
        vertical: what the vertical axis shows, below the title, where it can be read without
            turning the head.
        draw: puts the data on empty axes.
        caption, alt: as in `Plot`.
        height: of the whole, in points.
        left, bottom: room beside and below the axes, in points.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure((WIDTH / 72, height / 72))
        axes = figure.add_axes(
            (left / WIDTH, bottom / height, 1 - (left + RIGHT) / WIDTH,
             1 - (bottom + TOP) / height)
        )  # fmt: skip
        _head(figure, title, vertical, height)
        draw(axes)
        return Plot(name, title, caption, alt, _svg(figure, title, alt), _png(figure, title))


def _head(figure: Figure, title: str, vertical: str, height: float) -> None:
    figure.text(0.004, 1 - 10 / height, title, fontsize=TITLE_PT, weight="bold", va="baseline")
    figure.text(
        0.004, 1 - 22 / height, vertical, fontsize=SMALL_PT, color=LIGHT["faint"], va="baseline"
    )


def colour(role: str) -> str:
    """The colour of a role, as drawn on white."""
    return LIGHT[role]


def set_ranks_axis(axes: Axes, values: Sequence[float], label: str, *, margin: float = 1.3) -> None:
    """A horizontal axis of powers of two, with a tick at each of `values` that has room.

    Args:
        axes: to be changed.
        values: numbers of ranks or workers.
        label: of the axis.
        margin: the axis ends at the largest value times that, for what stands beside it.
    """
    low, high = min(values), max(values)
    axes.set_xscale("log", base=2)
    reach = (high / low) ** 0.06  # Wide ranges need more for the same room on paper.
    axes.set_xlim(low / 1.25 / reach, high * margin * reach)
    shown = sorted(set(values))
    while len(shown) > 9:
        shown = shown[::2]
    axes.set_xticks(shown, [f"{value:g}" for value in shown])
    axes.set_xlabel(label, labelpad=2)
    axes.grid(visible=False, axis="x")


def part_name(name: str) -> str:
    """``data wait`` of ``data_wait``."""
    return name.replace("_", " ")


def legend_below(axes: Axes, columns: int, *, lines: bool = False) -> None:
    """A legend below the plot, which reads row by row; `legend_height` says what room it takes.

    Args:
        axes: of the plot.
        columns: entries in a row.
        lines: whether it shows lines, which take more room than areas of a colour.
    """
    handles, labels = axes.get_legend_handles_labels()
    # matplotlib fills it column by column.
    order = [i for column in range(columns) for i in range(column, len(handles), columns)]
    axes.figure.legend(
        [handles[i] for i in order], [labels[i] for i in order], ncols=columns, loc="lower left",
        bbox_to_anchor=(0.004, 0.004), handlelength=2.0 if lines else 0.9, handleheight=0.9,
    )  # fmt: skip


def legend_height(entries: int, columns: int) -> float:
    """Points that `legend_below` needs."""
    return LEGEND_PT * -(-entries // columns) + 4


def _png(figure: Figure, title: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(
        buffer, format="png", dpi=PNG_DPI, metadata={"Software": "dptrain report", "Title": title}
    )
    return buffer.getvalue()


def _svg(figure: Figure, title: str, alt: str) -> str:
    """The drawing as a file, without date and without what nobody refers to."""
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
    """The SVG of a plot to stand inside a page: colours by role, identifiers of its own.

    The page says what ``var(--blue)`` and the others are, and which font.
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
