"""Study A: agreement of implementations, and its GPU implementations against cuDNN."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

import dptrain
from benchmarks.gpu.clock import take_turns
from benchmarks.gpu.ours import Step
from benchmarks.gpu_kernels.gpu_ladder import measure_rungs
from benchmarks.ladder.layer import Layer
from benchmarks.studies.compiling import (
    BACKENDS,
    BATCHES,
    PRECISION,
    STACKS,
    UNFUSED,
    Request,
    make,
)
from benchmarks.studies.measuring import CPU, GPU, Context, Values, measurement
from benchmarks.studies.networks import STUDY_A, find
from dptrain.batch import Batch
from dptrain.measure.layers import time_layers
from dptrain.network.random_batch import random_batch

AGREEMENT_STEPS = 20


def compare(backends: dict[str, dict[str, Any]], networks: tuple[str, ...]) -> Values:
    """Train with the same initial parameters and batches; return differences from float64.

    Args:
        backends: arguments of `dptrain.make_replica` by name.
        networks: names of networks.
    """
    found: dict[str, Any] = {}
    for name in networks:
        network = find(name)
        batches = [dptrain_batch(network, seed) for seed in range(4)]
        exact = _train(network, batches, backend="reference", precision="fp64")
        for title, settings in backends.items():
            losses, changes = _train(network, batches, **settings)
            found[f"{name}, {title}"] = {
                "loss_difference": float(np.max(np.abs(losses / exact[0] - 1.0))),
                "first_step_difference": _distance(changes[0], exact[1][0]),
                "parameter_difference": _distance(changes[1], exact[1][1]),
            }
    return {"steps": AGREEMENT_STEPS, "networks": found}


def dptrain_batch(network: dptrain.Network, seed: int) -> tuple[Any, Any]:
    """Return a random batch of 32 samples."""
    from benchmarks.batch import random_batch as seeded_batch

    return seeded_batch(network, 32, seed)


def _distance(found: Any, wanted: Any) -> float:
    """Return the difference relative to the norm."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def _train(
    network: dptrain.Network, batches: Sequence[tuple[Any, Any]], **settings: Any
) -> tuple[Any, tuple[Any, Any]]:
    """Return the losses of some steps, and the change of all parameters by the first and by all."""
    replica = dptrain.make_replica(network, batch_size=32, **settings)

    def flat() -> Any:
        values = (np.array(value, np.float64) for value in dict(replica.parameters).values())
        return np.concatenate([value.ravel() for value in values])

    before, losses, first = flat(), [], None
    for step in range(AGREEMENT_STEPS):
        losses.append(replica.forward_backward(*batches[step % len(batches)]))
        replica.update(learning_rate=0.01)
        first = flat() - before if first is None else first
    return np.array(losses), (first, flat() - before)


@measurement("agreement", CPU, "A5 Q1")
def agreement(context: Context) -> Values:
    """Compare the implementations on the processor with float64."""
    backends: dict[str, dict[str, Any]] = {
        "reference": {"backend": "reference", "precision": "fp32"},
        "numba, 1 thread": {"backend": "numba"},
        f"numba, {context.threads} threads": {"backend": "numba", "threads": context.threads},
    }
    return compare(backends, ("smaller", "model0") if not context.quick else ("smaller",))


@measurement("agreement-gpu", GPU, "A5 Q1")
def agreement_on_gpu(context: Context) -> Values:
    """Compare the implementations on a GPU with float64."""
    return compare({name: {"backend": name} for name in BACKENDS}, ("smaller", "model0"))


@measurement("steps-gpu", GPU, "A2 A3 Q3 Q4")
def steps_on_gpu(context: Context) -> Values:
    """Time training steps of study A's networks with own kernels and with cuDNN, alternating."""
    rows: list[dict[str, Any]] = []
    for batch in BATCHES:
        for name in STUDY_A:
            steps = {b: Step(find(name), b, PRECISION, batch) for b in BACKENDS}
            found = take_turns({b: step.program for b, step in steps.items()})
            rows.append({
                "network": name, "batch": batch,
                **{b: {"median_us": laps.median, "quartiles_us": list(laps.quartiles)}
                   for b, laps in found.items()},
            })  # fmt: skip
            ours, theirs = (rows[-1][b]["median_us"] for b in BACKENDS)
            context.say(f"{name}, batch {batch}: {ours:.1f} µs, cuDNN {theirs:.1f} µs")
    return {"precision": PRECISION, "rows": rows}


@measurement("layers-gpu", GPU, "A4 Q5")
def layers_on_gpu(context: Context) -> Values:
    """Time each layer of the larger network alone, for one image and for 32."""
    found: dict[str, Any] = {}
    for batch in BATCHES:
        rows = time_layers(
            find("larger"), BACKENDS, batch_size=batch, precision=PRECISION, fused=False
        )
        found[f"batch {batch}"] = [
            {"layer": row.layers, "direction": row.direction,
             **{b: asdict(t) for b, t in row.by_backend.items()}}
            for row in rows
        ]  # fmt: skip
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


@measurement("sizes-gpu", GPU, "A3 Q4")
def sizes_on_gpu(context: Context) -> Values:
    """Time a convolution of several sizes with own kernels and with cuDNN."""
    rows = []
    for size, filters in STACKS:
        for batch in BATCHES:
            network = find(f"stack-{size}-{filters}")
            timed = time_layers(
                network, BACKENDS, batch_size=batch, precision=PRECISION, fused=False
            )
            for row in timed:
                if row.layers == "conv2":
                    times = {b: t.median for b, t in row.by_backend.items()}
                    rows.append({
                        "size": size, "filters": filters, "batch": batch,
                        "direction": row.direction, "flops": row.flops, **times,
                    })  # fmt: skip
            context.say(f"{size}×{size}, {filters} filters, batch {batch}")
    return {"precision": PRECISION, "rows": rows}


LADDER = {
    "larger:conv2": Layer(32, 32, 25, 25, 32, 3, padding=1),
    "cifar:conv2": Layer(32, 64, 12, 12, 64, 5, padding=2),
}


@measurement("ladder-gpu", GPU, "A6 A7 Q6 Q7 Q8")
def ladder_on_gpu(context: Context) -> Values:
    """Time every version of the matrix product and of the convolution."""
    from dptrain.backends.cuda.backend import open_device

    device = open_device(0)
    found: dict[str, Any] = {}
    for name, layer in LADDER.items():
        found[name] = {
            direction: [asdict(row) for row in measure_rungs(device, layer, direction, ("fp32",))]
            for direction in ("forward", "weights", "input")
        }
        context.say(name)
    return {"layers": found, "block_of_2500_threads": _launch_2500()}


def _launch_2500() -> str:
    """Launch a block of 50 × 50 threads; return what CUDA replies."""
    import cupy

    kernel = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
    try:
        kernel((1,), (50, 50), ())
    except cupy.cuda.driver.CUDADriverError as error:
        return f"refused: {error}"
    return "accepted"
