"""POP efficiencies of schedules whose values are known, and the coverage of their intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.measure.profile.pop import FEWEST_STEPS, Pop, pop_efficiencies
from dptrain.measure.series import correlation, half_width_of_mean

STEPS = 100
Table = NDArray[np.float64]


def schedule(busy: Table, transfer: float) -> Pop:
    """The efficiencies of ranks that wait for the slowest in each step, and then communicate."""
    return pop_efficiencies(busy, busy.max(axis=0) + transfer, {"all": busy})


def factors(pop: Pop) -> tuple[float, float, float, float]:
    return (
        pop.parallel.value, pop.load_balance.value, pop.serialisation.value, pop.transfer.value
    )  # fmt: skip


def test_equal_ranks_lose_nothing_but_communication() -> None:
    pop = schedule(np.full((4, STEPS), 8.0), 2.0)
    assert factors(pop) == pytest.approx((0.8, 1.0, 1.0, 0.8))
    assert [rank.value for rank in pop.ranks] == pytest.approx([0.8] * 4)
    # Two interruptions of five steps' time may not have been seen.
    unseen = 1 + 2 * 5 / STEPS
    assert (pop.parallel.low, pop.parallel.high) == pytest.approx((0.8 / unseen, 0.8 * unseen))


def test_a_rank_that_is_always_slower_is_load_imbalance() -> None:
    busy = np.full((4, STEPS), 6.0)
    busy[2] = 10.0
    pop = schedule(busy, 0.0)
    assert factors(pop) == pytest.approx((0.7, 0.7, 1.0, 1.0))
    assert [rank.value for rank in pop.ranks] == pytest.approx([0.6, 0.6, 1.0, 0.6])
    assert pop.layers[0].load_balance.value == pytest.approx(0.7)
    assert pop.layers[0].serialisation.value == pytest.approx(1.0)


def test_ranks_that_are_late_in_turn_are_serialisation() -> None:
    busy = np.full((4, STEPS), 5.0)
    busy[np.arange(STEPS) % 4, np.arange(STEPS)] += 5.0
    pop = schedule(busy, 0.0)
    assert factors(pop) == pytest.approx((0.625, 1.0, 0.625, 1.0))
    assert pop.layers[0].serialisation.value == pytest.approx(0.625)


def test_the_product_of_the_factors_is_the_parallel_efficiency() -> None:
    busy = np.random.default_rng(0).gamma(4.0, 1.0, (8, STEPS))
    pop = schedule(busy, 3.0)
    parallel, *others = factors(pop)
    assert parallel == pytest.approx(math.prod(others))
    assert parallel == pytest.approx(busy.mean() / (busy.max(axis=0).mean() + 3.0))
    for estimate in (pop.parallel, pop.load_balance, pop.serialisation, pop.transfer):
        assert estimate.low <= estimate.value <= estimate.high
    # The ranks are equally fast, so that an interval without a bound would exceed 1.
    assert pop.load_balance.high == 1


def test_a_few_steps_have_no_interval_and_unused_layers_no_balance() -> None:
    busy = np.ones((2, FEWEST_STEPS - 1))
    pop = pop_efficiencies(busy, busy[0], {"unused": 0 * busy})
    assert (pop.parallel.low, pop.parallel.high) == (0.0, math.inf)
    assert pop.layers == ()


def autoregressive(generator: np.random.Generator, shape: tuple[int, ...], rho: float) -> Table:
    """Normal series of variance 1 along the last axis, neighbours correlated by `rho`."""
    noise = generator.standard_normal(shape)
    series = noise.copy()
    for i in range(1, shape[-1]):
        series[..., i] = rho * series[..., i - 1] + math.sqrt(1 - rho**2) * noise[..., i]
    return series


@pytest.mark.parametrize(("rho", "steps"), [(0.0, 50), (0.5, 50), (0.8, 100), (0.9, 200)])
def test_intervals_of_means_contain_the_mean(rho: float, steps: int) -> None:
    series = autoregressive(np.random.default_rng(1), (1000, steps), rho)
    held = [abs(row.mean()) <= half_width_of_mean(row) for row in series]
    # The standard error of 1,000 replications is 0.7%.
    assert 0.92 <= np.mean(held) <= 0.995


RANKS = {
    "4 different": 10 + np.arange(4.0),
    "4 equal": np.full(4, 10.0),
    "16 equal": np.full(16, 10.0),
    "64 equal": np.full(64, 10.0),
    # Slower by three standard errors of its mean, so that chance may hide it.
    "one of 64 slower": 10 + 0.3 * (np.arange(64) == 0),
}
"""Mean busy time of each rank; steps differ by a standard deviation of 1."""

QUICK = ("4 different", 0.0)
"""Of these the quick tier computes intervals."""


@pytest.mark.parametrize(
    ("ranks", "rho", "steps"),
    [
        pytest.param(ranks, rho, steps, marks=[] if (ranks, rho) == QUICK else pytest.mark.more)
        for ranks in RANKS
        for rho, steps in ((0.0, STEPS), (0.5, STEPS), (0.8, 200), (0.9, 400))
    ],
)
def test_intervals_of_efficiencies_contain_the_truth(ranks: str, rho: float, steps: int) -> None:
    means, replications = RANKS[ranks], 150
    generator = np.random.default_rng(2)
    many = means[:, None] + generator.standard_normal((len(means), 20_000))
    largest = float(many.max(axis=0).mean())
    wall = largest + 1
    truth = means.mean() / wall, means.mean() / means.max(), means.max() / largest, largest / wall
    held, given = np.zeros(4), np.zeros(4)
    for _ in range(replications):
        pop = schedule(means[:, None] + autoregressive(generator, (len(means), steps), rho), 1.0)
        for i, name in enumerate(("parallel", "load_balance", "serialisation", "transfer")):
            estimate = getattr(pop, name)
            assert 0 <= estimate.low <= estimate.value <= estimate.high
            if math.isfinite(estimate.high):
                given[i] += 1
                held[i] += estimate.low <= truth[i] <= estimate.high
    # The standard error is 1.8%.
    assert (given >= 0.8 * replications).all()
    assert (held >= 0.9 * given).all()


def test_a_rank_that_is_slow_for_a_while_is_not_told_from_one_that_always_is() -> None:
    """With ρ of 0.9, 100 steps count as 5 independent ones."""
    series = autoregressive(np.random.default_rng(3), (4, STEPS), 0.9)
    pop = schedule(10 + series, 1.0)
    product = pop.load_balance.value * pop.serialisation.value
    for estimate in (pop.load_balance, pop.serialisation, pop.layers[0].load_balance):
        assert estimate.low < product < estimate.value < estimate.high == 1
    assert pop.parallel.high < 1
    assert math.isfinite(pop.transfer.high)


def test_the_correlation_of_all_ranks_is_estimated_without_bias() -> None:
    generator = np.random.default_rng(4)
    for rho in (0.0, 0.5, 0.9):
        found = [correlation(autoregressive(generator, (8, 100), rho)) for _ in range(50)]
        assert np.mean(found) == pytest.approx(rho, abs=0.04)


def test_a_single_step_has_factors() -> None:
    pop = schedule(np.array([[3.0], [4.0]]), 1.0)
    assert factors(pop) == pytest.approx((0.7, 0.875, 1.0, 0.8))
