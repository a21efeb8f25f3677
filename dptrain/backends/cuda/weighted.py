"""Convolution and dense layers bound to arrays, alone or with what is fused behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.backends.base import Context, Kernel
from dptrain.backends.cuda.device import Array
from dptrain.backends.cuda.geometry import fixed, geometry
from dptrain.backends.cuda.launching import launch
from dptrain.backends.cuda.operations import Dropping, Kernels, Operation
from dptrain.backends.cuda.tails import tail_of
from dptrain.backends.cuda.tiles import Parts, Tile, choose_tile, cut
from dptrain.network.layers import Dropout, ReLU
from dptrain.network.network import Node
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase, Setting

SUM_THREADS = 256


class _Weighted(Operation):
    """What layers with weight and bias have in common: three matrix products.

    The gradients of weights are summed over many more terms than they have elements. The sum is
    cut into parts, one a block, which a second kernel adds in order: the same result in every run.
    """

    @classmethod
    def add_parts(cls, group: Group, setting: Setting, buffers: dict[str, BufferSpec]) -> None:
        """Ask for memory of the parts, where there are several."""
        weight, bias = group.head.parameters
        parts = _weight_parts(group.head, setting.batch_size)
        if parts.count > 1:
            shape = (parts.count, weight.size + bias.size)
            buffers["partial"] = BufferSpec(shape, "float32")

    def kernels(self) -> Kernels:
        kernels = {Phase.FORWARD: self.forward()}
        if "dy" not in self.arrays:
            return kernels
        if ReLU in self.group.kinds:
            kernels[Phase.BACKWARD] = self.backward()
        kernels[Phase.BACKWARD_WEIGHT] = self.backward_weight()
        if "dx" in self.arrays:
            kernels[Phase.BACKWARD_INPUT] = self.backward_input()
        return kernels

    def forward(self) -> Kernel:
        """Stage that writes y."""
        raise NotImplementedError

    def backward(self) -> Kernel:
        """Stage that leads dy back through what is fused."""
        raise NotImplementedError

    def backward_weight(self) -> Kernel:
        """Stage that writes dweight and dbias."""
        raise NotImplementedError

    def backward_input(self) -> Kernel:
        """Stage that writes dx."""
        raise NotImplementedError

    @property
    def fixed(self) -> dict[str, int]:
        """Macros that compile the kernels for this layer alone."""
        return {}

    @property
    def relu(self) -> np.int32:
        """What forward kernels are told."""
        relu: np.int32 = np.int32(ReLU in self.group.kinds)
        return relu

    def gradient_kernel(self, file: str, name: str, inputs: tuple[Array, ...], rest: Any) -> Kernel:
        """Stage of both passes.

        Args:
            file, name: of the first pass's kernel.
            inputs: x and dz.
            rest: of that kernel's arguments behind the gradients, from samples and terms a part.
        """
        weight, bias = self.group.head.parameters
        rows, columns = weight.size // bias.size + 1, bias.size
        terms, parts = _terms(self.group.head), _weight_parts(self.group.head, self.batch_size)
        tile = choose_tile(rows, columns)
        first = self.device.function(file, name, **tile.defines, **self.fixed)
        dw, db = self.arrays["dweight"].reshape(-1), self.arrays["dbias"]
        if parts.count == 1:

            def run(context: Context) -> None:
                first(
                    tile.grid(rows, columns), tile.block,
                    [*inputs, dw, db, *rest(context.n, parts.terms)],
                )  # fmt: skip

            return run
        partial = self.arrays["partial"].reshape(-1)
        second = self.device.function("sum_parts.cu", "sum_parts")
        grid = (-(-rows * columns // SUM_THREADS), 1, 1)

        def run_parts(context: Context) -> None:
            used = parts.used(context.n * terms)
            first(
                tile.grid(rows, columns, used), tile.block,
                [*inputs, partial, partial[weight.size :], *rest(context.n, parts.terms)],
            )  # fmt: skip
            second(
                grid, (SUM_THREADS, 1, 1),
                [partial, np.int32(used), dw, np.int32(weight.size), db, np.int32(bias.size)],
            )  # fmt: skip

        return run_parts

    def product(
        self,
        file: str,
        name: str,
        rows: int,
        columns: int,
        arrays: tuple[Array, ...],
        rest: Sequence[np.generic],
        parts: int = 1,
    ) -> Kernel:
        """Stage of one product with `rows` rows a sample.

        Args:
            file, name: of the kernel.
            rows, columns: of the result.
            arrays: first arguments.
            rest: arguments behind the number of samples.
            parts: of the sum, each for blocks of its own.
        """
        tile: Tile = choose_tile(self.batch_size * rows, columns)
        function = self.device.function(file, name, **tile.defines, **self.fixed)

        def run(context: Context) -> None:
            if context.n:
                function(
                    tile.grid(context.n * rows, columns, parts), tile.block,
                    [*arrays, np.int32(context.n), *rest],
                )  # fmt: skip

        return run


def _terms(node: Node) -> int:
    """Terms a sample in the sum that a gradient of a weight is: its output pixels."""
    return math.prod(node.output_maps[1:])


def _weight_parts(node: Node, batch_size: int) -> Parts:
    weight, bias = node.parameters
    rows, columns = weight.size // bias.size + 1, bias.size
    return cut(batch_size * _terms(node), choose_tile(rows, columns).blocks(rows, columns))


def _input_parts(node: Node, batch_size: int) -> Parts:
    """Parts of the sums over the inputs of a dense layer."""
    outputs = node.output_shape[0]
    tiles = choose_tile(batch_size, outputs).blocks(batch_size, outputs)
    return cut(math.prod(node.input_shape), tiles)


class Convolution(_Weighted):
    """Conv2d, perhaps with ReLU, perhaps with ReLU and a tail (`tails`)."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        buffers: dict[str, BufferSpec] = {}
        tail = tail_of(group)
        maps = BufferSpec((setting.batch_size, *group.head.output_maps), setting.activations)
        if tail is not None:
            buffers = {"maps": maps, **tail.buffers(group, setting)}
        phases = {Phase.FORWARD: Access(("x",), ("y", *buffers))}
        if not setting.training:
            return GroupNeeds(phases, buffers)
        dz = "dy"
        if tail is not None:
            dz, buffers["dmaps"] = "dmaps", maps
            phases[Phase.BACKWARD] = Access(("dy", *tail.reads), ("dmaps",))
        elif ReLU in group.kinds:
            phases[Phase.BACKWARD] = Access(("dy", "y"), ("dy",))
        cls.add_parts(group, setting, buffers)
        partial = ("partial",) if "partial" in buffers else ()
        phases[Phase.BACKWARD_WEIGHT] = Access(("x", dz), partial)
        phases[Phase.BACKWARD_INPUT] = Access((dz,), ("dx",))
        return GroupNeeds(phases, buffers)

    @property
    def geometry(self) -> list[np.int32]:
        """What kernels know of the layer."""
        return geometry(self.group.head, self.layer.window)

    @property
    def fixed(self) -> dict[str, int]:
        return fixed(self.device, self.geometry)

    @property
    def dz(self) -> Array:
        """Gradient by what the convolution gave."""
        return self.arrays["dmaps" if tail_of(self.group) else "dy"]

    def forward(self) -> Kernel:
        a, (k, ho, wo), tail = self.arrays, self.group.head.output_shape, tail_of(self.group)
        y = a["maps"] if tail else a["y"]
        convolve = self.product(
            "conv2d_forward.cu", "conv2d_forward", ho * wo, k, (a["x"], a["weight"], a["bias"], y),
            (self.relu, *self.geometry),
        )  # fmt: skip
        if tail is None:
            return convolve
        behind = tail(self).forward()

        def run(context: Context) -> None:
            convolve(context)
            behind(context)

        return run

    def backward(self) -> Kernel:
        tail = tail_of(self.group)
        return self.relu_mask(1.0) if tail is None else tail(self).backward()

    def backward_weight(self) -> Kernel:
        numbers = self.geometry

        def rest(samples: int, part: int) -> tuple[np.int32, ...]:
            return np.int32(samples), np.int32(part), *numbers

        inputs = self.arrays["x"], self.dz
        return self.gradient_kernel(
            "conv2d_backward_weight.cu", "conv2d_backward_weight", inputs, rest
        )

    def backward_input(self) -> Kernel:
        a, (c, h, w) = self.arrays, self.group.head.input_shape
        arrays = self.dz, a["weight"], a["dx"]
        return self.product(
            "conv2d_backward_input.cu", "conv2d_backward_input", h * w, c, arrays, self.geometry
        )


class FullyConnected(_Weighted):
    """Dense, perhaps with ReLU, perhaps with ReLU and Dropout.

    An output that was dropped or rectified is 0, so backward needs no mask but the output.
    """

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        n, outputs = setting.batch_size, group.head.output_shape[0]
        buffers: dict[str, BufferSpec] = {}
        parts = _input_parts(group.head, n)
        if parts.count > 1:
            buffers["forward_partial"] = BufferSpec((parts.count, n * outputs), "float32")
        phases = {Phase.FORWARD: Access(("x",), ("y", *buffers))}
        if not setting.training:
            return GroupNeeds(phases, buffers)
        if ReLU in group.kinds:
            phases[Phase.BACKWARD] = Access(("dy", "y"), ("dy",))
        cls.add_parts(group, setting, buffers)
        partial = ("partial",) if "partial" in buffers else ()
        phases[Phase.BACKWARD_WEIGHT] = Access(("x", "dy"), partial)
        phases[Phase.BACKWARD_INPUT] = Access(("dy",), ("dx",))
        return GroupNeeds(phases, buffers)

    @property
    def shape(self) -> tuple[np.int32, np.int32]:
        """Inputs and outputs."""
        node = self.group.head
        return np.int32(math.prod(node.input_shape)), np.int32(node.output_shape[0])

    def forward(self) -> Kernel:
        a = self.arrays
        dense = self._in_parts() if "forward_partial" in a else self._at_once()
        if Dropout not in self.group.kinds or self.replica.samples is None:
            return dense
        drop = Dropping(self, self.group.tail).stage("dropout", a["y"], a["y"])

        def run(context: Context) -> None:
            dense(context)
            if context.training:
                drop(context)

        return run

    def _at_once(self) -> Kernel:
        a, (inputs, outputs) = self.arrays, self.shape
        arrays = a["x"], a["weight"], a["bias"], a["y"]
        rest = inputs, outputs, self.relu
        return self.product("dense.cu", "dense_forward", 1, int(outputs), arrays, rest)

    def _in_parts(self) -> Kernel:
        """The sum over the inputs by several blocks: few samples alone would keep few busy."""
        a, (inputs, outputs) = self.arrays, self.shape
        partial, parts = a["forward_partial"], _input_parts(self.group.head, self.batch_size)
        arrays, rest = (a["x"], a["weight"], partial), (inputs, outputs, np.int32(parts.terms))
        first = self.product(
            "dense.cu", "dense_forward_part", 1, int(outputs), arrays, rest, parts.count
        )
        second = self.device.function("dense.cu", "dense_forward_sum")
        args = partial, np.int32(parts.count), a["bias"], a["y"], outputs, self.relu

        def run(context: Context) -> None:
            first(context)
            size = context.n * int(outputs)
            launch(second, size, *args, np.int32(size))

        return run

    def backward(self) -> Kernel:
        tail = self.group.tail.layer
        return self.relu_mask(1.0 / (1.0 - tail.rate) if isinstance(tail, Dropout) else 1.0)

    def backward_weight(self) -> Kernel:
        shape = self.shape

        def rest(samples: int, part: int) -> tuple[np.int32, ...]:
            return np.int32(samples), *shape, np.int32(part)

        inputs = self.arrays["x"], self.arrays["dy"]
        return self.gradient_kernel("dense.cu", "dense_backward_weight", inputs, rest)

    def backward_input(self) -> Kernel:
        a, shape = self.arrays, self.shape
        arrays = a["dy"], a["weight"], a["dx"]
        return self.product("dense.cu", "dense_backward_input", 1, int(shape[0]), arrays, shape)
