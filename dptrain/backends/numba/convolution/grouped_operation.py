"""Grouped and depthwise convolution bound to arrays."""

from __future__ import annotations

from collections.abc import Mapping

from dptrain.backends.numba.convolution import grouped_convolution
from dptrain.backends.numba.convolution.operation import Convolution
from dptrain.backends.numba.convolution.planning import work_of
from dptrain.backends.numba.operations import each, grain_of
from dptrain.backends.numba.programs import StageKernel
from dptrain.network.activations import ReLU
from dptrain.plan.lowering import Access, BufferSpec, Explanation, Group, GroupNeeds, Phase, Setting


class GroupedConvolution(Convolution):
    """Conv2d with several groups, optionally fused with ReLU."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        weight, filters = group.head.parameters[0], group.head.output_shape[0]
        phases = {Phase.FORWARD: Access(("x",), ("y",))}
        if not setting.training:
            return GroupNeeds(phases)
        if ReLU in group.kinds:
            phases[Phase.BACKWARD] = Access(("dy", "y"), ("dy",))
        phases[Phase.BACKWARD_WEIGHT] = Access(("x", "dy"), ("partial",))
        if group.gradients:
            phases[Phase.BACKWARD_INPUT] = Access(("dy",), ("dx",))
        rows = work_of(setting).rows
        return GroupNeeds(phases, {"partial": BufferSpec((rows, weight.size + filters), "float32")})

    @classmethod
    def explain(cls, group: Group, setting: Setting) -> Mapping[Phase, Explanation]:
        groups = group.head.layer.groups  # type: ignore[attr-defined]
        only = Explanation("loops over channels", reason=f"{groups} groups")
        return dict.fromkeys(Phase, only)

    def _geometry(self) -> grouped_convolution.GroupedGeometry:
        (top, _), (left, _) = self.layer.pads(self.group.head.input_shape)
        strides, dilations = self.layer.strides, self.layer.dilations
        return grouped_convolution.GroupedGeometry(
            top, left, *strides, *dilations, self.layer.groups
        )

    def _grain(self) -> int:
        """Return the rows of the output that are worth one more thread."""
        weight, (_, _, width) = self.arrays["weight"], self.group.head.output_shape
        return grain_of(width * weight.size)

    def forward(self) -> StageKernel:
        a, height = self.arrays, self.group.head.output_shape[1]
        launch = self.thread_pool.bind(
            grouped_convolution.grouped_forward, a["x"], a["weight"], self.bias(), a["y"],
            self._geometry(), ReLU in self.group.kinds, grain=self._grain(),
        )  # fmt: skip
        return each(launch, height)

    def backward_weight(self) -> StageKernel:
        a, sums, bounds = self.arrays, self.arrays["partial"], self._bounds()
        accumulate = self.thread_pool.bind(
            grouped_convolution.grouped_backward_weight, a["x"], a["dy"], sums, bounds,
            a["weight"].shape, self._geometry(),
        )  # fmt: skip
        taps = a["weight"].shape[0] * a["weight"].shape[1]
        accumulate.set_items(len(sums) * taps)
        return StageKernel(
            (accumulate, self._reduction()), lambda context: self._divide(bounds, context)
        )

    def backward_input(self) -> StageKernel:
        a = self.arrays
        launch = self.thread_pool.bind(
            grouped_convolution.grouped_backward_input, a["dy"], a["weight"], a["dx"],
            self._geometry(), "dx" in self.group.adds, grain=self._grain(),
        )  # fmt: skip
        return each(launch, a["dx"].shape[1])
