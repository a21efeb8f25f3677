"""The input pixels that a tile of outputs needs: each is loaded once instead of nine times."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from docs.figures.style import BLUE, FILLS, GREEN, ORANGE, RED, arrow, blank

HEIGHT = 2.9
OUTPUT, KERNEL = (4, 6), 3
CELL = 0.55


def draw(figure: Figure) -> None:
    """Draw the tile of outputs, and the tile of inputs with its halo."""
    axes = figure.subplots()
    blank(axes, 11.2, 6.4)
    halo = KERNEL // 2
    rows, columns = OUTPUT[0] + 2 * halo, OUTPUT[1] + 2 * halo
    axes.text(0.2, 0.6, f"input: {rows} × {columns} pixels in shared memory", fontsize=8)
    for row in range(rows):
        for column in range(columns):
            inner = halo <= row < rows - halo and halo <= column < columns - halo
            _cell(axes, 0.2 + CELL * column, 1.2 + CELL * row, BLUE if inner else ORANGE)
    axes.add_patch(Rectangle((0.2 + 2 * CELL, 1.2 + CELL), 3 * CELL, 3 * CELL, fill=False,
                             edgecolor=RED, linewidth=2))  # fmt: skip
    left = 7.2
    axes.text(left, 0.6, f"output: {OUTPUT[0]} × {OUTPUT[1]} pixels", fontsize=8)
    for row in range(OUTPUT[0]):
        for column in range(OUTPUT[1]):
            colour = RED if (row, column) == (1, 2) else GREEN
            _cell(axes, left + CELL * column, 1.75 + CELL * row, colour)
    arrow(axes, (0.2 + 5 * CELL, 1.2 + 2.5 * CELL), (left + 2 * CELL, 1.75 + 1.5 * CELL), RED, -0.2)
    axes.text(0.2, 5.1, "orange: the halo, which neighbouring tiles load as well", fontsize=8)
    gathered, loaded = OUTPUT[0] * OUTPUT[1] * KERNEL**2, rows * columns
    axes.text(0.2, 5.8, f"without the tile: {OUTPUT[0] * OUTPUT[1]} × {KERNEL**2} = {gathered} "
              f"loads; with it: {rows} × {columns} = {loaded}", fontsize=8)  # fmt: skip


def _cell(axes: Axes, x: float, y: float, colour: str) -> None:
    axes.add_patch(Rectangle((x, y), CELL, CELL, facecolor=FILLS[colour], edgecolor=colour,
                             linewidth=0.7))  # fmt: skip
