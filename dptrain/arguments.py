"""Calls of public classes and functions with arguments that they do not have."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

from dptrain.errors import ArgumentError, shown, suggest

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "kernel_size": ("kernel",), "pool_size": ("window", "kernel"), "out_channels": ("filters",),
    "out_features": ("units",), "num_features": ("features",), "strides": ("stride",),
    "pad": ("padding",), "p": ("rate",), "negative_slope": ("slope",), "alpha": ("slope",),
    "use_bias": ("bias",), "eps": ("epsilon",), "lr": (), "mean": (), "num_groups": ("groups",),
    "kernel_initializer": ("init",), "weight_initializer": ("init",), "betas": ("beta1",),
    "beta_1": ("beta1",), "beta_2": ("beta2",), "rho": ("momentum",), "std": ("deviation",),
    "l2": ("weight_decay",), "kernel_regularizer": ("weight_decay",), "wd": ("weight_decay",),
}  # fmt: skip
"""Names of arguments in other libraries, and names that the same argument may have here."""

ADVICE: Mapping[str, str] = {
    "activation": "write the activation as a layer of its own, such as Dense(8), ReLU()",
    "in_channels": "leave it out: it follows from the layer before",
    "in_features": "leave it out: it follows from the layer before",
    "input_shape": "leave it out: it is an argument of Network",
    "lr": "the learning rate is a setting: Trainer(..., learning_rate=0.1)",
    "learning_rate": "the learning rate is a setting: Trainer(..., learning_rate=0.1)",
    "reduction": "leave it out: a loss is the mean over the samples",
    "from_logits": "leave it out: the loss contains the softmax or the sigmoid",
    "validation_data": "pass it with the data: Trainer(network, {'x_train': …, 'x_val': …, …})",
    "class_weight": "the weights of classes are a setting: Trainer(..., class_weights=...)",
}
"""What to do about arguments of other libraries that have no name here."""


class NamedArguments(ABCMeta):
    """The type of classes whose calls with wrong arguments are refused with the right names.

    A class can state what to do about an argument without a name, as `unnamed_argument`.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an object, or raise `ArgumentError` if the arguments do not fit."""
        try:
            return super().__call__(*args, **kwargs)
        except TypeError as error:
            if isinstance(error, ArgumentError):
                raise
            message = _problem(cls, args, kwargs)
            if message is None:
                raise
            raise ArgumentError(message) from None


def _problem(cls: type[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the arguments of a call; None if they fit."""
    parameters = dict(list(inspect.signature(cls.__init__).parameters.items())[1:])
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    own = tuple(vars(cls).get("__annotations__", ()))
    advice = getattr(cls, "unnamed_argument", "")
    return _wrong_argument(cls.__name__, parameters, args, kwargs, own, advice)


def _wrong_argument(
    what: str,
    parameters: Mapping[str, inspect.Parameter],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    own: tuple[str, ...] = (),
    advice: str = "",
) -> str | None:
    """Return what is wrong with the arguments of a call; None if they fit.

    Args:
        what: name of the class or of the function.
        parameters: those that it has.
        args, kwargs: arguments of the call.
        own: names that the class defines itself, of which an example is taken.
        advice: what to do about an argument without a name, in place of the example.
    """
    named = [name for name, p in parameters.items() if p.kind is not p.VAR_POSITIONAL]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [name for name in named if parameters[name].kind is not inspect.Parameter.VAR_KEYWORD]
    has = f"{what} has the arguments {', '.join(named)}" if named else f"{what} has no arguments"
    for name in kwargs:
        if name not in named and not takes_all:
            return f"{what} has no argument {shown(repr(name))}{_hint(name, named)}; {has}"
    places = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(places) and not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        value = shown(repr(args[len(places)]), 40)
        known = [name for name in own if name in named] or named
        example = next((name for name in known if name not in (*places, *kwargs)), None)
        how = f"; name the argument, such as {what}({example}={value})" if example else ""
        how = f"; {advice}" if advice else how
        return f"{what} has no argument for {value}{how}; {has}"
    for name in places[: len(args)]:
        if name in kwargs:
            return f"{what} received {name} twice; {has}"
    missing = [
        name
        for name, p in list(parameters.items())[len(args) :]
        if p.default is p.empty and name not in kwargs and name in named
    ]
    return f"{what} needs {', '.join(missing)}; {has}" if missing else None


Function = TypeVar("Function", bound=Callable[..., Any])


def named_arguments(advice: str = "") -> Callable[[Function], Function]:
    """Return a decorator of methods that refuses calls with wrong arguments by `ArgumentError`.

    Args:
        advice: what to do, to follow the message.

    Example:
        >>> class Model:
        ...     @named_arguments("write fit((x, y))")
        ...     def fit(self, data):
        ...         return data
        >>> Model().fit(1, 2)
        Traceback (most recent call last):
        dptrain.ArgumentError: Model.fit has no argument for 2; Model.fit has the arguments data; \
write fit((x, y))
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        parameters = dict(list(signature.parameters.items())[1:])

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                signature.bind(*args, **kwargs)
            except TypeError:
                message = _wrong_argument(function.__qualname__, parameters, args[1:], kwargs)
                if message is None:
                    raise
                more = f"; {advice}" if advice else ""
                raise ArgumentError(f"{message}{more}") from None
            return function(*args, **kwargs)

        return cast("Function", call)

    return decorate


def _hint(name: str, known: list[str]) -> str:
    for other in OTHER_NAMES.get(name, ()):
        if other in known:
            return f"; use {other}"
    return f"; {ADVICE[name]}" if name in ADVICE else suggest(name, known)
