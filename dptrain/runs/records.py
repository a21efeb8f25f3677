"""What is known about a training run: a flat record of settings and results.

A record is a dictionary of plain values, so that ``pandas.DataFrame(dptrain.list_runs())`` makes a
table of all runs.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dptrain.errors import UserError
from dptrain.files import MAX_TEXT_BYTES, parse_json, read_regular
from dptrain.training.labels import Labels
from dptrain.training.rundir import ENVIRONMENT, LOCK, SUMMARY
from dptrain.training.settings import CONFIG_FILE
from dptrain.training.settings import SPECIFICATION_FILE as SPECIFICATION

Record = dict[str, Any]

ENDED, STOPPED, RUNNING, UNFINISHED = "ended", "stopped", "running", "unfinished"
"""States of a run: all steps made; stopped by a request; a process trains there; neither."""

RESULTS = (
    "train_loss", "validation_accuracy", "validation_loss", "test_accuracy", "test_loss",
    "samples_per_s",
)  # fmt: skip
"""Values of ``summary.json`` that a record has, null or missing ones as None."""

DEPTH = 4
"""Folders of runs are found at most this many levels below the folders that are searched."""


def list_runs(
    *folders: str | os.PathLike[str], where: Sequence[str] = (), tags: Sequence[str] = ()
) -> list[Record]:
    """Return a record of each run in some folders, the oldest first.

    Args:
        *folders: run directories, or folders that contain some; ``runs`` if there are none.
        where: conditions such as ``"network=resnet20"`` or ``"test_accuracy>0.98"``; see
            `dptrain.runs.selection`.
        tags: tags that a run must have.

    Returns:
        Records with the names ``run`` (its directory), ``started``, ``state``, ``tags``, ``note``,
        all settings of the job, and the results.

    Raises:
        UserError: a folder does not exist, or a condition is invalid.

    Examples:
        >>> import tempfile
        >>> list_runs(tempfile.mkdtemp())
        []
    """
    from dptrain.runs.selection import select

    paths = [Path(folder) for folder in folders or ("runs",)]
    records = [read_record(path) for path in find_runs(paths)]
    records.sort(key=lambda record: (record["started"] or "", record["run"]))
    return select(records, where, tags)


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """Return the run directories among some folders and below them, each once.

    Raises:
        UserError: a folder does not exist or cannot be read.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        try:
            if not folder.is_dir():
                raise UserError(
                    f"{folder} is not a folder; expected a run directory, or a folder that "
                    "contains some"
                )
            found.update(dict.fromkeys(_runs_below(folder, DEPTH)))
        except OSError as error:
            raise UserError(f"cannot read {folder}: {error.strerror}") from error
    return list(found)


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / CONFIG_FILE).is_file() and (folder / SPECIFICATION).is_file():
        yield folder
    elif depth:
        for child in sorted(folder.iterdir()):
            if child.is_dir() and not child.is_symlink():
                with suppress(PermissionError):
                    yield from _runs_below(child, depth - 1)


def read_record(folder: Path) -> Record:
    """Return the record of a run; values that its files do not have are None."""
    spec, summary, env = (_read(folder / name) for name in (SPECIFICATION, SUMMARY, ENVIRONMENT))
    labels = Labels.read(folder)
    job = _mapping(spec, "job")
    data = _mapping(spec, "data")
    return {
        "run": str(folder),
        "started": env.get("started"),
        "state": _state(folder, summary),
        "tags": ",".join(labels.tags),
        "note": labels.note,
        **job,
        "planned_steps": job.get("steps"),
        "steps": summary.get("steps"),
        "threads": summary.get("threads"),
        "parameters": summary.get("parameters"),
        "memory_bytes": sum(_mapping(summary, "memory").values()) or None,
        **{name: summary.get(name) for name in RESULTS},
        "step_ms": _mapping(summary, "step_ms").get("median"),
        "version": spec.get("version"),
        "commit": env.get("commit"),
        "digest": spec.get("digest"),
        "data_digest": data.get("content"),
        "host": env.get("host"),
        "cpu": env.get("cpu"),
    }


def _mapping(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name)
    return dict(found) if isinstance(found, Mapping) else {}


def _read(path: Path) -> dict[str, Any]:
    """Return the values of a JSON file; none if it is missing or damaged."""
    with suppress(OSError, ValueError):
        found = parse_json(read_regular(path, MAX_TEXT_BYTES))
        if isinstance(found, dict):
            return found
    return {}


def _state(folder: Path, summary: Mapping[str, Any]) -> str:
    if summary:
        return STOPPED if summary.get("stopped") else ENDED
    return RUNNING if _is_locked(folder / LOCK) else UNFINISHED


def _is_locked(path: Path) -> bool:
    """Return True if a process holds the lock of a run; the lock itself is not touched."""
    layout = "hhqqi"  # struct flock: type, origin, start, length, process
    with suppress(OSError), path.open("rb+") as file:
        query = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(file, fcntl.F_GETLK, query)
        return bool(struct.unpack(layout, answer)[0] != fcntl.F_UNLCK)
    return False
