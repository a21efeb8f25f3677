"""Compare dptrain with the fastest of PyTorch's modes and of other peers, in alternating blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.batch import random_batch
from benchmarks.coarse_check import WrongResultError, require_agreement
from benchmarks.kinks import update_flips
from benchmarks.limits import sgemm_peak
from benchmarks.programs.own_programs import (
    LEARNING_RATE,
    dptrain_inference,
    dptrain_training,
    first_step,
)
from benchmarks.programs.peers import Programs, inference_peers, training_peers
from benchmarks.programs.torch_programs import Mode, torch_inference, torch_training
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

OURS, THEIRS, OTHER = "dptrain", "PyTorch", "other"


@dataclass(frozen=True)
class Comparison:
    """A comparison of a network at a batch size, in training or inference.

    Attributes:
        network: its name.
        batch_size: samples.
        task: "training" or "inference".
        mode: PyTorch's fastest mode.
        probes_ms: median of several steps of each mode.
        failed: modes that torch.compile could not build and peers that are missing, with the
            reason.
        ours, theirs: times of dptrain and of PyTorch.
        flops: operations of a step, as dptrain's plan counts them.
        peak: sgemm peak in FLOP/s, measured immediately afterwards.
        other: the fastest other peer; empty if there is none.
        other_times: its times.
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
    other: str = ""
    other_times: Times | None = None

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
    def other_ratio(self) -> Ratio | None:
        """Speedup of dptrain over the fastest other peer by CPU time."""
        return None if self.other_times is None else ratio(self.other_times, self.ours)

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
    mine = first_step(ours)

    def theirs(mode: Mode) -> Program:
        training = torch_training(network, x, y, mode)
        case = f"{network.name}, batch {batch_size}, training, {mode.name}"
        agree(case, network, batch_size, mine, first_step(training))
        return partial(training.step, LEARNING_RATE)

    built = _build(modes, theirs)
    others = training_peers(network, x, y, mine, f"{network.name}, batch {batch_size}, training")
    step = partial(ours.step, LEARNING_RATE)
    return _compare(network, batch_size, "training", steps, step, built, others)


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
        case = f"{network.name}, batch {batch_size}, inference, {mode.name}"
        agree(case, network, batch_size, mine, output)
        return program

    built = _build(modes, theirs)
    others = inference_peers(network, x, mine, f"{network.name}, batch {batch_size}, inference")
    return _compare(network, batch_size, "inference", steps, ours, built, others)


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
    built: Programs,
    others: Programs,
) -> Comparison:
    (programs, failed), (peers, missing) = built, others
    # All compiling is done: it starts processes, which must not inherit the binding to one core.
    with one_core():
        probes = _probe(programs)
        best = _fastest(probes)
        timed = {OURS: ours, THEIRS: programs[best]}
        other = _fastest(_probe(peers)) if peers else ""
        times = take_turns({**timed, **({OTHER: peers[other]} if other else {})}, steps)
        peak = sgemm_peak()
    medians = {name: time.median_ms for name, time in probes.items()}
    return Comparison(
        network.name, batch_size, task, best, medians, {**failed, **missing}, times[OURS],
        times[THEIRS], flops(network, batch_size, training=task == "training"), peak, other,
        times.get(OTHER),
    )  # fmt: skip


def _fastest(probes: Mapping[str, Times]) -> str:
    return min(probes, key=lambda name: float(np.median(probes[name].cpu)))


def _probe(programs: dict[str, Program]) -> dict[str, Times]:
    """Time several steps of each mode, and one step of much slower modes."""
    first = take_turns(programs, 1, warm_up=0)
    least = min(times.median_ms for times in first.values())
    near = {n: p for n, p in programs.items() if first[n].median_ms < HOPELESS * least}
    steps = int(np.clip(PROBE_MS / least, *PROBES))
    return {**first, **take_turns(near, steps, warm_up=0)}


def flops(network: Network, batch_size: int, *, training: bool) -> int:
    """Return the FLOPs of a step, or of an inference pass."""
    backend = load_backend("numba")
    plan = make_plan(network, backend, batch_size, precision="fp32", training=training)
    return sum(stage.flops for stage in plan.stages if training or stage.phase is Phase.FORWARD)


def agree(
    case: str,
    network: Network,
    batch_size: int,
    ours: Mapping[str, NDArray[Any]],
    theirs: Mapping[str, NDArray[Any]],
) -> None:
    """Compare outputs, or loss and updates of a step.

    Raises:
        WrongResultError: they differ by more than `benchmarks.coarse_check.COARSE`.
    """
    training = "loss" in theirs
    if training and any(isinstance(node.layer, Dropout) for node in network.nodes):
        # Dropout masks differ here; `benchmarks.check` compares with equal masks.
        return
    flips = partial(update_flips, network, batch_size) if training else None
    require_agreement(case, ours, theirs, flips=flips)
