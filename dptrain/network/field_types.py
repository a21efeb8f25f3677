"""Checks that the fields of a description have the types of their annotations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Real
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dptrain.bounds import as_number
from dptrain.errors import UserError, shown

_TEXTS = {int: "a whole number", float: "a number", bool: "True or False", NoneType: "None"}


def check_field_types(description: Any, kind: str) -> None:
    """Raise a `UserError` if a field of a description has another type than its annotation.

    Args:
        description: a frozen dataclass.
        kind: start of the message.
    """
    for name, options in _field_types(description.__class__).items():
        value = getattr(description, name)
        if not any(_fits(value, option) for option in options):
            expected = " or ".join(_text(option) for option in options)
            raise UserError(f"{kind} {name} is {shown(repr(value))}; expected {expected}")


@cache
def _field_types(cls: type[Any]) -> Mapping[str, tuple[Any, ...]]:
    """Return the types that each field of a description accepts."""
    if not is_dataclass(cls):
        return {}
    hints = get_type_hints(cls)
    return {field.name: type_options(hints[field.name]) for field in fields(cls)}


def type_options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the hint alone."""
    is_union = get_origin(hint) is not None and get_origin(hint) not in (tuple, Literal)
    return get_args(hint) if is_union else (hint,)


def _fits(value: Any, option: Any) -> bool:
    if get_origin(option) is Literal:
        return isinstance(value, str)  # The classes check which one it is.
    if get_origin(option) is tuple:
        items = get_args(option)
        return (
            isinstance(value, list | tuple)
            and len(value) == len(items)
            and all(map(_fits, value, items))
        )
    if option is float:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        return is_number and type(as_number(value, float)) is float
    return isinstance(value, option) and (option is bool or not isinstance(value, bool))


def _text(option: Any) -> str:
    if get_origin(option) is Literal:
        return ", ".join(get_args(option))
    if get_origin(option) is tuple:
        return f"({', '.join(map(_text, get_args(option)))})"
    return _TEXTS.get(option, f"{option.__name__}()")
