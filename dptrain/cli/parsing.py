"""Parse the values of flags: lists, times and sizes of memory."""

from __future__ import annotations

import re

from dptrain.errors import UserError, shown

NONE = "none"
"""An empty list."""

MAX_NUMBER = 2**31 - 1
"""Largest number in a list; kernels receive sizes as 32-bit integers."""

SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
BYTES = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip


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
        UserError: the text is not a list of whole numbers from 1 to `MAX_NUMBER`.
    """
    if may_be_none and text.strip() == NONE:
        return ()
    found = parse_names(text)
    # Python refuses to convert texts of thousands of digits.
    if not found or not all(
        part.isdecimal() and len(part) <= 20 and 1 <= int(part) <= MAX_NUMBER for part in found
    ):
        none = f", or {NONE}" if may_be_none else ""
        raise UserError(
            f"{flag} is '{shown(text)}'; expected whole numbers from 1 to {MAX_NUMBER:,}, "
            f"separated by commas{none}"
        )
    return tuple(sorted(map(int, found)))


def parse_axis(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the name and the values of ``batch_size=32,64``; the name may have dashes.

    Raises:
        UserError: there is no name or no value.
    """
    name, _, values = text.partition("=")
    found = parse_names(values)
    name = name.strip()
    if not name or not found:
        raise UserError(f"--set is '{text}'; expected NAME=VALUE,… such as batch_size=32,64")
    return name if name == "first-pool" else name.replace("-", "_"), found


def parse_part(text: str) -> tuple[int, int]:
    """Return the numbers of ``I/N``.

    Raises:
        UserError: I is not a number from 1 to N.
    """
    first, _, second = text.partition("/")
    if first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second):
        return int(first), int(second)
    raise UserError(f"--part is '{text}'; expected I/N with I from 1 to N, such as 1/4")


def parse_seconds(text: str, flag: str) -> float:
    """Return the seconds of ``1s``, ``250ms`` or ``2min``; a number without a unit is seconds."""
    return _parse_quantity(text, flag, SECONDS, "s", "a time such as 1s, 250ms or 2min")


def parse_bytes(text: str, flag: str) -> int:
    """Return the bytes of ``2GB`` or ``512MiB``; a number without a unit is bytes."""
    return int(_parse_quantity(text, flag, BYTES, "B", "a size such as 2GB or 512MiB"))


def _parse_quantity(
    text: str, flag: str, units: dict[str, float] | dict[str, int], default: str, expected: str
) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)", text.strip())
    by_lower = {unit.lower(): size for unit, size in units.items()}
    size = by_lower.get((match[2] or default).lower()) if match else None
    if match is None or size is None or float(match[1]) <= 0:
        raise UserError(f"{flag} is '{text}'; expected {expected}, above 0")
    return float(match[1]) * size
