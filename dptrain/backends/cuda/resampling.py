"""Padding and resizing; see ``resampling.cu``."""

from __future__ import annotations

import math

import numpy as np

from dptrain.backends.axis_taps import axis_taps
from dptrain.backends.cuda.device.launching import launch
from dptrain.backends.cuda.operation import SingleLayerOperation
from dptrain.backends.replica import Context, Kernel
from dptrain.network.maps.resampling import Resampling
from dptrain.plan.lowering import Group


class ResamplingOperation(SingleLayerOperation[Resampling]):
    """Sums of rows and columns. The gradient has the transposed taps."""

    @classmethod
    def adds_gradient(cls, group: Group, local: str) -> bool:
        return True

    def forward(self) -> Kernel:
        return self._stage("x", "y", backward=False)

    def backward(self) -> Kernel:
        return self._stage("dy", "dx", backward=True)

    def _stage(self, source: str, target: str, *, backward: bool) -> Kernel:
        x, y = self.arrays[source], self.arrays[target]
        taps = [
            self.device.uploaded(values)
            for axis in axis_taps(self.group.head, backward=backward)
            for values in axis
        ]
        _, *shape = y.shape
        size, width = math.prod(shape), self.vector_width(shape[2])
        adding = self._adding(target)
        function = self.function("resampling.cu", "resample", VECTOR=width, **adding)
        arguments = x, y, *taps, *map(np.int32, (*x.shape[1:3], *shape))

        def run(context: Context) -> None:
            count = context.n * size
            launch(function, count // width, *arguments, np.int32(count))

        return run
