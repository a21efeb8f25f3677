"""A step of two ranks: computation, waiting for the later rank, all-reduce, update."""

from matplotlib.figure import Figure

from docs.figures.style import BLUE, GREEN, GREY, ORANGE, time_axis, timeline

HEIGHT = 1.75
RANKS = {"rank 0": (3.0, 6.6), "rank 1": (3.4, 7.4)}
"""End of the forward and of the backward pass."""


def draw(figure: Figure) -> None:
    """Draw the step; rank 1 computes longer, so rank 0 waits for it."""
    axes = figure.subplots()
    time_axis(axes, 12.0, 3.0, left=2.0)
    late = max(end for _, end in RANKS.values())
    for line, (label, (forward, backward)) in enumerate(RANKS.items()):
        bars = [(0.0, 1.0, "load", GREY), (1.0, forward, "forward", BLUE),
                (forward, backward, "backward", BLUE)]  # fmt: skip
        if backward < late:
            bars.append((backward, late, "wait", ORANGE))
        bars += [(late, 9.9, "all-reduce", GREEN), (9.9, 11.6, "update", BLUE)]
        timeline(axes, 0.3 + 1.1 * line, label, bars)
