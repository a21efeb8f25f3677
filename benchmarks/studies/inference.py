"""Inference within a second by real calls, and the largest batch that fits, from plans."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.clock import Program, stream_timer
from benchmarks.studies.compiling import FORWARD, Request, make
from benchmarks.studies.measuring import CPU, GPU, Context, Values, measurement
from dptrain.backends import load_backend
from dptrain.describe import plan_for
from dptrain.experiments.memory_budget import MemoryBudget, largest_batch, memory_budget
from dptrain.machine import free_memory
from dptrain.network import get_network
from dptrain.network.random_batch import random_batch

SAMPLES = (2, 64, 512, 1024)
CALLS, WARM_UP = 20, 2
LIMIT_S = 1.0
MEMORIES_GB = (2, 4, 8)
"""Memory of study B's GPUs."""


def time_calls(replica: Any, samples: int, calls: int) -> dict[str, Any]:
    """Time calls of a user: from inputs in host memory to outputs in host memory."""
    x, _ = random_batch(replica.plan.network, samples)
    times = []
    for number in range(WARM_UP + calls):
        begin = time.perf_counter_ns()
        replica.forward(x)
        if number >= WARM_UP:
            times.append((time.perf_counter_ns() - begin) / 1e6)
    found = {
        "samples": samples, "median_ms": float(np.median(times)), "min_ms": min(times),
        "max_ms": max(times), "n": calls,
    }  # fmt: skip
    if replica.memory.on_gpu:
        # The inputs are on the device already.
        start = partial(replica.run_forward, loss=False)
        program = Program(start, stream_timer(replica.memory.stream))
        found["device_ms"] = float(np.median([program.time(5) for _ in range(7)])) / 1e3
    return found


def _measure(context: Context, backend: str, threads: int, samples: tuple[int, ...]) -> Values:
    precision = next(iter(load_backend(backend).precisions))
    rows = []
    for count in samples[:1] if context.quick else samples:
        replica = make(Request("solar", backend, count, precision, form=FORWARD), threads)
        rows.append(time_calls(replica, count, 5 if context.quick else CALLS))
        context.say(f"{count} maps: {rows[-1]['median_ms']:.3f} ms")
    rates = [row["samples"] / row["median_ms"] * 1e3 for row in rows]
    return {"threads": threads, "precision": precision, "rows": rows,
            "maps_within_1_s": int(max(rates) * LIMIT_S)}  # fmt: skip


@measurement("inference", CPU, many_cores=True)
def inference(context: Context) -> Values:
    """Time calls of the solar network on all cores."""
    return _measure(context, "numba", context.threads, SAMPLES)


@measurement("inference-gpu", GPU)
def inference_on_gpu(context: Context) -> Values:
    """Time calls of the solar network on a GPU."""
    return _measure(context, "cuda", 1, (*SAMPLES, 8192, 16384))


def _largest(backend: str, threads: int, context: Context) -> Values:
    chosen = load_backend(backend)
    chosen.choose_device(0)
    network, found = get_network("solar"), {}
    free = memory_budget(chosen)
    limits = {f"{size} GB": size * 10**9 for size in MEMORIES_GB}
    for name, limit in {**limits, "free memory": free.nbytes}.items():
        on_host = None if free.host_bytes is None else int(free_memory())
        budget = MemoryBudget(limit, on_host)
        for training in (True, False):
            make_plan = partial(
                _plan, network=network, backend=backend, threads=threads, training=training
            )
            largest = largest_batch(make_plan, budget)
            task = "training" if training else "inference"
            found[f"{name}, {task}"] = {
                "batch": largest.batch_size, "needed_bytes": largest.needed_bytes,
                "next_bytes": largest.next_bytes, "why": largest.why, "limit_bytes": limit,
            }  # fmt: skip
            context.say(f"{name}, {task}: {largest.batch_size:,}")
    return {"largest": found}


def _plan(batch_size: int, **settings: Any) -> Any:
    return plan_for(batch_size=batch_size, **settings)


@measurement("largest", CPU)
def largest(context: Context) -> Values:
    """Find the largest batches of the solar network from plans on the processor."""
    return _largest("numba", context.threads, context)


@measurement("largest-gpu", GPU)
def largest_on_gpu(context: Context) -> Values:
    """Find the largest batches of the solar network from plans on a GPU."""
    return _largest("cuda", 1, context)
