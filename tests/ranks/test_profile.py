"""A profile of ranks of which one is slow: it is named, and who waits for it is not."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dptrain.backends.reference.normalization import BatchNormalization
from dptrain.backends.replica import Context, Replica
from dptrain.comm import STRATEGIES
from dptrain.comm.sums import peer
from dptrain.comm.world import World
from dptrain.machine import own_cores
from dptrain.measure.profile.loss_tables import losses_report
from dptrain.measure.profile.profile import Profile
from dptrain.measure.profile.profile_lines import profile_report, straggler_line
from dptrain.network import BatchNorm2d, Conv2d, Dense, Flatten, Network, ReLU
from dptrain.network.files import write_network
from dptrain.training.profiling import losses
from dptrain.training.profiling.losses import LossOptions, measure_losses
from dptrain.training.profiling.profiling import ProfileOptions, profile
from dptrain.training.settings import load_settings
from tests.ranks.attempts import repeat_if_disturbed
from tests.ranks.test_peer import Device
from tests.tiers import tiered
from tests.unit.measure.machine.test_scheduling import COUNTS
from tests.unit.measure.test_profile import unknown_keys
from tests.unit.measure.test_trace import check_trace

pytestmark = pytest.mark.mpi

LATE_S = 0.02
"""Far more than a step of this network, and than what other programs take from it."""


@pytest.mark.parametrize("strategy", tiered(STRATEGIES, []))
def test_a_straggler_is_named_by_its_own_time(
    connected: World, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = connected
    load, late_s = Replica.load, LATE_S

    def late(self: Replica, *args: Any, **kwargs: Any) -> None:
        time.sleep(late_s)
        load(self, *args, **kwargs)

    last = world.size - 1
    if world.rank == last:
        monkeypatch.setattr(Replica, "load", late)
    flags = {"network": "mlp-5", "backend": "reference", "batch_size": 60, "strategy": strategy}
    options = ProfileOptions(steps=10, skip=2, roofs=False)

    def check(factor: float) -> None:
        nonlocal late_s
        late_s = factor * LATE_S
        found = profile(load_settings(flags, {}), world, options, quiet=True)
        assert (found is not None) == world.is_rank_zero
        if found is not None and world.size > 1:
            check_straggler(found, last, 1e3 * late_s)

    repeat_if_disturbed(world, check)


@pytest.mark.skipif(COUNTS is None, reason="the kernel counts no run delays")
def test_what_other_programs_take_is_no_communication(connected: World) -> None:
    """Two busy loops for each core run meanwhile. A sum takes microseconds, a lack of cores ms."""
    world = connected
    flags = {"network": "mlp-5", "backend": "reference", "batch_size": 60}
    loops = []
    if world.is_rank_zero:
        command = [sys.executable, "-c", "while True: pass"]
        loops = [subprocess.Popen(command) for _ in range(2 * len(own_cores()))]
    try:
        options = ProfileOptions(steps=200, skip=2, roofs=False)
        found = profile(load_settings(flags, {}), world, options, quiet=True)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    if found is None:
        return
    parts = found.step_parts.all_steps
    assert parts.total == pytest.approx(found.step_ms.mean, rel=1e-9)
    assert parts.without_core is not None
    assert parts.without_core > parts.transfer
    assert all(rank.involuntary_switches is not None for rank in found.ranks)


def check_straggler(found: Profile, last: int, late_ms: float) -> None:
    """Check that the last rank, which is late, is named as the cause of the others' waiting."""
    size = len(found.ranks)
    slow, others = found.ranks[last], found.ranks[:last]
    assert slow.busy_ms > late_ms
    assert slow.compute_ms > late_ms
    assert slow.delay_ms == max(rank.delay_ms for rank in found.ranks)
    for rank in others:
        # Waiting is theirs, and no fault; half of it leaves room for what others run here.
        assert rank.imbalance_ms > late_ms / 2
        assert rank.imbalance_ms <= rank.exposed_ms
        assert rank.busy_ms < slow.busy_ms
    assert found.parts.imbalance > late_ms / 2 * len(others) / size
    stage = next(stage for stage in found.stages if stage.phase == "load")
    assert stage.slowest_rank == last
    if size > 2:
        assert f"at the gradient sum: rank {last} on " in straggler_line(found)
    assert found.parts.total == pytest.approx(
        sum(rank.step_ms for rank in found.ranks) / size, rel=1e-9
    )


def write_normalized(world: World, folder: Path) -> Path:
    """Return a file of a network with two batch normalisations, the same on every rank."""
    file = Path(world.broadcast_json(str(folder))) / "net.toml"
    layers = [Conv2d(4), BatchNorm2d(), ReLU(), Conv2d(4), BatchNorm2d(), Flatten(), Dense(10)]
    if world.is_rank_zero:
        write_network(Network((3, 6, 6), layers), file)
    world.barrier()
    return file


@pytest.mark.more
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("transport", ["shared", "mpi"])
def test_waiting_in_a_sum_of_batch_statistics_is_no_computation(
    connected: World, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank computes longer in a normalisation, and the others wait for it there."""
    world, file = connected, write_normalized(connected, tmp_path)
    statistics, late_s = BatchNormalization.statistics, LATE_S

    def late(self: BatchNormalization, context: Context) -> None:
        time.sleep(late_s)
        statistics(self, context)

    last = world.size - 1
    if world.rank == last:
        monkeypatch.setattr(BatchNormalization, "statistics", late)
    flags = {"network": str(file), "data": "synthetic?samples=400", "backend": "reference",
             "batch_size": 20, "transport": transport, "crop": 0}  # fmt: skip
    options = ProfileOptions(steps=10, skip=2, roofs=False)

    def check(factor: float) -> None:
        nonlocal late_s
        late_s = factor * LATE_S
        found = profile(load_settings(flags, {}), world, options, quiet=True)
        assert (found is not None) == world.is_rank_zero
        if found is not None:
            check_waiting(found, transport, last, 2e3 * late_s)

    repeat_if_disturbed(world, check)


def check_waiting(found: Profile, transport: str, last: int, late_ms: float) -> None:
    """Check that ranks which wait for the last one in a normalisation do not compute longer."""
    assert not unknown_keys(found)
    sums = found.batch_statistics
    assert sums is not None
    assert sums.number == 4
    others = last / len(found.ranks)
    assert sums.time_ms.mean > late_ms * others / 2
    assert sums.share == pytest.approx(sums.time_ms.mean / found.step_ms.mean, rel=0.05)
    for rank in found.ranks[:last]:
        assert rank.imbalance_ms > late_ms / 2
        assert rank.compute_ms < found.ranks[last].compute_ms
    slow = [s for s in found.stages if s.phase == "statistics"]
    assert len(slow) == 2
    for stage in slow:
        assert stage.slowest_rank == last
    assert not sums.separate_kernels
    line = statistics_line(found)
    assert f"({transport}): 4 in a step" in line
    on_gpus = replace(found, batch_statistics=replace(sums, separate_kernels=True))
    assert statistics_line(on_gpus) == f"{line}; in steps without timing, these sums take less time"


def statistics_line(found: Profile) -> str:
    [line] = [line for line in profile_report(found) if "batch statistics" in str(line)]
    return str(line)


@pytest.mark.more
@pytest.mark.mpi(min_size=2)
def test_losses_have_the_cost_of_batch_statistics(
    connected: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "ROUNDS", 3)
    flags = {"network": str(write_normalized(connected, tmp_path)), "crop": 0, "batch_size": 20,
             "data": "synthetic?samples=400", "backend": "reference"}  # fmt: skip
    found = measure_losses(
        load_settings(flags, {}), connected, LossOptions(6, known_losses=False), quiet=True
    )
    if found is None:
        return
    assert [loss.name for loss in found.losses].count("batch statistics") == 1
    total = found.step_ms["alone"].value + sum(loss.time_ms.value for loss in found.losses)
    assert total == pytest.approx(found.step_ms["during"].value)
    # Lines about other programs may precede the table.
    table = next(part for part in losses_report(found) if not isinstance(part, str))
    assert any("batch statistics" in cell for row in table.rows for cell in row)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank has an emulated GPU of its own, which others can write into."""
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: Device())
    monkeypatch.setattr(peer, "THREADS", 32)
    monkeypatch.setattr(peer, "BLOCKS", 3)


@pytest.mark.more
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_that_are_enqueued_are_taken_apart(
    connected: World, devices: None, strategy: str, tmp_path: Path
) -> None:
    flags = {"network": "mlp-5", "backend": "cuda", "batch_size": 40, "strategy": strategy}
    config = load_settings({**flags, "bucket_kib": 1}, {})
    options = ProfileOptions(steps=3, skip=1, roofs=False, output=tmp_path / "p", trace=True)
    found = profile(config, connected, options, quiet=True)
    if found is None:
        return
    many = connected.size > 1
    assert found.job["transport"] == ("peer" if many else "none")
    assert found.steps == 3
    assert found.parts.total == pytest.approx(
        sum(rank.step_ms for rank in found.ranks) / connected.size, rel=1e-9
    )
    # A difference of numbers of some milliseconds, in float64. Run delays are unknown on a GPU.
    assert min(found.parts.known.values()) > -1e-9
    assert all(stage.time_ms.n == 3 and stage.time_ms.mean > 0 for stage in found.stages)
    assert sum(s.buckets for s in found.sums) == (found.job["buckets"] if many else 0)
    assert all(s.time_ms.median > 0 for s in found.sums)
    threads = check_trace(json.loads((tmp_path / "p" / "trace.json").read_text()))
    for rank in range(connected.size):
        names = [event["name"] for event in threads[rank, 0]]
        # Ordinary steps, and those that are timed stage by stage.
        assert names.count("step") == 3 + 3
        assert all(names.count(stage.name) == 3 for stage in found.stages)
        if many:
            assert all(event["dur"] > 0 for event in threads[rank, 1])
