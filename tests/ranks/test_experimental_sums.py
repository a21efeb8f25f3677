"""Sums that leave out or postpone a part of another one, over every method and layout of nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dptrain.comm.sums.base import GradientSum
from dptrain.comm.sums.experimental import LateSum, OneNumberSum, WithoutSum
from dptrain.comm.world import World
from dptrain.plan import make_buckets
from tests.ranks.test_gradient_sum import METHODS, _replica

pytestmark = pytest.mark.mpi

BUCKET_BYTES = 100


def make_sum(world: World, method: str) -> tuple[GradientSum, Any]:
    replica = _replica("fp32", world, method)
    return METHODS[method](world, replica, make_buckets(replica.plan, BUCKET_BYTES)), replica


def step(gradient_sum: GradientSum) -> list[tuple[int, int]]:
    """Make the calls of a step; return the elements that were updated."""
    updated = []
    for bucket in range(len(gradient_sum.buckets)):
        gradient_sum.start(bucket)
        gradient_sum.poll()
    gradient_sum.finish_and_update(
        lambda elements, _: updated.append((elements.start, elements.stop)), 0.0
    )
    return updated


@pytest.mark.parametrize("method", METHODS)
def test_a_late_sum_is_the_sum_and_reports_the_end_of_buckets(world: World, method: str) -> None:
    original, replica = make_sum(world, method)
    late = LateSum(original)
    for _ in range(3):
        replica.flat_gradients[:] = world.rank + 1
        summed: list[int] = []
        late.on_bucket_summed = summed.append
        updated = step(late)
        total = world.size * (world.size + 1) / 2
        size = late.num_parameters
        assert replica.flat_gradients[size : size + 2].tolist() == [total, total]
        for start, stop in updated:
            if world.is_rank_zero or method != "central":
                assert np.all(replica.flat_gradients[start:stop] == total)
        assert world.size == 1 or method == "in place" or summed == list(range(len(late.buckets)))
        # The job's own sum still works in between.
        replica.flat_gradients[:] = 1
        step(original)
        world.barrier()
    original.close()


@pytest.mark.parametrize("kind", [WithoutSum, OneNumberSum])
@pytest.mark.parametrize("method", METHODS)
def test_without_a_sum_gradients_stay_and_the_same_elements_are_updated(
    world: World, method: str, kind: type[WithoutSum]
) -> None:
    original, replica = make_sum(world, method)
    replica.flat_gradients[:] = 1
    expected = step(original)
    replica.flat_gradients[:] = world.rank + 1
    world.barrier()
    assert step(kind(original)) == expected
    assert np.all(replica.flat_gradients == world.rank + 1)
    world.barrier()
    original.close()
