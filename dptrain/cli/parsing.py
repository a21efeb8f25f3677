"""Parse the values of flags: numbers, lists, times and sizes of memory."""

from __future__ import annotations

import math
import re
import shlex
from typing import Any

import click

from dptrain.bounds import (
    MAX_RUNS,
    MAX_WHOLE,
    Limits,
    convert,
    expected_number,
    parse_number,
)
from dptrain.errors import UserError, shown

NONE = "none"
"""An empty list."""

MAX_SECONDS, MAX_BYTES = 1e8, 2**62
"""Longest time, three years, and largest size of memory, which 64-bit integers hold."""

SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


class Number(click.ParamType):  # type: ignore[type-arg]  # Generic since click 8.5.
    """The type of a flag with a number, which always has bounds.

    Args:
        kind: int or float.
        limits: arguments of `Limits`; missing ones are those of `Limits.of`.
    """

    def __init__(self, kind: type[Any], **limits: Any) -> None:
        self.kind, self.limits = kind, Limits(**limits).of(kind)
        self.name = {int: "integer", float: "float"}[kind]

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | float:
        """Return the number that a text is; the error names the bounds."""
        number = convert(value, self.kind) if isinstance(value, str) else value
        if number is None or not self.limits.allow(number):
            self.fail(
                f"'{shown(value)}'; expected {expected_number(self.kind, self.limits)}", param, ctx
            )
        result: int | float = self.kind(number)
        return result


WHOLE = Number(int, at_least=1)
RUNS = Number(int, at_least=1, at_most=MAX_RUNS)


def parse_names(text: str) -> tuple[str, ...]:
    """Return the parts of ``a,b``, each once."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def parse_numbers(text: str, flag: str, *, may_be_none: bool = False) -> tuple[int, ...]:
    """Return the numbers of ``2,64`` in rising order, each once; `NONE` is an empty list.

    Args:
        text: the value of the flag.
        flag: the flag, for the error message.
        may_be_none: accept `NONE`.

    Raises:
        UserError: the text is not a list of whole numbers from 1 to `MAX_WHOLE`.
    """
    if may_be_none and text.strip() == NONE:
        return ()
    parts, limits = parse_names(text), Limits(at_least=1)
    found = [parse_number(part, int, limits) for part in parts if part.isdecimal()]
    if not found or len(found) < len(parts) or None in found:
        none = f", or {NONE}" if may_be_none else ""
        raise UserError(
            f"{flag} is '{shown(text)}'; expected whole numbers from 1 to {MAX_WHOLE:,}, "
            f"separated by commas{none}"
        )
    return tuple(sorted(found))


def parse_axis(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the name and the values of ``batch_size=32,64``; the name may have dashes.

    Raises:
        UserError: there is no name or no value.
    """
    name, _, values = text.partition("=")
    found = parse_names(values)
    name = name.strip()
    if not name or not found:
        raise UserError(f"--set is '{shown(text)}'; expected NAME=VALUE,… such as batch_size=32,64")
    return name if name == "first-pool" else name.replace("-", "_"), found


def parse_part(text: str) -> tuple[int, int]:
    """Return the numbers of ``I/N``.

    Raises:
        UserError: I is not a number from 1 to N.
    """
    first, _, second = text.partition("/")
    if first.isdecimal() and second.isdecimal():
        count = parse_number(second, int, Limits(at_least=1, at_most=MAX_RUNS))
        index = parse_number(first, int, Limits(at_least=1, at_most=count or 0))
        if count is not None and index is not None:
            return index, count
    raise UserError(
        f"--part is '{shown(text)}'; expected I/N with I from 1 to N, at most {MAX_RUNS:,}, such "
        "as 1/4"
    )


def parse_seconds(text: str, flag: str) -> float:
    """Return the seconds of ``1s``, ``250ms`` or ``2min``; a number without a unit is seconds."""
    expected = f"a time such as 1s, 250ms or 2min, above 0 and up to {MAX_SECONDS:g} s"
    return _parse_quantity(text, flag, SECONDS, "s", expected, MAX_SECONDS)


def parse_bytes(text: str, flag: str) -> int:
    """Return the bytes of ``2GB`` or ``512MiB``; a number without a unit is bytes."""
    expected = "a size such as 2GB or 512MiB, above 0 and up to 4,194,304 TiB"
    return int(_parse_quantity(text, flag, BYTES, "B", expected, MAX_BYTES))


def _parse_quantity(
    text: str,
    flag: str,
    units: dict[str, float] | dict[str, int],
    default: str,
    expected: str,
    largest: float,
) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)", text.strip())
    by_lower = {unit.lower(): size for unit, size in units.items()}
    size = by_lower.get((match[2] or default).lower()) if match else None
    number = convert(match[1], float) if match else None
    quantity = math.nan if number is None or size is None else number * size
    if not 0 < quantity <= largest:
        raise UserError(f"{flag} is '{shown(text)}'; expected {expected}")
    return quantity


def parse_launcher(launcher: str) -> tuple[str, ...]:
    """Return the command of ``--launcher``; none for ``auto``.

    Raises:
        UserError: the text is no command of a shell.

    Example:
        >>> parse_launcher("srun --mpi=pmi2")
        ('srun', '--mpi=pmi2')
    """
    if launcher == "auto":
        return ()
    try:
        command = tuple(shlex.split(launcher))
    except ValueError as error:
        raise UserError(f"--launcher is '{launcher}': {error}; expected a shell command") from None
    if not command:
        raise UserError("--launcher is empty; expected auto, mpirun or srun")
    return command
