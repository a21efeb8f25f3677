"""Operations with weights: the three matrix products of a convolution or dense layer.

`product` binds the forward and backward-input kernels, `wgrad_product` the weight gradient with its
split-K reduction. Subclasses select the kernel and its tile configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dptrain.backends.cuda.dense.gemm_tiles import (
    GemmConfig,
    SplitK,
    ceil_div,
    vector_elements,
)
from dptrain.backends.cuda.device.device import Macro
from dptrain.backends.cuda.device.launching import launch_reduction
from dptrain.backends.cuda.elementwise.dropout import DropoutKernels
from dptrain.backends.cuda.epilogues import Epilogue, PoolEpilogue, epilogue_of
from dptrain.backends.cuda.operation import L, Operation, vector_width
from dptrain.backends.cuda.replica import PRECISIONS
from dptrain.backends.cuda.shards import bind_sum, shard_arguments
from dptrain.backends.replica import Context, Kernel
from dptrain.network.activations import ReLU
from dptrain.network.layers import Conv2d, Dropout, MaxPool2d
from dptrain.network.normalization import BatchNorm2d
from dptrain.plan.lowering import BufferSpec, Group, Phase, Setting

MAX_GRID_Z = 65535
"""Largest number of blocks of a grid in z.

Source: CUDA C++ Programming Guide, section "Compute Capabilities"."""

NO_EPILOGUE, RELU, RELU_POOL = range(3)
"""Epilogues that are fused into product kernels, ``EPILOGUE`` of ``epilogue.cuh``."""


def fused_epilogue(group: Group) -> int:
    """Return the epilogue that is fused into the product kernels of a group."""
    if ReLU not in group.kinds:
        return NO_EPILOGUE
    return RELU_POOL if pools_in_kernel(group) else RELU


def pools_in_kernel(group: Group) -> bool:
    """Return whether the convolution kernel pools: windows and strides are 2 × 2, no padding."""
    if epilogue_of(group) is not PoolEpilogue:
        return False
    node = group.nodes[group.kinds.index(MaxPool2d)]
    pool = node.layer_of(MaxPool2d)
    square = pool.windows == pool.strides == (2, 2)
    return square and pool.pads(node.input_shape) == ((0, 0), (0, 0))


def separate_epilogue(group: Group) -> type[Epilogue] | None:
    """Return the epilogue that has kernels of its own, or None."""
    return None if pools_in_kernel(group) else epilogue_of(group)


def computed_pixels(group: Group) -> int:
    """Return the output pixels of a sample that kernels compute, without those never pooled."""
    if fused_epilogue(group) == RELU_POOL:
        return 4 * math.prod(group.tail.output_maps[1:])
    return math.prod(group.head.output_maps[1:])


def joined_maps(tensor_maps: Sequence[np.void]) -> list[np.void]:
    """Return the kernel argument that consists of all maps; none without maps."""
    return [np.void(b"".join(each.tobytes() for each in tensor_maps))] if tensor_maps else []


class WeightedOperation(Operation[L]):
    """A layer with weight and bias, with its fused epilogue.

    The weight gradient is a sum over many more terms than it has elements. With split-K, blocks
    compute parts of the sum, which a second kernel adds in a fixed order, so the result is the same
    in every run.
    """

    @classmethod
    def wgrad_split(cls, group: Group, setting: Setting) -> SplitK:
        """Return the split-K of the weight gradient."""
        raise NotImplementedError

    @classmethod
    def joins_shards(cls, group: Group, setting: Setting) -> bool:
        return cls.wgrad_split(group, setting).count * setting.shards <= MAX_GRID_Z

    @classmethod
    def add_partial_buffer(
        cls, group: Group, setting: Setting, buffers: dict[str, BufferSpec]
    ) -> None:
        """Add the buffer for the parts of the weight gradient, if there are several.

        They are those of split-K, and of micro-shards in one launch.
        """
        weight, filters = group.head.parameters[0], group.head.output_maps[0]
        parts = cls.wgrad_split(group, setting).count
        if setting.shards > 1 and cls.joins_shards(group, setting):
            parts *= setting.shards
        if parts > 1:
            buffers["partial"] = BufferSpec((parts, weight.size + filters), "float32")

    def forward(self) -> Kernel:
        """Return the stage that writes y."""
        raise NotImplementedError

    def backward_weight(self) -> Kernel:
        """Return the stage that writes dweight and dbias."""
        raise NotImplementedError

    def backward_input(self) -> Kernel:
        """Return the stage that writes dx."""
        raise NotImplementedError

    @property
    def undone_epilogue(self) -> int:
        """The epilogue that backward kernels undo while they read dy."""
        return fused_epilogue(self.group)

    @property
    def fuses_dropout(self) -> bool:
        """Whether forward kernels apply dropout."""
        fused = self.group.kinds[-1] is Dropout and separate_epilogue(self.group) is None
        return fused and self.replica.samples is not None

    def dropout_arguments(self, *, training: bool) -> list[Any]:
        """Return the last arguments of forward kernels: those of fused dropout, if any."""
        if not self.fuses_dropout:
            return []
        return DropoutKernels(self, self.group.tail).arguments(training=training)

    @property
    def dropout_factor(self) -> np.float32:
        """The factor of outputs that fused dropout keeps; 1 without dropout."""
        last = self.group.tail.layer
        rate = last.rate if isinstance(last, Dropout) else 0.0
        factor: np.float32 = np.float32(1.0 / (1.0 - rate))
        return factor

    @property
    def prefetches_weights(self) -> bool:
        """Whether kernels can read weights before the previous kernel has finished.

        Not in the first group of a step, whose previous kernel can be the update of the weights,
        and not after the kernel that folds a batch normalisation into them.
        """
        if BatchNorm2d in self.group.kinds:
            return False
        stages = self.replica.plan.stages
        return self.group.name != next(s.group for s in stages if s.phase is Phase.FORWARD)

    @property
    def defines(self) -> dict[str, int]:
        """Macros of every kernel of the layer."""
        inputs, outputs = self.group.head.input_maps[0], self.group.head.output_maps[0]
        if not isinstance(self.layer, Conv2d):
            inputs = math.prod(self.group.head.input_shape)
        return {
            "PRECISION": PRECISIONS[self.setting.precision],
            "IN_VECTOR": vector_elements(inputs, self.itemsize),
            "OUT_VECTOR": vector_elements(outputs, self.itemsize),
        }

    def wgrad_product(
        self,
        file: str,
        name: str,
        config: GemmConfig,
        terms: Callable[[int], int],
        inputs: tuple[Any, ...],
        trailing: Callable[[int, int], Sequence[np.generic]],
        *,
        bias_row: bool = True,
        tensor_maps: Callable[[int, int], Sequence[np.void]] = lambda start, stop: (),
    ) -> Kernel:
        """Return the stage of the weight gradient, with the split-K reduction if it has parts.

        With several micro-shards of this rank, blocks with another z compute each of them, and the
        reduction adds them along their tree.

        Args:
            file, name: of the product kernel.
            config: tile configuration and split-K.
            terms: function from the number of samples to the terms of the sum, in the unit of
                `config.split_k`.
            inputs: x, dz and what undoes the fused epilogue.
            trailing: function from the number of samples and the terms of a part to the kernel's
                arguments after the gradients.
            bias_row: whether the product has one more row, the gradient of the bias.
            tensor_maps: function from the first sample and the one after the last to TMA
                descriptors, which are passed together as the very first argument.
        """
        weight, columns = self.group.head.parameters[0], self.group.head.output_maps[0]
        rows = weight.size // columns + bias_row
        tile, split_k = config.tile, config.split_k
        defines = {**tile.defines, **self.defines, "EPILOGUE": self.undone_epilogue}
        num_maps = len(tensor_maps(0, self.batch_size))
        if num_maps:
            defines["TENSOR_MAPS"] = num_maps
        if self.setting.shards > 1 and self.joins_shards(self.group, self.setting):
            return self._joined_wgrad_product(
                (file, name, defines), config, inputs, trailing, rows, tensor_maps
            )

        def first(n: int) -> list[Any]:
            return [*joined_maps(tensor_maps(0, n)), *inputs]

        multiply = self.device.function(file, name, **defines)
        dw, db = self.arrays["dweight"].reshape(-1), self.arrays["dbias"]
        if split_k.count == 1:

            def run(context: Context) -> None:
                multiply(
                    tile.grid(rows, columns), tile.block,
                    [*first(context.n), dw, db, *trailing(context.n, split_k.terms)],
                    shared_bytes=tile.shared_bytes,
                )  # fmt: skip

            return run
        partial = self.arrays["partial"].reshape(-1)
        width = vector_width(columns, 4)
        reduce = self.device.function("split_k_reduce.cu", "split_k_reduce", VECTOR=width)
        sizes = np.int32(weight.size), np.int32(columns)

        def run_split_k(context: Context) -> None:
            parts = split_k.used(terms(context.n))
            multiply(
                tile.grid(rows, columns, parts), tile.block,
                [
                    *first(context.n), partial, partial[weight.size :],
                    *trailing(context.n, split_k.terms),
                ],
                shared_bytes=tile.shared_bytes,
            )  # fmt: skip
            vectors = rows * columns // width
            launch_reduction(reduce, vectors, partial, np.int32(parts), dw, sizes[0], db, sizes[1])

        return run_split_k

    def _joined_wgrad_product(
        self,
        kernel: tuple[str, str, dict[str, int]],
        config: GemmConfig,
        inputs: tuple[Any, ...],
        trailing: Callable[[int, int], Sequence[np.generic]],
        rows: int,
        tensor_maps: Callable[[int, int], Sequence[np.void]],
    ) -> Kernel:
        """Return the stage of the weight gradients of all micro-shards of this rank.

        Args:
            kernel: file, name and macros of the product kernel.
            rows: of the product.
            config, inputs, trailing, tensor_maps: as for `wgrad_product`.
        """
        file, name, defines = kernel
        shards, tile, parts = self.setting.shards, config.tile, config.split_k.count
        if "TENSOR_MAPS" in defines:
            defines["TENSOR_MAPS"] *= shards
        multiply = self.device.function(file, name, MICRO_SHARDS=1, **defines)
        weights, partial = self.group.head.parameters[0].size, self.arrays["partial"]
        add = bind_sum(self.group, self.arrays, self.replica, partial, weights, parts)
        flat = partial.reshape(-1)
        grid = tile.grid(rows, self.group.head.output_maps[0], parts * shards)

        def run(context: Context) -> None:
            ends = pairwise(context.bounds.tolist())
            maps = joined_maps([each for start, stop in ends for each in tensor_maps(start, stop)])
            last = *trailing(context.n, config.split_k.terms), *shard_arguments(context)
            multiply(
                grid, tile.block,
                [*maps, *inputs, flat, flat[weights:], *last, np.int32(parts)],
                shared_bytes=tile.shared_bytes,
            )  # fmt: skip
            add()

        return run

    def product(
        self,
        file: str,
        name: str,
        config: GemmConfig,
        rows: int,
        columns: int,
        arrays: tuple[Any, ...],
        trailing: Sequence[np.generic],
        *,
        epilogue: int,
        fuses_dropout: bool = False,
        tensor_maps: Sequence[np.void] = (),
        adds: bool = False,
        classes: int = 1,
        row_samples: int = 1,
        summed: Sequence[Any] = (),
        macros: Mapping[str, Macro] | None = None,
        split_terms: int = 0,
    ) -> Kernel:
        """Return the stage of a product with `rows` rows per sample, or per `row_samples` samples.

        Args:
            file, name: of the kernel.
            config: tile configuration and split-K for a whole batch.
            rows, columns: of the result.
            arrays: first arguments.
            trailing: arguments after the number of samples.
            epilogue: epilogue that the kernel applies (forward) or undoes (backward).
            fuses_dropout: whether the kernel can apply dropout.
            tensor_maps: TMA descriptors, passed together as the very first argument.
            adds: whether the result is added to what is stored.
            row_samples: see `InputView`; 1 for other kernels.
            summed: last arguments of a kernel that also sums its result by channel, which is
                compiled with ``SUMS``. The grid is then that of a whole batch.
            macros: further ones.
            split_terms: ``SPLIT_TERMS`` of a kernel with split-K; 0 for other kernels.
            classes: number of products, which blocks with another z compute. A kernel with several
                is compiled with ``STRIDED``.
        """
        tile, parts = config.tile, config.split_k.count
        macros = {
            **tile.defines,
            **self.defines,
            **(macros or {}),
            "EPILOGUE": epilogue,
            "PREFETCH_WEIGHTS": int(self.prefetches_weights),
        }
        if fuses_dropout:
            macros["EPILOGUE_DROPOUT"] = int(self.fuses_dropout)
        if summed:
            macros["SUMS"] = 1
        if split_terms:
            macros["SPLIT_TERMS"] = split_terms
        if adds:
            macros["ADD_GRADIENT"] = 1
        if classes > 1:
            macros["STRIDED"] = 1
        if tensor_maps:
            macros["TENSOR_MAPS"] = len(tensor_maps)
            arrays = *joined_maps(tensor_maps), *arrays
        function = self.device.function(file, name, **macros)
        last = {
            training: self.dropout_arguments(training=training) if fuses_dropout else []
            for training in (False, True)
        }

        def run(context: Context) -> None:
            if context.n or summed:
                samples = self.batch_size if summed else context.n
                function(
                    tile.grid(ceil_div(samples, row_samples) * rows, columns, parts * classes),
                    tile.block,
                    [*arrays, np.int32(context.n), *trailing, *last[context.training], *summed],
                    shared_bytes=tile.shared_bytes,
                )  # fmt: skip

        return run
