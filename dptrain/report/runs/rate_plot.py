"""The plot and the files of a learning-rate range test."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dptrain.files import dump_json, writing
from dptrain.report.elements.canvas import (
    Plot,
    colour,
    plot,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dptrain.training.rate_range import RangeTest


def rate_plot(result: RangeTest) -> Plot:
    """Draw the loss over the learning rate, and the rate at which it falls fastest."""
    # A loss that explodes at the end would hide the rest.
    start, low = max(result.averages[:5]), min(result.averages)
    top = start + 0.5 * max(start - low, 0.1 * abs(start))

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import NullFormatter

        axes.semilogx(
            result.rates,
            result.losses,
            linestyle="none",
            marker="o",
            markersize=2.2,
            color=colour("sky"),
            markeredgewidth=0,
            label="minibatch",
            zorder=2,
        )
        axes.semilogx(
            result.rates, result.averages, color=colour("blue"), label="moving average", zorder=3
        )
        if result.steepest is not None:
            axes.axvline(
                result.steepest,
                color=colour("orange"),
                linewidth=1.1,
                zorder=4,
                label=f"falls fastest: {result.steepest:.2g}",
            )
        axes.set_xlabel("learning rate (log scale)", labelpad=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(visible=False, axis="x")
        axes.set_ylim(low - 0.1 * (top - low), top)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")

    steepest = (
        "never falls" if result.steepest is None else f"falls fastest at {result.steepest:.2g}"
    )
    return plot(
        "rates",
        "Learning-rate range test",
        "training loss",
        draw,
        caption=f"{result.network} on {result.data}, {result.optimizer}, minibatch "
        f"{result.batch_size}.",
        alt=f"Training loss with learning rates from {result.rates[0]:.2g} to "
        f"{result.rates[-1]:.2g}: it {steepest} and is lowest at {result.lowest:.2g}.",
        left=36.0,
        legend=2,
        lines=True,
    )


def write_rates(result: RangeTest, output: Path) -> None:
    """Write the plot, the values as CSV and the result as JSON to a folder.

    Raises:
        UserError: the folder cannot be written.
    """
    drawn = rate_plot(result)
    with writing(output, "--output"):
        output.mkdir(parents=True, exist_ok=True)
        (output / "rates.csv").write_text(result.to_csv(), encoding="utf-8")
        text = dump_json(result.facts(), indent=2)
        (output / "rates.json").write_text(text + "\n", encoding="utf-8")
        (output / "rates.svg").write_text(drawn.svg, encoding="utf-8")
        (output / "rates.png").write_bytes(drawn.png)
