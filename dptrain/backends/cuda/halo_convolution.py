"""Convolutions between wide maps bound to arrays: by windows of maps in shared memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from dptrain.backends.cuda import halo_tiles
from dptrain.backends.cuda.convolution import GatherConvolution
from dptrain.backends.cuda.device import Array
from dptrain.backends.cuda.gemm_tiles import GemmConfig, SplitK
from dptrain.backends.cuda.halo_tiles import SHARED_BYTES, View
from dptrain.backends.cuda.implicit_gemm_cost import select_implicit_gemm_tile
from dptrain.backends.cuda.implicit_gemm_tiles import ImplicitGemmTile
from dptrain.backends.cuda.launching import launch
from dptrain.backends.cuda.weighted import (
    NOTHING,
    fused_epilogue,
    pools_in_kernel,
    separate_epilogue,
)
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import Conv2d
from dptrain.plan.lowering import BufferSpec, Group, GroupNeeds, Phase, Setting

PACKED: Mapping[Phase, str] = {Phase.FORWARD: "packed", Phase.BACKWARD_INPUT: "packed_back"}
"""Where the weights lie as a phase's kernel takes them."""


class HaloConvolution(GatherConvolution):
    """Conv2d of stride 1 between maps of many channels, and what `GatherConvolution` has behind it.

    Every phase reads each pixel once, so what was pooled is undone as it is read. Plans are made
    without a GPU: on one whose blocks have less shared memory a phase is cut to fit, and computed
    as `GatherConvolution` does where nothing fits.
    """

    @classmethod
    def suits(cls, group: Group, setting: Setting) -> bool:
        """Whether there are kernels for a group."""
        layer = group.head.layer
        if not isinstance(layer, Conv2d):
            return False
        return halo_tiles.suits(View.forward(group.head), setting.precision, layer.strides)

    @classmethod
    def spreads(cls, group: Group, setting: Setting) -> bool:
        return False

    @classmethod
    def undone(cls, group: Group) -> int:
        """What kernels undo as they read dy."""
        return NOTHING if separate_epilogue(group) is not None else fused_epilogue(group)

    @classmethod
    def slide(
        cls, group: Group, setting: Setting, phase: Phase, room: int = SHARED_BYTES
    ) -> ImplicitGemmTile | None:
        """How a product over pixels is computed; None if as `GatherConvolution` does."""
        view, choose = View.forward(group.head), partial(select_implicit_gemm_tile, room=room)
        if phase is Phase.BACKWARD_INPUT:
            view, choose = view.backward, partial(choose, behind=cls.undone(group))
        else:
            choose = partial(choose, pooled=pools_in_kernel(group))
        return choose(view, setting.precision, setting.batch_size)

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        needs = super().needs(group, setting)
        phases, buffers = dict(needs.phases), dict(needs.buffers)
        for phase, name in PACKED.items():
            slide = cls.slide(group, setting, phase)
            wanted = phase is Phase.FORWARD or (phase in phases and group.head.index > 0)
            if slide is not None and wanted:
                buffers[name] = BufferSpec((slide.packed,), setting.activations)
                first, last = phases[Phase.FORWARD], phases[phase]
                # All are packed at once, forward.
                phases[Phase.FORWARD] = replace(first, writes=(*first.writes, name))
                if phase is not Phase.FORWARD:
                    phases[phase] = replace(last, reads=(*last.reads, name))
        return GroupNeeds(phases, buffers)

    def convolve(self) -> Kernel:
        slide, product = self._fitting(Phase.FORWARD), super().convolve
        if slide is not None:
            product = partial(
                self.product,
                "conv2d_forward_halo.cu", "conv2d_forward_halo", GemmConfig(slide, SplitK(1, 1)),
                slide.each, self.group.head.output_maps[0],
                (self.arrays["x"], self.arrays["packed"], self.arrays["bias"], *self.outputs),
                self.geometry, behind=fused_epilogue(self.group), drops=True,
                maps=self._maps(slide, self.arrays["x"]),
            )  # fmt: skip
        return self._packing(product())

    def backward_input(self) -> Kernel:
        slide = self._fitting(Phase.BACKWARD_INPUT)
        if slide is None:
            return super().backward_input()
        return self.product(
            "conv2d_backward_input_halo.cu", "conv2d_backward_input_halo",
            GemmConfig(slide, SplitK(1, 1)),
            slide.each, self.group.head.input_maps[0],
            (*self.dz, self.arrays["packed_back"], self.arrays["dx"]), self.geometry,
            behind=self.behind, maps=self._maps(slide, *self.dz[:2]),
        )  # fmt: skip

    def _maps(
        self, slide: ImplicitGemmTile, maps: Array, marks: Array | None = None
    ) -> Sequence[np.void]:
        """What the device's engine for copies knows of what windows are of, if it has one."""
        view, unit = slide.view, 2 if slide.undone else 1
        shape = self.batch_size, view.height // unit, view.width // unit, view.channels
        arrays = (maps, self.precision), (marks, "marks")
        found = [
            self.device.tensor_map(array, shape, slide.box, kind, as_factors=not slide.undone)
            for array, kind in arrays[: slide.mapped]
        ]
        return [known for known in found if known is not None]

    def _fitting(self, phase: Phase) -> ImplicitGemmTile | None:
        """How a product is computed on this device; None if as `GatherConvolution` does."""
        return self.slide(self.group, self.setting, phase, self.device.shared_bytes)

    def _packing(self, product: Kernel) -> Kernel:
        """The product behind a kernel that brings weights into the order of all that want one."""
        ways = {
            phase: way for phase, name in PACKED.items()
            if name in self.arrays and (way := self._fitting(phase)) is not None
        }  # fmt: skip
        if not ways:
            return product
        forward, back = (ways.get(phase) for phase in PACKED)
        way = next(iter(ways.values()))
        defines = {**way.defines, **self.defines, "PREFETCH_WEIGHTS": int(self.early)}
        if back is not None:
            defines |= {"BACKWARD_LINES_IN_M": back.tall, "BACKWARD_PERSISTENT": int(back.early)}
        function = self.device.function("pack_weights.cu", "pack_weights", **defines)
        weight, anywhere = self.arrays["weight"], self.arrays[PACKED[next(iter(ways))]]
        packed = [self.arrays.get(name, anywhere) for name in PACKED.values()]
        lanes = forward.lanes if forward is not None else 0
        everything = lanes + (back.lanes if back is not None else 0)
        args = weight, *packed, *map(np.int32, (lanes, everything, *weight.shape))

        def run(context: Context) -> None:
            if context.n:
                launch(function, everything, *args)
            product(context)

        return run
