"""Energy of the steps of a job: the samples that are counted, and the reasons if there is none."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from dptrain import AfterStep
from dptrain.comm.world import World
from dptrain.measure.machine.energy import Energy, EnergyMeter, energy_lines
from dptrain.records import from_values
from dptrain.training.profiling import energy, profiling
from dptrain.training.profiling.profiling import ProfileOptions, profile
from dptrain.training.settings import load_settings
from tests.unit.training.test_trainer import tiny


def test_training_counts_the_smaller_last_minibatch_of_an_epoch() -> None:
    trainer = tiny(batch_size=25)
    trainer.fit()
    # The minibatches of an epoch have 25, 25 and 10 samples.
    samples = [reading[2] for reading in trainer.job.meter.readings]
    assert samples == [0, 25, 50, 60, 85, 110, 120, 145, 170, 180]


def test_a_run_that_stops_before_energy_is_read_states_the_reason() -> None:
    stop = AfterStep(lambda *_: signal.raise_signal(signal.SIGTERM))
    trainer = tiny(epochs=10, callbacks=[stop])
    trainer.fit()
    assert trainer.step < 9
    assert trainer.summary is not None
    energy_record = from_values(Energy, trainer.summary["energy"])
    assert energy_record.joules_per_sample is None
    (line,) = energy_lines(energy_record)
    assert line.startswith("energy not measured: training stopped before step 10")


def test_a_profile_counts_the_smaller_last_minibatch_of_an_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter = EnergyMeter([])
    monkeypatch.setattr(profiling, "open_job_meter", lambda *_: meter)
    flags: dict[str, Any] = {
        "network": "mlp-5", "data": "irradiance?samples=20", "backend": "reference",
        "batch_size": "8",
    }  # fmt: skip
    options = ProfileOptions(steps=4, skip=1, roofs=False)
    assert profile(load_settings(flags, {}), World.single(), options, quiet=True) is not None
    # The minibatches of an epoch have 8, 8 and 4 samples. The first step is not measured; four
    # of the others have 8 samples.
    assert [reading[2] for reading in meter.readings] == [0, 8, 12, 20, 28, 32, 40]


def test_a_gpu_of_several_ranks_is_counted_once() -> None:
    gpus = ["a", "a", "b", ""]
    counted = []
    for rank, identity in enumerate(gpus):
        memory = SimpleNamespace(identity=identity, on_gpu=bool(identity))
        world = SimpleNamespace(local_rank=rank, node_all_gather_json=lambda _: gpus)
        job: Any = SimpleNamespace(replica=SimpleNamespace(memory=memory), world=world)
        counted.append(energy.metered_gpu(job))
    assert counted == ["a", "", "b", ""]
