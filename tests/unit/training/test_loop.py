"""Wishes to stop that come before there is a first step."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from dptrain.comm.world import World
from dptrain.config import load_config
from dptrain.training import loop


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
    return loop.train(load_config(same, {}), World.single())


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
