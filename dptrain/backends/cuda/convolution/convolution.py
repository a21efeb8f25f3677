"""Convolutions whose operands are gathered from global memory, and the choice of their kernels.

Forward and backward-input are implicit GEMMs on ``gemm.cuh``: the im2col matrix is never stored;
threads gather its elements. Two phases have faster kernels for some layers: forward with few input
channels (`few_channel_tiles`), and the weight gradient with stride 1 (`wgrad_tiles`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from dptrain.backends.cuda.convolution.few_channels.few_channel_tiles import (
    FewChannelTile,
    few_channel_candidates,
    select_few_channel_tile,
)
from dptrain.backends.cuda.convolution.few_channels.few_channel_wgrad_tiles import (
    FewChannelWgradTile,
    rank_few_channel_wgrad_tiles,
    select_few_channel_wgrad_tile,
)
from dptrain.backends.cuda.convolution.halo.halo_tiles import InputView
from dptrain.backends.cuda.convolution.halo.wgrad_tiles import (
    WgradTile,
    rank_wgrad_tiles,
    select_wgrad_tile,
)
from dptrain.backends.cuda.dense.gemm_tiles import GemmConfig, SplitK, ceil_div
from dptrain.backends.cuda.device.device import Array
from dptrain.backends.cuda.device.hardware import limits_of
from dptrain.backends.cuda.epilogues import epilogue_of
from dptrain.backends.cuda.geometry import geometry, geometry_defines
from dptrain.backends.cuda.weighted import (
    NO_EPILOGUE,
    RELU,
    RELU_POOL,
    WeightedOperation,
    computed_pixels,
    fused_epilogue,
    pools_in_kernel,
    separate_epilogue,
)
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import Conv2d
from dptrain.plan.limits import DeviceLimits
from dptrain.plan.lowering import (
    Access,
    BufferSpec,
    Group,
    GroupNeeds,
    Phase,
    Setting,
    stage_name,
)

MIN_UNPOOL_ELEMENTS = 1 << 20
"""Elements of dz from which a separate pass unpools dy into dz, instead of every tap of the
convolution. On an H200, a backward-input kernel that unpools took 1.6 times as long as the forward
product of the same size. The bound itself is an estimate."""


class GatherConvolution(WeightedOperation):
    """Conv2d, optionally with ReLU, optionally with ReLU and an epilogue (`epilogues`).

    If pooling is fused, the output before pooling is never written, and its gradient only if that
    is faster (`MIN_UNPOOL_ELEMENTS`).
    """

    @classmethod
    def unpools_separately(cls, group: Group, setting: Setting) -> bool:
        """Return whether the gradient before fused pooling is written to `dmaps`."""
        head = group.head
        size = setting.batch_size * math.prod(head.output_shape)
        has_reader = "dx" in group.gradients
        return pools_in_kernel(group) and has_reader and size >= MIN_UNPOOL_ELEMENTS

    @classmethod
    def writes_dz(cls, group: Group, setting: Setting) -> bool:
        """Return whether a phase of its own writes the gradient before ReLU and epilogue to
        `dmaps`.
        """
        return separate_epilogue(group) is not None or cls.unpools_separately(group, setting)

    @classmethod
    def wgrad_pixels(cls, group: Group, setting: Setting) -> int:
        if cls.unpools_separately(group, setting):
            return math.prod(group.head.output_maps[1:])
        return super().wgrad_pixels(group, setting)

    @classmethod
    def wgrad_tile(cls, group: Group, setting: Setting) -> WgradTile | FewChannelWgradTile | None:
        """Return the tile of the weight gradient; None if operands are gathered."""
        layer = group.head.layer
        assert isinstance(layer, Conv2d)
        written = cls.writes_dz(group, setting)
        stage = stage_name(group.name, Phase.BACKWARD_WEIGHT)
        if pools_in_kernel(group) and not written and layer.strides == (1, 1):
            pooled = (
                InputView.forward(group.head), setting.precision, setting.batch_size,
                limits_of(setting),
            )  # fmt: skip
            few = select_few_channel_wgrad_tile(*pooled)
            if few is not None:
                tiles = rank_few_channel_wgrad_tiles(*pooled)
                return setting.selection.pick(
                    stage, few, lambda: ((1.0 + (tile != few) / 10, tile) for tile in tiles)
                )
        best = select_wgrad_tile(*cls._wgrad_product(group, setting))
        if best is None:
            return None
        return setting.selection.pick(stage, best, lambda: cls.rank_wgrad_tiles(group, setting))

    @classmethod
    def rank_wgrad_tiles(cls, group: Group, setting: Setting) -> list[tuple[float, WgradTile]]:
        """Return the tiles of the weight gradient; see `wgrad_tiles.rank_wgrad_tiles`."""
        return rank_wgrad_tiles(*cls._wgrad_product(group, setting))

    @classmethod
    def _wgrad_product(
        cls, group: Group, setting: Setting
    ) -> tuple[InputView, str, tuple[int, int], int, int, DeviceLimits]:
        """Return the arguments of `wgrad_tiles.select_wgrad_tile`."""
        layer = group.head.layer
        assert isinstance(layer, Conv2d)
        written = cls.writes_dz(group, setting)
        return (
            InputView.forward(group.head), setting.precision, layer.strides,
            NO_EPILOGUE if written else fused_epilogue(group), setting.batch_size,
            limits_of(setting),
        )  # fmt: skip

    @classmethod
    def forward_config(cls, group: Group, setting: Setting) -> GemmConfig:
        """Return the configuration of the forward product of gathered operands."""
        n, filters, pooled = (
            setting.batch_size, group.head.output_shape[0], pools_in_kernel(group)
        )  # fmt: skip
        layer = group.head.layer
        assert isinstance(layer, Conv2d)
        product = InputView.forward(group.head), layer.strides, setting.precision
        limits = limits_of(setting)
        best = select_few_channel_tile(*product, n, limits, pooled=pooled)
        if best is None:
            taps = group.head.parameters[0].size // filters
            rows = n * computed_pixels(group)
            return cls.gemm_config(group, setting, Phase.FORWARD, rows, filters, taps)

        def ranked() -> Iterator[tuple[float, FewChannelTile]]:
            # They have no estimates: the first that occupies the GPU is selected.
            for tile in few_channel_candidates(*product, limits, pooled=pooled):
                yield 1.0 if tile == best else 1.1, tile

        tile = setting.selection.pick(stage_name(group.name, Phase.FORWARD), best, ranked)
        return GemmConfig(tile, SplitK(1, 1))

    @classmethod
    def backward_product(cls, group: Group, setting: Setting) -> tuple[int, int]:
        """Return rows and mean terms of the backward-input product of gathered operands.

        With strides, an input pixel is reached by a part of the taps only, or by none.
        """
        layer, filters = group.head.layer, group.head.output_maps[0]
        assert isinstance(layer, Conv2d)
        steps = list(zip(layer.window, layer.strides, group.head.input_maps[1:], strict=True))
        classes = math.prod(min(window, stride) for window, stride, _ in steps)
        pixels = math.prod(ceil_div(size, stride) for _, stride, size in steps)
        terms = ceil_div(math.prod(layer.window), classes) * filters
        return setting.batch_size * pixels * classes, terms

    @classmethod
    def backward_input_config(cls, group: Group, setting: Setting) -> GemmConfig:
        """Return the configuration of the backward-input product of gathered operands."""
        rows, terms = cls.backward_product(group, setting)
        channels = group.head.input_maps[0]
        return cls.gemm_config(group, setting, Phase.BACKWARD_INPUT, rows, channels, terms)

    @classmethod
    def wgrad_config(cls, group: Group, setting: Setting) -> GemmConfig:
        tile = cls.wgrad_tile(group, setting)
        if tile is None:
            return cls.gather_wgrad_config(group, setting)
        return tile.config(group.head.output_shape[0], setting.batch_size)

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        n, fused, separate = setting.batch_size, fused_epilogue(group), separate_epilogue(group)
        buffers: dict[str, BufferSpec] = {}
        maps = BufferSpec((n, *group.head.output_maps), setting.activations)
        dz: tuple[str, ...] = ("dy", "y") if fused == RELU else ("dy",)
        if separate is not None:
            dz, buffers = ("dmaps",), {"maps": maps, **separate.buffers(group, setting)}
        elif fused == RELU_POOL:
            dz = ("dmaps",) if cls.unpools_separately(group, setting) else ("dy", "argmax")
            buffers["argmax"] = BufferSpec((n, *group.tail.output_maps), "uint8")
        phases = {Phase.FORWARD: Access(("x",), ("y", *buffers))}
        if not setting.training:
            return GroupNeeds(phases, buffers)
        if cls.writes_dz(group, setting):
            buffers["dmaps"] = maps
            reads = ("argmax",) if separate is None else separate.reads
            phases[Phase.BACKWARD] = Access(("dy", *reads), ("dmaps",))
        cls.add_partial_buffer(group, setting, buffers)
        partial = ("partial",) if "partial" in buffers else ()
        phases[Phase.BACKWARD_WEIGHT] = Access(("x", *dz), partial)
        if group.gradients:
            phases[Phase.BACKWARD_INPUT] = Access(dz, ("dx",))
        return GroupNeeds(phases, buffers)

    def backward(self) -> Kernel:
        """Return the stage that writes `dmaps`."""
        epilogue = epilogue_of(self.group)
        assert epilogue is not None
        return epilogue(self).backward()

    @cached_property
    def reads_dmaps(self) -> bool:
        """True if backward kernels read the gradient before ReLU and epilogue from `dmaps`."""
        return self.writes_dz(self.group, self.setting)

    @property
    def undone_epilogue(self) -> int:
        return NO_EPILOGUE if self.reads_dmaps else fused_epilogue(self.group)

    @property
    def geometry(self) -> list[np.int32]:
        """Kernel arguments that describe the layer."""
        return geometry(self.group.head, self.layer.window)

    @property
    def defines(self) -> dict[str, int]:
        folds = {"FOLDED": 1} if self.layer.strides != (1, 1) else {}
        return {**super().defines, **folds, **geometry_defines(self.device, self.geometry)}

    @property
    def dz(self) -> tuple[Array, Array, np.float32]:
        """The arrays and the factor from which kernels compute dz, the gradient before ReLU."""
        a = self.arrays
        if self.reads_dmaps:
            return a["dmaps"], a["dmaps"], np.float32(1.0)
        mask = a["argmax" if self.undone_epilogue == RELU_POOL else "y"]
        return a["dy"], mask, self.dropout_factor

    def forward(self) -> Kernel:
        epilogue, convolve = separate_epilogue(self.group), self.convolve()
        if epilogue is None:
            return convolve
        finish = epilogue(self).forward()

        def run(context: Context) -> None:
            convolve(context)
            finish(context)

        return run

    @property
    def outputs(self) -> tuple[Array, Array]:
        """Arrays that the forward product writes: y, or `maps` for an epilogue, and argmax."""
        a = self.arrays
        y = a["maps"] if separate_epilogue(self.group) else a["y"]
        return y, a["argmax"] if pools_in_kernel(self.group) else y

    def convolve(self) -> Kernel:
        """Return the stage of the forward product."""
        a, filters = self.arrays, self.group.head.output_shape[0]
        config = self.forward_config(self.group, self.setting)
        if isinstance(config.tile, FewChannelTile):
            name, rows = "conv2d_forward_few_channels", config.tile.strips_per_sample
        else:
            name, rows = "conv2d_forward", computed_pixels(self.group)
        return self.product(
            f"{name}.cu", name, config, rows, filters,
            (a["x"], a["weight"], a["bias"], *self.outputs), self.geometry,
            epilogue=fused_epilogue(self.group), fuses_dropout=True,
        )  # fmt: skip

    def backward_weight(self) -> Kernel:
        numbers, inputs = self.geometry, (self.arrays["x"], *self.dz)

        def trailing(samples: int, part: int) -> tuple[np.int32, ...]:
            return np.int32(samples), np.int32(part), *numbers

        config = self.wgrad_config(self.group, self.setting)
        if isinstance(config.tile, WgradTile | FewChannelWgradTile):
            name, terms = config.tile.KERNEL, config.tile.strips
        else:
            pixels = self.wgrad_pixels(self.group, self.setting)
            name, terms = "conv2d_backward_weight", lambda samples: samples * pixels
        return self.wgrad_product(f"{name}.cu", name, config, terms, inputs, trailing)

    def backward_input(self) -> Kernel:
        a, (c, h, w) = self.arrays, self.group.head.input_shape
        config = self.backward_input_config(self.group, self.setting)
        vertical, horizontal = self.layer.strides
        rows, classes = ceil_div(h, vertical) * ceil_div(w, horizontal), vertical * horizontal
        return self.product(
            "conv2d_backward_input.cu", "conv2d_backward_input", config, rows, c,
            (*self.dz, a["weight"], a["dx"]), self.geometry, epilogue=self.undone_epilogue,
            adds="dx" in self.group.adds, classes=classes,
        )  # fmt: skip
