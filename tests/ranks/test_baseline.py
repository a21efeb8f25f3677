"""Blocks of steps of rank 0 alone, between the steps of the job."""

from __future__ import annotations

from time import monotonic
from typing import Any

import numpy as np
import pytest

from dptrain import Trainer
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.measure.step_record import STEP
from dptrain.training import baseline


def fit(world: World, **settings: Any) -> Trainer:
    trainer = Trainer(
        "mlp-5", "irradiance?samples=800", batch_size=8 * world.size, steps=160, threads=1, seed=3,
        backend="reference", evaluate_every=0, progress=False, world=world, **settings,
    )  # fmt: skip
    trainer.fit()
    return trainer


@pytest.mark.more
def test_blocks_alternate_with_the_job_and_change_nothing(
    connected: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = connected
    plain = fit(world, baseline_steps=0)
    assert plain.summary is not None
    assert plain.summary["scaling"]["weak"] is None
    # So high that no block is left out, however long blocks take on a busy machine.
    monkeypatch.setattr(baseline, "MAX_COST", 20.0)
    monkeypatch.setattr(baseline, "SETUP_S", 0.0)
    begin = monotonic()
    trainer = fit(world, baseline_steps=4)
    wall_s = monotonic() - begin
    for name, values in trainer.parameters.items():
        np.testing.assert_array_equal(values, plain.parameters[name])
    assert trainer.summary is not None
    found = trainer.summary["scaling"]
    if world.size == 1:
        assert found["blocks"] == 0
        return
    assert found["blocks"] >= 3
    assert found["cost"] > 0
    for kind in ("weak", "strong"):
        low, high = found[f"{kind}_interval"]
        assert 0 < low <= found[kind] <= high
    if world.is_rank_zero:
        # The blocks are no part of the steps.
        recorder = trainer.job.recorder
        steps_s = recorder.rows()[:, recorder.names.index(STEP)].sum() / 1e9
        assert steps_s <= (1 - found["cost"]) * wall_s


@pytest.mark.more
def test_a_short_run_has_no_blocks(connected: World, monkeypatch: pytest.MonkeyPatch) -> None:
    # Then a run of less than 588 s is too short, also on a busy machine.
    monkeypatch.setattr(baseline, "SETUP_S", 10.0)
    trainer = fit(connected)
    assert trainer.summary is not None
    found = trainer.summary["scaling"]
    assert (found["blocks"], found["weak"], found["steps_alone"]) == (0, None, 0)


@pytest.mark.more
def test_without_memory_for_another_replica_training_goes_on(
    connected: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise UserError("no memory is left")

    monkeypatch.setattr(baseline, "MAX_COST", 0.5)
    monkeypatch.setattr(baseline, "SETUP_S", 0.0)
    monkeypatch.setattr(baseline, "require_memory", refuse)
    trainer = fit(connected, baseline_steps=4)
    assert trainer.summary is not None
    assert (trainer.step, trainer.summary["scaling"]["blocks"]) == (160, 0)
