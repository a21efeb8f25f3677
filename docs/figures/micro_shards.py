"""The binary tree along which eight micro-shards are added, whatever ranks compute them."""

from matplotlib.figure import Figure

from docs.figures.style import BLUE, GREEN, GREY, ORANGE, arrow, blank, box

HEIGHT = 3.1
SHARDS = 8
OWNERS = {"1 rank": (8,), "2 ranks": (4, 4), "3 ranks": (3, 3, 2)}
COLOURS = (BLUE, GREEN, ORANGE)


def draw(figure: Figure) -> None:
    """Draw the tree above the micro-shards, and below them who owns which."""
    axes = figure.subplots()
    blank(axes, 14.0, 8.2)
    level = [(2.2 + 1.45 * i + 0.6, f"{i}") for i in range(SHARDS)]
    y = 4.2
    for x, text in level:
        box(axes, x - 0.55, y, 1.1, 0.55, text)
    axes.text(0, y + 0.28, "micro-\nshards", fontsize=8, va="center")
    width = 1
    while len(level) > 1:
        above = []
        for (left, _), (right, _) in zip(level[::2], level[1::2], strict=True):
            x, first = (left + right) / 2, len(above) * 2 * width
            arrow(axes, (left, y), (x, y - 0.75))
            arrow(axes, (right, y), (x, y - 0.75))
            text = f"{first}–{first + 2 * width - 1}"
            box(axes, x - 0.7, y - 1.3, 1.4, 0.55, text, GREY)
            above.append((x, text))
        level, y, width = above, y - 1.3, 2 * width
    for line, (label, owners) in enumerate(OWNERS.items()):
        y, start = 5.3 + 0.9 * line, 0
        axes.text(0, y + 0.3, label, fontsize=8, va="center")
        for rank, count in enumerate(owners):
            box(axes, 2.25 + 1.45 * start, y, 1.45 * count - 0.35, 0.6, f"rank {rank}",
                COLOURS[rank])  # fmt: skip
            start += count
