"""The order of a run: first whether results are right, then how fast they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

import dptrain
from benchmarks.batch import random_batch
from benchmarks.gpu import ranks
from benchmarks.gpu.clock import BLOCKS, Program
from benchmarks.gpu.machine import Machine, about
from benchmarks.gpu.ours import Step
from benchmarks.gpu.report import Checked, Results
from benchmarks.gpu.stages import layer_rows, measure_stages, study_runs, unfused
from benchmarks.gpu.training import (
    Build,
    measure_case,
    reason,
    release_memory,
)
from benchmarks.progress import Progress
from dptrain.network import Dropout, Network

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


Save = Callable[["Results"], None]


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
    if machine.torch is not None:
        _check(networks, settings, machine, results, progress)
    if not results.right:
        return results
    sections: dict[str, Callable[..., None]] = {
        "training": _train, "stages": _time_stages, "layers": _time_layers, "ranks": _time_ranks,
    }  # fmt: skip
    if {"stages", "training"} & set(settings.sections):
        results.limits = machine.limits(settings.precisions)
    for name, section in sections.items():
        if name in settings.sections:
            section(networks, settings, machine, results, progress)
            save(results)
    return results


def _check(
    networks: list[Network], settings: Settings, machine: Machine, results: Results,
    progress: Progress,
) -> None:  # fmt: skip
    """Every program of ours that is timed, one at a time."""
    from benchmarks.check import expect
    from benchmarks.gpu.check import OPERAND, check_step
    from benchmarks.programs import initial

    assert machine.torch is not None
    for network in networks:
        parameters = {k: np.asarray(v, np.float64) for k, v in initial(network).items()}
        for n in settings.batches:
            x, y = random_batch(network, n)
            for precision in settings.precisions:
                progress.step(f"checking {network.name} at batch {n} in {precision}")
                expected = expect(
                    network, parameters, x.astype(np.float64), y,
                    operand=OPERAND[precision], device=machine.torch,
                )  # fmt: skip
                for backend in machine.backends:
                    try:
                        step = Step(network, backend, precision, n)
                        found = check_step(network, precision, step, expected)
                    except Exception as error:
                        case = f"{network.name}, batch {n}, {backend} {precision}"
                        results.failed[case] = reason(error)
                        continue
                    results.checks += [Checked(backend, precision, check) for check in found]
                    del step
                release_memory()


def _train(
    networks: list[Network], settings: Settings, machine: Machine, results: Results,
    progress: Progress,
) -> None:  # fmt: skip
    ours = [(b, p) for b in machine.backends for p in settings.precisions]
    for network in networks:
        for n in settings.batches:
            progress.step(f"training of {network.name} at batch {n}")
            theirs = _torch_builds(network, n, settings) if machine.timed_torch else {}
            case = measure_case(network, n, ours, theirs, settings.blocks)
            results.cases.append(case)


def _torch_builds(network: Network, batch_size: int, settings: Settings) -> dict[str, Build]:
    """PyTorch's programs of all precisions that are measured, by mode."""
    from benchmarks.check import expect, judge
    from benchmarks.gpu.check import OPERAND
    from benchmarks.gpu.theirs import GPUMode, TorchProgram, modes_for
    from benchmarks.programs import initial

    x, y = random_batch(network, batch_size)
    parameters = {k: np.asarray(v, np.float64) for k, v in initial(network).items()}
    # PyTorch draws dropout's masks itself: results under other masks say nothing.
    drops = any(isinstance(node.layer, Dropout) for node in network.nodes)
    expected = {} if drops else {
        precision: expect(network, parameters, x.astype(np.float64), y,
                          operand=OPERAND[precision], device="cuda")
        for precision in settings.precisions
    }  # fmt: skip

    def build(mode: GPUMode) -> tuple[Program, int]:
        program = TorchProgram(network, x, y, mode)
        if mode.precision in expected:
            found = judge(network.name, batch_size, program.results(), expected[mode.precision])
            if not found.passed:
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
    progress: Progress,
) -> None:  # fmt: skip
    for network, n, precision, backend in _cases(networks, settings, machine):
        progress.step(f"stages of {network.name} at batch {n}, {backend} {precision}")
        try:
            results.stages += measure_stages(network, backend, precision, n)
        except Exception as error:
            case = f"stages of {network.name}, batch {n}, {backend} {precision}"
            results.failed[case] = reason(error)
        release_memory()


def _time_layers(
    networks: list[Network], settings: Settings, machine: Machine, results: Results,
    progress: Progress,
) -> None:  # fmt: skip
    """The study's table, in the first of the precisions."""
    precision = settings.precisions[0]
    for name in STUDY:
        fused = dptrain.network(name)
        split = unfused(fused)
        alone, runs = study_runs(fused)
        for n in settings.stage_batches:
            stages, split_stages = [], []
            for backend in machine.backends:
                progress.step(f"layers of {name} at batch {n}, {backend}")
                try:
                    split_stages += measure_stages(split, backend, precision, n)
                    stages += measure_stages(fused, backend, precision, n)
                except Exception as error:
                    case = f"layers of {name}, batch {n}, {backend} {precision}"
                    results.failed[case] = reason(error)
                release_memory()
            theirs: dict[tuple[str, str], float] = {}
            if machine.timed_torch:
                from benchmarks.gpu.torch_layers import torch_layer_times

                progress.step(f"layers of {name} at batch {n}, PyTorch")
                theirs = torch_layer_times(fused, n, precision)
                release_memory()
            results.layers += layer_rows(split_stages, theirs, alone)
            results.layers += layer_rows(stages, {}, runs)


def _time_ranks(
    networks: list[Network], settings: Settings, machine: Machine, results: Results,
    progress: Progress,
) -> None:  # fmt: skip
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
