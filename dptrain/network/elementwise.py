"""Layers that compute a function of each element, described by an expression.

The expression of such a function is all that backends and exporters know of it: they evaluate it or
write code from it, and its derivative follows from it. The functions of dptrain are in
`dptrain.network.activations`; `dptrain.network.own_functions.activation` defines others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from dptrain.errors import UserError
from dptrain.network import expressions
from dptrain.network.derivatives import derivative, times
from dptrain.network.expressions import Expression, constant, parse, variable
from dptrain.network.layers import Elementwise, Flops, Shape

X, Y, DY = variable("x"), variable("y"), variable("dy")


@dataclass(frozen=True)
class Function:
    """A function y = f(x) of one number, and of parameters.

    Attributes:
        expression: f, see `dptrain.network.expressions`.
        derivative: dy/dx in terms of x or of y; "" derives it from the expression. In terms of y,
            the backward pass reads the output of the layer, which the next layer keeps anyway.
        onnx: the operator of ONNX that computes f, with its attributes or further inputs, such as
            ``LeakyRelu(alpha=slope)``; "" if there is none.
        torch: code of PyTorch that computes f of ``{0}``; "" writes it from the expression.
    """

    expression: str
    derivative: str = ""
    onnx: str = ""
    torch: str = ""


@dataclass(frozen=True)
class Formula:
    """A function whose parameters have values.

    Attributes:
        forward: y in terms of x and the parameters.
        slope: dy/dx in terms of either x or y, and the parameters.
        values: the parameters by name.
    """

    forward: Expression
    slope: Expression
    values: Mapping[str, float]

    @property
    def reads(self) -> str:
        """``x`` or ``y``: the array that the backward pass reads in addition to dy."""
        return "x" if "x" in expressions.names(self.slope) else "y"

    def bound(self, expression: Expression) -> Expression:
        """Return an expression with the values in place of the parameters."""
        values = {variable(name): constant(value) for name, value in self.values.items()}
        return expressions.replace(expression, values)

    def output(self) -> Expression:
        """Return y in terms of x alone."""
        return self.bound(self.forward)

    def gradient(self, *, first: bool) -> Expression:
        """Return dx in terms of dy, and of x or y; see `dptrain.network.derivatives.times`."""
        return times(DY, self.bound(self.slope), first=first)


class Activation(Elementwise):
    """A function of each element. Subclasses state it; their fields are its parameters.

    Class attributes:
        function: the function.
        is_own: True if a program or a network file defined it, so that files contain it.
    """

    function: ClassVar[Function]
    is_own: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in parameters_of(self).items():
            if not math.isfinite(value):
                raise UserError(f"{self.kind} {name} is {value}; expected a finite number")

    @property
    def formula(self) -> Formula:
        """The function as expressions."""
        forward, slope = expressions_of(type(self))
        return Formula(forward, slope, parameters_of(self))

    def flops(self, input_shape: Shape) -> Flops:
        forward, slope = expressions_of(type(self))
        count = math.prod(input_shape)
        gradient = times(DY, slope, first=True)
        return Flops(expressions.flops(forward) * count, expressions.flops(gradient) * count)


def parameters_of(layer: Activation) -> dict[str, float]:
    """Return the parameters of a layer by name."""
    return {field.name: float(getattr(layer, field.name)) for field in fields(layer)}  # type: ignore[arg-type]


@functools.cache
def expressions_of(cls: type[Any]) -> tuple[Expression, Expression]:
    """Return y and dy/dx of a class of layers in terms of x, or dy/dx of y, and its parameters."""
    function, parameters = cls.function, [field.name for field in fields(cls)]
    forward = parse(function.expression, ["x", *parameters])
    if function.derivative:
        slope = parse(function.derivative, ["x", "y", *parameters])
    else:
        slope = derivative(forward)
    in_y = expressions.replace(slope, {forward: Y})
    if "x" in expressions.names(in_y):
        # The backward pass reads one array only.
        in_y = expressions.replace(slope, {Y: forward})
    expressions.require_size(in_y, "the derivative")
    return forward, in_y
