"""Functions of single elements that users define, in programs and in network files."""

from __future__ import annotations

import functools
import inspect
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields, make_dataclass
from typing import Any

from dptrain.errors import UserError, shown
from dptrain.network.derivative_check import check_derivative
from dptrain.network.elementwise import (
    Activation,
    Formula,
    Function,
    expressions_of,
    parameters_of,
)
from dptrain.network.expressions import Expression, constant, variable
from dptrain.network.layers import Layer

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
