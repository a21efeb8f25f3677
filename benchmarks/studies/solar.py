"""Study B's convolutional network over batch sizes, in training."""

from __future__ import annotations

from benchmarks.studies.measuring import CPU, GPU, Context, Values, measurement
from benchmarks.studies.perceptrons import timed
from dptrain.backends import load_backend
from dptrain.experiments.cases import TRAINING, Case

BATCHES = (2, 8, 32, 64, 128, 256, 512, 1024)
GPU_BATCHES = (*BATCHES, 2048)
MAPS = 145_028
"""Maps that study B fitted in an epoch."""


def _measure(context: Context, backend: str, threads: int, batches: tuple[int, ...]) -> Values:
    precision = next(iter(load_backend(backend).precisions))
    budget_s = 0.05 if context.quick else 1.0
    rows = []
    for batch in batches[:2] if context.quick else batches:
        rows.append(timed(Case("solar", TRAINING, batch, backend, precision, threads),
                          budget_s=budget_s))  # fmt: skip
        context.say(f"batch {batch}: {rows[-1].get('median_ms', 0):.3f} ms")
    return {"threads": threads, "precision": precision, "maps": MAPS, "rows": rows}


@measurement("solar", CPU, "B1 B7 Q12 Q20 Q26 Q30", many_cores=True)
def solar(context: Context) -> Values:
    """Time training steps on all cores."""
    return _measure(context, "numba", context.threads, BATCHES)


@measurement("solar-gpu", GPU, "B1 B7 Q12 Q20 Q26 Q30")
def solar_on_gpu(context: Context) -> Values:
    """Time training steps on a GPU in fp32."""
    return _measure(context, "cuda", 1, GPU_BATCHES)
