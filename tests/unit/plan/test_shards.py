"""The tree of micro-shards: the same additions for any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.backends import load_backend
from dptrain.errors import UserError
from dptrain.network import Dense, Network
from dptrain.plan.plan import make_plan
from dptrain.plan.shards import (
    MicroShards,
    add_in_order,
    addition_steps,
    maximal_subtrees,
    merge_table,
    micro_shard_bounds,
    rank_contributions,
    shards_of_rank,
    sum_expression,
)


def tree_sum(values: np.ndarray) -> np.ndarray:
    """The sum along the tree, written as its definition."""
    if len(values) == 1:
        return values[0]
    half = 1
    while 2 * half < len(values):
        half *= 2
    return tree_sum(values[:half]) + tree_sum(values[half:])


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 7, 8, 12, 16, 31])
def test_every_number_of_ranks_adds_along_the_same_tree(shards: int) -> None:
    values = np.random.default_rng(shards).normal(size=(shards, 50)).astype(np.float32)
    expected = tree_sum(values)
    for ranks in range(1, shards + 1):
        contributions = []
        for rank in range(ranks):
            own = MicroShards.of_rank(shards, rank, ranks)
            sums = add_in_order(values[own.start : own.stop].copy(), own.merges)
            assert len(sums) == len(own.subtrees)
            contributions += sums
        slots, merges = rank_contributions(shards, ranks)
        assert sum(slots) == len(contributions)
        (total,) = add_in_order(contributions, merges)
        np.testing.assert_array_equal(total, expected)


def test_an_order_of_ranks_without_micro_shards_is_sequential() -> None:
    slots, merges = rank_contributions(0, 4)
    assert slots == (1, 1, 1, 1)
    assert merges.tolist() == [0, 1, 1, 1]


def test_ranks_own_consecutive_micro_shards_that_cover_the_minibatch() -> None:
    assert [shards_of_rank(8, rank, 3) for rank in range(3)] == [(0, 3), (3, 6), (6, 8)]
    assert maximal_subtrees(8, 3, 6) == ((3, 4), (4, 6))
    for count in (0, 1, 7, 8, 37):
        shares = [MicroShards.of_rank(8, rank, 3) for rank in range(3)]
        samples = [i for own in shares for i in range(count)[own.span(count)]]
        assert samples == list(range(count))
        bounds = micro_shard_bounds(count, 8)
        for own in shares:
            expected = bounds[own.start : own.stop + 1] - bounds[own.start]
            np.testing.assert_array_equal(own.offsets(count), expected)


@pytest.mark.parametrize(
    ("shards", "ranks", "passes"), [(8, 1, 1), (8, 1, 4), (8, 2, 2), (6, 3, 2), (16, 4, 4)]
)
def test_sums_over_passes_and_then_over_ranks_follow_the_tree(
    shards: int, ranks: int, passes: int
) -> None:
    values = np.random.default_rng(shards).normal(size=(shards, 50)).astype(np.float32)
    network, backend = Network((4,), [Dense(3)]), load_backend("reference")
    contributions = []
    for rank in range(ranks):
        first = MicroShards.of_rank(shards, rank, ranks, passes)
        plan = make_plan(network, backend, 2, micro_shards=first, passes=passes)
        sums = []
        for number in range(passes):
            own = first.of_pass(number)
            np.testing.assert_array_equal(own.merges, plan.merges)
            sums += add_in_order(values[own.start : own.stop].copy(), own.merges)
        contributions += add_in_order(sums, plan.pass_merges)
    _, merges = rank_contributions(shards, ranks)
    (total,) = add_in_order(contributions, merges)
    np.testing.assert_array_equal(total, tree_sum(values))


@pytest.mark.parametrize(
    ("shards", "ranks", "passes"), [(8, 3, 2), (8, 1, 3), (8, 2, 8), (6, 1, 2)]
)
def test_passes_that_are_no_subtrees_are_refused(shards: int, ranks: int, passes: int) -> None:
    with pytest.raises(UserError, match="each pass must sum a whole subtree") as caught:
        MicroShards.of_rank(shards, 0, ranks, passes)
    words = str(caught.value).rpartition("such as ")[2].split()
    MicroShards.of_rank(int(words[3]), 0, ranks, int(words[1]))  # The advice helps.


def test_micro_shards_differ_by_at_most_one_sample() -> None:
    sizes = np.diff(micro_shard_bounds(37, 8))
    assert sizes.sum() == 37
    assert sizes.tolist() == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] == 1


@pytest.mark.parametrize("merges", [[0, 1, 1], [0, 1, 0, 2], [0, 0, 1], [0]])
def test_steps_on_rows_equal_the_stack(merges: list[int]) -> None:
    rows = np.random.default_rng(1).normal(size=(len(merges), 4))
    table = np.array(merges, np.int64)
    expected = add_in_order(rows.copy(), table)
    steps, results = addition_steps(table)
    for target, source in steps:
        rows[target] += rows[source]
    np.testing.assert_array_equal(rows[results], expected)


def test_a_table_reaches_as_far_as_its_contributions() -> None:
    # 2 and 3 are one subtree, 4 is another; their sum is not a node of the tree.
    assert merge_table(8, [(2, 3), (3, 4), (4, 5)]).tolist() == [0, 1, 0]


def test_a_plan_has_a_gradient_for_each_subtree() -> None:
    network, backend = Network((4,), [Dense(3)]), load_backend("reference")
    whole = make_plan(network, backend, 8)
    assert (whole.gradient_slots, whole.setting.shards, whole.merges.tolist()) == (1, 0, [0])
    plan = make_plan(network, backend, 3, micro_shards=MicroShards.of_rank(8, 1, 3))
    assert (plan.gradient_slots, plan.setting.shards) == (2, 3)
    assert plan.memory["gradients"] == 2 * whole.memory["gradients"]


def test_a_plan_of_several_passes_stores_gradients() -> None:
    network, backend = Network((4,), [Dense(3)]), load_backend("reference")
    whole, parts = make_plan(network, backend, 400), make_plan(network, backend, 100, passes=4)
    assert parts.memory["gradients"] == 2 * whole.memory["gradients"]
    assert parts.memory["buffers"] < whole.memory["buffers"] / 2
    shards = make_plan(network, backend, 2, micro_shards=MicroShards.of_rank(8, 0, 1, 4), passes=4)
    assert shards.memory["gradients"] == 3 * whole.memory["gradients"]
    assert make_plan(network, backend, 2, training=False, passes=4).passes == 1


def test_cudnn_refuses_micro_shards() -> None:
    with pytest.raises(UserError, match="backend cudnn does not support micro-shards"):
        make_plan(Network((4,), [Dense(3)]), load_backend("cudnn"), 8,
                  micro_shards=MicroShards.of_rank(4))  # fmt: skip


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 7, 8, 16])
def test_expressions_are_the_sums_of_the_table(shards: int) -> None:
    values = np.random.default_rng(shards).normal(size=shards).astype(np.float32)
    for ranks in range(1, shards + 1):
        for rank in range(ranks):
            own = MicroShards.of_rank(shards, rank, ranks)
            parts = values[own.start : own.stop]
            found = [
                eval(each, {"at": lambda i, parts=parts: parts[i]})
                for each in sum_expression(own.merges)
            ]
            expected = add_in_order([np.array(part) for part in parts], own.merges)
            np.testing.assert_array_equal(found, expected)


def test_kernels_are_selected_for_the_same_sizes_on_every_rank() -> None:
    """Two micro-shards of four have an even share of 22 samples: they have 6, 6, 5 and 5."""
    network, backend = Network((4,), [Dense(3)]), load_backend("cuda")
    found = set()
    for ranks in (1, 2, 4):
        for rank in range(ranks):
            own = MicroShards.of_rank(4, rank, ranks, batch_size=22)
            setting = make_plan(network, backend, own.num_samples(22), micro_shards=own).setting
            found.add((setting.kernel_samples, setting.summed_samples))
    assert found == {(12, 6)}
    plain = make_plan(network, backend, 22).setting
    assert plain.kernel_samples == plain.summed_samples == 22
