"""Types of the values of a JSON file, and one line about a value that has another type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from dptrain.errors import UserError, shown

NUMBER, BOOLEAN, TEXT = "a number", "true or false", "a text"


class Optional(NamedTuple):
    """A value that may be null, or missing."""

    form: Form


class Default(NamedTuple):
    """A value of an object that may be missing, but not null."""

    form: Form


class ByName(NamedTuple):
    """An object whose names are free and whose values have one form."""

    form: Form


Form = Any
"""One of

- `NUMBER`, `BOOLEAN`, `TEXT`, `Optional`, `Default`, `ByName`;
- a list of one form, for any number of values;
- a tuple of forms, for as many values;
- a mapping from names to forms, for an object that has these names and may have others.
"""

PAIR = (NUMBER, NUMBER)

SCALARS: Mapping[Any, Form] = {int: NUMBER, float: NUMBER, bool: BOOLEAN, str: TEXT}


def form_of(kind: Any) -> Form:
    """Return the form of what `dataclasses.asdict` makes of a type."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return {
            field.name: form_of(hints[field.name])
            if field.default is MISSING
            else Default(form_of(hints[field.name]))
            for field in fields(kind)
        }
    if kind in SCALARS:
        return SCALARS[kind]
    inner = get_args(kind)
    if get_origin(kind) is UnionType:
        return Optional(form_of(next(each for each in inner if each is not type(None))))
    return ByName(form_of(inner[1])) if get_origin(kind) is dict else [form_of(inner[0])]


def check_form(value: Any, form: Form, name: str) -> None:
    """Raise `UserError` if a value does not have a form.

    Args:
        value: as JSON has it.
        form: see `Form`.
        name: file and name of the value, for the message.
    """
    if isinstance(form, Optional):
        if value is not None:
            check_form(value, form.form, name)
    elif isinstance(form, Mapping | ByName):
        _require(value, isinstance(value, Mapping), "an object", name)
        inner = dict.fromkeys(value, form.form) if isinstance(form, ByName) else form
        for key, part in inner.items():
            if not isinstance(part, Default):
                check_form(value.get(key), part, f"{name}.{key}")
            elif key in value:
                check_form(value[key], part.form, f"{name}.{key}")
    elif isinstance(form, list | tuple):
        count = f" of {len(form)} values" if isinstance(form, tuple) else ""
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        right = is_list and (isinstance(form, list) or len(value) == len(form))
        _require(value, right, f"a list{count}", name)
        parts = form * len(value) if isinstance(form, list) else form
        for index, (each, part) in enumerate(zip(value, parts, strict=True)):
            check_form(each, part, f"{name}.{index}")
    else:
        is_boolean = isinstance(value, bool)
        right = {
            NUMBER: isinstance(value, int | float) and not is_boolean,
            BOOLEAN: is_boolean,
            TEXT: isinstance(value, str),
        }[form]
        _require(value, right, form, name)


def _require(value: Any, right: bool, expected: str, name: str) -> None:
    if not right:
        raise UserError(f"{name} is {shown(repr(value), 40)}; expected {expected}; train again")
