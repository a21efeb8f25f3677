"""Time of an all-reduce by its size, in the α–β model, for three algorithms."""

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from docs.figures.style import BLUE, GREEN, GREY, ORANGE

HEIGHT = 3.0
ALPHA_US, GB_PER_S, RANKS = 2.0, 10.0, 16


def recursive_doubling(size: NDArray[np.float64], ranks: int = RANKS) -> NDArray[np.float64]:
    """Microseconds: log₂ p messages of the whole array."""
    return np.log2(ranks) * (ALPHA_US + size / GB_PER_S / 1e3)


def rabenseifner(size: NDArray[np.float64], ranks: int = RANKS) -> NDArray[np.float64]:
    """Microseconds: 2 log₂ p messages, 2 (p − 1) / p of the array."""
    return 2 * np.log2(ranks) * ALPHA_US + 2 * (ranks - 1) / ranks * size / GB_PER_S / 1e3


def ring(size: NDArray[np.float64], ranks: int = RANKS) -> NDArray[np.float64]:
    """Microseconds: 2 (p − 1) messages, 2 (p − 1) / p of the array."""
    return 2 * (ranks - 1) * ALPHA_US + 2 * (ranks - 1) / ranks * size / GB_PER_S / 1e3


def draw(figure: Figure) -> None:
    """Draw the three curves and the regions in which α or β decides."""
    axes = figure.subplots()
    size = np.logspace(1, 8, 200)
    axes.loglog(size, recursive_doubling(size), color=ORANGE, label="recursive doubling")
    axes.loglog(size, rabenseifner(size), color=BLUE, label="Rabenseifner")
    axes.loglog(size, ring(size), color=GREEN, label="ring", linestyle="--")
    axes.axvline(844e3, color=GREY, linewidth=0.8, linestyle=":")
    axes.text(
        844e3 * 0.8, 6e3, "gradients of\nmodel0, 0.84 MB", fontsize=7.5, ha="right", color=GREY
    )
    axes.text(14, 22, "latency: α × messages", fontsize=7.5, color=GREY)
    axes.text(3e6, 60, "bandwidth:\nbytes / B", fontsize=7.5, color=GREY)
    axes.set_xlabel("bytes")
    axes.set_ylabel("all-reduce, µs")
    axes.set_title(f"{RANKS} ranks, α = {ALPHA_US:g} µs, B = {GB_PER_S:g} GB/s")
    axes.legend(fontsize=8, loc="upper left")
