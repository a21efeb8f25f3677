"""A network of three layers: values go forward, derivatives of the loss go backward."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.style import BLUE, GREY, ORANGE, arrow, blank, box

HEIGHT = 4.6
LAYERS = (("convolution", "x", "w", "z"), ("ReLU", "z", "", "h"), ("dense", "h", "V", "y"))


def draw(figure: Figure) -> None:
    """Draw the layers below each other, with what each one receives in both directions."""
    axes = figure.subplots()
    blank(axes, 12.0, 15.2)
    axes.text(4.1, 0.5, "forward", ha="right", fontsize=10, color=BLUE, weight="bold")
    axes.text(7.3, 0.5, "backward", fontsize=10, color=ORANGE, weight="bold")
    for number, (layer, before, weight, _) in enumerate(LAYERS):
        y = 2.4 + 3.6 * number
        _edges(axes, y - 1.6, before)
        box(axes, 3.4, y, 4.6, 2.0, layer, fontsize=11)
        if weight:
            box(axes, 0.2, y + 0.4, 1.6, 1.2, weight, BLUE, fontsize=11)
            arrow(axes, (1.8, y + 1.0), (3.4, y + 1.0), BLUE)
            box(axes, 10.0, y + 0.4, 1.8, 1.2, f"d{weight}", ORANGE, fontsize=11)
            arrow(axes, (8.0, y + 1.0), (10.0, y + 1.0), ORANGE)
    _edges(axes, 11.6, "y")
    box(axes, 3.4, 13.2, 4.6, 1.7, "loss L", GREY, fontsize=11)


def _edges(axes: Axes, y: float, name: str) -> None:
    arrow(axes, (4.6, y), (4.6, y + 1.6), BLUE)
    axes.text(4.3, y + 0.85, name, ha="right", va="center", fontsize=11)
    arrow(axes, (6.8, y + 1.6), (6.8, y), ORANGE)
    axes.text(7.1, y + 0.85, f"d{name}", va="center", fontsize=11)
