"""The order of a run: first whether results are right, then how fast they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

import dptrain
from benchmarks.batch import random_batch
from benchmarks.gpu import ranks
from benchmarks.gpu.clock import BLOCKS, Program
from benchmarks.gpu.machine import Machine, about
from benchmarks.gpu.ours import Step
from benchmarks.gpu.report import Checked, Results
from benchmarks.gpu.stages import (
    LayerRow,
    StageResult,
    layer_rows,
    measure_stages,
    study_runs,
    unfused,
)
from benchmarks.gpu.training import (
    Build,
    measure_case,
    reason,
    release_memory,
)
from benchmarks.progress import Progress
from dptrain.network import Dropout, Network

if TYPE_CHECKING:
    # Needs PyTorch.
    from benchmarks.check import Expected

SECTIONS = ("check", "training", "stages", "layers", "ranks")
STUDY = ("model2", "model-large")
"""Networks of the layers' table."""


@dataclass(frozen=True)
class Settings:
    """What is measured, and how often.

    Attributes:
        networks, sections, batches, precisions: names and sizes.
        compiled: batch sizes at which torch.compile takes part.
        blocks: of each program.
        stage_batches: batch sizes of stages and layers.
        rank_networks, rank_batches: what several GPUs train, and samples a GPU.
        launches: of each command that starts ranks.
    """

    networks: tuple[str, ...] = ("model0", "model1", "model2", "cifar", "solar")
    sections: tuple[str, ...] = SECTIONS
    batches: tuple[int, ...] = (32, 256, 2048)
    precisions: tuple[str, ...] = ("tf32", "bf16")
    compiled: tuple[int, ...] = (32,)
    blocks: int = BLOCKS
    stage_batches: tuple[int, ...] = (32, 2048)
    rank_networks: tuple[str, ...] = ("model0", "cifar")
    rank_batches: tuple[int, ...] = (32, 1024)
    launches: int = 3


GROSSLY = 8.0
"""Times what is allowed, beyond which a mode of PyTorch's does not count: it computes something
else. What it merely rounds otherwise is its own matter."""

Save = Callable[[Results], None]


def run(settings: Settings, machine: Machine, progress: Progress, save: Save) -> Results:
    """Run every section; `save` is called again and again, so that nothing measured is lost.

    A wrong result ends the run before anything is timed: see `Results.right`.
    """
    results = Results(about(
        machine,
        blocks=f"{settings.blocks} of each program, in turns, of 3 to 100 steps",
        launches=settings.launches,
        **{"torch.compile": f"at batch {', '.join(map(str, settings.compiled))}"
           if settings.compiled else "left out"},
    ))  # fmt: skip
    this = _Run(settings, machine, progress, save, results)
    this.check()
    if not results.right:
        return results
    if {"stages", "training"} & set(settings.sections):
        results.limits = machine.limits(settings.precisions)
    sections = {
        "training": this.train, "stages": this.stages, "layers": this.layers, "ranks": this.ranks,
    }  # fmt: skip
    for name, section in sections.items():
        if name in settings.sections:
            section()
    return results


class _Exact:
    """What PyTorch gives in float64, computed once for each case."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._known: dict[tuple[str, int, str], Expected] = {}

    def of(self, network: Network, batch_size: int, precision: str) -> Expected:
        """Exact results, and what `precision` may be off by."""
        from benchmarks.check import expect
        from benchmarks.gpu.check import OPERAND
        from benchmarks.programs import initial

        key = network.name, batch_size, precision
        if key not in self._known:
            x, y = random_batch(network, batch_size)
            parameters = {k: np.asarray(v, np.float64) for k, v in initial(network).items()}
            self._known[key] = expect(
                network, parameters, x.astype(np.float64), y,
                operand=OPERAND[precision], device=self._device,
            )  # fmt: skip
            release_memory()
        return self._known[key]


class _Run:
    """The sections of a run, and what they share."""

    def __init__(
        self, settings: Settings, machine: Machine, progress: Progress, save: Save, results: Results
    ) -> None:
        self.settings, self.machine, self.progress = settings, machine, progress
        self.save, self.results = save, results
        self.networks = [dptrain.get_network(name) for name in settings.networks]
        self.exact = None if machine.torch is None else _Exact(machine.torch)

    @contextmanager
    def _reported(self, case: str) -> Iterator[None]:
        """Say what is measured; go on behind an error, which the report names."""
        self.progress.step(case)
        try:
            yield
        except Exception as error:
            self.results.failed[case] = reason(error)
        release_memory()

    def check(self) -> None:
        """Every program of ours that is timed, one at a time."""
        if self.exact is None:
            return
        from benchmarks.gpu.check import check_step

        for network, n, precision in self._checked():
            expected = self.exact.of(network, n, precision)
            for backend in self.machine.backends:
                with self._reported(f"check of {network.name}, batch {n}, {backend} {precision}"):
                    found = check_step(network, Step(network, backend, precision, n), expected)
                    self.results.checks += [Checked(backend, precision, check) for check in found]

    def _checked(self) -> Iterator[tuple[Network, int, str]]:
        """Cases of the chosen sections; ranks are launched as users do, and checked by tests."""
        settings, sections = self.settings, set(self.settings.sections)
        cases: dict[tuple[str, int, str], Network] = {}
        if sections & {"check", "training", "stages"}:
            for network in self.networks:
                for n in settings.batches:
                    cases |= {(network.name, n, p): network for p in settings.precisions}
        if "layers" in sections:
            for network in map(dptrain.get_network, STUDY):
                for form in (network, unfused(network)):
                    for n in settings.stage_batches:
                        cases.setdefault((form.name, n, settings.precisions[0]), form)
        for (_, n, precision), network in cases.items():
            yield network, n, precision

    def train(self) -> None:
        """Training steps of all programs."""
        settings = self.settings
        ours = [(b, p) for b in self.machine.backends for p in settings.precisions]
        for network in self.networks:
            for n in settings.batches:
                with self._reported(f"training of {network.name}, batch {n}"):
                    theirs: dict[str, Build] = {}
                    if self.exact is not None and self.machine.timed_torch:
                        theirs = torch_builds(network, n, settings, self.exact)
                    case = measure_case(network, n, ours, theirs, settings.blocks)
                    self.results.cases.append(case)
                self.save(self.results)

    def stages(self) -> None:
        """Stages of all steps, alone."""
        for network in self.networks:
            for n in self.settings.stage_batches:
                for precision in self.settings.precisions:
                    for backend in self.machine.backends:
                        with self._reported(
                            f"stages of {network.name}, batch {n}, {backend} {precision}"
                        ):
                            self.results.stages += measure_stages(network, backend, precision, n)
            self.save(self.results)

    def layers(self) -> None:
        """The study's table, in the first of the precisions."""
        for name in STUDY:
            for n in self.settings.stage_batches:
                self.results.layers += self._layers(dptrain.get_network(name), n)
                self.save(self.results)

    def _layers(self, network: Network, n: int) -> list[LayerRow]:
        """Each layer alone, and each run of layers that is computed as one."""
        precision = self.settings.precisions[0]
        alone, runs = study_runs(network)
        split: list[StageResult] = []
        fused: list[StageResult] = []
        theirs: dict[tuple[str, str], float] = {}
        for backend in self.machine.backends:
            with self._reported(f"layers of {network.name}, batch {n}, {backend} {precision}"):
                split += measure_stages(unfused(network), backend, precision, n)
                fused += measure_stages(network, backend, precision, n)
        if self.machine.timed_torch:
            from benchmarks.gpu.torch_layers import torch_layer_times

            with self._reported(f"layers of {network.name}, batch {n}, PyTorch {precision}"):
                theirs = torch_layer_times(network, n, precision)
        return [*layer_rows(split, theirs, alone), *layer_rows(fused, {}, runs)]

    def ranks(self) -> None:
        """`dptrain train` on one GPU, and on several beside PyTorch."""
        settings = self.settings
        cases = [(name, n) for name in settings.rank_networks for n in settings.rank_batches]
        # One GPU scales to nothing: one look says how near training comes to the bare step.
        launches = settings.launches if self.machine.gpus > 1 else 1
        for count in ranks.counts(self.machine.gpus):
            found, failed = ranks.measure_ranks(
                cases, count, settings.precisions[0], launches=launches,
                with_torch=self.machine.timed_torch and self.machine.gpus > 1,
                progress=self.progress,
            )  # fmt: skip
            self.results.ranks += found
            self.results.failed.update(failed)
            self.save(self.results)


def torch_builds(
    network: Network, batch_size: int, settings: Settings, exact: _Exact
) -> dict[str, Build]:
    """PyTorch's programs of all precisions that are measured, by mode."""
    from benchmarks.check import judge
    from benchmarks.gpu.theirs import GPUMode, TorchProgram, modes_for

    x, y = random_batch(network, batch_size)
    # PyTorch draws dropout's masks itself: results under other masks say nothing.
    drops = any(isinstance(node.layer, Dropout) for node in network.nodes)

    def build(mode: GPUMode) -> tuple[Program, int]:
        program = TorchProgram(network, x, y, mode)
        if not drops:
            expected = exact.of(network, batch_size, mode.precision)
            found = judge(network.name, batch_size, program.results(), expected)
            if not found.error <= GROSSLY * found.allowed:
                raise ArithmeticError(f"{found.quantity} is off by {found.error:.1e} of its size")
        return program.program, program.memory_bytes

    modes = [
        mode
        for precision in settings.precisions
        for mode in modes_for(network, precision, compiled=batch_size in settings.compiled)
    ]
    return {mode.name: partial(build, mode) for mode in modes}
