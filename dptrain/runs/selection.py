"""Conditions on runs, such as ``network=resnet20``, ``batch_size>=64`` or ``data~cifar10``.

A condition is a name of a record, one of ``= != < <= > >= ~`` and a value. ``~`` is true if the
text contains the value. A value that a run does not have fulfils only ``!=``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dptrain.bounds import convert
from dptrain.errors import UserError, shown, suggest

Record = dict[str, Any]

OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
    "~": lambda found, wanted: str(wanted) in str(found),
}

CONDITION = re.compile(r"\s*([\w-]+)\s*(<=|>=|!=|==|=|<|>|~)\s*(.*?)\s*")


def select(records: Sequence[Record], where: Sequence[str], tags: Sequence[str]) -> list[Record]:
    """Return the records that fulfil all conditions and have all tags.

    Raises:
        UserError: a condition is invalid or names a value that no run has.
    """
    names = list(dict.fromkeys(name for record in records for name in record))
    conditions = [parse_condition(text, names) for text in where]
    return [
        record
        for record in records
        if all(fulfils(record) for fulfils in conditions)
        and set(tags) <= set(record["tags"].split(","))
    ]


def parse_condition(text: str, names: Sequence[str]) -> Callable[[Record], bool]:
    """Return a function that decides whether a record fulfils a condition.

    Args:
        text: the condition.
        names: all names of records; without any, every name is accepted.
    """
    found = CONDITION.fullmatch(text)
    if found is None:
        raise UserError(
            f"'{shown(text)}' is not a condition; expected NAME=VALUE, or another of != < <= > >= "
            "~, for example network=resnet20"
        )
    name, symbol, wanted = found[1].replace("-", "_"), found[2].replace("==", "="), found[3]
    check_name(name, names)
    return lambda record: _compare(record.get(name), symbol, wanted, name)


def check_name(name: str, names: Sequence[str]) -> None:
    """Refuse a name that no record has."""
    if names and name not in names:
        raise UserError(f"runs have no value '{shown(name)}'{suggest(name, names)}")


def _compare(found: Any, symbol: str, wanted: str, name: str) -> bool:
    if found is None:
        return symbol == "!="
    if symbol != "~" and isinstance(found, bool):
        truth = {"true": True, "on": True, "false": False, "off": False}.get(wanted.lower())
        return OPERATORS[symbol](found, truth)
    if symbol != "~" and isinstance(found, int | float):
        return OPERATORS[symbol](found, _number(wanted, name))
    return OPERATORS[symbol](str(found), wanted)


def _number(text: str, name: str) -> float:
    number = convert(text, float)
    if number is None:
        raise UserError(f"{name} is a number; '{shown(text)}' is not")
    return float(number)
