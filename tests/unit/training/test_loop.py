"""Wishes to stop that come before there is a first step, and what is told of few steps."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from dptrain.comm.world import World
from dptrain.measure.recorder import StepRecorder
from dptrain.training import loop
from dptrain.training.engines import FIRST_TIMED
from dptrain.training.engines.device_times import DeviceTimes
from dptrain.training.settings import load_settings


def train(
    run: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, **flags: str
) -> dict[str, Any]:
    """Train, and get a signal while everything is being set up."""

    def set_up(*arguments: Any) -> Any:
        signal.raise_signal(number)
        return set_up_undisturbed(*arguments)

    set_up_undisturbed = loop.set_up
    monkeypatch.setattr(loop, "set_up", set_up)
    small = {"network": "mlp-50-25", "data": "irradiance?samples=64", "backend": "reference"}
    same = {**small, "baseline_steps": "0", "steps": "50", "run_dir": str(run), **flags}
    return loop.train(load_settings(same, {}), World.single())


def test_a_warning_is_granted_after_one_step_so_that_every_turn_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    summary = train(run, signal.SIGUSR1, monkeypatch)
    assert (summary["stopped"], summary["steps"]) == (True, 1)
    monkeypatch.undo()
    summary = train(run, signal.SIGUSR1, monkeypatch, resume=str(run))
    assert (summary["stopped"], summary["steps"]) == (True, 2)


def test_ctrl_c_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", signal.SIGINT, monkeypatch)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("steps", [10, 24])
def test_of_steps_that_are_enqueued_those_behind_the_first_are_told(
    steps: int, tmp_path: Path
) -> None:
    """The first ones are started kernel by kernel or captured: one that is timed comes later."""
    flags = {
        "network": "mlp-5", "data": "irradiance?samples=640", "backend": "cuda", "batch_size": "8",
        "baseline_steps": "3", "steps": str(steps), "run_dir": str(tmp_path / "run"),
    }  # fmt: skip
    summary = loop.train(load_settings(flags, {}), World.single())
    ahead, first = 3, FIRST_TIMED
    timed = steps > first
    # Steps behind one that is timed find the device at rest.
    assert summary["scaling"]["steps_together"] == (steps - first - 1 - ahead if timed else steps)
    assert summary["scaling"]["steps_alone"] == 3
    assert summary["step_ms"]["n"] == summary["scaling"]["steps_together"]
    assert (summary["parts"] is not None) == (len(summary["stages"]) > 0) == timed
    assert all(stage["time_ms"]["n"] == 1 for stage in summary["stages"])


@pytest.mark.parametrize("backend", ["cuda", "reference"])
def test_of_steps_alone_those_with_a_whole_minibatch_count(backend: str, tmp_path: Path) -> None:
    """51 samples are six minibatches of eight and a smaller one: of any seven steps six count."""
    flags = {
        "network": "mlp-5", "data": "irradiance?samples=51", "backend": backend, "batch_size": "8",
        "baseline_steps": "7", "steps": "24", "run_dir": str(tmp_path / "run"),
    }  # fmt: skip
    summary = loop.train(load_settings(flags, {}), World.single())
    assert summary["scaling"]["steps_alone"] == 6


@pytest.mark.parametrize(
    ("samples", "first"),
    # All minibatches are whole; the 11th is smaller; every third is, so that one step a turn and
    # one more, with whole ones, are there later.
    [(80, 10), (85, 11), (17, 13)],
)
def test_the_first_step_that_is_timed_has_a_whole_minibatch_and_a_program_that_was_captured(
    samples: int, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, record = [], DeviceTimes.record

    def recorded(self: DeviceTimes, recorder: StepRecorder) -> None:
        timed.append(recorder.steps)
        record(self, recorder)

    monkeypatch.setattr(DeviceTimes, "record", recorded)
    flags = {
        "network": "mlp-5", "data": f"irradiance?samples={samples}", "backend": "cuda",
        "batch_size": "8", "baseline_steps": "0", "steps": "40", "run_dir": str(tmp_path / "run"),
        "evaluate_every": "0",
    }  # fmt: skip
    summary = loop.train(load_settings(flags, {}), World.single())
    assert timed == [first]
    assert all(stage["time_ms"]["n"] == 1 for stage in summary["stages"])
    assert len(summary["stages"]) > 0
