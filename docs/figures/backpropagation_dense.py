"""A dense layer with numbers: rows of W make y, columns of W make dx, and dW has all products."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from docs.figures.style import BLUE, GREEN, ORANGE, blank, box

HEIGHT = 4.5
W = np.array([[1, 2, 0], [0, 1, 3]])
X, DY = np.array([2, 1, 1]), np.array([1, -2])
CELL = 1.25


def draw(figure: Figure) -> None:
    """Draw the three products."""
    axes = figure.subplots()
    blank(axes, 13.2, 13.3)
    _title(axes, 0.6, "y = W x: a row of W, times x")
    _matrix(axes, 0.2, 1.0, W, {(0, 0), (0, 1), (0, 2)}, BLUE)
    _matrix(axes, 5.2, 0.95, X[:, None], {(0, 0), (1, 0), (2, 0)}, BLUE)
    _matrix(axes, 8.4, 1.0, (W @ X)[:, None], {(0, 0)}, GREEN)
    axes.text(10.0, 1.65, "= 1·2 + 2·1 + 0·1", va="center", fontsize=9)
    _title(axes, 5.4, "dx = Wᵀ dy: a column of W, times dy")
    _matrix(axes, 0.2, 5.8, W, {(0, 1), (1, 1)}, BLUE)
    _matrix(axes, 5.2, 5.8, DY[:, None], {(0, 0), (1, 0)}, ORANGE)
    _matrix(axes, 8.4, 5.75, (W.T @ DY)[:, None], {(1, 0)}, GREEN)
    axes.text(10.0, 7.65, "= 2·1 + 1·(−2)", va="center", fontsize=9)
    _title(axes, 10.2, "dW = dy xᵀ: each dy times each x")
    _matrix(axes, 0.2, 10.5, DY[:, None], {(1, 0)}, ORANGE)
    _matrix(axes, 2.6, 10.5, X[None], {(0, 2)}, BLUE)
    _matrix(axes, 8.4, 10.5, np.outer(DY, X), {(1, 2)}, GREEN)


def _title(axes: Axes, y: float, text: str) -> None:
    axes.text(0.2, y, text, fontsize=10, weight="bold")


def _matrix(
    axes: Axes, x: float, y: float, values: NDArray[np.int64], marked: set[tuple[int, int]],
    colour: str,
) -> None:  # fmt: skip
    for (row, column), value in np.ndenumerate(values):
        options = {"colour": colour} if (row, column) in marked else {}
        box(axes, x + CELL * column, y + CELL * row, CELL, CELL, f"{value}".replace("-", "−"),
            fontsize=10, **options)  # fmt: skip
