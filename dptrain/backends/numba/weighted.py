"""Convolution and dense layers bound to arrays, with their fused epilogues."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba import elementwise
from dptrain.backends.numba.convolution import (
    direct_convolution,
    gathered_convolution,
    pointwise_convolution,
    winograd_convolution,
)
from dptrain.backends.numba.convolution.algorithms import (
    Algorithm,
    Shape,
    Work,
    select_algorithms,
    work_of_layer,
)
from dptrain.backends.numba.convolution.explanation import explain, explain_dense
from dptrain.backends.numba.convolution.fused_pooling import NoPool
from dptrain.backends.numba.convolution.planning import rows_of_partial_sums
from dptrain.backends.numba.dense import dense_shards, matmul
from dptrain.backends.numba.dense.dense_blocks import weight_gradient_grain
from dptrain.backends.numba.dense.matmul import DenseKernel
from dptrain.backends.numba.normalization.folding import folds_batch_norm
from dptrain.backends.numba.operations import (
    DIRECT,
    GRAIN,
    DropoutMask,
    Operation,
    each,
    grain_of,
    pool_geometry,
)
from dptrain.backends.numba.programs import StageKernel, joined
from dptrain.backends.numba.reduction import sum_partials
from dptrain.backends.replica import UNKNOWN_VERSION, Context
from dptrain.native.threads import Launch
from dptrain.network.activations import ReLU
from dptrain.network.layers import Conv2d, Dropout, MaxPool2d
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
from dptrain.plan.shards import addition_steps


class Convolution(Operation):
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
        work = _work(group, setting)
        for phase, algorithm in _select(group, setting.precision, work).items():
            scratch = BufferSpec((setting.threads, algorithm.scratch), "float32")
            shared = BufferSpec((max(algorithm.shared, 1),), "float32")
            buffers |= {_SCRATCH[phase]: scratch, _SHARED[phase]: shared}
        if pools:
            buffers["argmax"] = BufferSpec((setting.batch_size, *group.tail.output_maps), "uint8")
        phases = {Phase.FORWARD: Access(("x",), ("y", *pooled, *_memory(Phase.FORWARD)))}
        if setting.training:
            if ReLU in group.kinds and not pools:
                phases[Phase.BACKWARD] = Access(("dy", "y"), ("dy",))
            buffers["partial"] = BufferSpec((work.rows, weight.size + filters), "float32")
            dz = ("dy", *pooled)
            written = "partial", *_memory(Phase.BACKWARD_WEIGHT)
            phases[Phase.BACKWARD_WEIGHT] = Access(("x", *dz), written)
            if group.gradients:
                phases[Phase.BACKWARD_INPUT] = Access(dz, ("dx", *_memory(Phase.BACKWARD_INPUT)))
        kept = (_SHARED[Phase.FORWARD],) if work.keeps_weights else ()
        return GroupNeeds(phases, buffers, kept=kept)

    @classmethod
    def explain(cls, group: Group, setting: Setting) -> Mapping[Phase, Explanation]:
        work, winograd = _work(group, setting), setting.precision != DIRECT
        return {
            phase: explain(_shape(group), phase, work, algorithm, winograd=winograd)
            for phase, algorithm in _select(group, setting.precision, work).items()
        }

    @classmethod
    def adds_gradient(cls, group: Group, setting: Setting) -> bool:
        """Return whether the input gradient can be added to what is in memory."""
        if MaxPool2d in group.kinds:
            return False
        algorithm = _select(group, setting.precision, _work(group, setting))[Phase.BACKWARD_INPUT]
        modules = (
            direct_convolution, gathered_convolution, pointwise_convolution, winograd_convolution,
        )  # fmt: skip
        return algorithm.kernel in [module.conv2d_backward_input for module in modules]

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
    ) -> tuple[tuple[Launch, ...], Launch, Algorithm]:
        """Bind the kernels of a phase.

        Args:
            phase: forward or one of the two backward phases.
            operands: the arguments of the kernel before its geometry.

        Returns:
            The launch that transforms the weights, if the algorithm has one; the launch of the
            kernel; and the algorithm.
        """
        work = _work(self.group, self.setting)
        algorithm = _select(self.group, self.precision, work)[phase]
        shared, scratch = self.arrays[_SHARED[phase]], self.arrays[_SCRATCH[phase]]
        launch = self.thread_pool.bind(
            algorithm.kernel,
            *self._operands(algorithm, operands),
            shared,
            scratch,
            grain=algorithm.grain,
        )
        if algorithm.prepare is None:
            return (), launch, algorithm
        transform = self.thread_pool.bind(
            algorithm.prepare, self.arrays["weight"], algorithm.geometry, shared,
            grain=algorithm.prepare_grain,
        )  # fmt: skip
        transform.set(algorithm.prepare_items)
        return (transform,), launch, algorithm

    def _operands(self, algorithm: Algorithm, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of an algorithm's kernel before `shared` and `scratch`."""
        relu = ReLU in self.group.kinds
        pool = pool_geometry(self.group.tail) if self.pools else None
        division = algorithm.geometry, algorithm.units
        _, height, width = self.group.head.output_shape
        adds, bias = int("dx" in self.group.adds), int(self.has_bias)
        return *operands, *division, pool or NoPool(height, width, int(relu), adds, bias)

    def _samples_stage(self, phase: Phase, *operands: Any) -> StageKernel:
        """Return the stage of a phase whose items are parts of samples."""
        transform, launch, algorithm = self._launches(phase, *operands)

        def prepare(context: Context) -> None:
            # Some kernels read the number of samples from the shape of the first operand.
            launch.replace(0, operands[0][: context.n])
            launch.set_items(context.n * algorithm.units)
            if transform and not self.setting.training:
                self._transform_if_changed(transform[0], algorithm.prepare_items, context)

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
        operands = a["x"], a["weight"], self.bias(), a["y"], self._argmax()
        return self._samples_stage(Phase.FORWARD, *operands)

    def backward(self) -> StageKernel:
        """Return the stage that replaces dy by the gradient before the ReLU."""
        dy, y = self.flat("dy"), self.flat("y")
        launch = self.thread_pool.bind(elementwise.relu_mask, dy, y, 1.0, grain=GRAIN)
        return each(launch, self.size)

    def _gradient(self) -> tuple[NDArray[Any], ...]:
        """Return the arrays from which backward computes dz."""
        return self.arrays["dy"], self._argmax()

    def _argmax(self) -> NDArray[Any]:
        return self.arrays["argmax"] if self.pools else _NO_ARGMAX

    def backward_weight(self) -> StageKernel:
        """Return the stage that writes the gradients of the parameters."""
        a, sums = self.arrays, self.arrays["partial"]
        rows, bounds = len(sums), self._bounds()
        transform, accumulate, algorithm = self._launches(
            Phase.BACKWARD_WEIGHT, a["x"], *self._gradient(), sums, bounds
        )
        accumulate.set(rows * algorithm.units)

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
        dbias = a["dbias_slots" if self.layer.bias else "dweight_slots"]
        reduce = self.thread_pool.bind(
            sum_partials, sums, *addition_steps(merges), a["dweight_slots"], dbias, size,
            a["gradient_slots"].shape[1],
            # Rows come from the caches of other cores, so their elements count twice.
            grain=grain_of(2 * rows),
        )  # fmt: skip
        reduce.set(sums.shape[1] if self.layer.bias else size)
        return reduce

    def backward_input(self) -> StageKernel:
        """Return the stage that writes dx."""
        a = self.arrays
        return self._samples_stage(Phase.BACKWARD_INPUT, *self._gradient(), a["weight"], a["dx"])


_NO_ARGMAX = np.zeros((1, 1, 1, 1), np.uint8)
"""Argument `argmax` of kernels without pooling."""


def _select(group: Group, precision: str, work: Work) -> Mapping[Phase, Algorithm]:
    return select_algorithms(_shape(group), work, winograd=precision != DIRECT)


def work_of(setting: Setting) -> Work:
    """Return the samples and threads of a plan."""
    rows = setting.shards or rows_of_partial_sums(setting.batch_size, setting.threads)
    return Work(setting.batch_size, setting.threads, rows, setting.shards > 0, not setting.training)


def _work(group: Group, setting: Setting) -> Work:
    """Return the samples, threads and rows of partial sums of a convolution."""
    return work_of_layer(_shape(group), work_of(setting), winograd=setting.precision != DIRECT)


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
        maps, out, conv.window, conv.strides, (top, left), pool_height, halved, pool_stride
    )


def fuses_convolution(nodes: tuple[Node, ...]) -> bool:
    """Return whether a convolution has one group, and positions in the pooling window fit the
    mask's uint8, if there is pooling.
    """
    head, tail = nodes[0].layer, nodes[-1].layer
    if not isinstance(tail, MaxPool2d):
        return True
    grouped = isinstance(head, Conv2d) and head.groups > 1
    return not grouped and tail.windows[0] * tail.windows[1] < 255


class FullyConnected(Operation):
    """Dense, optionally fused with ReLU, or with ReLU and Dropout.

    An output that was dropped or rectified is 0, so backward needs only the output as its mask.
    """

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        stages = _dense_kernels(group, setting.batch_size, setting.threads, setting.shards)
        buffers = {
            _SCRATCH[phase]: BufferSpec((setting.threads, stage.scratch), "float32")
            for phase, stage in stages.items()
            if setting.training or phase is Phase.FORWARD
        }
        sums: tuple[str, ...] = ()
        if (chunks := _num_chunks(group, stages)) > 1:
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
        stages = _dense_kernels(group, setting.batch_size, setting.threads, setting.shards)
        inputs, outputs = math.prod(group.head.input_shape), group.head.output_shape[0]
        return {
            phase: explain_dense(stage, phase, work_of(setting), inputs, outputs)
            for phase, stage in stages.items()
        }

    def _weight(self, name: str) -> NDArray[Any]:
        return self.arrays[name].reshape(-1, self.size)

    def _stage(self, phase: Phase) -> tuple[DenseKernel, NDArray[Any]]:
        """Return the kernel of a phase and its scratch."""
        samples, threads = len(self.arrays["x"]), self.thread_pool.threads
        stage = _dense_kernels(self.group, samples, threads, self.shards)[phase]
        return stage, self.arrays[_SCRATCH[phase]]

    def _block_stage(self, phase: Phase, *operands: Any) -> StageKernel:
        """Return the stage of a phase whose items are blocks of samples and features."""
        stage, scratch = self._stage(phase)
        weight, blocks = self._weight("weight"), stage.blocks
        assert blocks is not None
        inputs, outputs = weight.shape
        features = (outputs, inputs) if phase is Phase.FORWARD else (inputs, outputs)
        launch = self.thread_pool.bind(
            stage.kernel, *operands, blocks, scratch, varying=(0,), grain=blocks.grain
        )

        def prepare(context: Context) -> None:
            launch.set(blocks.num_items(context.n, *features), context.n)

        return StageKernel((launch,), prepare)

    def forward(self) -> StageKernel:
        """Return the stage that writes y."""
        dense = self._linear()
        if Dropout not in self.group.kinds or not self.setting.training:
            return dense
        layer, index = self.group.tail.layer, self.group.tail.index
        assert isinstance(layer, Dropout)
        mask = DropoutMask(layer, index, self.arrays["mask"], self.thread_pool, self.seed)
        return joined(dense, mask.forward(self.rows("y"), self.rows("y")))

    def _linear(self) -> StageKernel:
        """Return the stage before dropout."""
        relu, y = ReLU in self.group.kinds, self.rows("y")
        operands = self.rows("x"), self._weight("weight"), self.arrays["bias"]
        samples, threads = len(self.arrays["x"]), self.thread_pool.threads
        stages = _dense_kernels(self.group, samples, threads, self.shards)
        if _num_chunks(self.group, stages) == 1:
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
            slots, pitch = a["gradient_slots"].shape
            launch = self.thread_pool.bind(
                stage.kernel, *operands, a["dweight_slots"], a["dbias_slots"], pitch, slots,
                a["bounds"], a["merges"], scratch, grain=grain,
            )  # fmt: skip
            launch.set(len(dw))
            return StageKernel((launch,), lambda context: None)
        launch = self.thread_pool.bind(
            stage.kernel, *operands, dw, a["dbias"], scratch, varying=(0,), grain=grain
        )
        return StageKernel((launch,), lambda context: launch.set(len(dw), context.n))

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

_SHARED = {
    Phase.FORWARD: "forward_shared",
    Phase.BACKWARD_WEIGHT: "weight_shared",
    Phase.BACKWARD_INPUT: "input_shared",
}
"""Names of the buffers of transformed weights, each of which is needed in one stage."""


def _memory(phase: Phase) -> tuple[str, str]:
    """Return the names of the buffers that the algorithm of a phase writes."""
    return _SCRATCH[phase], _SHARED[phase]


def _dense_kernels(
    group: Group, samples: int, threads: int, shards: int
) -> Mapping[Phase, DenseKernel]:
    """Return the kernels of a dense layer."""
    shape = math.prod(group.head.input_shape), group.head.output_shape[0]
    kernels = matmul.dense_kernels(samples, threads, *shape)
    if not shards:
        return kernels
    scratch = dense_shards.weight_shards_scratch(samples, shape[1], shards)
    weight = DenseKernel(dense_shards.dense_backward_weight_shards, scratch)
    return {**kernels, Phase.BACKWARD_WEIGHT: weight}


def _num_chunks(group: Group, stages: Mapping[Phase, DenseKernel]) -> int:
    """Return the number of partial sums of the forward pass."""
    blocks = stages[Phase.FORWARD].blocks
    assert blocks is not None
    return -(-math.prod(group.head.input_shape) // blocks.chunk)
