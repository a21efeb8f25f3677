"""Errors: a mistake that the user can correct is a `UserError`; any other exception is a bug."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

LONGEST_MESSAGE = 3000
"""Characters of a message after which its middle is cut."""


class UserError(ValueError):
    """A mistake that the user can correct: one line with the value found and what to do.

    The command line prints the line once and ends with `exit_code`. Control characters and line
    breaks in the message are escaped, so that text from an input file cannot break the line. The
    middle of a message of more than `LONGEST_MESSAGE` characters is cut.

    Attributes:
        exit_code: 2 for a mistake in the input; a subclass may use 1 for a failure during the run.
    """

    __module__ = "dptrain"  # Tracebacks show the public name.
    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(_shortened(_escape(message)))


class ReadOnlyError(UserError, AttributeError):
    """A program assigned to an attribute that cannot be set; the message says what to use."""

    __module__ = "dptrain"


class ArgumentError(UserError, TypeError):
    """A class was called with arguments that it does not have; the message names those it has."""

    __module__ = "dptrain"


def path_user_error(error: OSError) -> UserError | None:
    """Return an error of one line if the system refuses a path; None for other errors.

    Readers and writers of files report what they expected. This is the line for what no reader
    checks: names that are too long, links that form a cycle, a disk that fails.
    """
    if error.filename is None:
        return None
    reason = error.strerror or str(error)
    return UserError(f"{shown(os.fsdecode(error.filename), 300)} cannot be used: {reason}")


def shown(value: object, limit: int = 80) -> str:
    r"""Return `value` as text for an error message: on one line, escaped and shortened.

    Args:
        value: text, a path, or any object with a string form.
        limit: number of characters after which the text is cut.

    Examples:
        >>> shown("red\n\x1b[31m")
        'red\\n\\x1b[31m'
        >>> shown("ab" * 50_000, limit=5)
        'ababa… (100,000 characters)'
    """
    try:
        text = value if isinstance(value, str) else str(value)
    except ValueError:
        # Python refuses to convert integers of more than 4,300 digits to text.
        text = f"a {type(value).__name__} with a number of thousands of digits"
    escaped = _escape(text[:limit])
    if len(text) <= limit and len(escaped) <= limit:
        return escaped
    return f"{escaped[:limit]}… ({len(text):,} characters)"


def suggest(value: str, choices: Iterable[str], count: int = 1) -> str:
    """Return ``"; did you mean 'x'?"`` if one of `choices` is close to `value`, else ``""``.

    Args:
        value: what was given.
        choices: what is known.
        count: number of close ones that are named at most.

    Example:
        >>> suggest("conv", ["conv1", "conv2", "fc"], count=2)
        "; did you mean 'conv2' or 'conv1'?"
    """
    # The comparison takes quadratic time, and no name is that long.
    similar = [name for name in choices if len(value) <= 200 and _have_similar_lengths(value, name)]
    close = [f"'{name}'" for name in difflib.get_close_matches(value, similar, n=count)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _shortened(message: str) -> str:
    """Cut the middle of a message that no person reads: an input may be repeated in it."""
    removed = len(message) - LONGEST_MESSAGE
    if removed <= 0:
        return message
    tail = LONGEST_MESSAGE // 3
    return f"{message[: 2 * tail]}… ({removed:,} characters) …{message[-tail:]}"


def _have_similar_lengths(value: str, name: str) -> bool:
    """Return True if one text may be the other with errors, or a part of it."""
    longest = max(len(value), len(name))
    return value in name or name in value or abs(len(value) - len(name)) <= max(1, 2 * longest // 5)


def _escape(text: str) -> str:
    """Replace characters that a terminal interprets or that break a line by their escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
