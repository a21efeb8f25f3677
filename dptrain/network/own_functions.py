"""Functions of single elements, and losses, that users define in programs and network files."""

from __future__ import annotations

import copyreg
import functools
import inspect
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields, make_dataclass
from typing import Any

from dptrain.bounds import as_number
from dptrain.errors import UserError, shown
from dptrain.network import expressions
from dptrain.network.derivative_check import check_derivative
from dptrain.network.elementwise import (
    Activation,
    Formula,
    Function,
    expressions_of,
    parameters_of,
)
from dptrain.network.expressions import Expression, constant, replace, variable
from dptrain.network.layers import Layer
from dptrain.network.losses import (
    LOSSES,
    ElementwiseLoss,
    LossFunction,
    TargetKind,
    loss_expressions,
)

OWN: dict[str, type[Activation]] = {}
"""The classes that `activation` has returned last, by name."""
OWN_LOSSES: dict[str, type[ElementwiseLoss]] = {}
"""The classes that `loss` has returned last, by name."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_RESERVED = ("x", "y", "dy", "kind", "function", "formula", "name", "inputs", "type")
_RESERVED_OF_LOSSES = (
    "z", "y", "x", "kind", "function", "type", "targets", "value", "slope", "parameters", "is_own",
    "flops", "check", "smooths_labels",
)  # fmt: skip
"""Names that parameters cannot have: those of variables, of attributes and of keys of files."""


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
    found = checked_parameters(name, _defaults(function, 1) | parameters)
    expression = _traced(function, _first_name)
    slope = _traced(derivative, _first_name) if derivative else ""
    OWN[str(name)] = cls = define(name, expression, slope, found)
    return cls


def _kinds(cls: type[Any]) -> Iterator[str]:
    """Yield the kinds of the layers of dptrain."""
    for each in cls.__subclasses__():
        if not getattr(each, "is_own", False):
            yield getattr(each, "kind", "")
            yield from _kinds(each)


def _first_name(names: Sequence[str]) -> dict[str, str]:
    """Return what the first argument of a function of Python stands for: x, or y by this name."""
    return {name: "y" if name == "y" else "x" for name in names[:1]}


def _defaults(function: str | Callable[..., Any], count: int) -> dict[str, float]:
    """Return the default values of the parameters of a function after the first `count`."""
    if not callable(function):
        return {}
    try:
        rest = [*inspect.signature(function).parameters.values()][count:]
    except ValueError:
        raise UserError(
            f"the arguments of {shown(str(function))} are not known; write the expression as text, "
            "or as a lambda"
        ) from None
    for each in rest:
        if each.default is each.empty:
            raise UserError(
                f"parameter {each.name} has no default value; write {each.name}=1.0 in its place"
            )
    return {each.name: each.default for each in rest}


def _traced(
    function: str | Callable[..., Any], variables: Callable[[Sequence[str]], Mapping[str, str]]
) -> str:
    """Return the text of an expression or of a function of Python.

    Args:
        function: the text, or a function that is called with variables.
        variables: returns for the names of the arguments what the first ones stand for.
    """
    if not callable(function):
        return function
    names = [*inspect.signature(function).parameters]
    known = {name: variable(name) for name in names}
    known |= {name: variable(meant) for name, meant in variables(names).items()}
    first = variables(names)
    result = function(
        *(known[name] for name in first), **{k: v for k, v in known.items() if k not in first}
    )
    if isinstance(result, int | float):
        result = constant(result)
    if not isinstance(result, Expression):
        raise UserError(
            f"the function returns {shown(type(result).__name__)}; expected an expression of its "
            "arguments"
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
    _check_names(name, "function", "swish", parameters, _RESERVED)
    if name in _kinds(Layer):
        raise UserError(f"a layer of dptrain is called {name}; choose another name")
    own = {
        "kind": name,
        "function": Function(expression, derivative),
        "is_own": True,
        "__post_init__": _check_own,
        "__doc__": f"y = {expression}.",
    }
    own["_definition"] = define, (name, expression, derivative, parameters)
    own["__reduce__"] = lambda layer: (_rebuilt, (type(layer), parameters_of(layer)))
    return _make_class(name, parameters, Activation, own)


def loss(
    name: str,
    function: str | Callable[..., Any],
    derivative: str | Callable[..., Any] = "",
    *,
    targets: TargetKind = "values",
    **parameters: float,
) -> type[Any]:
    """Define a loss function, and return its class.

    The loss is the mean over samples and outputs of a function of an output z of the network and of
    its target y. Every backend computes it as it computes those of dptrain. Files of networks,
    checkpoints and models contain the expression, so that reading them needs no script.

    Args:
        name: name of the loss in files, such as ``huber``: small letters, digits and ``_``.
        function: an expression of ``z``, ``y`` and the parameters, as text or as a function of
            Python that is called once, with two variables; see `dptrain.network.expressions`.
        derivative: the derivative by z; "" derives it from the function.
        targets: ``values`` for numbers, or ``binary`` for targets 0 or 1, for which sigmoid(z) is
            the predicted probability; see `Loss`.
        parameters: default values of the parameters. Those of a Python function are its default
            values.

    Returns:
        A class of losses, whose fields are the parameters.

    Raises:
        UserError: the name is that of a loss of dptrain, the function has no expression or does not
            depend on z, or the derivative differs from finite differences.

    Examples:
        >>> LogCosh = loss("log_cosh", "abs(z - y) + log1p(exp(-2 * abs(z - y))) - log(2)")
        >>> Quantile = loss("quantile", "max(q * (y - z), (q - 1) * (y - z))", q=0.5)
        >>> Quantile(q=0.9)
        Quantile(q=0.9)
        >>> loss("cubic", lambda z, y, scale=0.1: scale * abs(z - y) ** 3)()
        Cubic(scale=0.1)
    """
    found = checked_parameters(name, _defaults(function, 2) | parameters)
    expression = _traced(function, _output_and_target)
    slope = _traced(derivative, _output_and_target) if derivative else ""
    OWN_LOSSES[str(name)] = cls = define_loss(name, expression, slope, targets, found)
    return cls


def _output_and_target(names: Sequence[str]) -> dict[str, str]:
    """Return what the first arguments of the function of a loss stand for."""
    if len(names) < 2:
        raise UserError(
            f"the function of the loss has {len(names)} arguments; expected two, an output and its "
            "target, such as lambda z, y: abs(z - y)"
        )
    return {names[0]: "z", names[1]: "y"}


@functools.cache
def define_loss(
    name: str,
    expression: str,
    derivative: str = "",
    targets: str = "values",
    parameters: tuple[tuple[str, float], ...] = (),
) -> type[ElementwiseLoss]:
    """Return the class of a loss; it is the same one for equal arguments.

    Raises:
        UserError: as for `loss`.
    """
    _check_names(name, "loss", "huber", parameters, _RESERVED_OF_LOSSES)
    if name in LOSSES:
        raise UserError(f"a loss of dptrain is called {name}; choose another name")
    if targets not in ("values", "binary"):
        raise UserError(
            f"targets of {name} is {shown(repr(targets))}; expected values, or binary for 0 and 1"
        )
    own = {
        "kind": name,
        "targets": targets,
        "function": LossFunction(expression, derivative),
        "is_own": True,
        "__post_init__": _check_own_loss,
        "__doc__": f"Mean over samples and outputs of {expression}.",
    }
    own["_definition"] = define_loss, (name, expression, derivative, targets, parameters)
    own["__reduce__"] = lambda loss: (_rebuilt, (type(loss), loss.parameters))
    return _make_class(name, parameters, ElementwiseLoss, own)


def checked_parameters(name: Any, parameters: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Return the names and the default values of the parameters of a function or a loss.

    Raises:
        UserError: a value is no number that a float can hold, or a name is not allowed.
    """
    found = {key: as_number(value, float) for key, value in parameters.items()}
    for key, value in found.items():
        if type(value) is not float or not _NAME.fullmatch(key) or keyword.iskeyword(key):
            raise UserError(
                f"parameter {shown(key)} of {shown(str(name))} is {shown(repr(value))}; expected a "
                "name of small letters and a number"
            )
    return tuple(found.items())


def _rebuilt(cls: type[Any], values: Mapping[str, float]) -> Any:
    """Return a layer or a loss that was pickled."""
    return cls(**values)


def _reduced(cls: type[Any]) -> Any:
    """Return how a class is pickled: those of users by their definition, others by their name."""
    return vars(cls).get("_definition", cls.__qualname__)


def _check_names(
    name: Any,
    what: str,
    example: str,
    parameters: tuple[tuple[str, float], ...],
    reserved: Sequence[str],
) -> None:
    """Refuse a wrong name of a function or a loss, and wrong parameters."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"the {what} is called {shown(repr(name))}; expected small letters, digits and _, "
            f"such as {example}"
        )
    for key, _ in parameters:
        if key in reserved:
            raise UserError(f"a parameter of {name} is called {key}; choose another name")


def _make_class(
    name: str, parameters: tuple[tuple[str, float], ...], base: type[Any], own: dict[str, Any]
) -> type[Any]:
    """Return a subclass with the parameters as fields, after a check of their default values."""
    listed = [(key, float, field(default=value)) for key, value in parameters]
    title = "".join(part.capitalize() for part in name.split("_")) or name
    cls = make_dataclass(title, listed, bases=(base,), namespace=own, frozen=True)
    cls.__module__ = __name__
    copyreg.pickle(type(cls), _reduced)
    cls()
    return cls


def _check_own_loss(own: ElementwiseLoss) -> None:
    """Check the parameters and the derivative of a loss of users."""
    ElementwiseLoss.__post_init__(own)
    _check_loss_once(type(own), tuple(own.parameters.values()))


@functools.lru_cache(256)
def _check_loss_once(cls: type[ElementwiseLoss], values: tuple[float, ...]) -> None:
    """Compare the derivative by z with finite differences, for some targets."""
    trees = loss_expressions(cls)
    if "z" not in expressions.names(trees[0]):
        raise UserError(f"the loss {cls.kind} does not depend on z, the output of the network")
    parameters = [each.name for each in fields(cls)]  # type: ignore[arg-type]
    for target in (0.0, 1.0) if cls.targets == "binary" else (0.0, 0.73, -1.37, 5.21):
        parts = {variable("z"): variable("x"), variable("y"): constant(target)}
        value, slope = (replace(each, parts) for each in trees)
        check_derivative(
            Formula(value, slope, dict(zip(parameters, values, strict=True))),
            f"{cls.kind}, for y = {target:g} and z as x,",
        )


def _check_own(layer: Activation) -> None:
    """Check the parameters and the derivative of a layer with a function of users."""
    Activation.__post_init__(layer)
    _check_once(type(layer), tuple(parameters_of(layer).values()))


@functools.lru_cache(256)
def _check_once(cls: type[Activation], values: tuple[float, ...]) -> None:
    forward, slope = expressions_of(cls)
    names = [each.name for each in fields(cls)]  # type: ignore[arg-type]
    check_derivative(Formula(forward, slope, dict(zip(names, values, strict=True))), cls.kind)


def definition_of(own: Activation | ElementwiseLoss) -> dict[str, Any]:
    """Return the definition of a function or a loss of users as plain values, for files."""
    function = own.function
    parameters = {each.name: each.default for each in fields(own)}  # type: ignore[arg-type]
    return {
        "name": own.kind,
        "expression": function.expression,
        **({"targets": own.targets} if isinstance(own, ElementwiseLoss) else {}),
        **({"derivative": function.derivative} if function.derivative else {}),
        **({"parameters": parameters} if parameters else {}),
    }
