"""Products whose fastest configuration is not the one with the lowest estimate, as was measured.

``measured.csv`` has a row for each: the label of the product, the configuration, and the time of
the one with the lowest estimate, divided by that of this one. Gains below
`dptrain.backends.cuda.tuning.MIN_GAIN` have no row. ``python -m benchmarks.step.choices --write``
makes the rows of some networks, batch sizes and precisions. They hold for Hopper GPUs with as many
multiprocessors as the H200 on which they were measured.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

from dptrain.backends.cuda.device.tensor_maps import ARCHITECTURE
from dptrain.plan.limits import DeviceLimits

FILE = Path(__file__).with_name("measured.csv")
MULTIPROCESSORS = 132
"""Multiprocessors of an H100 and of an H200."""

T = TypeVar("T")


def measured_name(label: str, limits: DeviceLimits) -> str | None:
    """Return the name of the configuration that was measured to be the fastest; None if unknown.

    Args:
        label: of the product, which names all that its time depends on except for the GPU.
        limits: of the GPU.
    """
    if (limits.capability, limits.multiprocessors) != (ARCHITECTURE, MULTIPROCESSORS):
        return None
    return rows().get(label)


def measured_first(
    ranked: Iterable[tuple[float, T]], label: str, limits: DeviceLimits
) -> list[tuple[float, T]]:
    """Return candidates sorted by estimate, of which the measured one has the lowest estimate, too.

    Args:
        ranked: candidates, which `str` names, with their estimates.
        label, limits: see `measured_name`.
    """
    found = sorted(ranked, key=lambda pair: pair[0])
    name = measured_name(label, limits)
    first = next((pair for pair in found if str(pair[1]) == name), None)
    if name is None or first is None:
        return found
    return [(found[0][0], first[1]), *(pair for pair in found if pair is not first)]


@cache
def rows() -> Mapping[str, str]:
    """Return the configurations by the labels of the products."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return {row["product"]: row["configuration"] for row in csv.DictReader(file)}
