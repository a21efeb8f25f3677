"""Activations by cuDNN: layers of their own, and the backward pass of fused ones."""

from __future__ import annotations

from dptrain.backends.cuda.device.device import Array
from dptrain.backends.cuda.operation import SingleLayerOperation
from dptrain.backends.cudnn.primitives import RELU, SIGMOID
from dptrain.backends.cudnn.replica import CudnnReplica, primitive_calls
from dptrain.backends.replica import Kernel
from dptrain.network.activations import ReLU, Sigmoid
from dptrain.network.elementwise import Activation

MODES = {ReLU: RELU, Sigmoid: SIGMOID}
"""Modes of cuDNN by layer."""


def relu_backward(replica: CudnnReplica, dy: Array, y: Array) -> Kernel:
    """Return the stage that replaces dy by the gradient before a ReLU with output y.

    CuDNN also reads the ReLU's input, which fused convolutions do not store. y takes its place:
    both are positive for the same elements.
    """
    calls = primitive_calls(replica, "Activation")
    described = (replica.engines.library.primitives.activation(RELU),)
    return calls.backward(described, y, dy, y, dy)


class CudnnActivation(SingleLayerOperation[Activation]):
    """ReLU or Sigmoid; see `relu_backward` for what backward reads."""

    reads = ("y",)
    replica: CudnnReplica

    def forward(self) -> Kernel:
        calls = primitive_calls(self.replica, "Activation")
        return calls.forward(self._described, self.arrays["x"], self.arrays["y"])

    def backward(self) -> Kernel:
        a, calls = self.arrays, primitive_calls(self.replica, "Activation")
        # The derivatives of both are functions of y.
        return calls.backward(self._described, a["y"], a["dy"], a["y"], a["dx"])

    @property
    def _described(self) -> tuple[object, ...]:
        primitives = self.replica.engines.library.primitives
        return (primitives.activation(MODES[type(self.layer)]),)
