"""An invented study of 1 to 8 nodes, the interval of its forecast, and where it is unknown."""

import numpy as np
from matplotlib.figure import Figure

from docs.figures.style import BLUE, GREY, ORANGE

HEIGHT = 2.6
MEASURED = {1: 1.0, 2: 0.955, 4: 0.91, 8: 0.86}
FORECAST = {8: (0.86, 0.86), 16: (0.76, 0.84), 32: (0.66, 0.81)}
"""Limits of the efficiency."""
LAST = 45.0
"""Number of ranks from which on the interval is too wide."""


def draw(figure: Figure) -> None:
    """Draw measured efficiencies, the forecast and the unknown range over the ranks."""
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    ranks = np.array(list(MEASURED), dtype=float)
    axes.errorbar(ranks, list(MEASURED.values()), 0.02, color=BLUE, marker="o", markersize=4,
                  capsize=2, label="measured, with intervals")  # fmt: skip
    low, high = np.array(list(FORECAST.values())).T
    axes.fill_between(list(FORECAST), low, high, color=ORANGE, alpha=0.35, label="forecast, 95%")
    axes.axvspan(LAST, 90, color=GREY, alpha=0.18, linewidth=0)
    axes.text(63, 0.8, "unknown:\ninterval\ntoo wide", fontsize=8, color=GREY, ha="center")
    axes.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    axes.set(xlim=(0.9, 90), ylim=(0.5, 1.05), xlabel="ranks", ylabel="weak efficiency")
    axes.set_yticks([0.6, 0.8, 1.0], ["60%", "80%", "100%"])
    axes.legend(fontsize=8, loc="lower left")
