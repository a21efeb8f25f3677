"""How the experiments of `dptrain profile --losses` use counters, and how they wait."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dptrain.comm.deadline import RankTimeoutError
from dptrain.comm.world import World
from dptrain.measure.machine.counters import NO_CYCLES, Counts
from dptrain.measure.profile import losses as measure
from dptrain.training.profiling import losses
from dptrain.training.profiling.losses import LossOptions
from tests.unit.training.test_trainer import tiny


class Counters:
    """Hardware counters that know whether they are open."""

    is_open = True

    def read(self) -> Counts:
        assert self.is_open
        return Counts(1.0, 1.0)

    def close(self) -> None:
        self.is_open = False


class Experiments(losses._Experiments):
    """Experiments with blocks that take 1 ns and then may fail."""

    fails = False

    def _block(self, name: str, *, keeps: bool = False) -> float:
        if keeps and self.fails:
            raise KeyboardInterrupt
        return 1.0


@pytest.mark.parametrize("fails", [False, True])
def test_counters_are_closed(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters()
    monkeypatch.setattr(losses, "open_counters", lambda: (counters, ""))
    experiments = Experiments(tiny().job, iter(()), LossOptions())
    experiments.fails = fails
    if fails:
        with pytest.raises(KeyboardInterrupt):
            experiments.run()
    else:
        experiments.run()
    assert not counters.is_open


def test_a_rank_that_never_arrives_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    num_steps = 0

    def make_step(*_: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        time.sleep(0.001)
        assert num_steps < 1000, "no timeout"

    monkeypatch.setattr(losses, "_make_steps", make_step)
    world: Any = World.single()
    world.comm = SimpleNamespace(Ibarrier=lambda: SimpleNamespace(Test=lambda: False))
    world.timeout = 0.01
    experiments: Any = losses._Experiments.__new__(losses._Experiments)
    experiments._job = SimpleNamespace(world=world)
    with pytest.raises(RankTimeoutError, match="steps without sums"):
        experiments._work_until_all_arrive(None, iter(()))
    assert num_steps


@pytest.mark.parametrize("name", [measure.ALONE, measure.UNSUMMED])
def test_cycles_of_a_counter_that_never_ran_are_missing(name: str) -> None:
    # Other ranks than 0 make no steps in the experiment `ALONE`.
    times = {
        f"{measure.CYCLES} {measure.ALONE}": np.array([[5.0, 0.0], [6.0, 0.0]]),
        f"{measure.CYCLES} {measure.UNSUMMED}": np.full((2, 2), 4.0),
    }
    assert not losses._missing_cycles(times)
    times[f"{measure.CYCLES} {name}"][1, 0] = 0
    assert losses._missing_cycles(times) == NO_CYCLES
