"""Compare dptrain with the fastest of PyTorch's modes, in alternating blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.batch import random_batch
from benchmarks.check import WrongResultError
from benchmarks.limits import sgemm_peak
from benchmarks.programs import (
    LEARNING_RATE,
    Mode,
    Training,
    dptrain_inference,
    dptrain_training,
    torch_inference,
    torch_training,
)
from benchmarks.timing import Program, Ratio, Times, one_core, ratio, take_turns
from dptrain.backends import load_backend
from dptrain.network import Dropout, Network
from dptrain.plan.lowering import Phase
from dptrain.plan.plan import make_plan

PROBES, PROBE_MS = (3, 30), 200.0
"""Minimum and maximum of steps by which the fastest mode is selected, and sufficient time."""

HOPELESS = 1.6
"""A mode slower than the fastest by this factor is excluded."""

TOO_SLOW = 2.5
"""A mode slower than the fastest by this factor is not tried at the network's other batch sizes,
because compiling takes most of a run and the order of modes changes less."""

OURS, THEIRS = "dptrain", "PyTorch"

CHECKED_RATE = 0.1
"""Learning rate of the one step whose update is compared."""
COARSE = 1e-3
"""Allowed relative difference; 1e-5 was observed. `benchmarks.check` compares precisely; this only
verifies that the timed program is the checked one."""


@dataclass(frozen=True)
class Comparison:
    """A comparison of a network at a batch size, in training or inference.

    Attributes:
        network: its name.
        batch_size: samples.
        task: "training" or "inference".
        mode: PyTorch's fastest mode.
        probes_ms: median of several steps of each mode.
        failed: modes that torch.compile could not build, with the reason.
        ours, theirs: times of the two programs.
        flops: operations of a step, as dptrain's plan counts them.
        peak: sgemm peak in FLOP/s, measured immediately afterwards.
    """

    network: str
    batch_size: int
    task: str
    mode: str
    probes_ms: dict[str, float]
    failed: dict[str, str]
    ours: Times
    theirs: Times
    flops: int
    peak: float

    @property
    def at_peak(self) -> float:
        """The speedup if every operation ran at the sgemm peak and nothing else took time.

        A larger speedup requires an algorithm with fewer operations.
        """
        return self.theirs.median_ms / (1e3 * self.flops / self.peak)

    @property
    def too_slow(self) -> frozenset[str]:
        """Modes that took more than `TOO_SLOW` times as long as the fastest mode."""
        least = min(self.probes_ms.values())
        return frozenset(m for m, time in self.probes_ms.items() if time > TOO_SLOW * least)

    @property
    def ratio(self) -> Ratio:
        """Speedup of dptrain by CPU time."""
        return ratio(self.theirs, self.ours)

    @property
    def wall_ratio(self) -> float:
        """Speedup of dptrain by wall time."""
        return self.theirs.wall_median_ms / self.ours.wall_median_ms


def compare_training(
    network: Network, batch_size: int, modes: Iterable[Mode], *, steps: int
) -> Comparison:
    """Check that losses and updates agree, then time a training step."""
    x, y = random_batch(network, batch_size)
    ours = dptrain_training(network, x, y)
    mine = _first_step(ours)

    def theirs(mode: Mode) -> Program:
        training = torch_training(network, x, y, mode)
        agree(f"{network.name}, batch {batch_size}, training, {mode.name}", network, mine,
              _first_step(training))  # fmt: skip
        return partial(training.step, LEARNING_RATE)

    programs, failed = _build(modes, theirs)
    return _compare(
        network, batch_size, "training", steps, partial(ours.step, LEARNING_RATE), programs, failed
    )


def compare_inference(
    network: Network, batch_size: int, modes: Iterable[Mode], *, steps: int
) -> Comparison:
    """Check that outputs agree, then time an inference pass."""
    x, _ = random_batch(network, batch_size)
    ours = dptrain_inference(network, x)
    mine = {"output": np.array(ours())}

    def theirs(mode: Mode) -> Program:
        program = torch_inference(network, x, mode)
        output = {"output": program().numpy()}
        agree(f"{network.name}, batch {batch_size}, inference, {mode.name}", network, mine, output)
        return program

    programs, failed = _build(modes, theirs)
    return _compare(network, batch_size, "inference", steps, ours, programs, failed)


def _build(
    modes: Iterable[Mode], build: Callable[[Mode], Program]
) -> tuple[dict[str, Program], dict[str, str]]:
    """Build programs by mode, and return the reasons for missing modes.

    torch.compile raises undocumented exceptions, so any exception of a compiled mode is a reason.
    """
    programs: dict[str, Program] = {}
    failed: dict[str, str] = {}
    for mode in modes:
        try:
            programs[mode.name] = build(mode)
        except WrongResultError:
            raise
        except Exception as error:
            if not mode.compiled:
                raise
            reason = str(error).strip().partition("\n")[0]
            failed[mode.name] = f"{type(error).__name__}: {reason}"
    return programs, failed


def _compare(
    network: Network,
    batch_size: int,
    task: str,
    steps: int,
    ours: Program,
    programs: dict[str, Program],
    failed: dict[str, str],
) -> Comparison:
    # All compiling is done: it starts processes, which must not inherit the binding to one core.
    with one_core():
        probes = _probe(programs)
        best = min(probes, key=lambda name: float(np.median(probes[name].cpu)))
        times = take_turns({OURS: ours, THEIRS: programs[best]}, steps)
        peak = sgemm_peak()
    medians = {name: time.median_ms for name, time in probes.items()}
    return Comparison(
        network.name, batch_size, task, best, medians, failed, times[OURS], times[THEIRS],
        flops(network, batch_size, training=task == "training"), peak,
    )  # fmt: skip


def _probe(programs: dict[str, Program]) -> dict[str, Times]:
    """Time several steps of each mode, and one step of much slower modes."""
    first = take_turns(programs, 1, warm_up=0)
    least = min(times.median_ms for times in first.values())
    near = {n: p for n, p in programs.items() if first[n].median_ms < HOPELESS * least}
    steps = int(np.clip(PROBE_MS / least, *PROBES))
    return {**first, **take_turns(near, steps, warm_up=0)}


def _first_step(training: Training) -> dict[str, NDArray[Any]]:
    """Return the loss and the change of each parameter in a step."""
    before = training.parameters()
    loss = np.array(float(training.step(CHECKED_RATE)))
    return {"loss": loss, **{k: v - before[k] for k, v in training.parameters().items()}}


def flops(network: Network, batch_size: int, *, training: bool) -> int:
    """Return the FLOPs of a step, or of an inference pass."""
    backend = load_backend("numba")
    plan = make_plan(network, backend, batch_size, precision="fp32", training=training)
    return sum(stage.flops for stage in plan.stages if training or stage.phase is Phase.FORWARD)


def agree(
    case: str,
    network: Network,
    ours: Mapping[str, NDArray[Any]],
    theirs: Mapping[str, NDArray[Any]],
) -> None:
    """Compare outputs, or loss and updates of a step.

    Raises:
        WrongResultError: they differ by more than `COARSE`.
    """
    training = "loss" in theirs
    if training and any(isinstance(node.layer, Dropout) for node in network.nodes):
        # Dropout masks differ here; `benchmarks.check` compares with equal masks.
        return
    for name, value in theirs.items():
        exact = np.asarray(value, np.float64)
        distance = np.linalg.norm(np.asarray(ours[name], np.float64) - exact)
        if not distance <= COARSE * np.linalg.norm(exact):
            raise WrongResultError(f"{case}: dptrain and PyTorch differ in {name}")
