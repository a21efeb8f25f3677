"""Plots of an evaluation: confusion matrix, and predicted against expected values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dptrain.numbers import percent, short
from dptrain.report.elements.canvas import BOTTOM, RIGHT, SMALL_PT, TOP, WIDTH, Plot, colour, plot
from dptrain.training.evaluation.quality import ClassQuality, ValueQuality

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_NUMBERS, MOST_NAMES = 12, 30
"""Largest number of classes whose cells have numbers, and of those whose names are shown."""
NAME_LENGTH = 12
"""Longer names of classes are shortened."""
MOST_PLOTS = 4
"""Largest number of outputs that have a plot in a report."""
MOST_POINTS = 4000
"""Largest number of points of a plot of values; of more, evenly spaced ones are drawn."""


def confusion_plot(quality: ClassQuality) -> Plot:
    """Return the confusion matrix: each row is a class, in shares of its samples."""
    samples, count = quality.samples, len(quality.names)
    shares = quality.confusion / np.maximum(samples, 1)[:, None]
    has_names = count <= MOST_NAMES
    names = [_shortened(name) for name in quality.names] if has_names else []
    longest = max(map(len, names), default=4)
    left = 18.0 + 5.4 * longest
    bottom = BOTTOM + (5.4 * longest if longest > 2 and has_names else 0)
    side = WIDTH - left - RIGHT

    def draw(axes: Axes) -> None:
        _draw_cells(axes, shares)
        if count <= MOST_NUMBERS:
            _write_numbers(axes, quality.confusion, shares)
        if has_names:
            # A line of text is not higher than a cell.
            axes.tick_params(labelsize=min(SMALL_PT, 0.85 * side / count), length=2)
            axes.set_xticks(range(count), names, rotation=90 if longest > 2 else 0)
            axes.set_yticks(range(count), names)
        axes.set_xlabel("predicted class", labelpad=2)
        axes.grid(visible=False)

    accuracy = quality.confusion.diagonal().sum() / max(samples.sum(), 1)
    return plot(
        "confusion",
        "Confusion matrix",
        "class of the samples",
        draw,
        height=side + TOP + bottom,
        left=left,
        bottom=bottom,
        caption="Numbers of samples. The colour is the share of the samples of the row.",
        alt=f"Confusion matrix of {count} classes and {samples.sum():,} samples, of which "
        f"{percent(accuracy)} are on the diagonal.",
    )


def _shortened(name: str) -> str:
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"


def _file_name(name: str) -> str:
    """Return a name of an output for a file: other characters than letters and digits are -."""
    return re.sub(r"[^\w]+", "-", _shortened(name), flags=re.ASCII).strip("-") or "output"


def _draw_cells(axes: Axes, shares: NDArray[np.float64]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("shares", [colour("paper"), colour("blue")])
    # The square root makes rare confusions visible.
    axes.imshow(
        np.sqrt(shares), cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest"
    )


def _write_numbers(axes: Axes, confusion: NDArray[np.int64], shares: NDArray[np.float64]) -> None:
    """Write the numbers that are not 0 in the cells."""
    for (row, column), number in np.ndenumerate(confusion):
        if number:
            ink = "paper" if shares[row, column] > 0.25 else "ink"
            axes.text(
                column,
                row,
                f"{number}",
                ha="center",
                va="center",
                color=colour(ink),
                fontsize=SMALL_PT - 1,
            )


def predicted_plots(quality: ValueQuality, results: Mapping[str, float]) -> list[Plot]:
    """Return a plot of the predicted against the expected values for each output, up to four.

    Outputs with numbers that are not finite have none.

    Args:
        quality: of some samples.
        results: of all samples, for the plot of a single output; the names are those of
            `ValueQuality.results`.
    """
    columns = zip(quality.names, quality.expected.T, quality.predicted.T, strict=True)
    single, plots = len(quality.names) == 1, list[Plot]()
    for name, expected, predicted in columns:
        if not len(expected) or not (np.isfinite(expected) & np.isfinite(predicted)).all():
            continue
        part = ValueQuality((name,), expected[:, None], predicted[:, None])
        plots.append(predicted_plot(part, "" if single else name, results if single else None))
    return plots[:MOST_PLOTS]


def predicted_plot(
    quality: ValueQuality, name: str = "", results: Mapping[str, float] | None = None
) -> Plot:
    """Return the predicted against the expected values, with the line of perfect predictions.

    Args:
        quality: of the samples that are drawn.
        name: of the output, for the title; "" if there are no others.
        results: of all samples; None computes them from those that are drawn.
    """
    expected, predicted = quality.expected.reshape(-1), quality.predicted.reshape(-1)
    stride = -(-len(expected) // MOST_POINTS) or 1
    drawn = f", of one in {stride} samples" if stride > 1 else ""
    ends = [min(expected.min(), predicted.min()), max(expected.max(), predicted.max())]

    def draw(axes: Axes) -> None:
        axes.plot(ends, ends, color=colour("ink"), linewidth=0.9, zorder=3)
        axes.plot(
            expected[::stride],
            predicted[::stride],
            linestyle="none",
            marker="o",
            markersize=1.8,
            color=colour("blue"),
            markeredgewidth=0,
            alpha=0.5,
            zorder=2,
        )
        axes.set_xlabel("expected value", labelpad=2)
        axes.grid(visible=False, axis="x")

    results = quality.results() if results is None else results
    r2 = f", R² {short(results['r2'])}" if "r2" in results else ""
    errors = f"MAE {short(results['mae'])}, RMSE {short(results['rmse'])}{r2}"
    return plot(
        f"predicted-{_file_name(name)}" if name else "predicted",
        "Predicted and expected values" + (f": {_shortened(name)}" if name else ""),
        "predicted value",
        draw,
        height=WIDTH,
        left=36.0,
        caption=f"{errors}. On the line, both are equal{drawn}.",
        alt=f"Predicted against expected values of {len(quality.expected):,} samples: {errors}.",
    )
