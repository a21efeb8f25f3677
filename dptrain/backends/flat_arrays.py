"""The flat arrays of a replica: parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dptrain.backends.memory import Memory
    from dptrain.plan.plan import Plan


@dataclass(frozen=True)
class FlatArrays:
    """The flat arrays of a replica, in the layout of `dptrain.plan.flat.FlatLayout`.

    Attributes:
        parameters: (size,).
        gradients: (gradient slots, pitch), see `FlatLayout.gradient_pitch`; (gradient slots, 0) in
            a plan without training.
        state: optimizer state by name, each (trained size,).
        squares: float64 (rows, trained size / 16), sums of squares of every 16 elements: of the
            gradient for clipping, and of the parameters and the gradient for rules that scale
            layers; None without either, and in the memory of a device.
        is_owner: True if this process sets the initial parameters; False if it shares the
            parameters with another process that does.
        is_shared: True if other processes use the same parameters.
    """

    parameters: NDArray[Any]
    gradients: NDArray[Any]
    state: Mapping[str, NDArray[Any]]
    squares: NDArray[np.float64] | None = None
    is_owner: bool = True
    is_shared: bool = False

    @classmethod
    def allocate(cls, plan: Plan, memory: Memory) -> FlatArrays:
        """Return zeros in `memory` that only this process uses."""
        size, slots = plan.trained.size, plan.gradient_slots
        length = plan.layout.gradient_pitch if plan.training else 0
        return cls(
            parameters=memory.zeros((plan.layout.size,), plan.dtype),
            gradients=memory.zeros((slots * length,), plan.dtype).reshape(slots, length),
            state={name: memory.zeros((size,), plan.dtype) for name in state_names(plan)},
            squares=None
            if memory.asynchronous or not uses_norms(plan)
            else np.zeros(plan.squares_shape),
        )


def uses_norms(plan: Plan) -> bool:
    """Return whether norms change gradients before updates."""
    return plan.training and plan.squares_shape[0] > 0


def state_names(plan: Plan) -> tuple[str, ...]:
    """Return the names of the arrays of the optimizer state that a plan needs."""
    return tuple(plan.optimizer.state) if plan.training else ()
