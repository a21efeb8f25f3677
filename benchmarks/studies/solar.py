"""Study B's convolutional network over batch sizes, in training."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.studies.measuring import CPU, GPU, Context, Values, measurement
from benchmarks.studies.perceptrons import timed
from dptrain.backends import load_backend
from dptrain.experiments.cases import TRAINING, Case

BATCHES = (2, 8, 32, 64, 128, 256, 512, 1024)
GPU_BATCHES = (*BATCHES, 2048)
MAPS = 145_028
"""Maps that study B fitted in an epoch."""


ROUNDS = 5


def _measure(context: Context, backend: str, threads: int, batches: tuple[int, ...]) -> Values:
    """Time each batch size once in every round."""
    precision = next(iter(load_backend(backend).precisions))
    budget_s, rounds = (0.05, 1) if context.quick else (0.5, ROUNDS)
    rows: dict[int, dict[str, Any]] = {}
    for number in range(rounds):
        for batch in batches[:2] if context.quick else batches:
            case = Case("solar", TRAINING, batch, backend, precision, threads)
            row = timed(case, budget_s=budget_s)
            median = row.get("median_ms")
            first = rows.setdefault(batch, {**row, "medians_ms": []})
            if median is not None:
                first["medians_ms"].append(median)
                first["median_ms"] = float(np.median(first["medians_ms"]))
            context.say(f"round {number + 1}, batch {batch}: {median} ms")
    return {"threads": threads, "precision": precision, "maps": MAPS, "rows": list(rows.values())}


@measurement("solar", CPU, many_cores=True)
def solar(context: Context) -> Values:
    """Time training steps on all cores."""
    return _measure(context, "numba", context.threads, BATCHES)


@measurement("solar-gpu", GPU)
def solar_on_gpu(context: Context) -> Values:
    """Time training steps on a GPU in fp32."""
    return _measure(context, "cuda", 1, GPU_BATCHES)
