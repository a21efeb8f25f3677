"""Layers that compute a function of each element, described by an expression.

The expression of such a function is all that backends and exporters know of it: they evaluate it or
write code from it, and its derivative follows from it. The functions of dptrain are in
`dptrain.network.activations`; `activation` defines others.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dptrain.errors import UserError, shown
from dptrain.network import expressions
from dptrain.network.derivatives import derivative, times
from dptrain.network.expressions import Expression, constant, evaluate, parse, variable
from dptrain.network.layers import Elementwise, Flops, Layer, Shape

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
        is_own: True if `activation` or a network file defined it, so that files contain it.
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
    expressions.require_size(sum(1 for _ in expressions.nodes(in_y)), "the derivative")
    return forward, in_y


# Checks.

STEP = 1e-5
"""Step of the central differences. Their error is STEP² times a third derivative, and 1e-11 times
the value by rounding."""

TOLERANCE = 1e-6


def check_points() -> NDArray[np.float64]:
    """Return numbers of all magnitudes at which derivatives are compared; none is a simple one."""
    small = np.geomspace(1.7e-4, 97.3, 60)
    dense = np.linspace(-8.13, 8.37, 331)
    return np.concatenate([-small, small, dense])


def check_derivative(formula: Formula, kind: str) -> None:
    """Compare the derivative with central differences of the function, in float64.

    Points at which the function has a kink, or is not finite, do not count.

    Raises:
        UserError: the derivative is another one, or the function has few finite values, or it is
            NaN in float32 at a number for which it has a value.
    """
    x = check_points()
    before, y, after = (_output(formula, x + step) for step in (-STEP, 0.0, STEP))
    counts = np.isfinite(before) & np.isfinite(y) & np.isfinite(after)
    if counts.sum() < 0.25 * len(x):
        raise UserError(f"{kind} is finite for {counts.sum()} of {len(x)} numbers; expected most")
    left, right = (y - before) / STEP, (after - y) / STEP
    scale = 1.0 + np.abs(left) + np.abs(right) + 1e-4 * np.abs(y)
    is_smooth = counts & (np.abs(right - left) <= 1e-3 * scale)
    slope = np.broadcast_to(evaluate(formula.slope, {"x": x, "y": y, **formula.values}), x.shape)
    difference = (after - before) / (2.0 * STEP)
    with np.errstate(invalid="ignore"):
        is_wrong = is_smooth & ~(np.abs(slope - difference) <= TOLERANCE * scale)
    if is_wrong.any():
        at = np.flatnonzero(is_wrong)[0]
        raise UserError(
            f"the derivative of {kind} is {slope[at]:.6g} at x = {x[at]:.6g}; finite differences "
            f"of {kind} are {difference[at]:.6g}"
        )
    _check_single_precision(formula, kind)


def _output(formula: Formula, x: NDArray[Any]) -> NDArray[Any]:
    y = evaluate(formula.forward, {"x": x, **formula.values})
    return np.broadcast_to(np.asarray(y, x.dtype), x.shape)


def _check_single_precision(formula: Formula, kind: str) -> None:
    """Refuse forms that overflow to NaN in float32, such as exp(x) / (1 + exp(x))."""
    x = np.array([-1e4, -104.0, -30.0, -1.0, 0.0, 1.0, 30.0, 104.0, 1e4])
    wide = {"x": x, "y": _output(formula, x), **formula.values}
    single = {key: np.asarray(value, np.float32) for key, value in wide.items()}
    for tree, what in ((formula.forward, kind), (formula.slope, f"the derivative of {kind}")):
        expected = np.broadcast_to(evaluate(tree, wide), x.shape)
        found = np.broadcast_to(evaluate(tree, single), x.shape)
        is_lost = np.isfinite(expected) & np.isnan(found)
        if is_lost.any():
            at = np.flatnonzero(is_lost)[0]
            raise UserError(
                f"{what} overflows to NaN in float32 at x = {x[at]:g}, where it is "
                f"{expected[at]:.6g}; use sigmoid, softplus, tanh or expm1, which do not overflow"
            )


# Functions of users.

OWN: dict[str, type[Activation]] = {}
"""The classes that `activation` has returned last, by name."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def activation(
    name: str,
    function: str | Callable[..., Any],
    derivative: str | Callable[..., Any] = "",
    **parameters: float,
) -> type[Any]:
    """Define a function of single elements, and return the class of its layers.

    Every backend computes it as it computes those of dptrain, and it is exported to ONNX and
    PyTorch. Files of networks, checkpoints and models contain the expression, so that reading them
    needs no script.

    Args:
        name: name of the layers in files, such as ``swish``: small letters, digits and ``_``.
        function: an expression of ``x`` and the parameters, as text or as a function of Python that
            is called once, with a variable; see `dptrain.network.expressions`.
        derivative: dy/dx in terms of ``x``, or of ``y``, the output of the layer, which the next
            layer keeps in any case; "" derives it from the function.
        parameters: default values of the parameters. Those of a Python function are its default
            values.

    Returns:
        A class of layers, whose fields are the parameters.

    Raises:
        UserError: the name is that of a layer of dptrain, the function has no expression, or the
            derivative differs from finite differences.

    Examples:
        >>> Swish = activation("swish", "x * sigmoid(beta * x)", beta=1.0)
        >>> Swish(beta=1.5)
        Swish(beta=1.5)
        >>> activation("cube", lambda x, scale=0.1: scale * x**3)()
        Cube(scale=0.1)
        >>> activation("wrong", "x * x", derivative="x")
        Traceback (most recent call last):
        dptrain.UserError: the derivative of wrong is -0.00017 at x = -0.00017; finite differences \
of wrong are -0.00034
    """
    if name in _kinds(Layer):
        raise UserError(f"a layer of dptrain is called {name}; choose another name")
    found = _defaults(function) | parameters
    names = [*found]
    expression = _traced(function, ["x", *names], found)
    slope = _traced(derivative, ["x", "y", *names], found) if derivative else ""
    OWN[str(name)] = cls = define(name, expression, slope, tuple(found.items()))
    return cls


def _kinds(cls: type[Any]) -> Iterator[str]:
    """Yield the kinds of the layers of dptrain."""
    for each in cls.__subclasses__():
        if not getattr(each, "is_own", False):
            yield getattr(each, "kind", "")
            yield from _kinds(each)


def _defaults(function: str | Callable[..., Any]) -> dict[str, float]:
    """Return the default values of the parameters of a function after the first."""
    if not callable(function):
        return {}
    rest = [*inspect.signature(function).parameters.values()][1:]
    for each in rest:
        if each.default is each.empty:
            raise UserError(
                f"parameter {each.name} has no default value; write {each.name}=1.0 in its place"
            )
    return {each.name: each.default for each in rest}


def _traced(
    function: str | Callable[..., Any], names: Sequence[str], parameters: Mapping[str, float]
) -> str:
    """Return the text of an expression or of a function of Python."""
    if not callable(function):
        return function
    first, *rest = inspect.signature(function).parameters
    known = {each: variable(each) for each in (*rest, "y" if first == "y" else "x")}
    result = function(known["y" if first == "y" else "x"], **{each: known[each] for each in rest})
    if isinstance(result, int | float):
        result = constant(float(result))
    if not isinstance(result, Expression):
        raise UserError(
            f"the function returns {shown(type(result).__name__)}; expected an expression of x"
        )
    return str(result)


@functools.cache
def define(
    name: str,
    expression: str,
    derivative: str = "",
    parameters: tuple[tuple[str, float], ...] = (),
) -> type[Activation]:
    """Return the class of a function; it is the same one for equal arguments.

    Raises:
        UserError: as for `activation`.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"the function is called {shown(repr(name))}; expected small letters, digits and _, "
            "such as swish"
        )
    for key, value in parameters:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and _NAME.fullmatch(key) and not keyword.iskeyword(key)):
            raise UserError(
                f"parameter {shown(key)} of {name} is {shown(repr(value))}; expected a name of "
                "small letters and a number"
            )
        if key in ("x", "y", "dy", "kind", "function", "formula", "name", "inputs", "type"):
            raise UserError(f"a parameter of {name} is called {key}; choose another name")
    own = {
        "kind": name,
        "function": Function(expression, derivative),
        "is_own": True,
        "__post_init__": _check_own,
        "__doc__": f"y = {expression}.",
    }
    listed = [(key, float, field(default=float(value))) for key, value in parameters]
    title = "".join(part.capitalize() for part in name.split("_")) or name
    cls = make_dataclass(title, listed, bases=(Activation,), namespace=own, frozen=True)
    cls.__module__ = __name__
    cls()
    return cls


def _check_own(layer: Activation) -> None:
    """Check the parameters and the derivative of a layer with a function of users."""
    Activation.__post_init__(layer)
    _check_once(type(layer), tuple(parameters_of(layer).values()))


@functools.lru_cache(256)
def _check_once(cls: type[Activation], values: tuple[float, ...]) -> None:
    forward, slope = expressions_of(cls)
    names = [each.name for each in fields(cls)]  # type: ignore[arg-type]
    check_derivative(Formula(forward, slope, dict(zip(names, values, strict=True))), cls.kind)


def definition_of(layer: Activation) -> dict[str, Any]:
    """Return the definition of a function of users as plain values, for files."""
    function = layer.function
    parameters = {each.name: each.default for each in fields(layer)}  # type: ignore[arg-type]
    return {
        "name": layer.kind,
        "expression": function.expression,
        **({"derivative": function.derivative} if function.derivative else {}),
        **({"parameters": parameters} if parameters else {}),
    }
