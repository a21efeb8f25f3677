"""Simulated ranks whose true step time is known: the measured one is the wall time per step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.measure.efficiency import Baseline, Pair, efficiency
from dptrain.measure.profile.analysis import Measured, spread
from dptrain.measure.profile.profile import Profile, StepParts
from dptrain.measure.step_record import EXPOSED, SPANS, STEP
from dptrain.scaling import points as scaling
from dptrain.training.baseline import TOGETHER
from tests.tiers import tiered
from tests.unit.scaling.synthetic import Law, make_profile

Steps = NDArray[np.float64]
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


INTERRUPTED, LENGTH = 0.001, 5
"""Share of the steps of each rank that are interrupted, and for how many steps' time."""


def interrupted(random: np.random.Generator, ranks: int, shape: tuple[int, ...]) -> Steps:
    """Return steps in ms that end when the last rank has computed.

    An interrupted step takes 5 steps longer. The other ranks wait for it.
    """
    is_interrupted = random.random(shape) < 1 - (1 - INTERRUPTED) ** ranks
    jitter = 0.02 * np.abs(random.standard_normal(shape))
    return np.asarray(STEP_MS * (1 + jitter + LENGTH * is_interrupted))


def long_run(ranks: int) -> float:
    """Return the mean of `interrupted` in ms."""
    jitter = 0.02 * np.sqrt(2 / np.pi)
    return float(STEP_MS * (1 + jitter + LENGTH * (1 - (1 - INTERRUPTED) ** ranks)))


RANKS = tiered([2, 4, 8, 16, 32, 64], [2, 16, 64])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("blocks", "steps"), [(16, 10), (8, 10), (8, 3), (3, 2)])
def test_efficiencies_of_training_contain_rare_interruptions(
    ranks: int, blocks: int, steps: int
) -> None:
    random, covered, replications = np.random.default_rng(ranks), 0, 300
    truth = long_run(1) / long_run(ranks)
    for _ in range(replications):
        alone = interrupted(random, 1, (blocks, steps))
        together = interrupted(random, ranks, (blocks, steps * max(TOGETHER, ranks)))
        pairs = tuple(
            Pair(1e6 * a.mean(), 1e6 * a.mean(), 1e6 * b.mean())
            for a, b in zip(alone, together, strict=True)
        )
        found = efficiency(Baseline(pairs, alone.size, together.size), ranks, possible=1.0)
        assert found.weak is not None
        assert found.strong is not None
        wall = (alone.sum() / alone.size) / (together.sum() / together.size)
        assert found.weak.value == pytest.approx(wall, rel=1e-12)
        assert found.strong.value == pytest.approx(wall / ranks, rel=1e-12)
        covered += found.weak.low <= truth <= found.weak.high
    assert covered >= 0.92 * replications


def launch(profile: Profile, steps: Steps, ranks: int, number: int) -> scaling.Measured:
    """Return a launch with the given steps, of which 90% are computation on several ranks."""
    mean, waits = float(steps.mean()), 0.0 if ranks == 1 else 0.1
    parts = replace(profile.parts, compute=(1 - waits) * mean, transfer=waits * mean,
                    imbalance=0.0, data_wait=0.0, other=0.0)  # fmt: skip
    profile = replace(
        profile, step_ms=spread(steps), step_times_ms=tuple(steps.tolist()), parts=parts,
        step_parts=StepParts({}, parts, parts, 0.0, 0.0),
    )  # fmt: skip
    return scaling.Measured(f"launches/weak-r{ranks}-t1-{number}", 2 * number + ranks, profile)


@pytest.mark.parametrize(
    ("ranks", "launches", "steps"),
    tiered(
        [(ranks, *study) for ranks in (2, 4, 8, 16, 32, 64)
         for study in ((5, 100), (3, 100), (5, 1000))],
        [(2, 5, 1000), (16, 5, 100), (64, 3, 100)],
    ),
)  # fmt: skip
def test_efficiencies_of_studies_contain_rare_interruptions(
    ranks: int, launches: int, steps: int
) -> None:
    random, covered, replications = np.random.default_rng(ranks), 0, 300
    profiles = {p: make_profile(Law(), ranks=p, batch_size=32 * p) for p in (1, ranks)}
    truth = long_run(1) / long_run(ranks)
    for _ in range(replications):
        times = {p: interrupted(random, p, (launches, steps)) for p in profiles}
        base, point = scaling.make_points(scaling.make_groups([
            launch(profiles[p], times[p][number], p, number)
            for p in profiles for number in range(launches)
        ]))  # fmt: skip
        assert point.efficiency is not None
        assert point.speed_up is not None
        wall = times[1].sum() / times[ranks].sum()
        assert point.efficiency.value == pytest.approx(wall, rel=1e-12)
        # What is printed in a row multiplies.
        assert point.step_ms.value == pytest.approx(times[ranks].mean(), rel=1e-12)
        assert base.step_ms.value / point.step_ms.value == pytest.approx(wall, rel=1e-12)
        assert point.samples_per_s.value / base.samples_per_s.value == pytest.approx(
            point.speed_up.value, rel=1e-12
        )
        assert point.parts.total == pytest.approx(point.step_ms.value, rel=1e-12)
        covered += point.efficiency.low <= truth <= point.efficiency.high
    assert covered >= 0.92 * replications
