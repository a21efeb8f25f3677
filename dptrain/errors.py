"""The two ways of failing: a user's mistake is a `UserError`, anything else is a bug."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user can mend: one line that says what, where, what was expected, what to try.

    The command line prints it once and ends with exit code 2.
    """


def suggest(value: str, choices: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` when one of `choices` is close to `value`, else ``""``."""
    close = difflib.get_close_matches(value, list(choices), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
