"""A ring all-reduce of four ranks: the parts of the array that each rank holds after each step."""

from matplotlib.figure import Figure

from docs.figures.style import BLUE, GREEN, GREY, ORANGE, arrow, blank, box

HEIGHT = 5.6
RANKS = 4
CELL, GAP, LEFT = 1.45, 0.95, 1.8


def ring_steps(ranks: int) -> list[tuple[str, list[list[set[int]]], dict[int, int]]]:
    """Run the algorithm on sets of ranks whose gradients have been added.

    Returns:
        For each step its title, the sets of each rank and part, and the part that each rank has
        just received.
    """
    held = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    found = [("start", [list(map(set, row)) for row in held], {})]
    for phase in ("reduce-scatter", "all-gather"):
        for step in range(ranks - 1):
            shift = 0 if phase == "reduce-scatter" else 1
            sent = {rank: (rank - step + shift) % ranks for rank in range(ranks)}
            copies = {rank: set(held[rank][part]) for rank, part in sent.items()}
            received = {}
            for rank, part in sent.items():
                neighbour = (rank + 1) % ranks
                held[neighbour][part] |= copies[rank]
                received[neighbour] = part
            title = f"{phase}, step {step + 1}"
            found.append((title, [list(map(set, row)) for row in held], received))
    return found


def draw(figure: Figure) -> None:
    """Draw the numbers of added gradients after each step; a sum of all four is complete."""
    axes = figure.subplots()
    width = LEFT + RANKS * (CELL + GAP)
    steps = ring_steps(RANKS)
    blank(axes, width, 0.8 + 1.55 * len(steps))
    for rank in range(RANKS):
        axes.text(_x(rank) + CELL / 2, 0.45, f"rank {rank}", ha="center", fontsize=8, weight="bold")
    for line, (title, held, received) in enumerate(steps):
        y = 0.8 + 1.55 * line
        axes.text(0, y + 0.5, title.replace(", ", "\n"), fontsize=7.5, va="center")
        for rank in range(RANKS):
            for part in range(RANKS):
                members = held[rank][part]
                colour = GREEN if len(members) == RANKS else BLUE if len(members) > 1 else GREY
                colour = ORANGE if received.get(rank) == part and colour != GREEN else colour
                text = "".join(map(str, sorted(members)))
                box(axes, _x(rank), y + 0.27 * part, CELL, 0.27, text, colour, fontsize=6.5,
                    weight="bold" if received.get(rank) == part else "normal")  # fmt: skip
            if line and rank < RANKS - 1:
                part = received[rank + 1]
                arrow(axes, (_x(rank) + CELL, y + 0.27 * part + 0.13),
                      (_x(rank + 1), y + 0.27 * part + 0.13))  # fmt: skip


def _x(rank: int) -> float:
    return LEFT + 0.6 + rank * (CELL + GAP * 0.75)
