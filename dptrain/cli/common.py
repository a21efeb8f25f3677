"""What commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

STOPPED = 75
"""Exit code of training that a signal ended early, with a checkpoint: EX_TEMPFAIL, try again."""

EXISTING = click.Path(path_type=Path)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


def guarded(action: Callable[[], int]) -> int:
    """Run what needs other ranks so that a failure on one of them ends all, and is said once."""
    from dptrain.comm.abort import guard

    return guard(action)


def examples(*lines: str) -> str:
    """Lines for the end of a help text, kept as they are."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
