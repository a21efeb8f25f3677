"""Functions of single elements, whose kernels are written from their expressions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from dptrain.backends.cuda.device.device import Array, Macro
from dptrain.backends.cuda.operation import SingleLayerOperation
from dptrain.backends.replica import Kernel
from dptrain.network.activations import ReLU
from dptrain.network.elementwise import Activation
from dptrain.network.expression_code import Language, without_extrema, write
from dptrain.network.expressions import NORMAL_DENSITY, SQRT_HALF, Expression
from dptrain.network.layers import Layer
from dptrain.plan.lowering import Group

FILE = "activations.cu"


def _constant(value: float) -> str:
    """Return a number as a literal of C++, with the digits that identify a float."""
    digits = str(np.float32(value))
    return f"({digits}f)" if value < 0 else f"{digits}f"


_CPP = Language(
    {
        **{each: f"({{0}} {each} {{1}})" for each in ("+", "-", "*", "/", "<", "<=", ">", ">=")},
        **{name: f"{name}f({{0}})" for name in ("exp", "expm1", "log", "log1p", "sqrt", "sin")},
        **{name: f"{name}f({{0}})" for name in ("cos", "tanh", "erf")},
        "neg": "(-{0})",
        "abs": "fabsf({0})",
        "where": "({0} ? {1} : {2})",
        # At x < −88 the exponential overflows to infinity, and the result is 0.
        "sigmoid": "(1.0f / (1.0f + expf(-{0})))",
        "softplus": "(({0} > 0.0f ? {0} : 0.0f) + log1pf(expf(-fabsf({0}))))",
        "normal_cdf": f"(0.5f + 0.5f * erff({{0}} * {SQRT_HALF!r}f))",
        "normal_pdf": f"({NORMAL_DENSITY!r}f * expf(-0.5f * {{0}} * {{0}}))",
    },
    _constant,
    "const float {0} = {1};",
)


def macros(layer: Activation) -> Mapping[str, str]:
    """Return the macros of ``activations.cu`` that make the kernels of a function."""
    formula = layer.formula
    return {
        "FORWARD": statements(formula.output()),
        "BACKWARD": statements(formula.gradient(first=False)),
        "SAVED": formula.reads,
        "FORWARD_NAME": f"{layer.kind}_forward",
        "BACKWARD_NAME": f"{layer.kind}_backward",
    }


def fused_macros(layers: Iterable[Layer]) -> dict[str, Macro]:
    """Return the macros of ``activation.cuh`` for the function among the layers of a group, if any.

    Without macros, the function is ReLU.
    """
    found = [layer for layer in layers if isinstance(layer, Activation)]
    if not found or type(found[0]) is ReLU:
        return {}
    formula = found[0].formula
    return {
        "ACTIVATION_FORWARD": statements(formula.output()),
        "ACTIVATION_BACKWARD": statements(formula.gradient(first=False)),
        "ACTIVATION_SAVED": formula.reads,
        "SAVES_OUTPUT": int(formula.reads == "y"),
    }


def statements(expression: Expression) -> str:
    """Return the statements of C++ that return an expression."""
    code = write(without_extrema(expression), _CPP)
    return " ".join([*code.statements, f"return {code.result};"])


class ActivationOperation(SingleLayerOperation[Activation]):
    """A function of each element."""

    @classmethod
    def backward_reads(cls, group: Group) -> tuple[str, ...]:
        return (group.head.layer_of(Activation).formula.reads,)

    def forward(self) -> Kernel:
        return self._stage("forward", self.arrays["x"], self.arrays["y"])

    def backward(self) -> Kernel:
        saved = self.arrays[self.layer.formula.reads]
        return self._stage("backward", self.arrays["dy"], saved, self.arrays["dx"])

    def _stage(self, direction: str, *arrays: Array) -> Kernel:
        name = f"{self.layer.kind}_{direction}"
        return self.elementwise(name, *arrays, file=FILE, **macros(self.layer))
