"""The cudnn backend: the cuda backend with cuDNN's convolutions, poolings and activations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.device.device import Array
from dptrain.backends.cuda.operation import Operation
from dptrain.backends.cudnn.activation import MODES, CudnnActivation
from dptrain.backends.cudnn.convolution import CudnnConvolution
from dptrain.backends.cudnn.engines import REPRODUCIBLE
from dptrain.backends.cudnn.library import Library
from dptrain.backends.cudnn.pooling import CudnnPooling, pools
from dptrain.backends.cudnn.primitives import DATA_TYPES, find_dtypes
from dptrain.backends.cudnn.replica import CudnnReplica
from dptrain.backends.cudnn.softmax import bind_softmax_loss
from dptrain.backends.flat_arrays import FlatArrays
from dptrain.backends.replica import Kernel, Replica
from dptrain.network.activations import ReLU
from dptrain.network.combining import Add
from dptrain.network.layers import Conv2d, Parameter
from dptrain.network.losses import SoftmaxCrossEntropy
from dptrain.network.network import Node
from dptrain.plan.lowering import Explanation, Group, Phase, Setting, Storage
from dptrain.plan.plan import Plan


def open_library() -> Library:
    """Load cuDNN for the current GPU.

    Raises:
        UserError: the library or its Python module is missing.
    """
    return Library()


def supports(node: Node) -> bool:
    """Return whether cuDNN computes a layer: a convolution with symmetric padding, without groups.

    With asymmetric padding, cuDNN 9.19 computed wrong weight gradients (3 × 3, stride 3, input
    8 × 7 with one more row of padding below than above; H200, fp32 and tf32).
    """
    if not isinstance(node.layer, Conv2d) or node.layer.groups > 1:
        return False
    return all(before == after for before, after in node.layer.pads(node.input_shape))


class CudnnBackend(CudaBackend):
    """Training on an NVIDIA GPU with cuDNN for what it computes.

    These are convolutions and small poolings with symmetric padding, activations, and softmax in
    float32. Fully connected layers, sums, dropout, local response normalization, other losses and
    updates are kernels of the cuda backend.

    Attributes:
        allowed: engines that convolutions may use. Only benchmarks replace it.
    """

    name = "cudnn"
    allowed = REPRODUCIBLE
    # Each buffer would need graphs of its own, which cuDNN takes long to build.
    double_buffers_input = False
    # cuDNN selects engines by the number of samples.
    supports_shards = False
    inference_fusions = ((Add, ReLU),)

    @cached_property
    def library(self) -> Library:
        """cuDNN. It is loaded on first use, so plans can be made without it."""
        return open_library()

    def choose_device(self, local_rank: int) -> str:
        identity = super().choose_device(local_rank)
        # Reports a missing library before memory is allocated.
        self.library.primitives.dtypes = find_dtypes(self.library.primitives, self.device)
        return identity

    def fuses(self, nodes: tuple[Node, ...]) -> bool:
        """Return whether a group is computed as one; cuDNN computes poolings separately."""
        return not any(pools(node) for node in nodes[2:]) and super().fuses(nodes)

    def operation(self, group: Group, setting: Setting) -> type[Operation[Any]]:
        if supports(group.head):
            return CudnnConvolution
        # Plans can be made without the library.
        loaded: Library | None = self.__dict__.get("library")
        if setting.activations in (DATA_TYPES if loaded is None else loaded.primitives.dtypes):
            if pools(group.head):
                return CudnnPooling
            if type(group.head.layer) in MODES:
                return CudnnActivation
        return super().operation(group, setting)

    def explain(self, group: Group, setting: Setting) -> Mapping[Phase, Explanation]:
        return self.operation(group, setting).explain(group, setting)

    def storage(self, node: Node, parameter: Parameter) -> Storage:
        """Return the layout of a parameter: (K, R, S, C) for convolutions by cuDNN."""
        if supports(node) and len(parameter.shape) == 4:
            return Storage(parameter.shape, (0, 2, 3, 1))
        return super().storage(node, parameter)

    def bind_loss(
        self,
        replica: Replica,
        output: Array,
        target: Array,
        gradient: Array | None,
        sums: Array,
    ) -> Kernel:
        """Bind softmax by cuDNN in float32; it would store log softmax as bfloat16 in bf16."""
        is_softmax = isinstance(replica.plan.network.loss, SoftmaxCrossEntropy)
        dtype = str(output.dtype)
        if not is_softmax or dtype != "float32" or dtype not in self.library.primitives.dtypes:
            return super().bind_loss(replica, output, target, gradient, sums)
        assert isinstance(replica, CudnnReplica)
        return bind_softmax_loss(replica, output, target, gradient, sums)

    def allocate(self, plan: Plan, *, seed: int, arrays: FlatArrays | None = None) -> Replica:
        assert arrays is None, "arrays in host memory"
        self._require_limits(plan)
        device = self.device  # Opened first, because cuDNN uses the current GPU.
        return CudnnReplica(
            self, plan, seed=seed, device=device, library=self.library, allowed=self.allowed
        )
