"""Bounds of the numbers that flags, variables of the environment, files and programs set.

Every such number has bounds, also if its declaration states none: whole numbers have those of a
32-bit integer, other numbers are finite and fit float32. Texts are converted here, so that numbers
of thousands of digits are refused like other wrong ones.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

from dptrain.errors import shown

MAX_WHOLE = 2**31 - 1
"""Largest whole number; kernels receive sizes as 32-bit integers."""

MAX_REAL = 1e38
"""Largest absolute value of other numbers; float32 ends at 3.4e38."""

MAX_SEED = 2**63 - 1
"""Largest seed; integers of TOML files have 64 bits."""

MAX_BRIGHTNESS, MAX_MIXUP = 100.0, 100.0
"""Largest settings of augmentation: a change of brightness far beyond the pixels, which range from
-1 to 1, and the α of mixup with which nearly all weights are one half."""

MAX_ZOOM = 0.5
"""Largest zoom: images become half as large, or one and a half times."""

MAX_OPERATIONS, MAX_MAGNITUDE = 10, 30.0
"""Most random operations on an image, and their largest magnitude, that of torchvision."""

MAX_DIGITS = 400
"""Longest text of a number. Python converts integers in quadratic time, and refuses 4,301
digits."""

MAX_LAYERS = 3500
"""Most layers of a network; ResNet-1001 has about 3,300. Planning takes more than 1 ms for each
layer."""

MAX_RUNS = 100_000
"""Most launches, seeds, parts or timed steps of an experiment, of which each is recorded."""

KINDS = {int: "a whole number", float: "a number"}
"""Phrases for the numeric types."""


@dataclass(frozen=True)
class Limits:
    """Conditions on a value in addition to its type. None means that there is no such limit."""

    choices: tuple[str, ...] | None = None
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None

    def of(self, kind: type[Any]) -> Limits:
        """Return the limits of a number of a type, which has an upper and a lower one.

        Example:
            >>> str(Limits(at_least=1).of(int))
            'of at least 1 and up to 2,147,483,647'
        """
        if kind not in KINDS:
            return self
        largest = MAX_WHOLE if kind is int else MAX_REAL
        is_open = self.at_most is None and self.below is None
        is_signed = self.at_least is None and self.above is None
        return replace(
            self,
            at_most=largest if is_open else self.at_most,
            at_least=-largest if is_signed else self.at_least,
        )

    def allow(self, value: Any) -> bool:
        """Return True if `value`, which has the right type, is within the limits."""
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return (
            (self.choices is None or value in self.choices)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )

    def __str__(self) -> str:
        phrases = {
            "of at least": self.at_least,
            "above": self.above,
            "below": self.below,
            "up to": self.at_most,
        }
        return " and ".join(
            f"{phrase} {_text(limit)}" for phrase, limit in phrases.items() if limit is not None
        )


ANY = Limits()
"""No limits but those of the type."""


def _text(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"


def convert(text: str, kind: type[Any]) -> Any:
    """Return the number that a text is, of type int or float; None if it is none, or too long."""
    if len(text) <= MAX_DIGITS:
        with suppress(ValueError):
            return kind(text)
    return None


def parse_number(text: str, kind: type[Any], limits: Limits = ANY) -> Any:
    """Return the number that a text is; None if it is no number of the type within the limits.

    Args:
        text: as a user wrote it.
        kind: int or float.
        limits: completed by `Limits.of`.

    Examples:
        >>> parse_number("64", int), parse_number("1e-3", float)
        (64, 0.001)
        >>> parse_number("9" * 400, int), parse_number("nan", float), parse_number("x", int)
        (None, None, None)
    """
    number = convert(text, kind)
    return number if number is not None and limits.of(kind).allow(number) else None


def as_number(value: Any, kind: type[Any]) -> Any:
    """Return a number of NumPy or a whole number as a number of a type; other values as they are.

    A whole number that no float can hold stays what it is, so that a check of the type refuses it.

    Examples:
        >>> as_number(3, float)
        3.0
        >>> as_number(10**400, float) == 10**400
        True
    """
    if type(value) not in (bool, int, float) and isinstance(value, Real):
        value = int(value) if isinstance(value, Integral) else float(value)
    if kind is float and type(value) is int:
        with suppress(OverflowError):
            return float(value)
    return value


def expected_number(kind: type[Any], limits: Limits) -> str:
    """Return a phrase for the numbers of a type within limits.

    Example:
        >>> expected_number(int, Limits(at_least=1, at_most=3))
        'a whole number of at least 1 and up to 3'
    """
    return f"{KINDS[kind]} {limits.of(kind)}".rstrip()


def wrong_number(what: str, text: str, kind: type[Any], limits: Limits) -> str:
    """Return the message for a text that is no number of a type within limits."""
    return f"{what} is '{shown(text)}'; expected {expected_number(kind, limits)}"
