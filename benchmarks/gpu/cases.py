"""Build all programs of a case, check them, and time them in alternating blocks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.batch import random_batch
from benchmarks.gpu.clock import Build, Built, take_turns
from benchmarks.gpu.inference import our_inference, without_dropout
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.ours import Step
from benchmarks.progress import Progress
from benchmarks.report import OURS
from benchmarks.session import Session, release_memory
from dptrain.network import Dropout, Network

if TYPE_CHECKING:
    # Needs PyTorch.
    from benchmarks.check import Array, Check, Expected

LATENCY_BLOCKS, LATENCY_MS, MIN_PASSES, MAX_PASSES = 10, 10.0, 3, 60
"""Blocks of single passes of each program, their duration, and the passes of a block."""

GROSS_ERROR = 8.0
"""A program of a peer is excluded if its error exceeds the allowed error by this factor, because it
then computes something else. Smaller differences come from rounding."""


def measure_case(
    session: Session, section: str, network: Network, batch_size: int, builds: Mapping[str, Build]
) -> None:
    """Build all programs, then time them in alternating blocks, and store their rows.

    Args:
        session: the run.
        section: of the rows.
        network, batch_size: the case.
        builds: functions that build and check a program, by a name that starts with its precision
            and then states the program.
    """
    case = f"{section}: {network.name}, batch {batch_size}"
    built: dict[str, Built] = {}
    for name, build in builds.items():
        with session.reported(f"{case}, {name}", ours=OURS in name):
            built[name] = build()
    rounds = session.settings.rounds
    series = take_turns({name: each.program for name, each in built.items()}, rounds)
    latencies = measure_latencies(built, {n: each.median for n, each in series.items()}, rounds)
    for name, each in built.items():
        precision, _, program = name.partition(" ")
        facts = {"precision": precision, "program": program, **each.facts}
        session.add(
            section, series[name], network=network.name, batch=batch_size, **facts,
            **latencies.get(name, {}),
        )  # fmt: skip
    built.clear()
    release_memory()
    session.save(session.report)


def measure_latencies(
    built: Mapping[str, Built], medians_ms: Mapping[str, float], blocks: int
) -> dict[str, dict[str, Any]]:
    """Return the 50th, 95th and 99th percentile of the times of single passes on the host's clock.

    Training steps have none.
    """
    found = {name: list[float]() for name, each in built.items() if each.wait is not None}
    for _ in range(min(blocks, LATENCY_BLOCKS)):
        for name, times in found.items():
            count = int(np.clip(LATENCY_MS / medians_ms[name], MIN_PASSES, MAX_PASSES))
            # The first pass after another program's is not counted.
            times += passes_us(built[name], count + 1)[1:]
    return {
        name: {"latencies_us": np.percentile(times, [50, 95, 99]).tolist(), "passes": len(times)}
        for name, times in found.items()
    }


def passes_us(built: Built, passes: int) -> list[float]:
    """Return the times of single passes on the host's clock."""
    assert built.wait is not None
    times = []
    for _ in range(passes):
        begin = time.perf_counter_ns()
        built.program.start()
        built.wait()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return times


class Exact:
    """Reference results of PyTorch in float64, computed once for each network and batch size.

    The errors that rounding causes are computed for each precision.

    Args:
        device: of PyTorch.
        progress: shows what is computed.
    """

    def __init__(self, device: str, progress: Progress) -> None:
        self._device, self._progress = device, progress
        self._exact: dict[tuple[str, int], Mapping[str, Array]] = {}
        self._cached: dict[tuple[str, int, str], Expected] = {}

    def of(self, network: Network, batch_size: int, precision: str) -> Expected:
        """Return the reference results and the allowed errors of a precision."""
        from benchmarks.check import expect
        from benchmarks.gpu.check import OPERAND
        from benchmarks.programs.own_programs import initial

        key = network.name, batch_size, precision
        if key not in self._cached:
            self._progress.step(f"reference of {network.name}, batch {batch_size}, {precision}")
            x, y = random_batch(network, batch_size)
            parameters = {k: np.asarray(v, np.float64) for k, v in initial(network).items()}
            self._cached[key] = expected = expect(
                network, parameters, x.astype(np.float64), y, operand=OPERAND[precision],
                device=self._device, exact=self._exact.get(key[:2]),
            )  # fmt: skip
            self._exact[key[:2]] = expected.exact
            release_memory()
        return self._cached[key]


@dataclass(frozen=True)
class GpuRun:
    """What sections on a GPU share.

    Attributes:
        session: the run.
        machine: what can be measured.
        exact: reference results; None without PyTorch.
    """

    session: Session
    machine: Machine
    exact: Exact | None

    def note(self, name: str, found: Check) -> None:
        """Store the result of a check of dptrain; raise `WrongResultError` if it has failed."""
        from benchmarks.check import require

        case = f"{found.network}, batch {found.batch_size}, {name}, {found.quantity}"
        self.session.report.checks[case] = found.share
        require(found)

    def training_builds(
        self, network: Network, n: int, precisions: tuple[str, ...], *, compiled: bool
    ) -> dict[str, Build]:
        """Return the functions that build training steps of dptrain and of PyTorch, by name."""
        builds: dict[str, Build] = {
            f"{precision} {OURS} {backend}": partial(self._step, network, n, backend, precision)
            for precision in precisions for backend in self.machine.backends
        }  # fmt: skip
        if self.exact is None or not self.machine.timed_torch:
            return builds
        from benchmarks.gpu.peers.theirs import modes_for

        for precision in precisions:
            for mode in modes_for(network, precision, compiled=compiled):
                name = mode.name.partition(" ")[2]
                builds[f"{precision} PyTorch {name}"] = partial(self._torch_step, network, n, mode)
        return builds

    def _step(self, network: Network, n: int, backend: str, precision: str) -> Built:
        step = Step(network, backend, precision, n)
        if self.exact is not None:
            from benchmarks.gpu.check import check_step

            for found in check_step(network, step, self.exact.of(network, n, precision)):
                self.note(f"{backend} {precision}", found)
        return Built(step.program, {"memory_bytes": step.memory_bytes})

    def _torch_step(self, network: Network, n: int, mode: Any) -> Built:
        from benchmarks.check import judge
        from benchmarks.gpu.peers.theirs import TorchProgram

        program = TorchProgram(network, *random_batch(network, n), mode)
        # PyTorch draws other dropout masks, so results with dropout cannot be compared.
        if not any(isinstance(node.layer, Dropout) for node in network.nodes):
            assert self.exact is not None
            expected = self.exact.of(network, n, mode.precision)
            require_similar(judge(network.name, n, program.results(), expected))
        return Built(program.program, {"memory_bytes": program.memory_bytes})

    def inference_builds(
        self, network: Network, n: int, precisions: tuple[str, ...], *, compiled: bool
    ) -> dict[str, Build]:
        """Return the functions that build inference passes of dptrain and of peers, by name."""
        x, _ = random_batch(network, n)
        builds: dict[str, Build] = {}
        for precision in precisions:
            for backend in self.machine.backends:
                ours = partial(our_inference, network, backend, precision, x)
                name = f"{precision} {OURS} {backend}"
                builds[name] = partial(self._pass, ours, network, n, name)
            if self.exact is not None and self.machine.timed_torch:
                from benchmarks.gpu.peers.inference_peers import peer_builds

                for name, build in peer_builds(network, x, precision, compiled=compiled).items():
                    builds[name] = partial(self._pass, build, network, n, name)
        return builds

    def _pass(self, build: Build, network: Network, n: int, name: str) -> Built:
        built = build()
        if self.exact is None or built.output is None:
            return built
        from benchmarks.check import judge

        precision, _, program = name.partition(" ")
        expected = self.exact.of(without_dropout(network), n, precision)
        output = built.output().reshape(expected.exact["output"].shape)
        found = judge(network.name, n, {"output": output}, expected)
        if program.startswith(OURS):
            self.note(f"{program} {precision} inference", found)
        else:
            require_similar(found)
        return built


def require_similar(found: Check) -> None:
    """Raise ArithmeticError if a peer computes something else."""
    if not found.error <= GROSS_ERROR * found.allowed:
        raise ArithmeticError(f"the relative error of {found.quantity} is {found.error:.1e}")
