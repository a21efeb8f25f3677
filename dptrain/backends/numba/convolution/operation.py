"""Convolution bound to arrays, with its fused ReLU and pooling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.folding import folds_batch_norm
from dptrain.backends.numba import elementwise
from dptrain.backends.numba.convolution.algorithms import PHASES, candidates, choose, plan_kernel
from dptrain.backends.numba.convolution.fused_pooling import NoPool, Pool
from dptrain.backends.numba.convolution.planning import (
    Case,
    KernelPlan,
    Shape,
    counted,
    work_of,
)
from dptrain.backends.numba.convolution.winograd_convolution import refusal
from dptrain.backends.numba.operations import (
    DIRECT,
    GRAIN,
    Operation,
    each,
    grain_of,
    pool_of,
)
from dptrain.backends.numba.programs import StageKernel
from dptrain.backends.numba.reduction import sum_partials
from dptrain.backends.replica import UNKNOWN_VERSION, Context
from dptrain.native.threads import Launch
from dptrain.network.activations import ReLU
from dptrain.network.layers import Conv2d, MaxPool2d
from dptrain.network.network import Node
from dptrain.plan.lowering import (
    Access,
    BufferSpec,
    Explanation,
    Group,
    GroupNeeds,
    Phase,
    Setting,
)
from dptrain.plan.selection import Choice
from dptrain.plan.shards import addition_steps

NS_PER_MS = 1e6


class Convolution(Operation[Conv2d]):
    """Conv2d, optionally fused with ReLU, or with ReLU and MaxPool2d.

    With pooling, neither the output of the convolution nor its gradient is stored. Forward stores
    the pooled maps and the position of each maximum; backward recomputes dz from them, sample by
    sample. This costs the two backward stages a few percent and saves one pass over the largest
    array of the step (solar, batch size 32: 17 MB, 1 to 2.4 ms).
    """

    _transformed_version: int | None = None
    """`Context.parameters_version` of the transformed weights."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        node, pools = group.head, MaxPool2d in group.kinds
        weight, filters = node.parameters[0], node.output_shape[0]
        pooled = ("argmax",) if pools else ()
        buffers: dict[str, BufferSpec] = {}
        kernels = {phase: kernel_plan(group, setting, phase) for phase in PHASES}
        for phase, kernel in kernels.items():
            scratch = BufferSpec((setting.threads, kernel.scratch), "float32")
            shared = BufferSpec((max(kernel.shared, 1),), "float32")
            buffers |= {_SCRATCH[phase]: scratch, _SHARED[phase]: shared}
        if pools:
            buffers["argmax"] = BufferSpec((setting.batch_size, *group.tail.output_maps), "uint8")
        phases = {Phase.FORWARD: Access(("x",), ("y", *pooled, *_memory(Phase.FORWARD)))}
        if setting.training:
            if ReLU in group.kinds and not pools:
                phases[Phase.BACKWARD] = Access(("dy", "y"), ("dy",))
            rows = kernels[Phase.BACKWARD_WEIGHT].rows
            buffers["partial"] = BufferSpec((rows, weight.size + filters), "float32")
            dz = ("dy", *pooled)
            written = "partial", *_memory(Phase.BACKWARD_WEIGHT)
            phases[Phase.BACKWARD_WEIGHT] = Access(("x", *dz), written)
            if group.gradients:
                phases[Phase.BACKWARD_INPUT] = Access(dz, ("dx", *_memory(Phase.BACKWARD_INPUT)))
        kept = () if setting.training else (_SHARED[Phase.FORWARD],)
        return GroupNeeds(phases, buffers, kept=kept)

    @classmethod
    def explain(cls, group: Group, setting: Setting) -> Mapping[Phase, Explanation]:
        return {phase: _explain(group, setting, phase) for phase in PHASES}

    @property
    def pools(self) -> bool:
        """True if pooling is fused."""
        return MaxPool2d in self.group.kinds

    @property
    def has_bias(self) -> bool:
        """True if the convolution adds a bias: its own, or that of a folded normalisation."""
        return bool(self.layer.bias) or folds_batch_norm(self.group)

    def bias(self) -> NDArray[Any]:
        """Return the bias, or zeros."""
        if self.has_bias:
            return self.arrays["bias"]
        return np.zeros(self.arrays["weight"].shape[-1], np.float32)

    def _launches(
        self, phase: Phase, *operands: Any
    ) -> tuple[tuple[Launch, ...], Launch, KernelPlan]:
        """Bind the kernels of a phase.

        Args:
            phase: forward or one of the two backward phases.
            operands: the arguments of the kernel before its geometry.

        Returns:
            The launch that transforms the weights, if the algorithm has one; the launch of the
            kernel; and the plan of the kernel.
        """
        kernel = kernel_plan(self.group, self.setting, phase)
        launch = self.thread_pool.bind(
            kernel.kernel, *operands, kernel.geometry, self._pool(), self.arrays[_SCRATCH[phase]],
            grain=kernel.grain,
        )  # fmt: skip
        if kernel.prepare is None:
            return (), launch, kernel
        transform = self.thread_pool.bind(
            kernel.prepare, self.arrays["weight"], kernel.geometry, self.arrays[_SHARED[phase]],
            grain=kernel.prepare_grain,
        )  # fmt: skip
        transform.set(kernel.prepare_items)
        return (transform,), launch, kernel

    def _weights(self, phase: Phase) -> NDArray[Any]:
        """Return the flat weights that the kernel of a phase reads."""
        is_transformed = kernel_plan(self.group, self.setting, phase).prepare is not None
        return self.arrays[_SHARED[phase]] if is_transformed else self.flat("weight")

    def _pool(self) -> Pool | NoPool:
        """Return the argument `pool` of the kernels."""
        if self.pools:
            return pool_of(self.group.tail, self.arrays["argmax"])
        _, height, width = self.group.head.output_shape
        relu, adds = ReLU in self.group.kinds, "dx" in self.group.adds
        return NoPool(height, width, int(relu), int(adds), int(self.has_bias))

    def _samples_stage(self, phase: Phase, *operands: Any) -> StageKernel:
        """Return the stage of a phase whose items are parts of samples."""
        transform, launch, kernel = self._launches(phase, *operands)

        def prepare(context: Context) -> None:
            # Some kernels read the number of samples from the shape of the first operand.
            launch.replace(0, operands[0][: context.n])
            launch.set_items(context.n * kernel.units)
            if transform and not self.setting.training:
                self._transform_if_changed(transform[0], kernel.prepare_items, context)

        return StageKernel((*transform, launch), prepare)

    def _transform_if_changed(self, transform: Launch, items: int, context: Context) -> None:
        """Transform the weights now if they have changed, and not in each pass.

        If their version is unknown, each pass transforms them.
        """
        version = context.parameters_version
        transform.set_items(items)
        if version != UNKNOWN_VERSION:
            if version != self._transformed_version:
                transform.run()
            transform.set_items(0)
        self._transformed_version = version

    def forward(self) -> StageKernel:
        """Return the stage that writes y."""
        a = self.arrays
        weights = self._weights(Phase.FORWARD)
        return self._samples_stage(Phase.FORWARD, a["x"], weights, self.bias(), a["y"])

    def backward(self) -> StageKernel:
        """Return the stage that replaces dy by the gradient before the ReLU."""
        dy, y = self.flat("dy"), self.flat("y")
        launch = self.thread_pool.bind(elementwise.relu_mask, dy, y, 1.0, grain=GRAIN)
        return each(launch, self.size)

    def backward_weight(self) -> StageKernel:
        """Return the stage that writes the gradients of the parameters."""
        a, sums = self.arrays, self.arrays["partial"]
        rows, bounds = len(sums), self._bounds()
        transform, accumulate, kernel = self._launches(
            Phase.BACKWARD_WEIGHT, a["x"], a["dy"], sums, bounds
        )
        accumulate.set(rows * kernel.units)

        return StageKernel(
            (*transform, accumulate, self._reduction()),
            lambda context: self._divide(bounds, context),
        )

    def _bounds(self) -> NDArray[np.int64]:
        """Return the bounds of the samples of each row of partial sums."""
        rows = len(self.arrays["partial"])
        return self.arrays["bounds"] if self.shards else np.zeros(rows + 1, np.int64)

    def _divide(self, bounds: NDArray[np.int64], context: Context) -> None:
        """Divide the samples among the rows of partial sums; micro-shards are divided already."""
        if not self.shards:
            bounds[:] = context.n * np.arange(len(bounds)) // (len(bounds) - 1)

    def _reduction(self) -> Launch:
        """Return the launch that adds the rows of partial sums."""
        a, sums = self.arrays, self.arrays["partial"]
        rows, size = len(sums), a["dweight"].size
        merges = a["merges"] if self.shards else np.minimum(np.arange(rows), 1)
        # Without biases, the sums of dz are not read.
        gradients = self.gradient_slots(size, bias=bool(self.layer.bias))
        reduce = self.thread_pool.bind(
            sum_partials, sums, *addition_steps(merges), gradients,
            # Rows come from the caches of other cores, so their elements count twice.
            grain=grain_of(2 * rows),
        )  # fmt: skip
        reduce.set(sums.shape[1] if self.layer.bias else size)
        return reduce

    def backward_input(self) -> StageKernel:
        """Return the stage that writes dx."""
        a, weights = self.arrays, self._weights(Phase.BACKWARD_INPUT)
        return self._samples_stage(Phase.BACKWARD_INPUT, a["dy"], weights, a["dx"])


def kernel_plan(group: Group, setting: Setting, phase: Phase) -> KernelPlan:
    """Return the kernel of a phase of a convolution."""
    case = _case(group, setting, phase)
    return plan_kernel(_choose(group, setting, case), case)


def _choose(group: Group, setting: Setting, case: Case) -> Choice[Case]:
    return choose(case, setting.selection, group.stage(case.phase))


def _explain(group: Group, setting: Setting, phase: Phase) -> Explanation:
    """Return the algorithm of a phase, its tile and its division, and the others."""
    case = _case(group, setting, phase)
    choice = _choose(group, setting, case)
    kernel, gradient = plan_kernel(choice, case), phase is Phase.BACKWARD_WEIGHT
    note = "" if choice.algorithm.name.startswith("Winograd") else refusal(case)
    items = counted(kernel.rows, "sum") if gradient else counted(setting.batch_size, "sample")
    units = f"{items} × {counted(kernel.units, 'block' if gradient else 'band')}"
    # Estimates that must follow from the shape alone are for one sample.
    per_ms = NS_PER_MS * case.samples / setting.batch_size
    return Explanation.of(
        choice, candidates(case), setting.selection, group.stage(phase), tile=kernel.tile,
        units=units, note=note, per_ms=per_ms,
    )  # fmt: skip


def _case(group: Group, setting: Setting, phase: Phase) -> Case:
    return Case(_shape(group), phase, work_of(setting), setting.precision != DIRECT)


def _shape(group: Group) -> Shape:
    node = group.head
    conv: Any = node.layer
    tail: Any = group.tail.layer
    (c, h, w), (k, ho, wo) = node.input_shape, node.output_shape
    (top, _), (left, _) = conv.pads(node.input_shape)
    pool_height, pool_stride, halved = 0, 0, False
    if isinstance(tail, MaxPool2d):
        pool_height, pool_stride = tail.windows[0], tail.strides[0]
        outside = tail.pads(node.output_shape)
        halved = tail.windows == tail.strides == (2, 2) and outside == ((0, 0), (0, 0))
    maps, out = (h, w, c), (ho, wo, k)
    return Shape(
        maps, out, conv.window, conv.strides, (top, left), pool_height, halved, pool_stride,
        conv.dilations,
    )  # fmt: skip


def fuses_convolution(nodes: tuple[Node, ...]) -> bool:
    """Return whether a convolution has one group, and positions in the pooling window fit the
    mask's uint8, if there is pooling.
    """
    head, tail = nodes[0].layer, nodes[-1].layer
    if not isinstance(tail, MaxPool2d):
        return True
    grouped = isinstance(head, Conv2d) and head.groups > 1
    return not grouped and tail.windows[0] * tail.windows[1] < 255


_SCRATCH = {
    Phase.FORWARD: "forward_scratch",
    Phase.BACKWARD_WEIGHT: "weight_scratch",
    Phase.BACKWARD_INPUT: "input_scratch",
}
"""Names of scratch buffers, each of which is needed in one stage."""

_SHARED = {
    Phase.FORWARD: "forward_shared",
    Phase.BACKWARD_WEIGHT: "weight_shared",
    Phase.BACKWARD_INPUT: "input_shared",
}
"""Names of the buffers of transformed weights, each of which is needed in one stage."""


def _memory(phase: Phase) -> tuple[str, str]:
    """Return the names of the buffers that the algorithm of a phase writes."""
    return _SCRATCH[phase], _SHARED[phase]
