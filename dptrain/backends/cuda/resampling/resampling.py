"""Padding, resizing and parts of maps; see ``resampling.cu``."""

from __future__ import annotations

import math

import numpy as np

from dptrain.backends.cuda.device.launching import launch
from dptrain.backends.cuda.operation import SingleLayerOperation
from dptrain.backends.replica import Context, Kernel
from dptrain.backends.resampling import tap_arrays
from dptrain.network.rearranging import Resampling


class ResamplingOperation(SingleLayerOperation[Resampling]):
    """y = R x Cᵀ, and dx = Rᵀ dy C."""

    def forward(self) -> Kernel:
        return self._stage("x", "y", backward=False)

    def backward(self) -> Kernel:
        return self._stage("dy", "dx", backward=True)

    def _stage(self, source: str, target: str, *, backward: bool) -> Kernel:
        x, y = self.arrays[source], self.arrays[target]
        taps = tap_arrays(self.layer, self.group.head.input_shape, backward=backward)
        arrays = []
        for values in (values for axis in taps for values in axis):
            arrays.append(self.device.zeros(values.shape, values.dtype))
            self.device.upload(arrays[-1], values)
        sizes = map(np.int32, (*x.shape[1:3], *y.shape[1:]))
        width = self.vector_width(y.shape[-1])
        function = self.function("resampling.cu", "resample", VECTOR=width)
        arguments = x, y, *arrays, *sizes
        size = math.prod(y.shape[1:])

        def run(context: Context) -> None:
            count = context.n * size
            launch(function, count // width, *arguments, np.int32(count))

        return run
