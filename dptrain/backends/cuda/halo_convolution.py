"""Convolutions as implicit GEMMs over halo tiles in shared memory (stride 1, many channels)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from dptrain.backends.cuda.convolution import GatherConvolution
from dptrain.backends.cuda.device import Array
from dptrain.backends.cuda.gemm_tiles import GemmConfig, SplitK
from dptrain.backends.cuda.halo_tiles import InputView, supports_halo_tiles
from dptrain.backends.cuda.hardware import limits_of
from dptrain.backends.cuda.implicit_gemm_cost import (
    rank_implicit_gemm_tiles,
    select_implicit_gemm_tile,
)
from dptrain.backends.cuda.implicit_gemm_tiles import ImplicitGemmTile
from dptrain.backends.cuda.launching import launch
from dptrain.backends.cuda.weighted import (
    NO_EPILOGUE,
    fused_epilogue,
    pools_in_kernel,
    separate_epilogue,
)
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import Conv2d
from dptrain.plan.lowering import (
    BufferSpec,
    Group,
    GroupNeeds,
    Phase,
    Setting,
    stage_name,
)

PACKED: Mapping[Phase, str] = {Phase.FORWARD: "packed", Phase.BACKWARD_INPUT: "packed_back"}
"""Buffers of the weights in the order in which the kernel of a phase reads them."""


class HaloConvolution(GatherConvolution):
    """Conv2d of stride 1 with channels and filters in multiples of 32, with its epilogue.

    Every phase loads each pixel once and unpools dy while it is loaded. If no tile fits into the
    shared memory of a block, the kernel of `GatherConvolution` runs.
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
        return False

    @classmethod
    def select_tile(cls, group: Group, setting: Setting, phase: Phase) -> ImplicitGemmTile | None:
        """Return the tile configuration of a phase; None to gather."""
        view, pooled, epilogue = InputView.forward(group.head), pools_in_kernel(group), NO_EPILOGUE
        if phase is Phase.BACKWARD_INPUT:
            view, pooled = view.backward, False
            if separate_epilogue(group) is None:
                epilogue = fused_epilogue(group)
        product = view, setting.precision, setting.batch_size, limits_of(setting)
        best = select_implicit_gemm_tile(*product, pooled=pooled, epilogue=epilogue)
        if best is None:
            return None
        return setting.selection.pick(
            stage_name(group.name, phase),
            best,
            lambda: rank_implicit_gemm_tiles(*product, pooled=pooled, epilogue=epilogue),
        )

    @classmethod
    def configs(cls, group: Group, setting: Setting) -> dict[Phase, GemmConfig]:
        configs = super().configs(group, setting)
        for phase in PACKED:
            tile = cls.select_tile(group, setting, phase)
            if tile is not None and phase in configs:
                configs[phase] = GemmConfig(tile, SplitK(1, 1))
        return configs

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        needs = super().needs(group, setting)
        phases, buffers = dict(needs.phases), dict(needs.buffers)
        for phase, name in PACKED.items():
            tile = cls.select_tile(group, setting, phase)
            runs = phase is Phase.FORWARD or (phase in phases and group.head.index > 0)
            if tile is not None and runs:
                buffers[name] = BufferSpec((tile.packed_elements,), setting.activations)
                forward, reader = phases[Phase.FORWARD], phases[phase]
                # The forward stage packs the weights of both phases.
                phases[Phase.FORWARD] = replace(forward, writes=(*forward.writes, name))
                if phase is not Phase.FORWARD:
                    phases[phase] = replace(reader, reads=(*reader.reads, name))
        return GroupNeeds(phases, buffers)

    def convolve(self) -> Kernel:
        tile, product = self._tile(Phase.FORWARD), super().convolve
        if tile is not None:
            product = partial(
                self.product,
                "conv2d_forward_halo.cu", "conv2d_forward_halo", GemmConfig(tile, SplitK(1, 1)),
                tile.tiles_per_sample, self.group.head.output_maps[0],
                (self.arrays["x"], self.arrays["packed"], self.arrays["bias"], *self.outputs),
                self.geometry, epilogue=fused_epilogue(self.group), fuses_dropout=True,
                tensor_maps=self._tensor_maps(tile, self.arrays["x"]),
            )  # fmt: skip
        return self._with_packed_weights(product())

    def backward_input(self) -> Kernel:
        tile = self._tile(Phase.BACKWARD_INPUT)
        if tile is None:
            return super().backward_input()
        return self.product(
            "conv2d_backward_input_halo.cu", "conv2d_backward_input_halo",
            GemmConfig(tile, SplitK(1, 1)), tile.tiles_per_sample, self.group.head.input_maps[0],
            (*self.dz, self.arrays["packed_back"], self.arrays["dx"]), self.geometry,
            epilogue=self.undone_epilogue, tensor_maps=self._tensor_maps(tile, *self.dz[:2]),
        )  # fmt: skip

    def _tensor_maps(
        self, tile: ImplicitGemmTile, values: Array, argmax: Array | None = None
    ) -> Sequence[np.void]:
        """Return TMA descriptors of the arrays that the halo tile is loaded from, if any."""
        view, unit = tile.view, 2 if tile.unpools else 1
        shape = self.batch_size, view.height // unit, view.width // unit, view.channels
        arrays = (values, self.precision), (argmax, "marks")
        found = [
            self.device.tensor_map(array, shape, tile.box, kind, as_factors=not tile.unpools)
            for array, kind in arrays[: tile.num_tensor_maps]
        ]
        return [tensor_map for tensor_map in found if tensor_map is not None]

    def _tile(self, phase: Phase) -> ImplicitGemmTile | None:
        return self.select_tile(self.group, self.setting, phase)

    def _with_packed_weights(self, product: Kernel) -> Kernel:
        """Return a stage that packs the weights for both phases and then runs `product`."""
        tiles = {
            phase: tile for phase, name in PACKED.items()
            if name in self.arrays and (tile := self._tile(phase)) is not None
        }  # fmt: skip
        if not tiles:
            return product
        forward, backward = (tiles.get(phase) for phase in PACKED)
        first = next(iter(tiles.values()))
        defines = {
            **first.defines, **self.defines, "PREFETCH_WEIGHTS": int(self.prefetches_weights),
        }  # fmt: skip
        if backward is not None:
            defines |= {
                "BACKWARD_LINES_IN_M": backward.lines_in_m,
                "BACKWARD_PERSISTENT": int(backward.persistent),
            }
        function = self.device.function("pack_weights.cu", "pack_weights", **defines)
        # A phase without packed weights passes the other buffer, which its threads do not write.
        weight, unused = self.arrays["weight"], self.arrays[PACKED[next(iter(tiles))]]
        packed = [self.arrays.get(name, unused) for name in PACKED.values()]
        vectors = forward.packed_vectors if forward is not None else 0
        all_vectors = vectors + (backward.packed_vectors if backward is not None else 0)
        args = weight, *packed, *map(np.int32, (vectors, all_vectors, *weight.shape))

        def run(context: Context) -> None:
            if context.n:
                launch(function, all_vectors, *args)
            product(context)

        return run
