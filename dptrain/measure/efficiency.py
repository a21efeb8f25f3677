"""Scaling efficiency: T(1), the step time of rank 0 alone, against T(p), the step time of the job.

Weak scaling keeps the work per rank: E = T(1) / T(p), where T(1) is the time in which rank 0 alone
processes its own shard of the minibatch. Strong scaling keeps the minibatch: E = T(1) / (p · T(p)),
where T(1) is the time in which rank 0 alone processes all of it. The other ranks idle meanwhile.
Both times are whole training steps on the same clock: data wait, computation, communication and
update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dptrain.measure.statistics import Estimate, ratio_of_medians
from dptrain.measure.tables import plain_table

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Baseline:
    """Time in ns of each step of rank 0 alone; the arrays are empty if nothing was measured.

    Attributes:
        weak: int64, of steps with the shard of one rank.
        strong: int64, of steps with the whole minibatch.
    """

    weak: NDArray[np.int64]
    strong: NDArray[np.int64]


@dataclass(frozen=True)
class Efficiency:
    """Measured scaling efficiencies of a job.

    Attributes:
        weak, strong: with 95% intervals; None if no baseline was measured.
        alone: number of steps of rank 0 alone, with the shard of one rank.
        possible: upper bound of the weak efficiency if ranks share cores: cores / compute threads
            on the node with the most threads per core, at most 1.
    """

    weak: Estimate | None
    strong: Estimate | None
    alone: int
    possible: float


def efficiency(
    baseline: Baseline, step_times: NDArray[np.float64], size: int, *, possible: float
) -> Efficiency:
    """Return the efficiencies of `size` ranks whose steps took `step_times` ns each."""

    def ratio(alone: NDArray[np.int64], factor: float) -> Estimate | None:
        if not len(alone) or not len(step_times):
            return None
        return ratio_of_medians(alone, step_times, factor=factor)

    weak, strong = ratio(baseline.weak, 1.0), ratio(baseline.strong, 1.0 / size)
    return Efficiency(weak, strong, len(baseline.weak), possible)


def efficiency_table(efficiency: Efficiency, *, size: int, steps: int) -> Table:
    """Return a table of weak and strong efficiency with their intervals."""
    table = plain_table(f"Scaling efficiency at {size} ranks (measured)")
    table.add_column("scaling")
    table.add_column("E", justify="right")
    table.add_column("95% interval", justify="right")
    table.add_column("definition")
    table.add_column("steps on 1 rank / all", justify="right")

    def row(name: str, value: Estimate | None, definition: str) -> None:
        if value is not None:
            interval = f"{value.low:.3f} – {value.high:.3f}"
            counts = f"{efficiency.alone} / {steps}"
            table.add_row(name, f"{value.value:.3f}", interval, definition, counts)

    row("weak", efficiency.weak, "T(1) / T(p), same work per rank")
    row("strong", efficiency.strong, "T(1) / (p T(p)), same global minibatch")
    if efficiency.possible < 1:
        table.caption = (
            f"The ranks share cores, so the efficiency is at most {efficiency.possible:.2f} on "
            "this machine."
        )
        table.caption_justify = "left"
    return table
