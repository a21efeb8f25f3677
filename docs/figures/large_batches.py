"""Measured epochs and updates of model0 on the digits until a validation accuracy of 97%.

The command is ``dptrain train --network model0 --data digits --batch-size B --seed S
--reference-batch 32 --scale-rate RULE --epochs 40 --schedule constant --until-accuracy 0.97
--threads 1``.
"""

import numpy as np
from matplotlib.figure import Figure

from docs.figures.style import BLUE, GREEN, GREY, ORANGE

HEIGHT = 3.1
SAMPLES = 1150
"""Training samples, without those for validation."""
EPOCHS = {
    "none": {16: (5, 5, 8), 32: (7, 6, 9), 64: (5, 5, 9), 128: (13, 9, 13), 256: (23, 12, 19),
             512: (29, 20, 28)},
    "linear": {16: (5, 3, 5), 32: (7, 6, 9), 64: (6, 5, 6), 128: (9, 10, 14)},
    "sqrt": {32: (7, 6, 9), 64: (7, 7, 8), 128: (10, 9, 9), 256: (19, 20, 15), 512: (24, 33, 22)},
}  # fmt: skip
"""Epochs of the seeds 0, 1 and 2, by rule and minibatch."""
DIVERGED = 256
"""Minibatch with which the linear rule did not reach 97% in 40 epochs, with any of the seeds."""
LINES = {"none": (BLUE, "rate 0.02", "o"), "linear": (ORANGE, "rate × B / 32", "s"),
         "sqrt": (GREEN, "rate × √(B / 32)", "^")}  # fmt: skip


def draw(figure: Figure) -> None:
    """Draw medians over the seeds, with the range, for three rules of the learning rate."""
    epochs, updates = figure.subplots(1, 2)
    for rule, (colour, label, marker) in LINES.items():
        sizes = np.array(list(EPOCHS[rule]))
        found = np.array(list(EPOCHS[rule].values()), dtype=float)
        for axes, factor in ((epochs, np.ones(len(sizes))), (updates, -(-SAMPLES // sizes))):
            values = found * factor[:, None]
            middle = np.median(values, axis=1)
            errors = [middle - values.min(axis=1), values.max(axis=1) - middle]
            axes.errorbar(sizes, middle, errors, color=colour, label=label, marker=marker,
                          markersize=4, capsize=2, linewidth=1.2)  # fmt: skip
    epochs.plot(DIVERGED, 38, "x", color=ORANGE, markersize=8)
    epochs.text(DIVERGED * 0.85, 37.3, "not reached", fontsize=7.5, color=ORANGE, ha="right")
    epochs.set(title="epochs to 97%", ylim=(0, 42))
    updates.set(title="updates to 97%", yscale="log")
    for axes in (epochs, updates):
        axes.set_xscale("log", base=2)
        axes.set_xticks([16, 64, 256], ["16", "64", "256"])
        axes.set_xlabel("global minibatch B")
        axes.tick_params(labelcolor=GREY)
    updates.set_yticks([50, 100, 200, 400], ["50", "100", "200", "400"])
    updates.minorticks_off()
    updates.legend(fontsize=7, loc="upper right")
