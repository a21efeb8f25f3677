"""Known losses are injected into the steps of several ranks, and leave the job as it was."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dptrain.comm.world import World
from dptrain.measure.machine.scheduling import RunDelays
from dptrain.measure.profile.known import DELAY, INJECTED, LOST_CORE, KnownLoss, judge
from dptrain.training.job import Job, assemble
from dptrain.training.profiling import known_losses
from dptrain.training.profiling.known_losses import inject_known_losses
from dptrain.training.settings import load_settings

pytestmark = pytest.mark.mpi

FLAGS = {"network": "mlp-5", "backend": "reference", "batch_size": 60, "steps": 10}


def make_job(world: World) -> Job:
    settings = replace(load_settings(FLAGS, {}), epochs=0, run_dir=None)
    return assemble(settings, world, keeps_run=False, quiet=True)


def parameters_of(job: Job) -> dict[str, np.ndarray]:
    return {name: np.array(job.replica.parameters[name]) for name in job.replica.parameters}


def inject(world: World, budget_s: float = 60.0) -> tuple[KnownLoss, ...]:
    job = make_job(world)
    with job.engine:
        before, cores = parameters_of(job), os.sched_getaffinity(0)
        found = inject_known_losses(job, budget_s)
        np.testing.assert_equal(parameters_of(job), before)
        assert os.sched_getaffinity(0) == cores
    assert bool(found) == (world.is_rank_zero or world.size == 1)
    return found


def test_each_loss_is_injected_or_has_a_reason(
    connected: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_losses, "ROUNDS", 4)
    found = inject(connected)
    if not found:
        return
    assert [loss.name for loss in found] == list(INJECTED)
    for loss in found:
        assert len(loss.injected_ms) == len(loss.recovered_ms)
        assert bool(loss.reason) == (not loss.injected_ms)
        if connected.size == 1:
            assert "one rank" in loss.reason
        elif loss.name != LOST_CORE:
            assert len(loss.injected_ms) == 4
            assert min(loss.injected_ms) >= 0


def test_a_delay_that_does_not_reach_the_steps_is_not_recovered(
    connected: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_losses, "ROUNDS", 4)
    monkeypatch.setattr(known_losses, "LEAST_MS", 50.0)
    monkeypatch.setattr(known_losses._Injections, "_wait", lambda self: None)
    for recovery in judge(loss for loss in inject(connected) if loss.name == DELAY):
        assert recovery.is_recovered is not True


def test_without_run_delays_no_core_is_lost(
    connected: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / str(threading.get_native_id())).mkdir()
    (tmp_path / str(threading.get_native_id()) / "schedstat").write_text("0 0 0\n")
    monkeypatch.setattr(known_losses, "RunDelays", partial(RunDelays, tasks=tmp_path))
    monkeypatch.setattr(known_losses, "ROUNDS", 4)
    for loss in inject(connected):
        if loss.name == LOST_CORE:
            assert loss.injected_ms == ()
            assert loss.reason


def test_no_round_is_made_beyond_the_budget(connected: World) -> None:
    for loss in inject(connected, 0.0):
        assert loss.injected_ms == ()
        assert loss.reason
