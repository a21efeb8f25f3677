"""Whether a step of dptrain's is right, in the very program that is timed afterwards.

Exact is PyTorch in float64 on the same numbers. How far from it a step may be is measured, as
`benchmarks.check` says: the exact program runs again with every number that goes into a layer with
weights, and every one that comes out, changed at random by up to what the precision rounds off.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.check import Check, Expected, judge
from benchmarks.gpu.ours import LEARNING_RATE, Step
from dptrain.network import Network

OPERAND = {"fp32": 0.0, "tf32": 2.0**-11, "bf16": 2.0**-8}
"""Relative error of a rounded number: TF32 keeps 10 bits behind the leading one, bfloat16 keeps 7.
In fp32 what is left are sums, which `benchmarks.check.rounding` counts."""

CHECKED_RATE = 0.1
"""Learning rate of the step whose update is compared."""


def check_step(network: Network, step: Step, expected: Expected) -> list[Check]:
    """Loss, output and gradients of a repeated step, and how it moves the parameters."""
    # The first may start kernels one by one, later ones a graph of them: that is what is timed.
    for _ in range(3):
        step.start()
    results = step.results()
    found = judge(network.name, len(step.x), results, expected)
    return [found, check_update(network, step)]


def check_update(network: Network, step: Step) -> Check:
    """The parameter whose movement in one step is farthest from −rate · (gradient + decay)."""
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
    """Distance of a new parameter from the exact update, relative to parameter and movement."""
    old = before.astype(np.float64)
    movement = CHECKED_RATE * (gradient.astype(np.float64) + decay * old)
    size = np.linalg.norm(old) + np.linalg.norm(movement)
    distance = np.linalg.norm(after - (old - movement))
    return float(distance / size) if size else float(distance)
