"""Figures that the studies published, or that their public material contains: a file for each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dptrain.toml import read_toml

FOLDER = Path(__file__).parent


@cache
def published(study: str) -> Mapping[str, Any]:
    """Return the published figures of a study.

    Args:
        study: ``study-a``, ``study-b`` or ``study-d``.

    Raises:
        UserError: there is no such file, or it is not TOML.

    >>> published("study-a")["epoch_s"]["sequential"]
    101.0
    """
    return read_toml(FOLDER / f"{study}.toml")
