"""Lowering, losses, updates and the replica of the cuda backend."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.base import Arrays, Backend, Context, Kernel, Replica, segments
from dptrain.backends.cuda import operations, weighted
from dptrain.backends.cuda.device import Array, Device
from dptrain.backends.cuda.launching import launch
from dptrain.backends.cuda.operations import Operation, vector
from dptrain.backends.cuda.replica import CudaReplica, Message
from dptrain.network.layers import (
    AveragePool2d,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    Layer,
    LocalResponseNorm,
    MaxPool2d,
    Parameter,
    ReLU,
    Sigmoid,
    SumPool2d,
)
from dptrain.network.network import Network, Node
from dptrain.plan.lowering import (
    Group,
    GroupNeeds,
    Phase,
    Precision,
    Setting,
    Storage,
    canonical_storage,
)
from dptrain.plan.optimizers import SGD
from dptrain.plan.plan import Plan

OPERATIONS: Mapping[type[Layer], type[Operation]] = {
    Conv2d: weighted.Convolution,
    Dense: weighted.FullyConnected,
    MaxPool2d: operations.MaxPooling,
    AveragePool2d: operations.AveragePooling,
    SumPool2d: operations.SumPooling,
    Flatten: operations.Alias,
    ReLU: operations.Rectifier,
    Sigmoid: operations.Logistic,
    Dropout: operations.Drop,
    LocalResponseNorm: operations.ResponseNorm,
}
"""By the first layer of a group, which says what may follow in it."""

LOSSES = {
    "classes": "softmax_cross_entropy",
    "binary": "sigmoid_cross_entropy",
    "values": "mean_squared_error",
}


LOSS_THREADS = 256
"""One block adds up the whole batch, in an order that is always the same."""


def open_device(index: int) -> Device:
    """GPU of a rank that is number `index` on its node; ranks beyond the last GPU begin again.

    Raises:
        UserError: there is no GPU, or CuPy is missing.
    """
    from dptrain.backends.cuda.gpu import GPU, device_count, import_cupy

    return GPU(index % device_count(import_cupy()))


class CudaBackend(Backend):
    """Float32 on a GPU, activations (N, H, W, C)."""

    name = "cuda"
    precisions: ClassVar[Mapping[str, Precision]] = {"fp32": Precision("float32", "float32")}
    channels_last = True
    weights_beside = True
    fusions = (
        (Conv2d, ReLU, MaxPool2d),
        (Conv2d, ReLU),
        (Dense, ReLU, Dropout),
        (Dense, ReLU),
    )

    def __init__(self) -> None:
        self._local_rank = 0

    @cached_property
    def device(self) -> Device:
        """The GPU, taken when it is first needed: planning works without one."""
        return open_device(self._local_rank)

    def place(self, local_rank: int) -> str:
        self._local_rank = local_rank
        return self.device.identity

    def staged_bytes(self, network: Network, setting: Setting) -> int:
        return Message.of(network, setting).nbytes

    def storage(self, node: Node, parameter: Parameter) -> Storage:
        """Weights as (R, S, C, K) and (H·W·C, out): what is summed together lies together."""
        if len(parameter.shape) == 1:
            return canonical_storage(parameter)
        if isinstance(node.layer, Conv2d):
            return Storage(parameter.shape, (2, 3, 1, 0))
        return Storage((parameter.shape[0], *node.input_maps), (2, 3, 1, 0))

    def needs(self, group: Group, setting: Setting) -> GroupNeeds:
        return OPERATIONS[type(group.head.layer)].needs(group, setting)

    def bind(self, group: Group, arrays: Arrays, replica: Replica) -> Mapping[Phase, Kernel]:
        assert isinstance(replica, CudaReplica)
        return OPERATIONS[type(group.head.layer)](group, arrays, replica).kernels()

    def bind_loss(
        self,
        replica: Replica,
        output: Array,
        target: Array,
        gradient: Array | None,
        sums: Array,
    ) -> Kernel:
        assert isinstance(replica, CudaReplica)
        name = LOSSES[replica.plan.network.loss.targets]
        function = replica.device.function("losses.cu", name)
        outputs, dz = np.int32(output.shape[1]), output if gradient is None else gradient

        def run(context: Context) -> None:
            backward = np.int32(context.training and gradient is not None)
            function(
                (1, 1, 1), (LOSS_THREADS, 1, 1),
                [output, target, dz, sums, np.int32(context.n), outputs,
                 np.float32(context.scale), backward],
            )  # fmt: skip

        return run

    def bind_update(self, replica: Replica) -> Kernel:
        assert isinstance(replica, CudaReplica)
        rule, state, device = replica.plan.optimizer, replica.flat_state, replica.device
        w, runs = replica.flat_parameters, segments(replica.plan)
        bounds = _uploaded(device, np.array([stop for _, stop, _ in runs], np.int32))
        decays = _uploaded(device, np.array([decay for *_, decay in runs], np.float32))
        common = [w, replica.flat_gradients, *state.values(), bounds, decays, np.int32(len(runs))]
        sgd = "sgd_momentum" if rule.state else "sgd"
        name = sgd if isinstance(rule, SGD) else "adam"
        # Slots are whole cache lines, so segments begin and end with vectors.
        width = vector(w.size)
        function = device.function("updates.cu", name, VECTOR=width)

        def numbers(rate: float) -> list[np.generic]:
            if isinstance(rule, SGD):
                rest = [np.float32(rule.momentum), np.int32(rule.nesterov)]
                return [*(rest if rule.momentum else []), np.float32(rate)]
            t = replica.updates
            constants = (rule.beta1, rule.beta2, rule.epsilon, 1.0 - rule.beta1, 1.0 - rule.beta2)
            corrected = rate / (1.0 - rule.beta1**t), (1.0 - rule.beta2**t) ** -0.5
            return [np.float32(value) for value in (*constants, *corrected)]

        def update(context: Context) -> None:
            launch(
                function,
                w.size // width,
                *common,
                np.int32(w.size),
                *numbers(context.learning_rate),
            )

        return update

    def allocate(self, plan: Plan, *, seed: int) -> Replica:
        return CudaReplica(self, plan, seed=seed, device=self.device)


def _uploaded(device: Device, values: NDArray[Any]) -> Array:
    """A copy on the device."""
    array = device.zeros(values.shape, values.dtype)
    device.upload(array, values)
    return array
