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
from dptrain.forms import fitting, read_object
from dptrain.runs.files import FORMS
from dptrain.runs.incidents import read_incidents, summary_line
from dptrain.runs.labels import Labels
from dptrain.runs.names import CONFIG, FAILURE, LOCK, SPECIFICATION, SUMMARY
from dptrain.runs.spans import Span, Spans

Record = dict[str, Any]

ENDED, STOPPED, RUNNING = "ended", "stopped", "running"
DIVERGED, UNFINISHED = "diverged", "unfinished"
"""States of a run: all steps made; stopped by a request; a process trains there; its loss was not
finite; none of these."""

RESULTS = (
    "train_loss",
    "validation_accuracy",
    "validation_loss",
    "test_accuracy",
    "test_loss",
    "samples_per_s",
)
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
        Records with the names ``run`` (its directory), ``started``, ``state``, ``resumed_after``
        (steps), ``resumed``, ``incidents`` (what faults have cost), ``tags``, ``note``, all
        settings, and the results. If a run was resumed with other settings, the settings are those
        of the step whose parameters it kept, ``selected_step``; ``resumed`` states what changed,
        and times are those of ``timed_steps``.

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
    if (folder / CONFIG).is_file() and (folder / SPECIFICATION).is_file():
        yield folder
    elif depth:
        for child in sorted(folder.iterdir()):
            if child.is_dir() and not child.is_symlink():
                with suppress(PermissionError):
                    yield from _runs_below(child, depth - 1)


def read_record(folder: Path) -> Record:
    """Return the record of a run; values that its files do not have are None."""
    spec, summary = (_read(folder, name) for name in (SPECIFICATION, SUMMARY))
    labels = Labels.read(folder)
    spans, selected = read_spans(folder), selected_step(summary)
    span = spans.of_step(selected) or Span(1, {})
    first, last = (spans.items[0], spans.items[-1]) if spans.items else (span, span)
    return {
        "run": str(folder),
        "started": first.environment.get("started"),
        "state": _state(folder, summary),
        "resumed_after": ", ".join(str(span.first_step - 1) for span in spans.items[1:]),
        "resumed": spans.resumes(selected),
        "incidents": _incidents(folder),
        "tags": ",".join(labels.tags),
        "note": labels.note,
        **span.settings,
        "planned_steps": last.settings.get("steps"),
        "steps": summary.get("steps"),
        "selected_step": selected,
        "threads": span.settings.get("threads"),
        "parameters": summary.get("parameters"),
        "memory_bytes": sum((summary.get("memory") or {}).values()) or None,
        **{name: summary.get(name) for name in RESULTS},
        "step_ms": (summary.get("step_ms") or {}).get("mean"),
        "timed_steps": _timed_steps(summary) if spans.is_resumed else None,
        "version": span.environment.get("version"),
        "commit": span.environment.get("commit"),
        "digest": spans.digest,
        "data_digest": spec.get("data", {}).get("content"),
        "host": span.environment.get("host"),
        "cpu": span.environment.get("cpu"),
    }


def _incidents(folder: Path) -> str:
    """Return what faults have cost the run; "" without any."""
    with suppress(UserError):
        return summary_line(read_incidents(folder))
    return ""


def read_spans(folder: Path) -> Spans:
    """Return the spans of a run; none if its files are damaged."""
    with suppress(UserError):
        return Spans.read(folder)
    return Spans(is_complete=False)


def selected_step(summary: Mapping[str, Any]) -> int | None:
    """Return the step of the parameters that a run kept; None if it has not ended."""
    found: int | None = summary.get("selected_step", summary.get("steps"))
    return found


def _timed_steps(summary: Mapping[str, Any]) -> str | None:
    """Return the steps whose times the summary contains, as a text."""
    found = summary.get("timed_steps")
    return None if found is None else "–".join(map(str, found))


def _read(folder: Path, name: str) -> dict[str, Any]:
    """Return what can be read of a file; nothing if it is missing."""
    with suppress(UserError):
        return fitting(read_object(folder / name), FORMS[name])
    return {}


def _state(folder: Path, summary: Mapping[str, Any]) -> str:
    if summary:
        return STOPPED if summary.get("stopped") else ENDED
    if _is_locked(folder / LOCK):
        return RUNNING
    return DIVERGED if _read(folder, FAILURE) else UNFINISHED


def _is_locked(path: Path) -> bool:
    """Return True if a process holds the lock of a run; the lock itself is not touched."""
    layout = "hhqqi"  # struct flock: type, origin, start, length, process
    with suppress(OSError), path.open("rb+") as file:
        query = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(file, fcntl.F_GETLK, query)
        return bool(struct.unpack(layout, answer)[0] != fcntl.F_UNLCK)
    return False
