"""Descriptions of loss functions. Each is a mean over the samples of the global minibatch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from dptrain.arguments import NamedArguments
from dptrain.errors import UserError
from dptrain.network.layers import Shape

TargetKind = Literal["classes", "binary", "values"]


class Loss(metaclass=NamedArguments):
    """A loss function of the network's output and of targets.

    Attributes:
        kind: name in TOML files.
        targets: form of the targets of a sample: ``classes``, an index in [0, F); ``binary``, F
            numbers 0 or 1; ``values``, F real numbers.
    """

    kind: ClassVar[str]
    targets: ClassVar[TargetKind]

    def check(self, output_shape: Shape) -> None:
        """Raise a `UserError` unless the loss accepts outputs of shape `output_shape`."""
        if len(output_shape) != 1:
            raise UserError(
                f"the network ends in maps of shape {output_shape}, but {self.kind} needs a "
                "vector; end with flatten or dense"
            )

    @abstractmethod
    def flops(self, output_shape: Shape) -> int:
        """Return the number of operations for one sample, with the gradient."""


@dataclass(frozen=True)
class SoftmaxCrossEntropy(Loss):
    """−log softmax(z)[label], a mean over samples; dz = (softmax(z) − onehot) / N."""

    kind: ClassVar[str] = "softmax_cross_entropy"
    targets: ClassVar[TargetKind] = "classes"

    def check(self, output_shape: Shape) -> None:
        super().check(output_shape)
        if output_shape[0] < 2:
            raise UserError("softmax needs at least 2 outputs; use sigmoid_cross_entropy for one")

    def flops(self, output_shape: Shape) -> int:
        return 6 * output_shape[0]


@dataclass(frozen=True)
class SigmoidBinaryCrossEntropy(Loss):
    """Mean over samples and outputs of −y log σ(z) − (1 − y) log(1 − σ(z)).

    dz = (σ(z) − y) / (N F).

    The network ends in z: the sigmoid is part of the loss.
    """

    kind: ClassVar[str] = "sigmoid_cross_entropy"
    targets: ClassVar[TargetKind] = "binary"

    def flops(self, output_shape: Shape) -> int:
        return 8 * output_shape[0]


@dataclass(frozen=True)
class MeanSquaredError(Loss):
    """Mean over samples and outputs of (z − y)²; dz = 2 (z − y) / (N F)."""

    kind: ClassVar[str] = "mean_squared_error"
    targets: ClassVar[TargetKind] = "values"

    def flops(self, output_shape: Shape) -> int:
        return 4 * output_shape[0]


LOSSES: dict[str, type[Loss]] = {
    loss.kind: loss for loss in (SoftmaxCrossEntropy, SigmoidBinaryCrossEntropy, MeanSquaredError)
}
"""Classes of losses by their names in TOML files."""
