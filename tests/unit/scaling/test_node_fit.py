"""Forecasts within a node: what measurements determine, and what they cannot."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.scaling.forecasts.ensemble import Ensemble, larger_ranks, obstacle
from dptrain.scaling.forecasts.node_fit import CONTENTION, SATURATED, TAKEN, NodeFit
from dptrain.scaling.forecasts.observed import Figures, Means, Observed

TIMES = st.lists(
    st.tuples(*[st.floats(low, high) for low, high in ((1.0, 50.0), (0.0, 5.0), (0.0, 5.0))]),
    min_size=3, max_size=3,
)  # fmt: skip


def observed(
    ranks: int, busy: float, transfer: float, waiting: float, *, strong: bool, slots: int = 16
) -> Observed:
    step = busy + transfer + waiting
    launches = tuple(
        Figures(step * f, busy * f, transfer * f, waiting * f, transfer, ())
        for f in (0.99, 1.0, 1.01)
    )
    batch = 256 if strong else 256 * ranks
    return Observed(ranks, 1, batch, batch / ranks, ((2**20, 1),), launches, slots=slots)


@given(TIMES, st.booleans(), st.sampled_from([5, 8, 16]))
@settings(max_examples=15, deadline=None)
def test_any_measured_times_give_finite_limits_around_the_value(
    times: list[tuple[float, float, float]], strong: bool, slots: int
) -> None:
    points = [
        observed(ranks, *parts, strong=strong, slots=slots)
        for ranks, parts in zip((1, 2, 4), times, strict=True)
    ]
    assert not obstacle(points)
    ensemble = Ensemble(points)
    for ranks in larger_ranks(points):
        found = ensemble.predict(ranks)
        assert 0 < found.low <= found.efficiency <= found.high < math.inf
    assert larger_ranks(points)[-1] == slots


@given(TIMES)
@settings(max_examples=10, deadline=None)
def test_hindcasts_tell_nothing_of_what_begins_after_the_measured_points(
    times: list[tuple[float, float, float]],
) -> None:
    points = [observed(r, *parts, strong=False) for r, parts in zip((1, 2, 4), times, strict=True)]
    ensemble = Ensemble(points)
    total = float(np.sum(ensemble._weights))
    for name, expected in (("saturated", SATURATED), ("taken", TAKEN)):
        for value, probability in expected.items():
            chosen = [getattr(member, name) == value for member in ensemble._members]
            assert np.sum(ensemble._weights[chosen]) / total == pytest.approx(probability)


@pytest.mark.parametrize("strong", [False, True])
def test_each_contention_continues_what_was_measured(strong: bool) -> None:
    def fit(grows: dict[int, float]) -> NodeFit:
        points = [
            observed(r, 8 * f / (r if strong else 1), 0.1, 0.1, strong=strong)
            for r, f in grows.items()
        ]
        return NodeFit([Means.of(point, np.array([1])) for point in points])

    def growth(measured: NodeFit) -> dict[str, float]:
        """Return the time per sample on 8 ranks over that on 4."""
        local = 32.0 if strong else 256.0
        now = measured.largest.busy * (0.5 if strong else 1.0)
        return {name: measured.busy_ms(name, 8, local) / now for name in CONTENTION}

    assert growth(fit({1: 1.0, 2: 1.0, 4: 1.0})) == pytest.approx(dict.fromkeys(CONTENTION, 1.0))
    linear = growth(fit({1: 1.1, 2: 1.2, 4: 1.4}))
    assert linear["linear"] == pytest.approx(1.8 / 1.4)
    assert linear["last"] == pytest.approx(1.8 / 1.4)
    assert linear["none"] == pytest.approx(1.0)
    assert growth(fit({1: 1.0, 2: 1.1, 4: 1.2}))["logarithmic"] == pytest.approx(1.3 / 1.2)
    # A memory that saturated between 2 and 4 ranks.
    assert growth(fit({1: 1.0, 2: 1.0, 4: 1.2}))["last"] == pytest.approx(1.6 / 1.2)
