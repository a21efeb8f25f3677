"""A backend whose kernels do nothing.

A step with it takes the time that the loader, the engine and the recorder need.
Source of the idea: tinygrad's null device, ``tinygrad/runtime/ops_null.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.clipping import Clipping
from dptrain.backends.digests import DigestKernel
from dptrain.backends.flat_arrays import FlatArrays
from dptrain.backends.layer_scaling import LayerScaling
from dptrain.backends.numba.backend import NumbaBackend
from dptrain.backends.replica import Arrays, Context, GradientAddition, Kernel, Replica
from dptrain.plan.flat import CORRECT, LOSS
from dptrain.plan.lowering import Group, Phase
from dptrain.plan.plan import Plan

NULL_LOSS = 1.0
"""The loss of every step: finite, so that training continues."""


def _do_nothing(context: Context) -> None:
    pass


class NullBackend(NumbaBackend):
    """The plan of the numba backend, with kernels that do nothing."""

    name = "null"
    threaded = False

    def bind(
        self, group: Group, phases: Collection[Phase], arrays: Arrays, replica: Replica
    ) -> Mapping[Phase, Kernel]:
        return dict.fromkeys(phases, _do_nothing)

    def bind_loss(
        self,
        replica: Replica,
        output: NDArray[Any],
        target: NDArray[Any],
        gradient: NDArray[Any] | None,
        sums: NDArray[Any],
    ) -> Kernel:
        def write_constant_loss(context: Context) -> None:
            sums[LOSS], sums[CORRECT] = NULL_LOSS, 0.0

        return write_constant_loss

    def bind_additions(self, replica: Replica, additions: Sequence[GradientAddition]) -> Kernel:
        return _do_nothing

    def bind_update(self, replica: Replica, elements: slice) -> Kernel:
        return _do_nothing

    def bind_average(self, replica: Replica, elements: slice) -> Kernel:
        return _do_nothing

    def bind_clipping(
        self, replica: Replica, gradient: NDArray[Any], squares: NDArray[np.float64]
    ) -> Clipping:
        return Clipping(lambda: None, lambda factor: None)

    def bind_digests(
        self, replica: Replica, flat: NDArray[Any], bounds: NDArray[np.int64], first: int
    ) -> DigestKernel:
        return lambda: np.zeros(bounds.size - 1, np.uint64)

    def bind_scaling(
        self, replica: Replica, elements: slice, squares: Sequence[NDArray[np.float64]]
    ) -> LayerScaling:
        return LayerScaling(lambda number: None, lambda ratios: None)

    def bind_addition(
        self, replica: Replica, target: NDArray[Any], source: NDArray[Any], *, copies: bool = False
    ) -> Callable[[], None]:
        return lambda: None

    def allocate(self, plan: Plan, *, seed: int, arrays: FlatArrays | None = None) -> Replica:
        return NullReplica(self, plan, seed=seed, arrays=arrays)


class NullReplica(Replica):
    """A replica that copies no inputs."""

    def _load_input(self, x: NDArray[Any]) -> None:
        pass
