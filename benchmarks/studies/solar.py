"""Study B's convolutional network over batch sizes, in training."""

from __future__ import annotations

from typing import Any

from benchmarks.studies.measuring import CPU, Context, Values, measurement
from benchmarks.studies.perceptrons import add_round, timed
from dptrain.experiments.cases import TRAINING

BATCHES = (2, 8, 32, 64, 128, 256, 512, 1024)
GPU_BATCHES = (*BATCHES, 2048)
MAPS = 145_028
"""Maps that study B fitted in an epoch."""


ROUNDS = 5


@measurement("solar", CPU, many_cores=True, also_gpu=True)
def solar(context: Context) -> Values:
    """Time training steps on all cores or on a GPU, each batch size once in every round."""
    budget_s, rounds = (0.05, 1) if context.quick else (0.5, ROUNDS)
    batches = GPU_BATCHES if context.on_gpu else BATCHES
    rows: dict[int, dict[str, Any]] = {}
    for number in range(rounds):
        for batch in batches[:2] if context.quick else batches:
            row = timed(context, "solar", TRAINING, batch, budget_s=budget_s)
            first = rows.setdefault(batch, {**row, "medians_ms": []})
            add_round(first, row)
            context.say(f"round {number + 1}, batch {batch}: {row.get('median_ms')} ms")
    return {"threads": context.threads, "precision": context.precision, "maps": MAPS,
            "rows": list(rows.values())}  # fmt: skip
