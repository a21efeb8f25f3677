"""Inference within a second by real calls, and the largest batch that fits, from plans."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.clock import Program, stream_timer
from benchmarks.gpu.compiling import FORWARD, Request
from benchmarks.studies.compiling import make
from benchmarks.studies.measuring import CPU, Context, Values, measurement
from dptrain.backends import load_backend
from dptrain.describe import plan_for
from dptrain.experiments.memory_budget import MemoryBudget, largest_batch, memory_budget
from dptrain.machine import free_memory
from dptrain.network import get_network
from dptrain.network.random_batch import random_batch

SAMPLES, GPU_SAMPLES = (2, 64, 512, 1024), (8192, 16384)
CALLS, WARM_UP = 20, 2
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


@measurement("inference", CPU, many_cores=True, also_gpu=True)
def inference(context: Context) -> Values:
    """Time calls of the solar network on all cores or on a GPU."""
    samples, rows = (*SAMPLES, *(GPU_SAMPLES if context.on_gpu else ())), []
    for count in samples[:1] if context.quick else samples:
        request = Request("solar", context.backend, count, context.precision, form=FORWARD)
        replica = make(request, context.threads)
        rows.append(time_calls(replica, count, 5 if context.quick else CALLS))
        context.say(f"{count} maps: {rows[-1]['median_ms']:.3f} ms")
    return {"threads": context.threads, "precision": context.precision, "rows": rows}


@measurement("largest", CPU, also_gpu=True)
def largest(context: Context) -> Values:
    """Find the largest batches of the solar network from plans."""
    chosen = load_backend(context.backend)
    chosen.choose_device(0)
    network, found = get_network("solar"), {}
    on_host = None if memory_budget(chosen).host_bytes is None else int(free_memory())
    for size in MEMORIES_GB:
        for training in (True, False):
            make_plan = partial(
                _plan, network=network, backend=context.backend, threads=context.threads,
                training=training,
            )  # fmt: skip
            fits = largest_batch(make_plan, MemoryBudget(size * 10**9, on_host))
            name = f"{size} GB, {'training' if training else 'inference'}"
            found[name] = {
                "batch": fits.batch_size, "needed_bytes": fits.needed_bytes,
                "next_bytes": fits.next_bytes, "why": fits.why, "limit_bytes": size * 10**9,
            }  # fmt: skip
            context.say(f"{name}: {fits.batch_size:,}")
    return {"largest": found}


def _plan(batch_size: int, **settings: Any) -> Any:
    return plan_for(batch_size=batch_size, **settings)
