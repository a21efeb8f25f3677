"""GroupNorm and LayerNorm bound to arrays."""

from __future__ import annotations

from typing import Any

from dptrain.backends.numba.normalization import batch_norm, sample_norms
from dptrain.backends.numba.normalization.batch_norm_operation import ChannelNormalization
from dptrain.backends.numba.operations import each, grain_of
from dptrain.backends.numba.programs import StageKernel, joined
from dptrain.native.threads import Launch
from dptrain.network.normalization import Normalization
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase, Setting


class GroupNormalization(ChannelNormalization[Normalization]):
    """GroupNorm."""

    @classmethod
    def _num_moments(cls, group: Group) -> int:
        """Return how many means a sample has."""
        groups: int = group.head.layer.groups  # type: ignore[attr-defined]
        return groups

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        n, c = setting.batch_size, group.head.output_shape[0]
        scratch = BufferSpec((setting.threads, batch_norm.ROWS * c), "float32")
        buffers = {
            "moments": BufferSpec((n, 2, cls._num_moments(group)), "float32"),
            "forward_scratch": scratch,
        }
        phases = {Phase.FORWARD: Access(("x",), ("y", *buffers))}
        if setting.training:
            buffers |= {
                "sums": BufferSpec((n, 2 * c), "float64"),
                "weight_scratch": scratch,
                "input_scratch": scratch,
            }
            reads = "x", "dy", "moments"
            phases[Phase.BACKWARD_WEIGHT] = Access(reads, ("sums", "weight_scratch"))
            if group.gradients:
                phases[Phase.BACKWARD_INPUT] = Access((*reads, "sums"), ("dx", "input_scratch"))
        return GroupNeeds(phases, buffers)

    def forward(self) -> StageKernel:
        """Return the stage that writes y."""
        return each(self._forward(), 1)

    def backward_weight(self) -> StageKernel:
        """Return the stage that writes the gradients of the parameters."""
        sums = self.samples_launch("sums", 1), *self.gradient_launches()
        return joined(each(self._sums(), 1), StageKernel(sums, lambda context: None))

    def backward_input(self) -> StageKernel:
        """Return the stage that writes dx."""
        return each(self._backward_input(), 1)

    def _bind(self, kernel: Any, maps: str, *operands: Any) -> Launch:
        """Bind a kernel to maps, by their names, and to further operands."""
        grain = grain_of(self.map_pixels * self.channels)
        arrays = map(self.maps, maps.split())
        return self.thread_pool.bind(kernel, *arrays, *operands, grain=grain)

    def _norm(self) -> batch_norm.ChannelNorm:
        a = self.arrays
        return batch_norm.ChannelNorm(a["moments"], a["weight"], a["bias"])

    def _forward(self) -> Launch:
        scratch, epsilon = self.arrays["forward_scratch"], self.layer.epsilon
        return self._bind(sample_norms.group_norm_forward, "x y", self._norm(), scratch, epsilon)

    def _sums(self) -> Launch:
        operands = self._norm(), self.arrays["sums"], self.arrays["weight_scratch"]
        return self._bind(sample_norms.group_norm_sums, "x dy", *operands)

    def _backward_input(self) -> Launch:
        operands = self._norm(), self.arrays["sums"], self.arrays["input_scratch"]
        return self._bind(sample_norms.group_norm_backward, "x dy dx", *operands)


class LayerNormalization(GroupNormalization):
    """LayerNorm."""

    @classmethod
    def _num_moments(cls, group: Group) -> int:
        _, height, width = group.head.output_maps
        return height * width

    def _forward(self) -> Launch:
        parameters = (self.arrays[name] for name in ("moments", "weight", "bias"))
        epsilon = self.layer.epsilon
        return self._bind(sample_norms.layer_norm_forward, "x y", *parameters, epsilon)

    def _sums(self) -> Launch:
        a = self.arrays
        return self._bind(sample_norms.layer_norm_sums, "x dy", a["moments"], a["sums"])

    def _backward_input(self) -> Launch:
        a = self.arrays
        return self._bind(sample_norms.layer_norm_backward, "x dy dx", a["moments"], a["weight"])
