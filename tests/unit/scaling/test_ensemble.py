"""Forecasts: what the ensemble fits, how it is tested, and when the answer is unknown."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.scaling.forecasts.allreduce import (
    ALGORITHMS,
    DOUBLING,
    RABENSEIFNER,
    Network,
    fit_networks,
    nonnegative,
    selected,
)
from dptrain.scaling.forecasts.cluster_fit import CONGESTION
from dptrain.scaling.forecasts.ensemble import (
    FARTHEST,
    PRIOR_STRENGTH,
    WIDEST,
    Ensemble,
    Hindcast,
    _held_back,
    _weights,
    is_trusted,
    larger_ranks,
    obstacle,
    score_weights,
)
from dptrain.scaling.forecasts.forecast import make_forecast, make_series
from dptrain.scaling.forecasts.observed import Figures, Observed
from dptrain.scaling.forecasts.waiting import LATENESS
from dptrain.scaling.points import Measured, base_of, make_groups
from dptrain.scaling.study import Forecast
from tests.tiers import tiered
from tests.unit.scaling.synthetic import Law, make_launches, make_profile

LAW = Law(per_node=1, noise=0.005, sample=0.8, overlap=0.0)


def simulated_points(congestion: float) -> list[Observed]:
    """Return points of weak scaling, with all-reduces by Rabenseifner's algorithm."""
    network, size = Network(RABENSEIFNER, 0.05, 1e-5, 0.0), 2**18

    def sum_ms(ranks: int, size: float) -> float:
        return network.sum_ms(ranks, size) * (ranks / 2) ** congestion if ranks > 1 else 0.0

    found = []
    for ranks in (1, 2, 4, 8):
        total = sum_ms(ranks, size)
        sweep = tuple((size * 2**k // 4, sum_ms(ranks, size * 2**k // 4)) for k in range(5))
        figures = Figures(10 + total, 10.0, total, 0.0, total, sweep if ranks > 1 else ())
        found.append(Observed(ranks, ranks, 32 * ranks, 32, ((size, 1),), (figures,) * 5, "MPICH"))
    return found


def forecast_of(launches: list[Measured], scaling: str = "weak") -> Forecast:
    groups = make_groups(launches)
    series = make_series(groups, base_of(groups))
    return make_forecast(next(found for found in series if found.scaling == scaling))


@given(st.integers(0, 2**32 - 1))
def test_nonnegative_least_squares_meet_the_conditions_of_karush_kuhn_and_tucker(seed: int) -> None:
    random = np.random.default_rng(seed)
    a, y = random.standard_normal((8, 3)), random.standard_normal(8)
    x = nonnegative(a, y)
    assert (x >= 0).all()
    slope = a.T @ (a @ x - y)
    assert np.abs(slope[x > 0]).max(initial=0) < 1e-9
    assert (slope[x == 0] > -1e-9).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_sweep_determines_latency_bandwidth_and_algorithm(algorithm: str) -> None:
    true = Network(algorithm, 0.02, 1e-6, 0.0)
    rows = [
        (nodes, size, true.sum_ms(nodes, size))
        for nodes in (2, 4, 8)
        for size in (2**k for k in range(12, 21))
    ]
    found = fit_networks(rows, 2**16)[0]
    assert found.algorithm == algorithm
    assert found.alpha_ms == pytest.approx(0.02)
    assert found.beta_ms == pytest.approx(1e-6)
    assert found.error < 1e-9


def test_costs_of_algorithms_grow_with_the_nodes() -> None:
    doubling, halving = Network(DOUBLING, 0.1, 1e-6, 0.0), Network(RABENSEIFNER, 0.1, 1e-6, 0.0)
    assert doubling.sum_ms(64, 1e6) == pytest.approx(6 * 1.1)
    assert halving.sum_ms(64, 1e6) == pytest.approx(2 * 6 * 0.1 + 2 * 63 / 64)


def test_libraries_select_algorithms() -> None:
    assert selected("MPICH Version: 4.2", 64, 2**20) == selected("MPICH", 2, 2**20)
    assert selected("Open MPI v5.0.7", 32, 2**17) == (RABENSEIFNER,)
    assert selected("Open MPI v5.0.7", 64, 2**17) == (DOUBLING,)
    assert selected("Open MPI v5.0.7", 64, 2**18) == (RABENSEIFNER,)
    assert selected("another", 8, 2**20) is None


def test_waiting_grows_with_the_tail_of_lateness() -> None:
    growth = {name: f(64) / f(8) for name, f in LATENESS.items()}
    assert 1 < growth["normal"] < growth["exponential"] < growth["Pareto"]
    # The expected maximum of 8 normal and of 8 exponential variables, less their mean.
    assert LATENESS["normal"](8) == pytest.approx(1.4236, rel=0.01)
    assert LATENESS["exponential"](8) == pytest.approx(2.7179 - 1, rel=1e-3)


@pytest.mark.parametrize("scaling", tiered(["weak", "strong"], ["weak"]))
def test_the_interval_contains_what_the_law_gives(scaling: str) -> None:
    forecast = forecast_of(make_launches(LAW, (1, 2, 4, 8), batch_size=64), scaling)
    assert [ranks for ranks, _, _ in forecast.points] == [16, 32, 64][: len(forecast.points)]
    assert len(forecast.points) >= (3 if scaling == "weak" else 1)
    assert forecast.algorithm == RABENSEIFNER
    assert forecast.alpha_us == pytest.approx(1e3 * LAW.alpha, rel=0.02)
    for (ranks, step_ms, efficiency), (low, high) in zip(
        forecast.points, forecast.intervals, strict=True
    ):
        local = 64 if scaling == "weak" else 64 / ranks
        ideal = LAW.parts(1, 1, 64).total / (1 if scaling == "weak" else ranks)
        truth = ideal / LAW.parts(ranks, 1, local).total
        assert low <= truth <= high <= WIDEST * low
        assert low <= efficiency <= high
        assert step_ms == pytest.approx(ideal / efficiency, rel=0.05)
    assert "is unknown" in forecast.unknown or "too few samples" in forecast.unknown


def test_forecasts_end_where_they_were_not_tested() -> None:
    forecast = forecast_of(make_launches(Law(per_node=1, sample=5.0, noise=0.002), (1, 2, 4)))
    assert forecast.points[-1][0] == FARTHEST * 4
    assert f"beyond {FARTHEST * 4} ranks the efficiency is unknown" in forecast.unknown


@pytest.mark.parametrize("cores", [12, 16, 24])
def test_forecasts_within_a_node_end_with_its_cores(cores: int) -> None:
    law = Law(cores=cores, noise=0.002)
    forecast = forecast_of(make_launches(law, (1, 2, 4, 8), batch_size=64))
    expected = [ranks for ranks in (16, cores) if ranks <= cores]
    assert [ranks for ranks, _, _ in forecast.points] == sorted(set(expected))
    assert f"which has cores for {cores} ranks" in forecast.unknown
    for (ranks, _, _), (low, high), assumed in zip(
        forecast.points, forecast.intervals, forecast.assumed, strict=True
    ):
        assert low <= law.parts(1, 1, 64).total / law.parts(ranks, 1, 64).total <= high
        assert "memory that saturates beyond 8 ranks" in assumed
        assert ("the system takes" in assumed) == (ranks == cores)


def test_a_full_node_makes_the_interval_wider() -> None:
    def width(cores: int) -> float:
        launches = make_launches(Law(cores=cores, noise=0.002), (1, 2, 4, 8))
        low, high = forecast_of(launches).intervals[0]
        return high / low

    assert width(16) > width(64)


@pytest.mark.parametrize("slots", [2, 3, 8])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_two_numbers_of_ranks_suffice_within_a_node(slots: int, on_gpu: bool) -> None:
    def point(ranks: int) -> Observed:
        waiting, sums = 0.1 * (ranks > 1), 0.2 * (ranks > 1)
        figures = Figures(10 + waiting + sums, 10.0, sums, waiting, sums, ())
        return Observed(
            ranks, 1, 32 * ranks, 32, ((2**20, 1),), (figures,) * 5, slots=slots, on_gpu=on_gpu
        )

    points = [point(1), point(2)]
    assert larger_ranks(points) == {2: [], 3: [3], 8: [4, 8]}[slots]
    if slots == 2:
        assert f"which has {'GPU' if on_gpu else 'core'}s for 2 ranks" in obstacle(points)
        return
    assert not obstacle(points)
    found = Ensemble(points).predict(larger_ranks(points)[0])
    assert found.low < found.efficiency < found.high
    assert found.is_known


def test_a_hindcast_is_trusted_if_launches_differ_as_much_as_it_errs() -> None:
    assert is_trusted([Hindcast(8, 11.4, 10.0, 0.0)])
    assert not is_trusted([Hindcast(8, 12.0, 10.0, 0.0)])
    assert is_trusted([Hindcast(8, 12.0, 10.0, 0.05)])


def test_a_forecast_is_wide_above_the_ratio_of_its_limits() -> None:
    forecast = Forecast(
        "weak", 1, points=((2, 1.0, 1.0),) * 2, intervals=((0.5, 0.65), (0.5, 0.66))
    )
    assert forecast.wide == (False, True)


@pytest.mark.more
def test_hindcasts_see_only_smaller_points() -> None:
    launches = make_launches(LAW, (1, 2, 4, 8))
    errors = [ms / measured - 1 for _, ms, measured in forecast_of(launches).hindcasts]
    assert [ranks for ranks, _, _ in forecast_of(launches).hindcasts] == [4, 8]
    assert max(map(abs, errors)) < 0.05
    slow = [
        Measured(m.folder, m.order, make_profile(LAW, ranks=8, batch_size=256, step_ms=60.0))
        if m.folder.startswith("launches/weak-r8") else m
        for m in launches
    ]  # fmt: skip
    forecast = forecast_of(slow)
    assert forecast.points == ()
    assert forecast.hindcasts[-1][1] == pytest.approx(forecast_of(launches).hindcasts[-1][1])
    assert "8 ranks takes 60 ms" in forecast.withheld


@given(
    st.lists(st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=3), min_size=1, max_size=4),
    st.floats(0.01, 0.2),
)
def test_members_that_predict_held_back_points_worse_lose_weight(
    errors: list[list[float]], deviation: float
) -> None:
    found = np.array(errors)
    weights = score_weights(found, np.full(len(found), deviation))
    assert weights.sum() == pytest.approx(1.0)
    squares = np.sum(np.square(found), axis=0)
    assert (np.diff(weights[np.argsort(squares, kind="stable")]) <= 1e-12).all()
    if squares.max() - squares.min() > deviation**2:
        assert weights[squares.argmax()] < 1 / 3 < weights[squares.argmin()]


def test_few_hindcasts_are_shrunk_to_equal_weights() -> None:
    def odds(count: int) -> float:
        weights = score_weights(np.array([[0.0, 0.1]] * count), np.full(count, 0.1))
        return float(np.log(weights[0] / weights[1]))

    # Each hindcast has a difference of 1/2 in its score.
    for count in (1, 2, 4):
        assert odds(count) == pytest.approx(0.5 * count**2 / (count + PRIOR_STRENGTH))


@pytest.mark.parametrize("congestion", CONGESTION)
def test_a_member_that_predicts_the_points_of_the_study_badly_loses_weight(
    congestion: float,
) -> None:
    points = simulated_points(congestion)
    members = Ensemble(points)._members
    weights, _ = _weights(points, members)
    errors = [
        np.log(fit.steps_ms(members, at.ranks, at.local_batch) / at.step_ms)
        for fit, at in _held_back(points)
    ]
    assert len(errors) == 2  # 4 and 8 ranks.
    squares = np.sum(np.square(errors), axis=0)
    assert weights[squares.argmax()] < 0.5 / len(members)
    assert weights[squares.argmin()] > 1 / len(members)


@pytest.mark.parametrize(
    ("law", "ranks", "launches", "words"),
    [
        (Law(cores=8), (1, 2, 4, 8), 5, "nothing is known about the network"),
        (Law(per_node=4), (1, 2, 4, 8), 5, "only 2 nodes were measured"),
        (LAW, (1, 2), 5, "only 2 nodes were measured"),
        (LAW, (1, 2, 4), 2, "3 launches of each point"),
        (Law(cores=1), (1, 2, 4), 5, "2 numbers of ranks with own cores"),
        (Law(cores=2), (1, 2, 4), 5, "the ranks of the largest point share cores"),
        (Law(per_node=1, sample=0.0, update=0.02), (1, 2, 4, 8), 5, "is not extrapolated"),
        (Law(per_node=1, noise=0.5), (1, 2, 4, 8), 5, "is unknown: the interval"),
    ],
)
def test_without_a_basis_the_answer_is_unknown(
    law: Law, ranks: tuple[int, ...], launches: int, words: str
) -> None:
    forecast = forecast_of(make_launches(law, ranks, launches=launches))
    assert not forecast.points
    assert not forecast.intervals
    assert words in forecast.withheld
