"""Descriptions of layers that normalise maps by means and variances.

Each computes y = weight · (x − mean) / sqrt(variance + epsilon) + bias with a weight and a bias per
channel. They differ in the elements over which mean and variance are taken. The variance is the
mean square of the distances from the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from dptrain.errors import UserError
from dptrain.network.initializers import Constant
from dptrain.network.layers import Flops, Layer, Parameter, Shape, Statistic, check_size, maps_of


@dataclass(frozen=True, kw_only=True)
class Normalization(Layer):
    """What the normalisations share.

    Attributes:
        epsilon: is added to the variance, above 0.
        weight_init, bias_init: initial weights and biases of the channels.
    """

    epsilon: float = 1e-5
    weight_init: Constant = Constant(1.0)
    bias_init: Constant = Constant(0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.epsilon < math.inf:
            raise UserError(
                f"{self.kind} epsilon is {self.epsilon}; expected a finite number above 0"
            )

    def output_shape(self, input_shape: Shape) -> Shape:
        return maps_of(self.kind, input_shape)

    def parameters(self, input_shape: Shape) -> tuple[Parameter, ...]:
        channels = (input_shape[0],)
        return (
            Parameter("weight", channels, 1, self.weight_init),
            Parameter("bias", channels, 1, self.bias_init),
        )

    def flops(self, input_shape: Shape) -> Flops:
        # Forward: sum, squared distance and its sum (4), then difference, two products and a sum.
        # Backward: two sums of products (4), then the gradient of the input.
        size = math.prod(input_shape)
        return Flops(8 * size, 6 * size, 4 * size)


@dataclass(frozen=True, kw_only=True)
class BatchNorm2d(Normalization):
    """Normalisation of each channel over the samples of the minibatch and their pixels.

    In training, mean and variance are those of the global minibatch: the ranks add their sums. The
    setting ``batch_norm`` selects those of each rank instead. Each step moves the running mean and
    the running variance towards those of its minibatch, by ``momentum`` of the distance; the
    variance of m elements counts m / (m − 1) times there. Inference and evaluation use the running
    values.

    Source: Ioffe and Szegedy, "Batch normalization: accelerating deep network training by reducing
    internal covariate shift", 2015, algorithms 1 and 2.

    Attributes:
        momentum: of the running mean and variance, above 0 and at most 1.
    """

    kind: ClassVar[str] = "batchnorm"

    momentum: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.momentum <= 1.0:
            raise UserError(f"batchnorm momentum is {self.momentum}; expected 0 < momentum ≤ 1")

    def statistics(self, input_shape: Shape) -> tuple[Statistic, ...]:
        channels = (input_shape[0],)
        return Statistic("running_mean", channels, 0.0), Statistic("running_var", channels, 1.0)


@dataclass(frozen=True, kw_only=True)
class FrozenBatchNorm2d(Normalization):
    """`BatchNorm2d` by its running values also in training, which do not change.

    Plans compute a batch normalisation so whose weight and bias are frozen; networks have none.
    """

    kind: ClassVar[str] = "frozen batchnorm"

    def statistics(self, input_shape: Shape) -> tuple[Statistic, ...]:
        return BatchNorm2d().statistics(input_shape)

    def flops(self, input_shape: Shape) -> Flops:
        # Difference, product and sum; backward one product.
        size = math.prod(input_shape)
        return Flops(3 * size, size)


@dataclass(frozen=True)
class GroupNorm(Normalization):
    """Normalisation of each sample over groups of channels and all pixels.

    Source: Wu and He, "Group normalization", 2018.

    Attributes:
        groups: number of groups of equal size; a divisor of the number of channels.
    """

    kind: ClassVar[str] = "groupnorm"

    groups: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(self.groups, "groupnorm groups")

    def output_shape(self, input_shape: Shape) -> Shape:
        shape = super().output_shape(input_shape)
        if shape[0] % self.groups:
            raise UserError(
                f"groupnorm has {self.groups} groups, but its input has {shape[0]} channels; "
                "expected a divisor of the number of channels"
            )
        return shape


@dataclass(frozen=True)
class LayerNorm(Normalization):
    """Normalisation of each pixel over its channels, or of a vector over its elements.

    A vector that is a flattened map has one pixel, or is refused.

    Source: Ba, Kiros and Hinton, "Layer normalization", 2016; over the channels of maps as in Liu
    et al., "A ConvNet for the 2020s", 2022.
    """

    kind: ClassVar[str] = "layernorm"

    def output_shape(self, input_shape: Shape) -> Shape:
        return input_shape if len(input_shape) == 1 else super().output_shape(input_shape)

    def check_vector(self, maps: Shape) -> None:
        if maps[1:] != (1, 1):
            raise UserError(
                f"layernorm has a vector of {maps[1]}×{maps[2]} pixels; put it before the flatten"
            )
