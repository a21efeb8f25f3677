"""What a training run writes to TensorBoard in addition to its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain.backends.replica import group_outputs
from dptrain.measure.tensorboard import TensorBoard
from dptrain.plan.plan import Plan
from dptrain.training.settings import Settings
from dptrain.training.spec import JobSpec

if TYPE_CHECKING:
    from dptrain.training.job import Job

TIMES = "time/"
"""Beginning of the tags of times of stages and parts of a step, in milliseconds."""

SAMPLES = 64
"""Samples whose activations are summarised."""

SHOWN = ("model", "data", "optimisation", "parallelism")
"""Groups of settings that are hyperparameters."""


def hyperparameters(spec: JobSpec) -> dict[str, Any]:
    """Return the settings of a job that decide about its results and its speed."""
    shown = [field.name for field in fields(Settings) if field.metadata.get("group") in SHOWN]
    values = {name: getattr(spec, name) for name in ("ranks", *shown) if hasattr(spec, name)}
    return {name: value for name, value in values.items() if value not in (None, "")}


def layer_times(plan: Plan, times_ms: Mapping[str, float | None]) -> dict[str, float]:
    """Return milliseconds per step by layer.

    Args:
        plan: of the steps.
        times_ms: by tag, `TIMES` and the name of a stage; None if nothing was timed.

    Returns:
        The time of layers that are computed together is that of the first one with parameters, or
        of the first one if none has parameters.
    """
    totals: dict[str, float] = {}
    for stage in plan.stages:
        totals[stage.group] = totals.get(stage.group, 0.0) + (times_ms.get(TIMES + stage.name) or 0)
    found = {}
    for group in plan.groups:
        weighted = [node for node in group.nodes if node.parameters]
        found[(weighted or group.nodes)[0].name] = totals.get(group.name, 0.0)
    return found


def layer_memory(plan: Plan) -> dict[str, int]:
    """Return the bytes of the outputs of layers, for the largest minibatch of a rank.

    Of layers that are computed together, only the last one has an output in memory.
    """
    last = [group.nodes[-1].name for group in plan.groups]
    return {name: plan.buffers[plan.resolve(name)].nbytes for name in last}


def write_activations(board: TensorBoard, job: Job, step: int) -> None:
    """Write histograms of the outputs of layers, and their share of zeros.

    The samples are evenly spaced ones of the validation data, or of the training data if there is
    none. This runs on one rank, between steps.
    """
    samples = job.dataset.validation or job.dataset.train
    count = min(SAMPLES, job.plan.batch_size, len(samples))
    indices = np.arange(count, dtype=np.int64) * len(samples) // count
    x = np.zeros((count, *job.dataset.input_shape), np.float32)
    kind = np.float32 if job.dataset.target_shape else np.int32
    samples.read(indices, x, np.zeros((count, *job.dataset.target_shape), kind))
    for name, values in group_outputs(job.replica, x):
        board.histogram(step, f"activations/{name}", values)
        board.record({"step": step, f"zeros/{name}": float((values == 0.0).mean())})
