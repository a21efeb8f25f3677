"""Draw the figures that are named, or all, as docs/images/explanation-NAME.svg."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from docs.figures.style import new_figure, write

NAMES = (
    "alpha-beta", "backpropagation-chain", "backpropagation-convolution", "backpropagation-dense",
    "backpropagation-padding", "forecast", "halo-tile", "large-batches", "launches", "micro-shards",
    "mpi", "overlap", "oversubscription", "recursive-doubling", "ring", "roofline", "scaling",
    "step", "winograd",
)  # fmt: skip
IMAGES = Path(__file__).resolve().parents[1] / "images"


def draw(name: str, folder: Path = IMAGES) -> Path:
    """Draw one figure; each module has its size and a function that draws on a figure."""
    module = importlib.import_module(f"docs.figures.{name.replace('-', '_')}")
    figure = new_figure(module.HEIGHT)
    module.draw(figure)
    return write(figure, folder / f"explanation-{name}.svg")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or NAMES:
        print(draw(chosen))
