"""Study B's thirty perceptrons: training steps and forward passes of 1,000 rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.studies.measuring import CPU, GPU, Context, Values, measurement
from benchmarks.studies.networks import perceptron_names
from dptrain.backends import load_backend
from dptrain.experiments.cases import INFERENCE, TRAINING, Case
from dptrain.experiments.measuring import Result, measure
from dptrain.network import get_network

BATCH = 1000
LARGEST_ON_CPU = 110_000_000
"""Parameters of the largest network on a CPU. Study B did not run the two larger ones either: a
step of 414 million parameters needs 6.6 GB and 2.5 TFLOP."""
OTHER_BATCHES = (100, 500)
"""Further batch sizes of study B, measured for some networks."""
SOME = ("mlp-50", "mlp-800-400", "mlp-1600-800-416")


def timed(
    case: Case,
    *,
    budget_s: float,
    memory: int | None = None,
) -> dict[str, Any]:
    """Return the result of a case of `dptrain bench` as values for JSON.

    Args:
        case: what is timed.
        budget_s: seconds of timed runs; a run that takes longer is made once.
        memory: limit of memory in bytes; None for the free memory.
    """
    network, backend = get_network(case.network), load_backend(case.backend)
    backend.choose_device(0)
    return brief(measure(case, network, backend, budget_s=budget_s, memory=memory))


def brief(result: Result) -> dict[str, Any]:
    """Return the values of a result that the page uses."""
    found: dict[str, Any] = {
        "network": result.network, "task": result.task, "samples": result.samples,
        "parameters": result.parameters, "why": result.why, "needed_bytes": result.needed_bytes,
    }  # fmt: skip
    if result.timing is not None:
        time_ms = result.timing.time_ms
        found |= {
            "median_ms": time_ms.median, "q1_ms": time_ms.q1, "q3_ms": time_ms.q3,
            "n": time_ms.n, "samples_per_s": result.samples_per_s,
            "gflops": result.gflops,
        }  # fmt: skip
    return found


def _measure(context: Context, backend: str, threads: int, largest: int | None) -> Values:
    names = perceptron_names()
    if largest is not None:
        names = [name for name in names if get_network(name).num_parameters <= largest]
    if context.quick:
        names = names[:3]
    budget_s = 0.05 if context.quick else 0.4
    precision = next(iter(load_backend(backend).precisions))
    rows = []
    for name in names:
        is_large = get_network(name).num_parameters > LARGEST_ON_CPU
        cases = [Case(name, task, BATCH, backend, precision, threads)
                 for task in ((TRAINING,) if is_large else (TRAINING, INFERENCE))]  # fmt: skip
        if name in SOME:
            cases += [Case(name, TRAINING, n, backend, precision, threads) for n in OTHER_BATCHES]
        for case in cases:
            rows.append(timed(case, budget_s=budget_s))
        context.say(f"{name}: {rows[-1].get('median_ms', 0):.3f} ms")
    return {"batch": BATCH, "threads": threads, "precision": precision, "rows": rows}


@measurement("perceptrons", CPU, many_cores=True)
def perceptrons(context: Context) -> Values:
    """Time the perceptrons on all cores."""
    return _measure(context, "numba", context.threads, LARGEST_ON_CPU)


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
                case = Case(name, TRAINING, BATCH, "numba", "fp32", count)
                row = timed(case, budget_s=0.2)
                first = found.setdefault(f"{name}, threads {count}", {**row, "medians_ms": []})
                first["medians_ms"].append(row["median_ms"])
                first["median_ms"] = float(np.median(first["medians_ms"]))
        context.say(name)
    return {"batch": BATCH, "counts": counts, "steps": found}


@measurement("perceptrons-gpu", GPU)
def perceptrons_on_gpu(context: Context) -> Values:
    """Time the perceptrons on a GPU in fp32."""
    return _measure(context, "cuda", 1, None)
