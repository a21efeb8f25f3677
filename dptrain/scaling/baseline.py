"""What rank 0 needs alone: the T(1) that scaling efficiencies are measured against.

Weak scaling keeps the work of a rank: E = T(1) / T(p), where T(1) is the time rank 0 needs for its
own share of the minibatch while the other ranks rest. Strong scaling keeps the minibatch:
E = T(1) / (p · T(p)), where T(1) is the time rank 0 needs for all of it. T(p) is the whole step in
training: waiting for data, computing, communication and update.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.base import Backend
from dptrain.data.base import Samples
from dptrain.plan.plan import TARGET, Plan, make_plan
from dptrain.scaling.statistics import Estimate, ratio_of_medians

WARM_UP = 3
"""Steps before the clock counts: the first runs load code and touch memory for the first time."""


@dataclass(frozen=True)
class Baseline:
    """Nanoseconds of each timed step of rank 0 alone; empty where nothing was measured.

    Attributes:
        weak: with the samples of one rank.
        strong: with the whole minibatch.
    """

    weak: NDArray[np.int64]
    strong: NDArray[np.int64]


def time_alone(
    backend: Backend, plan: Plan, samples: Samples, batch_size: int, *, steps: int, seed: int
) -> NDArray[np.int64]:
    """Time training steps of a replica of its own; the job's parameters are not touched.

    Args:
        backend: what computes.
        plan: the job's plan; the timed one differs in its batch size alone.
        samples: where the batch is read from.
        batch_size: samples a step.
        steps: timed steps, after `WARM_UP` others.
        seed: of the parameters.

    Returns:
        Nanoseconds a step, int64 (steps,): copying the batch in, forward, backward, update.
    """
    own = make_plan(
        plan.network,
        backend,
        batch_size,
        precision=plan.precision,
        optimizer=plan.optimizer,
        threads=plan.setting.threads,
    )
    replica = backend.compile(own, seed=seed)
    target = own.buffers[TARGET]
    x = np.zeros((batch_size, *plan.network.input_shape), np.float32)
    y = np.zeros(target.shape, target.dtype if target.dtype == "int32" else "float32")
    samples.read(np.arange(batch_size, dtype=np.int64) % len(samples), x, y)
    times = np.zeros(WARM_UP + steps, np.int64)
    for i in range(len(times)):
        start = perf_counter_ns()
        replica.load(x, y, step=i)
        replica.run()
        replica.update(0.0)
        times[i] = perf_counter_ns() - start
    return times[WARM_UP:]


@dataclass(frozen=True)
class Efficiency:
    """Measured scaling efficiencies of a job.

    Attributes:
        weak, strong: with 95% intervals; None where no baseline was measured.
        possible: the most that weak efficiency can be where ranks share cores: cores / compute
            threads on the fullest node, at most 1.
    """

    weak: Estimate | None
    strong: Estimate | None
    possible: float


def efficiency(
    baseline: Baseline, step_times: NDArray[np.int64], size: int, *, possible: float
) -> Efficiency:
    """Efficiencies of `size` ranks whose steps took `step_times` nanoseconds each."""

    def ratio(alone: NDArray[np.int64], factor: float) -> Estimate | None:
        if not len(alone) or not len(step_times):
            return None
        return ratio_of_medians(alone, step_times, factor=factor)

    return Efficiency(ratio(baseline.weak, 1.0), ratio(baseline.strong, 1.0 / size), possible)
