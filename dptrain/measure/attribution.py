"""Where a step went, over all ranks: the numbers behind the closing table and `summary.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dptrain.measure.recorder import DATA_WAIT, EXPOSED, HIDDEN, STEP, StepRecorder
from dptrain.plan.lowering import Phase
from dptrain.plan.plan import Plan


def rank_times(recorder: StepRecorder) -> dict[str, Any]:
    """What this rank tells the others: mean milliseconds by name, and its mean samples a step."""
    rows = recorder.timed_rows()
    means = rows.mean(axis=0) / 1e6 if len(rows) else np.zeros(len(recorder.names))
    return {
        "ms": dict(zip(recorder.names, means.tolist(), strict=True)),
        "samples": recorder.mean_samples(),
    }


@dataclass(frozen=True)
class Span:
    """Time of one name in a mean step, over the ranks.

    Attributes:
        mean_ms: mean over steps and ranks.
        slowest_ms, slowest_rank: the rank with the largest mean over steps.
        share: of the mean step.
    """

    mean_ms: float
    slowest_ms: float
    slowest_rank: int
    share: float


@dataclass(frozen=True)
class StageTime:
    """A stage of the plan with its time.

    Attributes:
        flops: operations for the mean number of samples a rank had.
        gflops: 10⁹ operations a second, from `flops` and the mean time.
        bytes_moved: buffers and parameters that the stage touches for a full batch, each once.
        note: what the backend says of how it is computed.
    """

    name: str
    group: str
    phase: str
    mean_ms: float
    slowest_ms: float
    slowest_rank: int
    share: float
    flops: float
    gflops: float
    bytes_moved: int
    note: str = ""


@dataclass(frozen=True)
class Attribution:
    """A mean step taken apart.

    Stages, data wait, exposed communication and `other` (bookkeeping between them) add up to the
    step. Hidden communication runs behind stages and is not a part of the sum.
    """

    step: Span
    stages: tuple[StageTime, ...]
    data_wait: Span
    exposed: Span
    hidden: Span
    other: Span


def attribute(
    plan: Plan, ranks: Sequence[Mapping[str, Any]], notes: Mapping[str, str] | None = None
) -> Attribution:
    """Combine what every rank measured.

    Args:
        plan: of the steps.
        ranks: `rank_times` in rank order.
        notes: of a replica, by the names of stages.
    """
    step_ms = float(np.mean([rank["ms"][STEP] for rank in ranks]))

    def span(values: Sequence[float]) -> Span:
        slowest = int(np.argmax(values))
        mean = float(np.mean(values))
        return Span(mean, float(values[slowest]), slowest, mean / step_ms if step_ms else 0.0)

    def named(name: str) -> Span:
        return span([rank["ms"][name] for rank in ranks])

    filled = float(np.mean([rank["samples"] for rank in ranks])) / plan.batch_size
    stages = []
    for stage in plan.stages:
        time = named(stage.name)
        flops = stage.flops * (1.0 if stage.phase is Phase.UPDATE else filled)
        rate = flops / time.mean_ms / 1e6 if time.mean_ms else 0.0
        stages.append(
            StageTime(
                stage.name,
                stage.group,
                stage.phase.value,
                **asdict(time),
                flops=flops,
                gflops=rate,
                bytes_moved=stage.bytes_moved,
                note=(notes or {}).get(stage.name, ""),
            )
        )
    parts = (*(stage.name for stage in plan.stages), DATA_WAIT, EXPOSED)
    rest = [rank["ms"][STEP] - sum(rank["ms"][name] for name in parts) for rank in ranks]
    return Attribution(
        named(STEP), tuple(stages), named(DATA_WAIT), named(EXPOSED), named(HIDDEN), span(rest)
    )
