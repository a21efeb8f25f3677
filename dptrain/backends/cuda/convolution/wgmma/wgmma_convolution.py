"""Convolutions with many channels on Hopper GPUs, whose patches TMA copies for wgmma."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dptrain.backends.cuda.convolution.bound_convolution import BoundConvolution, Case, Extra
from dptrain.backends.cuda.convolution.halo.halo_tiles import supports_halo_tiles
from dptrain.backends.cuda.convolution.wgmma import wgmma_convolution_tiles
from dptrain.backends.cuda.convolution.wgmma.patch_grids import (
    class_grids,
    forward_grid,
    pixel_classes,
)
from dptrain.backends.cuda.convolution.wgmma.wgmma_convolution_tiles import (
    ConvolutionProduct,
    Splits,
    fills_slices,
)
from dptrain.backends.cuda.convolution.wgmma.wgmma_operands import (
    padded_pitch,
    rounded_weights,
    transposed_rows,
    transposed_weights,
)
from dptrain.backends.cuda.dense.gemm_tiles import GemmConfig
from dptrain.backends.cuda.dense.wgmma_gemm_tiles import WgmmaTile, step_terms
from dptrain.backends.cuda.device.device import Array
from dptrain.backends.cuda.device.launching import launch
from dptrain.backends.cuda.device.tensor_maps import ARCHITECTURE, PatchGrid
from dptrain.backends.cuda.normalization.batch_norm import (
    FROM_Y,
    activation_macros,
    activation_source,
)
from dptrain.backends.cuda.weighted import (
    NO_EPILOGUE,
    RELU_POOL,
    fused_epilogue,
    separate_epilogue,
)
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import Dropout
from dptrain.plan.lowering import BufferSpec, Phase

FILE = "conv2d_wgmma.cu"

OPERAND, TRANSPOSED = "operand_weight", "transposed"
"""Buffers of the weights in the operand type (rounded in bf16, transposed in tf32), and of the
transposed gradient of the result for the weight gradient in tf32."""

GRADIENT_SUMS = "gradient_sums"
"""Buffer of the sums of the input gradient for a batch normalisation."""

MAX_JOINED_SHARDS = 14
"""Largest number of micro-shards with two tensor maps of 128 bytes in the 4 KB of arguments."""

PARTS: Mapping[Phase, str] = {
    Phase.FORWARD: "forward_partial", Phase.BACKWARD_INPUT: "input_partial",
}  # fmt: skip
"""Buffers of the split-K parts."""

Maps = Sequence[np.void]


def supports(case: Case) -> bool:
    """Return whether the kernels exist for a case."""
    head, limits = case.group.head, case.limits
    return (
        limits.capability == ARCHITECTURE
        and not case.is_dilated
        and supports_halo_tiles(case.view, case.precision, case.strides, limits)
        and wgmma_convolution_tiles.fit(limits)
        and fills_slices(case.precision, head.input_maps[0], head.output_maps[0])
        and forward_grid(head).is_encodable(_sizes(head.input_maps))
        and all(grid.is_encodable(_sizes(head.output_maps)) for grid in class_grids(head))
        and product_of(case) is not None
    )


def product_of(case: Case) -> ConvolutionProduct | None:
    """Return the product of a case; None if these kernels cannot apply or undo its epilogue."""
    group, n = case.group, case.samples
    (channels, *_), (filters, *_) = group.head.input_maps, group.head.output_maps
    pixels, taps = math.prod(group.head.output_maps[1:]), math.prod(case.layer.window)
    size = np.dtype(case.setting.activations).itemsize
    fused, separate = fused_epilogue(group), separate_epilogue(group) is not None
    if case.phase is Phase.FORWARD:
        drops = group.kinds[-1] is Dropout and not separate
        if fused == RELU_POOL or drops:
            return None
        return ConvolutionProduct(
            case.precision, n * pixels, filters, (taps * channels,), size, "few"
        )
    if fused != NO_EPILOGUE and not separate:
        return None
    if case.phase is Phase.BACKWARD_INPUT:
        classes = pixel_classes(group.head)
        rows = max(each.pixels for each in classes)
        terms = tuple(each.taps * filters for each in classes)
        size *= 2 if "dx" in group.adds else 1
        splits: Splits = "few" if len(classes) == 1 else "no"
        return ConvolutionProduct(case.precision, n * rows, channels, terms, size, splits)
    if case.layer.bias:
        return None
    transposed = n * pixels * filters if case.precision == "tf32" else 0
    return ConvolutionProduct(
        case.precision, taps * channels, filters, (n * pixels,), 4, "many", transposed
    )


def joins_shards(case: Case) -> bool:
    """Return whether one launch can compute the weight gradients of all micro-shards of a rank.

    Tensor maps are arguments of the kernel. In tf32, the gradient of each micro-shard is transposed
    before.
    """
    return case.precision != "tf32" and case.setting.shards <= MAX_JOINED_SHARDS


def estimate(case: Case) -> Sequence[tuple[float, GemmConfig]]:
    """Return the estimated µs of the configurations."""
    product = product_of(case)
    assert product is not None
    ranked = list(wgmma_convolution_tiles.rank_configs(product, case.limits))
    _, best = min(ranked, key=lambda pair: pair[0])
    # Split-K parts are not summed by channel where they are computed.
    saved = case.summing_us if best.split_k.count == 1 else 0.0
    return [
        (max(time - saved, wgmma_convolution_tiles.LAUNCH_US), config) for time, config in ranked
    ]


def config_of(case: Case, config: GemmConfig) -> GemmConfig:
    """Return the configuration of a product."""
    return config


def sum_rows(case: Case, config: GemmConfig) -> int:
    """Return the rows of sums of the result that forward or the input gradient can write."""
    if config.split_k.count > 1:
        return 0
    head = case.group.head
    classes, pixels, columns = 1, math.prod(head.output_maps[1:]), head.output_maps[0]
    if case.phase is Phase.BACKWARD_INPUT:
        found = pixel_classes(head)
        classes, pixels, columns = len(found), max(c.pixels for c in found), head.input_maps[0]
    blocks, *_ = config.tile.grid(case.samples * pixels, columns)
    return blocks * classes


def buffers(case: Case, config: GemmConfig) -> Extra:
    """Return the buffers of operands, of split-K parts and of sums."""
    group, phase = case.group, case.phase
    filters, *sides = group.head.output_maps
    prepared: dict[str, BufferSpec] = {}
    written: dict[str, BufferSpec] = {}
    reads: tuple[str, ...] = ()
    if phase is Phase.FORWARD or (phase is Phase.BACKWARD_INPUT and case.precision != "tf32"):
        size = group.head.parameters[0].size
        prepared[OPERAND] = BufferSpec((size,), case.setting.activations)
    if config.split_k.count > 1 and phase in PARTS:
        shape = group.head.output_shape if phase is Phase.FORWARD else group.head.input_shape
        size = case.setting.batch_size * math.prod(shape)
        written[PARTS[phase]] = BufferSpec((config.split_k.count, size), "float32")
    if phase is Phase.BACKWARD_WEIGHT and case.precision == "tf32":
        pitch = padded_pitch(case.samples * math.prod(sides))
        written[TRANSPOSED] = BufferSpec((filters, pitch), "float32")
    if phase is Phase.BACKWARD_INPUT and group.normalization is not None:
        rows = sum_rows(case, config), 2, group.head.input_maps[0]
        written[GRADIENT_SUMS] = BufferSpec(rows, "float32")
        masked = ("x",) if activation_source(group.normalization) == FROM_Y else ()
        reads = "normalized", "normalized_moments", *masked
    return Extra(prepared, written, reads)


def prepare(operation: BoundConvolution, configs: Mapping[Phase, GemmConfig]) -> Kernel:
    """Return the kernel that writes the weights to the buffer `OPERAND`."""
    convert = transposed_weights if operation.setting.precision == "tf32" else rounded_weights
    enqueue = convert(operation, operation.arrays["weight"], operation.arrays[OPERAND])

    def run(context: Context) -> None:
        if context.n:
            enqueue()

    return run


def bind(operation: BoundConvolution, phase: Phase, config: GemmConfig) -> Kernel:
    """Return the stage of a product."""
    kernels = _Kernels(operation, config)
    stages = {
        Phase.FORWARD: kernels.forward, Phase.BACKWARD_WEIGHT: kernels.backward_weight,
        Phase.BACKWARD_INPUT: kernels.backward_input,
    }  # fmt: skip
    return stages[phase]()


class _Kernels:
    """The kernels of a convolution with one configuration.

    Args:
        operation: the convolution.
        config: the configuration.
    """

    def __init__(self, operation: BoundConvolution, config: GemmConfig) -> None:
        self._operation, self._config = operation, config
        self._group, self._arrays = operation.group, operation.arrays
        assert isinstance(config.tile, WgmmaTile)
        self._tile, self._step = config.tile, step_terms(operation.setting.precision)
        # The array of the gradient of the convolution's result.
        self._dz = "dmaps" if operation.reads_dmaps else "dy"

    def forward(self) -> Kernel:
        """Return the stage of the forward product."""
        operation, config, tile = self._operation, self._config, self._tile
        a, weights = self._arrays, self._arrays[OPERAND]
        (channels, *_), (filters, *_) = self._group.head.input_maps, self._group.head.output_maps
        patches = self._patch_map(
            "x", forward_grid(self._group.head), tile.rows, operation.batch_size
        )
        terms, step = a["weight"].size // filters, self._step
        if operation.setting.precision == "tf32":
            shape, box = (terms // channels * filters, channels), (tile.columns, step)
        else:
            shape, box = (terms, filters), (step, step)
        maps = [*patches, *self._matrix_map(weights, shape, box)]
        y, epilogue = operation.outputs[0], fused_epilogue(self._group)
        result = y if config.split_k.count == 1 else a[PARTS[Phase.FORWARD]]
        product = operation.product(
            FILE, "conv2d_forward_wgmma", config,
            math.prod(self._group.head.output_maps[1:]), filters,
            (a["x"], weights, a["bias"], result), operation.geometry,
            epilogue=epilogue, tensor_maps=maps, summed=operation.output_sums,
            split_terms=_split_terms(config),
        )  # fmt: skip
        size = math.prod(self._group.head.output_shape)
        return self._with_reduction(Phase.FORWARD, config, product, y, size, epilogue)

    def backward_input(self) -> Kernel:
        """Return the stage of the input gradient."""
        operation, config, tile = self._operation, self._config, self._tile
        a, head = self._arrays, self._group.head
        weights = a["weight"] if operation.setting.precision == "tf32" else a[OPERAND]
        (channels, *_), (filters, *_) = head.input_maps, head.output_maps
        shape, box = (a["weight"].size // filters, filters), (tile.columns, self._step)
        maps = list(self._matrix_map(weights, shape, box))
        for grid in class_grids(head):
            maps += self._patch_map(self._dz, grid, tile.rows, operation.batch_size)
        result = a["dx" if config.split_k.count == 1 else PARTS[Phase.BACKWARD_INPUT]]
        product = operation.product(
            FILE, "conv2d_backward_input_wgmma", config,
            max(each.pixels for each in pixel_classes(head)), channels,
            (a[self._dz], weights, result), operation.geometry,
            epilogue=NO_EPILOGUE, tensor_maps=maps, adds="dx" in self._group.adds,
            classes=math.prod(operation.layer.strides), split_terms=_split_terms(config),
            **self._gradient_sums(),
        )  # fmt: skip
        size = math.prod(head.input_shape)
        return self._with_reduction(
            Phase.BACKWARD_INPUT, config, product, a["dx"], size, NO_EPILOGUE
        )

    def _gradient_sums(self) -> dict[str, Any]:
        """Return the arguments of `product` with which dx is replaced and summed, if it is."""
        if self._group.normalization is None:
            return {}
        names = "moments", "weight", "bias"
        normalization = [self._arrays[f"normalized_{name}"] for name in names]
        arrays = self._arrays["normalized"], self._arrays["x"], *normalization
        return {
            "summed": (*arrays, self._arrays[GRADIENT_SUMS]),
            "macros": activation_macros(self._group.normalization),
        }

    def _with_reduction(
        self, phase: Phase, config: GemmConfig, product: Kernel, result: Array, size: int,
        epilogue: int,
    ) -> Kernel:  # fmt: skip
        """Return a product with the kernel that adds its split-K parts, if it has several.

        Args:
            phase, config, product: of the product.
            result: receives the sums.
            size: elements of the result of a sample.
            epilogue: of the layer.
        """
        if config.split_k.count == 1:
            return product
        operation = self._operation
        macros = {**config.tile.defines, **operation.defines, "EPILOGUE": epilogue}
        if phase is Phase.BACKWARD_INPUT and "dx" in self._group.adds:
            macros["ADD_GRADIENT"] = 1
        reduce = operation.device.function(FILE, "conv2d_wgmma_reduce", **macros)
        # Forward has a bias in any case: of the layer, of a folded normalisation, or 0. The input
        # gradient passes the array, which its kernel does not read.
        forward = phase is Phase.FORWARD
        arrays = self._arrays[PARTS[phase]], self._arrays["bias"], result
        columns = np.int32(self._group.head.output_maps[0])
        parts, has_bias = np.int32(config.split_k.count), np.int32(forward)

        def run(context: Context) -> None:
            product(context)
            count = context.n * size
            launch(reduce, count // 4, *arrays, parts, has_bias, columns, np.int32(count))

        return run

    def backward_weight(self) -> Kernel:
        """Return the stage of the weight gradient."""
        operation, config = self._operation, self._config
        a, head, step = self._arrays, self._group.head, self._step
        filters, pixels = head.output_maps[0], math.prod(head.output_maps[1:])
        transposes = operation.setting.precision == "tf32"
        dz = a[TRANSPOSED if transposes else self._dz]
        known: dict[tuple[int, int], Maps] = {}

        def tensor_maps(start: int, stop: int) -> Maps:
            # Terms beyond the samples are zero.
            if (start, stop) not in known:
                n = max(stop - start, 1)
                terms, box = n * pixels, (step, step)
                shape, source = (terms, filters), dz if transposes else dz[start:]
                if transposes:
                    shape, box = (filters, padded_pitch(terms)), (self._tile.columns, step)
                known[start, stop] = [
                    *self._patch_map("x", forward_grid(head), step, n, start),
                    *self._matrix_map(source, shape, box),
                ]
            return known[start, stop]

        product = operation.wgrad_product(
            FILE, "conv2d_backward_weight_wgmma", config, lambda samples: samples * pixels,
            (a["x"], dz), operation.trailing, bias_row=False, tensor_maps=tensor_maps,
        )  # fmt: skip
        if not transposes:
            return product
        transpose = transposed_rows(operation, a[self._dz], dz, filters)

        def run(context: Context) -> None:
            transpose(context.n * pixels)
            product(context)

        return run

    def _patch_map(
        self, name: str, grid: PatchGrid, positions: int, samples: int, first: int = 0
    ) -> Maps:
        """Return the tensor map of the patches of x, or of the gradient of the result.

        Args:
            name: of the array.
            grid, positions: as for `Device.patch_map`.
            samples, first: their number, and the first of them.
        """
        head = self._group.head
        channels, *sides = head.input_maps if name == "x" else head.output_maps
        found = self._operation.device.patch_map(
            self._arrays[name][first:], (samples, *sides, channels), grid, (positions, self._step),
            self._operation.setting.precision,
        )  # fmt: skip
        return [] if found is None else [found]

    def _matrix_map(self, array: Array, shape: tuple[int, int], box: tuple[int, int]) -> Maps:
        operation = self._operation
        found = operation.device.tensor_map(array, shape, box, operation.setting.precision)
        return [] if found is None else [found]


def _split_terms(config: GemmConfig) -> int:
    """Return the terms of a split-K part; 0 if there is one."""
    return config.split_k.terms if config.split_k.count > 1 else 0


def _sizes(maps: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of maps (C, H, W)."""
    return maps[1], maps[2]
