"""Check that a step of dptrain is right, in the same program that is timed afterwards.

The reference is PyTorch in float64 on the same numbers. The allowed error is measured (see
`benchmarks.check`): the reference runs again with all inputs and outputs of layers with weights
changed at random by up to the rounding error of the precision.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.check import Check, Expected, judge
from benchmarks.gpu.ours import LEARNING_RATE, Step
from dptrain.network import Network

OPERAND = {"fp32": 0.0, "tf32": 2.0**-11, "bf16": 2.0**-8}
"""Relative rounding error of an operand: TF32 stores 10 mantissa bits, bfloat16 7. In fp32 only
sums round, which `benchmarks.check.rounding` counts."""

CHECKED_RATE = 0.1
"""Learning rate of the step whose update is compared."""


def check_step(network: Network, step: Step, expected: Expected) -> list[Check]:
    """Check loss, output and gradients of a repeated step, and its parameter update."""
    # The first step can launch kernels one by one. Later steps launch the graph that is timed.
    for _ in range(3):
        step.start()
    results = step.results()
    found = judge(network.name, len(step.x), results, expected)
    return [found, check_update(network, step)]


def check_update(network: Network, step: Step) -> Check:
    """Check that a step changes every parameter by −rate · (gradient + decay · parameter)."""
    before = step.parameters
    step.set_rate(CHECKED_RATE)
    step.start()
    gradients, after = step.results(), step.parameters
    step.set_rate(LEARNING_RATE)
    decays = {parameter.name: parameter.weight_decay for parameter in network.parameters}
    errors = {
        name: update_error(before[name], gradients[name], after[name], decay)
        for name, decay in decays.items()
    }
    worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    # Two roundings of the product and its sum with the decay, two of the step itself.
    return Check(
        network.name, len(step.x), f"update of {worst}", errors[worst], 4 * 2.0**-24
    )  # fmt: skip


def update_error(
    before: NDArray[Any], gradient: NDArray[Any], after: NDArray[Any], decay: float
) -> float:
    """Return the error of a parameter after an update, relative to parameter and change."""
    old = before.astype(np.float64)
    movement = CHECKED_RATE * (gradient.astype(np.float64) + decay * old)
    size = np.linalg.norm(old) + np.linalg.norm(movement)
    distance = np.linalg.norm(after - (old - movement))
    return float(distance / size) if size else float(distance)
