"""The order in which nodes add micro-shards: the tree of one rank, however ranks form nodes."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from dptrain.comm.sums.shared_nodes import node_order
from dptrain.comm.world import Nodes
from dptrain.plan.shards import MicroShards, add_in_order


def make_nodes(sizes: tuple[int, ...], own: int) -> Nodes:
    stops = list(accumulate(sizes))
    ranks = tuple(tuple(range(stop - size, stop)) for size, stop in zip(sizes, stops, strict=True))
    return Nodes(ranks, ranks[own], None)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 3), (2, 2), (3, 4), (2, 1, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("shards", [7, 8, 12])
def test_nodes_add_along_the_tree(shards: int, sizes: tuple[int, ...]) -> None:
    values = np.random.default_rng(3).normal(size=(shards, 5)).astype(np.float32)
    whole = MicroShards.of_rank(shards)
    (expected,) = add_in_order(values.copy(), whole.merges)
    exchanged, counts = [], []
    for node in range(len(sizes)):
        nodes = make_nodes(sizes, node)
        slots = []
        for rank in nodes.own:
            own = MicroShards.of_rank(shards, rank, sum(sizes))
            slots += add_in_order(values[own.start : own.stop].copy(), own.merges)
        order = node_order(shards, nodes)
        used = []
        for first, count, merges in order.groups:
            used += range(first, first + count)
            exchanged += add_in_order(
                [slot.copy() for slot in slots[first : first + count]], merges
            )
        assert used == list(range(len(slots)))
        counts.append(len(order.groups))
    assert tuple(counts) == order.counts
    (total,) = add_in_order(exchanged, order.merges)
    np.testing.assert_array_equal(total, expected)


def test_ranks_that_alternate_between_nodes_are_not_consecutive() -> None:
    assert Nodes(((0, 1), (2,)), (0, 1), None).are_consecutive()
    assert not Nodes(((0, 2), (1, 3)), (0, 2), None).are_consecutive()
    assert Nodes(((0, 1), (2,)), (2,), None).smallest == 1
