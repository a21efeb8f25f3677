"""Sums of batch statistics: every method adds the parts of all ranks in the order of the shards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.backends.memory import HOST
from dptrain.comm.deadline import RankTimeoutError
from dptrain.comm.statistics.statistics import StatisticsSum
from dptrain.comm.statistics.statistics_mpi import MpiStatisticsSum
from dptrain.comm.statistics.statistics_shared import SharedNodesStatisticsSum, SharedStatisticsSum
from dptrain.comm.world import World
from dptrain.plan.shards import MicroShards, add_in_order, merge_table, shards_of_rank
from tests.tiers import tiered

pytestmark = [pytest.mark.mpi, pytest.mark.mpi(min_size=2)]

CHANNELS = 7


def plan_of(world: World, shards: int) -> Any:
    """Return what a sum reads of a plan: micro-shards, and the shapes of the statistics."""
    own = MicroShards.of_rank(shards, world.rank, world.size) if shards else None
    statistics = [SimpleNamespace(shape=(channels,)) for channels in (3, CHANNELS)]
    return SimpleNamespace(micro_shards=own, network=SimpleNamespace(statistics=statistics))


def make(method: str, world: World, shards: int) -> StatisticsSum:
    plan = plan_of(world, shards)
    if method == "mpi":
        return MpiStatisticsSum(world, plan, HOST)
    several = world.local_size < world.size
    return (SharedNodesStatisticsSum if several else SharedStatisticsSum)(world, plan)


def parts_of(shards: int, turn: int, count: int) -> NDArray[np.float64]:
    """Of very different sizes, so that another order of addition gives other bits."""
    random = np.random.default_rng((shards, turn, count))
    return random.normal(size=(shards, count)) * 10.0 ** random.integers(-9, 9, (shards, count))


@pytest.mark.parametrize("shards", [0, 5, 8])
@pytest.mark.parametrize(
    ("method", "ranks"),
    [("mpi", "connected"), ("shared", "connected"), ("shared", "two_per_node")],
)
def test_sums_have_the_bits_of_the_tree(
    request: pytest.FixtureRequest, method: str, ranks: str, shards: int
) -> None:
    world: World = request.getfixturevalue(ranks)
    sums, calls = make(method, world, shards), list[tuple[int, int]]()
    sums.after_call = lambda begin, end: calls.append((begin, end))
    rows = shards or world.size
    merges = np.minimum(np.arange(rows), 1)
    if shards:
        merges = merge_table(shards, [(index, index + 1) for index in range(shards)])
    own = slice(*shards_of_rank(rows, world.rank, world.size))
    for turn in range(7):
        for count in (1, 4 * CHANNELS + 16, 2 * CHANNELS + 1):
            parts = parts_of(rows, turn, count)
            totals = np.full(count, np.nan)
            sums(parts[own], totals)
            [expected] = add_in_order(parts.copy(), merges)
            np.testing.assert_array_equal(totals, expected)
    assert len(calls) == 7 * 3
    assert all(begin < end for begin, end in calls)
    assert calls == sorted(calls)
    sums.close()


@pytest.mark.parametrize("method", tiered(["mpi", "shared"], ["shared"]))
def test_a_rank_that_is_late_is_waited_for_up_to_the_timeout(
    connected: World, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = make(method, connected, 0)
    totals = np.zeros(3)
    if connected.rank:
        # The barriers wait longer: on a busy machine, ranks arrive later than after 0.3 s.
        with monkeypatch.context() as patch:
            patch.setattr(connected, "timeout", 0.3)
            with pytest.raises(RankTimeoutError, match="batch statistics"):
                sums(np.ones((1, 3)), totals)
    connected.barrier()
    if not connected.rank:
        sums(np.ones((1, 3)), totals)
        np.testing.assert_array_equal(totals, connected.size)
    connected.barrier()
