"""`dptrain profile --losses` on emulated GPUs that sum gradients through peer-to-peer memory."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.comm.sums import peer
from dptrain.comm.sums.enqueued import EnqueuedOneNumberSum, EnqueuedSum
from dptrain.comm.world import AgreedError, World
from dptrain.measure.profile import losses as measure
from dptrain.measure.profile.losses import Losses
from dptrain.training.profiling import losses
from dptrain.training.profiling.losses import LossOptions, measure_losses
from dptrain.training.settings import load_settings
from tests.ranks.attempts import repeat_if_disturbed
from tests.ranks.test_peer import Device

pytestmark = [pytest.mark.mpi(min_size=2)]
SETTINGS = {
    "network": "mlp-5", "data": "irradiance?samples=200", "backend": "cuda", "threads": 1,
    "batch_size": 12, "steps": 1,
}  # fmt: skip
DELAY_S = 0.02


@pytest.fixture(autouse=True)
def _devices(monkeypatch: pytest.MonkeyPatch, connected: World) -> None:
    """Emulated GPUs, on which few steps are made and sums take few threads."""
    if connected.size > 2:
        pytest.skip("emulated sums of more ranks than cores take long, and test nothing else")
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: Device())
    monkeypatch.setattr(peer, "THREADS", 32)
    monkeypatch.setattr(peer, "BLOCKS", 3)
    monkeypatch.setattr(losses, "ROUNDS", 3)
    monkeypatch.setattr(losses, "WARM_UP", 1)
    monkeypatch.setattr(losses, "LATENCY_SUMS", 5)


def measured(world: World, delay_s: float = DELAY_S, **settings: object) -> Losses | None:
    chosen = load_settings({**SETTINGS, **settings}, {})
    return measure_losses(chosen, world, LossOptions(9, delay_s), quiet=True)


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["mirrored", "central"])
def test_losses_of_devices_add_up_and_delays_appear(connected: World, strategy: str) -> None:
    def check(factor: float) -> None:
        delay_s = factor * DELAY_S
        # With one bucket ranks wait after the backward pass, also without streams that overlap.
        found = measured(connected, delay_s, strategy=strategy, transport="peer", bucket_kib=10_000)
        assert (found is None) == (connected.rank > 0)
        if found is not None:
            check_losses(found, delay_s)

    repeat_if_disturbed(connected, check)


def check_losses(found: Losses, delay_s: float) -> None:
    assert found.job["transport"] == "peer"
    assert found.overlaps
    total = found.step_ms[measure.ALONE].value + sum(loss.time_ms.value for loss in found.losses)
    assert total == pytest.approx(found.step_ms[measure.DURING].value)
    assert found.counters_missing == "the ranks compute on GPUs"
    assert all(estimate.value > 0 for estimate in found.step_ms.values())
    one, in_turn = found.delays
    for delay in (one, in_turn):
        # An emulated step takes far longer than one on a GPU, and other programs delay ranks, which
        # may hide part of the waiting for a delayed rank.
        assert delay.waiting_ms.high > 0
        assert delay.waiting_ms.value < 2e3 * delay_s
        assert delay.cost_ms.value > 0


@pytest.mark.more
def test_experiments_do_what_they_are_named(
    connected: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the sums that a step of each experiment makes, and what the parameters become."""
    made, counts = [0], dict[str, set[int]]()
    block, start = losses._Experiments._block, EnqueuedSum._start
    seen = []

    def counted(self: EnqueuedSum, bucket: int) -> None:
        made[0] += 1
        start(self, bucket)

    def counting(self: losses._Experiments, name: str, *, keeps: bool = False) -> float:
        made[0] = 0
        found = block(self, name, keeps=keeps)
        seen.append(self._job)
        counts.setdefault(name, set()).add(made[0])
        return found

    monkeypatch.setattr(EnqueuedSum, "_start", counted)
    monkeypatch.setattr(losses._Experiments, "_block", counting)
    measured(connected, network="mlp-20-20-20", transport="peer", bucket_kib=1)
    job = seen[0]
    assert counts[measure.ALONE] == counts[measure.UNSUMMED] == {0}
    num_buckets = len(job.buckets)
    assert num_buckets > 1
    # The first block of an experiment has more untimed steps.
    steps = {losses.WARM_UP + 3, losses.FIRST_TIMED + losses.WARM_UP + 3}
    assert counts[measure.ONE_NUMBER] == steps
    assert counts[measure.AFTER] == counts[measure.DURING] == {num_buckets * n for n in steps}
    parameters = job.replica.memory.download(job.replica.flat_parameters)
    every = connected.all_gather_json(parameters.tolist())
    assert all(values == every[0] for values in every)


def test_the_sum_of_one_number_leaves_the_gradients(connected: World) -> None:
    from dptrain.training.job import assemble

    chosen = load_settings({**SETTINGS, "transport": "peer"}, {})
    job = assemble(chosen, connected, keeps_run=False, quiet=True)
    with job.engine:
        original = job.engine.gradient_sum
        assert isinstance(original, EnqueuedSum)
        one = EnqueuedOneNumberSum(original)
        gradients, size = original.gradients, original.num_parameters
        memory = job.replica.memory
        memory.upload(gradients, np.full(gradients.shape, connected.rank + 1, np.float32))
        one.sum_alone(len(one.buckets) - 1)
        found = memory.download(gradients)
        assert (found[:size] == connected.rank + 1).all()
        assert (found[size:] == connected.size * (connected.size + 1) / 2).all()
        one.close()


def test_gradients_that_the_host_sums_are_refused(connected: World) -> None:
    with pytest.raises(AgreedError, match="use --transport peer or nccl"):
        measured(connected, transport="host")
