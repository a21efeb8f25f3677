"""An all-reduce by recursive doubling: partners at distance 1, 2 and 4 exchange their sums."""

from matplotlib.figure import Figure

from docs.figures.style import BLUE, GREEN, GREY, arrow, blank, box

HEIGHT = 2.7
RANKS = 8


def doubling_steps(ranks: int) -> list[list[set[int]]]:
    """Return the ranks whose gradients each rank has added, before and after each step."""
    held = [{rank} for rank in range(ranks)]
    found = [list(held)]
    distance = 1
    while distance < ranks:
        held = [held[rank] | held[rank ^ distance] for rank in range(ranks)]
        found.append(list(held))
        distance *= 2
    return found


def draw(figure: Figure) -> None:
    """Draw the sums that each rank holds, and the exchanges between two steps."""
    axes = figure.subplots()
    steps = doubling_steps(RANKS)
    blank(axes, 13.6, 0.5 + 1.35 * len(steps))
    for line, held in enumerate(steps):
        y = 0.4 + 1.35 * line
        label = "start" if line == 0 else f"step {line}"
        axes.text(0, y + 0.25, label, fontsize=8, va="center")
        for rank, members in enumerate(held):
            colour = GREY if line == 0 else GREEN if len(members) == RANKS else BLUE
            low, high = min(members), max(members)
            text = str(low) if low == high else f"{low}–{high}"
            box(axes, 1.8 + 1.48 * rank, y, 1.15, 0.5, text, colour)
            if line + 1 < len(steps):
                partner = rank ^ (1 << line)
                arrow(axes, (2.37 + 1.48 * rank, y + 0.5), (2.37 + 1.48 * partner, y + 1.35))
