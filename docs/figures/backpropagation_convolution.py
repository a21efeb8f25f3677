"""A convolution of one dimension: which products contain a weight, and which a pixel."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.style import BLUE, GREEN, ORANGE, RED, blank, box

HEIGHT = 5.0
PIXELS, WEIGHTS = 5, 3
OUTPUTS = PIXELS - WEIGHTS + 1
SPACE, CELL = 2.4, 1.5
COLOURS = (BLUE, ORANGE, RED)


def draw(figure: Figure) -> None:
    """Draw all connections, those of a weight and those of a pixel."""
    axes = figure.subplots()
    blank(axes, 12.4, 18.0)
    formulas = ("y1 = w0 x1 + w1 x2 + w2 x3", "dw0 = x0 dy0 + x1 dy1 + x2 dy2",
                "dx2 = w2 dy0 + w1 dy1 + w0 dy2")  # fmt: skip
    every = {(output, weight) for output in range(OUTPUTS) for weight in range(WEIGHTS)}
    of_weight = {each for each in every if each[1] == 0}
    of_pixel = {each for each in every if sum(each) == 2}
    _layer(axes, 0.0, "forward: each output reads three pixels", every, formulas[0], backward=False)
    _layer(axes, 6.1, "gradient of w0: all lines of its colour", of_weight, formulas[1])
    _layer(axes, 12.2, "gradient of x2: all lines that start there", of_pixel, formulas[2])


def _layer(
    axes: Axes, top: float, title: str, lines: set[tuple[int, int]], formula: str,
    *, backward: bool = True,
) -> None:  # fmt: skip
    axes.text(0.2, top + 0.6, title, fontsize=10, weight="bold")
    for output, weight in sorted(lines):
        start, end = _middle(output + weight), _middle(output + 1)
        axes.plot((start, end), (top + 2.2, top + 3.7), color=COLOURS[weight], linewidth=2)
        if backward:
            axes.text((start + end) / 2, top + 2.95, f"w{weight}", fontsize=9, ha="center",
                      va="center", color=COLOURS[weight],
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
    for pixel in range(PIXELS):
        used = any(sum(line) == pixel for line in lines)
        options = {"colour": BLUE} if used else {}
        box(axes, _middle(pixel) - CELL / 2, top + 1.1, CELL, 1.1, f"x{pixel}", fontsize=10,
            **options)  # fmt: skip
    for output in range(OUTPUTS):
        box(axes, _middle(output + 1) - CELL / 2, top + 3.7, CELL, 1.1,
            f"dy{output}" if backward else f"y{output}", ORANGE if backward else GREEN,
            fontsize=10)  # fmt: skip
    for weight, colour in enumerate(COLOURS):
        axes.text(0.2 + 1.0 * weight, top + 5.6, f"w{weight}", fontsize=10, color=colour)
    axes.text(12.2, top + 5.6, formula, ha="right", fontsize=9.5)


def _middle(column: int) -> float:
    return 1.2 + SPACE * column
