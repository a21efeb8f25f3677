"""A roofline with the limits and stages of a measured step of model0."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from docs.figures.style import BLUE, GREEN, GREY, ORANGE

HEIGHT = 3.2
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "cpu-2026-11-21.json"
NETWORK, BATCH = "model0", 128
SHOWN = {
    "conv2+relu2+pool2.forward": ("conv2 (Winograd)", BLUE, (-6, 6)),
    "dense1+relu3.forward": ("dense1", GREEN, (-6, -12)),
    "update": ("update", ORANGE, (-6, 5)),
}


def measured() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the limits, and the stages by name."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    belongs = {"network": NETWORK, "batch_size": BATCH}.items()
    (roofs,) = (roof for roof in found["roofs"] if belongs <= roof.items())
    return roofs, {s["name"]: s for s in found["stages"] if belongs <= s.items()}


def draw(figure: Figure) -> None:
    """Draw two roofs, arithmetic and memory, and three stages."""
    axes = figure.subplots()
    roofs, stages = measured()
    intensity = np.logspace(-1.3, 2.5, 100)
    roof = np.minimum(roofs["peak"], intensity * roofs["memory"]) / 1e9
    axes.loglog(intensity, roof, color=GREY)
    axes.text(0.9, 9.5, f"memory, {roofs['memory'] / 1e9:.0f} GB/s", fontsize=8)
    axes.text(
        0.25, roofs["peak"] / 1e9 * 0.95, f"peak, {roofs['peak'] / 1e9:.0f} GFLOP/s", fontsize=8
    )
    for name, (label, colour, offset) in SHOWN.items():
        stage = stages[name]
        point = stage["flops"] / stage["bytes_moved"], stage["flops"] / stage["time_us"] / 1e3
        axes.plot(*point, "o", color=colour)
        axes.annotate(
            f"{label}: {point[1]:.1f}", point, offset, textcoords="offset points", fontsize=8,
            color=colour, ha="left" if offset[0] > 0 else "right",
        )  # fmt: skip
    axes.set(xlabel="arithmetic intensity, FLOP per byte", ylabel="GFLOP/s", ylim=(1, 500))
