"""F(2, 3): two outputs of a filter with three weights by four multiplications."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.style import BLUE, GREEN, ORANGE, arrow, blank, box

HEIGHT = 3.0
DATA = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
FILTER = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
RESULT = np.array([[1, 1, 1, 0], [0, 1, -1, -1]])
X, W = np.array([1, 2, 3, 4]), np.array([2, 4, 6])


def winograd() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the transformed input and filter, their products and the outputs."""
    data, weights = DATA @ X, FILTER @ W
    products = data * weights
    result = RESULT @ products
    direct = np.array([X[i : i + 3] @ W for i in range(2)])
    np.testing.assert_allclose(result, direct)
    return data, weights, products, result


def draw(figure: Figure) -> None:
    """Draw the transforms and the products with the numbers of an example."""
    axes = figure.subplots()
    blank(axes, 13.0, 8.4)
    data, weights, products, result = winograd()
    _column(axes, 0.2, "input x", X, BLUE)
    _column(axes, 3.2, "Bᵀ x", data, BLUE)
    _column(axes, 6.0, "times G w", weights, ORANGE)
    _column(axes, 8.8, "4 products", products, GREEN)
    _column(axes, 11.4, "Aᵀ m", result, GREEN)
    for left, right in ((1.6, 3.1), (4.6, 5.9), (7.4, 8.7), (10.2, 11.3)):
        arrow(axes, (left, 3.2), (right, 3.2))
    axes.text(0.2, 6.6, "Bᵀ x: x0 − x2,  x1 + x2,  x2 − x1,  x1 − x3", fontsize=8)
    axes.text(0.2, 7.3, "G w: w0,  (w0 + w1 + w2)/2,  (w0 − w1 + w2)/2,  w2", fontsize=8)
    axes.text(0.2, 8.0, "Aᵀ m: m0 + m1 + m2,  m1 − m2 − m3        w = (2, 4, 6)", fontsize=8)


def _column(axes: Axes, x: float, title: str, values: np.ndarray, colour: str) -> None:
    axes.text(x + 0.65, 0.6, title, ha="center", fontsize=8, weight="bold")
    start = 1.2 + (4 - len(values)) * 0.6
    for row, value in enumerate(values):
        box(axes, x, start + 1.2 * row, 1.3, 0.9, f"{value:g}".replace("-", "−"), colour)
