"""Results of trials, and commands that run in this process."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.cli.main import run
from dptrain.errors import UserError

LONGEST_MESSAGE = 4000
"""Characters of a line that a person may still read."""


class Verdict(Enum):
    """The result of a trial."""

    COMPARED = "valid and compared"
    REFUSED = "refused in one line"
    ACCEPTED = "damaged but accepted"
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    Attributes:
        verdict: the kind of the result.
        text: the message of a refusal, or the reason of a failure.
    """

    verdict: Verdict
    text: str = ""


COMPARED = Outcome(Verdict.COMPARED)
ACCEPTED = Outcome(Verdict.ACCEPTED)


class WrongResultError(Exception):
    """A result differs from the expected one, or a message is not one line."""


def refused(message: str, *, is_valid: bool = False) -> Outcome:
    """Return the outcome of an input that was refused.

    Raises:
        WrongResultError: the input is valid, or the message is not one line.
    """
    message = message.strip()
    if is_valid:
        raise WrongResultError(f"a valid input is refused: {message}")
    if "\n" in message or not message or len(message) > LONGEST_MESSAGE:
        raise WrongResultError(f"the message is not one line: {message[:LONGEST_MESSAGE]!r}")
    if not message.isprintable():
        raise WrongResultError(f"the message has control characters: {message!r}")
    return Outcome(Verdict.REFUSED, message)


@dataclass(frozen=True)
class Result:
    """What a command wrote, and its exit code."""

    code: int
    output: str
    errors: str

    def refusal(self, *, is_valid: bool = False, lines: int = 1) -> Outcome:
        """Return the outcome of a command that refused its input.

        Args:
            is_valid: the input is valid.
            lines: largest number of lines with errors.

        Raises:
            WrongResultError: as for `refused`.
        """
        found = self.errors.strip().splitlines()
        if len(found) > lines:
            raise WrongResultError(f"{len(found)} lines of errors: {self.errors}")
        return next(refused(line, is_valid=is_valid) for line in found or [""])


def call(*arguments: object, codes: tuple[int, ...] = (0, 2, 3)) -> Result:
    """Run a command of dptrain in this process.

    Args:
        arguments: those after the program's name.
        codes: exit codes that the command may have.

    Raises:
        WrongResultError: the exit code is none of a user's command, or standard error has a line
            that is not dptrain's.
    """
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = run([str(argument) for argument in arguments], is_rank_zero=True)
    result = Result(code, output.getvalue(), errors.getvalue())
    text = f"{' '.join(map(str, arguments))}: exit code {code}: {result.errors}"
    if code not in codes:
        raise WrongResultError(text)
    if any(not line.startswith("dptrain: ") for line in result.errors.splitlines()):
        raise WrongResultError(f"a line on standard error is not dptrain's: {text}")
    return result


@contextlib.contextmanager
def all_warnings() -> Iterator[None]:
    """Print each warning each time, so that a trial does not depend on those before it."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # These do not reach the users of an installed package.
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning):
            warnings.simplefilter("ignore", category)
        warnings.simplefilter("ignore", ResourceWarning)
        yield


def expect(condition: bool, text: str) -> None:
    """Raise `WrongResultError` with a text unless a condition holds."""
    if not condition:
        raise WrongResultError(text)


def expect_close(
    found: NDArray[Any] | float, expected: NDArray[Any] | float, tolerance: float, text: str
) -> None:
    """Raise `WrongResultError` unless two arrays agree; the tolerance is absolute."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    expect(found.shape == expected.shape, f"{text}: shape {found.shape}, not {expected.shape}")
    if not np.allclose(found, expected, rtol=0.0, atol=tolerance, equal_nan=True):
        error = np.abs(found - expected)
        where = np.unravel_index(int(np.nanargmax(error)), error.shape)
        raise WrongResultError(
            f"{text}: {found[where]:.9g} at {tuple(map(int, where))}, expected "
            f"{expected[where]:.9g}; tolerance {tolerance:.3g}"
        )


__all__ = [
    "ACCEPTED", "COMPARED", "Outcome", "Result", "UserError", "Verdict", "WrongResultError",
    "all_warnings", "call", "expect", "expect_close", "refused",
]  # fmt: skip
