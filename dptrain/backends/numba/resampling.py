"""Resampling of maps (N, H, W, C), and its operation."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.operations import Operation, each, grain_of
from dptrain.backends.numba.programs import StageKernel
from dptrain.backends.resampling import tap_arrays
from dptrain.native.jit import Items, kernel
from dptrain.network.rearranging import Resampling
from dptrain.plan.lowering import Access, Group, GroupNeeds, Phase, Setting

Array = NDArray[Any]


@kernel
def resample(items: Items, x: Array, y: Array, rows: Any, columns: Any) -> None:
    """y = R x Cᵀ for each sample and channel; items are rows of y.

    Rows and columns are those of R and C, see `dptrain.backends.resampling.TapArrays`.
    """
    height, channels = y.shape[1], np.uintp(y.shape[3])
    for item in range(items.start, items.stop):
        n, i = item // height, item % height
        for j in range(y.shape[2]):
            target = y[n, i, j]
            for c in range(channels):
                target[c] = 0.0
            for a in range(rows.first[i], rows.first[i + 1]):
                for b in range(columns.first[j], columns.first[j + 1]):
                    source = x[n, rows.source[a], columns.source[b]]
                    weight = rows.weight[a] * columns.weight[b]
                    for c in range(channels):
                        target[c] += weight * source[c]


class ResamplingOperation(Operation[Resampling]):
    """Padding, resizing and parts of maps."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        phases = {Phase.FORWARD: Access(("x",), ("y",))}
        if group.gradients:
            phases[Phase.BACKWARD] = Access(("dy",), ("dx",))
        return GroupNeeds(phases)

    def forward(self) -> StageKernel:
        """Return the stage that writes y."""
        return self._stage("x", "y", backward=False)

    def backward(self) -> StageKernel:
        """Return the stage that writes dx."""
        return self._stage("dy", "dx", backward=True)

    def _stage(self, source: str, target: str, *, backward: bool) -> StageKernel:
        x, y = self.arrays[source], self.arrays[target]
        rows, columns = tap_arrays(self.layer, self.group.head.input_shape, backward=backward)
        grain = grain_of(y.shape[2] * y.shape[3])
        launch = self.thread_pool.bind(resample, x, y, rows, columns, grain=grain)
        return each(launch, y.shape[1])
