"""Scaling efficiency: T(1), what rank 0 needs alone, against T(p), what it needs in the job.

Weak scaling keeps the work of a rank: E = T(1) / T(p), where T(1) is the time rank 0 needs for its
own share of the minibatch while the other ranks rest. Strong scaling keeps the minibatch:
E = T(1) / (p · T(p)), where T(1) is the time rank 0 needs for all of it. Both times are whole steps
of training, by the same clock: waiting for data, computing, communication and update.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dptrain.scaling.statistics import Estimate, ratio_of_medians


@dataclass(frozen=True)
class Baseline:
    """Nanoseconds of each timed step of rank 0 alone; empty where nothing was measured.

    Attributes:
        weak: with the samples of one rank.
        strong: with the whole minibatch.
    """

    weak: NDArray[np.int64]
    strong: NDArray[np.int64]


@dataclass(frozen=True)
class Efficiency:
    """Measured scaling efficiencies of a job.

    Attributes:
        weak, strong: with 95% intervals; None where no baseline was measured.
        alone: steps of rank 0 alone, with its share.
        possible: the most that weak efficiency can be where ranks share cores: cores / compute
            threads on the fullest node, at most 1.
    """

    weak: Estimate | None
    strong: Estimate | None
    alone: int
    possible: float


def efficiency(
    baseline: Baseline, step_times: NDArray[np.float64], size: int, *, possible: float
) -> Efficiency:
    """Efficiencies of `size` ranks whose steps took `step_times` nanoseconds each."""

    def ratio(alone: NDArray[np.int64], factor: float) -> Estimate | None:
        if not len(alone) or not len(step_times):
            return None
        return ratio_of_medians(alone, step_times, factor=factor)

    weak, strong = ratio(baseline.weak, 1.0), ratio(baseline.strong, 1.0 / size)
    return Efficiency(weak, strong, len(baseline.weak), possible)
