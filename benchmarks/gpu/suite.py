"""The order of a run: first whether results are right, then how fast they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
from benchmarks.gpu.stages import LayerRow, layer_rows, measure_stages, study_runs, unfused
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
Section = Callable[[list[Network], Settings, Machine, Results, Progress, "_Exact | None"], None]


def run(settings: Settings, machine: Machine, progress: Progress, save: Save) -> Results:
    """Run every section; `save` is called behind each, so that nothing measured is lost.

    A wrong result ends the run before anything is timed: see `Results.right`.
    """
    results = Results(about(
        machine,
        blocks=f"{settings.blocks} of each program, in turns, of 3 to 100 steps",
        launches=settings.launches,
        **{"torch.compile": f"at batch {', '.join(map(str, settings.compiled))}"
           if settings.compiled else "left out"},
    ))  # fmt: skip
    networks = [dptrain.network(name) for name in settings.networks]
    exact = None if machine.torch is None else _Exact(machine.torch)
    if exact is not None:
        _check(networks, settings, machine, results, progress, exact)
    if not results.right:
        return results
    sections: dict[str, Section] = {
        "training": _train, "stages": _time_stages, "layers": _time_layers, "ranks": _time_ranks,
    }  # fmt: skip
    if {"stages", "training"} & set(settings.sections):
        results.limits = machine.limits(settings.precisions)
    for name, section in sections.items():
        if name in settings.sections:
            section(networks, settings, machine, results, progress, exact)
            save(results)
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


def _check(
    networks: list[Network], settings: Settings, machine: Machine, results: Results,
    progress: Progress, exact: _Exact,
) -> None:  # fmt: skip
    """Every program of ours that is timed, one at a time."""
    from benchmarks.gpu.check import check_step

    for network in networks:
        for n in settings.batches:
            for precision in settings.precisions:
                progress.step(f"checking {network.name} at batch {n} in {precision}")
                expected = exact.of(network, n, precision)
                for backend in machine.backends:
                    case = f"check of {network.name}, batch {n}, {backend} {precision}"
                    with _reported(case, results):
                        step = Step(network, backend, precision, n)
                        found = check_step(network, step, expected)
                        results.checks += [Checked(backend, precision, check) for check in found]
                    release_memory()


@contextmanager
def _reported(case: str, results: Results) -> Iterator[None]:
    """Go on behind an error, which the report names."""
    try:
        yield
    except Exception as error:
        results.failed[case] = reason(error)


def _train(
    networks: list[Network], settings: Settings, machine: Machine, results: Results,
    progress: Progress, exact: _Exact | None,
) -> None:  # fmt: skip
    ours = [(b, p) for b in machine.backends for p in settings.precisions]
    for network in networks:
        for n in settings.batches:
            progress.step(f"training of {network.name} at batch {n}")
            with _reported(f"training of {network.name}, batch {n}", results):
                timed = exact is not None and machine.timed_torch
                theirs = _torch_builds(network, n, settings, exact) if timed and exact else {}
                results.cases.append(measure_case(network, n, ours, theirs, settings.blocks))


def _torch_builds(
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


def _cases(
    networks: Iterable[Network], settings: Settings, machine: Machine
) -> Iterable[tuple[Network, int, str, str]]:
    for network in networks:
        for n in settings.stage_batches:
            for precision in settings.precisions:
                for backend in machine.backends:
                    yield network, n, precision, backend


def _time_stages(
    networks: list[Network], settings: Settings, machine: Machine, results: Results,
    progress: Progress, exact: _Exact | None,
) -> None:  # fmt: skip
    for network, n, precision, backend in _cases(networks, settings, machine):
        case = f"stages of {network.name}, batch {n}, {backend} {precision}"
        progress.step(case)
        with _reported(case, results):
            results.stages += measure_stages(network, backend, precision, n)
        release_memory()


def _time_layers(
    networks: list[Network], settings: Settings, machine: Machine, results: Results,
    progress: Progress, exact: _Exact | None,
) -> None:  # fmt: skip
    """The study's table, in the first of the precisions."""
    for name in STUDY:
        for n in settings.stage_batches:
            results.layers += _study_rows(
                dptrain.network(name), n, settings.precisions[0], machine, results, progress
            )


def _study_rows(
    network: Network, batch_size: int, precision: str, machine: Machine, results: Results,
    progress: Progress,
) -> list[LayerRow]:  # fmt: skip
    """Each layer alone, and each run of layers that is computed as one."""
    alone, runs = study_runs(network)
    split, fused = [], []
    for backend in machine.backends:
        case = f"layers of {network.name}, batch {batch_size}, {backend} {precision}"
        progress.step(case)
        with _reported(case, results):
            split += measure_stages(unfused(network), backend, precision, batch_size)
            fused += measure_stages(network, backend, precision, batch_size)
        release_memory()
    theirs: dict[tuple[str, str], float] = {}
    if machine.timed_torch:
        from benchmarks.gpu.torch_layers import torch_layer_times

        case = f"layers of {network.name}, batch {batch_size}, PyTorch {precision}"
        progress.step(case)
        with _reported(case, results):
            theirs = torch_layer_times(network, batch_size, precision)
        release_memory()
    return [*layer_rows(split, theirs, alone), *layer_rows(fused, {}, runs)]


def _time_ranks(
    networks: list[Network], settings: Settings, machine: Machine, results: Results,
    progress: Progress, exact: _Exact | None,
) -> None:  # fmt: skip
    # Ranks are processes of their own, which need the GPUs' memory.
    release_memory()
    for name in settings.rank_networks:
        for n in settings.rank_batches:
            for count in ranks.counts(machine.gpus):
                progress.step(f"{count} GPUs: {name} at {n} samples each")
                found, failed = ranks.measure_ranks(
                    name, count, n, settings.precisions[0], launches=settings.launches,
                    with_torch=machine.timed_torch,
                )  # fmt: skip
                results.ranks.append(found)
                for program, why in failed.items():
                    results.failed[f"{program}, {name}, {count} GPUs, batch {n}"] = why
