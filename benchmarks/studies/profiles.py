"""Study D's profile of inference by kind of operation, and the cost of profiling."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.compiling import LAYERS, Request
from benchmarks.step.timing_cost import TIMED, UNTIMED, measure
from benchmarks.studies.compiling import make
from benchmarks.studies.measuring import CPU, Context, Values, measurement, summary
from benchmarks.studies.networks import cifar_variants
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.network.random_batch import random_batch
from dptrain.plan.lowering import Phase
from dptrain.training.settings import GivenSettings

BATCH = 128
KINDS = {
    "conv": "Conv2D", "lrn": "LRN", "bias_add": "BiasAdd", "pool": "MaxPool", "relu": "Relu",
    "dense": "MatMul",
}  # fmt: skip
"""Operations of study D by the first part of a layer's name."""
PASSES = 30


def profile(replica: Replica, passes: int) -> dict[str, Any]:
    """Time the stages of forward passes, and sum them by kind of operation.

    Each pass runs all stages in order, as in inference, so that a stage finds in the caches what
    the stage before it left there. Times are CPU time divided by threads. On a GPU each stage is
    timed alone.
    """
    x, _ = random_batch(replica.plan.network, replica.plan.batch_size)
    replica.load(Batch.of(x), training=False)
    stages = [(stage, partial(kernel, replica.context)) for stage, kernel in replica.stages
              if stage.phase is Phase.FORWARD]  # fmt: skip
    kernels = [kernel for _, kernel in stages]
    times = _alone(replica, kernels) if replica.memory.on_gpu else _in_order(kernels, passes)
    moved = dict.fromkeys(KINDS.values(), 0)
    spreads: dict[str, list[list[float]]] = {kind: [] for kind in KINDS.values()}
    for (stage, _), own in zip(stages, times, strict=True):
        kind = kind_of(stage.group)
        spreads[kind].append(own)
        moved[kind] += stage.bytes_moved
    totals = {kind: np.sum(own, axis=0) for kind, own in spreads.items() if own}
    whole = np.sum(list(totals.values()), axis=0)
    found = {kind: summary(list(values)) for kind, values in totals.items()}
    sum_ms = sum(spread["median"] for spread in found.values())
    return {
        "total_ms": summary(list(whole)),
        "kinds": {
            kind: {**spread, "share": spread["median"] / sum_ms, "bytes_moved": moved[kind]}
            for kind, spread in found.items()
        },
    }


def kind_of(name: str) -> str:
    """Return study D's operation of a layer, by the name of the layer."""
    if name.endswith("_bias"):
        return KINDS["bias_add"]
    return KINDS[name.rstrip("0123456789")]


def _in_order(kernels: Sequence[Callable[[], None]], passes: int) -> list[list[float]]:
    # CPU time of one thread: on a busy machine it leaves out the time of other programs.
    clock, times = time.process_time_ns, [[0.0] * passes for _ in kernels]
    for number in range(-2, passes):
        for index, kernel in enumerate(kernels):
            begin = clock()
            kernel()
            if number >= 0:
                times[index][number] = (clock() - begin) / 1e6
    return times


def _alone(replica: Replica, kernels: Sequence[Callable[[], None]]) -> list[list[float]]:
    found = []
    for kernel in kernels:
        found.append([float(ms) for ms in replica.memory.times_ms(kernel)])
        kernel()
    shortest = min(map(len, found))
    return [own[:shortest] for own in found]


@measurement("profile", CPU, also_gpu=True)
def profile_of_variants(context: Context) -> Values:
    """Profile inference of study D's networks on one core, as its threads are unknown, or a GPU."""
    found = {}
    for name, network in cifar_variants().items():
        if context.quick and name != "stride 5":
            continue
        request = Request(network.name, context.backend, BATCH, context.precision, form=LAYERS)
        found[name] = profile(make(request), 5 if context.quick else PASSES)
        context.say(f"{name}: {found[name]['total_ms']['median']:.2f} ms")
    return {"batch": BATCH, "threads": 1, "precision": context.precision, "variants": found}


BLOCKS = 12


@measurement("profiling-cost", CPU, also_gpu=True)
def profiling_cost(context: Context) -> Values:
    """Time steps with and without times of each stage in alternating blocks: one core or a GPU."""
    batch, steps = (BATCH, 100) if context.on_gpu else (32, 4)
    chosen = GivenSettings(
        network="cifar", backend=context.backend, data="synthetic", crop=0, batch_size=batch,
        threads=1, steps=1_000_000,
    ).with_recipe()  # fmt: skip
    found = measure(chosen, 2 if context.quick else BLOCKS, steps, every=1)
    laps = {"without": found[UNTIMED], "with": found[TIMED]}
    return {
        "batch": batch, "threads": 1, "steps": steps,
        **{name: summary(values) for name, values in laps.items()},
        "ratio": summary([a / b for a, b in zip(laps["with"], laps["without"], strict=True)]),
    }  # fmt: skip
