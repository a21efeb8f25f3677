"""The same program on four ranks: what each one has, and what an all-reduce returns to all."""

from matplotlib.figure import Figure

from docs.figures.style import BLUE, GREEN, GREY, ORANGE, arrow, blank, box

HEIGHT = 3.6
GRADIENTS = (3, 1, 4, 2)
WIDTH, GAP, LEFT = 2.5, 0.4, 0.2


def draw(figure: Figure) -> None:
    """Draw the start, the images of each rank, the gradients and their mean."""
    axes = figure.subplots()
    ranks = len(GRADIENTS)
    full = ranks * WIDTH + (ranks - 1) * GAP
    mean = sum(GRADIENTS) / ranks
    blank(axes, full + 2 * LEFT, 9.0)
    box(axes, LEFT, 0.1, full, 1.0, f"mpirun -n {ranks} dptrain train", GREY, fontsize=11)
    for rank, gradient in enumerate(GRADIENTS):
        x = LEFT + rank * (WIDTH + GAP)
        middle = x + WIDTH / 2
        arrow(axes, (middle, 1.1), (middle, 1.9))
        box(
            axes,
            x,
            1.9,
            WIDTH,
            1.9,
            f"rank {rank}\nimages\n{8 * rank} to {8 * rank + 7}",
            BLUE,
            fontsize=10,
        )
        box(axes, x, 4.2, WIDTH, 0.9, f"gradient {gradient}", ORANGE, fontsize=10)
        arrow(axes, (middle, 3.8), (middle, 4.2))
        arrow(axes, (middle, 5.1), (middle, 5.7))
        arrow(axes, (middle, 6.8), (middle, 7.4))
        box(axes, x, 7.4, WIDTH, 1.4, f"mean {mean:g}\nsame update", GREEN, fontsize=10)
    total = " + ".join(map(str, GRADIENTS))
    box(
        axes,
        LEFT,
        5.7,
        full,
        1.1,
        f"all-reduce: ({total}) / {ranks} = {mean:g}",
        GREEN,
        fontsize=11,
    )
