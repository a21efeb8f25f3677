"""Convolutions bound to arrays, with what is fused behind them."""

from __future__ import annotations

import math

import numpy as np

from dptrain.backends.cuda.device import Array
from dptrain.backends.cuda.epilogues import epilogue_of
from dptrain.backends.cuda.few_channel_tiles import select_few_channel_tile
from dptrain.backends.cuda.gemm_tiles import GemmConfig, SplitK, select_gemm_config
from dptrain.backends.cuda.geometry import fixed, geometry
from dptrain.backends.cuda.halo_tiles import View
from dptrain.backends.cuda.operations import Kernels
from dptrain.backends.cuda.weighted import (
    NOTHING,
    RELU,
    RELU_POOLING,
    WeightedOperation,
    computed_pixels,
    fused_epilogue,
    pools_in_kernel,
    separate_epilogue,
)
from dptrain.backends.cuda.wgrad_tiles import WgradTile, select_wgrad_tile
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import Conv2d
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase, Setting

SPREAD = 1 << 20
"""Elements of dz from which a pass that writes them should cost less than making them again for
each tap of the convolution. On an H200 a gradient by the input that makes dz took 1.6 times as long
as the forward product of the same size; the bound itself was estimated, not measured."""


class GatherConvolution(WeightedOperation):
    """Conv2d, perhaps with ReLU, perhaps with ReLU and a tail (`tails`).

    Where windows of pooling are two by two and touch, the maps that are pooled are never written,
    and the gradients by them only where that pays (`SPREAD`).
    """

    @classmethod
    def spreads(cls, group: Group, setting: Setting) -> bool:
        """Whether the gradient by what was pooled is written before it is used."""
        head = group.head
        size = setting.batch_size * math.prod(head.output_shape)
        return pools_in_kernel(group) and head.index > 0 and size >= SPREAD

    @classmethod
    def summed_pixels(cls, group: Group, setting: Setting) -> int:
        if cls.spreads(group, setting):
            return math.prod(group.head.output_maps[1:])
        return super().summed_pixels(group, setting)

    @classmethod
    def pixel_sum(cls, group: Group, setting: Setting) -> WgradTile | None:
        """How windows of maps are summed up to the gradient of weights; None if it is gathered."""
        layer = group.head.layer
        assert isinstance(layer, Conv2d)
        spread = separate_epilogue(group) is not None or cls.spreads(group, setting)
        return select_wgrad_tile(
            View.forward(group.head), setting.precision, layer.strides,
            NOTHING if spread else fused_epilogue(group), setting.batch_size,
        )  # fmt: skip

    @classmethod
    def weight_tiling(cls, group: Group, setting: Setting) -> GemmConfig:
        """Of two ways the one of more parts: which it is the device decides."""
        gathered, way = cls.gathered_sum(group, setting), cls.pixel_sum(group, setting)
        if way is None:
            return gathered
        windowed = way.tiling(group.head.output_shape[0], setting.batch_size)
        return max(gathered, windowed, key=lambda tiling: tiling.parts.count)

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        n, behind, tail = setting.batch_size, fused_epilogue(group), separate_epilogue(group)
        buffers: dict[str, BufferSpec] = {}
        maps = BufferSpec((n, *group.head.output_maps), setting.activations)
        dz: tuple[str, ...] = ("dy", "y") if behind == RELU else ("dy",)
        if tail is not None:
            dz, buffers = ("dmaps",), {"maps": maps, **tail.buffers(group, setting)}
        elif behind == RELU_POOLING:
            dz = ("dmaps",) if cls.spreads(group, setting) else ("dy", "argmax")
            buffers["argmax"] = BufferSpec((n, *group.tail.output_maps), "uint8")
        phases = {Phase.FORWARD: Access(("x",), ("y", *buffers))}
        if not setting.training:
            return GroupNeeds(phases, buffers)
        if dz == ("dmaps",):
            buffers["dmaps"] = maps
            reads = ("argmax",) if tail is None else tail.reads
            phases[Phase.BACKWARD] = Access(("dy", *reads), ("dmaps",))
        cls.add_parts(group, setting, buffers)
        partial = ("partial",) if "partial" in buffers else ()
        phases[Phase.BACKWARD_WEIGHT] = Access(("x", *dz), partial)
        phases[Phase.BACKWARD_INPUT] = Access(dz, ("dx",))
        return GroupNeeds(phases, buffers)

    def kernels(self) -> Kernels:
        kernels = dict(super().kernels())
        tail = epilogue_of(self.group)
        if tail is not None and "dmaps" in self.arrays:
            kernels[Phase.BACKWARD] = tail(self).backward()
        return kernels

    @property
    def behind(self) -> int:
        return NOTHING if "dmaps" in self.arrays else fused_epilogue(self.group)

    @property
    def geometry(self) -> list[np.int32]:
        """What kernels know of the layer."""
        return geometry(self.group.head, self.layer.window)

    @property
    def defines(self) -> dict[str, int]:
        return {**super().defines, **fixed(self.device, self.geometry)}

    @property
    def dz(self) -> tuple[Array, Array, np.float32]:
        """What kernels make the gradient by the convolution from."""
        a = self.arrays
        if "dmaps" in a:
            return a["dmaps"], a["dmaps"], np.float32(1.0)
        return a["dy"], a["argmax" if self.behind == RELU_POOLING else "y"], self.factor

    def forward(self) -> Kernel:
        tail, convolve = separate_epilogue(self.group), self.convolve()
        if tail is None:
            return convolve
        behind = tail(self).forward()

        def run(context: Context) -> None:
            convolve(context)
            behind(context)

        return run

    @property
    def outputs(self) -> tuple[Array, Array]:
        """What the forward product writes: y, or maps that a tail reads, and marks."""
        a = self.arrays
        y = a["maps"] if separate_epilogue(self.group) else a["y"]
        return y, a["argmax"] if pools_in_kernel(self.group) else y

    def convolve(self) -> Kernel:
        """Stage of the forward product."""
        a, filters = self.arrays, self.group.head.output_shape[0]
        narrow = select_few_channel_tile(
            View.forward(self.group.head), self.layer.strides, self.precision, self.batch_size,
            pooled=pools_in_kernel(self.group),
        )  # fmt: skip
        if narrow is not None:
            return self.product(
                "conv2d_forward_few_channels.cu", "conv2d_forward_few_channels",
                GemmConfig(narrow, SplitK(1, 1)), narrow.strips, filters,
                (a["x"], a["weight"], a["bias"], *self.outputs), self.geometry,
                behind=fused_epilogue(self.group), drops=True,
            )  # fmt: skip
        pixels, taps = computed_pixels(self.group), a["weight"].size // filters
        tiling = select_gemm_config(self.precision, self.batch_size * pixels, filters, taps)
        return self.product(
            "conv2d_forward.cu", "conv2d_forward", tiling, pixels, filters,
            (a["x"], a["weight"], a["bias"], *self.outputs), self.geometry,
            behind=fused_epilogue(self.group), drops=True,
        )  # fmt: skip

    def backward_weight(self) -> Kernel:
        numbers, inputs = self.geometry, (self.arrays["x"], *self.dz)

        def rest(samples: int, part: int) -> tuple[np.int32, ...]:
            return np.int32(samples), np.int32(part), *numbers

        way = self.pixel_sum(self.group, self.setting)
        if way is None or way.shared_bytes > self.device.shared_bytes:
            name, tiling = "conv2d_backward_weight", self.gathered_sum(self.group, self.setting)
            terms = self.summed_pixels(self.group, self.setting)
        else:
            name, tiling = (
                "conv2d_backward_weight_halo",
                way.tiling(self.group.head.output_shape[0], self.batch_size),
            )
            terms = way.strips
        return self.gradient_kernel(f"{name}.cu", name, tiling, terms, inputs, rest)

    def backward_input(self) -> Kernel:
        a, (c, h, w) = self.arrays, self.group.head.input_shape
        tiling = select_gemm_config(
            self.precision, self.batch_size * h * w, c, a["weight"].size // c
        )
        return self.product(
            "conv2d_backward_input.cu", "conv2d_backward_input", tiling, h * w, c,
            (*self.dz, a["weight"], a["dx"]), self.geometry, behind=self.behind,
        )  # fmt: skip
