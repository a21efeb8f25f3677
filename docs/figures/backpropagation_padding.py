"""A convolution with padding: forward on the padded input, backward with the rotated kernel."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from docs.figures.style import BLUE, FILLS, GREEN, GREY, ORANGE, arrow, blank

HEIGHT = 5.2
X = np.array([[1, 2, 0], [0, 1, 3], [2, 0, 1]])
W = np.array([[1, 0, 2], [0, 1, 0], [-1, 0, 1]])
DY = np.array([[2, 1, 0], [1, 3, 0], [0, 1, 1]])
CELL = 0.82


def convolve(x: NDArray[np.int64], w: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the correlation of an input, padded with one pixel, and a 3 × 3 kernel."""
    return np.einsum("ijrs,rs->ij", sliding_window_view(np.pad(x, 1), w.shape), w)


def draw(figure: Figure) -> None:
    """Draw both directions; a corner is marked in the output, and its window in the input."""
    axes = figure.subplots()
    blank(axes, 13.0, 14.0)
    _direction(axes, 0.0, ("padded x", "w", "y"), X, W, BLUE)
    _direction(axes, 7.3, ("padded dy", "w, rotated by 180°", "dx"), DY, W[::-1, ::-1], ORANGE)


def _direction(
    axes: Axes, top: float, titles: tuple[str, str, str], values: NDArray[np.int64],
    kernel: NDArray[np.int64], colour: str,
) -> None:  # fmt: skip
    for x, title in zip((0.2, 5.2, 10.3), titles, strict=True):
        axes.text(x, top + 0.7, title, fontsize=10, weight="bold")
    window = {(row, column) for row in range(3) for column in range(3)}
    _grid(axes, 0.2, top + 1.2, np.pad(values, 1), colour, window)
    _grid(axes, 5.2, top + 2.0, kernel, colour, window)
    result = convolve(values, kernel)
    _grid(axes, 10.3, top + 2.0, result, GREEN, {(0, 0)})
    arrow(axes, (4.4, top + 3.2), (5.1, top + 3.2))
    arrow(axes, (7.8, top + 3.2), (10.2, top + 3.2))
    pairs = zip(np.pad(values, 1)[:3, :3].flat, kernel.flat, strict=True)
    terms = [f"{a}·{b}" if b >= 0 else f"{a}·({b})" for a, b in pairs if a and b]
    text = f"corner: {' + '.join(terms) or '0'} = {result[0, 0]}"
    axes.text(0.2, top + 6.2, text.replace("-", "−"), fontsize=10)


def _grid(
    axes: Axes, left: float, top: float, values: NDArray[np.int64], colour: str,
    marked: set[tuple[int, int]],
) -> None:  # fmt: skip
    for (row, column), value in np.ndenumerate(values):
        x, y = left + CELL * column, top + CELL * row
        fill = FILLS[colour if (row, column) in marked else GREY]
        axes.fill((x, x + CELL, x + CELL, x), (y, y, y + CELL, y + CELL), facecolor=fill,
                  edgecolor=GREY, linewidth=0.7)  # fmt: skip
        axes.text(x + CELL / 2, y + CELL / 2, f"{value}".replace("-", "−"), ha="center",
                  va="center", fontsize=10)  # fmt: skip
