"""Dense layers: general matrix products, and skinny products for few samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from dptrain.backends.cuda.dense import skinny_gemm
from dptrain.backends.cuda.dense.gemm_tiles import GemmConfig, SplitK, rank_gemm_configs
from dptrain.backends.cuda.device.device import Array
from dptrain.backends.cuda.device.hardware import ELEMENT_BYTES, limits_of, limits_of_sums
from dptrain.backends.cuda.device.launching import launch_reduction
from dptrain.backends.cuda.measured import measured_first, measured_name
from dptrain.backends.cuda.weighted import WeightedOperation
from dptrain.backends.replica import Context, Kernel
from dptrain.network.activations import ReLU
from dptrain.network.layers import Dense
from dptrain.plan.lowering import (
    Access,
    BufferSpec,
    Explanation,
    Group,
    GroupNeeds,
    Phase,
    Setting,
)
from dptrain.plan.selection import MEASURED


class DenseGemm(WeightedOperation[Dense]):
    """Dense, optionally with ReLU, optionally with ReLU and Dropout.

    An element that ReLU or dropout suppressed is 0 in y, so backward needs no mask but y.
    """

    @classmethod
    def explain(cls, group: Group, setting: Setting) -> Mapping[Phase, Explanation]:
        return {
            phase: Explanation(
                config.tile.ALGORITHM, str(config), reason=reason(group, setting, phase, config)
            )
            for phase, config in cls.configs(group, setting).items()
        }  # fmt: skip

    @classmethod
    def configs(cls, group: Group, setting: Setting) -> dict[Phase, GemmConfig]:
        """Return the configurations of the products."""
        configs = {Phase.FORWARD: cls.forward_config(group, setting)}
        if setting.training:
            configs[Phase.BACKWARD_WEIGHT] = cls.wgrad_config(group, setting)
        if group.gradients:
            configs[Phase.BACKWARD_INPUT] = cls.backward_input_config(group, setting)
        return configs

    @staticmethod
    def gemm_config(
        group: Group, setting: Setting, phase: Phase, rows: int, columns: int, terms: int, *,
        split: bool = False,
    ) -> GemmConfig:  # fmt: skip
        """Return the configuration for ``gemm.cuh``; see `rank_gemm_configs`."""
        sums = phase is Phase.BACKWARD_WEIGHT
        limits = limits_of_sums(setting) if sums else limits_of(setting)
        ranked = rank_gemm_configs(setting.precision, rows, columns, terms, limits, split=split)
        return pick_config(ranked, group, setting, phase)

    @classmethod
    def forward_config(cls, group: Group, setting: Setting) -> GemmConfig:
        """Return the configuration of the forward product."""
        inputs, outputs = dense_shape(group)
        return cls.gemm_config(
            group, setting, Phase.FORWARD, setting.kernel_samples, outputs, inputs, split=True
        )

    @classmethod
    def wgrad_config(cls, group: Group, setting: Setting) -> GemmConfig:
        """Return the configuration of the weight gradient. One more row is the bias gradient."""
        (inputs, outputs), n = dense_shape(group), setting.summed_samples
        return cls.gemm_config(
            group, setting, Phase.BACKWARD_WEIGHT, inputs + 1, outputs, n, split=True
        )

    @classmethod
    def wgrad_split(cls, group: Group, setting: Setting) -> SplitK:
        return cls.wgrad_config(group, setting).split_k

    @classmethod
    def backward_input_config(cls, group: Group, setting: Setting) -> GemmConfig:
        """Return the configuration of the backward-input product."""
        inputs, outputs = dense_shape(group)
        n = setting.kernel_samples
        return cls.gemm_config(group, setting, Phase.BACKWARD_INPUT, n, inputs, outputs)

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        n, outputs = setting.batch_size, group.head.output_shape[0]
        buffers: dict[str, BufferSpec] = {}
        parts = cls.forward_config(group, setting).split_k.count
        if parts > 1:
            buffers["forward_partial"] = BufferSpec((parts, n * outputs), "float32")
        phases = {Phase.FORWARD: Access(("x",), ("y", *buffers))}
        if not setting.training:
            return GroupNeeds(phases, buffers)
        cls.add_partial_buffer(group, setting, buffers)
        partial = ("partial",) if "partial" in buffers else ()
        dz = ("dy", "y") if ReLU in group.kinds else ("dy",)
        phases[Phase.BACKWARD_WEIGHT] = Access(("x", *dz), partial)
        if group.gradients:
            phases[Phase.BACKWARD_INPUT] = Access(dz, ("dx",))
        return GroupNeeds(phases, buffers)

    @property
    def shape(self) -> tuple[np.int32, np.int32]:
        """Numbers of inputs and outputs."""
        inputs, outputs = dense_shape(self.group)
        return np.int32(inputs), np.int32(outputs)

    def forward(self) -> Kernel:
        return self.forward_product("dense.cu", self.forward_config(self.group, self.setting))

    def forward_product(self, file: str, config: GemmConfig) -> Kernel:
        """Return the forward stage with the kernels of a file."""
        a, (inputs, outputs), split_k = self.arrays, self.shape, config.split_k
        if split_k.count == 1:
            return self.product(
                file, "dense_forward", config, 1, int(outputs),
                (a["x"], a["weight"], a["bias"], a["y"]), (inputs, outputs),
                epilogue=self.undone_epilogue, fuses_dropout=True,
            )  # fmt: skip
        # Few samples occupy the GPU only if several blocks share each sum.
        multiply = self.product(
            file, "dense_forward_split_k", config, 1, int(outputs),
            (a["x"], a["weight"], a["forward_partial"]),
            (inputs, outputs, np.int32(split_k.terms)), epilogue=self.undone_epilogue,
        )  # fmt: skip
        reduce = self.reduce_forward(config)

        def run(context: Context) -> None:
            multiply(context)
            reduce(context)

        return run

    def reduce_forward(self, config: GemmConfig) -> Kernel:
        """Return the split-K reduction of the forward product, with the epilogue."""
        a, outputs = self.arrays, self.shape[1]
        defines = {
            **self.defines,
            "EPILOGUE": self.undone_epilogue,
            "EPILOGUE_DROPOUT": int(self.fuses_dropout),
        }
        reduce = self.device.function("dense.cu", "dense_forward_reduce", **defines)
        parts = np.int32(config.split_k.count)
        last = {training: self.dropout_arguments(training=training) for training in (False, True)}

        def run(context: Context) -> None:
            size = context.n * int(outputs)
            launch_reduction(
                reduce, size, a["forward_partial"], parts, a["bias"], a["y"], outputs,
                np.int32(size), *last[context.training],
            )  # fmt: skip

        return run

    @property
    def dz(self) -> tuple[Array, Array, np.float32]:
        """The arrays and the factor from which kernels compute dz, the gradient before ReLU."""
        return self.arrays["dy"], self.arrays["y"], self.dropout_factor

    def backward_weight(self) -> Kernel:
        return self.dense_wgrad("dense.cu")

    def dense_wgrad(self, file: str) -> Kernel:
        """Return the stage of the weight gradient with the kernel of a file."""
        shape = self.shape

        def trailing(samples: int, part: int) -> tuple[np.int32, ...]:
            return np.int32(samples), *shape, np.int32(part)

        config, inputs = self.wgrad_config(self.group, self.setting), (self.arrays["x"], *self.dz)
        return self.wgrad_product(
            file, "dense_backward_weight", config, lambda samples: samples, inputs, trailing
        )

    def backward_input(self) -> Kernel:
        a, shape = self.arrays, self.shape
        config = self.backward_input_config(self.group, self.setting)
        return self.product(
            "dense.cu", "dense_backward_input", config, 1, int(shape[0]),
            (*self.dz, a["weight"], a["dx"]), shape, epilogue=self.undone_epilogue,
        )  # fmt: skip


class SkinnyDenseGemm(DenseGemm):
    """Dense layers with few samples and many weights, whose time is that of reading the weights.

    In fp32, the weight gradient has too few terms for 3xTF32, so the general kernel computes it.
    """

    FILE = "skinny_gemm.cu"

    @classmethod
    def forward_config(cls, group: Group, setting: Setting) -> GemmConfig:
        inputs, outputs = dense_shape(group)
        product = setting.precision, setting.kernel_samples, inputs, outputs, limits_of(setting)
        ranked = skinny_gemm.rank_forward_configs(*product)
        return pick_config(ranked, group, setting, Phase.FORWARD)

    @classmethod
    def wgrad_config(cls, group: Group, setting: Setting) -> GemmConfig:
        if setting.precision not in ELEMENT_BYTES:
            return super().wgrad_config(group, setting)
        outputs = group.head.output_shape[0]
        return skinny_gemm.wgrad_config(setting.precision, setting.summed_samples, outputs)

    @classmethod
    def backward_input_config(cls, group: Group, setting: Setting) -> GemmConfig:
        inputs, outputs = dense_shape(group)
        tile = skinny_gemm.select_backward_input_tile(
            setting.precision, setting.kernel_samples, inputs, outputs, limits_of(setting)
        )
        if tile is None:
            return super().backward_input_config(group, setting)
        return GemmConfig(tile, SplitK(1, tile.terms))

    def forward(self) -> Kernel:
        return self.forward_product(self.FILE, self.forward_config(self.group, self.setting))

    def backward_weight(self) -> Kernel:
        if self.setting.precision not in ELEMENT_BYTES:
            return super().backward_weight()
        return self.dense_wgrad("skinny_gemm_backward_weight.cu")

    def backward_input(self) -> Kernel:
        a, inputs = self.arrays, self.shape[0]
        config = self.backward_input_config(self.group, self.setting)
        if not isinstance(config.tile, skinny_gemm.SkinnyTile):
            return super().backward_input()
        return self.product(
            self.FILE, "dense_backward_input", config, 1,
            int(inputs), (*self.dz, a["weight"], a["dx"]), self.shape,
            epilogue=self.undone_epilogue,
        )  # fmt: skip


def pick_config(
    ranked: Iterable[tuple[float, GemmConfig]], group: Group, setting: Setting, phase: Phase
) -> GemmConfig:
    """Return the configuration with the lowest estimate, or the one that was measured."""
    candidates = measured_first(ranked, label(group, setting, phase), limits_of(setting))
    (_, best), *_ = candidates
    return setting.selection.pick(group.stage(phase), best, lambda: candidates)


def label(group: Group, setting: Setting, phase: Phase) -> str:
    """Return all that the time of a product depends on, except for the GPU."""
    inputs, outputs = dense_shape(group)
    epilogue = " ".join(layer.__name__ for layer in group.kinds[1:])
    sums = phase is Phase.BACKWARD_WEIGHT
    samples = setting.summed_samples if sums else setting.kernel_samples
    product = phase.value, setting.precision, samples, inputs, outputs, epilogue
    return " ".join(map(str, product)).strip()


def reason(group: Group, setting: Setting, phase: Phase, config: GemmConfig) -> str:
    """Return why a configuration was selected."""
    if setting.selection.named(group.stage(phase)) == str(config):
        return setting.selection.reason
    known = measured_name(label(group, setting, phase), limits_of(setting))
    return MEASURED if known == str(config) else "lowest estimated time"


def dense_shape(group: Group) -> tuple[int, int]:
    """Return the numbers of inputs and outputs."""
    return math.prod(group.head.input_shape), group.head.output_shape[0]
