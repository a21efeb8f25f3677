"""The sum of gradients after the backward pass, and bucket by bucket during it."""

from matplotlib.figure import Figure

from docs.figures.style import BLUE, GREEN, ORANGE, time_axis, timeline

HEIGHT = 2.6
BUCKETS = ((2.0, 4.0), (4.0, 6.0), (6.0, 8.0))
"""Start and end of the backward pass of the layers of each bucket."""
SUM = 1.3
"""Time of the all-reduce of a bucket."""


def draw(figure: Figure) -> None:
    """Draw one rank with one sum at the end, and with a sum of each bucket."""
    axes = figure.subplots()
    time_axis(axes, 14.4, 5.2, left=2.6)
    passes = [(0.0, 2.0, "forward", BLUE)]
    passes += [(a, b, f"layer {3 - i}", BLUE) for i, (a, b) in enumerate(BUCKETS)]
    end = BUCKETS[-1][1]
    alone = end + len(BUCKETS) * SUM
    timeline(axes, 0.2, "one sum", [*passes, (alone, alone + 1.7, "update", BLUE)])
    timeline(axes, 0.95, "", [(end, alone, "all-reduce, exposed", ORANGE)])
    sums, free = [], 0.0
    for _, ready in BUCKETS:
        start = max(ready, free)
        free = start + SUM
        sums.append((start, free, "sum", GREEN if free <= end else ORANGE))
    timeline(axes, 2.6, "buckets", [*passes, (free, free + 1.7, "update", BLUE)])
    timeline(axes, 3.35, "", sums)
    axes.annotate(
        f"saved {alone - free:.1f}", (alone, 2.3), (free, 2.3), fontsize=8, va="center",
        ha="right", arrowprops={"arrowstyle": "<->", "color": "#5c6b78"},
    )  # fmt: skip
