"""One line of the report of `dptrain doctor`, and functions that inspect the installation."""

from __future__ import annotations

import importlib.metadata
import subprocess
from dataclasses import dataclass

OK, NOTE, PROBLEM = "ok", "note", "problem"

_TIMEOUT_S = 20.0
"""Time limit of another program."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: what was checked.
        status: ``ok``, ``note`` (training works, but something can be improved) or ``problem``.
        text: what was found.
        advice: what to do about it; "" if nothing needs to be done.
    """

    subject: str
    status: str
    text: str
    advice: str = ""


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution, or ``absent``."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def run_program(*command: str) -> str | None:
    """Return the output of another program; None if it fails or takes longer than 20 s."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
