"""Speed-up by the laws of Amdahl and Gustafson, and the Karp–Flatt fraction of two programs."""

import numpy as np
from matplotlib.figure import Figure

from docs.figures.style import BLUE, GREEN, GREY, ORANGE

HEIGHT = 4.6
SERIAL = {0.01: GREEN, 0.05: BLUE, 0.2: ORANGE}
OVERHEAD = 0.004
"""Growth of the step for each further rank, as a share of T(1)."""


def karp_flatt(speed_up: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Return the serial fraction that a measured speed-up corresponds to."""
    return (1 / speed_up - 1 / ranks) / (1 - 1 / ranks)


def draw(figure: Figure) -> None:
    """Draw strong scaling, weak scaling, and the serial fraction over the ranks."""
    panels = figure.subplot_mosaic([["strong", "weak"], ["karp", "karp"]])
    ranks = np.arange(1, 65, dtype=float)
    for name, title in (("strong", "Strong: Amdahl"), ("weak", "Weak: Gustafson")):
        axes = panels[name]
        axes.plot(ranks, ranks, color=GREY, linestyle=":", linewidth=1)
        for serial, colour in SERIAL.items():
            law = 1 / (serial + (1 - serial) / ranks) if name == "strong" else (
                serial + (1 - serial) * ranks)  # fmt: skip
            axes.plot(ranks, law, color=colour, label=f"s = {serial:g}")
        axes.set(title=title, xlabel="ranks", ylabel="speed-up", ylim=(0, 66))
        axes.legend(fontsize=7.5, loc="upper left")
    axes, ranks = panels["karp"], np.array([2, 4, 8, 16, 32, 64], dtype=float)
    serial = 1 / (0.05 + 0.95 / ranks)
    overhead = 1 / (1 / ranks + OVERHEAD * (ranks - 1))
    axes.semilogx(ranks, karp_flatt(serial, ranks), "o-", base=2, color=BLUE,
                  label="5% of the work is serial: constant")  # fmt: skip
    axes.semilogx(ranks, karp_flatt(overhead, ranks), "s-", base=2, color=ORANGE,
                  label="communication grows with the ranks: rises")  # fmt: skip
    axes.set_xticks(ranks, [f"{n:g}" for n in ranks])
    axes.set(title="Karp–Flatt fraction of two programs", xlabel="ranks", ylim=(0, 0.3))
    axes.legend(fontsize=7.5, loc="upper left")
