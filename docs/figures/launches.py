"""Simulated launches: intervals of steps within a launch miss the mean over launches."""

import numpy as np
from matplotlib.figure import Figure

from docs.figures.style import BLUE, GREEN, GREY, RED

HEIGHT = 2.7
LAUNCHES, STEPS, MEAN_MS = 8, 200, 2.0
BETWEEN, WITHIN = 0.08, 0.1
"""Relative standard deviations of launches and of steps."""
T_95 = 2.365
"""Student's t for 7 degrees of freedom."""


def draw(figure: Figure) -> None:
    """Draw the steps and the interval of each launch, and the interval over launches."""
    axes = figure.subplots()
    random = np.random.default_rng(5)
    means = []
    for launch in range(1, LAUNCHES + 1):
        level = MEAN_MS * np.exp(BETWEEN * random.standard_normal())
        steps = level * np.exp(WITHIN * random.standard_normal(STEPS))
        mean, error = steps.mean(), 1.96 * steps.std(ddof=1) / np.sqrt(STEPS)
        covers = abs(mean - MEAN_MS) <= error
        spread = launch + random.uniform(-0.25, 0.25, STEPS)
        axes.plot(spread, steps, ".", color=GREY, markersize=1.5, alpha=0.5)
        axes.errorbar(launch, mean, error, color=BLUE if covers else RED, capsize=4, marker="_")
        means.append(np.log(mean))
    centre, error = np.mean(means), T_95 * np.std(means, ddof=1) / np.sqrt(LAUNCHES)
    bounds = np.exp([centre - error, centre, centre + error])
    axes.errorbar(LAUNCHES + 1.5, bounds[1], [[bounds[1] - bounds[0]], [bounds[2] - bounds[1]]],
                  color=GREEN, capsize=5, marker="o")  # fmt: skip
    axes.axhline(MEAN_MS, color=GREY, linestyle=":", linewidth=1)
    axes.set_xticks([*range(1, LAUNCHES + 1), LAUNCHES + 1.5],
                    [*map(str, range(1, LAUNCHES + 1)), "all"])  # fmt: skip
    axes.set(xlabel="launch", ylabel="step, ms")
