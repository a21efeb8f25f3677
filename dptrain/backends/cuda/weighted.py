"""Layers with weights bound to arrays, with what is fused behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.backends.cuda.epilogues import Epilogue, PoolEpilogue, epilogue_of
from dptrain.backends.cuda.gemm_tiles import GemmConfig, select_gemm_config, step
from dptrain.backends.cuda.launching import launch_reduction
from dptrain.backends.cuda.operations import DropoutKernels, Kernels, Operation, vector
from dptrain.backends.cuda.replica import PRECISIONS
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import Conv2d, Dropout, MaxPool2d, ReLU
from dptrain.plan.lowering import BufferSpec, Group, Phase, Setting

NOTHING, RELU, RELU_POOLING = range(3)
"""What kernels compute behind a product, `EPILOGUE` of ``epilogue.cuh``."""


def fused_epilogue(group: Group) -> int:
    """What the kernels of a group compute behind its products."""
    if ReLU not in group.kinds:
        return NOTHING
    return RELU_POOLING if pools_in_kernel(group) else RELU


def pools_in_kernel(group: Group) -> bool:
    """Whether windows of pooling are two by two and touch: the convolution's own kernel pools."""
    if epilogue_of(group) is not PoolEpilogue:
        return False
    node = group.nodes[group.kinds.index(MaxPool2d)]
    pool = node.layer
    assert isinstance(pool, MaxPool2d)
    square = pool.windows == pool.strides == (2, 2)
    return square and pool.pads(node.input_shape) == ((0, 0), (0, 0))


def separate_epilogue(group: Group) -> type[Epilogue] | None:
    """What kernels of its own compute behind the convolution and its rectifier."""
    return None if pools_in_kernel(group) else epilogue_of(group)


class WeightedOperation(Operation):
    """What layers with weight and bias have in common: three matrix products.

    The gradients of weights are summed over many more terms than they have elements. The sum is
    cut into parts, one a block, which a second kernel adds in order: the same result in every run.
    """

    @classmethod
    def add_parts(cls, group: Group, setting: Setting, buffers: dict[str, BufferSpec]) -> None:
        """Ask for memory of the parts, where there are several."""
        weight, bias = group.head.parameters
        parts = cls.weight_tiling(group, setting).parts
        if parts.count > 1:
            shape = (parts.count, weight.size + bias.size)
            buffers["partial"] = BufferSpec(shape, "float32")

    @classmethod
    def summed_pixels(cls, group: Group, setting: Setting) -> int:
        """Terms a sample of the sums that gradients of weights are."""
        return computed_pixels(group)

    @classmethod
    def weight_tiling(cls, group: Group, setting: Setting) -> GemmConfig:
        """Of the product that is the gradient of weights."""
        return cls.gathered_sum(group, setting)

    @classmethod
    def gathered_sum(cls, group: Group, setting: Setting) -> GemmConfig:
        """Of that product by ``gemm.cuh``, in one row more the gradient of the bias."""
        weight, bias = group.head.parameters
        rows, columns = weight.size // bias.size + 1, bias.size
        terms = setting.batch_size * cls.summed_pixels(group, setting)
        return select_gemm_config(setting.precision, rows, columns, terms, split=True)

    def kernels(self) -> Kernels:
        kernels = {Phase.FORWARD: self.forward()}
        if "dy" not in self.arrays:
            return kernels
        kernels[Phase.BACKWARD_WEIGHT] = self.backward_weight()
        if "dx" in self.arrays:
            kernels[Phase.BACKWARD_INPUT] = self.backward_input()
        return kernels

    def forward(self) -> Kernel:
        """Stage that writes y."""
        raise NotImplementedError

    def backward_weight(self) -> Kernel:
        """Stage that writes dweight and dbias."""
        raise NotImplementedError

    def backward_input(self) -> Kernel:
        """Stage that writes dx."""
        raise NotImplementedError

    @property
    def setting(self) -> Setting:
        """Of the plan."""
        return self.replica.plan.setting

    @property
    def precision(self) -> str:
        """Of the products."""
        return self.setting.precision

    @property
    def behind(self) -> int:
        """What backward kernels undo as they read dy."""
        return fused_epilogue(self.group)

    @property
    def drops(self) -> bool:
        """Whether forward kernels drop what they give."""
        fused = self.group.kinds[-1] is Dropout and separate_epilogue(self.group) is None
        return fused and self.replica.samples is not None

    def dropping(self, *, training: bool) -> list[Any]:
        """Last arguments of forward kernels."""
        if not self.drops:
            return []
        return DropoutKernels(self, self.group.tail).arguments(training=training)

    @property
    def factor(self) -> np.float32:
        """What outputs that were kept were multiplied with."""
        tail = self.group.tail.layer
        rate = tail.rate if isinstance(tail, Dropout) else 0.0
        factor: np.float32 = np.float32(1.0 / (1.0 - rate))
        return factor

    @property
    def early(self) -> bool:
        """Whether a product's kernel may read weights before the kernel in front of it is done.

        That may be the update, which writes them, in front of the first group of a step alone.
        """
        stages = self.replica.plan.stages
        return self.group.name != next(s.group for s in stages if s.phase is Phase.FORWARD)

    @property
    def defines(self) -> dict[str, int]:
        """Macros of every kernel of the layer."""
        inputs, outputs = self.group.head.input_maps[0], self.group.head.output_maps[0]
        if not isinstance(self.layer, Conv2d):
            inputs = math.prod(self.group.head.input_shape)
        return {
            "PRECISION": PRECISIONS[self.precision],
            "IN_VECTOR": step(inputs, self.itemsize),
            "OUT_VECTOR": step(outputs, self.itemsize),
        }

    def gradient_kernel(
        self,
        file: str,
        name: str,
        tiling: GemmConfig,
        terms: int,
        inputs: tuple[Any, ...],
        rest: Any,
    ) -> Kernel:
        """Stage of both passes.

        Args:
            file, name: of the first pass's kernel.
            tiling: of its product.
            terms: of the sum, as its parts count them, a sample.
            inputs: x, dy and what undoes what is fused.
            rest: of that kernel's arguments behind the gradients, from samples and terms a part.
        """
        weight, bias = self.group.head.parameters
        rows, columns = weight.size // bias.size + 1, bias.size
        tile, parts = tiling.tile, tiling.parts
        defines = {**tile.defines, **self.defines, "EPILOGUE": self.behind}
        first = self.device.function(file, name, **defines)
        dw, db = self.arrays["dweight"].reshape(-1), self.arrays["dbias"]
        if parts.count == 1:

            def run(context: Context) -> None:
                first(
                    tile.grid(rows, columns), tile.block,
                    [*inputs, dw, db, *rest(context.n, parts.terms)],
                    shared_bytes=tile.shared_bytes,
                )  # fmt: skip

            return run
        partial = self.arrays["partial"].reshape(-1)
        width = vector(bias.size, 4)
        second = self.device.function("split_k_reduce.cu", "split_k_reduce", VECTOR=width)
        sizes = np.int32(weight.size), np.int32(bias.size)

        def run_parts(context: Context) -> None:
            used = parts.used(context.n * terms)
            first(
                tile.grid(rows, columns, used), tile.block,
                [*inputs, partial, partial[weight.size :], *rest(context.n, parts.terms)],
                shared_bytes=tile.shared_bytes,
            )  # fmt: skip
            vectors = rows * columns // width
            launch_reduction(second, vectors, partial, np.int32(used), dw, sizes[0], db, sizes[1])

        return run_parts

    def product(
        self,
        file: str,
        name: str,
        tiling: GemmConfig,
        rows: int,
        columns: int,
        arrays: tuple[Any, ...],
        rest: Sequence[np.generic],
        *,
        behind: int,
        drops: bool = False,
        maps: Sequence[np.void] = (),
    ) -> Kernel:
        """Stage of one product with `rows` rows a sample.

        Args:
            file, name: of the kernel.
            tiling: of the product for a whole batch.
            rows, columns: of the result.
            arrays: first arguments.
            rest: arguments behind the number of samples.
            behind: what it computes, or undoes, behind the product.
            drops: whether the kernel is one that drops where the layer does.
            maps: tensor maps, together the first of all arguments where there are any.
        """
        tile, parts = tiling.tile, tiling.parts.count
        defines = {
            **tile.defines,
            **self.defines,
            "EPILOGUE": behind,
            "PREFETCH_WEIGHTS": int(self.early),
        }
        if drops:
            defines["EPILOGUE_DROPOUT"] = int(self.drops)
        if maps:
            defines["TENSOR_MAPS"] = len(maps)
            arrays = np.void(b"".join(known.tobytes() for known in maps)), *arrays
        function = self.device.function(file, name, **defines)
        last = {
            training: self.dropping(training=training) if drops else []
            for training in (False, True)
        }

        def run(context: Context) -> None:
            if context.n:
                function(
                    tile.grid(context.n * rows, columns, parts), tile.block,
                    [*arrays, np.int32(context.n), *rest, *last[context.training]],
                    shared_bytes=tile.shared_bytes,
                )  # fmt: skip

        return run


def computed_pixels(group: Group) -> int:
    """Output pixels a sample that products compute; those of no pooling window are left out."""
    if fused_epilogue(group) == RELU_POOLING:
        return 4 * math.prod(group.tail.output_maps[1:])
    return math.prod(group.head.output_maps[1:])
