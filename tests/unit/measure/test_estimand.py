"""Simulated ranks whose true step time is known: the measured one is not biased by jitter."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.measure.profile.analysis import Measured
from dptrain.measure.recorder import EXPOSED, SPANS, STEP

STEP_MS, JITTER_MS = 2.0, 0.05
"""Computation of a step without jitter, and the mean jitter before and after the sum."""


def simulate(ranks: int, steps: int, jitter: str) -> tuple[Measured, float]:
    """Simulate steps with jitter before and after a gradient sum that takes no time.

    Returns:
        The times as the recorders of the ranks measure them, and the wall time per step.
    """
    random = np.random.default_rng(ranks)

    def draw() -> NDArray[np.float64]:
        if jitter == "exponential":
            return JITTER_MS * random.exponential(size=ranks)
        return JITTER_MS * np.sqrt(np.pi / 2) * np.abs(random.standard_normal(ranks))

    names = ("compute", *SPANS)
    table = np.zeros((ranks, steps, len(names)))
    completion = np.zeros(ranks)
    for step in range(steps):
        arrival = completion + STEP_MS + draw()
        after = draw()
        before, completion = completion, arrival.max() + after
        table[:, step, names.index("compute")] = arrival - before + after
        table[:, step, names.index(EXPOSED)] = arrival.max() - arrival
        table[:, step, names.index(STEP)] = completion - before
    return Measured(names, table, table, (1.0,) * ranks), float(completion.mean()) / steps


@pytest.mark.parametrize("jitter", ["exponential", "half-normal"])
def test_jitter_does_not_bias_the_efficiency(jitter: str) -> None:
    alone, wall_alone = simulate(1, 4000, jitter)
    for ranks in (8, 64, 512):
        together, wall = simulate(ranks, 1000, jitter)
        truth = wall_alone / wall
        medians = float(np.median(alone.step_times) / np.median(together.step_times))
        means = alone.step_times.mean() / together.step_times.mean()
        assert means == pytest.approx(truth, rel=1e-12)
        assert abs(medians - truth) < 0.005
        # The largest duration of any rank in each step, summed over steps, exceeds the wall time.
        largest = wall_alone / together.steps.max(axis=0).mean()
        assert truth - largest > 0.02
        assert together.parts.total == pytest.approx(wall, rel=0.005)
