"""dptrain against the best of PyTorch's modes, in turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.check import WrongResultError
from benchmarks.limits import sgemm_peak
from benchmarks.programs import (
    Mode,
    dptrain_inference,
    dptrain_step,
    modes_for,
    torch_inference,
    torch_step,
)
from benchmarks.timing import Program, Ratio, Times, one_core, ratio, take_turns
from benchmarks.torch_network import random_batch
from dptrain.backends import load_backend
from dptrain.network import Dropout, Network
from dptrain.plan.lowering import Phase
from dptrain.plan.plan import make_plan

PROBES = 3
"""Steps of each mode by which the best is chosen."""

HOPELESS = 1.6
"""Times the fastest mode's step."""

OURS, THEIRS = "dptrain", "PyTorch"


@dataclass(frozen=True)
class Comparison:
    """One case: a network at a batch size, in training or inference.

    Attributes:
        network: its name.
        batch_size: samples.
        task: "training" or "inference".
        mode: PyTorch's fastest mode here.
        probes_ms: median of a few steps of each of its modes.
        ours, theirs: times of the two programs.
        flops: operations of a step, as dptrain's plan counts them.
        peak: sgemm peak measured right behind, FLOP/s.
    """

    network: str
    batch_size: int
    task: str
    mode: str
    probes_ms: dict[str, float]
    ours: Times
    theirs: Times
    flops: int
    peak: float

    @property
    def at_peak(self) -> float:
        """What `ratio` would be if every operation ran at the sgemm peak and nothing else counted.

        More takes an algorithm of fewer operations.
        """
        return self.theirs.median_ms / (1e3 * self.flops / self.peak)

    @property
    def ratio(self) -> Ratio:
        """How many times faster dptrain is."""
        return ratio(self.theirs, self.ours)

    @property
    def wall_ratio(self) -> float:
        """The same from the clock on the wall."""
        return self.theirs.wall_median_ms / self.ours.wall_median_ms


def compare_training(
    network: Network, batch_size: int, *, steps: int, compiled: bool
) -> Comparison:
    """Time a training step."""
    x, y = random_batch(network, batch_size)
    return _compare(
        network, batch_size, "training", steps, modes_for(network, compiled=compiled),
        lambda: dptrain_step(network, x, y), lambda mode: torch_step(network, x, y, mode),
    )  # fmt: skip


def compare_inference(
    network: Network, batch_size: int, *, steps: int, compiled: bool
) -> Comparison:
    """Time an inference pass, after a look at whether the outputs agree."""
    x, _ = random_batch(network, batch_size)

    def theirs(mode: Mode) -> Program:
        program: Callable[[], Any] = torch_inference(network, x, mode)
        return program

    return _compare(
        network, batch_size, "inference", steps, modes_for(network, compiled=compiled),
        lambda: dptrain_inference(network, x), theirs,
    )  # fmt: skip


def _compare(
    network: Network,
    batch_size: int,
    task: str,
    steps: int,
    modes: tuple[Mode, ...],
    make_ours: Callable[[], Program],
    make_theirs: Callable[[Mode], Program],
) -> Comparison:
    programs = {mode.name: make_theirs(mode) for mode in modes}
    ours = make_ours()
    # Compiling starts processes, which must not inherit the one core.
    mine = ours()
    for name, program in programs.items():
        theirs = program()
        # Masks of dropout differ; `benchmarks.check` compares under equal ones.
        if task == "inference" or not _drops(network):
            _agree(f"{network.name}, batch {batch_size}, {task}, {name}", mine, theirs)
    with one_core():
        probes = _probe(programs)
        best = min(probes, key=lambda name: float(np.median(probes[name].cpu)))
        times = take_turns({OURS: ours, THEIRS: programs[best]}, steps)
        peak = sgemm_peak()
    medians = {name: time.median_ms for name, time in probes.items()}
    return Comparison(
        network.name, batch_size, task, best, medians, times[OURS], times[THEIRS],
        flops(network, batch_size, training=task == "training"), peak,
    )  # fmt: skip


def _probe(programs: dict[str, Program]) -> dict[str, Times]:
    """A few steps of each mode; but one of those that are hopeless, for they are the slow ones."""
    first = take_turns(programs, 1, warm_up=0)
    least = min(times.median_ms for times in first.values())
    near = {n: p for n, p in programs.items() if first[n].median_ms < HOPELESS * least}
    return {**first, **take_turns(near, PROBES, warm_up=0)}


def flops(network: Network, batch_size: int, *, training: bool) -> int:
    """Operations of a step, or of an inference pass."""
    backend = load_backend("numba")
    plan = make_plan(network, backend, batch_size, precision="fp32", training=training)
    return sum(stage.flops for stage in plan.stages if training or stage.phase is Phase.FORWARD)


def _drops(network: Network) -> bool:
    return any(isinstance(node.layer, Dropout) for node in network.nodes)


def _agree(case: str, ours: Any, theirs: Any) -> None:
    """Compare what a step gave: outputs, or the loss.

    Coarse, for the exact comparison is `benchmarks.check`: this one says that what is timed is what
    was checked.
    """
    a, b = np.asarray(ours, np.float64), theirs.detach().double().numpy()
    if not np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b):
        raise WrongResultError(f"{case}: dptrain and PyTorch differ")
