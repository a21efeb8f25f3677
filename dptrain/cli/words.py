"""Values of flags as people write them: lists, durations, sizes of memory."""

from __future__ import annotations

import re

from dptrain.errors import UserError

NONE = "none"
"""An empty list."""

SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
BYTES = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip


def names(text: str) -> tuple[str, ...]:
    """``a,b`` as its parts, each once."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def numbers(text: str, flag: str, *, may_be_none: bool = False) -> tuple[int, ...]:
    """``2,64`` as whole numbers of at least 1, each once and in order; `NONE` as no number."""
    if may_be_none and text.strip() == NONE:
        return ()
    found = names(text)
    if not found or not all(part.isdecimal() and int(part) > 0 for part in found):
        none = f", or {NONE}" if may_be_none else ""
        raise UserError(
            f"{flag} is '{text}'; expected whole numbers of at least 1 with commas between "
            f"them{none}"
        )
    return tuple(sorted(map(int, found)))


def seconds(text: str, flag: str) -> float:
    """``1s``, ``250ms``, ``2min``; a number alone is seconds."""
    return _measured(text, flag, SECONDS, "s", "a time such as 1s, 250ms or 2min")


def nbytes(text: str, flag: str) -> int:
    """``2GB``, ``512MiB``; a number alone is bytes."""
    return int(_measured(text, flag, BYTES, "B", "a size such as 2GB or 512MiB"))


def _measured(
    text: str, flag: str, units: dict[str, float] | dict[str, int], alone: str, expected: str
) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)", text.strip())
    by_lower = {unit.lower(): size for unit, size in units.items()}
    size = by_lower.get((match[2] or alone).lower()) if match else None
    if match is None or size is None or float(match[1]) <= 0:
        raise UserError(f"{flag} is '{text}'; expected {expected}, above 0")
    return float(match[1]) * size
