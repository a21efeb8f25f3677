"""A line of the doctor's report, and how it asks."""

from __future__ import annotations

import importlib.metadata
import subprocess
from dataclasses import dataclass

OK, NOTE, PROBLEM = "ok", "note", "problem"

_ANSWER_S = 20.0
"""Longest wait for another program's answer."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: what was looked at.
        status: ``ok``, ``note`` (works, but worth knowing) or ``problem``.
        text: what was found.
        advice: what to do about it; "" where there is nothing to do.
    """

    subject: str
    status: str
    text: str
    advice: str = ""


def version_of(distribution: str) -> str:
    """Of an installed distribution, or ``absent``."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def ask(*command: str) -> str | None:
    """Output of another program; None if it fails or is silent for too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
