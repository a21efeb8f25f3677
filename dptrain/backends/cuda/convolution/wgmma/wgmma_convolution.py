"""Convolutions with many channels on Hopper GPUs, whose patches TMA copies for wgmma."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dptrain.backends.cuda.convolution.few_channels.few_channel_wgrad_tiles import (
    FewChannelWgradTile,
)
from dptrain.backends.cuda.convolution.gather_cost import CYCLES_PER_US, halo_us
from dptrain.backends.cuda.convolution.halo.halo_convolution import HaloConvolution
from dptrain.backends.cuda.convolution.halo.halo_tiles import InputView
from dptrain.backends.cuda.convolution.halo.implicit_gemm_cost import estimated_cycles
from dptrain.backends.cuda.convolution.halo.implicit_gemm_tiles import ImplicitGemmTile
from dptrain.backends.cuda.convolution.halo.wgrad_tiles import (
    WgradTile,
    estimate_cycles,
    gathered_us,
)
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
    rank_configs,
    select_config,
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
from dptrain.backends.cuda.device.hardware import limits_of
from dptrain.backends.cuda.device.launching import launch
from dptrain.backends.cuda.device.tensor_maps import ARCHITECTURE, PatchGrid
from dptrain.backends.cuda.normalization.batch_norm import (
    MASK_FROM_X,
    MASK_FROM_Y,
    NO_MASK,
    relu_mask,
)
from dptrain.backends.cuda.weighted import (
    NO_EPILOGUE,
    RELU_POOL,
    fused_epilogue,
    separate_epilogue,
)
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import Conv2d, Dropout
from dptrain.network.network import Node
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase, Setting, stage_name
from dptrain.plan.selection import KernelSelection

FILE = "conv2d_wgmma.cu"

OPERAND, TRANSPOSED = "operand_weight", "transposed"
"""Buffers of the weights in the operand type (rounded in bf16, transposed in tf32), and of the
transposed gradient of the result for the weight gradient in tf32."""

GRADIENT_SUMS = "gradient_sums"
"""Buffer of the sums of the input gradient for a batch normalisation."""

PARTS: Mapping[Phase, str] = {
    Phase.FORWARD: "forward_partial", Phase.BACKWARD_INPUT: "input_partial",
}  # fmt: skip
"""Buffers of the split-K parts."""

ADDED, STRIDED, STRIDED_WEIGHT = 1.15, 1.4, 1.3
"""Factors of the estimated time over halo tiles: of input gradients that are added to what is
stored, of those with strides, and of weight gradients with strides. In ResNet-18 (32×32) on an
H200, these took 1.2 times (the median of 16 products), 1.5 times (12) and 1.4 times (24) as long as
estimated."""

SUMMED_BYTES_PER_US = {NO_MASK: 6e6, MASK_FROM_X: 6e6, MASK_FROM_Y: 1.3e6}
"""Bytes of an input gradient for which a µs is saved if it is summed where it is computed, by
``RELU_MASK``. A kernel of its own reads the gradient once more; with a mask from y, it also writes
it. From products of ResNet-18 (32×32, 1,024 samples, tf32) with 67 MB of gradients (H200)."""

Maps = Sequence[np.void]


class WgmmaConvolution(HaloConvolution):
    """Conv2d with its epilogue, whose phases use TMA's patches if that is estimated to be faster.

    For the other phases, the kernels of `HaloConvolution` run.
    """

    @classmethod
    def supports(cls, group: Group, setting: Setting) -> bool:
        layer, limits = group.head.layer, limits_of(setting)
        if not isinstance(layer, Conv2d) or limits.capability != ARCHITECTURE:
            return False
        channels, filters = group.head.input_maps[0], group.head.output_maps[0]
        return (
            HaloConvolution.supports(group, setting)
            and wgmma_convolution_tiles.fit(limits)
            and fills_slices(setting.precision, channels, filters)
            and forward_grid(group.head).is_encodable(_sizes(group.head.input_maps))
            and all(grid.is_encodable(_sizes(group.head.output_maps))
                    for grid in class_grids(group.head))
        )  # fmt: skip

    @classmethod
    def product_of(cls, group: Group, setting: Setting, phase: Phase) -> ConvolutionProduct | None:
        """Return the product of a phase; None if these kernels cannot compute it."""
        (channels, *_), (filters, *_) = group.head.input_maps, group.head.output_maps
        pixels, taps = math.prod(group.head.output_maps[1:]), math.prod(_conv(group.head).window)
        n, size = setting.batch_size, np.dtype(setting.activations).itemsize
        fused, separate = fused_epilogue(group), separate_epilogue(group) is not None
        if phase is Phase.FORWARD:
            drops = group.kinds[-1] is Dropout and not separate
            if fused == RELU_POOL or drops:
                return None
            return ConvolutionProduct(
                setting.precision, n * pixels, filters, (taps * channels,), size, "few"
            )
        if fused != NO_EPILOGUE and not separate:
            return None
        if phase is Phase.BACKWARD_INPUT:
            classes = pixel_classes(group.head)
            rows = max(each.pixels for each in classes)
            terms = tuple(each.taps * filters for each in classes)
            size *= 2 if "dx" in group.adds else 1
            splits: Splits = "few" if len(classes) == 1 else "no"
            return ConvolutionProduct(setting.precision, n * rows, channels, terms, size, splits)
        if _conv(group.head).bias:
            return None
        transposed = n * pixels * filters if setting.precision == "tf32" else 0
        return ConvolutionProduct(
            setting.precision, taps * channels, filters, (n * pixels,), 4, "many", transposed
        )

    @classmethod
    def wgmma_config(cls, group: Group, setting: Setting, phase: Phase) -> GemmConfig | None:
        """Return the configuration of a phase; None if other kernels compute it."""
        product, limits = cls.product_of(group, setting, phase), limits_of(setting)
        if product is None:
            return None
        stage = stage_name(group.name, phase)
        wanted = setting.selection.named(stage)
        if wanted is not None:
            named = (each for _, each in rank_configs(product, limits) if str(each) == wanted)
            return next(named, None)
        microseconds, best = select_config(product, limits)
        fastest_us, fastest = cls.others(group, setting, phase)[0]
        if phase is Phase.BACKWARD_INPUT and best.split_k.count == 1:
            fastest_us += cls._summing_us(group, setting)
        faster = wgmma_convolution_tiles.MARGIN * microseconds < fastest_us
        selected = setting.selection.pick(
            stage,
            best if faster else fastest,
            lambda: [*rank_configs(product, limits), *cls.others(group, setting, phase, all_=True)],
        )
        if isinstance(selected, GemmConfig) and isinstance(selected.tile, WgmmaTile):
            return selected
        return None

    @classmethod
    def others(
        cls, group: Group, setting: Setting, phase: Phase, *, all_: bool = False
    ) -> list[tuple[float, object]]:
        """Return candidates of `HaloConvolution` with their estimated µs, the fastest first.

        Args:
            group, setting, phase: the stage.
            all_: True returns all of them, not only the fastest.
        """
        setting = replace(setting, selection=KernelSelection())
        if phase is Phase.BACKWARD_WEIGHT:
            tile = cls.wgrad_tile(group, setting)
            assert not isinstance(tile, FewChannelWgradTile), "it undoes pooling"
            if tile is None:
                gathered = gathered_us(
                    InputView.forward(group.head), setting.precision, setting.batch_size,
                    limits_of(setting),
                )  # fmt: skip
                return [(gathered, super().wgrad_config(group, setting))]
            microseconds = cls._halo_wgrad_us(tile, group, setting)
            return _scaled(microseconds, tile, cls.rank_wgrad_tiles(group, setting) if all_ else [])
        halo = super().select_tile(group, setting, phase)
        if halo is None:
            gathered = cls.gathering_us(group, setting, phase, unpools=False)
            if phase is Phase.FORWARD:
                return [(gathered, super().forward_config(group, setting))]
            return [(gathered, super().backward_input_config(group, setting))]
        microseconds = halo_us(estimated_cycles(halo, setting.batch_size))
        if phase is Phase.BACKWARD_INPUT:
            microseconds *= ADDED if "dx" in group.adds else 1.0
            microseconds *= STRIDED if _conv(group.head).strides != (1, 1) else 1.0
        ranked = cls.rank_tiles(group, setting, phase) if all_ else []
        return _scaled(microseconds, halo, ranked)

    @staticmethod
    def _summing_us(group: Group, setting: Setting) -> float:
        """Return the µs that are saved if the input gradient is summed where it is computed."""
        if group.normalization is None:
            return 0.0
        size = setting.batch_size * math.prod(group.head.input_shape)
        nbytes = size * np.dtype(setting.activations).itemsize
        return nbytes / SUMMED_BYTES_PER_US[relu_mask(group.normalization)]

    @staticmethod
    def _halo_wgrad_us(tile: WgradTile, group: Group, setting: Setting) -> float:
        """Return the estimated µs of a weight gradient over halo tiles."""
        view, strides = InputView.forward(group.head), _conv(group.head).strides
        cycles = estimate_cycles(tile, view.folded(strides), setting.batch_size)
        return cycles / CYCLES_PER_US * (STRIDED_WEIGHT if strides != (1, 1) else 1.0)

    @classmethod
    def select_tile(cls, group: Group, setting: Setting, phase: Phase) -> ImplicitGemmTile | None:
        if cls.wgmma_config(group, setting, phase) is not None:
            return None
        return super().select_tile(group, setting, phase)

    @classmethod
    def forward_config(cls, group: Group, setting: Setting) -> GemmConfig:
        found = cls.wgmma_config(group, setting, Phase.FORWARD)
        return found or super().forward_config(group, setting)

    @classmethod
    def backward_input_config(cls, group: Group, setting: Setting) -> GemmConfig:
        found = cls.wgmma_config(group, setting, Phase.BACKWARD_INPUT)
        return found or super().backward_input_config(group, setting)

    @classmethod
    def wgrad_config(cls, group: Group, setting: Setting) -> GemmConfig:
        found = cls.wgmma_config(group, setting, Phase.BACKWARD_WEIGHT)
        return found or super().wgrad_config(group, setting)

    @classmethod
    def sum_rows(cls, group: Group, setting: Setting) -> int:
        config = cls.wgmma_config(group, setting, Phase.FORWARD)
        if config is None:
            return super().sum_rows(group, setting)
        if group.kinds != (Conv2d,) or config.split_k.count > 1:
            return 0
        pixels = setting.batch_size * math.prod(group.head.output_maps[1:])
        blocks, *_ = config.tile.grid(pixels, group.head.output_maps[0])
        return blocks

    @classmethod
    def gradient_sum_rows(cls, group: Group, setting: Setting) -> int:
        config = cls.wgmma_config(group, setting, Phase.BACKWARD_INPUT)
        if config is None or config.split_k.count > 1:
            return 0
        classes = pixel_classes(group.head)
        pixels = setting.batch_size * max(each.pixels for each in classes)
        blocks, *_ = config.tile.grid(pixels, group.head.input_maps[0])
        return blocks * len(classes)

    @classmethod
    def reads_operand_weights(cls, group: Group, setting: Setting, phase: Phase) -> bool:
        """Return whether a phase reads the weights from the buffer `OPERAND`."""
        if phase is Phase.BACKWARD_INPUT and (setting.precision == "tf32" or not group.gradients):
            return False
        return cls.wgmma_config(group, setting, phase) is not None

    @classmethod
    def operand_readers(cls, group: Group, setting: Setting) -> list[Phase]:
        """Return the phases that read the weights from the buffer `OPERAND`."""
        phases = Phase.FORWARD, Phase.BACKWARD_INPUT
        return [phase for phase in phases if cls.reads_operand_weights(group, setting, phase)]

    @classmethod
    def parts(cls, group: Group, setting: Setting, phase: Phase) -> int:
        """Return the split-K parts of a phase."""
        config = cls.wgmma_config(group, setting, phase)
        return 1 if config is None else config.split_k.count

    @classmethod
    def transposes_gradient(cls, group: Group, setting: Setting) -> bool:
        """Return whether the weight gradient reads dz from the buffer `TRANSPOSED`."""
        config = cls.wgmma_config(group, setting, Phase.BACKWARD_WEIGHT)
        return setting.precision == "tf32" and config is not None

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        needs = super().needs(group, setting)
        phases, buffers = dict(needs.phases), dict(needs.buffers)
        readers = cls.operand_readers(group, setting)
        if readers:
            size = group.head.parameters[0].size
            buffers[OPERAND] = BufferSpec((size,), setting.activations)
            forward = phases[Phase.FORWARD]
            phases[Phase.FORWARD] = replace(forward, writes=(*forward.writes, OPERAND))
        for phase, name in PARTS.items():
            parts = cls.parts(group, setting, phase) if phase in phases else 1
            if parts > 1:
                shape = (
                    group.head.output_shape if phase is Phase.FORWARD else group.head.input_shape
                )
                size = setting.batch_size * math.prod(shape)
                buffers[name] = BufferSpec((parts, size), "float32")
                phases[phase] = replace(phases[phase], writes=(*phases[phase].writes, name))
        if setting.training and cls.transposes_gradient(group, setting):
            pixels = setting.batch_size * math.prod(group.head.output_maps[1:])
            shape = group.head.output_maps[0], padded_pitch(pixels)
            buffers[TRANSPOSED] = BufferSpec(shape, "float32")
            wgrad = phases[Phase.BACKWARD_WEIGHT]
            phases[Phase.BACKWARD_WEIGHT] = replace(wgrad, writes=(*wgrad.writes, TRANSPOSED))
        if group.normalization is not None:
            shape = cls.gradient_sum_rows(group, setting), 2, group.head.input_maps[0]
            buffers[GRADIENT_SUMS] = BufferSpec(shape, "float32")
            masked = ("x",) if relu_mask(group.normalization) == MASK_FROM_Y else ()
            reads = "normalized", "normalized_moments", *masked
            summing = phases[Phase.BACKWARD_INPUT]
            phases[Phase.BACKWARD_INPUT] = Access(
                (*summing.reads, *reads), (*summing.writes, GRADIENT_SUMS)
            )
        if Phase.BACKWARD_INPUT in readers:
            reader = phases[Phase.BACKWARD_INPUT]
            phases[Phase.BACKWARD_INPUT] = replace(reader, reads=(*reader.reads, OPERAND))
        return GroupNeeds(phases, buffers)

    def forward(self) -> Kernel:
        forward_stage = super().forward()
        if not self.operand_readers(self.group, self.setting):
            return forward_stage
        convert = transposed_weights if self.precision == "tf32" else rounded_weights
        prepare = convert(self, self.arrays["weight"], self.arrays[OPERAND])

        def run(context: Context) -> None:
            if context.n:
                prepare()
            forward_stage(context)

        return run

    def convolve(self) -> Kernel:
        config = self.wgmma_config(self.group, self.setting, Phase.FORWARD)
        if config is None:
            return super().convolve()
        a, weights = self.arrays, self.arrays[OPERAND]
        tile = _tile(config)
        (channels, *_), (filters, *_) = self.group.head.input_maps, self.group.head.output_maps
        patches = self._patch_map("x", forward_grid(self.group.head), tile.rows, self.batch_size)
        terms, step = a["weight"].size // filters, step_terms(self.precision)
        if self.precision == "tf32":
            shape, box = (terms // channels * filters, channels), (tile.columns, step)
        else:
            shape, box = (terms, filters), (step, step)
        maps = [*patches, *self._matrix_map(weights, shape, box)]
        y, epilogue = self.outputs[0], fused_epilogue(self.group)
        result = y if config.split_k.count == 1 else a[PARTS[Phase.FORWARD]]
        product = self.product(
            FILE, "conv2d_forward_wgmma", config,
            math.prod(self.group.head.output_maps[1:]), filters,
            (a["x"], weights, a["bias"], result), self.geometry,
            epilogue=epilogue, tensor_maps=maps, summed=self.output_sums,
            split_terms=_split_terms(config),
        )  # fmt: skip
        size = math.prod(self.group.head.output_shape)
        return self._with_reduction(Phase.FORWARD, config, product, y, size, epilogue)

    def backward_input(self) -> Kernel:
        config = self.wgmma_config(self.group, self.setting, Phase.BACKWARD_INPUT)
        if config is None:
            return super().backward_input()
        a, tile, head = self.arrays, _tile(config), self.group.head
        weights = a["weight"] if self.precision == "tf32" else a[OPERAND]
        (channels, *_), (filters, *_) = head.input_maps, head.output_maps
        shape, box = (a["weight"].size // filters, filters), (tile.columns, self._step)
        maps = list(self._matrix_map(weights, shape, box))
        for grid in class_grids(head):
            maps += self._patch_map(self._dz, grid, tile.rows, self.batch_size)
        result = a["dx" if config.split_k.count == 1 else PARTS[Phase.BACKWARD_INPUT]]
        product = self.product(
            FILE, "conv2d_backward_input_wgmma", config,
            max(each.pixels for each in pixel_classes(head)), channels,
            (a[self._dz], weights, result), self.geometry,
            epilogue=NO_EPILOGUE, tensor_maps=maps, adds="dx" in self.group.adds,
            classes=math.prod(self.layer.strides), split_terms=_split_terms(config),
            **self._gradient_sums(),
        )  # fmt: skip
        size = math.prod(head.input_shape)
        return self._with_reduction(
            Phase.BACKWARD_INPUT, config, product, a["dx"], size, NO_EPILOGUE
        )

    def _gradient_sums(self) -> dict[str, Any]:
        """Return the arguments of `product` with which dx is masked and summed, if it is."""
        if self.group.normalization is None:
            return {}
        names = "moments", "weight", "bias"
        normalization = [self.arrays[f"normalized_{name}"] for name in names]
        arrays = self.arrays["normalized"], self.arrays["x"], *normalization
        return {
            "summed": (*arrays, self.arrays[GRADIENT_SUMS]),
            "macros": {"RELU_MASK": relu_mask(self.group.normalization)},
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
        macros = {**config.tile.defines, **self.defines, "EPILOGUE": epilogue}
        if phase is Phase.BACKWARD_INPUT and "dx" in self.group.adds:
            macros["ADD_GRADIENT"] = 1
        reduce = self.device.function(FILE, "conv2d_wgmma_reduce", **macros)
        # Forward has a bias in any case: of the layer, of a folded normalisation, or 0. The input
        # gradient passes the array, which its kernel does not read.
        forward = phase is Phase.FORWARD
        arrays = self.arrays[PARTS[phase]], self.arrays["bias"], result
        columns = np.int32(self.group.head.output_maps[0])
        parts, has_bias = np.int32(config.split_k.count), np.int32(forward)

        def run(context: Context) -> None:
            product(context)
            count = context.n * size
            launch(reduce, count // 4, *arrays, parts, has_bias, columns, np.int32(count))

        return run

    def backward_weight(self) -> Kernel:
        config = self.wgmma_config(self.group, self.setting, Phase.BACKWARD_WEIGHT)
        if config is None:
            return super().backward_weight()
        a, head, step = self.arrays, self.group.head, self._step
        filters, pixels = head.output_maps[0], math.prod(head.output_maps[1:])
        transposes = self.transposes_gradient(self.group, self.setting)
        dz = a[TRANSPOSED if transposes else self._dz]
        known: dict[int, Maps] = {}

        def tensor_maps(n: int) -> Maps:
            # Terms beyond the samples are zero.
            if n not in known:
                terms, box = max(n, 1) * pixels, (step, step)
                shape = terms, filters
                if transposes:
                    shape, box = (filters, padded_pitch(terms)), (_tile(config).columns, step)
                known[n] = [
                    *self._patch_map("x", forward_grid(head), step, max(n, 1)),
                    *self._matrix_map(dz, shape, box),
                ]
            return known[n]

        def trailing(samples: int, part: int) -> tuple[np.int32, ...]:
            return np.int32(samples), np.int32(part), *self.geometry

        product = self.wgrad_product(
            FILE, "conv2d_backward_weight_wgmma", config, lambda samples: samples * pixels,
            (a["x"], dz), trailing, bias_row=False, tensor_maps=tensor_maps,
        )  # fmt: skip
        if not transposes:
            return product
        transpose = transposed_rows(self, a[self._dz], dz, filters)

        def run(context: Context) -> None:
            transpose(context.n * pixels)
            product(context)

        return run

    @property
    def _dz(self) -> str:
        """The array of the gradient of the convolution's result."""
        return "dmaps" if self.reads_dmaps else "dy"

    @property
    def _step(self) -> int:
        return step_terms(self.precision)

    def _patch_map(self, name: str, grid: PatchGrid, positions: int, samples: int) -> Maps:
        """Return the tensor map of the patches of x, or of the gradient of the result."""
        channels, *sides = (
            self.group.head.input_maps if name == "x" else self.group.head.output_maps
        )
        found = self.device.patch_map(
            self.arrays[name], (samples, *sides, channels), grid, (positions, self._step),
            self.precision,
        )  # fmt: skip
        return [] if found is None else [found]

    def _matrix_map(self, array: Array, shape: tuple[int, int], box: tuple[int, int]) -> Maps:
        found = self.device.tensor_map(array, shape, box, self.precision)
        return [] if found is None else [found]


def _conv(node: Node) -> Conv2d:
    assert isinstance(node.layer, Conv2d)
    return node.layer


def _tile(config: GemmConfig) -> WgmmaTile:
    assert isinstance(config.tile, WgmmaTile)
    return config.tile


def _scaled(
    fastest_us: float, fastest: object, ranked: Sequence[tuple[float, object]]
) -> list[tuple[float, object]]:
    """Return ranked candidates with estimates in µs, after the fastest of them.

    It comes first, so that it is selected if estimates are equal.
    """
    least = min((cost for cost, _ in ranked), default=1.0)
    others = [(fastest_us * cost / least, each) for cost, each in ranked if each != fastest]
    return [(fastest_us, fastest), *others]


def _split_terms(config: GemmConfig) -> int:
    """Return the terms of a split-K part; 0 if there is one."""
    return config.split_k.terms if config.split_k.count > 1 else 0


def _sizes(maps: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of maps (C, H, W)."""
    return maps[1], maps[2]
