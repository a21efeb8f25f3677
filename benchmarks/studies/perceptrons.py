"""Study B's thirty perceptrons: training steps and forward passes of 1,000 rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.studies.measuring import CPU, Context, Values, measurement
from benchmarks.studies.networks import perceptron_names
from dptrain.backends import load_backend
from dptrain.experiments.cases import INFERENCE, TRAINING, Case
from dptrain.experiments.measuring import measure
from dptrain.network import get_network

BATCH = 1000
LARGEST_ON_CPU = 110_000_000
"""Parameters of the largest network on a CPU. Study B did not run the two larger ones either: a
step of 414 million parameters needs 6.6 GB and 2.5 TFLOP."""


def timed(
    context: Context, name: str, task: str, samples: int, *, budget_s: float, threads: int = 0
) -> dict[str, Any]:
    """Return the result of a case of `dptrain bench` as values for JSON.

    Args:
        context: the machine.
        name: the network.
        task: training or inference.
        samples: batch size.
        budget_s: seconds of timed runs; a run that takes longer is made once.
        threads: number of compute threads; 0 for those of the context.
    """
    network, backend = get_network(name), load_backend(context.backend)
    backend.choose_device(0)
    threads = threads or context.threads
    case = Case(name, task, samples, context.backend, context.precision, threads)
    result = measure(case, network, backend, budget_s=budget_s, memory=None)
    found: dict[str, Any] = {
        "network": name, "task": task, "samples": samples, "parameters": result.parameters,
        "why": result.why, "needed_bytes": result.needed_bytes,
    }  # fmt: skip
    if result.timing is not None:
        time_ms = result.timing.time_ms
        found |= {
            "median_ms": time_ms.median, "q1_ms": time_ms.q1, "q3_ms": time_ms.q3,
            "n": time_ms.n, "samples_per_s": result.samples_per_s, "gflops": result.gflops,
        }  # fmt: skip
    return found


def add_round(row: dict[str, Any], again: dict[str, Any]) -> None:
    """Add the median of another round to a row."""
    if "median_ms" in again:
        row["medians_ms"].append(again["median_ms"])
        row["median_ms"] = float(np.median(row["medians_ms"]))


@measurement("perceptrons", CPU, many_cores=True, also_gpu=True)
def perceptrons(context: Context) -> Values:
    """Time the perceptrons on all cores or on a GPU."""
    sizes = {name: get_network(name).num_parameters for name in perceptron_names()}
    names = [name for name in sizes if context.on_gpu or sizes[name] <= LARGEST_ON_CPU]
    rows = []
    for name in names[:3] if context.quick else names:
        is_large = sizes[name] > LARGEST_ON_CPU
        for task in (TRAINING,) if is_large else (TRAINING, INFERENCE):
            rows.append(timed(context, name, task, BATCH, budget_s=0.05 if context.quick else 0.4))
        context.say(f"{name}: {rows[-1].get('median_ms', 0):.3f} ms")
    return {"batch": BATCH, "threads": context.threads, "precision": context.precision,
            "rows": rows}  # fmt: skip


ROUNDS = 5
SCALED = ("mlp-50", "mlp-800", "mlp-6400", "mlp-800-400", "mlp-1600-800-416", "mlp-3200-1600")


@measurement("perceptrons-by-threads", CPU, many_cores=True)
def perceptrons_by_threads(context: Context) -> Values:
    """Time training steps of some perceptrons with 1, 4 and all threads."""
    counts = sorted({n for n in (1, 4, context.threads) if n <= context.threads})
    found: Values = {}
    for name in SCALED[:1] if context.quick else SCALED:
        for _ in range(1 if context.quick else ROUNDS):
            for count in counts:
                row = timed(context, name, TRAINING, BATCH, budget_s=0.2, threads=count)
                first = found.setdefault(f"{name}, threads {count}", {**row, "medians_ms": []})
                add_round(first, row)
        context.say(name)
    return {"batch": BATCH, "counts": counts, "steps": found}
