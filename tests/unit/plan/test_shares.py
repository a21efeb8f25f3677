"""Shares of ranks: whole numbers that add up, and steps that end early."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from dptrain.data.loading.sharding import Sampler
from dptrain.plan.shards import MicroShards, add_in_order, rank_contributions
from dptrain.plan.shares import better_counts, equal_counts, proportional_counts, step_time


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("rates", [[1.0], [3.0, 1.0], [1.0, 100.0], [2.0, 0.0, 5.0], [1.0] * 4])
def test_counts_add_up_and_end_as_early_as_any(rates: list[float], least: int) -> None:
    for total in range(len(rates), 12):
        counts = proportional_counts(rates, total, least)
        assert sum(counts) == total
        assert min(counts) >= least
        if 0.0 in rates:
            assert counts[1] == least
            continue
        others = (c for c in product(range(least, total + 1), repeat=len(rates)) if sum(c) == total)
        best = min(step_time(other, rates) for other in others)
        assert step_time(counts, rates) == pytest.approx(best)


def test_small_gains_change_nothing() -> None:
    assert better_counts((50, 50), [1.03, 1.0], margin=0.04) == (50, 50)
    assert better_counts((50, 50), [1.2, 1.0], margin=0.04) == (55, 45)


def test_speeds_are_followed_from_any_counts() -> None:
    """Times of steps have a part that does not depend on the number of samples."""
    fixed, per_sample = np.array([0.5, 0.1, 0.2]), np.array([0.01, 0.03, 0.09])
    counts = equal_counts(300, 3)
    for _ in range(8):
        times = fixed + per_sample * counts
        counts = better_counts(counts, (counts / times).tolist(), least=1, margin=0.01)
    times = fixed + per_sample * counts
    assert times.max() < 1.05 * times.min()


@pytest.mark.parametrize("counts", [(5, 3), (0, 8), (1, 1, 6), (3, 0, 4, 1)])
def test_shards_cover_minibatches_of_any_size(counts: tuple[int, ...]) -> None:
    for count in range(9):
        spans = [
            Sampler(100, 8, 0, rank, len(counts), counts=counts).spans(count)[0]
            for rank in range(len(counts))
        ]
        assert [span.stop - span.start for span in spans] == list(counts) or count < 8
        assert [i for span in spans for i in range(span.start, span.stop)] == list(range(count))
        assert all(s.stop - s.start <= n for s, n in zip(spans, counts, strict=True))


@pytest.mark.parametrize("counts", [(5, 3), (1, 7), (1, 1, 6), (3, 1, 2, 2)])
def test_unequal_micro_shards_are_added_along_the_same_tree(counts: tuple[int, ...]) -> None:
    values = np.random.default_rng(1).normal(size=(8, 5)).astype(np.float32)
    (expected,) = add_in_order(values.copy(), MicroShards.of_rank(8).merges)
    ranks = len(counts)
    slots = []
    for rank in range(ranks):
        own = MicroShards.of_rank(8, rank, ranks, counts=counts)
        assert own.count == counts[rank]
        slots += add_in_order(values[own.start : own.stop].copy(), own.merges)
    numbers, merges = rank_contributions(8, ranks, counts)
    assert sum(numbers) == len(slots)
    (found,) = add_in_order(slots, merges)
    np.testing.assert_array_equal(found, expected)
