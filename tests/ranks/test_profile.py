"""A profile of ranks of which one is slow: it is named, and who waits for it is not."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dptrain.backends.base import Replica
from dptrain.comm import STRATEGIES
from dptrain.comm.world import World
from dptrain.config import load_config
from dptrain.measure.profile_tables import straggler_line
from dptrain.training.profiling import ProfileOptions, profile

pytestmark = pytest.mark.mpi

LATE_S = 0.02
"""Far more than a step of this network, and than what other programs take from it."""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_straggler_is_named_by_its_own_time(
    world: World, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Replica.load

    def late(self: Replica, *args: Any, **kwargs: Any) -> None:
        time.sleep(LATE_S)
        load(self, *args, **kwargs)

    last = world.size - 1
    if world.rank == last:
        monkeypatch.setattr(Replica, "load", late)
    flags = {"network": "mlp-5", "backend": "reference", "batch_size": 60, "strategy": strategy}
    options = ProfileOptions(steps=10, skip=2, roofs=False)
    found = profile(load_config(flags, {}), world, options, quiet=True)
    assert (found is not None) == world.is_main
    if found is None or world.size == 1:
        return
    late_ms = 1e3 * LATE_S
    slow, others = found.ranks[last], found.ranks[:last]
    assert slow.busy_ms > late_ms
    assert slow.compute_ms > late_ms
    assert slow.behind_ms == max(rank.behind_ms for rank in found.ranks)
    for rank in others:
        # Waiting is theirs, and no fault; half of it leaves room for what others run here.
        assert rank.imbalance_ms > late_ms / 2
        assert rank.imbalance_ms <= rank.exposed_ms
        assert rank.busy_ms < slow.busy_ms
    assert found.parts.imbalance > late_ms / 2 * len(others) / world.size
    stage = next(stage for stage in found.stages if stage.phase == "load")
    assert stage.slowest_rank == last
    if world.size > 2:
        assert f"than the median rank: rank {last} on " in straggler_line(found)
    assert found.parts.total == pytest.approx(
        sum(rank.step_ms for rank in found.ranks) / world.size, rel=1e-9
    )
