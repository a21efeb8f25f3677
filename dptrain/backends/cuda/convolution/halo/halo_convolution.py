"""Convolutions as implicit GEMMs over halo tiles in shared memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dptrain.backends.cuda.convolution.convolution import GatherConvolution
from dptrain.backends.cuda.convolution.few_channels.few_channel_tiles import FewChannelTile
from dptrain.backends.cuda.convolution.gather_cost import (
    FEW_CHANNEL_GAIN,
    GATHER_LAUNCH_US,
    UNPOOL_BYTES_PER_US,
    UNPOOL_IN_KERNEL,
    WIDE_GATHER,
    compares_with_gathering,
    gather_us,
    halo_us,
    is_faster,
)
from dptrain.backends.cuda.convolution.halo.halo_tiles import (
    CHANNEL_MULTIPLE,
    InputView,
    fills_halo_tiles,
    supports_halo_tiles,
)
from dptrain.backends.cuda.convolution.halo.implicit_gemm_cost import (
    estimated_cycles,
    rank_implicit_gemm_tiles,
    select_implicit_gemm_tile,
)
from dptrain.backends.cuda.convolution.halo.implicit_gemm_tiles import ImplicitGemmTile
from dptrain.backends.cuda.dense.gemm_tiles import GemmConfig, SplitK, ceil_div
from dptrain.backends.cuda.device.device import Array
from dptrain.backends.cuda.device.hardware import ELEMENT_BYTES, limits_of
from dptrain.backends.cuda.device.launching import launch
from dptrain.backends.cuda.weighted import (
    NO_EPILOGUE,
    computed_pixels,
    fused_epilogue,
    pools_in_kernel,
    separate_epilogue,
)
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import Conv2d, Dropout
from dptrain.plan.lowering import (
    BufferSpec,
    Group,
    GroupNeeds,
    Phase,
    Setting,
    stage_name,
)
from dptrain.plan.selection import KernelSelection

PACKED: Mapping[Phase, str] = {Phase.FORWARD: "packed", Phase.BACKWARD_INPUT: "packed_back"}
"""Buffers of the weights in the order in which the kernel of a phase reads them."""


class HaloConvolution(GatherConvolution):
    """Conv2d with its epilogue, whose phases read halo tiles if that is faster.

    Phases with a halo tile load each pixel once and unpool dy while it is loaded. For the others,
    the kernels of `GatherConvolution` run.
    """

    @classmethod
    def supports(cls, group: Group, setting: Setting) -> bool:
        """Return whether the kernels exist for a group."""
        layer = group.head.layer
        if not isinstance(layer, Conv2d):
            return False
        return supports_halo_tiles(
            InputView.forward(group.head), setting.precision, layer.strides, limits_of(setting)
        )

    @classmethod
    def unpools_separately(cls, group: Group, setting: Setting) -> bool:
        if cls.select_tile(group, setting, Phase.BACKWARD_INPUT) is not None:
            return False
        return super().unpools_separately(group, setting)

    @classmethod
    def select_tile(cls, group: Group, setting: Setting, phase: Phase) -> ImplicitGemmTile | None:
        """Return the tile configuration of a phase; None to gather."""
        view, pooled, epilogue = cls._halo_product(group, setting, phase)
        fills = fills_halo_tiles(InputView.forward(group.head), _strides(group))
        # Lanes share the random numbers of four filters.
        drops = phase is Phase.FORWARD and group.kinds[-1] is Dropout
        uneven = drops and group.head.output_maps[0] % 4
        if not (fills or (compares_with_gathering() and not uneven)):
            return None
        best = select_implicit_gemm_tile(
            view, setting.precision, setting.batch_size, limits_of(setting), pooled=pooled,
            epilogue=epilogue,
        )  # fmt: skip
        if best is None or not (fills or is_faster(*cls.estimated_us(best, group, setting, phase))):
            return None
        return setting.selection.pick(
            stage_name(group.name, phase), best, lambda: cls.rank_tiles(group, setting, phase)
        )

    @classmethod
    def rank_tiles(
        cls, group: Group, setting: Setting, phase: Phase
    ) -> list[tuple[float, ImplicitGemmTile]]:
        """Return the tile configurations of a phase; see `rank_implicit_gemm_tiles`."""
        view, pooled, epilogue = cls._halo_product(group, setting, phase)
        return rank_implicit_gemm_tiles(
            view, setting.precision, setting.batch_size, limits_of(setting), pooled=pooled,
            epilogue=epilogue,
        )  # fmt: skip

    @classmethod
    def _halo_product(
        cls, group: Group, setting: Setting, phase: Phase
    ) -> tuple[InputView, bool, int]:
        """Return the view of a phase, whether it pools, and the epilogue that it undoes."""
        view = InputView.forward(group.head).folded(_strides(group))
        pooled, epilogue = pools_in_kernel(group), NO_EPILOGUE
        if phase is Phase.BACKWARD_INPUT:
            view, pooled = view.backward, False
            if separate_epilogue(group) is None:
                epilogue = fused_epilogue(group)
        return view.padded(ELEMENT_BYTES.get(setting.precision, 4)), pooled, epilogue

    @classmethod
    def estimated_us(
        cls, tile: ImplicitGemmTile, group: Group, setting: Setting, phase: Phase
    ) -> tuple[float, float]:
        """Return the estimated µs of a phase with a halo tile and with gathering."""
        halo = halo_us(estimated_cycles(tile, setting.batch_size))
        return halo, cls.gathering_us(group, setting, phase, unpools=tile.unpools)

    @classmethod
    def gathering_us(cls, group: Group, setting: Setting, phase: Phase, *, unpools: bool) -> float:
        """Return the estimated µs of forward or the input gradient with gathered operands.

        Args:
            group, setting, phase: the stage.
            unpools: whether the kernel of the input gradient undoes pooling, unless another does.
        """
        # Only the kernel that runs has candidates to be measured.
        setting = replace(setting, selection=KernelSelection())
        n, channels = setting.batch_size, group.head.input_shape[0]
        filters = group.head.output_shape[0]
        taps = group.head.parameters[0].size // (channels * filters)
        limits = limits_of(setting)
        wide = channels % CHANNEL_MULTIPLE == filters % CHANNEL_MULTIPLE == 0
        slowdown = WIDE_GATHER[setting.precision] if wide else 1.0
        if phase is Phase.FORWARD:
            rows = n * computed_pixels(group)
            gather = slowdown * gather_us(setting.precision, rows, filters, taps * channels, limits)
            if isinstance(super().forward_config(group, setting).tile, FewChannelTile):
                gather *= FEW_CHANNEL_GAIN
            return gather
        rows, terms = cls.backward_product(group, setting)
        gather = slowdown * gather_us(setting.precision, rows, channels, terms, limits)
        if super().unpools_separately(group, setting):
            elements = n * math.prod(group.head.output_shape)
            size = 1.25 * ELEMENT_BYTES[setting.precision] + 0.25
            gather += GATHER_LAUNCH_US + elements * size / UNPOOL_BYTES_PER_US
        elif unpools:
            gather *= UNPOOL_IN_KERNEL
        return gather

    @classmethod
    def configs(cls, group: Group, setting: Setting) -> dict[Phase, GemmConfig]:
        configs = super().configs(group, setting)
        for phase in PACKED:
            tile = cls.select_tile(group, setting, phase)
            if tile is not None and phase in configs:
                configs[phase] = GemmConfig(tile, SplitK(1, 1))
        return configs

    @classmethod
    def sum_rows(cls, group: Group, setting: Setting) -> int:
        tile = cls.select_tile(group, setting, Phase.FORWARD)
        # Every pixel must be stored once, by a kernel that needs no sums by scalar instructions.
        if group.kinds != (Conv2d,) or tile is None or not tile.stores_once:
            return 0
        samples = ceil_div(setting.batch_size, tile.view.row_samples)
        blocks, *_ = tile.grid(samples * tile.tiles_per_sample, tile.view.filters)
        return blocks * tile.block_groups

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        needs = super().needs(group, setting)
        phases, buffers = dict(needs.phases), dict(needs.buffers)
        if group.sums:
            shape = cls.sum_rows(group, setting), 4, group.head.output_maps[0]
            buffers["sums"] = BufferSpec(shape, "float32")
            forward = phases[Phase.FORWARD]
            phases[Phase.FORWARD] = replace(forward, writes=(*forward.writes, "sums"))
        for phase, name in PACKED.items():
            tile = cls.select_tile(group, setting, phase)
            if tile is not None and phase in phases:
                buffers[name] = BufferSpec((tile.packed_elements,), setting.activations)
                forward, reader = phases[Phase.FORWARD], phases[phase]
                # The forward stage packs the weights of both phases.
                phases[Phase.FORWARD] = replace(forward, writes=(*forward.writes, name))
                if phase is not Phase.FORWARD:
                    phases[phase] = replace(reader, reads=(*reader.reads, name))
        return GroupNeeds(phases, buffers)

    def forward(self) -> Kernel:
        return self._with_packed_weights(super().forward())

    def convolve(self) -> Kernel:
        tile = self._tile(Phase.FORWARD)
        if tile is None:
            return super().convolve()
        return self.product(
            "conv2d_forward_halo.cu", "conv2d_forward_halo", GemmConfig(tile, SplitK(1, 1)),
            tile.tiles_per_sample, tile.view.filters,
            (self.arrays["x"], self.arrays["packed"], self.arrays["bias"], *self.outputs),
            self.geometry, epilogue=fused_epilogue(self.group), fuses_dropout=True,
            tensor_maps=self._tensor_maps(tile, self.arrays["x"]),
            row_samples=tile.view.row_samples, summed=self.output_sums,
        )  # fmt: skip

    @property
    def output_sums(self) -> list[Array]:
        """Last arguments of the kernel of the forward product, which receive its sums."""
        return [self.arrays["sums"]] if self.group.sums else []

    def backward_input(self) -> Kernel:
        tile = self._tile(Phase.BACKWARD_INPUT)
        if tile is None:
            return super().backward_input()
        return self.product(
            "conv2d_backward_input_halo.cu", "conv2d_backward_input_halo",
            GemmConfig(tile, SplitK(1, 1)), tile.tiles_per_sample, tile.view.filters,
            (*self.dz, self.arrays["packed_back"], self.arrays["dx"]), self.geometry,
            epilogue=self.undone_epilogue, tensor_maps=self._tensor_maps(tile, *self.dz[:2]),
            adds="dx" in self.group.adds, row_samples=tile.view.row_samples,
        )  # fmt: skip

    def _tensor_maps(
        self, tile: ImplicitGemmTile, values: Array, argmax: Array | None = None
    ) -> Sequence[np.void]:
        """Return TMA descriptors of the arrays that the halo tile is loaded from, if any."""
        view, unit = tile.view, 2 if tile.unpools else 1
        shape = self.batch_size, view.height // unit, view.width // unit, view.memory_channels
        arrays = (values, self.precision), (argmax, "marks")
        found = [
            self.device.tensor_map(array, shape, tile.box, kind, as_factors=not tile.unpools)
            for array, kind in arrays[: tile.num_tensor_maps]
        ]
        return [tensor_map for tensor_map in found if tensor_map is not None]

    def _tile(self, phase: Phase) -> ImplicitGemmTile | None:
        return self.select_tile(self.group, self.setting, phase)

    def _with_packed_weights(self, forward_stage: Kernel) -> Kernel:
        """Return a stage that packs the weights for both phases and then runs `forward_stage`."""
        phases = (Phase.FORWARD, Phase.BACKWARD_INPUT) if self.group.gradients else (Phase.FORWARD,)
        tiles = {phase: tile for phase in phases if (tile := self._tile(phase)) is not None}
        if not tiles:
            return forward_stage
        forward, backward = (tiles.get(phase) for phase in PACKED)
        first = next(iter(tiles.values()))
        defines = {
            **first.defines, **self.defines, "PREFETCH_WEIGHTS": int(self.prefetches_weights),
        }  # fmt: skip
        if any(tile.view.channels != tile.view.memory_channels for tile in tiles.values()):
            defines["PADDED_WEIGHTS"] = 1
        if backward is not None:
            defines |= {
                "BACKWARD_LINES_IN_M": backward.lines_in_m,
                "BACKWARD_PERSISTENT": int(backward.persistent),
            }
        function = self.device.function("pack_weights.cu", "pack_weights", **defines)
        # A phase without packed weights passes the other buffer, which its threads do not write.
        weight, unused = self.arrays["weight"], self.arrays[PACKED[next(iter(tiles))]]
        packed = [self.arrays[name] if phase in tiles else unused for phase, name in PACKED.items()]
        vectors = forward.packed_vectors if forward is not None else 0
        all_vectors = vectors + (backward.packed_vectors if backward is not None else 0)
        sizes = vectors, all_vectors, *weight.shape, *self.layer.strides
        args = weight, *packed, *map(np.int32, sizes)

        def run(context: Context) -> None:
            if context.n:
                launch(function, all_vectors, *args)
            forward_stage(context)

        return run


def _strides(group: Group) -> tuple[int, int]:
    """Return the strides of the convolution of a group."""
    layer = group.head.layer
    assert isinstance(layer, Conv2d)
    return layer.strides
