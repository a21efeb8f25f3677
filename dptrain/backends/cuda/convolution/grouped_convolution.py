"""Convolutions with groups; see ``conv2d_depthwise.cu`` and ``conv2d_grouped.cu``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dptrain.backends.cuda.channels import ChannelLaunch
from dptrain.backends.cuda.convolution.bound_convolution import Case
from dptrain.backends.cuda.convolution.grouped import grouped_tiles
from dptrain.backends.cuda.convolution.grouped.grouped_tiles import (
    GroupedTile,
    ProductTile,
    WeightTile,
)
from dptrain.backends.cuda.dense.gemm_tiles import SplitK, ceil_div, split_terms
from dptrain.backends.cuda.device.hardware import limits_of
from dptrain.backends.cuda.device.launching import THREADS, launch, launch_reduction
from dptrain.backends.cuda.geometry import geometry, geometry_defines
from dptrain.backends.cuda.operation import Operation, vector_width
from dptrain.backends.cuda.replica import PRECISIONS
from dptrain.backends.folding import folds_batch_norm
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import Conv2d
from dptrain.network.network import Node
from dptrain.plan.lowering import Access, BufferSpec, Explanation, Group, GroupNeeds, Phase, Setting

MAX_SUM_TAPS = 3
"""Largest number of taps whose sums a thread keeps in registers."""


def is_grouped(node: Node) -> bool:
    """Return whether a layer is a convolution with several groups."""
    return isinstance(node.layer, Conv2d) and node.layer.groups > 1


def is_depthwise(node: Node) -> bool:
    """Return whether a layer is a convolution in which each filter reads a channel of its own."""
    layer = node.layer
    if not isinstance(layer, Conv2d) or layer.groups == 1:
        return False
    return layer.groups == layer.filters == node.input_maps[0]


class GroupedConvolution(Operation[Conv2d]):
    """Conv2d with groups, by direct sums."""

    FILE, NAME = "conv2d_grouped.cu", "conv2d_grouped"

    @classmethod
    def explain(cls, group: Group, setting: Setting) -> dict[Phase, Explanation]:
        direct = Explanation("direct", reason="the only kernel for groups")
        return dict.fromkeys(cls.needs(group, setting).phases, direct)

    @classmethod
    def wgrad_buffers(cls, group: Group, setting: Setting) -> dict[str, BufferSpec]:
        """Return the buffers of the weight gradient."""
        split_k = _wgrad_split(group, setting)
        size = group.head.parameters[0].size + group.head.output_maps[0]
        return {"partial": BufferSpec((split_k.count, size), "float32")}

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        phases = {Phase.FORWARD: Access(("x",), ("y",))}
        if not setting.training:
            return GroupNeeds(phases)
        buffers = cls.wgrad_buffers(group, setting)
        kept = tuple(name for name in buffers if name == "tickets")
        phases[Phase.BACKWARD_WEIGHT] = Access(("x", "dy", *kept), tuple(buffers))
        if group.gradients:
            phases[Phase.BACKWARD_INPUT] = Access(("dy",), ("dx",))
        return GroupNeeds(phases, buffers, kept=kept)

    def forward(self) -> Kernel:
        """Return the stage that writes y."""
        a = self.arrays
        arrays = a["x"], a["weight"], a["bias"], a["y"]
        has_bias = np.int32(self.layer.bias or folds_batch_norm(self.group))
        return self._elementwise("forward", self.size, *arrays, *self._leading, has_bias)

    def backward_input(self) -> Kernel:
        """Return the stage that writes dx."""
        a, size = self.arrays, math.prod(self.group.head.input_maps)
        arrays = a["dy"], a["weight"], a["dx"]
        return self._elementwise("backward_input", size, *arrays, *self._leading)

    @property
    def _leading(self) -> tuple[np.int32, ...]:
        """Arguments after the arrays."""
        return (np.int32(self.layer.groups),)

    @property
    def _width(self) -> int:
        """Elements that a thread computes."""
        return 1

    @property
    def _geometry(self) -> list[np.int32]:
        return geometry(self.group.head, self.layer, self.layer.window)

    @property
    def _defines(self) -> dict[str, int]:
        return {"VECTOR": self._width, **geometry_defines(self.device, self._geometry)}

    def _elementwise(self, phase: str, size: int, *args: Any) -> Kernel:
        """Return a stage with one thread for each vector of a result of `size` · n elements."""
        function = self.function(self.FILE, f"{self.NAME}_{phase}", **self._defines)

        def run(context: Context) -> None:
            threads = context.n * size // self._width
            launch(function, threads, *args, np.int32(context.n), *self._geometry)

        return run

    def backward_weight(self) -> Kernel:
        """Return the stage that writes the gradients of the parameters."""
        a, filters = self.arrays, self.group.head.output_maps[0]
        split_k = _wgrad_split(self.group, self.setting)
        multiply = self.function(self.FILE, f"{self.NAME}_backward_weight", **self._defines)
        width = vector_width(filters, 4)
        reduce = self.device.function("split_k_reduce.cu", "split_k_reduce", VECTOR=width)
        dw, db, partial = a["dweight"].reshape(-1), a["dbias"], a["partial"].reshape(-1)
        pixels, size = math.prod(self.group.head.output_maps[1:]), dw.size + filters
        sizes = np.int32(dw.size), np.int32(filters)

        def run(context: Context) -> None:
            parts = split_k.used(context.n * pixels)
            if parts:
                multiply((ceil_div(size, THREADS), parts, 1), (THREADS, 1, 1), [
                    a["x"], a["dy"], partial, *self._leading, np.int32(split_k.terms),
                    np.int32(context.n), *self._geometry,
                ])  # fmt: skip
            arguments = partial, np.int32(parts), dw, sizes[0], db, sizes[1]
            launch_reduction(reduce, size // width, *arguments)

        return run


class DepthwiseConvolution(GroupedConvolution):
    """Conv2d with as many groups as channels and filters."""

    FILE, NAME = "conv2d_depthwise.cu", "conv2d_depthwise"

    @classmethod
    def wgrad_buffers(cls, group: Group, setting: Setting) -> dict[str, BufferSpec]:
        channels, *sides = group.head.output_maps
        layout = ChannelLaunch.of(channels, setting, sums=True)
        taps = group.head.parameters[0].size // channels
        pixels = setting.batch_size * math.prod(sides)
        return {
            "partial": layout.partial(pixels, taps + 1, channels),
            "tickets": BufferSpec((taps + 1, layout.columns), "uint32"),
        }

    @property
    def _leading(self) -> tuple[np.int32, ...]:
        return ()

    @property
    def _width(self) -> int:
        return self.vector_width(self.group.head.output_maps[0])

    def backward_weight(self) -> Kernel:
        a, (channels, *sides) = self.arrays, self.group.head.output_maps
        layout = ChannelLaunch.of(channels, self.setting, sums=True)
        r, s = self.layer.window
        taps = s if s <= MAX_SUM_TAPS else 1
        fixed = geometry_defines(self.device, self._geometry)
        function = layout.function(
            self, self.FILE, f"{self.NAME}_backward_weight", SUM_TAPS=taps, **fixed
        )
        arrays = (
            a["x"], a["dy"], a["partial"], a["tickets"], a["dweight"].reshape(-1), a["dbias"],
        )  # fmt: skip
        depth = r * s // taps + int(self.layer.bias)

        def run(context: Context) -> None:
            blocks = layout.blocks(context.n * math.prod(sides))
            function((blocks, layout.columns, depth), (layout.threads, 1, 1), [
                *arrays, np.int32(context.n), *self._geometry,
            ])  # fmt: skip

        return run


class TensorGroupedConvolution(GroupedConvolution):
    """Conv2d with groups whose products run on tensor cores; see ``grouped_tile.cuh``."""

    @classmethod
    def explain(cls, group: Group, setting: Setting) -> dict[Phase, Explanation]:
        return {
            phase: Explanation(
                GroupedTile.ALGORITHM, str(grouped_tiles.choose(Case(group, setting, phase)))
            )
            for phase in cls.needs(group, setting).phases
        }

    @classmethod
    def wgrad_buffers(cls, group: Group, setting: Setting) -> dict[str, BufferSpec]:
        tile = grouped_tiles.choose(Case(group, setting, Phase.BACKWARD_WEIGHT))
        shape = tile.blocks(setting.batch_size), _gradient_size(group)
        return {"partial": BufferSpec(shape, "float32")}

    def forward(self) -> Kernel:
        a = self.arrays
        has_bias = self.layer.bias or folds_batch_norm(self.group)
        return self._product(Phase.FORWARD, a["x"], a["y"], has_bias=has_bias)

    def backward_input(self) -> Kernel:
        a = self.arrays
        return self._product(Phase.BACKWARD_INPUT, a["dy"], a["dx"], has_bias=False)

    def _kernel(self, phase: Phase, file: str, name: str, **defines: int) -> tuple[Any, Any]:
        """Return the tile of a product and its compiled kernel."""
        tile = grouped_tiles.choose(Case(self.group, self.setting, phase))
        fixed = geometry_defines(self.device, self._geometry)
        macros = {"PRECISION": PRECISIONS[self.setting.precision], **tile.defines, **fixed}
        return tile, self.device.function(file, name, **macros, **defines)

    def _product(self, phase: Phase, source: Any, result: Any, *, has_bias: bool) -> Kernel:
        """Return the stage of the forward product or of the input gradient."""
        tile: ProductTile
        tile, function = self._kernel(phase, "conv2d_grouped_tile.cu", "conv2d_grouped_tile")
        arrays = source, self.arrays["weight"], self.arrays["bias"], result
        numbers = np.int32(has_bias), np.int32(tile.shape.units)

        def run(context: Context) -> None:
            if context.n:
                function(
                    (tile.blocks(context.n), tile.grid_slabs, tile.parts), (32 * tile.warps, 1, 1),
                    [*arrays, *numbers, np.int32(context.n), *self._geometry],
                    shared_bytes=tile.shared_bytes,
                )  # fmt: skip

        return run

    def backward_weight(self) -> Kernel:
        a, bias = self.arrays, self.layer.bias
        tile: WeightTile
        tile, multiply = self._kernel(
            Phase.BACKWARD_WEIGHT, "conv2d_grouped_backward_weight.cu",
            "conv2d_grouped_backward_weight_tile", HAS_BIAS=int(bias),
        )  # fmt: skip
        filters = self.group.head.output_maps[0] if bias else 0
        dw, db, partial = a["dweight"].reshape(-1), a["dbias"], a["partial"].reshape(-1)
        width = vector_width(math.gcd(dw.size, filters), 4)
        reduce = self.device.function("split_k_reduce.cu", "split_k_reduce", VECTOR=width)
        sizes, vectors = (np.int32(dw.size), np.int32(filters)), (dw.size + filters) // width

        def run(context: Context) -> None:
            rows = tile.blocks(context.n)
            if rows:
                multiply(
                    (rows, tile.grid_slabs, tile.parts), (32 * tile.warps, 1, 1),
                    [a["x"], a["dy"], partial, np.int32(tile.shape.units), np.int32(context.n),
                     *self._geometry],
                    shared_bytes=tile.shared_bytes,
                )  # fmt: skip
            arguments = partial, np.int32(rows), dw, sizes[0], db, sizes[1]
            launch_reduction(reduce, vectors, *arguments)

        return run


def grouped_operation(group: Group, setting: Setting) -> type[GroupedConvolution]:
    """Return the operation of a convolution with several groups."""
    if is_depthwise(group.head):
        return DepthwiseConvolution
    on_tensor_cores = grouped_tiles.supports(Case(group, setting, Phase.FORWARD))
    return TensorGroupedConvolution if on_tensor_cores else GroupedConvolution


def _gradient_size(group: Group) -> int:
    """Return the elements of the gradients of the parameters."""
    bias = group.head.layer_of(Conv2d).bias
    return group.head.parameters[0].size + (group.head.output_maps[0] if bias else 0)


def _wgrad_split(group: Group, setting: Setting) -> SplitK:
    """Return the split-K of the weight gradient, the sum over the pixels of a batch."""
    filters, *sides = group.head.output_maps
    threads = ceil_div(group.head.parameters[0].size + filters, THREADS) * THREADS
    terms = setting.batch_size * math.prod(sides)
    return split_terms(terms, threads, limits_of(setting))
