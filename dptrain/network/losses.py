"""Descriptions of loss functions. Each is a mean over the samples of the global minibatch."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from dptrain.arguments import NamedArguments
from dptrain.errors import UserError
from dptrain.network import expressions
from dptrain.network.derivatives import derivative
from dptrain.network.expressions import Expression, constant, parse, variable
from dptrain.network.field_types import check_field_types
from dptrain.network.layers import Shape

TargetKind = Literal["classes", "binary", "values"]


class Loss(metaclass=NamedArguments):
    """A loss function of the network's output and of targets.

    Attributes:
        kind: name in TOML files.
        targets: form of the targets of a sample: ``classes``, an index in [0, F); ``binary``, F
            numbers 0 or 1; ``values``, F real numbers.
        smooths_labels: True if the loss has label smoothing.
    """

    kind: ClassVar[str]
    targets: ClassVar[TargetKind]
    smooths_labels: ClassVar[bool] = False

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


class ClassLoss(Loss):
    """A loss of the probabilities softmax(z) of classes."""

    targets: ClassVar[TargetKind] = "classes"

    def check(self, output_shape: Shape) -> None:
        super().check(output_shape)
        if output_shape[0] < 2:
            raise UserError("softmax needs at least 2 outputs; use sigmoid_cross_entropy for one")


@dataclass(frozen=True)
class SoftmaxCrossEntropy(ClassLoss):
    """−log softmax(z)[label], a mean over samples; dz = (softmax(z) − onehot) / N."""

    kind: ClassVar[str] = "softmax_cross_entropy"
    smooths_labels: ClassVar[bool] = True

    def flops(self, output_shape: Shape) -> int:
        return 6 * output_shape[0]


@dataclass(frozen=True)
class SoftmaxSquaredError(ClassLoss):
    """Mean over samples and classes of (p − onehot)², where p = softmax(z).

    dz = 2 p (p − onehot − Σ p (p − onehot)) / (N F), with the sum over the classes.

    F times this loss is the Brier score.
    """

    kind: ClassVar[str] = "softmax_squared_error"

    def flops(self, output_shape: Shape) -> int:
        return 12 * output_shape[0]


@dataclass(frozen=True)
class LossFunction:
    """A function of an output z and of its target y, and of parameters.

    Attributes:
        expression: the function, see `dptrain.network.expressions`.
        derivative: its derivative by z, in terms of z and y; "" derives it from the expression.
    """

    expression: str
    derivative: str = ""


class ElementwiseLoss(Loss):
    """Mean over samples and outputs of a function of an output and of its target.

    Subclasses state the function; their fields are its parameters.

    Class attributes:
        function: the function.
        is_own: True if a program or a network file defined it, so that files contain it.
    """

    function: ClassVar[LossFunction]
    is_own: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_field_types(self, self.kind)
        for name, value in self.parameters.items():
            if not math.isfinite(value):
                raise UserError(f"{self.kind} {name} is {value}; expected a finite number")

    @property
    def parameters(self) -> dict[str, float]:
        """The parameters by name."""
        return {each.name: float(getattr(self, each.name)) for each in fields(self)}  # type: ignore[arg-type]

    @property
    def value(self) -> Expression:
        """The function in terms of z and y."""
        return self._bound(loss_expressions(type(self))[0])

    @property
    def slope(self) -> Expression:
        """The derivative by z in terms of z and y."""
        return self._bound(loss_expressions(type(self))[1])

    def _bound(self, expression: Expression) -> Expression:
        """Return an expression with the values in place of the parameters."""
        values = {variable(name): constant(value) for name, value in self.parameters.items()}
        return expressions.replace(expression, values)

    def flops(self, output_shape: Shape) -> int:
        each = sum(map(expressions.flops, loss_expressions(type(self))))
        return each * math.prod(output_shape)


@functools.cache
def loss_expressions(cls: type[Any]) -> tuple[Expression, Expression]:
    """Return the function of a class of losses, and its derivative by z."""
    names = ["z", "y", *(each.name for each in fields(cls))]
    value = parse(cls.function.expression, names)
    if not cls.function.derivative:
        slope = derivative(value, "z")
        expressions.require_size(slope, "the derivative")
        return value, slope
    return value, parse(cls.function.derivative, names)


@dataclass(frozen=True)
class SigmoidBinaryCrossEntropy(ElementwiseLoss):
    """Mean over samples and outputs of −y log σ(z) − (1 − y) log(1 − σ(z)).

    dz = (σ(z) − y) / (N F).

    The network ends in z: the sigmoid is part of the loss.
    """

    kind: ClassVar[str] = "sigmoid_cross_entropy"
    targets: ClassVar[TargetKind] = "binary"
    # log(1 + exp(−|z|)) never overflows; max(z, 0) − z y makes up the rest.
    function = LossFunction("max(z, 0) - z * y + log1p(exp(-abs(z)))", "sigmoid(z) - y")


@dataclass(frozen=True)
class MeanSquaredError(ElementwiseLoss):
    """Mean over samples and outputs of (z − y)²; dz = 2 (z − y) / (N F)."""

    kind: ClassVar[str] = "mean_squared_error"
    targets: ClassVar[TargetKind] = "values"
    function = LossFunction("(z - y) * (z - y)", "2 * (z - y)")


LOSSES: dict[str, type[Loss]] = {
    loss.kind: loss
    for loss in (
        SoftmaxCrossEntropy,
        SoftmaxSquaredError,
        SigmoidBinaryCrossEntropy,
        MeanSquaredError,
    )
}
"""Classes of losses by their names in TOML files."""
