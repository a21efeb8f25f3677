"""Convolutions with groups; see ``conv2d_depthwise.cu`` and ``conv2d_grouped.cu``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dptrain.backends.cuda.convolution.bound_convolution import Case
from dptrain.backends.cuda.convolution.grouped import grouped_tiles
from dptrain.backends.cuda.convolution.grouped.grouped_tiles import (
    GroupedTile,
    ProductTile,
    WeightTile,
)
from dptrain.backends.cuda.dense.gemm_tiles import SplitK, ceil_div, split_terms
from dptrain.backends.cuda.device.device import Function
from dptrain.backends.cuda.device.hardware import WARP_SIZE, limits_of
from dptrain.backends.cuda.device.launching import THREADS, launch, launch_reduction
from dptrain.backends.cuda.geometry import geometry, geometry_defines
from dptrain.backends.cuda.operation import Operation, vector_width
from dptrain.backends.cuda.replica import PRECISIONS
from dptrain.backends.folding import folds_batch_norm
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import Conv2d
from dptrain.network.network import Node
from dptrain.plan.limits import REGISTERS
from dptrain.plan.lowering import Access, BufferSpec, Explanation, Group, GroupNeeds, Phase, Setting

STRIP_PIXELS, STRIP_VECTOR, STRIP_THREADS = 14, 4, 128
"""Most pixels and channels of a thread of a depthwise convolution, and threads of a block: with a
window of 7 columns, its results and the weights of a row of taps are 84 numbers in registers."""

FILLING_WARPS = 32
"""Warps of a multiprocessor without which threads have fewer channels. Strips of up to 14 pixels
and this rule take 0.92 times as long as strips of up to 8 pixels of 4 channels, and blocks of 128
threads 0.97 times as long as those of 256: geometric means of 80 and of 48 products of eight
networks with 64 samples in bf16 (H200, 2026-11-30)."""

MAX_SLOTS = 32
"""Most adjacent vectors of a block."""

WGRAD_THREADS, WGRAD_REGISTERS, TAP_REGISTERS = 768, 36, 8
"""Most threads of a block of weight gradients, and registers of a thread: for any window, and for
each column of taps. A block has all registers of a multiprocessor: each writes a row of sums."""


@dataclass(frozen=True)
class DepthwiseTile:
    """The launch of a product of a depthwise convolution; see ``conv2d_depthwise.cu``.

    Attributes:
        case: the product.
        width: elements of a vector.
        strip: pixels of a thread.
        slots: adjacent vectors of a block.
        lines: strips of a block.
    """

    case: Case
    width: int
    strip: int
    slots: int
    lines: int

    @classmethod
    def of(cls, case: Case) -> DepthwiseTile:
        """Return the launch of a product."""
        channels, (rows, columns) = case.group.head.input_maps[0], cls._sides(case)
        strip = ceil_div(columns, ceil_div(columns, STRIP_PIXELS))
        width = math.gcd(channels, STRIP_VECTOR)
        if case.phase is Phase.BACKWARD_INPUT:
            stride = case.layer.strides[1]
            strip = ceil_div(strip, stride) * stride
        taps = case.layer.window[0] if case.phase is Phase.BACKWARD_WEIGHT else 1
        warps = case.samples * rows * ceil_div(columns, strip) * channels // width // WARP_SIZE
        if taps == 1 and width > 2 and warps < FILLING_WARPS * case.limits.multiprocessors:
            width = 2
        threads = STRIP_THREADS
        if case.phase is Phase.BACKWARD_WEIGHT:
            registers = WGRAD_REGISTERS + TAP_REGISTERS * case.layer.window[1]
            threads = min(REGISTERS // registers, WGRAD_THREADS)
        vectors, most = channels // width, max(min(MAX_SLOTS, threads // taps), 1)
        slots = max(count for count in range(1, most + 1) if vectors % count == 0)
        return cls(case, width, strip, slots, max(threads // (slots * taps), 1))

    @staticmethod
    def _sides(case: Case) -> list[int]:
        """Return rows and columns of the maps that strips divide."""
        head = case.group.head
        maps = head.input_maps if case.phase is Phase.BACKWARD_INPUT else head.output_maps
        return list(maps[1:])

    def __str__(self) -> str:
        return f"strips of {self.strip} pixels, {self.slots * self.width} channels x {self.lines}"

    def all_lines(self, samples: int) -> int:
        """Return the number of strips."""
        rows, columns = self._sides(self.case)
        if self.case.phase is Phase.BACKWARD_INPUT:
            stride = self.case.layer.strides[0]
            rows = ceil_div(rows, stride) * stride
        return samples * rows * ceil_div(columns, self.strip)

    @property
    def columns(self) -> int:
        """Blocks along the channels."""
        return self.case.group.head.input_maps[0] // self.width // self.slots

    def wgrad_blocks(self, samples: int) -> int:
        """Return the blocks of a column of the weight gradient."""
        most = max(self.case.limits.multiprocessors // self.columns, 1)
        return min(ceil_div(self.all_lines(samples), self.lines), most)

    @property
    def defines(self) -> dict[str, int]:
        """Macros of the kernel."""
        layer = self.case.layer
        (top, _), (left, _) = layer.pads(self.case.group.head.input_maps)
        return {
            "WINDOW_R": layer.window[0], "WINDOW_S": layer.window[1],
            "STEP_H": layer.strides[0], "STEP_W": layer.strides[1], "PAD_H": top, "PAD_W": left,
            "DILATION_H": layer.dilations[0], "DILATION_W": layer.dilations[1],
            "STRIP": self.strip, "SLOTS": self.slots, "LINES": self.lines, "VECTOR": self.width,
        }  # fmt: skip


def is_grouped(node: Node) -> bool:
    """Return whether a layer is a convolution with several groups."""
    return isinstance(node.layer, Conv2d) and node.layer.groups > 1


def is_depthwise(node: Node) -> bool:
    """Return whether a layer is a convolution in which each filter reads a channel of its own."""
    layer = node.layer
    if not isinstance(layer, Conv2d) or layer.groups == 1:
        return False
    return layer.groups == layer.filters == node.input_maps[0]


def gradient_size(group: Group) -> int:
    """Return the elements of the gradients of the parameters."""
    return sum(parameter.size for parameter in group.head.parameters)


class GroupedConvolution(Operation[Conv2d]):
    """Conv2d with groups, by direct sums."""

    FILE, NAME = "conv2d_grouped.cu", "conv2d_grouped"

    @classmethod
    def adds_gradient(cls, group: Group, local: str) -> bool:
        return True

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
        phases[Phase.BACKWARD_WEIGHT] = Access(("x", "dy"), tuple(buffers))
        if group.gradients:
            phases[Phase.BACKWARD_INPUT] = Access(("dy",), ("dx",))
        return GroupNeeds(phases, buffers)

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
    def _geometry(self) -> list[np.int32]:
        return geometry(self.group.head, self.layer, self.layer.window)

    @property
    def _defines(self) -> dict[str, int]:
        return geometry_defines(self.device, self._geometry)

    def _elementwise(self, phase: str, size: int, *args: Any) -> Kernel:
        """Return a stage with one thread for each element of a result of `size` · n elements."""
        adding = self._adding("dx") if phase == "backward_input" else {}
        function = self.function(self.FILE, f"{self.NAME}_{phase}", **self._defines, **adding)

        def run(context: Context) -> None:
            launch(function, context.n * size, *args, np.int32(context.n), *self._geometry)

        return run

    def backward_weight(self) -> Kernel:
        """Return the stage that writes the gradients of the parameters."""
        a, filters = self.arrays, self.group.head.output_maps[0]
        split_k = _wgrad_split(self.group, self.setting)
        multiply = self.function(self.FILE, f"{self.NAME}_backward_weight", **self._defines)
        partial, size = a["partial"].reshape(-1), self.group.head.parameters[0].size + filters
        pixels, reduce = math.prod(self.group.head.output_maps[1:]), self._reduction(bias=True)

        def run(context: Context) -> None:
            parts = split_k.used(context.n * pixels)
            if parts:
                multiply((ceil_div(size, THREADS), parts, 1), (THREADS, 1, 1), [
                    a["x"], a["dy"], partial, *self._leading, np.int32(split_k.terms),
                    np.int32(context.n), *self._geometry,
                ])  # fmt: skip
            reduce(parts)

        return run

    def _reduction(self, *, bias: bool | None = None) -> Callable[[int], None]:
        """Return a function that enqueues the addition of rows of `partial`.

        Args:
            bias: whether the rows contain the gradient of the bias; None if the layer has one.
        """
        a, has_bias = self.arrays, self.layer.bias if bias is None else bias
        biases = self.group.head.output_maps[0] if has_bias else 0
        dw, db, partial = a["dweight"].reshape(-1), a["dbias"], a["partial"].reshape(-1)
        width = vector_width(math.gcd(dw.size, biases), 4)
        function = self.device.function("split_k_reduce.cu", "split_k_reduce", VECTOR=width)
        sizes, vectors = (np.int32(dw.size), np.int32(biases)), (dw.size + biases) // width

        def reduce(rows: int) -> None:
            arguments = partial, np.int32(rows), dw, sizes[0], db, sizes[1]
            launch_reduction(function, vectors, *arguments)

        return reduce


class DepthwiseConvolution(GroupedConvolution):
    """Conv2d with as many groups as channels and filters."""

    FILE, NAME = "conv2d_depthwise.cu", "conv2d_depthwise"

    @classmethod
    def explain(cls, group: Group, setting: Setting) -> dict[Phase, Explanation]:
        return {
            phase: Explanation("strips", str(DepthwiseTile.of(Case(group, setting, phase))))
            for phase in cls.needs(group, setting).phases
        }

    @classmethod
    def wgrad_buffers(cls, group: Group, setting: Setting) -> dict[str, BufferSpec]:
        tile = DepthwiseTile.of(Case(group, setting, Phase.BACKWARD_WEIGHT))
        shape = tile.wgrad_blocks(setting.summed_samples), gradient_size(group)
        return {"partial": BufferSpec(shape, "float32")}

    def forward(self) -> Kernel:
        a = self.arrays
        has_bias = np.int32(self.layer.bias or folds_batch_norm(self.group))
        return self._strips(Phase.FORWARD, a["x"], a["weight"], a["bias"], a["y"], has_bias)

    def backward_input(self) -> Kernel:
        a = self.arrays
        return self._strips(Phase.BACKWARD_INPUT, a["dy"], a["weight"], a["dx"])

    def _kernel(self, phase: Phase, **defines: int) -> tuple[DepthwiseTile, Function]:
        """Return the tile of a product and its compiled kernel."""
        tile = DepthwiseTile.of(Case(self.group, self.setting, phase))
        fixed = geometry_defines(self.device, self._geometry)
        name = f"{self.NAME}_{phase.value}"
        return tile, self.function(self.FILE, name, **tile.defines, **defines, **fixed)

    def _strips(self, phase: Phase, *arguments: Any) -> Kernel:
        """Return the stage of the forward product or of the input gradient."""
        adding = self._adding("dx") if phase is Phase.BACKWARD_INPUT else {}
        tile, function = self._kernel(phase, **adding)

        def run(context: Context) -> None:
            if context.n:
                grid = ceil_div(tile.all_lines(context.n), tile.lines) * tile.columns, 1, 1
                block = tile.slots * tile.lines, 1, 1
                function(grid, block, [*arguments, np.int32(context.n), *self._geometry])

        return run

    def backward_weight(self) -> Kernel:
        a = self.arrays
        tile, multiply = self._kernel(Phase.BACKWARD_WEIGHT, HAS_BIAS=int(self.layer.bias))
        reduce = self._reduction()

        def run(context: Context) -> None:
            rows = tile.wgrad_blocks(context.n)
            if rows:
                block = tile.slots * self.layer.window[0] * tile.lines, 1, 1
                arrays = a["x"], a["dy"], a["partial"].reshape(-1)
                multiply(
                    (rows * tile.columns, 1, 1), block,
                    [*arrays, np.int32(context.n), *self._geometry],
                )  # fmt: skip
            reduce(rows)

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
        shape = tile.blocks(setting.summed_samples), gradient_size(group)
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
        adding = self._adding("dx") if phase is Phase.BACKWARD_INPUT else {}
        name = "conv2d_grouped_tile"
        tile, function = self._kernel(phase, f"{name}.cu", name, **adding)
        arrays = source, self.arrays["weight"], self.arrays["bias"], result

        def run(context: Context) -> None:
            if context.n:
                function(
                    (tile.blocks(context.n), tile.grid_slabs, tile.parts), (32 * tile.warps, 1, 1),
                    [*arrays, np.int32(has_bias), np.int32(context.n), *self._geometry],
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
        partial, reduce = a["partial"].reshape(-1), self._reduction()

        def run(context: Context) -> None:
            rows = tile.blocks(context.n)
            if rows:
                multiply(
                    (rows, tile.grid_slabs, tile.parts), (32 * tile.warps, 1, 1),
                    [a["x"], a["dy"], partial, np.int32(context.n), *self._geometry],
                    shared_bytes=tile.shared_bytes,
                )  # fmt: skip
            reduce(rows)

        return run


def grouped_operation(group: Group, setting: Setting) -> type[GroupedConvolution]:
    """Return the operation of a convolution with several groups."""
    if is_depthwise(group.head):
        return DepthwiseConvolution
    on_tensor_cores = grouped_tiles.supports(Case(group, setting, Phase.FORWARD))
    return TensorGroupedConvolution if on_tensor_cores else GroupedConvolution


def _wgrad_split(group: Group, setting: Setting) -> SplitK:
    """Return the split-K of the weight gradient, the sum over the pixels of a batch."""
    filters, *sides = group.head.output_maps
    threads = ceil_div(group.head.parameters[0].size + filters, THREADS) * THREADS
    terms = setting.summed_samples * math.prod(sides)
    return split_terms(terms, threads, limits_of(setting))
