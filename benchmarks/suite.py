"""Run the sections of the benchmark: first check results, then time programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.check import check
from benchmarks.child import compile_times, run_child
from benchmarks.coarse_check import WrongResultError
from benchmarks.comparison import Comparison, compare_inference, compare_training
from benchmarks.machine import about, keep_freed_memory, versions
from benchmarks.outside import OUTSIDE, find_network
from benchmarks.programs.torch_programs import modes_for
from benchmarks.progress import Progress
from benchmarks.ranks import measure_ranks
from benchmarks.report import Results
from benchmarks.stages import measure_stages
from dptrain.machine import available_cores
from dptrain.network import Network

DEFAULT_RUN = ("model0", 32)
"""Network and batch size of `dptrain train` by default."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        networks: names.
        sections: parts of the run.
        batches, inference_batches: batch sizes.
        steps: minimum of timed steps of each program.
        compiled: whether torch.compile is measured.
        launches: launches of each job with several ranks.
        rank_networks, rank_steps: networks and steps of these jobs.
        keep_memory: whether the C library keeps freed memory (`keep_freed_memory`).
    """

    networks: tuple[str, ...]
    sections: tuple[str, ...]
    batches: tuple[int, ...] = (32, 128)
    inference_batches: tuple[int, ...] = (1, 32, 1024)
    steps: int = 30
    compiled: bool = True
    launches: int = 3
    rank_networks: tuple[str, ...] = ("model0", "cifar")
    rank_steps: int = 12
    keep_memory: bool = True


def run(settings: Settings, progress: Progress) -> Results:
    """Run every section.

    Raises:
        WrongResultError: a check fails, or a timed program computes something else.
    """
    networks = [find_network(name) for name in settings.networks]
    kept = settings.keep_memory and keep_freed_memory()
    results = Results(
        about(
            threads=1,
            steps=f"at least {settings.steps} of each program",
            launches=settings.launches,
            **{"torch.compile": "included" if settings.compiled else "not included"},
            **{"freed memory": "kept for the next step" if kept else "as the C library does"},
        )
    )
    results.about["versions"].update(versions("jax", "onnxruntime", "openvino"))
    _check(networks, settings, results, progress)
    torch.set_num_threads(1)
    _compare(networks, settings, results, progress)
    if "stages" in settings.sections:
        for network in _in_set(networks):
            for n in settings.batches:
                progress.step(f"stages of {network.name} at batch {n}")
                roofs, stages = measure_stages(network, n, steps=settings.steps)
                results.roofs.append(roofs)
                results.stages += stages
    peaks = [c.peak / 1e9 for c in results.comparisons]
    if peaks:
        results.about["sgemm peak"] = (
            f"{np.median(peaks):.0f} GFLOP/s, {min(peaks):.0f} to {max(peaks):.0f} in this run"
        )
    if "ranks" in settings.sections and available_cores() > 1:
        for name in settings.rank_networks:
            progress.step(f"ranks and threads: {name}")
            results.ranks.append(
                measure_ranks(name, launches=settings.launches, steps=settings.rank_steps)
            )
    if "processes" in settings.sections:
        _measure_processes(networks, settings, results, progress)
    return results


def _check(
    networks: list[Network], settings: Settings, results: Results, progress: Progress
) -> None:
    for network in networks:
        for n in _batches(network, settings.batches):
            progress.step(f"checking {network.name} at batch {n}")
            found = check(network, n)
            results.checks.append(found)
            if not found.passed:
                raise WrongResultError(
                    f"{found.network}, batch {found.batch_size}: the relative error of "
                    f"{found.quantity} is {found.error:.1e}; rounding explains at most "
                    f"{found.allowed:.1e}"
                )


def _compare(
    networks: list[Network], settings: Settings, results: Results, progress: Progress
) -> None:
    for network in networks:
        if "training" in settings.sections:
            _compare_batches(
                network, "training", settings.batches, compare_training, settings, results, progress
            )
    for network in networks:
        if "inference" in settings.sections and len(network.input_shape) == 3:
            _compare_batches(
                network, "inference", settings.inference_batches, compare_inference, settings,
                results, progress,
            )  # fmt: skip


def _in_set(networks: list[Network]) -> list[Network]:
    return [network for network in networks if network.name not in OUTSIDE]


def _batches(network: Network, batches: tuple[int, ...]) -> tuple[int, ...]:
    """Return the batch sizes of a network; those outside the set have at most 32 samples."""
    return batches if network.name not in OUTSIDE else tuple(n for n in batches if n <= 32)


def _compare_batches(
    network: Network,
    task: str,
    batches: tuple[int, ...],
    compare: Callable[..., Comparison],
    settings: Settings,
    results: Results,
    progress: Progress,
) -> None:
    # Compiling the networks outside the set would double the time of a run.
    modes = modes_for(network, compiled=settings.compiled and network.name not in OUTSIDE)
    for n in _batches(network, batches):
        progress.step(f"{task} of {network.name} at batch {n}")
        comparison = compare(network, n, modes, steps=settings.steps)
        modes = tuple(mode for mode in modes if mode.name not in comparison.too_slow)
        results.comparisons.append(comparison)
        torch.compiler.reset()


def _measure_processes(
    networks: list[Network], settings: Settings, results: Results, progress: Progress
) -> None:
    n = settings.batches[-1]
    for network in _in_set(networks):
        progress.step(f"memory of {network.name} at batch {n}")
        name = network.name
        ours = run_child("train-dptrain", name, n, NUMBA_NRT_STATS="1")
        theirs = run_child("train-torch", name, n)
        results.children.append({"network": name, "batch_size": n, **ours, **theirs})
    name, n = DEFAULT_RUN
    progress.step("compiling the default run")
    cold, warm = compile_times(name, n)
    results.children.append({"network": name, "batch_size": n, "cold_s": cold, "warm_s": warm})
