"""Simulated series of steps: 95% intervals contain the truth in at least 92% of cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.measure.statistics import (
    FEWEST_STEPS,
    median_of_steps,
    ratio_of_walls,
    unseen_share,
)
from dptrain.training.baseline import TOGETHER

SERIES = 500
Series = NDArray[np.float64]


def autocorrelated(
    random: np.random.Generator, series: int, steps: int, rho: float, spread: float = 0.15
) -> Series:
    """Return (series, steps), lognormal with median 1 and the correlation `rho` of neighbours."""
    noise = random.standard_normal((steps, series))
    state = noise[0]
    found = np.empty((series, steps))
    for step in range(steps):
        if step:
            state = rho * state + math.sqrt(1 - rho**2) * noise[step]
        found[:, step] = state
    return np.exp(spread * found)


def bursts(
    random: np.random.Generator, series: int, steps: int, share: float = 0.1, length: int = 20
) -> Series:
    """Return (series, steps) in which bursts of slow steps take a share of all steps."""
    slow = np.empty((series, steps), bool)
    state = random.random(series) < share
    begins = share / (1 - share) / length
    for step in range(steps):
        slow[:, step] = state
        state = np.where(state, random.random(series) >= 1 / length, random.random(series) < begins)
    factor = np.where(slow, 2.5 * np.exp(0.3 * random.standard_normal(slow.shape)), 1.0)
    found: Series = factor * np.exp(0.05 * random.standard_normal(slow.shape))
    return found


@pytest.mark.parametrize("steps", [FEWEST_STEPS, 250, 2048])
@pytest.mark.parametrize("case", ["independent", "rho 0.5", "rho 0.9", "bursts"])
def test_the_interval_of_a_median_of_steps_contains_it(case: str, steps: int) -> None:
    random = np.random.default_rng(7)
    if case == "bursts":
        times = bursts(random, SERIES, steps)
        truth = float(np.median(bursts(random, 1000, 1000)))
    else:
        rho = float(case.removeprefix("rho ")) if case.startswith("rho") else 0.0
        times, truth = autocorrelated(random, SERIES, steps, rho), 1.0
    found = [median_of_steps(series) for series in times]
    covered = sum(f.low <= truth <= f.high for f in found) / SERIES
    assert 0.92 <= covered <= 0.99, covered


def test_few_steps_have_no_interval() -> None:
    found = median_of_steps(np.ones(FEWEST_STEPS - 1))
    assert (found.low, found.value, found.high) == (-math.inf, 1.0, math.inf)
    found = median_of_steps(np.ones(FEWEST_STEPS))
    assert (found.low, found.high) == (1.0, 1.0)


@pytest.mark.parametrize(("blocks", "steps"), [(3, 2), (8, 3), (16, 10)])
@pytest.mark.parametrize("case", ["independent", "rho 0.5", "rho 0.9", "bursts"])
def test_the_interval_of_an_efficiency_contains_it(case: str, blocks: int, steps: int) -> None:
    """Blocks of all ranks and of rank 0 alone take turns, as in `dptrain train`.

    T(1) is 0.8 T(p). Steps vary with the state of the machine, and on their own.
    """
    random = np.random.default_rng(11)
    length, apart = (1 + TOGETHER) * steps + 3, 60
    shape = SERIES, blocks * (length + apart)
    if case == "bursts":
        machine = bursts(random, *shape)
    else:
        rho = float(case.removeprefix("rho ")) if case.startswith("rho") else 0.0
        machine = autocorrelated(random, *shape, rho)
    times = machine * np.exp(0.03 * random.standard_normal(shape))
    times = times.reshape(SERIES, blocks, -1)[:, :, :length]
    together = times[:, :, : TOGETHER * steps].mean(axis=2)
    alone = 0.8 * times[:, :, -steps:].mean(axis=2)
    unseen = tuple(unseen_share(1.0, blocks * steps * n) for n in (1, TOGETHER))
    found = [ratio_of_walls(*s, unseen=unseen) for s in zip(alone, together, strict=True)]
    covered = sum(f.low <= 0.8 <= f.high for f in found) / SERIES
    assert covered >= 0.92, covered


def test_two_blocks_have_no_interval() -> None:
    found = ratio_of_walls([2.0, 8.0], [4.0, 4.0])
    assert (found.low, found.value, found.high) == pytest.approx((0.0, 1.25, math.inf))
