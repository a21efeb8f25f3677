"""Convolutions between wide maps bound to arrays: by windows of maps in shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from dptrain.backends.cuda import windows
from dptrain.backends.cuda.launching import launch
from dptrain.backends.cuda.tiles import Parts, Tiling, Work
from dptrain.backends.cuda.weighted import (
    Convolution,
    computed_pixels,
    follows,
    pools_in_place,
)
from dptrain.backends.cuda.windows import Slide, View
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import Conv2d
from dptrain.plan.lowering import BufferSpec, Group, GroupNeeds, Phase, Setting

PACKED: Mapping[Phase, str] = {Phase.FORWARD: "packed", Phase.BACKWARD_INPUT: "packed_back"}
"""Where the weights lie as a phase's kernel takes them."""


class SlidingConvolution(Convolution):
    """Conv2d of stride 1 between maps of many channels, and what `Convolution` has behind it.

    Every phase reads each pixel once, so what was pooled is undone as it is read. Plans are made
    without a GPU: on one whose blocks have too little shared memory, a phase is computed as
    `Convolution` does.
    """

    @classmethod
    def suits(cls, group: Group, setting: Setting) -> bool:
        """Whether there are kernels for a group."""
        layer = group.head.layer
        if not isinstance(layer, Conv2d):
            return False
        return windows.suits(View.forward(group.head), setting.precision, layer.strides)

    @classmethod
    def spreads(cls, group: Group, setting: Setting) -> bool:
        return False

    @classmethod
    def slide(cls, group: Group, setting: Setting, phase: Phase) -> Slide | None:
        """How a product over pixels is computed; None if as `Convolution` does."""
        view, n = View.forward(group.head), setting.batch_size
        if phase is Phase.BACKWARD_INPUT:
            return windows.choose_slide(view.backward, setting.precision, n)
        return windows.choose_slide(view, setting.precision, n, pooled=pools_in_place(group))

    @classmethod
    def pixel_sum(cls, group: Group, setting: Setting) -> Tiling | None:
        """How the gradient of weights is computed; None if as `Convolution` does."""
        terms = setting.batch_size * computed_pixels(group)
        return windows.choose_pixel_sum(
            View.forward(group.head), setting.precision, terms, pooled=pools_in_place(group)
        )

    @classmethod
    def weight_tiling(cls, group: Group, setting: Setting) -> Tiling:
        """Of the product as `Convolution` computes it, or, of more parts, as this class does."""
        gathered, windowed = super().weight_tiling(group, setting), cls.pixel_sum(group, setting)
        return max(gathered, windowed or gathered, key=lambda tiling: tiling.parts.count)

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        needs = super().needs(group, setting)
        phases, buffers = dict(needs.phases), dict(needs.buffers)
        for phase, name in PACKED.items():
            slide = cls.slide(group, setting, phase)
            if slide is not None and phase in phases:
                buffers[name] = BufferSpec((slide.packed,), setting.activations)
                access = phases[phase]
                phases[phase] = replace(access, writes=(*access.writes, name))
        return GroupNeeds(phases, buffers)

    def convolve(self) -> Kernel:
        slide = self.slide(self.group, self.setting, Phase.FORWARD)
        if slide is None or not self._has_room(slide):
            return super().convolve()
        packed, pack = self._packed(slide, Phase.FORWARD)
        product = self.product(
            "window_forward.cu", "window_forward", Tiling(slide, Parts(1, 1)),
            computed_pixels(self.group), self.group.head.output_shape[0],
            (self.arrays["x"], packed, self.arrays["bias"], *self.outputs), self.geometry,
            behind=follows(self.group), drops=True,
        )  # fmt: skip
        return _in_turn(pack, product)

    def backward_input(self) -> Kernel:
        slide = self.slide(self.group, self.setting, Phase.BACKWARD_INPUT)
        if slide is None or not self._has_room(slide):
            return super().backward_input()
        packed, pack = self._packed(slide, Phase.BACKWARD_INPUT)
        c, h, w = self.group.head.input_shape
        product = self.product(
            "window_backward_input.cu", "window_backward_input", Tiling(slide, Parts(1, 1)),
            h * w, c, (*self.dz, packed, self.arrays["dx"]), self.geometry, behind=self.behind,
        )  # fmt: skip
        return _in_turn(pack, product)

    def backward_weight(self) -> Kernel:
        tiling = self.pixel_sum(self.group, self.setting)
        if tiling is None or not self._has_room(tiling.tile):
            gathered = super().weight_tiling(self.group, self.setting)
            return self.weight_gradient("conv2d_backward_weight", gathered)
        return self.weight_gradient("window_backward_weight", tiling)

    def _has_room(self, work: Work) -> bool:
        """Whether blocks of this device have enough shared memory."""
        return work.shared_bytes <= self.device.shared_bytes

    def _packed(self, slide: Slide, phase: Phase) -> tuple[object, Kernel]:
        """Memory of the weights as a kernel takes them, and the stage that brings them there."""
        defines = {**slide.defines, **self.defines, "BACKWARD": int(phase is Phase.BACKWARD_INPUT)}
        function = self.device.function("pack_weights.cu", "pack_weights", **defines)
        packed, weight = self.arrays[PACKED[phase]], self.arrays["weight"]
        r, s, channels, filters = weight.shape
        sizes = np.int32(r * s), np.int32(channels), np.int32(filters)
        pieces = slide.packed * self.itemsize // windows.PIECE

        def pack(context: Context) -> None:
            if context.n:
                launch(function, pieces, weight, packed, *sizes)

        return packed, pack


def _in_turn(first: Kernel, second: Kernel) -> Kernel:
    def run(context: Context) -> None:
        first(context)
        second(context)

    return run
