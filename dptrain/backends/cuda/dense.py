"""Dense layers bound to arrays, alone or with what is fused behind them."""

from __future__ import annotations

import math

import numpy as np

from dptrain.backends.cuda import skinny_gemm
from dptrain.backends.cuda.device import Array
from dptrain.backends.cuda.gemm_tiles import GemmConfig, SplitK, select_gemm_config
from dptrain.backends.cuda.launching import launch_reduction
from dptrain.backends.cuda.weighted import WeightedOperation
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import Dense, ReLU
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase, Setting


class DenseGemm(WeightedOperation):
    """Dense, perhaps with ReLU, perhaps with ReLU and Dropout.

    An output that was dropped or rectified is 0, so backward needs no mask but the output.
    """

    @classmethod
    def forward_tiling(cls, group: Group, setting: Setting) -> GemmConfig:
        """Of the product that is the output."""
        inputs, outputs = _shape(group)
        return select_gemm_config(
            setting.precision, setting.batch_size, outputs, inputs, split=True
        )

    @classmethod
    def most_parts(cls, group: Group, setting: Setting) -> int:
        """Of the sums that are the output, whatever the device."""
        return cls.forward_tiling(group, setting).parts.count

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        n, outputs = setting.batch_size, group.head.output_shape[0]
        buffers: dict[str, BufferSpec] = {}
        parts = cls.most_parts(group, setting)
        if parts > 1:
            buffers["forward_partial"] = BufferSpec((parts, n * outputs), "float32")
        phases = {Phase.FORWARD: Access(("x",), ("y", *buffers))}
        if not setting.training:
            return GroupNeeds(phases, buffers)
        cls.add_parts(group, setting, buffers)
        partial = ("partial",) if "partial" in buffers else ()
        dz = ("dy", "y") if ReLU in group.kinds else ("dy",)
        phases[Phase.BACKWARD_WEIGHT] = Access(("x", *dz), partial)
        phases[Phase.BACKWARD_INPUT] = Access(dz, ("dx",))
        return GroupNeeds(phases, buffers)

    @property
    def shape(self) -> tuple[np.int32, np.int32]:
        """Inputs and outputs."""
        inputs, outputs = _shape(self.group)
        return np.int32(inputs), np.int32(outputs)

    def forward(self) -> Kernel:
        return self.output("dense.cu", self.forward_tiling(self.group, self.setting))

    def output(self, file: str, tiling: GemmConfig) -> Kernel:
        """Stage of the product that is the output, by a file's kernels."""
        a, (inputs, outputs), parts = self.arrays, self.shape, tiling.parts
        if parts.count == 1:
            return self.product(
                file, "dense_forward", tiling, 1, int(outputs),
                (a["x"], a["weight"], a["bias"], a["y"]), (inputs, outputs), behind=self.behind,
                drops=True,
            )  # fmt: skip
        # The sum over the inputs by several blocks: few samples alone would keep few busy.
        first = self.product(
            file, "dense_forward_split_k", tiling, 1, int(outputs),
            (a["x"], a["weight"], a["forward_partial"]), (inputs, outputs, np.int32(parts.terms)),
            behind=self.behind,
        )  # fmt: skip
        defines = {**self.defines, "EPILOGUE": self.behind, "EPILOGUE_DROPOUT": int(self.drops)}
        second = self.device.function("dense.cu", "dense_forward_reduce", **defines)
        args = a["forward_partial"], np.int32(parts.count), a["bias"], a["y"], outputs
        last = {training: self.dropping(training=training) for training in (False, True)}

        def run(context: Context) -> None:
            first(context)
            size = context.n * int(outputs)
            launch_reduction(second, size, *args, np.int32(size), *last[context.training])

        return run

    @property
    def dz(self) -> tuple[Array, Array, np.float32]:
        """What kernels make the gradient by the products from."""
        return self.arrays["dy"], self.arrays["y"], self.factor

    def backward_weight(self) -> Kernel:
        return self.weight_gradient("dense.cu")

    def weight_gradient(self, file: str) -> Kernel:
        """Stage of the product that is the gradient of weights, by a file's kernel."""
        shape = self.shape

        def rest(samples: int, part: int) -> tuple[np.int32, ...]:
            return np.int32(samples), *shape, np.int32(part)

        tiling, inputs = self.weight_tiling(self.group, self.setting), (self.arrays["x"], *self.dz)
        return self.gradient_kernel(file, "dense_backward_weight", tiling, 1, inputs, rest)

    def backward_input(self) -> Kernel:
        a, shape = self.arrays, self.shape
        tiling = select_gemm_config(self.precision, self.batch_size, int(shape[0]), int(shape[1]))
        return self.product(
            "dense.cu", "dense_backward_input", tiling, 1, int(shape[0]),
            (*self.dz, a["weight"], a["dx"]), shape, behind=self.behind,
        )  # fmt: skip


class SkinnyDenseGemm(DenseGemm):
    """The same of so few samples that bringing weights, used for these alone, takes longest."""

    FILE = "skinny_gemm.cu"

    @classmethod
    def suits(cls, group: Group, setting: Setting) -> bool:
        """Whether there are kernels for a group."""
        return isinstance(group.head.layer, Dense) and skinny_gemm.suits(
            setting.precision, setting.batch_size, math.prod(_shape(group))
        )

    @classmethod
    def few_tiling(cls, group: Group, setting: Setting) -> GemmConfig:
        """Of the product that is the output, on a device whose blocks have room for it."""
        return skinny_gemm.forward_tiling(setting.precision, setting.batch_size, *_shape(group))

    @classmethod
    def weight_tiling(cls, group: Group, setting: Setting) -> GemmConfig:
        outputs = group.head.output_shape[0]
        return skinny_gemm.gradient_tiling(setting.precision, setting.batch_size, outputs)

    @classmethod
    def most_parts(cls, group: Group, setting: Setting) -> int:
        return max(super().most_parts(group, setting), cls.few_tiling(group, setting).parts.count)

    def forward(self) -> Kernel:
        tiling = self.few_tiling(self.group, self.setting)
        if tiling.tile.shared_bytes > self.device.shared_bytes:
            return super().forward()
        return self.output(self.FILE, tiling)

    def backward_weight(self) -> Kernel:
        return self.weight_gradient("skinny_gemm_backward_weight.cu")

    def backward_input(self) -> Kernel:
        a, (inputs, outputs) = self.arrays, self.shape
        tile = skinny_gemm.backward_tile(self.precision, self.batch_size, int(inputs), int(outputs))
        if tile is None or tile.shared_bytes > self.device.shared_bytes:
            return super().backward_input()
        return self.product(
            self.FILE, "dense_backward_input", GemmConfig(tile, SplitK(1, tile.terms)), 1,
            int(inputs),
            (*self.dz, a["weight"], a["dx"]), self.shape, behind=self.behind,
        )  # fmt: skip


def _shape(group: Group) -> tuple[int, int]:
    """Inputs and outputs."""
    return math.prod(group.head.input_shape), group.head.output_shape[0]
