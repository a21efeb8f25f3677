"""A convolution bound to arrays: what the kernels of all algorithms have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dptrain.backends.cuda.convolution.halo.halo_tiles import InputView
from dptrain.backends.cuda.dense.gemm_tiles import GemmConfig
from dptrain.backends.cuda.device.device import Array
from dptrain.backends.cuda.device.hardware import limits_of, limits_of_sums
from dptrain.backends.cuda.geometry import geometry, geometry_defines
from dptrain.backends.cuda.normalization.batch_norm import (
    FROM_X,
    FROM_Y,
    NO_ACTIVATION,
    activation_source,
)
from dptrain.backends.cuda.weighted import (
    NO_EPILOGUE,
    RELU_POOL,
    WeightedOperation,
    computed_pixels,
    fused_epilogue,
    pools_in_kernel,
    separate_epilogue,
)
from dptrain.backends.replica import Kernel
from dptrain.network.layers import Conv2d
from dptrain.plan.limits import DeviceLimits
from dptrain.plan.lowering import BufferSpec, Group, Phase, Setting

ADDED, STRIDED, STRIDED_WEIGHT = 1.15, 1.4, 1.3
"""Factors of the estimated time of halo tiles: of input gradients that are added to what is stored,
of those with strides, and of weight gradients with strides. In ResNet-18 (32×32) on an H200, these
took 1.2 times (the median of 16 products), 1.5 times (12) and 1.4 times (24) as long as
estimated."""

SUMMED_BYTES_PER_US = {NO_ACTIVATION: 6e6, FROM_X: 6e6, FROM_Y: 1.3e6}
"""Bytes of an input gradient for which a µs is saved if it is summed where it is computed, by
``ACTIVATION_FROM``. A kernel of its own reads the gradient once more; if it reads y, it also writes
it. From products of ResNet-18 (32×32, 1,024 samples, tf32) with 67 MB of gradients (H200)."""


@dataclass(frozen=True)
class Case:
    """A product of a convolution, for which an algorithm is selected.

    Attributes:
        group, setting: the layers and the settings of the plan.
        phase: the product.
        stores_dz: whether a stage of its own writes the gradient before ReLU and epilogue to
            ``dmaps``, which the backward products then read.
    """

    group: Group
    setting: Setting
    phase: Phase
    stores_dz: bool = False

    @property
    def layer(self) -> Conv2d:
        """The convolution."""
        return self.group.head.layer_of(Conv2d)

    @property
    def view(self) -> InputView:
        """The view of x that produces the output."""
        return InputView.forward(self.group.head)

    @property
    def strides(self) -> tuple[int, int]:
        """Strides."""
        return self.layer.strides

    @property
    def is_dilated(self) -> bool:
        """Whether the kernel has a dilation, with which only gathering kernels read the input."""
        return self.layer.dilations != (1, 1)

    @property
    def limits(self) -> DeviceLimits:
        """Limits of the GPU, or of the share of it that the sum of a micro-shard has."""
        sums = self.phase is Phase.BACKWARD_WEIGHT
        return limits_of_sums(self.setting) if sums else limits_of(self.setting)

    @property
    def precision(self) -> str:
        """Precision of the products."""
        return self.setting.precision

    @property
    def samples(self) -> int:
        """Number of samples for which the algorithm is selected."""
        sums = self.phase is Phase.BACKWARD_WEIGHT
        return self.setting.summed_samples if sums else self.setting.kernel_samples

    @property
    def pools(self) -> bool:
        """Whether the forward kernel pools."""
        return pools_in_kernel(self.group)

    @property
    def epilogue(self) -> int:
        """The epilogue that the kernel applies (forward) or undoes (backward)."""
        return NO_EPILOGUE if self.stores_dz else fused_epilogue(self.group)

    def corrected_us(self, time: float) -> float:
        """Return the µs of halo tiles, by what was measured in networks.

        Args:
            time: estimated from products of other layers.
        """
        if self.phase is Phase.FORWARD:
            return time
        strided, adds = self.strides != (1, 1), "dx" in self.group.adds
        if self.phase is Phase.BACKWARD_WEIGHT:
            return time * (STRIDED_WEIGHT if strided else 1.0)
        return time * (ADDED if adds else 1.0) * (STRIDED if strided else 1.0)

    @property
    def summing_us(self) -> float:
        """The µs that are saved if the input gradient is summed where it is computed."""
        if self.phase is not Phase.BACKWARD_INPUT or self.group.normalization is None:
            return 0.0
        size = self.samples * math.prod(self.group.head.input_shape)
        nbytes = size * np.dtype(self.setting.activations).itemsize
        return nbytes / SUMMED_BYTES_PER_US[activation_source(self.group.normalization)]

    @property
    def gradient_pixels(self) -> int:
        """Terms of the weight gradient's sum per sample."""
        if self.stores_dz:
            return math.prod(self.group.head.output_maps[1:])
        return computed_pixels(self.group)

    @property
    def label(self) -> str:
        """All that the time of a product depends on, except for the GPU.

        Whether a forward product is summed follows from its algorithm, and is not part of it.
        """
        head, group = self.group.head, self.group
        backward = self.phase is Phase.BACKWARD_INPUT
        sums = backward and group.normalization is not None
        undone = activation_source(group.normalization) if group.normalization else NO_ACTIVATION
        facts = {
            "bias": self.layer.bias, "stored": self.stores_dz, "pooled": self.pools,
            "dilated-{}x{}".format(*self.layer.dilations): self.is_dilated,
            f"epilogue-{self.epilogue}": self.epilogue != NO_EPILOGUE,
            "added": backward and "dx" in group.adds,
            f"summed-{undone}": sums,
        }  # fmt: skip
        sizes = head.input_maps, head.output_maps, self.layer.window, self.strides
        shapes = ("x".join(map(str, size)) for size in sizes)
        known = (name for name, is_true in facts.items() if is_true)
        return " ".join((self.phase.value, self.precision, str(self.samples), *shapes, *known))


@dataclass(frozen=True)
class Extra:
    """The buffers of an algorithm in addition to those of every convolution.

    Attributes:
        prepared: operands that the forward stage writes, and the phase reads.
        written: buffers that the phase writes.
        reads: further buffers that the phase reads.
    """

    prepared: Mapping[str, BufferSpec] = field(default_factory=dict)
    written: Mapping[str, BufferSpec] = field(default_factory=dict)
    reads: tuple[str, ...] = ()


class BoundConvolution(WeightedOperation[Conv2d]):
    """The arrays and arguments of the kernels of a convolution."""

    @property
    def reads_dmaps(self) -> bool:
        """True if backward kernels read the gradient before ReLU and epilogue from `dmaps`."""
        raise NotImplementedError

    @property
    def gradient_pixels(self) -> int:
        """Terms of the weight gradient's sum per sample."""
        stores = self.reads_dmaps
        return Case(self.group, self.setting, Phase.BACKWARD_WEIGHT, stores).gradient_pixels

    @property
    def undone_epilogue(self) -> int:
        return NO_EPILOGUE if self.reads_dmaps else fused_epilogue(self.group)

    @property
    def geometry(self) -> list[np.int32]:
        """Kernel arguments that describe the layer."""
        return geometry(self.group.head, self.layer, self.layer.window)

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

    @property
    def outputs(self) -> tuple[Array, Array]:
        """Arrays that the forward product writes: y, or `maps` for an epilogue, and argmax."""
        a = self.arrays
        y = a["maps"] if separate_epilogue(self.group) else a["y"]
        return y, a["argmax"] if pools_in_kernel(self.group) else y

    @property
    def output_sums(self) -> list[Array]:
        """Last arguments of a forward kernel that also sums its result, which receive the sums."""
        return [self.arrays["sums"]] if self.group.sums else []

    def forward_product(self, name: str, config: GemmConfig, rows: int) -> Kernel:
        """Return the stage of a forward product that reads x and the weights as they are stored.

        Args:
            name: of the kernel, and of its file.
            config: tile configuration.
            rows: of the result, per sample.
        """
        a = self.arrays
        return self.product(
            f"{name}.cu", name, config, rows, self.group.head.output_shape[0],
            (a["x"], a["weight"], a["bias"], *self.outputs), self.geometry,
            epilogue=fused_epilogue(self.group), fuses_dropout=True,
        )  # fmt: skip

    def gradient_product(
        self, name: str, config: GemmConfig, terms: Callable[[int], int]
    ) -> Kernel:
        """Return the stage of a weight gradient that reads x and dz as they are stored.

        Args:
            name: of the kernel, and of its file.
            config: tile configuration and split-K.
            terms: function from the number of samples to the terms of the sum.
        """
        inputs = self.arrays["x"], *self.dz
        return self.wgrad_product(f"{name}.cu", name, config, terms, inputs, self.trailing)

    def trailing(self, samples: int, part: int) -> tuple[np.int32, ...]:
        """Return the last arguments of a kernel of the weight gradient.

        Args:
            samples: their number.
            part: terms of a split-K part.
        """
        return np.int32(samples), np.int32(part), *self.geometry
