"""Types of the values of a JSON file, and one line about a value that has another type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import EllipsisType, UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from dptrain.errors import UserError, shown
from dptrain.files import MAX_TEXT_BYTES, parse_json, read_regular

NUMBER, COUNT, POSITIVE = "a number", "a whole number", "a positive whole number"
SHARE, BOOLEAN, TEXT = "0 to 1", "true or false", "a text"
SCALAR = "a number, a text, true or false"
"""Forms of single values. Whole numbers have at most 64 bits, so that arithmetic is safe."""

LARGEST = 2**63 - 1
ADVICE = "restore the file or make it again"


class Optional(NamedTuple):
    """A value that may be null, or missing."""

    form: Form


class Default(NamedTuple):
    """A value of an object that may be missing, but not null."""

    form: Form


Form = Any
"""One of

- a form of a single value, `Optional`, `Default`;
- a list of one form, for any number of values;
- a tuple of forms, for as many values;
- a mapping from names to forms, for an object that has these names and may have others; ``...``
  as a name stands for all others.
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
    return {...: form_of(inner[1])} if get_origin(kind) is dict else [form_of(inner[0])]


def read_object(path: Path, form: Form = {}) -> dict[str, Any]:  # noqa: B006
    """Return the object that a JSON file contains.

    Args:
        path: the file, of at most `MAX_TEXT_BYTES`.
        form: see `Form`.

    Raises:
        UserError: the file cannot be read, is no JSON, or has another form.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.json"
        >>> _ = path.write_text('{"steps": 4, "loss": null}')
        >>> read_object(path, {"steps": COUNT, "loss": Optional(NUMBER)})
        {'steps': 4, 'loss': None}
    """
    try:
        found = parse_json(read_regular(path, MAX_TEXT_BYTES))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; {ADVICE}") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {shown(error)}; {ADVICE}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected a JSON object, found {shown(found)}; {ADVICE}")
    check_form(found, form, str(path), ": ")
    return found


def fitting(values: Mapping[str, Any], form: Mapping[Any, Form]) -> dict[str, Any]:
    """Return the parts of an object that have their form; others are left out."""
    found = {}
    for name, value in values.items():
        part = form.get(name, form.get(...))
        with suppress(UserError):
            if part is not None:
                check_form(value, part.form if isinstance(part, Default) else part, name)
            found[name] = value
    return found


def check_form(value: Any, form: Form, name: str, separator: str = ".") -> None:
    """Raise `UserError` if a value does not have a form.

    Args:
        value: as JSON has it.
        form: see `Form`.
        name: file and name of the value, for the message.
        separator: between `name` and the name of a part.
    """
    if isinstance(form, Optional):
        if value is not None:
            check_form(value, form.form, name, separator)
    elif isinstance(form, Mapping):
        _require(value, isinstance(value, Mapping), "an object", name)
        for key, part in _parts(value, form).items():
            if not isinstance(part, Default):
                check_form(value.get(key), part, f"{name}{separator}{key}")
            elif key in value:
                check_form(value[key], part.form, f"{name}{separator}{key}")
    elif isinstance(form, list | tuple):
        count = f" of {len(form)} values" if isinstance(form, tuple) else ""
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        right = is_list and (isinstance(form, list) or len(value) == len(form))
        _require(value, right, f"a list{count}", name)
        parts = form * len(value) if isinstance(form, list) else form
        for index, (each, part) in enumerate(zip(value, parts, strict=True)):
            check_form(each, part, f"{name}{separator}{index}")
    else:
        _require(value, _is(value, form), form, name)


def _parts(value: Mapping[str, Any], form: Mapping[str | EllipsisType, Form]) -> dict[str, Form]:
    """Return the form of each name that an object has or must have."""
    named = {key: part for key, part in form.items() if key is not ...}
    return {**dict.fromkeys(value, form[...]), **named} if ... in form else named


def _is(value: Any, form: str) -> bool:
    """Return True if a single value has a form."""
    is_whole = type(value) is int and abs(value) <= LARGEST
    is_number = is_whole or isinstance(value, float)
    return {
        NUMBER: is_number,
        COUNT: is_whole and value >= 0,
        POSITIVE: is_whole and value >= 1,
        SHARE: is_number and 0 <= value <= 1,
        BOOLEAN: isinstance(value, bool),
        TEXT: isinstance(value, str),
        SCALAR: is_number or isinstance(value, bool | str),
    }[form]


def _require(value: Any, right: bool, expected: str, name: str) -> None:
    if not right:
        raise UserError(f"{name} is {shown(repr(value), 40)}; expected {expected}; {ADVICE}")
