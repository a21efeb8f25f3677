"""Dense layers bound to arrays, with their fused ReLU and dropout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba import elementwise
from dptrain.backends.numba.dense import matmul
from dptrain.backends.numba.dense.algorithms import PHASES, Case, candidates, choose
from dptrain.backends.numba.dense.dense_blocks import weight_gradient_grain
from dptrain.backends.numba.dense.matmul import DenseKernel
from dptrain.backends.numba.operations import GRAIN, DropoutMask, Operation, each
from dptrain.backends.numba.programs import StageKernel, joined
from dptrain.backends.replica import Context
from dptrain.network.activations import ReLU
from dptrain.network.layers import Dense, Dropout
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


class FullyConnected(Operation[Dense]):
    """Dense, optionally fused with ReLU, or with ReLU and Dropout.

    An output that was dropped or rectified is 0, so backward needs only the output as its mask.
    """

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        buffers = {
            name: BufferSpec((setting.threads, _kernel(group, setting, phase).scratch), "float32")
            for phase, name in _SCRATCH.items()
            if setting.training or phase is Phase.FORWARD
        }
        sums: tuple[str, ...] = ()
        if (chunks := _num_chunks(group, setting)) > 1:
            partial_sums = chunks, setting.batch_size, group.head.output_shape[0]
            buffers["chunk_sums"] = BufferSpec(partial_sums, "float32")
            sums = ("chunk_sums",)
        phases = {Phase.FORWARD: Access(("x",), ("y", *sums, "forward_scratch"))}
        if setting.training:
            if Dropout in group.kinds:
                shape = (setting.batch_size, *group.tail.output_maps)
                buffers["mask"] = DropoutMask.spec(shape)
                phases[Phase.FORWARD] = Access(("x",), ("y", "mask", *sums, "forward_scratch"))
            if ReLU in group.kinds:
                phases[Phase.BACKWARD] = Access(("dy", "y"), ("dy",))
            phases[Phase.BACKWARD_WEIGHT] = Access(("x", "dy"), ("weight_scratch",))
            if group.gradients:
                phases[Phase.BACKWARD_INPUT] = Access(("dy",), ("dx", "input_scratch"))
        return GroupNeeds(phases, buffers)

    @classmethod
    def explain(cls, group: Group, setting: Setting) -> Mapping[Phase, Explanation]:
        return {phase: _explain(group, setting, phase) for phase in PHASES}

    def _weight(self, name: str) -> NDArray[Any]:
        return self.arrays[name].reshape(-1, self.size)

    def _stage(self, phase: Phase) -> tuple[DenseKernel, NDArray[Any]]:
        """Return the kernel of a phase and its scratch."""
        return _kernel(self.group, self.setting, phase), self.arrays[_SCRATCH[phase]]

    def _block_stage(self, phase: Phase, *operands: Any) -> StageKernel:
        """Return the stage of a phase whose items are blocks of samples and features."""
        stage, scratch = self._stage(phase)
        weight, blocks = self._weight("weight"), stage.blocks
        assert blocks is not None
        inputs, outputs = weight.shape
        features = (outputs, inputs) if phase is Phase.FORWARD else (inputs, outputs)
        launch = self.thread_pool.bind(stage.kernel, *operands, blocks, scratch, grain=blocks.grain)

        def prepare(context: Context) -> None:
            launch.replace(0, operands[0][: context.n])
            launch.set_items(blocks.num_items(context.n, *features))

        return StageKernel((launch,), prepare)

    def forward(self) -> StageKernel:
        """Return the stage that writes y."""
        dense = self._linear()
        if Dropout not in self.group.kinds or not self.setting.training:
            return dense
        layer, index = self.group.tail.layer_of(Dropout), self.group.tail.index
        mask = DropoutMask(layer, index, self.arrays["mask"], self.thread_pool, self.seed)
        return joined(dense, mask.forward(self.rows("y"), self.rows("y")))

    def _linear(self) -> StageKernel:
        """Return the stage before dropout."""
        relu, y = ReLU in self.group.kinds, self.rows("y")
        operands = self.rows("x"), self._weight("weight"), self.arrays["bias"]
        if _num_chunks(self.group, self.setting) == 1:
            return self._block_stage(Phase.FORWARD, *operands, y[np.newaxis], relu)
        sums = self.arrays["chunk_sums"]
        accumulate = self._block_stage(Phase.FORWARD, *operands, sums, False)
        add = self.thread_pool.bind(
            matmul.add_chunks, sums.reshape(len(sums), -1), self.flat("y"), relu,
            grain=GRAIN // len(sums),
        )  # fmt: skip

        return joined(accumulate, each(add, self.size))

    def backward(self) -> StageKernel:
        """Return the stage that replaces dy by the gradient before ReLU and dropout."""
        tail = self.group.tail.layer
        factor = 1.0 / (1.0 - tail.rate) if isinstance(tail, Dropout) else 1.0
        dy, y = self.flat("dy"), self.flat("y")
        launch = self.thread_pool.bind(elementwise.relu_mask, dy, y, factor, grain=GRAIN)
        return each(launch, self.size)

    def backward_weight(self) -> StageKernel:
        """Return the stage that writes the gradients of the parameters."""
        a = self.arrays
        dw, samples = self._weight("dweight"), len(a["x"])
        stage, scratch = self._stage(Phase.BACKWARD_WEIGHT)
        operands = self.rows("x"), self.rows("dy")
        grain = weight_gradient_grain(samples, len(dw), self.size, self.thread_pool.threads)
        if self.shards:
            gradients = self.gradient_slots(dw.size)
            launch = self.thread_pool.bind(
                stage.kernel, *operands, gradients, a["bounds"], a["merges"], scratch, grain=grain
            )
            launch.set(len(dw))
            return StageKernel((launch,), lambda context: None)
        launch = self.thread_pool.bind(
            stage.kernel, *operands, dw, a["dbias"], scratch, grain=grain
        )
        launch.set(len(dw))
        return StageKernel((launch,), lambda context: launch.replace(0, operands[0][: context.n]))

    def backward_input(self) -> StageKernel:
        """Return the stage that writes dx."""
        dy, dx = self.rows("dy"), self.rows("dx")
        return self._block_stage(Phase.BACKWARD_INPUT, dy, self._weight("weight"), dx)


_SCRATCH = {
    Phase.FORWARD: "forward_scratch",
    Phase.BACKWARD_WEIGHT: "weight_scratch",
    Phase.BACKWARD_INPUT: "input_scratch",
}
"""Names of scratch buffers, each of which is needed in one stage."""


def _case(group: Group, setting: Setting, phase: Phase) -> Case:
    shape = math.prod(group.head.input_shape), group.head.output_shape[0]
    return Case(phase, setting.batch_size, setting.threads, *shape, setting.shards)


def _choose(group: Group, setting: Setting, phase: Phase) -> Choice[Case]:
    return choose(_case(group, setting, phase), setting.selection, group.stage(phase))


def _kernel(group: Group, setting: Setting, phase: Phase) -> DenseKernel:
    """Return the kernel of a phase."""
    found: DenseKernel = _choose(group, setting, phase).algorithm.bind(_case(group, setting, phase))
    return found


def _explain(group: Group, setting: Setting, phase: Phase) -> Explanation:
    """Return the algorithm of a phase, its blocks, and the others."""
    case, choice = _case(group, setting, phase), _choose(group, setting, phase)
    blocks = _kernel(group, setting, phase).blocks
    note = "micro-shards: sums follow from the shape" if setting.shards else ""
    tile, units = "", f"{case.inputs} rows of dw"
    if blocks is not None:
        features = case.outputs if phase is Phase.FORWARD else case.inputs
        down, across = -(-case.samples // blocks.samples), -(-features // blocks.features)
        tile, units = f"{blocks.samples}×{blocks.features}", f"{down} × {across} blocks"
    return Explanation.of(
        choice, candidates(case), setting.selection, group.stage(phase), tile=tile, units=units,
        note=note,
    )  # fmt: skip


def _num_chunks(group: Group, setting: Setting) -> int:
    """Return the number of partial sums of the forward pass."""
    blocks = _kernel(group, setting, Phase.FORWARD).blocks
    assert blocks is not None
    return -(-math.prod(group.head.input_shape) // blocks.chunk)
