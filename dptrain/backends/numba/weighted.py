"""Convolution and dense layers bound to arrays, with their fused epilogues."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from dptrain.backends.numba import amx_matmul, direct_convolution, elementwise, matmul
from dptrain.backends.numba.algorithms import Algorithm, Shape, select_algorithms
from dptrain.backends.numba.operations import (
    DIRECT,
    DropoutMask,
    Kernels,
    Operation,
    each,
    pool_geometry,
)
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import Dropout, MaxPool2d, ReLU
from dptrain.network.network import Node
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase, Setting


class Convolution(Operation):
    """Conv2d, optionally fused with ReLU, or with ReLU and MaxPool2d.

    With pooling, neither the output of the convolution nor its gradient is stored. Forward stores
    the pooled maps and the position of each maximum; backward recomputes dz from them, sample by
    sample. This costs the two backward stages a few percent and saves one pass over the largest
    array of the step (solar, batch size 32: 17 MB, 1 to 2.4 ms).
    """

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        node, pools = group.head, MaxPool2d in group.kinds
        weight, bias = node.parameters
        rows = setting.threads
        pooled = ("argmax",) if pools else ()
        buffers = {
            _SCRATCH[phase]: BufferSpec((rows, algorithm.scratch), "float32")
            for phase, algorithm in _select(group, setting.precision).items()
        }
        if pools:
            buffers["argmax"] = BufferSpec((setting.batch_size, *group.tail.output_maps), "uint8")
        phases = {Phase.FORWARD: Access(("x",), ("y", *pooled, "forward_scratch"))}
        if setting.training:
            if ReLU in group.kinds and not pools:
                phases[Phase.BACKWARD] = Access(("dy", "y"), ("dy",))
            buffers["partial"] = BufferSpec((rows, weight.size + bias.size), "float32")
            dz = ("dy", *pooled)
            phases[Phase.BACKWARD_WEIGHT] = Access(("x", *dz), ("partial", "weight_scratch"))
            phases[Phase.BACKWARD_INPUT] = Access(dz, ("dx", "input_scratch"))
        return GroupNeeds(phases, buffers)

    def kernels(self) -> Kernels:
        kernels = {Phase.FORWARD: self._forward()}
        if "dy" not in self.arrays:
            return kernels
        if ReLU in self.group.kinds and "argmax" not in self.arrays:
            kernels[Phase.BACKWARD] = self._backward()
        kernels[Phase.BACKWARD_WEIGHT] = self._backward_weight()
        if "dx" in self.arrays:
            kernels[Phase.BACKWARD_INPUT] = self._backward_input()
        return kernels

    def _operands(self, phase: Phase, *operands: Any) -> tuple[Any, ...]:
        """Return the kernel of a phase and its arguments: `operands`, geometry and scratch."""
        algorithm = _select(self.group, self.precision)[phase]
        pool = (pool_geometry(self.group.tail),) if "argmax" in self.arrays else ()
        relu = ReLU in self.group.kinds
        rectify = (relu,) if phase is Phase.FORWARD and not pool else ()
        scratch = self.arrays[_SCRATCH[phase]]
        return algorithm.kernel, *operands, algorithm.geometry, *pool, *rectify, scratch

    def _forward(self) -> Kernel:
        a = self.arrays
        y = (a["y"], a["argmax"]) if "argmax" in a else (a["y"],)
        operands = self._operands(Phase.FORWARD, a["x"], a["weight"], a["bias"], *y)
        return each(self.thread_pool.bind(*operands), 1)

    def _backward(self) -> Kernel:
        dy, y = self.flat("dy"), self.flat("y")
        return each(self.thread_pool.bind(elementwise.relu_mask, dy, y, 1.0), self.size)

    def _gradient(self) -> tuple[NDArray[Any], ...]:
        """Return the arrays from which backward computes dz."""
        a = self.arrays
        return (a["dy"], a["argmax"]) if "argmax" in a else (a["dy"],)

    def _backward_weight(self) -> Kernel:
        a, partial = self.arrays, self.arrays["partial"]
        operands = self._operands(Phase.BACKWARD_WEIGHT, a["x"], *self._gradient(), partial)
        accumulate = self.thread_pool.bind(*operands)
        reduce = self.thread_pool.bind(
            direct_convolution.reduce_partials, partial, self.flat("dweight"), a["dbias"]
        )

        def run(context: Context) -> None:
            accumulate(context.n)
            reduce(partial.shape[1])

        return run

    def _backward_input(self) -> Kernel:
        a = self.arrays
        operands = self._operands(Phase.BACKWARD_INPUT, *self._gradient(), a["weight"], a["dx"])
        return each(self.thread_pool.bind(*operands), 1)


def _select(group: Group, precision: str) -> Mapping[Phase, Algorithm]:
    return select_algorithms(_shape(group), winograd=precision != DIRECT)


def _shape(group: Group) -> Shape:
    node = group.head
    conv: Any = node.layer
    tail: Any = group.tail.layer
    (c, h, w), (k, ho, wo) = node.input_shape, node.output_shape
    (top, _), (left, _) = conv.pads(node.input_shape)
    pool_height, halved = 0, False
    if isinstance(tail, MaxPool2d):
        pool_height = tail.windows[0]
        outside = tail.pads(node.output_shape)
        halved = tail.windows == tail.strides == (2, 2) and outside == ((0, 0), (0, 0))
    maps, out = (h, w, c), (ho, wo, k)
    return Shape(maps, out, conv.window, conv.strides, (top, left), pool_height, halved)


def fuses_convolution(nodes: tuple[Node, ...]) -> bool:
    """Return whether positions in the pooling window, if there is one, fit the mask's uint8."""
    tail = nodes[-1].layer
    return not isinstance(tail, MaxPool2d) or tail.windows[0] * tail.windows[1] < 255


class FullyConnected(Operation):
    """Dense, optionally fused with ReLU, or with ReLU and Dropout.

    An output that was dropped or rectified is 0, so backward needs only the output as its mask.
    """

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        buffers = {
            _SCRATCH[phase]: BufferSpec((setting.threads, count), "float32")
            for phase, (_, count) in _select_kernels(
                group, setting.batch_size, setting.threads
            ).items()
            if setting.training or phase is Phase.FORWARD
        }
        phases = {Phase.FORWARD: Access(("x",), ("y", "forward_scratch"))}
        if setting.training:
            if Dropout in group.kinds:
                shape = (setting.batch_size, *group.tail.output_maps)
                buffers["mask"] = DropoutMask.spec(shape)
                phases[Phase.FORWARD] = Access(("x",), ("y", "mask", "forward_scratch"))
            if ReLU in group.kinds:
                phases[Phase.BACKWARD] = Access(("dy", "y"), ("dy",))
            phases[Phase.BACKWARD_WEIGHT] = Access(("x", "dy"), ("weight_scratch",))
            phases[Phase.BACKWARD_INPUT] = Access(("dy",), ("dx", "input_scratch"))
        return GroupNeeds(phases, buffers)

    def kernels(self) -> Kernels:
        kernels = {Phase.FORWARD: self._forward()}
        if "dy" not in self.arrays:
            return kernels
        if ReLU in self.group.kinds:
            kernels[Phase.BACKWARD] = self._backward()
        kernels[Phase.BACKWARD_WEIGHT] = self._backward_weight()
        if "dx" in self.arrays:
            kernels[Phase.BACKWARD_INPUT] = self._backward_input()
        return kernels

    def _weight(self, name: str) -> NDArray[Any]:
        return self.arrays[name].reshape(-1, self.size)

    def _kernel_and_scratch(self, phase: Phase) -> tuple[Any, NDArray[Any]]:
        """Return the kernel of a phase and its scratch."""
        kernel, _ = _select_kernels(self.group, len(self.arrays["x"]), self.thread_pool.threads)[
            phase
        ]
        return kernel, self.arrays[_SCRATCH[phase]]

    def _forward(self) -> Kernel:
        kernel, scratch = self._kernel_and_scratch(Phase.FORWARD)
        dense = self.thread_pool.bind(
            kernel,
            self.rows("x"), self._weight("weight"), self.arrays["bias"], self.rows("y"),
            ReLU in self.group.kinds, scratch,
        )  # fmt: skip
        if "mask" not in self.arrays:
            return each(dense, 1)
        layer, index = self.group.tail.layer, self.group.tail.index
        assert isinstance(layer, Dropout)
        mask = DropoutMask(layer, index, self.arrays["mask"], self.thread_pool, self.seed)
        drop = mask.forward(self.rows("y"), self.rows("y"))

        def run(context: Context) -> None:
            dense(context.n)
            if context.training:
                drop(context)

        return run

    def _backward(self) -> Kernel:
        tail = self.group.tail.layer
        factor = 1.0 / (1.0 - tail.rate) if isinstance(tail, Dropout) else 1.0
        dy, y = self.flat("dy"), self.flat("y")
        return each(self.thread_pool.bind(elementwise.relu_mask, dy, y, factor), self.size)

    def _backward_weight(self) -> Kernel:
        dw, db = self._weight("dweight"), self.arrays["dbias"]
        kernel, scratch = self._kernel_and_scratch(Phase.BACKWARD_WEIGHT)
        launch = self.thread_pool.bind(
            kernel, self.rows("x"), self.rows("dy"), dw, db, scratch, varying=(0,)
        )

        def run(context: Context) -> None:
            launch(len(dw), context.n)

        return run

    def _backward_input(self) -> Kernel:
        kernel, scratch = self._kernel_and_scratch(Phase.BACKWARD_INPUT)
        weight = self._weight("weight")
        launch = self.thread_pool.bind(kernel, self.rows("dy"), weight, self.rows("dx"), scratch)
        return each(launch, 1)


_SCRATCH = {
    Phase.FORWARD: "forward_scratch",
    Phase.BACKWARD_WEIGHT: "weight_scratch",
    Phase.BACKWARD_INPUT: "input_scratch",
}
"""Names of scratch buffers, each of which is needed in one stage."""


def _select_kernels(group: Group, samples: int, threads: int) -> Mapping[Phase, tuple[Any, int]]:
    """Return the kernels of a dense layer, each with its scratch elements per thread."""
    inputs, outputs = math.prod(group.head.input_shape), group.head.output_shape[0]
    forward, weight, backward = matmul.dense_scratch(samples, inputs, outputs)
    vectors = {
        Phase.FORWARD: (matmul.dense_forward, forward),
        Phase.BACKWARD_WEIGHT: (matmul.dense_backward_weight, weight),
        Phase.BACKWARD_INPUT: (matmul.dense_backward_input, backward),
    }
    return {**vectors, **amx_matmul.choose(samples, threads, inputs, outputs)}
