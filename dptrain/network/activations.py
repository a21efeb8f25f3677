"""The functions of single elements. To add one, add a class.

A class states an expression and, if they exist, a derivative in terms of the output y, the operator
of ONNX and the function of PyTorch; see `dptrain.network.elementwise.Function`. Backends, export,
import, tests and documentation follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dptrain.errors import UserError
from dptrain.network.elementwise import Activation, Function


@dataclass(frozen=True)
class ReLU(Activation):
    """max(x, 0); derivative 0 at x ≤ 0."""

    kind: ClassVar[str] = "relu"
    function = Function("where(x <= 0, 0, x)", "where(y > 0, 1, 0)", "Relu", "torch.relu({0})")


@dataclass(frozen=True)
class LeakyReLU(Activation):
    """x if x > 0, else slope · x; the derivative at 0 is the slope.

    Source: Maas et al., "Rectifier nonlinearities improve neural network acoustic models", 2013.

    Attributes:
        slope: factor of negative numbers, at least 0 and less than 1.
    """

    kind: ClassVar[str] = "leaky_relu"
    # The slope is not negative, so y has the sign of x.
    function = Function(
        "where(x > 0, x, slope * x)",
        "where(y > 0, 1, slope)",
        "LeakyRelu(alpha=slope)",
        "F.leaky_relu({0}, {slope})",
    )

    slope: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.slope < 1.0:
            raise UserError(f"leaky_relu slope is {self.slope}; expected 0 ≤ slope < 1")


@dataclass(frozen=True)
class Sigmoid(Activation):
    """σ(x) = 1 / (1 + exp(−x)); derivative σ(1 − σ)."""

    kind: ClassVar[str] = "sigmoid"
    function = Function("sigmoid(x)", "y * (1 - y)", "Sigmoid", "torch.sigmoid({0})")


@dataclass(frozen=True)
class Tanh(Activation):
    """tanh(x); derivative 1 − tanh²(x)."""

    kind: ClassVar[str] = "tanh"
    function = Function("tanh(x)", "1 - y * y", "Tanh", "torch.tanh({0})")


@dataclass(frozen=True)
class GELU(Activation):
    """x · Φ(x), with the distribution function Φ of the standard normal distribution.

    Source: Hendrycks and Gimpel, "Gaussian error linear units (GELUs)", 2016. This is the exact
    form with the error function, not its approximation with tanh.
    """

    kind: ClassVar[str] = "gelu"
    function = Function(
        "x * normal_cdf(x)", "normal_cdf(x) + x * normal_pdf(x)", "Gelu", "F.gelu({0})"
    )


@dataclass(frozen=True)
class SiLU(Activation):
    """x · σ(x), also called swish; derivative σ(x) · (1 + x · (1 − σ(x)))."""

    kind: ClassVar[str] = "silu"
    function = Function(
        "x * sigmoid(x)", "sigmoid(x) * (1 + x * (1 - sigmoid(x)))", torch="F.silu({0})"
    )


@dataclass(frozen=True)
class ReLU6(Activation):
    """min(max(x, 0), 6); derivative 0 at 0 and 6."""

    kind: ClassVar[str] = "relu6"
    function = Function(
        "clip(x, 0, 6)", "where(y > 0, where(y < 6, 1, 0), 0)", "Clip(0, 6)", "F.relu6({0})"
    )


@dataclass(frozen=True)
class Clip(Activation):
    """min(max(x, low), high), also called hard tanh; derivative 0 at `low` and `high`.

    The derivative is one in terms of x, because an output that is rounded, such as to bfloat16, may
    be below a bound that it has reached.

    Attributes:
        low, high: bounds of the output.
    """

    kind: ClassVar[str] = "clip"
    function = Function(
        "clip(x, low, high)",
        "where(x > low, where(x < high, 1, 0), 0)",
        "Clip(low, high)",
        "torch.clamp({0}, {low}, {high})",
    )

    low: float = -1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < self.high:
            raise UserError(f"clip low is {self.low}; expected less than high, {self.high}")


@dataclass(frozen=True)
class HardSigmoid(Activation):
    """clip(x + 3, 0, 6) / 6. Source: Howard et al., "Searching for MobileNetV3", 2019."""

    kind: ClassVar[str] = "hardsigmoid"
    # The derivative of F.hardsigmoid is rounded to float32 in float64, too.
    function = Function(
        "clip(x + 3, 0, 6) / 6", "", "HardSigmoid(alpha=1 / 6, beta=0.5)", "F.relu6({0} + 3) / 6"
    )


@dataclass(frozen=True)
class HardSwish(Activation):
    """x · clip(x + 3, 0, 6) / 6. Source: Howard et al., "Searching for MobileNetV3", 2019."""

    kind: ClassVar[str] = "hardswish"
    function = Function("x * clip(x + 3, 0, 6) / 6", "", "HardSwish", "F.hardswish({0})")


@dataclass(frozen=True)
class Affine(Activation):
    """scale · x + shift, with numbers that are not trained.

    Attributes:
        scale: factor of all elements.
        shift: summand of all elements.
    """

    kind: ClassVar[str] = "affine"
    function = Function("scale * x + shift", "scale", "", "{scale} * {0} + {shift}")

    scale: float = 1.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("scale", self.scale), ("shift", self.shift)):
            if not math.isfinite(value):
                raise UserError(f"affine {name} is {value}; expected a finite number")


@dataclass(frozen=True)
class ELU(Activation):
    """x if x > 0, else alpha · (exp(x) − 1).

    Source: Clevert et al., "Fast and accurate deep network learning by exponential linear units
    (ELUs)", 2016.

    Attributes:
        alpha: minus the limit for small x, more than 0.
    """

    kind: ClassVar[str] = "elu"
    function = Function(
        "where(x > 0, x, alpha * expm1(x))",
        "where(y > 0, 1, y + alpha)",
        "Elu(alpha=alpha)",
        "F.elu({0}, {alpha})",
    )

    alpha: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha <= 0.0:
            raise UserError(f"elu alpha is {self.alpha}; expected a number above 0")


@dataclass(frozen=True)
class Softplus(Activation):
    """log(1 + exp(x)); derivative σ(x)."""

    kind: ClassVar[str] = "softplus"
    function = Function("softplus(x)", "sigmoid(x)", "Softplus", "F.softplus({0})")


@dataclass(frozen=True)
class Mish(Activation):
    """x · tanh(softplus(x)). Source: Misra, "Mish: a self regularized activation", 2020."""

    kind: ClassVar[str] = "mish"
    function = Function("x * tanh(softplus(x))", "", "Mish", "F.mish({0})")


@dataclass(frozen=True)
class Square(Activation):
    """x²; derivative 2x."""

    kind: ClassVar[str] = "square"
    function = Function("x * x", "2 * x", torch="torch.square({0})")


@dataclass(frozen=True)
class Abs(Activation):
    """|x|; derivative 0 at 0."""

    kind: ClassVar[str] = "abs"
    function = Function("abs(x)", "", "Abs", "torch.abs({0})")


ACTIVATIONS: Mapping[str, type[Activation]] = {
    layer.kind: layer for layer in Activation.__subclasses__()
}
"""The classes of this module by kind."""
