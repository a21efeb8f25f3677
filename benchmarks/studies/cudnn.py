"""Times of cuDNN in several settings, and of PyTorch, next to our kernels.

The `cudnn` backend trains with engines whose results are reproducible and whose products of fp32
are not rounded to TF32. Other settings exist only here: they show how fast cuDNN is at its best.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from benchmarks.gpu.clock import Program, take_turns
from benchmarks.gpu.compiling import UNFUSED, Request
from benchmarks.gpu.ours import Step
from benchmarks.studies.compiling import BACKENDS, BATCHES, PRECISION, STACKS, make
from benchmarks.studies.measuring import GPU, Context, Values, measurement
from benchmarks.studies.networks import STUDY_A, find
from benchmarks.studies.store import PARTIAL
from benchmarks.timing import Series, quartiles
from dptrain.backends.cudnn.backend import CudnnBackend
from dptrain.backends.cudnn.engines import REPRODUCIBLE, TENSOR_CORE_NOTES, EngineFilter
from dptrain.batch import Batch
from dptrain.measure.layers import time_layers
from dptrain.network import Network
from dptrain.network.random_batch import random_batch

EXACT, ALL, BEST, PYTORCH = "cudnn", "cudnn, all engines", "cudnn, best", "PyTorch"
ALL_FP32 = EngineFilter((), TENSOR_CORE_NOTES, workspace_bytes=4 << 30, timed=16)
"""PyTorch times the first 10 engines in cuDNN's order."""
STEP_BATCH = 32
SETTINGS: Mapping[str, EngineFilter] = MappingProxyType({
    EXACT: REPRODUCIBLE,
    ALL: ALL_FP32,
    BEST: replace(ALL_FP32, fp32_excluded=()),
})  # fmt: skip
"""Engines by setting: those of training; also those whose results vary or that compute by FFT or
large Winograd tiles; also those on tensor cores, which round float32 to TF32."""


@contextmanager
def engines_of(setting: str) -> Iterator[None]:
    """Let the cudnn backend use the engines of a setting, in replicas that the context makes."""
    before = CudnnBackend.allowed
    CudnnBackend.allowed = SETTINGS[setting]
    try:
        yield
    finally:
        CudnnBackend.allowed = before


def values_of(series: Series) -> dict[str, Any]:
    """Return the times of blocks as values for JSON; blocks of the same number are neighbours."""
    us = [1e3 * each for each in series.medians]
    return {"median_us": 1e3 * series.median, "quartiles_us": list(quartiles(us)),
            "blocks_us": [round(each, 3) for each in us]}  # fmt: skip


def _steps(network: Network, batch: int) -> dict[str, Any]:
    """Return times of a step by program, and the engines that cuDNN uses, by setting."""
    steps = {"cuda": Step(network, "cuda", PRECISION, batch)}
    for setting in SETTINGS:
        with engines_of(setting):
            steps[setting] = Step(network, "cudnn", PRECISION, batch)
    programs = {name: step.program for name, step in steps.items()}
    programs |= _torch_programs(network, batch)
    found: dict[str, Any] = {name: values_of(each) for name, each in take_turns(programs).items()}
    engines = {name: dict(steps[name].replica.notes) for name in SETTINGS}
    return {"network": network.name, "batch": batch, "engines": engines, **found}


def _torch_programs(network: Network, batch: int) -> dict[str, Program]:
    """Return PyTorch's steps in CUDA graphs: in fp32, and in TF32, each in two layouts."""
    from benchmarks.batch import random_batch
    from benchmarks.gpu.peers.theirs import TorchProgram, modes_for

    x, y = random_batch(network, batch)
    return {
        f"{PYTORCH} {mode.name}": TorchProgram(network, x, y, mode).program
        for precision in ("fp32", "tf32")
        for mode in modes_for(network, precision, compiled=False)[1:]
    }


@measurement("steps-gpu", GPU, package="torch")
def steps_on_gpu(context: Context) -> Values:
    """Time steps of study A's networks: own kernels, cuDNN in three settings, PyTorch."""
    rows = []
    for name in STUDY_A:
        rows.append({**_steps(find(name), STEP_BATCH), "network": name})
        gc.collect()
        times = {n: v["median_us"] for n, v in rows[-1].items() if isinstance(v, dict)
                 and "median_us" in v}  # fmt: skip
        context.say(f"{name}: " + ", ".join(f"{n} {us:.1f} µs" for n, us in times.items()))
        context.keep({"precision": PRECISION, "rows": rows, PARTIAL: True})
    return {"precision": PRECISION, "rows": rows}


def time_alone(network: Network, batch: int) -> list[dict[str, Any]]:
    """Return the times of each layer alone in ms, by own kernels, settings of cuDNN and PyTorch."""
    from benchmarks.gpu.peers.torch_layers import torch_layer_times

    options: dict[str, Any] = {"batch_size": batch, "precision": PRECISION, "fused": False}
    rows = {
        (row.layers, row.direction): {
            "layer": row.layers, "direction": row.direction, "flops": row.flops,
            **{b: asdict(t) for b, t in row.by_backend.items()},
        }
        for row in time_layers(network, ("cuda", EXACT), **options).rows
    }  # fmt: skip
    for setting in (ALL, BEST):
        with engines_of(setting):
            timed = time_layers(network, ("cudnn",), **options)
        for each in timed.rows:
            if (key := (each.layers, each.direction)) in rows:
                rows[key][setting] = asdict(each.by_backend["cudnn"])
    for key, us in torch_layer_times(network, batch, PRECISION).items():
        if key in rows:
            rows[key][PYTORCH] = {"median": us / 1e3}
    return list(rows.values())


@measurement("sizes-gpu", GPU, package="torch")
def sizes_on_gpu(context: Context) -> Values:
    """Time a convolution of several sizes with own kernels, with cuDNN and with PyTorch."""
    rows: list[dict[str, Any]] = []
    for size, filters in STACKS:
        for batch in BATCHES:
            rows += [
                {**row, "size": size, "filters": filters, "batch": batch}
                for row in time_alone(find(f"stack-{size}-{filters}"), batch)
                if row["layer"] == "conv2"
            ]
            context.say(f"{size}×{size}, {filters} filters, batch {batch}")
    return {"precision": PRECISION, "rows": rows}


@measurement("layers-gpu", GPU, package="torch")
def layers_on_gpu(context: Context) -> Values:
    """Time each layer of the larger network alone, for one image and for 32."""
    found: dict[str, Any] = {}
    for batch in BATCHES:
        found[f"batch {batch}"] = time_alone(find("larger"), batch)
        context.say(f"batch {batch}")
    found["host, batch 1"] = {b: _host_times(b) for b in BACKENDS}
    return found


def _host_times(backend: str, repeats: int = 100) -> dict[str, float]:
    """Return the milliseconds after which the call of each stage returns, without waiting."""
    replica = make(Request("larger", backend, 1, PRECISION, form=UNFUSED))
    x, y = random_batch(replica.plan.network, 1)
    replica.load(Batch.of(x, y), training=True)
    found = {}
    for stage, kernel in replica.stages:
        call = partial(kernel, replica.context)
        times = []
        for _ in range(repeats):
            begin = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - begin) / 1e6)
            replica.memory.synchronize()
        found[stage.name] = float(np.median(times))
    return found
