"""Four ranks on two cores: each step lasts as long as two, and most waiting is for a core."""

from matplotlib.figure import Figure

from docs.figures.style import BLUE, GREEN, ORANGE, time_axis, timeline

HEIGHT = 3.0
COMPUTE, SUM = 3.5, 1.0


def draw(figure: Figure) -> None:
    """Draw two ranks on two cores, and four ranks on the same cores."""
    axes = figure.subplots()
    time_axis(axes, 9.0, 6.2, left=2.4)
    axes.text(0, 0.25, "2 ranks on 2 cores", fontsize=8, weight="bold")
    for rank in range(2):
        bars = [(0.0, COMPUTE, f"compute (core {rank})", BLUE),
                (COMPUTE, COMPUTE + SUM, "sum", GREEN)]  # fmt: skip
        timeline(axes, 0.45 + 0.75 * rank, f"rank {rank}", bars, 0.6)
    axes.text(0, 2.4, "4 ranks on 2 cores", fontsize=8, weight="bold")
    both = 2 * COMPUTE
    for rank in range(4):
        core = rank % 2
        if rank < 2:
            bars = [(0.0, COMPUTE, f"compute (core {core})", BLUE),
                    (COMPUTE, both, "wait for the others", ORANGE)]  # fmt: skip
        else:
            bars = [(0.0, COMPUTE, f"wait for core {core}", ORANGE),
                    (COMPUTE, both, f"compute (core {core})", BLUE)]  # fmt: skip
        bars.append((both, both + SUM, "sum", GREEN))
        timeline(axes, 2.6 + 0.75 * rank, f"rank {rank}", bars, 0.6)
