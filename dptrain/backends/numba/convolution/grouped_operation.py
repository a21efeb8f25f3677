"""Grouped and depthwise convolution bound to arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.convolution.grouped_convolution import (
    GroupedGeometry,
    grouped_backward_weight,
    grouped_product,
    transpose_filters,
)
from dptrain.backends.numba.convolution.grouped_planning import (
    Sizes,
    backward_axis,
    forward_axis,
    geometry_of,
)
from dptrain.backends.numba.convolution.microkernels import NO_LOWER_BOUND
from dptrain.backends.numba.convolution.operation import Convolution
from dptrain.backends.numba.convolution.planning import work_of
from dptrain.backends.numba.operations import each, grain_of
from dptrain.backends.numba.programs import StageKernel, joined
from dptrain.backends.numba.vector import compiled_registers
from dptrain.network.activations import ReLU
from dptrain.plan.lowering import Access, BufferSpec, Explanation, Group, GroupNeeds, Phase, Setting

SCRATCH = {
    Phase.FORWARD: "forward_scratch",
    Phase.BACKWARD_WEIGHT: "weight_scratch",
    Phase.BACKWARD_INPUT: "input_scratch",
}
"""Buffers of the padded map of each phase, one for each thread."""


class GroupedConvolution(Convolution):
    """Conv2d with several groups, optionally fused with ReLU."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        weight, filters = group.head.parameters[0], group.head.output_shape[0]
        own = Phase.FORWARD
        phases = {own: Access(("x",), ("y", SCRATCH[own]))}
        buffers = {SCRATCH[own]: cls._scratch(group, setting, own)}
        if not setting.training:
            return GroupNeeds(phases, buffers)
        if ReLU in group.kinds:
            phases[Phase.BACKWARD] = Access(("dy", "y"), ("dy",))
        own = Phase.BACKWARD_WEIGHT
        phases[own] = Access(("x", "dy"), ("partial", SCRATCH[own]))
        buffers[SCRATCH[own]] = cls._scratch(group, setting, own)
        rows = work_of(setting).rows
        buffers["partial"] = BufferSpec((rows, weight.size + filters), "float32")
        if group.gradients:
            own = Phase.BACKWARD_INPUT
            phases[own] = Access(("dy",), ("dx", SCRATCH[own], "input_shared"))
            buffers[SCRATCH[own]] = cls._scratch(group, setting, own)
            buffers["input_shared"] = BufferSpec((weight.size,), "float32")
        return GroupNeeds(phases, buffers)

    @classmethod
    def _scratch(cls, group: Group, setting: Setting, phase: Phase) -> BufferSpec:
        geometry = _geometry(group, phase)
        size = geometry.height * geometry.width * geometry.channels
        return BufferSpec((setting.threads, size), "float32")

    @classmethod
    def explain(cls, group: Group, setting: Setting) -> Mapping[Phase, Explanation]:
        reason = f"{group.head.layer.groups} groups"  # type: ignore[attr-defined]
        return dict.fromkeys(Phase, Explanation("padded groups", reason=reason))

    def _grain(self, geometry: GroupedGeometry) -> int:
        """Return the groups that are worth one more thread."""
        weight, (_, height, width) = self.arrays["weight"], self.group.head.output_shape
        return grain_of(height * width * weight.size // geometry.groups)

    def _product(
        self, phase: Phase, x: str, w: NDArray[Any], b: NDArray[Any], y: str, bound: np.float32
    ) -> StageKernel:
        """Return the stage of a phase that computes maps."""
        geometry, adds = _geometry(self.group, phase), y in self.group.adds
        launch = self.thread_pool.bind(
            grouped_product, self.arrays[x], w, b, self.arrays[y], geometry, adds, bound,
            self.arrays[SCRATCH[phase]], grain=self._grain(geometry),
        )  # fmt: skip
        return each(launch, geometry.groups)

    def forward(self) -> StageKernel:
        bound = np.float32(0.0) if ReLU in self.group.kinds else NO_LOWER_BOUND
        return self._product(Phase.FORWARD, "x", self.flat("weight"), self.bias(), "y", bound)

    def backward_weight(self) -> StageKernel:
        a, sums, bounds = self.arrays, self.arrays["partial"], self._bounds()
        geometry = _geometry(self.group, Phase.BACKWARD_WEIGHT)
        accumulate = self.thread_pool.bind(
            grouped_backward_weight, a["x"], a["dy"], sums, bounds, geometry, self.has_bias,
            a[SCRATCH[Phase.BACKWARD_WEIGHT]],
        )  # fmt: skip
        accumulate.set_items(len(sums) * geometry.groups)
        return StageKernel(
            (accumulate, self._reduction()), lambda context: self._divide(bounds, context)
        )

    def backward_input(self) -> StageKernel:
        weight, flat = self.arrays["weight"], self.arrays["input_shared"]
        elements, zeros = math.prod(weight.shape[:2]), np.zeros(self.arrays["dx"].shape[-1], "f4")
        target = flat.reshape(elements, weight.shape[3] // self.layer.groups, -1)
        order = _order(self.group)
        source = weight.reshape(elements, *weight.shape[2:])
        transpose = self.thread_pool.bind(
            transpose_filters, source, order, self.layer.groups, target,
            grain=grain_of(target[0].size),
        )  # fmt: skip
        # Maps that are smaller than the filters do not meet all of their elements.
        transpose.set_items(len(order))
        product = self._product(Phase.BACKWARD_INPUT, "dy", flat, zeros, "dx", NO_LOWER_BOUND)
        return joined(StageKernel((transpose,), lambda context: None), product)


def _axes(group: Group, phase: Phase) -> tuple[Any, Any]:
    """Return the vertical and the horizontal axis of a phase."""
    node = group.head
    conv: Any = node.layer
    (top, _), (left, _) = conv.pads(node.input_shape)
    sizes = node.input_shape if phase is Phase.BACKWARD_INPUT else node.output_shape
    axis = backward_axis if phase is Phase.BACKWARD_INPUT else forward_axis
    return tuple(
        axis(*numbers)
        for numbers in zip(
            (top, left), conv.strides, conv.dilations, conv.window, sizes[1:], strict=True
        )
    )  # type: ignore[return-value]


def _order(group: Group) -> NDArray[np.int64]:
    """Return the elements of a filter in the order of the phases of the input gradient."""
    vertical, horizontal = _axes(group, Phase.BACKWARD_INPUT)
    width = group.head.parameters[0].shape[3]
    return np.array([
        r * width + s
        for down in vertical.phases for across in horizontal.phases
        for r in down.taps for s in across.taps
    ], np.int64)  # fmt: skip


def _geometry(group: Group, phase: Phase) -> GroupedGeometry:
    """Return the sizes and tables of a phase."""
    node = group.head
    conv: Any = node.layer
    channels, filters, groups = node.input_shape[0], node.output_shape[0], conv.groups
    depthwise, block = channels == filters == groups, 2 * compiled_registers().width
    result = node.output_shape
    if phase is Phase.BACKWARD_INPUT:
        channels, filters, result = filters, channels, node.input_shape
    each_channels, each_filters = channels // groups, filters // groups
    if depthwise:
        each_channels = each_filters = min(block, channels)
        groups = -(-channels // block)
    sizes = Sizes(each_channels, each_filters, groups, depthwise, result[2], filters)
    return geometry_of(*_axes(group, phase), sizes)
