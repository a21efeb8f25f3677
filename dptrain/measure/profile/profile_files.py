"""Files of a profile: one JSON record, and tables as CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dptrain.errors import UserError
from dptrain.files import csv_of_rows, write_whole, writing
from dptrain.measure.profile.profile import Profile

PROFILE, STAGES, KINDS, RANKS = "profile.json", "profile.csv", "kinds.csv", "ranks.csv"
TRACE, LOSSES = "trace.json", "losses.json"
FLAG = "--output"
"""Flag of the output directory, for error messages."""


def claim(folder: Path) -> None:
    """Create the directory of a new profile.

    Raises:
        UserError: the directory contains a profile or files of one, which are never overwritten,
            or it cannot be created.
    """
    if (folder / PROFILE).exists():
        raise UserError(
            f"{folder} contains a profile, which is never overwritten; choose another --output"
        )
    with writing(folder, FLAG):
        folder.mkdir(parents=True, exist_ok=True)
        for name in (STAGES, KINDS, RANKS, TRACE):
            if (folder / name).exists():
                raise UserError(
                    f"{folder / name} exists without a {PROFILE} and is not overwritten; remove it "
                    f"or choose another {FLAG}"
                )


def write_profile(profile: Profile, folder: Path) -> None:
    """Write `STAGES`, `KINDS` and `RANKS`, then `PROFILE`, which marks a complete profile.

    Raises:
        UserError: a file cannot be written.
    """
    write_whole(folder / STAGES, csv_text([asdict(stage) for stage in profile.stages]), FLAG)
    write_whole(folder / KINDS, csv_text([asdict(kind) for kind in profile.kinds]), FLAG)
    write_whole(folder / RANKS, csv_text([asdict(rank) for rank in profile.ranks]), FLAG)
    profile.write(folder / PROFILE)


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Return records as CSV with a header; nested values have names such as ``time_ms.median``.

    Cells are empty if a record has no value; its nested values may be None as a whole.
    """
    rows = [_flat(record) for record in records]
    names = list(dict.fromkeys(name for row in rows for name in row))
    nested = {name[:i] for name in names for i, letter in enumerate(name) if letter == "."}
    shown = [name for name in names if name not in nested]
    return csv_of_rows([shown, *([row.get(name) for name in shown] for row in rows)])


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{key}": item for key, item in _flat(value).items()})
        else:
            flat[name] = value
    return flat
