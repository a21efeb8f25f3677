"""Lowering of the cudnn backend: the backend cuda's, but for convolutions."""

from __future__ import annotations

from functools import cached_property

from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.operations import Operation
from dptrain.backends.cudnn.convolution import Convolution
from dptrain.backends.cudnn.library import Library
from dptrain.backends.cudnn.replica import CudnnReplica
from dptrain.backends.replica import Replica
from dptrain.network.layers import Conv2d, Parameter
from dptrain.network.network import Node
from dptrain.plan.lowering import Group, Setting, Storage
from dptrain.plan.plan import Plan


def open_library() -> Library:
    """CuDNN on the GPU that is current.

    Raises:
        UserError: the library or its Python module is missing.
    """
    return Library()


def suits(node: Node) -> bool:
    """Whether cuDNN computes a layer: a convolution with as many zeros before a map as behind it.

    With others cuDNN 9.19 gave wrong gradients of weights (3 × 3, stride 3, maps of 8 × 7 with
    one more zero below than above; an H200, float32 and TF32).
    """
    if not isinstance(node.layer, Conv2d):
        return False
    return all(before == after for before, after in node.layer.pads(node.input_shape))


class CudnnBackend(CudaBackend):
    """Convolutions by cuDNN, everything else by kernels of our own."""

    name = "cudnn"

    @cached_property
    def library(self) -> Library:
        """cuDNN, loaded when it is first needed: planning works without it."""
        return open_library()

    def place(self, local_rank: int) -> str:
        identity = super().place(local_rank)
        self.library  # noqa: B018 - what is missing is said before anything is allocated
        return identity

    def operation(self, group: Group, setting: Setting) -> type[Operation]:
        return Convolution if suits(group.head) else super().operation(group, setting)

    def storage(self, node: Node, parameter: Parameter) -> Storage:
        """Weights of convolutions as (K, R, S, C), the layout of tensor cores."""
        if suits(node) and len(parameter.shape) == 4:
            return Storage(parameter.shape, (0, 2, 3, 1))
        return super().storage(node, parameter)

    def allocate(self, plan: Plan, *, seed: int) -> Replica:
        device = self.device  # First, for cuDNN takes the GPU that is current.
        return CudnnReplica(self, plan, seed=seed, device=device, library=self.library)
